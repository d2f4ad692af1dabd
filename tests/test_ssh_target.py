"""Target ssh on real hosts with the fake engine: its contract, its life, and what is left of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts
from launching import Asking, Place, a_place, ask, call, check_texts, kill, now, pid_of, replica_of, started
from ssh_rig import left_on, node_of, ours, write
from waiting import end, until

from penstock import processes, targets
from penstock.deployment import leftovers
from penstock.errors import PenstockError
from penstock.models.files import BUNDLED
from penstock.run_folder import Run
from penstock.testing.conformance import check_target
from penstock.wire.client import Client

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(tmp_path: Path, hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Place]:
    with a_place(tmp_path) as ours:
        yield ours


@pytest.mark.nightly  # in `make check` on a stub
def test_ssh_keeps_its_contract(place: Place, hosts: Hosts) -> None:
    run, launch = place.written(write(place, hosts))

    def leftovers() -> list[str]:
        return [*left_on(hosts), *(found.command for found in processes.find_marked(str(run.path)))]

    check_target(targets.load("ssh"), run, launch, sys.executable, leftovers)


def test_hosts_with_a_bare_python_get_all_they_need(place: Place, hosts: Hosts) -> None:
    """Debian's own Python, without pip, venv's pip or a package; the end of its replicas on a full disk."""
    hosts[0].run(["sh", "-c", "mkdir /root/.penstock && mount -t tmpfs -o size=160m tmpfs /root/.penstock"])
    file = write(place, hosts, replicas=3, ssh={"python": "/usr/bin/python3", "folder": "~/.penstock"})
    run = place.up(file)
    assert [len([p for p in ours(host) if p.env.get("PENSTOCK_ROLE") == "node"]) for host in hosts] == [2, 1]
    ask(run)
    versions = hosts[0].run(["ls", "/root/.penstock/versions"]).stdout.split()
    assert len(versions) == 1
    token = run.admin_token()
    for host in hosts:
        assert not [process for process in host.processes() if token in " ".join(process.argv)]
        found = host.run(["sh", "-c", "stat -c %a /root/.penstock/remote/*/secrets/admin-token"]).stdout.split()
        assert found == ["600"]
    fill = "dd if=/dev/zero of=/root/.penstock/fill bs=1M count=200 2>&1; true"
    assert "No space left on device" in hosts[0].run(["sh", "-c", fill]).stdout
    assert call("down", "one").code == 0
    until(lambda: left_on(hosts) == [], "nothing is left")
    hosts[0].run(["rm", "/root/.penstock/fill"])
    place.up(file)
    assert hosts[0].run(["ls", "/root/.penstock/versions"]).stdout.split() == versions


def test_status_logs_scale_and_down(place: Place, hosts: Hosts) -> None:
    refused = call("up", write(place, hosts, "two", hardware={"gpu_ids": [2]}))
    assert refused.code == 2 and refused.err.count("has no usable GPU 2 (") == len(hosts.names)
    run = place.up(write(place, hosts, replicas=2, args={"tokens_per_s": 50}))
    facts = call("status", "one", "--json").json
    assert [row["state"] for row in facts["replicas"]] == ["ready", "ready"]
    assert len({row["announcement"]["url"] for row in facts["replicas"]}) == 2
    assert call("chat", "one", "-m", "hello").code == 0
    printed = call("logs", "one", "-n", "2").out.splitlines()
    assert [line.partition(" ")[0] for line in printed] == ["[0]", "[0]", "[1]", "[1]"]
    with started("logs", "one", "-f", "--replica", "0") as follower:
        assert follower.stdout is not None
        assert list(itertools.islice(follower.stdout, 3))
    until(lambda: not [p for p in ours(hosts[0]) if "logs" in p.argv], "the follower on the host has ended")
    assert call("scale", "one", "3").code == 0
    streams = [Asking(run.url, 100) for _ in range(4)]
    until(lambda: all(stream.text for stream in streams), "the streams run")
    assert call("scale", "one", "1").code == 0
    for stream in streams:
        stream.check_is_whole()
    assert not ours(hosts[1])
    ask(run)
    with started("logs", "one", "-f", "--replica", "0") as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline()
        assert call("down", "one").code == 0
        assert end(follower) == 0, "the connections that `down` closed are no error"
    assert "shutdown complete" in call("logs", "one").out
    until(lambda: left_on(hosts) == [], "nothing is left")


def test_a_killed_ssh_a_killed_tunnel_process_and_a_killed_node_come_back(place: Place, hosts: Hosts) -> None:
    run = place.up(write(place, hosts, args={"tokens_per_s": 50}))
    before = node_of(hosts[0]).pid

    def tunnels() -> list[processes.Marked]:
        return [process for process in processes.find_marked(str(run.path)) if process.role == "tunnel"]

    def is_kept() -> bool:
        return len(tunnels()) == 2 and replica_of(run).state == "ready" and (replica_of(run).announcement is not None)

    for kind in ("ssh", "tunnel process"):
        is_parent = kind == "tunnel process"
        (victim,) = [process for process in tunnels() if ("tunnel_process" in process.command) == is_parent]
        os.kill(victim.pid, 9)
        until(lambda victim=victim: is_kept() and victim.pid not in [p.pid for p in tunnels()], f"{kind} is back")  # type: ignore[misc]
        until(lambda: _answers(run), "requests go through")
        ask(run)
    assert node_of(hosts[0]).pid == before, "the engine did not notice"
    assert now(run).replicas[0].n_restarts == 0
    os.kill(node_of(hosts[0]).outer_pid, 9)
    until(lambda: now(run).replicas[0].n_restarts, "status tells that the node was gone")
    until(lambda: now(run).phase == "ready" and replica_of(run).state == "ready", "it is back")
    assert "is gone" in replica_of(run).restarts[-1].reason
    assert len([process for process in ours(hosts[0]) if process.env.get("PENSTOCK_ROLE") == "engine"]) == 1
    ask(run)


def _answers(run: Run) -> bool:
    with contextlib.suppress(Exception):
        ask(run)
        return True
    return False


@pytest.mark.nightly
def test_a_cut_link_is_told_and_when_it_is_mended_the_same_engine_goes_on(place: Place, hosts: Hosts) -> None:
    for host in hosts:  # a model that this machine has not
        host.run(["cp", "-r", str(BUNDLED), "/root/model"])
    run = place.up(write(place, hosts, replicas=2, model="/root/model"))
    assert run.plan().model.path == "/root/model"
    before = node_of(hosts[0]).pid
    with started("logs", "one", "-f") as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline()
        hosts[0].cut()
        assert end(follower) == 1
        assert follower.stderr is not None
        assert "node1 cannot be reached over ssh: " in follower.stderr.read()
    unread = call("logs", "one")
    assert unread.code == 1 and "node1 cannot be reached over ssh: it does not answer" in unread.err, unread
    until(lambda: "node1 cannot be reached over ssh" in (replica_of(run).reason or ""), "status tells it")
    assert replica_of(run).placement == "broken"
    hosts[0].mend()
    until(lambda: replica_of(run).state == "ready" and now(run).phase == "ready", "it is back")
    until(lambda: _answers(run), "requests go through")
    assert node_of(hosts[0]).pid == before, "the engine did not notice"
    assert all("cannot be reached" in restart.reason for restart in now(run).replicas[0].restarts)

    hosts[1].cut()
    assert call("scale", "one", "1", "--no-wait").code == 0
    until(lambda: "could not end replica 1 on node2" in call("logs", "one", "--part", "events").out, "told")
    assert [row.replica for row in now(run).replicas] == ["0", "1"], "it holds its GPUs until then"
    ask(run)
    hosts[1].mend()
    until(lambda: [row.replica for row in now(run).replicas] == ["0"], "it has ended")
    assert not ours(hosts[1]) and now(run).phase == "ready"


def test_a_host_that_loses_power_comes_back_with_its_replica_under_another_controller(
    place: Place, hosts: Hosts
) -> None:
    run = place.up(write(place, hosts, replicas=2, args={"tokens_per_s": 50}))
    before = node_of(hosts[0]).pid
    streams = [Asking(run.url, 400) for _ in range(6)]
    until(lambda: all(stream.text for stream in streams), "the streams run")
    hosts[1].kill()
    until(lambda: "node2 cannot be reached" in (replica_of(run, "1").reason or ""), "status names the host")
    kill(pid_of(run, "controller"))
    ends = [stream.end() for stream in streams]
    assert [end for end in ends if end.reply], "the streams of the other replica are whole"
    assert all(end.reply or end.error for end in ends), "every client gets an end"
    ask(run)  # by the other replica
    hosts[1].start()
    until(lambda: now(run).phase == "ready", "the replica is back")
    assert node_of(hosts[1], "1") and node_of(hosts[0]).pid == before, "the other was not started again"
    assert now(run).controller.n_restarts == 1


def test_down_with_a_dead_host_ends_the_rest_and_clean_ends_it_later(place: Place, hosts: Hosts) -> None:
    run = place.up(write(place, hosts, replicas=2))
    hosts[1].cut()
    done = call("down", "one")
    assert done.code == 0, done
    assert "could not end what runs on node2" in done.out
    hosts[1].mend()
    assert ours(hosts[1]) and not ours(hosts[0])
    # Alone: processes on the tests' hosts are this machine's too, and those of other tests are none of ours.
    (found,) = [item for item in leftovers.leftovers().found if item.kind == "host"]
    assert found.what == "one on node2, which could not be reached"
    until(lambda: leftovers.clean([found]) == [], "clean reaches the host")
    until(lambda: left_on(hosts) == [], "nothing is left")
    assert not [item for item in leftovers.leftovers().found if item.kind == "host"]
    assert run.is_ended()


# ---- real vLLM cut over two hosts ------------------------------------------------------------------------------------


def up_vllm(place: Place, hosts: Hosts, executor: str, cut_by: str) -> Run:
    args = {"enforce-eager": True} if cut_by == "tensor" else {}  # vLLM loses requests between stages with it
    engine = {"kind": "vllm", "executor": executor, "max_model_len": 1024, "args": args}
    cut = {"hardware": {"nodes": 2}, "parallel": {cut_by: 2}}
    file = write(place, hosts, engine=engine, workload={"concurrency": 4}, **cut)  # type: ignore[arg-type]
    return place.up(file)


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


@pytest.mark.vllm
@pytest.mark.nightly
def test_mp_over_two_hosts_gives_the_same_text_and_comes_back_after_power_losses(place: Place, hosts: Hosts) -> None:
    run = up_vllm(place, hosts, "mp", "tensor")
    told = replica_of(run).announcement
    assert told is not None
    assert [(node.host, node.state, node.address) for node in told.nodes] == [
        ("node1", "here", hosts[0].address),
        ("node2", "here", hosts[1].address),
    ]
    assert told.url is not None and told.url.startswith("http://127.0.0.1:")
    check_texts(Client(run.url, timeout_s=60.0))
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
        check_texts(Client(run.url, timeout_s=60.0))
    assert call("down", "one").code == 0
    until(lambda: left_on(hosts) == [], "nothing is left")


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize("executor", ["ray", "mp"])
def test_a_pipeline_over_two_hosts_gives_the_same_text(place: Place, hosts: Hosts, executor: str) -> None:
    run = up_vllm(place, hosts, executor, "pipeline")
    check_texts(Client(run.url, timeout_s=60.0))
    log = call("logs", "one").out
    assert {line.partition(" ")[0] for line in log.splitlines()} >= {"node1:", "node2:"}
    assert call("down", "one").code == 0
    until(lambda: left_on(hosts) == [], "nothing is left")
