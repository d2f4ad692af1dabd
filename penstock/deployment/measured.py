"""What engines reported of their memory, for the next plan: measured/<key>/TP4-PP1-DP1.json in the penstock home."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock import paths
from penstock.planner import Key, Plan
from penstock.planner.memory.measured import MemoryMeasurement
from penstock.spec.deployment import Parallel


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
    name = f"TP{cut.tensor}-PP{cut.pipeline}-DP{cut.data}{'-EP' if cut.expert else ''}.json"
    path = _folder(forecast.key) / name
    if measurement.consumed_gib is None and path.exists():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    paths.write_atomically(path, msgspec.json.format(msgspec.json.encode(measurement), indent=2))
    return path


def _folder(key: Key) -> Path:
    return paths.home() / "measured" / key.name
