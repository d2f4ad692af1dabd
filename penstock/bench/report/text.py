"""Results as text, with the line names of `vllm bench serve`, and hey's summary. Pure.

https://github.com/vllm-project/vllm/blob/main/vllm/benchmarks/serve.py, https://github.com/rakyll/hey
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.bench.calibrate import Pair
from penstock.bench.load.run import Progress
from penstock.bench.results.stats import FORMULAS, Summary, Timed, percentile
from penstock.bench.serve import Report
from penstock.text import printable, show_seconds

_WIDTH = 50
_HEADERS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WORDS = ("Mean", "Median", "P90", "P95", "P99", "Max")
_N_BINS = 10
_MOST_HITS = 0.05
_LEAST_FOR_P99 = 100
_BAR = 40


def prediction(pairs: Sequence[Pair]) -> str:
    lines = [f"{'Predicted for this load':-^{_WIDTH}}"]
    for pair in pairs:
        predicted = f"{pair.likely:.4g} ({pair.low:.4g} to {pair.high:.4g})"
        lines.append(f"{pair.words + ':':<20} {predicted:<28} {pair.off:+.0%}{'' if pair.is_inside else ', outside'}")
    return "\n".join(lines)


def serving_block(summary: Summary, rate: float | None, concurrency: int | None) -> str:
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [_line("Successful requests:", summary.completed), _line("Failed requests:", summary.failed)]
    if summary.unfinished:
        lines.append(_line("Unfinished requests:", summary.unfinished))
    if concurrency is not None:
        lines.append(_line("Maximum request concurrency:", concurrency))
    if rate is not None:
        lines.append(_line("Request rate configured (RPS):", float(rate)))
    lines += [
        _line("Benchmark duration (s):", summary.duration),
        _line("Total input tokens:", summary.total_input_tokens),
        _line("Total generated tokens:", summary.total_output_tokens),
        _line("Request throughput (req/s):", summary.request_throughput),
    ]
    if summary.request_goodput is not None:
        lines.append(_line("Request goodput (req/s):", summary.request_goodput))
    lines += [
        _line("Output token throughput (tok/s):", summary.output_throughput),
        _line("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s),
        _line("Peak concurrent requests:", float(summary.max_concurrent_requests)),
        _line("Total token throughput (tok/s):", summary.total_token_throughput),
    ]
    for name, (short, header) in _HEADERS.items():
        spread = summary.spreads.get(name)
        if spread is not None:
            lines.append(f"{header:-^{_WIDTH}}")
            words = ("Mean", "Median", *map(str.upper, spread.chosen), "Max") if spread.chosen else _WORDS
            values = msgspec.structs.asdict(spread) | spread.chosen
            lines += [_line(f"{word} {short} (ms):", values[word.lower()]) for word in words]
    if summary.user_tokens_per_s is not None:
        speed = summary.user_tokens_per_s
        lines.append(f"{'Speed per user':-^{_WIDTH}}")
        lines += [_line("Median speed (tok/s):", speed.median), _line("Slowest tenth below (tok/s):", speed.p10)]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _line(name: str, value: float | int | None) -> str:
    shown = "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()


def hey_block(requests: Sequence[Timed], summary: Summary, is_open: bool) -> str:
    """hey's report: Summary, histogram, percentiles, details, status codes; of answers with a status."""
    whole = [request for request in requests if request.status is not None and request.error is None]
    times = sorted(request.e2el_s(is_open) for request in whole)
    lines = ["", "Summary:", f"  Total:\t{summary.duration:.4f} secs"]
    if times:
        n_bytes = sum(request.n_bytes for request in whole)
        lines += [
            f"  Slowest:\t{times[-1]:.4f} secs",
            f"  Fastest:\t{times[0]:.4f} secs",
            f"  Average:\t{sum(times) / len(times):.4f} secs",
            f"  Requests/sec:\t{summary.request_throughput:.4f}",
            "",
            f"  Total data:\t{n_bytes} bytes",
            f"  Size/request:\t{n_bytes // len(whole)} bytes",
            "",
            "Response time histogram:",
            *_histogram(times),
            "",
            "Latency distribution:",
            *[f"  {share}% in {percentile(times, share / 100):.4f} secs" for share in (10, 25, 50, 75, 90, 95, 99)],
            "",
            "Details (average, fastest, slowest):",
            _detail("DNS+dialup", [request.dial_s for request in whole]),
            _detail("resp wait", [r.answered_s - r.start_s(is_open) for r in whole if r.answered_s is not None]),
            _detail("resp read", [r.end_s - r.answered_s for r in whole if r.answered_s is not None]),
        ]
    lines += ["", "Status code distribution:"]
    lines += [f"  [{status}]\t{n} responses" for status, n in summary.statuses.items()]
    if summary.errors:
        lines += ["", "Error distribution:", *[f"  [{n}]\t{kind}" for kind, n in summary.errors.items()]]
    return "\n".join(lines) + "\n"


