"""Sleep of real vLLM, on the CPU: there its workers keep their memory, and all else is as on a GPU."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock import processes
from penstock.engines import Place
from penstock.engines.vllm import names
from penstock.engines.vllm.engine import Vllm
from penstock.errors import PenstockError
from penstock.hardware import Machine
from penstock.hardware.network import free_port
from penstock.models import files
from penstock.models.facts import read_files
from penstock.node.engine_client import EngineClient
from penstock.node.engine_process import EngineProcess
from penstock.planner import launch
from penstock.spec import reading
from penstock.text import GIB
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

pytestmark = pytest.mark.vllm

START_S = 300.0
KEY = "the-key-of-this-engine"
VLLM = Vllm()


@dataclasses.dataclass(frozen=True)
class Running:
    node: EngineClient
    client: Client
    url: str

    def answer(self) -> str:
        return self.client.complete("the gateway is", max_tokens=8, temperature=0).text

    def is_sleeping(self) -> bool:
        return bool(self.client.get_json("/is_sleeping")["is_sleeping"])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One engine, started as a node does it; only the flag that vLLM refuses on the CPU is left out."""
    wanted = reading.from_mapping({"model": "penstock-demo", "engine": {"max_model_len": 1024, "sleep": {}}})
    facts = read_files(files.locate(wanted), wanted.model, "safetensors")[1]
    plan = launch.make(wanted, facts, Machine("here", 2, 16 * GIB, 8 * GIB), "vllm", VLLM.version(), 1)
    folder = tmp_path_factory.mktemp("engine")
    place = Place("127.0.0.1", free_port("127.0.0.1"), str(folder / "e"), sys.executable, KEY)
    command = VLLM.command(plan, place)
    argv = tuple(word for word in command.argv if word != names.FLAGS["sleep"])
    env = {**command.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", processes.MARK_RUN: str(folder)}
    command = msgspec.structs.replace(command, argv=argv, env=env)
    process = EngineProcess(command, Path(place.folder), processes.Marks(str(folder)))
    try:
        url = f"http://127.0.0.1:{place.port}"
        node, deadline = EngineClient(url, KEY, VLLM.metrics, plan), time.monotonic() + START_S
        while not node.is_up():
            assert process.exit_code() is None, "\n".join(process.tail)
            assert time.monotonic() < deadline, "\n".join(process.tail)
            time.sleep(0.5)
        assert node.gives_token()
        yield Running(node, Client(url, KEY, timeout_s=60.0), url)
    finally:
        process.end(0.0)


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_that_comes_in_its_sleep_waits_in_the_engine_and_is_answered(running: Running, level: int) -> None:
    expected = running.answer()
    running.node.make(VLLM.sleep_calls(level))
    assert running.is_sleeping()
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(running.answer()))
    thread.start()
    time.sleep(1.0)
    assert answers == []
    assert running.node.is_busy() is False, "its metrics do not show it: the gateway knows what it has sent"
    assert running.node.health_problem() is None
    running.node.make(VLLM.wake_calls(level))
    assert not running.is_sleeping()
    thread.join(60)
    assert answers == [expected]


def test_it_falls_asleep_when_what_runs_has_ended(running: Running) -> None:
    replies: list[int | None] = []

    def ask() -> None:
        replies.append(running.client.complete("the", max_tokens=300, ignore_eos=True).output_tokens)

    thread = threading.Thread(target=ask)
    thread.start()
    while running.node.is_busy() is not True and not replies:
        time.sleep(0.01)
    running.node.make(VLLM.sleep_calls(1))
    thread.join(60)
    assert replies == [300]
    running.node.make(VLLM.wake_calls(1))


def test_all_routes_of_the_development_mode_need_the_key(running: Running) -> None:
    calls = [*VLLM.sleep_calls(1), *VLLM.wake_calls(1), *VLLM.wake_calls(2)]
    for call in calls:
        with pytest.raises(HttpError) as refused:
            Client(running.url).post_json(call.path, {})
        assert refused.value.status == 401
    with pytest.raises(PenstockError):
        Client(running.url, "another-key").get_json("/is_sleeping")
