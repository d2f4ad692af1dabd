"""How this machine reaches the gateways of a run: at their own addresses, or through a tunnel of its target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from penstock import targets
from penstock.deployment.observe import gateways
from penstock.run_folder import Run
from penstock.targets.tunnel import local_port
from penstock.wire.client import Client


class Shown(NamedTuple):
    """Addresses for people: the gateway's (None while it is not known), and the chat page's where it has a login.

    `login`: what asks for one, and how a client gets past it; None where nothing does.
    """

    url: str | None
    page_url: str | None = None
    login: str | None = None


def shown(run: Run) -> Shown:
    url = run.known_url
    address = run.gateway_address() if url is not None and run.places("gateway") else None
    if address is None or address.login is None:
        return Shown(url)
    return Shown(address.login_url, address.login_page_url, address.login)


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
