"""Real vLLM cut over two hosts by target ssh: the same text, and hosts that lose their power while streams run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts
from launching import Place, a_place, call, now, replica_of
from ssh_rig import left_on, write
from waiting import until

from penstock.errors import PenstockError
from penstock.run_folder import Run
from penstock.testing.demo_prompts import DEMO_PROMPTS, MAX_TOKENS
from penstock.wire.client import Client

pytestmark = [pytest.mark.hosts, pytest.mark.vllm, pytest.mark.nightly]

CHATS = [row for row in DEMO_PROMPTS if row.kind == "chat"][:8]


@pytest.fixture
def place(tmp_path: Path, hosts: Hosts) -> Iterator[Place]:
    with a_place(tmp_path, deadline_s=1200.0) as found:
        yield found


def up(place: Place, hosts: Hosts, executor: str, cut_by: str) -> Run:
    args = {"enforce-eager": True} if cut_by == "tensor" else {}  # vLLM loses requests between stages with it
    engine = {"kind": "vllm", "executor": executor, "max_model_len": 1024, "args": args}
    cut = {"hardware": {"nodes": 2}, "parallel": {cut_by: 2}}
    file = write(place, hosts, engine=engine, workload={"concurrency": 4}, **cut)  # type: ignore[arg-type]
    return place.up(file)


def check_texts(run: Run) -> None:
    client = Client(run.url, timeout_s=60.0)
    for row in CHATS:
        messages = [{"role": "user", "content": row.prompt}]
        assert client.chat(messages, model="one", max_tokens=MAX_TOKENS, temperature=0).text == row.text


class Stream(threading.Thread):
    """A long streamed answer, and what it ended with."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.ending, self.n_parts, self._run_ = "", 0, run
        self.start()

    def run(self) -> None:
        messages = [{"role": "user", "content": "Count from one to ten."}]
        options = {"ignore_eos": True, "min_tokens": 900}
        client = Client(self._run_.url, timeout_s=60.0)
        try:
            for part in client.stream_chat(messages, model="one", max_tokens=900, temperature=0, extra=options):
                self.n_parts += 1
                self.ending = type(part).__name__
        except PenstockError as error:
            self.ending = error.message


def test_mp_over_two_hosts_gives_the_same_text_and_comes_back_after_power_losses(place: Place, hosts: Hosts) -> None:
    run = up(place, hosts, "mp", "tensor")
    told = replica_of(run).announcement
    assert told is not None
    assert [(node.host, node.state, node.address) for node in told.nodes] == [
        ("node1", "here", hosts[0].address),
        ("node2", "here", hosts[1].address),
    ]
    assert told.url is not None and told.url.startswith("http://127.0.0.1:")
    check_texts(run)
    for lost in (1, 0):
        stream = Stream(run)
        until(lambda stream=stream: stream.n_parts > 5, "the stream runs")  # type: ignore[misc]
        hosts[lost].kill()
        stream.join()
        assert not stream.is_alive(), "the client waits for ever"
        assert stream.ending not in ("", "Chunk", "Reply"), "the stream says that it broke off"
        name = f"node{lost + 1}"
        until(lambda name=name: name in (replica_of(run).reason or ""), f"status names {name}")  # type: ignore[misc]
        assert now(run).phase == "degraded"
        hosts[lost].start()
        until(lambda: now(run).phase == "ready", "the replica is back")
        check_texts(run)
    assert call("down", "one").code == 0
    until(lambda: left_on(hosts) == [], "nothing is left")


@pytest.mark.parametrize("executor", ["ray", "mp"])
def test_a_pipeline_over_two_hosts_gives_the_same_text(place: Place, hosts: Hosts, executor: str) -> None:
    run = up(place, hosts, executor, "pipeline")
    check_texts(run)
    log = call("logs", "one").out
    assert {line.partition(" ")[0] for line in log.splitlines()} >= {"node1:", "node2:"}
    assert call("down", "one").code == 0
    until(lambda: left_on(hosts) == [], "nothing is left")
