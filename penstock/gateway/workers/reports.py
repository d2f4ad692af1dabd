"""What the gateway reports of itself, all workers together: `/metrics` and the view of the admin address.

Reported totals never decrease: a worker publishes its numbers before it reports, and its successor counts on from them.
What a killed worker counted after its last report, in a second at most, is lost.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from penstock.gateway.accounting.entry import Accounting
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.context import GatewayContext
from penstock.gateway.live.news import NewsBoard
from penstock.gateway.metrics import counters, machine_metrics
from penstock.gateway.metrics.counters import Distribution, Family
from penstock.gateway.metrics.gpu_time import GpuTime
from penstock.gateway.responses import Answer, error_answer
from penstock.gateway.slow_requests import worst_of
from penstock.gateway.workers.link import ParentLink
from penstock.wire.announcement import GatewayView, LoadCounts
from penstock.wire.live import N_SLOW, SlowRequest
from penstock.wire.metric_names import METRICS

log = logging.getLogger(__name__)


class BodyCounts(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of requests' bodies, those of requests with known usage, and the prompt tokens of these."""

    n_bytes: int = 0
    n_known_bytes: int = 0
    n_known_tokens: int = 0


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """Of one worker, or of several. `n_requests`: served since the start, `n_ended`: also those that found no replica;
    `in_flight` is by replica."""

    families: list[Family]
    distributions: list[Distribution]
    n_requests: int = 0
    in_flight_total: int = 0
    n_waiting: int = 0
    in_flight: dict[str, int] = {}
    slow: tuple[SlowRequest, ...] = ()
    n_ended: int = 0
    bodies: BodyCounts = BodyCounts()


_decode = msgspec.msgpack.Decoder(WorkerReport).decode


