"""How this machine reaches the gateways of a run: at their own addresses, or through a tunnel of its target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock import targets
from penstock.deployment.observe import gateways
from penstock.run_folder import Run
from penstock.targets.tunnel import local_port
from penstock.wire.announcement import GatewayAddress
from penstock.wire.client import Client


def shown_url(run: Run) -> str | None:
    """The gateway's address for people, also one behind a login; None while it is not known."""
    behind = _behind_login(run)
    return run.known_url if behind is None else behind.login_url


def shown_page_url(run: Run) -> str | None:
    """The chat page's address behind a login; None where there is none."""
    behind = _behind_login(run)
    return None if behind is None else behind.login_page_url


def login(run: Run) -> str | None:
    """What asks for a login in front of these addresses, and how a client gets past it; None where nothing does."""
    behind = _behind_login(run)
    return None if behind is None else behind.login


def _behind_login(run: Run) -> GatewayAddress | None:
    if run.known_url is None or not run.places("gateway"):
        return None
    address = run.gateway_address()
    return address if address.login is not None else None


@contextlib.contextmanager
def url(run: Run) -> Iterator[str]:
    """Where clients call it, for as long as the block lasts.  Raises PenstockError."""
    if run.public_url is not None or not needs_tunnel(run):
        yield run.url
        return
    with targets.load(run.record().target).tunnel(run, local_port(None)) as tunnel:
        yield tunnel.url


@contextlib.contextmanager
def monitors(run: Run, timeout_s: float) -> Iterator[list[Client]]:
    """Clients of what watchers read (/metrics, /dashboard/live), one for each gateway; a tunnel leads to one of them.

    Raises PenstockError.
    """
    if not needs_tunnel(run):
        yield gateways(run, timeout_s)
        return
    with url(run) as address:
        yield [Client(address, run.scrape_key(), timeout_s)]


def needs_tunnel(run: Run) -> bool:
    """Whether its admin address is one of another network."""
    return "tunnels" in targets.load(run.record().target).capabilities