def _detail(name: str, values: Sequence[float]) -> str:
    values = values or [0.0]
    return f"  {name}:\t{sum(values) / len(values):.4f} secs, {min(values):.4f} secs, {max(values):.4f} secs"


def _histogram(times: Sequence[float]) -> list[str]:
    """hey's eleven marks from the fastest to the slowest; a mark counts what is above the mark before it."""
    width = (times[-1] - times[0]) / _N_BINS
    marks = [times[0] + width * index for index in range(_N_BINS)] + [times[-1]]
    counts = [0] * len(marks)
    at = 0
    for value in times:
        while at < len(marks) - 1 and value > marks[at]:
            at += 1
        counts[at] += 1
    most = max(counts)
    return [
        f"  {mark:.3f} [{count}]\t|{'■' * round(count * _BAR / most)}"
        for mark, count in zip(marks, counts, strict=True)
    ]


def notes(report: Report) -> str:
    """What belongs next to the numbers: errors, joined tokens, missing usage, the cache, the generator's own state."""
    summary, generator, verdict, requests = report.summary, report.generator, report.verdict, report.requests
    lines = []
    for kind, count in summary.errors.items():
        example = printable(next((r.detail for r in requests if r.error == kind and r.detail), ""))
        lines.append(f"{count} x {kind}" + (f": {example}" if example else ""))
    if summary.tokens_per_event is not None and summary.tokens_per_event > 1.005:
        lines.append(
            f"{summary.tokens_per_event:.2f} tokens in one event on average: an ITL is the gap between events; "
            "TPOT is per token"
        )
    if summary.events_per_read_share > 0.005:
        lines.append(f"{summary.events_per_read_share:.1%} of events came together with the one before: their ITL is 0")
    if summary.n_without_usage and summary.completed:
        lines.append(
            f"{summary.n_without_usage} of {summary.completed} answers had no usage: token rates are unknown "
            "(tokens are never guessed from chunks)"
        )
    if summary.n_not_judged:
        lines.append(
            f"goodput is unknown: in {summary.n_not_judged} of {summary.completed} answers a bounded number was not "
            "measured"
        )
    hit_rate = report.result.get("prefix_hit_rate")
    if hit_rate is not None:
        lines.append(f"prefix cache: {hit_rate:.1%} of the prompt tokens were in it")
    joules = report.result.get("joules_per_token")
    if joules is not None:
        watts = report.result["gpu_power_watts"]
        lines.append(f"energy: {joules:.3g} J per output token, {watts:.0f} W on average over the deployment's GPUs")
    lines += [f"NOTE: {note}" for note in caveats(report.result)]
    per_read = f", {generator.cpu_us_per_read:.1f} us a read" if generator.cpu_us_per_read is not None else ""
    lines.append(
        f"generator: {generator.cpu_share:.1%} of a core{per_read}, "
        f"late by {generator.lateness_p99_ms:.2f} ms at p99, {generator.n_connections} connections"
    )
    if verdict.valid:
        lines.append("valid: " + ", ".join(f"{name} within {bound:g}" for name, bound in verdict.bounds.items()))
    else:
        lines += [f"NOT VALID: {reason}" for reason in verdict.reasons]
    return "\n".join(lines)


def caveats(result: Mapping[str, Any]) -> list[str]:
    """Why some numbers of a valid result say less than they seem to."""
    lines = []
    hit_rate, n_completed = result.get("prefix_hit_rate"), result.get("completed")
    if isinstance(hit_rate, float) and hit_rate > _MOST_HITS:
        lines.append(f"{hit_rate:.0%} of the prompt tokens came from the prefix cache: TTFT is that of a warm cache")
    if isinstance(n_completed, int) and 0 < n_completed < _LEAST_FOR_P99:
        lines.append(f"p99 of {n_completed} requests is about the slowest of them: {_LEAST_FOR_P99} are the least")
    return lines


def formulas() -> str:
    return "\n".join(f"{name + ':':<24}{text}" for name, text in FORMULAS.items())


def progress_line(progress: Progress) -> str:
    parts = [f"{progress.n_ended} done", f"{progress.rate:.1f}/s", f"{progress.n_in_flight} in flight"]
    if progress.ttft_s is not None:
        parts.append(f"TTFT {progress.ttft_s * 1000:.0f} ms, {progress.chunk_rate:.0f} tokens/s")
    if progress.p50_s is not None and progress.p99_s is not None:
        parts.append(f"p50 {progress.p50_s * 1000:.0f} ms, p99 {progress.p99_s * 1000:.0f} ms")
    parts.append(f"{progress.n_errors} errors")
    if progress.left_s is not None:
        parts.append(f"{show_seconds(progress.left_s)} left")
    return "  ".join(parts)
