"""The plan's memory beside stored start-up logs: the bars hold, and what misses one is listed with its reason."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.hardware import catalog
from penstock.models import catalog as models_catalog
from penstock.planner.request import SizingRequest


def _benchmark() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "plan_memory.py"
    found = importlib.util.spec_from_file_location("plan_memory", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["plan_memory"] = module  # msgspec looks the annotations up there
    found.loader.exec_module(module)
    return module


plan_memory = _benchmark()
SECTIONS = plan_memory.starts()
EVERY = [one for listed in SECTIONS.values() for one in listed]


@functools.cache
def judged(name: str) -> Any:
    return plan_memory.judge(next(one for one in EVERY if one.id == name))


@pytest.mark.parametrize("start", EVERY, ids=lambda start: start.id)
def test_a_start_meets_its_bars_or_is_a_known_miss(start: Any) -> None:
    missed = judged(start.id).misses
    if start.id in plan_memory.KNOWN_MISSES:
        assert missed, "it meets every bar now: take it off KNOWN_MISSES"
    else:
        assert not missed, f"misses {missed}; KNOWN_MISSES needs a reason"


def test_known_misses_are_starts() -> None:
    assert set(plan_memory.KNOWN_MISSES) <= {one.id for one in EVERY}


@pytest.mark.parametrize(("use", "most"), [("held out", 0.02), ("tuned", 0.01)])
def test_the_median_error_of_the_kv_cache_is_small(use: str, most: float) -> None:
    found = [judged(one.id) for one in EVERY if one.use == use]
    assert plan_memory.median_kv_error(found) < most


def test_every_block_and_token_follows_from_the_logged_memory() -> None:
    found = {one.id: judged(one.id).is_exact for one in EVERY}
    assert [name for name, is_exact in found.items() if is_exact is False] == []
    assert sum(is_exact is True for is_exact in found.values()) >= 25


def test_the_data_is_well_formed() -> None:
    assert len({one.id for one in EVERY}) == len(EVERY)
    assert {one.use for one in EVERY} == {"held out", "tuned"}
    for start in EVERY:
        assert catalog.gpu(start.gpu).id in catalog.gpu_ids() and models_catalog.has_model(start.model), start.id
        assert set(start.asked) <= set(SizingRequest.__struct_fields__), start.id
    assert list(yaml.safe_load(Path(plan_memory.LOGS).read_text("utf-8"))) == ["public", "own"]


def test_the_page_is_what_the_benchmark_writes() -> None:
    sections = {name: [judged(one.id) for one in listed] for name, listed in SECTIONS.items()}
    assert plan_memory.PAGE.read_text("utf-8") == plan_memory.page(sections), (
        "python -m benchmarks.plan_memory --write-docs"
    )
