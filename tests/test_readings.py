"""What a node reads of its machine, and how its readings reach the gateway."""

from __future__ import annotations

import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback_server import LoopbackHandler, LoopbackServer, running
from manual_world import ManualWorld
from samples import NOW, demo_plan, told, view

from penstock.deployment.observe import History, Observation, summarise
from penstock.engines import load
from penstock.node import readings as readings_module
from penstock.node.announcer import Announcer
from penstock.node.engine_client import EngineClient
from penstock.node.readings import MachineReader, Readings, answers_as_dcgm
from penstock.node.report import StageTimes
from penstock.run_folder import Desired, Part, replica
from penstock.targets import Placement
from penstock.testing.fake_nvml import FakeGpu, FakeNvml
from penstock.wire.announcement import AnnounceAnswer, EngineLoad, MachineReading

Counters = namedtuple("Counters", "bytes_recv bytes_sent")
HERE = MachineReading("here")


def test_the_machine_is_read_in_shares_and_bytes(tmp_path: Path) -> None:
    reading = MachineReader(tmp_path / "not" / "there").read()
    assert reading.cpu_use is not None and 0 <= reading.cpu_use <= 1
    assert 0 < (reading.memory_used_bytes or 0) < (reading.memory_total_bytes or 0)
    assert 0 < (reading.disk_free_bytes or 0) < (reading.disk_total_bytes or 0)
    assert reading.gpus == () and reading.dcgm_port is None


@pytest.mark.parametrize(
    ("cards", "sums"), [(["eth0"], (10, 1)), ([], (10 + 100 + 1000, 1 + 2 + 3)), (["eth0", "eth1"], (110, 3))]
)
def test_network_bytes_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cards: list[str], sums: tuple[int, int]
) -> None:
    bytes_of = {"lo": (5, 5), "eth0": (10, 1), "eth1": (100, 2), "bond0": (1000, 3)}
    rows = {name: Counters(*counts) for name, counts in bytes_of.items()}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: rows)
    monkeypatch.setattr(readings_module, "_NETWORK", tmp_path)
    for name in cards:
        (tmp_path / name / "device").mkdir(parents=True)
    reading = MachineReader(tmp_path).read()
    assert (reading.received_bytes, reading.sent_bytes) == sums


def test_gpus_are_those_of_the_engine_and_dcgm_is_looked_for_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu("GPU-1"), FakeGpu("GPU-2")]))
    looks: list[float] = []

    def finds() -> bool:
        looks.append(now)
        return now > 60

    readings = Readings(lambda: HERE, finds)
    now = 0.0
    readings.look(now)
    assert readings.latest() == HERE and looks == []  # no GPUs: nothing to look for
    readings.use_gpus({"CUDA_VISIBLE_DEVICES": "1"}, 1)
    ports = []
    for second in (1.0, 2.0, 60.0, 61.5):
        now = second
        readings.look(now)
        latest = readings.latest()
        assert latest is not None and [gpu.uuid for gpu in latest.gpus] == ["GPU-2"]
        ports.append(latest.dcgm_port)
    assert looks == [1.0, 61.5] and ports == [None, None, None, 9400]


def test_old_readings_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = Readings(lambda: HERE)
    assert readings.latest() is None
    readings.look(0.0)
    monkeypatch.setattr(readings_module, "STALE_S", 0.0)
    assert readings.latest() is None


def test_a_reading_that_fails_or_is_slow_ends_nothing_and_does_not_pile_up() -> None:
    world, pauses = ManualWorld(), list[float]()

    def read() -> MachineReading:
        world.time_s += 3.5 if len(pauses) == 1 else 0.25
        if len(pauses) == 2:
            raise OSError("no /proc")
        return HERE

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        world.time_s += seconds
        if len(pauses) == 5:
            raise SystemExit

    world.sleep = sleep
    with pytest.raises(SystemExit):
        Readings(read, world=world).run()
    assert pauses == [0.75, 0.0, 0.75, 0.75, 0.75]


