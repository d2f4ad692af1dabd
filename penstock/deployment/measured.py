"""What earlier starts measured, for the next plan: memory in measured/<key>/TP4-PP1-DP1.json of the penstock home, and
how long they took in measured/starts/<key>.json."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock import paths
from penstock.planner import Key, Plan
from penstock.planner.memory.measured import MemoryMeasurement
from penstock.planner.ranges import Range
from penstock.planner.request import StartTime
from penstock.spec.deployment import Parallel
from penstock.text import show_seconds
from penstock.wire.announcement import Announcement

_KEPT = 20  # starts of a key


def read(key: Key) -> tuple[dict[Parallel, MemoryMeasurement], tuple[str, ...]]:
    """The measured starts of a key, by layout, and a warning for each damaged file, which is left out."""
    starts, warnings = {}, []
    for path in sorted(_folder(key).glob("*.json")):
        try:
            measurement = msgspec.json.decode(path.read_bytes(), type=MemoryMeasurement)
        except (OSError, ValueError, msgspec.MsgspecError) as exc:
            warnings.append(f"measured values in {path} cannot be read and were left out: {exc}")
            continue
        if measurement.key == key:
            starts[measurement.layout] = measurement
    return starts, tuple(warnings)


def keep(plan: Plan, reported: Mapping[str, float], now: float) -> Path | None:
    """Keep what a plan's engine reported, in place of an earlier start; None when there is nothing to keep: an engine
    that took the size of its KV cache from an earlier start measures nothing, and does not replace what that measured.
    `now` is in Unix seconds. Raises OSError."""
    forecast, kv_cache_gib = plan.forecast, reported.get("kv_cache_gib")
    if forecast is None or kv_cache_gib is None:
        return None
    tokens = reported.get("kv_cache_tokens")
    measurement = MemoryMeasurement(
        key=forecast.key,
        layout=plan.layout,
        day=time.strftime("%Y-%m-%d", time.gmtime(now)),
        kv_cache_gib=kv_cache_gib,
        planned_kv_gib=forecast.kv_cache_gib,
        tokens=None if tokens is None else int(tokens),
        max_concurrency=reported.get("concurrency"),
        weights_gib=reported.get("weights_gib"),
        consumed_gib=reported.get("consumed_gib"),
        peak_gib=reported.get("peak_gib"),
        graphs_gib=reported.get("graphs_gib", 0.0),
    )
    cut = plan.layout
    path = _folder(forecast.key) / f"TP{cut.tensor}-PP{cut.pipeline}-DP{cut.data}{'-EP' if cut.expert else ''}.json"
    if measurement.consumed_gib is None and path.exists():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    paths.write_atomically(path, msgspec.json.format(msgspec.json.encode(measurement), indent=2))
    return path


def _folder(key: Key) -> Path:
    return paths.home() / "measured" / key.name


# ---- how long starts took -------------------------------------------------------------------------------------------


class StartKey(msgspec.Struct, frozen=True):
    """What a start's time depends on most. `model`: a fingerprint or a name; `gpu`: of the catalogue, or the device."""

    model: str
    engine: str
    engine_version: str
    gpu: str
    layout: Parallel


class Start(msgspec.Struct, frozen=True):
    """`at`: when it began (Unix seconds). `stages`: its seconds by stage."""

    at: float
    replica: str
    ready_after_s: float
    stages: dict[str, float]


class Starts(msgspec.Struct, frozen=True):
    """The newest starts of a key, the newest last."""

    key: StartKey
    starts: tuple[Start, ...] = ()


def start_key(plan: Plan) -> StartKey:
    if plan.forecast is not None:
        return planned_key(plan.forecast.key, plan.layout)
    return StartKey(plan.model.reference, plan.engine, plan.engine_version, plan.device, plan.layout)


def planned_key(key: Key, layout: Parallel) -> StartKey:
    """Of vLLM on the GPUs of a memory measurement's key."""
    return StartKey(key.model, "vllm", key.engine_version, key.gpu, layout)


def keep_start(plan: Plan, announcement: Announcement) -> None:
    """Add the start that made a replica ready; one that is there already is not added again.  Raises OSError."""
    at, after_s = announcement.started_at, announcement.ready_after_s
    if at is None or after_s is None:
        return
    key = start_key(plan)
    before = _starts(key)
    if any((start.at, start.replica) == (at, announcement.replica) for start in before):
        return
    starts = (*before, Start(at, announcement.replica, after_s, announcement.start_s))[-_KEPT:]
    path = _starts_file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    paths.write_atomically(path, msgspec.json.format(msgspec.json.encode(Starts(key, starts)), indent=2))


def expected(key: StartKey) -> StartTime | None:
    """The median of the kept starts, with the shortest and the longest; None before the first."""
    seconds = [start.ready_after_s for start in _starts(key)]
    if not seconds:
        return None
    return StartTime(Range(min(seconds), statistics.median(seconds), max(seconds)), len(seconds))


def expected_s(key: StartKey, share: float) -> float | None:
    """Within how many seconds this share of the kept starts was over; None before the first."""
    seconds = sorted(start.ready_after_s for start in _starts(key))
    return seconds[min(len(seconds) - 1, int(share * len(seconds)))] if seconds else None


def show_start(time: StartTime) -> str:
    """ "starts in about 1m02s (50.0 s to 1m20s), as measured 3 times"; an estimate."""
    low, likely, high = (show_seconds(value) for value in (time.seconds.low, time.seconds.likely, time.seconds.high))
    times = "once" if time.n_starts == 1 else f"{time.n_starts} times"
    return f"starts in about {likely}" + (f" ({low} to {high})" if low != high else "") + f", as measured {times}"


def _starts(key: StartKey) -> tuple[Start, ...]:
    """None of a file that is absent, damaged or of another key: the next start writes it again."""
    try:
        kept = msgspec.json.decode(_starts_file(key).read_bytes(), type=Starts)
    except (OSError, ValueError, msgspec.MsgspecError):
        return ()
    return kept.starts if kept.key == key else ()


def _starts_file(key: StartKey) -> Path:
    name = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:20]
    return paths.home() / "measured" / "starts" / f"{name}.json"
