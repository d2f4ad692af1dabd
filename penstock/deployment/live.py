"""How this machine reaches the gateways of a run, and what they show now: a snapshot, a stream of them, requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock import targets
from penstock.deployment.observe import gateways
from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting.access_log import MAX_KEPT, Line
from penstock.run_folder import Run
from penstock.spec.gateway import STDERR
from penstock.targets.tunnel import local_port
from penstock.wire.client import Client
from penstock.wire.gateways import ask_each
from penstock.wire.live import N_SLOW, History, Rates, ReplicaLive, Snapshot

_PATH = "/dashboard/live"
_ONCE_S = 3.0
_SILENT_S = 10.0  # a snapshot comes each second
_AGAIN_S = 1.0
_TAIL_BYTES = 4 * 2**20  # of one access log: some 10,000 lines
# What each gateway counts of its own requests; of the rest all know the same.
_ADDED = ("requests_per_s", "errors_per_s", "in_flight", "waiting")
_WORST = ("ttft_s_p50", "ttft_s_p99", "itl_s_p50", "itl_s_p99")


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


def snapshot(run: Run) -> Snapshot:
    """The deployment now, all gateways together. Blocks for a few seconds at most, with a tunnel for some more.

    Raises a PenstockError, which is retryable, when no gateway answers.
    """
    try:
        with monitors(run, _ONCE_S) as gateways:
            return joined([msgspec.convert(answer, Snapshot) for answer in ask_each(gateways, _get_once)])
    except (PenstockError, msgspec.MsgspecError) as exc:
        raise _explain(run, exc) from exc


def follow(run: Run, sleep: Callable[[float], None] = time.sleep) -> Iterator[History | Snapshot]:
    """A History and then a Snapshot each second, without an end; both again after it connected again.

    With several gateways the history is that of one. Raises a PenstockError when no gateway answers.
    """
    while True:
        has_begun = False
        try:
            for item in _read(run):
                yield item
                has_begun = True
        except (PenstockError, msgspec.MsgspecError) as exc:
            if not has_begun:
                raise _explain(run, exc) from exc
        sleep(_AGAIN_S)  # a gateway that stops ends its streams: another one takes its place


def _read(run: Run) -> Iterator[History | Snapshot]:
    with monitors(run, _SILENT_S) as several:
        if len(several) > 1:
            several = ask_each(several, lambda gateway: (_get_once(gateway), gateway)[1])
        first, *others = several
        for event in first.get_events(_PATH):
            if event.name == "history":
                yield msgspec.json.decode(event.data, type=History)
            elif event.name == "snapshot":
                own = msgspec.json.decode(event.data, type=Snapshot)
                yield joined([own, *_ask(others)]) if others else own


def _ask(several: Sequence[Client]) -> list[Snapshot]:
    try:
        return [msgspec.convert(answer, Snapshot) for answer in ask_each(several, _get_once)]
    except PenstockError:  # they are gone; the first one would not be asked if it were
        return []


def _get_once(gateway: Client) -> object:
    return gateway.get_json(f"{_PATH}?once")


def _explain(run: Run, exc: Exception) -> PenstockError:
    if isinstance(exc, msgspec.MsgspecError):
        message = f'cannot read what the gateway of "{run.name}" shows: it is of another version'
        return PenstockError(message, detail=str(exc))
    hint = f"See what it does: penstock status {run.name}"
    return PenstockError(f'no gateway of "{run.name}" answers', detail=str(exc), hint=hint, is_retryable=True)


def joined(snapshots: Sequence[Snapshot]) -> Snapshot:
    """One of several gateways that know the same replicas: requests add up, of quantiles the worst counts. Pure."""
    first = snapshots[0]
    if len(snapshots) == 1:
        return first
    rows: dict[str, list[ReplicaLive]] = {}
    for each in snapshots:
        for row in each.replicas:
            rows.setdefault(row.replica, []).append(row)
    keys = tuple(key for each in snapshots for key in each.keys)
    slow = sorted((row for each in snapshots for row in each.slow), key=lambda row: -row.duration_s)
    replicas = tuple(
        msgspec.structs.replace(several[0], in_flight=sum(row.in_flight for row in several), **_worst(several))
        for several in rows.values()
    )
    every = [each.now for each in snapshots]
    sums = {field: sum(getattr(rates, field) for rates in every) for field in _ADDED}
    now = msgspec.structs.replace(first.now, **sums, **_worst(every))
    return msgspec.structs.replace(first, now=now, replicas=replicas, keys=keys, slow=tuple(slow[:N_SLOW]))


def _worst(rows: Sequence[Rates] | Sequence[ReplicaLive]) -> dict[str, float | None]:
    values = {field: [getattr(row, field) for row in rows] for field in _WORST}
    return {field: max((n for n in column if n is not None), default=None) for field, column in values.items()}


def newest_requests(run: Run, n_requests: int) -> list[Line]:
    """The newest last. Raises UserError where there is no access log that can be read here."""
    place = run.deployment().gateway.access_log
    if place is None:
        raise UserError(
            f'deployment "{run.name}" has no access log',
            hint="Set gateway.access_log to a file, then `penstock up --replace`; --slow needs none.",
        )
    if place == STDERR:
        hint = f"penstock logs {run.name} --part gateway"
        raise UserError(f'the access log of "{run.name}" is in its gateway\'s log', hint=hint)
    path = Path(place).expanduser().resolve()
    lines: list[Line] = []
    for file in (path, *(Path(f"{path}.{number}") for number in range(1, MAX_KEPT + 1))):
        if len(lines) >= n_requests or not file.exists():
            break
        lines = [*_last_lines(file), *lines]
    if not lines and not path.exists():
        raise UserError(
            f'cannot read access log "{path}": it is not on this machine', hint="It is where the gateway is."
        )
    return lines[-n_requests:] if n_requests else []


def _last_lines(file: Path) -> list[Line]:
    """The whole lines at the end of a file; those that a full disk tore are left out."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _TAIL_BYTES))
        whole = stream.read().split(b"\n")[size > _TAIL_BYTES :]
    lines = []
    for text in whole:
        try:
            lines.append(msgspec.json.decode(text, type=Line))
        except msgspec.DecodeError:
            continue
    return lines