@pytest.mark.loopback
@pytest.mark.parametrize(("page", "is_dcgm"), [(b'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 41\n', True), (b"up 1\n", False)])
def test_a_dcgm_exporter_is_known_by_its_names(page: bytes, is_dcgm: bool) -> None:
    class Handler(LoopbackHandler):
        def do_GET(self) -> None:
            self.send(200, page)

    with running(LoopbackServer(Handler)) as server:
        assert answers_as_dcgm(server.server_port) is is_dcgm
    assert not answers_as_dcgm(server.server_port)


def obeyed(answers: list[dict[str, Any]]) -> tuple[AnnounceAnswer, dict[str, Any]]:
    """What a node obeys when gateways answer so, and what it had posted."""
    posts, orders, done = list[dict[str, Any]](), list[AnnounceAnswer](), threading.Event()

    class Gateways:
        def post_all(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
            posts.append(body)
            return answers

    def obey(answer: AnnounceAnswer) -> None:
        orders.append(answer)
        done.set()
        threading.Event().wait()

    announcer = Announcer(Gateways(), obey, lambda: (HERE,))  # type: ignore[arg-type]
    announcer.announce(told("0"))
    announcer.start()
    assert done.wait(5)
    return orders[0], posts[0]


def test_an_announcement_carries_the_readings_of_its_moment() -> None:
    assert obeyed([{"draining": False}])[1]["machines"] == ({"host": "here"},)


def test_a_wake_counts_whichever_gateway_orders_it_and_other_orders_are_the_first_ones() -> None:
    answers = [{"draining": False, "sleep": True}, {"draining": False, "wake": True, "leave": True}]
    assert obeyed(answers)[0] == AnnounceAnswer(draining=False, leave=False, sleep=True, wake=True)


def test_a_start_is_timed_by_stage() -> None:
    times = StageTimes()
    times.enter("early", 0.0)
    times.begin("files", 10.0)
    for stage, now in [("imports", 10.5), ("imports", 11.0), ("weights", 12.0), ("imports", 20.0), ("warming", 21.0)]:
        times.enter(stage, now)
    assert times.end(23.456) == {"files": 0.5, "imports": 2.5, "weights": 8.0, "warming": 2.46}
    times.enter("late", 30.0)
    times.begin("files", 40.0)
    assert times.end(41.0) == {"files": 1.0}


@pytest.mark.parametrize(
    ("engine", "page", "tokens"), [("vllm", "vllm-0.32.0", (100, 105, 0)), ("llamacpp", "llamacpp", (10, 5, 7))]
)
def test_the_engines_tokens_are_in_its_load(
    monkeypatch: pytest.MonkeyPatch, engine: str, page: str, tokens: tuple[int, int, int]
) -> None:
    text = (Path(__file__).parent / "golden" / page / "metrics.txt").read_text()
    client = EngineClient("http://127.0.0.1:9", None, load(engine).metrics, demo_plan("fake"))
    monkeypatch.setattr(client._http, "get_text", lambda path: text.replace("cached_total 0", "cached_total 7"))
    client.stalled_s(0.0)
    assert client.load is not None
    assert (client.load.prompt_tokens, client.load.output_tokens, client.load.cached_tokens) == tokens


def test_readings_do_not_change_the_state_on_disk() -> None:
    def state(n: int) -> Any:
        reading = MachineReading("here", cpu_use=n / 10)
        row = told("0", machines=(reading,), load=EngineLoad(1.0, 0.0, 0.5, n, n, n), start_s={"weights": 2.0})
        seen = Observation({replica("0"): Placement("placed")}, view(row), Part("running"))
        return summarise(Desired("up", 1), seen, History(), NOW)

    assert state(1) == state(2)
    (row,) = state(1).replicas
    assert row.announcement.machines == () and row.announcement.load == EngineLoad(1.0, 0.0, 0.5)
    assert row.announcement.start_s == {"weights": 2.0}
