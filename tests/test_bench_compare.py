"""Comparisons: intervals as scipy's bootstrap gives them, right about noise and about change, unlike runs named."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_samples import write_run

from penstock.bench.results import bootstrap, compare, folder
from penstock.errors import UserError

# Intervals of scipy 1.17.1 for the values below: `stats.bootstrap` of the difference, method="percentile", rng=1; 800
# resamples.
SCIPY = {0.5: (0.547041, 2.117233), 0.9: (-0.409457, 3.266273), 0.99: (-6.551423, 4.138118)}


@pytest.mark.parametrize("share", SCIPY)
def test_the_interval_of_a_quantile_is_about_scipys_bootstrap(share: float) -> None:
    rng = np.random.default_rng(4)
    a, b = rng.lognormal(3, 0.4, 1200), rng.lognormal(3.05, 0.4, 1200)
    ours, (low, high) = bootstrap.quantile_difference(a.tolist(), b.tolist(), share), SCIPY[share]
    width = high - low  # ours is wider: how independent the values are comes from a few batches
    assert ours is not None and 0.9 * width < ours.high - ours.low < 1.6 * width
    assert (ours.low + ours.high) / 2 == pytest.approx((low + high) / 2, abs=0.3 * width)


def waits(rng: random.Random, n: int, load: float) -> list[float]:
    """Times in a queue with one server, of requests in order of arrival."""
    times, wait = [], 0.0
    for _ in range(n):
        service = rng.expovariate(1)
        times.append(wait + service)
        wait = max(0.0, wait + service - rng.expovariate(load))
    return times


@pytest.mark.parametrize("load", [0.0001, 0.5, 0.8, 0.95])
def test_equal_queues_are_rarely_called_different(load: float) -> None:
    """benchmarks/bench_compare.py measures the share."""
    rng = random.Random(5)
    wrong = 0
    for seed in range(8):
        a, b = (waits(rng, 500, load) for _ in range(2))
        found = [bootstrap.quantile_difference(a, b, share, seed) for share in (0.5, 0.99)]
        if bootstrap.is_steady(a) and bootstrap.is_steady(b):
            wrong += sum(interval is not None and not interval.is_noise for interval in found)
    assert wrong <= 2


def test_what_waited_together_is_worth_less_and_a_drift_is_not_steady() -> None:
    rng = random.Random(2)
    alone = [rng.gauss(0, 1) for _ in range(1400)]
    assert bootstrap.batched_sample_size([value > 2 for value in alone]) > 600 and bootstrap.is_steady(alone)
    bursts = [value + 9 * (index % 280 < 14) for index, value in enumerate(alone)]
    assert bootstrap.batched_sample_size([value > 4 for value in bursts]) < 1400
    assert bootstrap.quantile_difference(bursts, bursts[::-1], 0.999) is None
    assert not bootstrap.is_steady([value + index / 300 for index, value in enumerate(alone)])
    assert bootstrap.is_steady([1.0] * 50)
    # An AR(1) series with 0.9 is worth n * (1 - 0.9) / (1 + 0.9): 74 of 1400.
    together = list(itertools.accumulate(alone, lambda before, one: 0.9 * before + one))
    assert 40 < bootstrap.effective_sample_size(together) < 150 < 1100 < bootstrap.effective_sample_size(alone)
    assert bootstrap.effective_sample_size([]) == 0 and bootstrap.effective_sample_size([3.0] * 9) == 9


def test_the_same_thing_twice_is_noise(tmp_path: Path) -> None:
    a, b = (folder.load(write_run(tmp_path / str(seed), seed, n=500)) for seed in (3, 4))
    found = compare.compare(a, b)
    assert {change.name for change in found.changes} >= {"request_throughput", "median_ttft_ms", "p99_e2el_ms"}
    assert sum(change.verdict in ("better", "worse") for change in found.changes) <= 1
    assert found == compare.compare(a, b)
    assert found.unlike == ()
    assert "10 of 500 requests of 3 failed" in " ".join(found.notes)


def test_a_slower_run_is_worse_and_a_faster_one_better(tmp_path: Path) -> None:
    a, b = (folder.load(write_run(tmp_path / str(slower), 1, slower=slower)) for slower in (1.0, 1.2))
    for pair, verdict in (((a, b), "worse"), ((b, a), "better")):
        told = {change.name: change.verdict for change in compare.compare(*pair).changes}
        assert {told[f"median_{time}"] for time in ("ttft_ms", "tpot_ms", "e2el_ms")} == {verdict}
    (change,) = (change for change in compare.compare(a, b).changes if change.name == "median_tpot_ms")
    assert change.share == pytest.approx(0.2, abs=0.03)
    assert (change.low or 0) < change.b - change.a < (change.high or 0)


def test_unlike_runs_are_named(tmp_path: Path) -> None:
    a = folder.load(write_run(tmp_path / "a"))
    why = ["late by 80 ms"]
    changed: dict[str, Any] = {
        "flags": {"rate": 12, "url": "http://x", "save_result": True},
        "versions": {},
        "valid": False,
    }
    b = folder.load(write_run(tmp_path / "b", **changed, invalid_because=why))
    found = compare.compare(a, b)
    assert "flags.rate: 10.0, then 12" in found.unlike and "versions.penstock: 0.1.0, then not given" in found.unlike
    assert not any("url" in line or "save" in line for line in found.unlike)
    assert "b is not valid: late by 80 ms" in found.notes
    shown = compare.text(found)
    assert "compare like with like" in shown and "note: b is not" in shown
    assert {change.verdict for change in found.changes} == {"unknown"}


def test_rates_of_tokens_that_nobody_counted_are_not_compared(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", 4)
    rows = list(csv.DictReader((b / "requests.csv").open()))
    with (b / "requests.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "input_tokens": "", "output_tokens": ""} for row in rows)
    found = compare.compare(folder.load(a), folder.load(b))
    names = {change.name for change in found.changes}
    assert "request_throughput" in names and not names & {"output_throughput", "total_token_throughput"}
    assert "token rates are not compared: answers of b had no usage" in found.notes


def test_what_a_run_lacks_is_not_compared(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / str(seed), seed, n=40) for seed in (1, 2))
    found = compare.compare(folder.load(a), folder.load(b))
    assert {change.verdict for change in found.changes if change.name.startswith("p99")} == {"unknown"}
    assert "too few requests are independent" in " ".join(found.notes)
    for run in (a, b):
        (run / "requests.csv").unlink()
    found = compare.compare(folder.load(a), folder.load(b / "result.json"))
    assert found.changes == () and "no usable rows" in compare.text(found)


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_a_folder_without_a_result_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(UserError, match="cannot read result"):
        folder.load(tmp_path)


def test_damaged_rows_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", n=20)
    with (run / "requests.csv").open("a") as stream:
        stream.write("20,nan,x\n21,soon\n")
    (run / "itl.csv").write_text("index,itl_ms\n0,1.5\n0,nan\nx\n\n7,2.5\n7,")
    (run / "engine.csv").write_text("time_s,running\n1,2\n,3\nx,4\n")
    found = folder.load(run)
    assert len(found.requests) == 20 and found.gaps == (1.5, 2.5)
    assert [(row.time_s, row.source, row.values) for row in found.engine] == [(1.0, "", {"running": 2.0})]
    assert found.number("nothing") is None
