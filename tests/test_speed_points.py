"""The planner against published latencies (benchmarks/data/speed_points.yaml): the medians must not get worse."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_speed", ROOT / "benchmarks" / "plan_speed.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(("what", "most"), [("TPOT", 0.25), ("TTFT", 0.35)])
@pytest.mark.parametrize("split", ["tuned", "held_out"])
def test_the_median_error_over_published_points(what: str, most: float, split: str) -> None:
    bench = module()
    points, formats = bench.load()
    number = what.lower()
    some = [point for point in points if point.split == split and getattr(point, number)]
    rows = [row for row in bench.rows_of(some, formats) if row.what == what]
    assert len(rows) > 10 and bench.median(rows) <= most


def test_every_point_says_where_it_is_from() -> None:
    points, _ = module().load()
    assert len({(one.source, one.split) for one in points}) == len({one.source for one in points})
    assert all(one.url.startswith("https://") or one.url == "own" for one in points)
    assert all(one.split in ("tuned", "held_out") and (one.ttft or one.tpot) for one in points)


def test_the_page_has_every_number() -> None:
    bench = module()
    points, formats = bench.load()
    rows = bench.rows_of(points[:3], formats)
    assert bench.page(rows).count("| gpt-oss-120b |") == 3
