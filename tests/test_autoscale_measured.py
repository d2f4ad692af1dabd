"""The autoscaler's simulator against what real replicas did: within 20%."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import simulator_check

LOOPS = simulator_check.loops()


def test_there_are_loops_of_small_and_large_models() -> None:
    assert len(LOOPS) >= 15 and len({loop.name.partition(",")[0] for loop in LOOPS}) >= 8


@pytest.mark.parametrize("loop", LOOPS, ids=[loop.name for loop in LOOPS])
def test_requests_a_second_of_a_full_gpu(loop: simulator_check.Loop) -> None:
    """On H200s, between one request at a time and the widest loop, which say what the replica can."""
    assert simulator_check.looped(loop) == pytest.approx(loop.requests_s, rel=0.2)


PROCESSOR, GPU = simulator_check.points()


def test_arrivals_at_real_vllm_on_a_gpu() -> None:
    """Below the knee, over it, and a step: promises, speed, the queue and the time until it is empty."""
    assert [point.name for point in GPU.points] == list(simulator_check.SHAPES)
    for point in GPU.points:
        found, measured = simulator_check.simulated(GPU, point), point.measured
        assert found.requests == measured.requests
        for name in ("attainment", "output_tokens_s", "in_flight", "waiting_at_end", "drain_s"):
            assert getattr(found, name) == pytest.approx(getattr(measured, name), rel=0.2), (point.name, name)


def test_arrivals_at_real_vllm_on_a_processor() -> None:
    """Its rates moved by a quarter during the recording, so that what a queue did is shown and not judged
    (docs/measurements/autoscaling.md); tokens/s are, and first tokens below the knee."""
    assert [point.name for point in PROCESSOR.points] == list(simulator_check.SHAPES)
    for point in PROCESSOR.points:
        found = simulator_check.simulated(PROCESSOR, point)
        assert found.output_tokens_s == pytest.approx(point.measured.output_tokens_s, rel=0.2)
        assert found.requests == point.measured.requests
        if point.name in ("half", "near"):
            assert found.attainment == pytest.approx(point.measured.attainment, rel=0.02)
            assert found.waiting_at_end == point.measured.waiting_at_end == 0
        else:
            assert max(found.attainment, point.measured.attainment) < 0.5 and found.waiting_at_end > 0
