"""Sleep of real vLLM, on the CPU: there its workers keep their memory, and all else is as on a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from nodes_rig import TOKEN, Rig
from waiting import until

from penstock import processes
from penstock.engines.vllm.engine import Vllm
from penstock.hardware import Machine
from penstock.models import files
from penstock.models.facts import read_files
from penstock.node.engine_client import EngineClient
from penstock.planner import Plan, launch
from penstock.spec import reading
from penstock.text import GIB
from penstock.wire.announcement import ASLEEP, engine_key
from penstock.wire.client import Client

pytestmark = pytest.mark.vllm

VLLM = Vllm()


@dataclasses.dataclass(frozen=True)
class Running:
    """`node` and `client` call the engine itself."""

    rig: Rig
    node: EngineClient
    client: Client

    def is_sleeping(self) -> bool:
        return bool(self.client.get_json("/is_sleeping")["is_sleeping"])


def answer(client: Client) -> str:
    return client.complete("the gateway is", max_tokens=8, temperature=0).text


def cpu_plan() -> Plan:
    """For level 2, without the flag that vLLM refuses on the CPU."""
    engine = {"max_model_len": 1024, "sleep": {"level": 2}, "args": {"enable-sleep-mode": False}}
    wanted = reading.from_mapping({"model": "penstock-demo", "engine": {"kind": "vllm", **engine}})
    facts = read_files(files.locate(wanted), wanted.model, "safetensors")[1]
    return launch.make(wanted, facts, Machine("here", 2, 16 * GIB, 8 * GIB), "vllm", VLLM.version(), 1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    plan = cpu_plan()
    rig = Rig(tmp_path_factory.mktemp("rig"), plan)
    try:
        rig.node()
        url, key = rig.wait_state("ready").url, engine_key(TOKEN)
        assert url is not None
        yield Running(rig, EngineClient(url, key, VLLM.metrics, plan), Client(url, key, timeout_s=60.0))
    finally:
        rig.stop()
        rig.close()
        assert processes.sweep(str(rig.run)) == [], "nothing is left of the node"


@pytest.mark.nightly
def test_an_order_puts_it_to_sleep_and_a_request_at_the_gateway_wakes_it(running: Running) -> None:
    rig, expected = running.rig, answer(running.rig.client)
    for _ in range(2):
        rig.admin.post_json("/admin/sleep", {"replica": "0"})
        rig.until(
            lambda: (row := rig.row()) and (shown := row.announcement.progress) and shown.stage.startswith(ASLEEP),
            "it sleeps",
        )
        assert running.is_sleeping()
        assert answer(rig.client) == expected
    told = rig.wait_state("ready")
    assert told.n_restarts == 0
    assert {"sleep_s", "wake_s"} <= told.measured.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("level", [1, 2])
def test_a_request_that_comes_in_its_sleep_waits_in_the_engine_and_is_answered(running: Running, level: int) -> None:
    expected = answer(running.client)
    running.node.make(VLLM.sleep_calls(level))
    assert running.is_sleeping()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, running.client)
        time.sleep(1.0)
        assert not asked.done()
        assert running.node.is_busy(0.0) is False, "its metrics do not show it: the gateway knows what it has sent"
        assert running.node.health_problem(0.0) is None
        running.node.make(VLLM.wake_calls(level))
        assert not running.is_sleeping()
        assert asked.result(60) == expected


@pytest.mark.nightly
def test_it_falls_asleep_when_what_runs_has_ended(running: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.client.complete, "the", max_tokens=300, ignore_eos=True)
        until(lambda: running.node.is_busy(0.0) or asked.done(), "it runs")
        running.node.make(VLLM.sleep_calls(1))
        assert asked.result(60).output_tokens == 300
    running.node.make(VLLM.wake_calls(1))
