"""What target "slurm" does with the answers of Slurm's commands, and with their silence: against scripted ones."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Collection, Sequence
from subprocess import CompletedProcess
from typing import NoReturn

import msgspec
import pytest
from place_stubs import Clock, SlurmStub
from samples import NOW, deployment, draft

from penstock.errors import PenstockError, UserError
from penstock.run_folder import Artifact, Handle, Kind, ReplicaStatus, Run, State, Unit, create, replica
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment, GatewaySpec
from penstock.spec.reading import to_yaml
from penstock.targets.slurm import commands as commands_module
from penstock.targets.slurm import script, target


class Commands(SlurmStub, Clock):
    """The queue of place_stubs, with jobs that stay as they are told to be, and the commands that were asked of it."""

    def __init__(self) -> None:
        Clock.__init__(self)
        self.asked, self.jobs = list[list[str]](), dict[str, dict[str, str]]()
        self.prefix, self.folder, self.reason, self.submitted = "penstock-one-", "", "None", "17\n"
        self.n_silent = self.n_unheard = 0  # so many times the next squeue, the next scancel fails
        self.has_steps = True

    def ask(self, words: Sequence[str], *_: object, **__: object) -> CompletedProcess[str]:
        self.asked.append(list(words))
        fails = "-s" in words and not self.has_steps
        if words[0] == "squeue" and self.n_silent > 0:
            self.n_silent, self.now, fails = self.n_silent - 1, self.now + 1.0, True
        if words[0] == "scancel" and self.n_unheard > 0:
            self.n_unheard, fails = self.n_unheard - 1, True
        return CompletedProcess(words, 1, "", "error: Socket timed out\n") if fails else super().ask(words)

    def become(self, **states: str) -> None:
        """`j1="RUNNING"`: job 1 runs."""
        for name, state in states.items():
            row = {"name": f"{self.prefix}{name[1:]}", "folder": self.folder, "state": state}
            self.jobs[name[1:]] = row

    def states(self) -> dict[str, str]:
        return {number: job["state"] for number, job in self.jobs.items()}

    def of(self, name: str) -> list[list[str]]:
        return [words[1:] for words in self.asked if words[0] == name]

    def _move(self) -> None:
        pass

    def _squeue(self, words: list[str]) -> str:
        assert "-s" in words or words[words.index("-u") + 1] == getpass.getuser()
        return super()._squeue(words).replace("None\n", f"{self.reason}\n")

    def _scancel(self, words: list[str]) -> str:
        if not words[0].startswith("-"):
            self.become(**{f"j{number}": "CANCELLED" for number in words})
        return ""

    def _sbatch(self, words: list[str]) -> str:
        return self.submitted

    def _sacct(self, words: list[str]) -> str:
        return "1|CANCELLED by 1000\n"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    scripted = Commands()
    for module in (commands_module, target):
        monkeypatch.setattr(module, "ask", scripted.ask)
        monkeypatch.setattr(module, "time", scripted)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return scripted


def run_of(commands: Commands, is_gateway: bool = False, **states: str) -> Run:
    """A run whose replicas' jobs, or whose gateway's, are these (`j1="RUNNING"`); the handle has them all."""
    wanted: Deployment = msgspec.structs.replace(deployment(name="one"), target="slurm")
    kind: Kind = "gateway" if is_gateway else "replica"
    if is_gateway:
        wanted = msgspec.structs.replace(wanted, gateway=GatewaySpec(on="job", auth="keys", drain_s=10))
        commands.prefix = "penstock-one-gateway-"
    facts = {"placed": ("replica", "gateway")[: 1 + is_gateway], "artifact": Artifact(("sbatch", "{replica}"), {})}
    run = create(msgspec.structs.replace(draft(wanted), **facts), NOW)
    commands.folder = str(run.gateway_folder if is_gateway else run.path)
    commands.become(**states)
    entries = {Unit(kind, str(name)).key: {"job": job} for name, job in enumerate(commands.jobs)}
    run.write_handle(Handle("slurm", entries))
    return run


TERM = ["--signal=TERM", "--batch", "1"]


def test_a_gateway_is_told_once_to_drain_and_cancelled_after_its_time(commands: Commands) -> None:
    run, slurm = run_of(commands, is_gateway=True, j1="RUNNING"), target.Slurm()
    commands.n_unheard = 1
    slurm.place(run, [])
    assert not list(run.gateway_folder.glob("told-*"))
    run.write_handle(slurm.place(run, []))
    assert commands.of("scancel") == [TERM] * 2, "the first signal did not arrive"
    assert slurm.status(run) == {}, "it is no gateway any more"
    (note,) = run.gateway_folder.glob("told-*")
    os.utime(note, (commands.now, commands.now))
    slurm.place(run, [])
    commands.now += 20
    slurm.keep_up(run)
    assert commands.of("scancel") == [TERM] * 2, "it has its time"
    commands.now += 20
    slurm.keep_up(run)
    assert commands.states() == {"1": "CANCELLED"}


def test_a_squeue_that_fails_once_does_not_break_off_an_end(commands: Commands) -> None:
    run, slurm = run_of(commands, j1="RUNNING", j2="RUNNING"), target.Slurm()
    sleeps = iter(range(1, 100))

    def on_sleep() -> None:
        n_sleeps = next(sleeps)
        if n_sleeps == 2:
            commands.n_silent = 3
        if n_sleeps == 8:
            commands.become(j1="COMPLETED", j2="COMPLETED")

    commands.on_sleep.append(on_sleep)
    slurm.end(run, 30.0)
    assert commands.of("scancel") == [["--signal=INT", "1"], ["--signal=INT", "2"]], "they drained"


def test_an_end_begins_when_slurm_is_back(commands: Commands) -> None:
    run, slurm = run_of(commands, j1="PENDING"), target.Slurm()
    commands.n_silent = 3
    slurm.end(run, 30.0)
    assert commands.states() == {"1": "CANCELLED"}
    commands.n_silent = 1000
    began = commands.now
    with pytest.raises(PenstockError, match="Socket timed out"):
        slurm.end(run, 30.0)
    assert commands.now - began < 20


def test_a_job_that_runs_is_drained_even_if_slurm_does_not_list_its_steps(commands: Commands) -> None:
    run, slurm = run_of(commands, j1="RUNNING", j2="PENDING", j3="COMPLETED"), target.Slurm()
    commands.has_steps = False
    commands.on_sleep.append(lambda: commands.become(j1="COMPLETED"))
    slurm.end(run, 30.0)
    assert commands.of("scancel") == [["2", "3"], ["--signal=INT", "1"]]


def test_a_job_that_went_to_another_cluster_is_taken_back(commands: Commands) -> None:
    run, slurm = run_of(commands, is_gateway=True), target.Slurm()
    commands.submitted = "17;gpu\n"
    with pytest.raises(UserError, match='sbatch sent it to cluster "gpu"'):
        slurm.place(run, [Unit("gateway", "0")])
    assert commands.of("scancel") == [["-M", "gpu", "17"]]
    assert not list(run.path.glob("logs/*17*"))


def test_a_rehearsal_takes_the_file_where_no_cluster_answers(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> NoReturn:
        raise PenstockError("could not read Slurm's nodes: Unable to contact slurm controller", is_retryable=True)

    monkeypatch.setattr(commands_module, "read_site", away)
    slurm, wanted = target.Slurm(), deployment(target="slurm", hardware={"gpu": "h100-sxm", "gpus_per_node": 4})
    assert slurm.check(wanted, is_rehearsal=True) == []
    (machine,) = slurm.machines(wanted, is_rehearsal=True)
    assert (len(machine.gpus), "Unable to contact" in str(machine.assumed)) == (4, True)
    for ask in (slurm.check, slurm.machines):
        with pytest.raises(PenstockError, match="Unable to contact"):
            ask(wanted)


@pytest.mark.parametrize(("account", "sees"), [(None, "['SBATCH_ACCOUNT']"), ("lab", "[]")])
def test_jobs_get_no_secret_of_the_shell_and_sbatch_no_variable_that_overrides_the_script(
    account: str | None, sees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"HF_TOKEN": "hf", "HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "PENSTOCK_NATIVE": "0", "PYTHONPATH": "/x"}
    refused = {"AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "VLLM_API_KEY", "SSH_AUTH_SOCK", "DB_URL", "SQUEUE_FORMAT"}
    refused |= {"SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_CLUSTERS", "PENSTOCK_RUN"}
    for name, value in (kept | dict.fromkeys(refused, "x")).items():
        monkeypatch.setenv(name, value)

    def ask(words: Sequence[str], *_: object, variables: Collection[str], **__: object) -> CompletedProcess[str]:
        environment = commands_module.environment(variables)
        assert environment.items() >= kept.items()
        return CompletedProcess(words, 1, "", f"it sees {sorted(environment.keys() & refused)}")

    monkeypatch.setattr(commands_module, "ask", ask)
    wanted = deployment(name="one", target="slurm", slurm={"account": account})
    (problem,) = commands_module.tested(wanted, "/shared/runs/one", None)
    assert problem.message == f"sbatch refuses it: it sees {sees}"
    with pytest.raises(PenstockError, match=re.escape(f"it sees {sees}")):
        commands_module.Queue().submit(["sbatch"], "it", "", script.variables(wanted))


def test_a_successor_avoids_the_machine_of_a_replica_that_does_not_report(commands: Commands) -> None:
    run, slurm = run_of(commands, j1="RUNNING"), target.Slurm()
    run.write_state(State(0.0, "degraded", 1, (ReplicaStatus("0", "silent", "placed"),)))
    handle = slurm.place(run, [replica("0"), replica("2")])
    assert set(handle.units) == {"replica/0", "replica/2"}
    (words,) = commands.of("sbatch")
    assert words[0] == "--exclude=node1"
    began = commands.now
    slurm.end(run, 130.0)
    assert (commands.of("scancel"), commands.now) == ([["1"]], began), "nothing there would drain"


def test_a_requeued_job_is_the_same_replica_in_the_queue_and_is_started_now_and_not_after_two_minutes(
    commands: Commands,
) -> None:
    run, slurm = run_of(commands, j1="RUNNING"), target.Slurm()
    assert slurm.status(run)[replica("0")].state == "placed"
    commands.become(j1="PENDING")
    for commands.reason, n_updates in (("Resources", 0), ("BeginTime", 1), ("BeginTime", 1)):
        commands.now += 5
        slurm.keep_up(run)
        assert commands.of("scontrol") == [["update", "jobid=1", "starttime=now"]] * n_updates
    row = slurm.status(run)[replica("0")]
    assert row.state == "queued" and (row.reason or "").startswith("job 1 was requeued: its earliest start")


def test_sacct_is_asked_once_who_cancelled_a_job(commands: Commands) -> None:
    run, slurm = run_of(commands, j1="CANCELLED"), target.Slurm()
    for _ in range(3):
        commands.now += 60
        placement = slurm.status(run)[replica("0")]
        assert (placement.state, placement.is_final) == ("gone", True)
        assert placement.reason == "its job 1 was cancelled by hand (by uid 1000)"
    assert len(commands.of("sacct")) == 1
    commands.now += 60
    commands.become(j1="PENDING")
    assert slurm.status(run)[replica("0")].state == "queued", "requeued by hand, it is not over"


def test_a_container_gets_penstocks_code_by_the_run_folder(commands: Commands) -> None:
    run, slurm = run_of(commands), target.Slurm()
    wanted = msgspec.structs.replace(run.deployment(), slurm=Slurm(container="/images/vllm.sif"))
    (run.path / "spec.yaml").write_text(to_yaml(wanted), "utf-8")
    slurm.place(run, [replica("0")])
    assert (run.path / "code" / "penstock" / "__init__.py").exists() and not [*run.path.rglob("*.so")]


def test_a_job_that_a_killed_controller_submitted_from_zero_is_taken_over(commands: Commands) -> None:
    run, slurm = run_of(commands, j0="PENDING"), target.Slurm()
    run.write_handle(Handle("slurm", {}, ordered=("0",)))
    assert slurm.place(run, [Unit("replica", "0")]).units == {"replica/0": {"job": "0"}}
    assert commands.of("sbatch") == commands.of("scancel") == []
    assert slurm.place(run, []).units == {}
    assert commands.of("scancel") == [["0"]], "it is not wanted any more"
