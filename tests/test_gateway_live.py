"""What watchers read: rates and quantiles from counters, snapshots, and the stream of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from gateway_rig import TOKEN, Client, Rig, echo
from samples import told, view
from virtual_loop import advance, loop

from penstock.gateway.config import GatewayConfig, ServedModel, Slo
from penstock.gateway.live import stream
from penstock.gateway.live.history import LiveHistory, quantile
from penstock.gateway.live.news import DatedNews, NewsBoard
from penstock.gateway.live.snapshot import MAX_REPLICAS, Moment, look, make_snapshot, rates
from penstock.gateway.metrics.cost import SpendingMeter
from penstock.gateway.workers.reports import WorkerReport
from penstock.wire.announcement import EngineLoad, GatewayView, GpuReading, MachineReading
from penstock.wire.live import DeploymentNews, Event, History, Rates, Snapshot
from penstock.wire.sse import Parser

WALL_S = 1_800_000_000.0
SLO = Slo(ttft_ms=1000, tpot_ms=30)
CONFIG = GatewayConfig(
    listen="127.0.0.1:0", admin="127.0.0.1:0", admin_token_file="", models=(ServedModel("m"),), auth="none", slo=SLO
)
NEWS = DeploymentNews("d", "ready", 2, {"ready": 1, "failed": 1}, events=(Event(1.0, "replica failed", "why", "1"),))


def report(
    n_complete: int = 0,
    n_broken: int = 0,
    ttft: dict[str, list[int]] | None = None,
    tokens: tuple[int, int] | None = None,
    **facts: Any,
) -> WorkerReport:
    """`ttft`: counts up to 0.5 s, up to 1 s and above, by replica."""
    outcomes: dict[Any, float] = {
        (("model", "m"), ("outcome", name)): n for name, n in (("complete", n_complete), ("broken", n_broken))
    }
    families: list[Any] = [("requests_total", outcomes)]
    if tokens is not None:
        kinds = zip(("prompt", "output", "cached"), (*tokens, 0), strict=True)
        families.append(("tokens_total", {(("model", "penstock-demo"), ("kind", kind)): n for kind, n in kinds}))
    counts: dict[Any, Any] = {(("model", "m"), ("replica", name)): (row, 0.0) for name, row in (ttft or {}).items()}
    return WorkerReport(families, [("time_to_first_token_seconds", (0.5, 1.0), counts)], **facts)


def moment(of: WorkerReport, at: float, rows: GatewayView | None = None, news: DeploymentNews | None = None) -> Moment:
    return look(of, rows or view(), news, at, WALL_S + at)


def history_of(*moments: Moment) -> LiveHistory:
    history, meter = LiveHistory(), SpendingMeter()
    for each in moments:
        history.add(each.sample)
        if history.is_row_due(each.sample.at):
            spending = meter.read(each.report.families, each.view, each.sample.at)
            history.add_row(each.sample, rates(each, history), SLO, spending)
    return history


def test_rates_are_of_the_last_five_seconds_and_quantiles_of_the_last_minute() -> None:
    moments = [moment(report(10 * second, second, {"0": [second, 0, 0]}), second) for second in range(100)]
    moments.append(moment(report(1990, 101, {"0": [99, 0, 100]}), 100.0))
    now = rates(moments[-1], history_of(*moments))
    assert (now.requests_per_s, now.errors_per_s) == (209.2, 1.2)  # (2091 - 1045) / 5, broken ones too
    # 60 of a minute's 160 in the first bucket, the rest above the last bound, which stands for it as in Prometheus.
    assert (now.ttft_s_p50, now.ttft_s_p99) == (1.0, 1.0)
    bounds = (0.5, 1.0, 2.0)
    assert (quantile(bounds, (4, 0, 0, 0), 0.5), quantile(bounds, (1, 1, 2, 0), 0.75)) == (0.25, 1.5)
    first = make_snapshot(moments[0], LiveHistory(), CONFIG)
    assert (first.now.requests_per_s, first.now.ttft_s_p50, first.now.prompt_tokens_per_s) == (0, None, None)
    assert (first.phase, first.now.n_desired, first.events) == (None, None, ())


def test_an_hour_of_seconds_is_kept_in_bounds_and_the_wall_clock_only_labels_it() -> None:
    history = history_of(*(moment(report(second), float(second)) for second in range(4000)))
    assert len(history._samples) < 25
    stepped = WALL_S - 86_400
    columns = history.write(3999.0, stepped).columns
    assert {len(column) for column in columns.values()} == {720} and set(columns) == set(Rates.__struct_fields__)
    assert columns["requests_per_s"][-3:] == [1.0, 1.0, 1.0]
    assert columns["at"][-2:] == [stepped - 9, stepped - 4]


def test_counters_that_go_back_are_no_negative_rates_and_no_peaks() -> None:
    def rows(prompt: float) -> GatewayView:
        return view(told("0", load=EngineLoad(1, prompt_tokens=prompt)))

    before = moment(report(1_000_000, 5, {"0": [9, 9, 9]}), 0.0, rows(1e9))
    after = moment(report(999_990, 4, {"0": [8, 9, 10]}), 5.0, rows(10))
    now = rates(after, history_of(before, after))
    assert (now.requests_per_s, now.errors_per_s, now.prompt_tokens_per_s) == (0.0, 0.0, 0.0)
    assert (now.ttft_s_p50, now.ttft_s_p99) == (1.0, 1.0)
    last = moment(report(), 10.0, rows(60))
    assert rates(last, history_of(before, after, last)).prompt_tokens_per_s == 10


def test_tokens_come_from_engines_and_else_from_the_ledger() -> None:
    def rows(prompt: float, output: float, cached: float = 0.0) -> GatewayView:
        load = EngineLoad(1, 2, 0.5, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)
        return view(told("0", load=load), told("1"))

    first, last = (
        moment(report(tokens=(0, 0)), 0.0, rows(1000, 100)),
        moment(report(tokens=(7, 7)), 5.0, rows(1500, 200, 250)),
    )
    history = history_of(first, last)
    now = rates(last, history)
    assert (now.prompt_tokens_per_s, now.output_tokens_per_s, now.kv_use, now.engine_waiting) == (100, 20, 0.5, 2)
    replica, other = make_snapshot(last, history, CONFIG).replicas
    assert (replica.output_tokens_per_s, replica.cache_hits, other.output_tokens_per_s) == (20, 0.5, None)

    first, last = moment(report(tokens=(10, 10)), 0.0), moment(report(tokens=(60, 20)), 5.0)
    now = rates(last, history_of(first, last))
    assert (now.prompt_tokens_per_s, now.output_tokens_per_s) == (10, 2)


def test_token_rates_are_over_the_time_between_the_nodes_readings() -> None:
    def rows(at_s: float) -> GatewayView:
        return view(told("0", load=EngineLoad(1, prompt_tokens=100 * at_s, at_s=at_s)))

    # Read every 2 s, 100 tokens a second: 5 s hold two readings, or three.
    moments = [moment(report(), float(at), rows(50 + at // 2 * 2)) for at in range(12)]
    for last in (10, 11):
        assert rates(moments[last], history_of(*moments[:last])).prompt_tokens_per_s == 100
    stuck = [moment(report(), float(at), rows(50)) for at in range(12)]
    assert rates(stuck[-1], history_of(*stuck)).prompt_tokens_per_s is None
    other = moment(report(), 12.0, rows(1))  # the replica is on another machine now
    assert rates(other, history_of(*moments)).prompt_tokens_per_s is None


def test_a_snapshot_joins_announcements_reports_news_and_promises_and_is_bounded() -> None:
    gpu = GpuReading(0, "GPU-1", utilization=0.5, power_watts=300.0)
    machine = MachineReading('node\n"1"', gpus=(gpu, msgspec.structs.replace(gpu, utilization=None)))
    rows = view(
        told("10", machines=(machine,), started_at=WALL_S - 100, ready_after_s=40.0),
        told("9", "loading", reason="weights", n_restarts=3),
    )
    now = moment(report(in_flight_total=4, n_waiting=2), 0.0, rows, NEWS)
    made = make_snapshot(now, LiveHistory(), CONFIG)
    assert [row.replica for row in made.replicas] == ["9", "10"]
    assert (made.replicas[0].reason, made.replicas[0].n_restarts, made.replicas[0].up_s) == ("weights", 3, None)
    assert (made.replicas[1].up_s, made.replicas[1].machines) == (60.0, (machine,))
    assert (made.now.gpu_use, made.now.power_watts) == (0.5, 600.0)
    assert (made.now.in_flight, made.now.waiting, made.now.n_ready, made.now.n_desired) == (4, 2, 1, 2)
    assert (made.deployment, made.phase, made.events) == ("d", "ready", NEWS.events)
    made = make_snapshot(moment(report(), 0.0, view(*(told(f"{n}") for n in range(3000)))), LiveHistory(), CONFIG)
    assert len(made.replicas) == MAX_REPLICAS and made.replicas[-1].replica == f"{MAX_REPLICAS - 1}"
    assert made.now.n_ready == 3000, "totals are not bounded"
    moments = [moment(report(ttft={"0": [n, 2 * n, n], "none": [99, 0, 0]}), 5.0 * n) for n in range(10)]
    slo = make_snapshot(moments[-1], history_of(*moments), CONFIG).slo
    assert (slo.ttft_ms, slo.ttft_share, slo.tpot_ms, slo.tpot_share) == (1000, 0.75, 30, None)


def test_numbers_that_are_none_make_valid_json_of_the_promised_types() -> None:
    nan, inf = float("nan"), float("inf")
    gpu = GpuReading(0, "u", utilization=nan, power_watts=inf)
    rows = view(told("0", load=EngineLoad(nan, inf, nan, inf, nan), machines=(MachineReading("n", gpus=(gpu,)),)))
    moments = [moment(report(), at, rows) for at in (0.0, 5.0)]
    text = msgspec.json.encode(make_snapshot(moments[1], history_of(*moments), CONFIG))
    made = msgspec.json.decode(text, type=Snapshot)
    json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert (made.now.engine_waiting, made.now.gpu_use, made.replicas[0].running) == (0, 0, 0)


def test_news_are_metrics_and_old_ones_do_not_replace_new_ones() -> None:
    board = NewsBoard(CONFIG)
    assert {name for name, _ in board.families(0.0)} == {"build_info", "slo_target_seconds"}
    board.take(DatedNews(10.0, NEWS))
    board.take(DatedNews(9.0, msgspec.structs.replace(NEWS, desired_replicas=7)))
    assert board.read(70.0) == NEWS
    silent = board.read(131.0)
    assert silent is not None and silent.reason is not None
    assert silent.reason.startswith("the controller has not reported for 2m01s")
    families = dict(board.families(12.5))
    assert families["replicas_desired"] == {(): 2}
    assert families["replicas"] == {(("state", "ready"),): 1, (("state", "failed"),): 1}
    assert families["controller_age_seconds"] == {(): 2.5}
    assert families["slo_target_seconds"] == {(("metric", "ttft"),): 1.0, (("metric", "tpot"),): 0.03}


# ---- the stream ------------------------------------------------------------------------------------------------------


class Reader:
    """Events of a stream that a client began."""

    def __init__(self, client: Client) -> None:
        self._client, self._parser, self._events = client, Parser(), list[tuple[str, Any]]()

    async def next(self) -> tuple[str, Any] | None:
        while not self._events:
            data = await self._client.event()
            if not isinstance(data, bytes):
                return None  # END, or no more
            self._events += [(event.name, json.loads(event.data)) for event in self._parser.feed(data)]
        return self._events.pop(0)


async def begin(rig: Rig, query: str = "") -> tuple[Reader, Client]:
    client = await rig.client(rig.gateway.admin.port)
    client.get(f"/dashboard/live{query}", f"Authorization: Bearer {TOKEN}\r\n")
    head = await client.event()
    assert (head.status, head.get(b"content-type")) == (200, b"text/event-stream")
    return Reader(client), client


async def test_a_stream_begins_with_the_history_and_goes_on_with_snapshots() -> None:
    async with Rig(deployment="d") as rig:
        await rig.engine(echo)
        reader, client = await begin(rig)
        name, history = await reader.next() or ("", {})
        assert name == "history" and msgspec.convert(history, History).period_s == 5.0
        for _ in range(3):
            name, made = await reader.next() or ("", {})
            assert name == "snapshot"
        assert [row.replica for row in msgspec.convert(made, Snapshot).replicas] == ["0"]
        status, error = await rig.admin("/admin/news", {"deployment": "d"})
        assert (status, error["error"]["code"]) == (400, "bad_request")
        status, _ = await rig.admin("/admin/news", msgspec.to_builtins(NEWS))
        assert status == 200
        while made.get("phase") != "ready":
            _, made = await reader.next() or ("", {})
        assert made["events"][0]["text"] == "why"
        client.writer.transport.abort()
        while rig.gateway._live.streams:
            await advance(0.001)


async def test_a_gateway_that_stops_ends_its_streams_properly_also_those_of_a_proxy_that_speaks_http_1_0() -> None:
    async with Rig(drain_s=5.0) as rig:
        reader, _ = await begin(rig)
        client = await rig.client(rig.gateway.admin.port)
        client.writer.write(b"GET /dashboard/live HTTP/1.0\r\nAuthorization: Bearer %s\r\n\r\n" % TOKEN.encode())
        await client.reader.readuntil(b"event: snapshot\n")
        began_at, stopping = loop().time(), asyncio.ensure_future(rig.stop())
        rest = await client.reader.read()
        assert rest.endswith(b"\n\n") and b"\r\n" not in rest
        while await reader.next() is not None:
            pass
        assert loop().time() == began_at
        await stopping


async def test_streams_are_bounded_and_a_snapshot_alone_is_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_STREAMS", 1)
    async with Rig(deployment="d") as rig:
        _, client = await begin(rig)
        status, error = await rig.admin("/dashboard/live")
        assert (status, error["error"]["code"]) == (503, "overloaded")
        status, made = await rig.admin("/dashboard/live?once")
        assert (status, made["deployment"]) == (200, "d")
        assert (await rig.admin("/dashboard/live?once", token="wrong"))[0] == 401
        client.writer.transport.abort()


async def test_a_client_that_does_not_read_misses_snapshots() -> None:
    async with Rig() as rig:
        _, client = await begin(rig)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        live: Any
        (live,) = rig.gateway._live.streams
        n_bytes = 0
        while not live._is_paused:
            live.send(b"x" * 65536)
            n_bytes += 65536
            await asyncio.sleep(0)
        size = live._client._transport.get_write_buffer_size()
        for _ in range(100):
            live.send(b"x" * 65536)
        assert live._client._transport.get_write_buffer_size() == size < n_bytes
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        while live._is_paused:
            await client.reader.read(65536)
        client.writer.transport.abort()
