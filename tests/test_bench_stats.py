"""What the times say: percentiles and sums against numpy on random data, formulas by worked numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy
import pytest

from penstock.bench.load.run import Progress
from penstock.bench.report import html, text
from penstock.bench.results import folder, validity
from penstock.bench.results.stats import (
    Summary,
    Timed,
    TokenTimes,
    gaps_s,
    is_good,
    spread,
    spread_of_counts,
    summarise,
)
from penstock.bench.serve import Report


def timed(index: int = 0, times: Sequence[float] = (), **fields: object) -> Timed:
    """`times`: of its token events."""
    plain = {"intended_s": 0.0, "asked_s": 0.0, "sent_s": 0.0, "end_s": 1.0, "status": 200}
    if times:
        plain |= {"first_token_s": times[0], "last_token_s": times[-1], "n_events": len(times)}
        plain |= {"max_gap_s": max(gaps_s(times), default=None)}  # type: ignore[dict-item]
    return Timed(index=index, **{**plain, **fields})  # type: ignore[arg-type]


def notes(requests: list[Timed], summary: Summary, result: dict[str, Any] | None = None) -> str:
    generator = validity.describe([], [], 0.0, 1.0, 1, 1)
    verdict = validity.judge(generator, summary, False)
    return text.notes(Report(result or {}, requests, [], summary, generator, verdict, False, False))


def summarised(requests: Sequence[Timed], is_open: bool, bounds_ms: dict[str, float]) -> Summary:
    """Of requests whose token events come every 0.1 s."""
    tokens = TokenTimes()
    for request in requests:
        if request.first_token_s is not None:
            tokens.add([request.first_token_s + 0.1 * index for index in range(request.n_events)])
    return summarise(requests, tokens, is_open, bounds_ms)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 999, 5000])
def test_spread_is_numpys(n: int) -> None:
    source = random.Random(n)
    values = [source.lognormvariate(0, 1) for _ in range(n)]
    found = spread(values, 1000.0)
    assert found is not None
    expected = numpy.array(values) * 1000
    assert (found.mean, found.std) == pytest.approx((expected.mean(), expected.std()))
    shares = (found.min, found.p10, found.median, found.p90, found.p95, found.p99, found.max)
    assert shares == pytest.approx(numpy.percentile(expected, [0, 10, 50, 90, 95, 99, 100]))
    counts = Counter(round(value * 10) for value in values)
    exact, counted = spread(counts.elements(), 3.0, (99.9,)), spread_of_counts(counts, 3.0, (99.9,))
    *mine, chosen = msgspec.structs.astuple(counted)  # type: ignore[arg-type]
    *theirs, wanted = msgspec.structs.astuple(exact)  # type: ignore[arg-type]
    assert mine == pytest.approx(theirs) and chosen == pytest.approx(wanted)


def test_the_live_line_has_ttft_and_tokens() -> None:
    progress = Progress(20, 12, 8, 0, 3.0, 4.0, 0.5, 0.9, 7.0, ttft_s=0.052, chunk_rate=812.4)
    line = "12 done  4.0/s  8 in flight  TTFT 52 ms, 812 tokens/s  p50 500 ms, p99 900 ms  0 errors  7.0 s left"
    assert text.progress_line(progress) == line


def test_tpot_leaves_the_first_token_out_and_an_open_loop_counts_from_the_intended_time() -> None:
    times = tuple(0.5 + 0.05 * index for index in range(11))
    request = timed(times=times, output_tokens=11)
    assert request.tpot_s == pytest.approx(0.05)
    # Two tokens in one event: fewer events, the same tokens, so TPOT stays and the gaps do not.
    joined = timed(times=times[::2], output_tokens=11)
    assert joined.tpot_s == pytest.approx(0.05)
    assert timed(times=(0.5,), output_tokens=1).tpot_s is None
    assert timed(times=times, output_tokens=None).tpot_s is None
    # An open loop counts from the intended time.
    late = timed(intended_s=1.0, asked_s=1.2, sent_s=1.3, times=(1.5, 1.6), end_s=1.7, output_tokens=2)
    assert [late.ttft_s(is_open) for is_open in (True, False)] == pytest.approx([0.5, 0.2])
    assert late.e2el_s(is_open=True) == pytest.approx(0.6)
    # A failed request has no latency.
    failed = timed(times=(0.1, 0.2, 0.3), output_tokens=3, error="connection closed")
    row = dict(zip(folder.REQUEST_COLUMNS, folder.request_row(failed, False), strict=True))
    assert (row["ttft_ms"], row["tpot_ms"], row["e2el_ms"], row["n_chunks"]) == (None, None, None, 3)


def test_a_run_adds_up() -> None:
    whole = [timed(index, times=(0.1, 0.2, 0.3), end_s=2.0, input_tokens=10, output_tokens=3) for index in range(4)]
    failed = [timed(4, error="http 429", status=429, end_s=0.5), timed(5, error="unfinished", status=None)]
    found = summarised([*whole, *failed], False, {"ttft": 150.0})
    assert (found.completed, found.failed, found.unfinished, found.duration) == (4, 1, 1, 2.0)
    assert (found.total_input_tokens, found.total_output_tokens) == (40, 12)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (2.0, 6.0, 26.0)
    assert (found.request_goodput, found.goodput_share) == (2.0, 0.8)
    assert found.errors == {"http 429": 1, "unfinished": 1} and found.statuses == {"200": 4, "429": 1}
    assert found.spreads["itl"].n == 8 and found.max_output_tokens_per_s == 12
    assert found.user_tokens_per_s is not None and found.user_tokens_per_s.median == pytest.approx(10.0)
    spans = [(0.0, 1.0), (0.5, 2.0), (0.9, 1.0), (2.0, 3.0)]
    overlapping = summarised([timed(sent_s=begin, end_s=end) for begin, end in spans], False, {})
    assert overlapping.max_concurrent_requests == 3


def test_a_missing_usage_leaves_token_rates_unknown_and_no_answer_is_no_division_by_zero() -> None:
    found = summarised([timed(0, output_tokens=3, input_tokens=1), timed(1)], False, {})
    assert (found.total_output_tokens, found.output_throughput, found.n_without_usage) == (None, None, 1)
    assert (found.request_throughput, found.request_goodput) == (2.0, None)
    found = summarised([timed(error="connection refused", status=None, end_s=0.0)], True, {"ttft": 1.0})
    assert (found.completed, found.failed, found.request_throughput, found.goodput_share) == (0, 1, 0.0, 0.0)
    assert found.spreads == {} and summarised([], True, {}).completed == 0 and spread([]) is None


def test_goodput_needs_every_bound_and_is_unknown_where_one_was_not_measured() -> None:
    request = timed(times=(0.1, 0.25, 0.3), output_tokens=3)
    kept = ({"ttft": 100.0}, {"tpot": 100.5}, {"itl": 150.5}, {"e2el": 300.5, "ttft": 100.0})
    broken = ({"ttft": 99.0}, {"tpot": 99.0}, {"itl": 149.0}, {"e2el": 299.0})
    assert [is_good(request, bounds, is_open=False) for bounds in kept + broken] == [True] * 4 + [False] * 4
    whole, one = timed(output_tokens=3), timed(1, times=(0.1,), output_tokens=1)
    joined, empty = timed(2, times=(0.1,), output_tokens=3), timed(3, output_tokens=0)
    uncounted = timed(4, times=(0.1, 0.2))
    assert [is_good(whole, {name: 1e6}, False) for name in ("ttft", "tpot", "itl", "e2el")] == [None, None, None, True]
    assert is_good(whole, {"ttft": 1e6, "e2el": 1.0}, False) is False
    assert is_good(one, {"ttft": 1e6, "tpot": 1.0, "itl": 1.0}, False) is True
    assert is_good(joined, {"itl": 1.0, "tpot": 1.0}, False) is True
    assert is_good(empty, {"ttft": 1.0}, False) is True
    assert is_good(uncounted, {"tpot": 1.0}, False) is None
    found = summarised([whole, one], False, {"ttft": 1e6})
    assert (found.request_goodput, found.goodput_share, found.n_not_judged) == (None, None, 1)
    assert "goodput is unknown: in 1 of 2" in notes([], found)


def test_a_servers_words_reach_the_terminal_without_its_control_characters() -> None:
    request = timed(error="http 500", detail="\x1b[2Jgone\x9b1m\u202eé")
    assert "1 x http 500:  [2Jgone 1m é\n" in notes([request], summarised([request], False, {}))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"completed": 100, "prefix_hit_rate": 0.02}, ["2.0% of the prompt tokens were in it"]),
        ({"completed": 100, "prefix_hit_rate": 0.43}, ["43.0% of the", "NOTE: 43% of the prompt tokens came from"]),
        (
            {"completed": 100, "joules_per_token": 0.1234, "gpu_power_watts": 612.4},
            ["energy: 0.123 J per output token, 612 W"],
        ),
        ({"completed": 10, "prefix_hit_rate": None}, ["NOTE: p99 of 10 requests is about the slowest of them"]),
    ],
)
def test_cache_energy_and_a_p99_of_few_requests_are_in_the_notes(result: dict[str, Any], words: list[str]) -> None:
    shown = notes([], summarised([timed()], False, {}), result)
    assert all(word in shown for word in words) and shown.count("NOTE:") == sum("NOTE" in word for word in words)
    page = html.page([folder.Result("a", result)])
    assert all((word.removeprefix("NOTE: ") in page) is ("NOTE" in word) for word in words if "tokens were" not in word)


def test_a_late_or_busy_generator_is_not_valid() -> None:
    on_time = [timed(index, intended_s=index, asked_s=index + 0.001) for index in range(100)]
    fine = validity.describe(on_time, [0.0001] * 100, 1.0, 10.0, 1000, 5)
    assert (fine.cpu_share, fine.lateness_p99_ms) == pytest.approx((0.1, 1.0))
    assert fine.cpu_us_per_read == pytest.approx(1000.0)
    whole = summarised([timed()], False, {})
    assert validity.judge(fine, whole, False).valid
    late = [timed(index, intended_s=index, asked_s=index + 0.02) for index in range(100)]
    verdict = validity.judge(validity.describe(late, [], 9.9, 10.0, 0, 5), whole, False)
    assert not verdict.valid and len(verdict.reasons) == 2
    assert "99% of a core" in verdict.reasons[0] and "20.0 ms late" in verdict.reasons[1]
    assert validity.judge(fine, summarised([], False, {}), True).reasons[0] == "no request was completed"
    closed = validity.describe([], [0.001] * 99 + [0.004], 0.0, 1.0, 1, 1)
    assert closed.lateness_max_ms == pytest.approx(4.0) and closed.lag_p99_ms == closed.lateness_p99_ms


@pytest.mark.parametrize(("n_failed", "is_valid"), [(0, True), (5, True), (6, False), (100, False)])
def test_a_failed_share_above_the_bound_is_a_verdict(n_failed: int, is_valid: bool) -> None:
    requests = [timed(index, error="connection refused" if index < n_failed else None) for index in range(100)]
    generator = validity.describe([], [], 0.0, 1.0, 1, 1)
    verdict = validity.judge(generator, summarised(requests, False, {}), False)
    assert verdict.valid is is_valid
    assert is_valid or "failed (bound 5%)" in verdict.reasons[0] or n_failed == 100
    assert validity.judge(generator, summarised(requests, False, {}), False, most_failed=1.0).valid is (n_failed < 100)
