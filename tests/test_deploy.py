"""What deploy decides without starting anything: what is left behind, and when a change of size is done."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest
from samples import NOW, cpu_machine, demo_plan, deployment, draft, gpu_machine, gpu_plan, run_folder, told

from penstock import processes, targets
from penstock import run_folder as runs
from penstock.bench import offline
from penstock.deployment import orders, place, planning, preflight, prepare
from penstock.deployment import start as deploy
from penstock.errors import EngineError, PenstockError, PlanError, SpecError, UserError
from penstock.hardware import Machine, detect
from penstock.processes import Marked
from penstock.run_folder import Artifact, Desired, Handle, Part, ReplicaStatus, Run, State
from penstock.spec.deployment import TARGETS, Deployment
from penstock.targets import Target, local
from penstock.targets.assumed import machines_of_file
from penstock.text import GIB
from penstock.wire.announcement import Process


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Marked]:
    """The marked processes of this machine, as the test says; temporary folders are under tmp_path."""
    found: list[Marked] = []
    monkeypatch.setattr(processes, "find_marked", lambda *_: found)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return found


class Cluster:
    """Three machines of one GPU, and a run with a replica on each of the first two."""

    name, listen, is_elastic = "ssh", "loopback", False

    def machines(self, wanted: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        free = gpu_machine(1)
        used = msgspec.structs.replace(free, gpus=(msgspec.structs.replace(free.gpus[0], memory_free_bytes=GIB),))
        return [used, used, free]

    def nodes_per_machine(self, wanted: Deployment, handle: Handle, n_more: int = 0) -> list[int]:
        return [1, 1, n_more]

    def order(self, run: Run, desired: Desired) -> None:
        run.write_desired(desired)


def run_of(wanted: Deployment) -> Run:
    """With one GPU a replica."""
    return runs.create(msgspec.structs.replace(draft(wanted), plan=gpu_plan()), NOW)


def test_more_replicas_are_judged_by_the_machines_that_they_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(deployment(target="ssh", replicas=2))
    monkeypatch.setattr("penstock.targets.load", lambda _: Cluster())
    monkeypatch.setattr(orders, "revive", lambda _: None)
    orders.scale(run, 3)
    with pytest.raises(PlanError, match="cannot place 2 x 1 ranks"):
        orders.scale(run, 5)
    assert run.desired().replicas == 3


def test_what_a_run_holds_of_its_hosts_counts_as_free_for_its_replacement() -> None:
    wanted, cluster = deployment(target="ssh"), cast(Target, Cluster())
    found = prepare._machines(cluster, wanted, run_of(wanted))
    assert [machine.gpus[0].memory_free_bytes for machine in found] == [80 * GIB] * 3
    for run in (run_of(deployment()), run_of(deployment(target="ssh", hardware={"gpu_ids": [1]}))):
        found = prepare._machines(cluster, wanted, run)
        assert found[0].gpus[0].memory_free_bytes == GIB, "another target's run, or one of other GPUs, holds nothing"


def test_replicas_get_the_gpus_that_the_file_names_and_one_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = "".join(f"{index}, GPU-{index}, NVIDIA H200, 143771, 143000\n" for index in range(4))
    monkeypatch.setattr(detect, "nvidia_smi", lambda *_: rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    run, here, task = run_of(deployment(hardware={"gpu_ids": [3, 1]})), local.Local(), offline.Task("latency", (), 1)
    assert [gpu.index for gpu in prepare._machines(here, run.deployment(), None)[0].gpus] == [1, 3]
    assert [local._choose_gpus(run, taken) for taken in ({}, {"0": {"gpus": [1]}})] == [[1], [3]]
    with pytest.raises(PenstockError, match="needs 1 GPUs, 0 are free") as full:
        local._choose_gpus(run, {"0": {"gpus": [1, 3]}})
    assert full.value.detail == "The file allows GPUs 3, 1 (hardware.gpu_ids)."
    absent = deployment(hardware={"gpu_ids": [9, 1, 2]})
    for look in (partial(prepare._machines, here, absent, None), partial(planning.request_for, absent, {}),
                 partial(offline._plan, absent, 1, task)):  # fmt: skip
        with pytest.raises(SpecError) as refused:
            look()
        assert "hardware.gpu_ids: " in str(refused.value.detail) and "no usable GPU 2, 9 (" in str(refused.value.detail)
    asked = planning.request_for(deployment("llama-3.1-8b", hardware={"gpu_ids": [1, 3]}), {})[0]
    named = deployment("llama-3.1-8b", target="ssh", hardware={"gpu": "l4", "gpu_ids": [4, 5, 6]})
    assert (asked.gpus_per_node, planning.request_for(named, {})[0].gpus_per_node) == (2, 3)
    assert [gpu.index for gpu in machines_of_file(named, "a test")[0].gpus] == [4, 5, 6]


def rows(*states: str) -> tuple[ReplicaStatus, ...]:
    return tuple(ReplicaStatus(str(number), state, "placed") for number, state in enumerate(states))


@pytest.mark.parametrize(
    ("states", "n_replicas", "expected"),
    [
        (("ready", "ready"), 2, True),
        (("ready", "failed"), 2, True),
        (("ready", "loading"), 2, False),
        (("ready", "draining"), 1, False),
        (("ready",), 2, False),
        ((), 0, True),
    ],
)
def test_a_change_of_size_is_done_when_every_replica_is_settled(
    states: tuple[str, ...], n_replicas: int, expected: bool
) -> None:
    assert orders.is_scaled(State(NOW, "ready", n_replicas, rows(*states)), n_replicas) is expected
    assert not orders.is_scaled(State(NOW, "ready", n_replicas + 1, rows(*states)), n_replicas), "an old observation"


@pytest.mark.loopback
@pytest.mark.usefixtures("marked")
def test_other_settings_do_not_replace_what_runs_unasked() -> None:
    run_folder(deployment(name="d"))
    with pytest.raises(UserError) as caught:
        deploy.up(deployment(name="d", workload={"concurrency": 9}))
    assert caught.value.message == 'deployment "d" runs with other settings'
    assert caught.value.detail == "workload.concurrency: 8 -> 9"
    assert caught.value.hint == "Add --replace to end it and start the new one, or give another --name."


def look(run: Run, phase: str, *replicas: ReplicaStatus) -> None:
    """As a living controller has just seen it."""
    me = processes.identify(os.getpid(), "controller")
    run.write_state(State(time.time(), phase, 1, replicas, controller=Part("running", me)))  # type: ignore[arg-type]


def test_a_failed_start_is_told_also_when_somebody_else_is_ending_it(marked: list[Marked]) -> None:
    """The lock's own refusal used to hide why the engine did not start."""
    run = run_folder(deployment(name="d"))
    look(run, "failed", ReplicaStatus("0", "failed", "gone", told("0", "failed"), reason="out of memory"))
    with runs.locked("d"), pytest.raises(EngineError, match='could not start replica 0 of "d": out of memory'):
        deploy.wait_ready(run, lambda state: None, timeout_s=1)
    with pytest.raises(PenstockError, match="could not start replica 0: out of memory"):
        orders.wait_scaled(run, 1, lambda state: None, timeout_s=1)
    look(run, "down")
    with pytest.raises(PenstockError, match='could not start deployment "d": it was stopped while it was starting'):
        deploy.wait_ready(run, lambda state: None, timeout_s=1)


