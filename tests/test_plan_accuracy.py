"""The plan's memory beside stored start-up logs: the bars hold, and what misses one is listed with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from plan_shapes import benchmark

from penstock.hardware import catalog
from penstock.models import catalog as models_catalog
from penstock.planner.request import SizingRequest

plan_memory = benchmark("plan_memory")
SECTIONS = plan_memory.starts()
EVERY = [start for listed in SECTIONS.values() for start in listed]


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    return {start.id: plan_memory.judge(start) for start in EVERY}


def test_every_start_meets_its_bars_or_is_a_known_miss(judged: dict[str, Any]) -> None:
    """A start that meets every bar leaves KNOWN_MISSES; one that misses a bar needs a reason there."""
    assert {name for name, found in judged.items() if found.misses} == set(plan_memory.KNOWN_MISSES)


@pytest.mark.parametrize(("use", "most"), [("held out", 0.02), ("tuned", 0.01)])
def test_the_median_error_of_the_kv_cache_is_small(judged: dict[str, Any], use: str, most: float) -> None:
    assert plan_memory.median_kv_error([judged[start.id] for start in EVERY if start.use == use]) < most


def test_every_block_and_token_follows_from_the_logged_memory(judged: dict[str, Any]) -> None:
    exact = {name: found.is_exact for name, found in judged.items() if found.is_exact is not None}
    assert all(exact.values()), exact
    assert len(exact) >= 22


def test_the_logged_parts_of_the_overhead_are_near_the_likely_ones(judged: dict[str, Any]) -> None:
    """Of dense models: the buffers of mixtures are shown with the activations, and logged elsewhere."""
    errors = []
    for start in (start for start in SECTIONS["own"] if "a3b" not in start.id):
        found, name = judged[start.id], start.id
        memory, said = found.answer.memory, start.said
        pairs = ((memory.activation_gib, said.activation_gib), (memory.cuda_graph_gib, said.graphs_gib))
        errors += [(part.likely / logged - 1, name) for part, logged in pairs if logged is not None]
    assert len(errors) >= 14
    assert max(abs(error) for error, _ in errors) < 0.25, errors


def test_the_data_is_well_formed() -> None:
    assert len({start.id for start in EVERY}) == len(EVERY)
    assert {start.use for start in EVERY} == {"held out", "tuned"} and set(SECTIONS) == {"public", "own"}
    for start in EVERY:
        assert catalog.gpu(start.gpu).id in catalog.gpu_ids() and models_catalog.find(start.model), start.id
        assert set(start.asked) <= set(SizingRequest.__struct_fields__), start.id


def test_the_page_is_what_the_benchmark_writes(judged: dict[str, Any]) -> None:
    sections = {name: [judged[start.id] for start in listed] for name, listed in SECTIONS.items()}
    assert plan_memory.PAGE.read_text("utf-8") == plan_memory.page(sections), (
        "python -m benchmarks.plan_memory --write-docs"
    )
