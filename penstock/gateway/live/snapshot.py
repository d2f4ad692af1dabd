"""One `Snapshot` of a deployment: announcements, counters of all workers and the controller's news, joined. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from penstock import __version__
from penstock.gateway.config import GatewayConfig
from penstock.gateway.live.history import QUANTILE_S, LiveHistory, Sample, Span, finite, take_sample
from penstock.gateway.metrics.cost import key_uses
from penstock.gateway.workers.reports import WorkerReport
from penstock.wire.announcement import ACTIVE, GatewayView, ReplicaView
from penstock.wire.live import PERIOD_S, Attainment, DeploymentNews, Rates, ReplicaLive, Snapshot

MAX_REPLICAS = 512  # in one snapshot; totals count all
_DIGITS = re.compile(r"(\d+)")


class Moment(NamedTuple):
    """All that a snapshot is made from. `wall_s`: Unix time, only shown."""

    report: WorkerReport
    view: GatewayView
    news: DeploymentNews | None
    sample: Sample
    wall_s: float


def look(report: WorkerReport, view: GatewayView, news: DeploymentNews | None, now: float, wall_s: float) -> Moment:
    return Moment(report, view, news, take_sample(report.families, report.distributions, view, now), wall_s)


def rates(moment: Moment, history: LiveHistory) -> Rates:
    report, rows = moment.report, moment.view.replicas
    recent, minute = history.span(moment.sample, PERIOD_S), history.span(moment.sample, QUANTILE_S)
    requests_per_s, errors_per_s = recent.requests_per_s()
    tokens = _tokens_per_s(recent, rows, moment.sample)
    (ttft_p50, ttft_p99), (itl_p50, itl_p99) = minute.ttft_s(), minute.itl_s()
    alive = [row for row in rows if row.is_alive]
    loads = [row.announcement.load for row in alive if row.announcement.load is not None]
    gpus = [gpu for row in alive for machine in row.announcement.machines for gpu in machine.gpus]
    uses = [finite(gpu.utilization) for gpu in gpus if gpu.utilization is not None]
    watts = [finite(gpu.power_watts) for gpu in gpus if gpu.power_watts is not None]
    return Rates(
        at=round(moment.wall_s, 3),
        requests_per_s=requests_per_s,
        errors_per_s=errors_per_s,
        prompt_tokens_per_s=tokens[0] if tokens else None,
        output_tokens_per_s=tokens[1] if tokens else None,
        ttft_s_p50=ttft_p50,
        ttft_s_p99=ttft_p99,
        itl_s_p50=itl_p50,
        itl_s_p99=itl_p99,
        in_flight=report.in_flight_total,
        waiting=report.n_waiting,
        engine_waiting=finite(sum(load.waiting for load in loads)),
        kv_use=max((finite(load.kv_use) for load in loads), default=None),
        n_ready=sum(_serves(row) for row in rows),
        n_desired=moment.news.desired_replicas if moment.news is not None else None,
        gpu_use=round(sum(uses) / len(uses), 4) if uses else None,
        power_watts=round(sum(watts), 1) if watts else None,
    )


def _serves(row: ReplicaView) -> bool:
    return row.is_alive and not row.is_draining and row.announcement.state in ACTIVE


def _tokens_per_s(span: Span, rows: Sequence[ReplicaView], sample: Sample) -> tuple[float, float] | None:
    """As engines count them; of a model whose engines do not, as the ledger does when a request has ended."""
    parts, counting = [], set()
    for row in rows:
        tokens, model = sample.engines.get(row.announcement.replica), row.announcement.model
        if tokens is not None and (tokens.prompt or model not in sample.ledger):
            counting.add(model)
            parts.append(span.engine_tokens_per_s(row.announcement.replica))
    parts += [span.ledger_tokens_per_s(model) for model in sample.ledger if model not in counting]
    known = [part for part in parts if part is not None]
    return (round(sum(p for p, _ in known), 3), round(sum(o for _, o in known), 3)) if known else None


def make_snapshot(moment: Moment, history: LiveHistory, config: GatewayConfig) -> Snapshot:
    news, kept = moment.news, history.kept()
    recent, minute = history.span(moment.sample, PERIOD_S), history.span(moment.sample, QUANTILE_S)
    rows = sorted(moment.view.replicas, key=_by_name)[:MAX_REPLICAS]
    return Snapshot(
        deployment=config.deployment or (news.deployment if news is not None else ""),
        at=round(moment.wall_s, 3),
        version=__version__,
        now=rates(moment, history),
        phase=news.phase if news is not None else None,
        reason=news.reason if news is not None else None,
        replicas=tuple(_replica(row, recent, minute, moment) for row in rows),
        slo=Attainment(
            config.slo.ttft_ms,
            config.slo.tpot_ms,
            round(kept.n_ttft_kept / kept.n_ttft, 5) if kept.n_ttft else None,
            round(kept.n_tpot_kept / kept.n_tpot, 5) if kept.n_tpot else None,
        ),
        cost=history.cost(config.gpu_hour_usd),
        keys=key_uses(moment.report.families, config.gpu_hour_usd),
        slow=moment.report.slow,
        events=news.events if news is not None else (),
    )


def _by_name(row: ReplicaView) -> list[tuple[bool, int, str]]:
    """ "r2" before "r10"."""
    parts = _DIGITS.split(row.announcement.replica)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _replica(row: ReplicaView, recent: Span, minute: Span, moment: Moment) -> ReplicaLive:
    announcement, name = row.announcement, row.announcement.replica
    load, tokens = announcement.load, recent.engine_tokens_per_s(name)
    (ttft_p50, ttft_p99), (itl_p50, itl_p99) = minute.ttft_s(name), minute.itl_s(name)
    up_since = None
    if announcement.state in ACTIVE and announcement.started_at is not None:
        up_since = announcement.started_at + (announcement.ready_after_s or 0.0)
    return ReplicaLive(
        replica=name,
        model=announcement.model,
        state=announcement.state if row.is_alive else "silent",
        host=announcement.host,
        engine=announcement.engine,
        reason=announcement.reason,
        progress=announcement.progress,
        in_flight=row.in_flight,
        running=finite(load.running) if load is not None else None,
        waiting=finite(load.waiting) if load is not None else None,
        kv_use=finite(load.kv_use) if load is not None else None,
        prompt_tokens_per_s=tokens[0] if tokens else None,
        output_tokens_per_s=tokens[1] if tokens else None,
        ttft_s_p50=ttft_p50,
        ttft_s_p99=ttft_p99,
        itl_s_p50=itl_p50,
        itl_s_p99=itl_p99,
        cache_hits=minute.cache_hits(name),
        n_restarts=announcement.n_restarts,
        up_s=round(max(0.0, moment.wall_s - up_since), 1) if up_since is not None else None,
        is_draining=row.is_draining,
        is_ejected=row.is_ejected,
        machines=announcement.machines,
    )
