"""The planner's figures beside what was measured. Pure.

What is read is `speed` of `penstock plan --json`: ranges (low, likely, high) for the prompt, answer and concurrency
that it was asked about, to be held against a closed loop of that concurrency. A run of a deployment on GPUs has those
of its own load among its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.bench.record import Result

# The planner's name -> the benchmark's (means, as the planner predicts), and the unit.
_PAIRS = (
    ("ttft_ms", "mean_ttft_ms", "mean TTFT, ms"),
    ("tpot_ms", "mean_tpot_ms", "mean TPOT, ms"),
    ("output_tokens_per_s", "output_throughput", "output tokens/s"),
    ("requests_per_s", "request_throughput", "requests/s"),
)


class Pair(msgspec.Struct, frozen=True):
    """One number: the planner's range, and the measured value."""

    words: str
    low: float
    likely: float
    high: float
    measured: float

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def off(self) -> float:
        """How far the likely value is from the measured one: 0.1 is a tenth too high."""
        return self.likely / self.measured - 1 if self.measured else 0.0


def pairs(run: Result, plan: Mapping[str, Any] | None = None) -> list[Pair]:
    """What `plan`, or else the run's own prediction, said of it; empty when it told no speed."""
    speed = plan.get("speed") if plan else run.summary.get("predicted")
    found = []
    for name, measured_name, words in _PAIRS:
        told = speed.get(name) if isinstance(speed, Mapping) else None
        measured = run.number(measured_name)
        if isinstance(told, Mapping) and measured is not None:
            low, likely, high = (told.get(key) for key in ("low", "likely", "high"))
            if low is not None and likely is not None and high is not None:
                found.append(Pair(words, float(low), float(likely), float(high), measured))
    return found