class Reporter:
    """This worker's report, and with a `link` that of all workers."""

    link: ParentLink | None = None
    gpu_time: GpuTime | None = None  # of worker 0
    began_at = 0.0  # of the first worker, in monotonic seconds

    def __init__(
        self, context: GatewayContext, accounting: Accounting, news: NewsBoard, before: bytes | None = None
    ) -> None:
        self._context = context
        self._accounting = accounting
        self.news = news
        self._before = [ended(before)] if before is not None else []

    def encode(self) -> bytes:
        """For the other workers, each second: without announcements and news, which each of them has."""
        return msgspec.msgpack.encode(self._own(with_known=False))

    def relay(self, path: bytes, body: bytes) -> None:
        if self.link is not None:
            self.link.relay(path, body)

    def respond(
        self,
        client: ClientConnection,
        write: Callable[[WorkerReport], Answer],
        path: bytes = b"",
        body: bytes = b"",
    ) -> Answer | None:
        """Answers with what `write` makes of all reports, now or later; the other workers do the call `path` first."""
        if self.link is None:
            return write(self._own())
        client.work = asyncio.get_running_loop().create_task(self._respond(client, write, path, body))
        return None

    async def _respond(
        self, client: ClientConnection, write: Callable[[WorkerReport], Answer], path: bytes, body: bytes
    ) -> None:
        try:
            answer = write(await self.gather(path, body))
        except Exception:
            log.exception("request %s: a bug in the gateway", client.request_id.decode())
            answer = error_answer(500, "the gateway failed", "internal_error")
        client.respond(answer)

    async def gather(self, path: bytes = b"", body: bytes = b"", *, with_known: bool = True) -> WorkerReport:
        """What all workers report, after the others did the call `path`. `with_known`: with what each of them knows."""
        if self.link is None:
            return self._own(with_known=with_known)
        reports = await self.link.gather(path, body)
        others = [*map(_decode, reports.running), *map(ended, reports.ended)]
        return add([self._own(with_known=with_known), *others])

    def view(self, report: WorkerReport) -> GatewayView:
        view = self._context.replicas.view(self._context.now(), report.n_waiting, report.n_requests)
        rows = tuple(
            msgspec.structs.replace(row, in_flight=report.in_flight.get(row.announcement.replica, 0))
            for row in view.replicas
        )
        counts = (self._counts(report),)
        return msgspec.structs.replace(view, replicas=rows, in_flight_total=report.in_flight_total, counts=counts)

    def _counts(self, report: WorkerReport) -> LoadCounts:
        bodies, good, total = report.bodies, 0, 0
        promised_s = self._context.counters.ttft_s
        for name, bounds, samples in report.distributions:
            if name == "time_to_first_token_seconds" and promised_s is not None:
                n_good = bisect_right(bounds, promised_s)
                good = sum(sum(counts[:n_good]) for counts, _ in samples.values())
                total = sum(sum(counts) for counts, _ in samples.values())
        tokens = dict(report.families).get("tokens_total", {})
        return LoadCounts(
            gateway=self._context.pool.via.decode(),
            age_s=round(self._context.now() - self.began_at, 3),
            arrivals=report.n_ended + report.in_flight_total + report.n_waiting,
            body_bytes=bodies.n_bytes,
            known_bytes=bodies.n_known_bytes,
            known_tokens=bodies.n_known_tokens,
            output_tokens=int(sum(n for labels, n in tokens.items() if dict(labels).get("kind") == "output")),
            ttft_good=good,
            ttft_total=total,
        )

    def _own(self, *, with_known: bool = True) -> WorkerReport:
        context = self._context
        replicas, counts, now = context.replicas, context.counters, context.now()
        view = replicas.view(now, context.queue.waiting, counts.n_served())
        waiting = {model.name: context.queue.waiting_for(model.name) for model in replicas.models}
        ready = {model.name: len(replicas.ready(model.name, now)) for model in replicas.models}
        known = [*self.news.families(now), *machine_metrics.families(view)] if with_known else []
        gpu_time = self.gpu_time.families() if self.gpu_time is not None else []
        own = counters.families(counts, view, waiting, ready, replicas.n_ejections)
        report = WorkerReport(
            [*own, *self._accounting.families(), *gpu_time, *known],
            counters.distributions(counts),
            view.requests_total,
            view.in_flight_total,
            view.waiting,
            {row.announcement.replica: row.in_flight for row in view.replicas},
            tuple(context.slow.worst(now, N_SLOW)),
            counts.n_ended(),
            BodyCounts(counts.n_body_bytes, counts.n_known_bytes, counts.n_known_tokens),
        )
        return add([report, *self._before]) if self._before else report


def metrics_answer(report: WorkerReport) -> Answer:
    return Answer(200, counters.write_metrics(report.families, report.distributions), counters.CONTENT_TYPE)


def ended(content: bytes) -> WorkerReport:
    """The report of a worker that ended: its own counts, without gauges and what every worker knows."""
    report = _decode(content)
    rows = ((family, METRICS[family[0]]) for family in report.families)
    counters = [family for family, metric in rows if metric.kind == "counter" and metric.joined == "sum"]
    return WorkerReport(
        *(counters, report.distributions, report.n_requests),
        slow=report.slow, n_ended=report.n_ended, bodies=report.bodies,
    )  # fmt: skip


def add(parts: Sequence[WorkerReport]) -> WorkerReport:
    in_flight = sum((Counter(part.in_flight) for part in parts), Counter[str]())
    return WorkerReport(
        counters.add_families(part.families for part in parts),
        counters.add_distributions(part.distributions for part in parts),
        sum(part.n_requests for part in parts),
        sum(part.in_flight_total for part in parts),
        sum(part.n_waiting for part in parts),
        dict(in_flight),
        tuple(worst_of([request for part in parts for request in part.slow], N_SLOW)),
        sum(part.n_ended for part in parts),
        BodyCounts(*map(sum, zip(*(msgspec.structs.astuple(part.bodies) for part in parts), strict=True))),
    )
