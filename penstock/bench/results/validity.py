"""Whether a run measured the server, or the generator. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.bench.results.stats import Summary, Timed, percentile

# One process has one core. Above this share reads queue behind each other often enough to move a p50.
MAX_CPU_SHARE = 0.85
_LEAST_CPU_S = 0.1  # below it, the share is that of the start
# How late requests are sent (open loop) or the loop's own alarm goes off, at the 99th percentile.
MAX_LATENESS_MS = 10.0
# Times leave failed requests out: a p95 of the others is no longer one of the users' 5 percent.
MAX_FAILED_SHARE = 0.05
_MIN_LAGS = 20


class Generator(msgspec.Struct, frozen=True):
    """The generator's own numbers. `cpu_share`: of one core, user and system.

    `lateness_p99_ms`: in an open loop, how long after its intended time a request was handed to a connection; in a
    closed one, how late an alarm every 20 ms went off (`lag_p99_ms` in both).
    """

    cpu_share: float
    cpu_s: float
    cpu_us_per_read: float | None
    lateness_p50_ms: float
    lateness_p99_ms: float
    lateness_max_ms: float
    lag_p99_ms: float
    n_reads: int
    n_connections: int


class Verdict(msgspec.Struct, frozen=True):
    """`reasons`: why a run is not valid."""

    valid: bool
    reasons: tuple[str, ...]
    bounds: dict[str, float]


def judge(
    generator: Generator,
    summary: Summary,
    was_interrupted: bool,
    cut_short: str = "",
    most_failed: float = MAX_FAILED_SHARE,
) -> Verdict:
    reasons = []
    if generator.cpu_share > MAX_CPU_SHARE and generator.cpu_s > _LEAST_CPU_S:
        reasons.append(
            f"the generator used {generator.cpu_share:.0%} of a core (bound {MAX_CPU_SHARE:.0%}): "
            "latencies hold its own queue"
        )
    if generator.lateness_p99_ms > MAX_LATENESS_MS:
        reasons.append(
            f"the generator was {generator.lateness_p99_ms:.1f} ms late at p99 (bound {MAX_LATENESS_MS:g} ms)"
        )
    n_ended = summary.completed + summary.failed
    if not summary.completed:
        reasons.append("no request was completed")
    elif summary.failed > most_failed * n_ended:
        reasons.append(f"{summary.failed / n_ended:.1%} of the requests failed (bound {most_failed:.0%})")
    if cut_short:
        reasons.append(cut_short)
    if was_interrupted:
        reasons.append("the run was interrupted: these are the numbers so far")
    bounds = {"cpu_share": MAX_CPU_SHARE, "lateness_p99_ms": MAX_LATENESS_MS, "failed_share": most_failed}
    return Verdict(not reasons, tuple(reasons), bounds)


def describe(
    requests: Sequence[Timed], lag_s: Sequence[float], cpu_s: float, wall_s: float, n_reads: int, n_connections: int
) -> Generator:
    """The generator's numbers. `requests`: those of an open loop; none for a closed one."""
    lags = sorted(lag_s)
    lag_p99_ms = percentile(lags, 0.99) * 1000 if len(lags) >= _MIN_LAGS else (max(lags) * 1000 if lags else 0.0)
    late = sorted(request.asked_s - request.intended_s for request in requests) or lags or [0.0]
    return Generator(
        cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
        cpu_s=cpu_s,
        cpu_us_per_read=cpu_s / n_reads * 1e6 if n_reads else None,
        lateness_p50_ms=percentile(late, 0.5) * 1000,
        lateness_p99_ms=percentile(late, 0.99) * 1000,
        lateness_max_ms=late[-1] * 1000,
        lag_p99_ms=lag_p99_ms,
        n_reads=n_reads,
        n_connections=n_connections,
    )
