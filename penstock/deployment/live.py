"""What the gateways of a run show of it now: one snapshot, or an endless stream of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from penstock.deployment.reachable import monitors
from penstock.errors import PenstockError
from penstock.run_folder import Run
from penstock.wire.client import Client
from penstock.wire.gateways import ask_each
from penstock.wire.live import N_SLOW, History, Rates, ReplicaLive, Snapshot

_PATH = "/dashboard/live"
_ONCE_S = 3.0
_SILENT_S = 10.0  # a snapshot comes each second
_AGAIN_S = 1.0
# What each gateway counts of its own requests; of the rest all know the same.
_ADDED = ("requests_per_s", "errors_per_s", "in_flight", "waiting")
_WORST = ("ttft_s_p50", "ttft_s_p99", "itl_s_p50", "itl_s_p99")


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
        return PenstockError(
            f'cannot read what the gateway of "{run.name}" shows: it is of another version', detail=str(exc)
        )
    return PenstockError(
        f'no gateway of "{run.name}" answers',
        detail=str(exc),
        hint=f"See what it does: penstock status {run.name}",
        is_retryable=True,
    )


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
