"""Several workers of one gateway: what they report and obey together, and what is lost with one of them: nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
import waiting
from gateway_processes import Workers, ask, until, workers
from store_rig import Store, writer_of

from penstock.gateway.accounting.entry import Accounting
from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.gateway.connections.engine import Pool
from penstock.gateway.context import GatewayContext
from penstock.gateway.live.news import NewsBoard
from penstock.gateway.metrics.counters import Counters
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.gateway.workers.messages import AdminCall, Frames, Message, Report, Reports, frame
from penstock.gateway.workers.parent import HANG_S
from penstock.gateway.workers.reports import Reporter, WorkerReport, add, ended, metrics_answer
from penstock.wire import prometheus
from penstock.world import REAL

COMPLETE = 'penstock_requests_total{model="m",outcome="complete"}'
BELOW_1_S = 'penstock_request_seconds_bucket{model="m",replica="0",le="1.0"}'
SECONDS = 'penstock_request_seconds_sum{model="m",replica="0"}'
WAITING = 'penstock_requests_waiting{model="m"}'


class Worker:
    """One that counts, without its sockets."""

    def __init__(self, store: str | None = None, before: bytes | None = None) -> None:
        address = "127.0.0.1:0"
        models = (ServedModel("m"),)
        config = GatewayConfig(
            listen=address, admin=address, admin_token_file="", models=models, auth="none", store=store
        )
        self.counters, self.queue = Counters(["m"]), WaitingQueue()
        parts = (config, ReplicaTable(models), self.queue, Pool(), self.counters)
        self.accounting = Accounting(config)
        context = GatewayContext(*parts)
        self._reporter = Reporter(context, self.accounting, NewsBoard(config), before)

    def count(self, n_requests: int, seconds: float = 0.25) -> None:
        for _ in range(n_requests):
            self.counters.n_requests += 1
            self.counters.outcomes["m", "complete"] += 1
            self.counters.series("m", "0").duration_s.observe(seconds)

    def encode(self) -> bytes:
        return self._reporter.encode()

    def report(self) -> WorkerReport:
        return msgspec.msgpack.decode(self.encode(), type=WorkerReport)


def samples(report: WorkerReport) -> dict[str, float]:
    """By line, each of which is there once."""
    lines = [line.rpartition(" ") for line in metrics_answer(report).body.decode().splitlines() if line[0] != "#"]
    assert len({name for name, _, _ in lines}) == len(lines)
    return {name: float(value) for name, _, value in lines}


def test_reports_of_workers_are_added() -> None:
    first, second = Worker(), Worker()
    first.count(2)
    second.count(3, seconds=2.0)
    second.counters.outcomes["m", "queue_full"] += 4  # refused, so not served
    report = add([first.report(), second.report(), Worker().report()])
    assert [samples(report)[name] for name in (COMPLETE, BELOW_1_S, SECONDS)] == [5, 2, 6.5]
    assert samples(report)['penstock_replicas_ready{model="m"}'] == 0
    assert report.n_requests == 5
    assert prometheus.parse(metrics_answer(report).body.decode())


def test_counts_of_a_worker_that_ended_stay_and_its_waiting_requests_do_not() -> None:
    worker = Worker()
    worker.count(4)
    assert worker.queue.enter("m", b"", 0, 10) is not None
    assert (samples(worker.report())[WAITING], worker.report().n_waiting) == (1, 1)
    content = worker.encode()
    assert (samples(ended(content)).get(WAITING), ended(content).n_waiting, ended(content).n_requests) == (None, 0, 4)
    for n_generations in (1, 2, 3):
        worker = Worker(before=content)
        worker.count(1)
        content = worker.encode()
        assert (samples(worker.report())[COMPLETE], worker.report().n_requests) == (4 + n_generations,) * 2


def test_a_store_that_fails_for_one_worker_is_not_up(tmp_path: Path) -> None:
    first, second = (Worker(str(tmp_path / "store.sqlite")) for _ in range(2))
    assert second.accounting.ledger is not None
    store = writer_of(second.accounting.ledger)
    store.is_failing, store.n_failures = True, 3
    report = samples(add([first.report(), second.report()]))
    assert (report["penstock_store_up"], report["penstock_store_failures_total"]) == (0, 3)
    for worker in (first, second):
        worker.accounting.close()


def test_messages_are_cut_from_a_stream_wherever_it_is_torn() -> None:
    messages: list[Message] = [Report(b"x" * 300, 7), AdminCall(b"/admin/drain", b"{}"), Reports(1, [b"a", b""], [])]
    data = b"".join([frame(message) for message in messages])
    for size in (1, 3, 100, len(data)):
        frames = Frames()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert [message for piece in pieces for message in frames.feed(piece)] == messages


# Real ones.


def count(gateway: Workers) -> float:
    with urllib.request.urlopen(f"{gateway.listen}/metrics", timeout=waiting.left_s()) as answer:
        return prometheus.parse(answer.read().decode()).get("penstock_requests_total", 0.0)


@pytest.mark.processes
def test_all_workers_obey_and_report_whoever_is_asked(tmp_path: Path) -> None:
    access_log = tmp_path / "access.log"
    with workers(tmp_path, 3, "--access-log", str(access_log)) as gateway:
        replica = {"replica": gateway.replica}
        for number in range(1, 6):
            gateway.chat()
            assert [count(gateway) for _ in range(3)] == [number] * 3
        live = f"{gateway.listen}/dashboard/live?once"
        assert [len(ask(live)["slow"]) for _ in range(3)] == [5] * 3
        until(lambda: access_log.read_bytes().count(b"\n") == 5)
        assert {json.loads(line)["status"] for line in access_log.open()} == {200}
        for path, n_ready in (("drain", 0), ("undrain", 1), ("drain", 0)):
            gateway.call(path, replica)
            assert gateway.ready() == {n_ready}
        # Each in turn is killed. The next one knows the drain and the news before its first request, and counts on.
        gateway.call("news", {"deployment": "d", "phase": "ready", "desired_replicas": 1, "states": {"ready": 1}})
        before = set(gateway.pids)
        for pid in sorted(before):
            pids = set(gateway.pids)
            os.kill(pid, signal.SIGKILL)
            until(lambda pids=pids: len(set(gateway.pids) - pids) == 1)  # type: ignore[misc]
            for _ in range(10):
                assert (gateway.ready(), count(gateway)) == ({0}, 5)
        assert not before & set(gateway.pids)
        assert {ask(live)["phase"] for _ in range(20)} == {"ready"}
        view = gateway.call("replicas")
        assert (view["requests_total"], view["replicas"][0]["is_draining"]) == (5, True)
        # An announcement and a node's post reach all of them.
        announcement = {"replica": "b", "model": "m", "state": "ready", "lease_s": 60, "url": "http://127.0.0.1:9"}
        gateway.call("announce", announcement)
        post = {"replica": "b", "instance": "i", "epoch": "e"}
        for rank in range(4):
            gateway.call("board", post | {"rank": rank})
        until(lambda: gateway.ready() == {1})
        until(lambda: all(len(gateway.call("board", post | {"rank": 0})["posts"]) == 4 for _ in range(6)))
        pids_left = gateway.pids
        gateway.process.send_signal(signal.SIGTERM)
        assert waiting.end(gateway.process) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids_left)


def begin_requests(gateway: Workers, n_requests: int) -> list[socket.socket]:
    """Requests on connections that wait to be accepted."""
    host, port = gateway.listen.removeprefix("http://").split(":")
    body = json.dumps({"model": "m"}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    clients = [socket.create_connection((host, int(port)), timeout=waiting.left_s()) for _ in range(n_requests)]
    for client in clients:
        client.sendall(head % len(body) + body)
    return clients


def statuses(clients: list[socket.socket]) -> set[bytes]:
    answers = set()
    for client in clients:
        with client, client.makefile("rb") as file:
            answers.add(file.read()[9:12])
    return answers


@pytest.mark.processes
def test_worker_that_stops_or_dies_takes_no_connection_that_it_had_not_accepted(tmp_path: Path) -> None:
    with workers(tmp_path, 2) as gateway:
        until(lambda: len(gateway.pids) == 2)
        hung = gateway.pids[0]
        os.kill(hung, signal.SIGSTOP)
        assert {gateway.chat()["by"] for _ in range(100)} == {"fake"}
        assert count(gateway) == 100  # what the stopped one reported last stands for it
        # It does not report: another takes its place, long before anybody starts it again.
        until(lambda: hung not in gateway.pids and len(gateway.pids) == 2)
        until(lambda: gateway.ready() == {1})
        # Nobody accepts, and then one that stands still is killed, or both.
        for n_killed in (1, 2):
            pids = gateway.pids
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            clients = begin_requests(gateway, 20)
            for pid in pids[:n_killed]:
                os.kill(pid, signal.SIGKILL)
            for pid in pids[n_killed:]:
                os.kill(pid, signal.SIGCONT)
            assert statuses(clients) == {b"200"}
            until(lambda: len(gateway.pids) == 2)
            assert count(gateway) == 100 + 20 * n_killed


@pytest.mark.processes
@pytest.mark.nightly
def test_gateway_that_was_stopped_whole_goes_on_with_its_workers(tmp_path: Path) -> None:
    with workers(tmp_path, 2) as gateway:
        until(lambda: len(gateway.pids) == 2)
        pids = gateway.pids
        for pid in (gateway.process.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        stopped_at = REAL.now()  # for longer than a worker may be silent, which no event tells
        until(lambda: REAL.now() - stopped_at > HANG_S + 1)
        for pid in (gateway.process.pid, *pids):
            os.kill(pid, signal.SIGCONT)
        assert gateway.chat() == {"by": "fake"}
        assert gateway.pids == pids


@pytest.mark.processes
@pytest.mark.nightly
def test_a_client_that_asks_one_after_the_other_is_never_over_a_limit_at_once(tmp_path: Path) -> None:
    place = str(tmp_path / "store.sqlite")
    with Store(place) as store:
        _, key = store.keys.create("alice", Limits(concurrency=1, tpm=10**6), time.time())
    with workers(tmp_path, 2, "--auth", "keys", "--store", place) as gateway:
        # Both workers have some of these connections; each request goes by the next one.
        clients = [http.client.HTTPConnection(gateway.listen.removeprefix("http://")) for _ in range(8)]
        statuses = []
        for n in range(80):
            client = clients[n % len(clients)]
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            client.request("POST", "/v1/chat/completions", b'{"model":"m"}', headers)
            answer = client.getresponse()
            answer.read()
            statuses.append(answer.status)
        assert statuses == [200] * 80
        for client in clients:
            client.close()


def is_free(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        return True
    return False


@pytest.mark.processes
def test_workers_end_with_a_parent_that_was_killed_and_leave_its_addresses(tmp_path: Path) -> None:
    with workers(tmp_path, 2) as gateway:
        pids = gateway.pids
        gateway.call("drain", {"replica": gateway.replica})
        with contextlib.closing(begin_requests(gateway, 1)[0]):
            # It waits for an engine: one worker drains for as long as it may, 30 s.
            until(lambda: gateway.call("replicas")["waiting"] == 1)
            gateway.process.kill()
            until(lambda: is_free(gateway.listen) and is_free(gateway.admin))
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("what", ["requests", "aborts", "streams"])
def test_memory_stays_flat(what: str) -> None:
    """Over a million requests, 100,000 aborted streams and 2,000 open ones."""
    soak = Path(__file__).parent.parent / "benchmarks" / "gateway_soak.py"
    assert subprocess.run([sys.executable, str(soak), what], check=False).returncode == 0