def test_a_run_that_is_stopping_or_has_failed_is_not_taken_for_a_running_one(marked: list[Marked]) -> None:
    run = run_folder(deployment(name="d"))
    look(run, "ready")
    assert deploy._running("d") is not None
    look(run, "failed")
    assert deploy._running("d") is None
    run.write_desired(Desired("down", 0))
    assert deploy._running("d") is None
    found = prepare.not_ended("d")
    assert found is not None and found.path == run.path


@pytest.fixture
def wanted(marked: list[Marked], monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """One that passes all checks."""
    wanted = deployment(name="d", replicas=0, gateway={"port": 0})
    prepared = prepare.Prepared(wanted, cpu_machine(), demo_plan(), Artifact(("true",), {}))
    monkeypatch.setattr(deploy, "prepare", lambda *_, **__: prepared)
    return wanted


@pytest.mark.loopback
def test_a_start_that_broke_off_is_ended_although_ctrl_c_comes_again(
    wanted: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_again(*_: object) -> list[Marked]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, "start_controller", press)
    monkeypatch.setattr(processes, "sweep", interrupt_again)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        deploy.up(wanted, on_step=said.append)
    assert said == ["ending d ..."]
    assert runs.find("d").is_ended()


@pytest.mark.processes
def test_ports_are_held_from_before_the_plan_until_the_gateway_has_them(
    wanted: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hand_over(run: Run, sockets: Sequence[socket.socket]) -> None:
        config = run.gateway_file()
        ports = [int(address.rpartition(":")[2]) for address in (config.listen, config.admin)]
        assert [sock.getsockname()[1] for sock in sockets] == ports
        socket.create_connection(("127.0.0.1", ports[0])).close()  # a client may come, and waits
        raise KeyboardInterrupt

    monkeypatch.setattr(place, "start_controller", hand_over)
    with pytest.raises(KeyboardInterrupt):
        deploy.up(wanted)


@pytest.mark.loopback
def test_a_port_that_is_taken_after_the_check_is_told_and_leaves_nothing(wanted: Deployment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        gateway = msgspec.structs.replace(wanted.gateway, port=port)
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            deploy.up(msgspec.structs.replace(wanted, gateway=gateway))
    assert runs.every() == []


def test_a_home_with_a_placeholder_in_its_name_is_kept_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(argv: list[str], *_: object) -> Process:
        started.append(argv)
        return Process(7, 1.0)

    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "{replica}"))
    monkeypatch.setattr(processes, "start_detached", start)
    template = Artifact(("node", "{run}/launch.json", "--replica", "{replica}"), {})
    run = runs.create(msgspec.structs.replace(draft(), artifact=template), NOW)
    local._start(run, "3", ())
    assert started == [["node", f"{run.path}/launch.json", "--replica", "3"]]


@pytest.mark.loopback
def test_a_variable_that_nobody_reads_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGING_LEVEL", "DEBUG")
    wanted = deployment(gateway={"port": 0}, engine={"env": {"NCCL_SOCKET_IFNAM": "eth0"}})
    told = prepare.prepare(wanted).plan.warnings
    assert [warning.partition(" is no variable")[0] for warning in told] == ["NCCL_SOCKET_IFNAM", "VLLM_LOGING_LEVEL"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("gpu", "paths"), [("mi300x", ["hardware.gpu"]), ("h100-sxm", []), (None, [])])
def test_a_card_that_no_place_can_start_is_refused_on_each(target: str, gpu: str | None, paths: list[str]) -> None:
    wanted = deployment(target=target, hardware={"gpu": gpu})
    assert [problem.path for problem in preflight.unsupported(wanted, targets.load(target))] == paths
