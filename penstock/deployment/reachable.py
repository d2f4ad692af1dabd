"""How this machine reaches the gateways of a run: at their own addresses, or through a tunnel of its target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock import targets
from penstock.deployment.observe import gateways
from penstock.run_folder import Run
from penstock.targets.tunnel import local_port
from penstock.wire.announcement import engine_key, scrape_key
from penstock.wire.client import Client


@contextlib.contextmanager
def url(run: Run) -> Iterator[str]:
    """Where clients call it, for as long as the block lasts.  Raises PenstockError."""
    if run.public_url is not None or not needs_tunnel(run):
        yield run.url
        return
    with targets.load(run.record().target).tunnel(run, local_port(None)) as tunnel:
        yield tunnel.url


@contextlib.contextmanager
def monitors(run: Run, timeout_s: float | None = None) -> Iterator[list[Client]]:
    """Clients of what watchers read (/metrics, /dashboard/live), one for each gateway; a tunnel leads to one of them.

    Raises PenstockError.
    """
    several = [] if needs_tunnel(run) else gateways(run)
    with contextlib.ExitStack() as stack:
        if not several:
            key = scrape_key(engine_key(run.admin_token()))
            several = [Client(stack.enter_context(url(run)), key)]
        yield several if timeout_s is None else [Client(each.base_url, each.api_key, timeout_s) for each in several]


def needs_tunnel(run: Run) -> bool:
    """Whether its admin address is one of another network."""
    return "tunnels" in targets.load(run.record().target).capabilities
