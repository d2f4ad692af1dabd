"""The planner against published latencies (benchmarks/data/speed_points.yaml): the medians must not get worse."""

from __future__ import annotations

import pytest
from plan_shapes import benchmark

plan_speed = benchmark("plan_speed")


@pytest.mark.parametrize(("what", "most"), [("TPOT", 0.1), ("TTFT", 0.2)])
@pytest.mark.parametrize("split", ["tuned", "held_out"])
def test_the_median_error_over_published_points(what: str, most: float, split: str) -> None:
    points, formats = plan_speed.load()
    number = what.lower()
    some = [point for point in points if point.split == split and getattr(point, number)]
    rows = [row for row in plan_speed.rows_of(some, formats) if row.what == what]
    assert len(rows) > 10 and plan_speed.median(rows) <= most


def test_every_point_says_where_it_is_from() -> None:
    points, _ = plan_speed.load()
    assert len({(one.source, one.split) for one in points}) == len({one.source for one in points})
    assert all(one.url.startswith("https://") or one.url == "own" for one in points)
    assert all(one.split in ("tuned", "held_out") and (one.ttft or one.tpot) for one in points)


def test_the_page_has_every_number() -> None:
    points, formats = plan_speed.load()
    rows = plan_speed.rows_of(points[:3], formats)
    assert plan_speed.page(rows).count("| gpt-oss-120b |") == 3
