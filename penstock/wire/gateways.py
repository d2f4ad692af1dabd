"""Calls to the admin port of every gateway of a deployment: one host name may stand for several."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from penstock.errors import PenstockError
from penstock.wire.announcement import GatewayView, ReplicaView
from penstock.wire.client import Client

T = TypeVar("T")


def clients(url: str, api_key: str, timeout_s: float) -> list[Client]:
    """A client for each address of the URL's host, in their order: several addresses are several gateways.

    Raises a PenstockError that is retryable when the name has no address now.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise PenstockError(f'could not find the address of "{host}": {exc.strerror}', is_retryable=True) from exc
    # Not both families: "localhost" has an address in each, and is one gateway.
    family = socket.AF_INET if any(row[0] == socket.AF_INET for row in rows) else socket.AF_INET6
    addresses = sorted({str(row[4][0]) for row in rows if row[0] == family})
    return [Client(f"http://{f'[{a}]' if ':' in a else a}:{port}", api_key, timeout_s) for a in addresses]


def ask_each(gateways: Sequence[Client], call: Callable[[Client], T]) -> list[T]:
    """The answers of those that answer, in their order; all are asked at the same time.

    Raises the last error when none answers.
    """
    if len(gateways) == 1:
        return [call(gateways[0])]
    with ThreadPoolExecutor(max(1, len(gateways))) as pool:
        futures = [pool.submit(call, gateway) for gateway in gateways]
    errors = [future.exception() for future in futures]
    answers = [future.result() for future, error in zip(futures, errors, strict=True) if error is None]
    if not answers:
        raise next((error for error in reversed(errors) if error), PenstockError("there is no gateway"))
    return answers


def post_each(gateways: Sequence[Client], path: str, body: object) -> Any:
    """As `ask_each`, with POST: the first answer."""
    return ask_each(gateways, lambda gateway: gateway.post_json(path, body))[0]


def joined(views: Sequence[GatewayView]) -> GatewayView:
    """One view of several gateways that know the same replicas: requests add up. Pure."""
    rows: dict[str, ReplicaView] = {}
    for row in (row for view in views for row in view.replicas):
        before = rows.get(row.announcement.replica)
        if before is None:
            rows[row.announcement.replica] = row
            continue
        newest = min(before, row, key=lambda view: view.age_s)
        rows[row.announcement.replica] = msgspec.structs.replace(
            newest,
            is_alive=before.is_alive or row.is_alive,
            is_draining=before.is_draining and row.is_draining,
            in_flight=before.in_flight + row.in_flight,
            is_ejected=before.is_ejected and row.is_ejected,
        )
    totals = {
        field: sum(getattr(view, field) for view in views) for field in ("in_flight_total", "waiting", "requests_total")
    }
    counts = tuple(row for view in views for row in view.counts)
    return GatewayView(tuple(rows[name] for name in sorted(rows)), **totals, counts=counts)
