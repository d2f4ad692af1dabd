"""Deployments on a real Slurm: jobs are placed, grow, drain and end, and leave nothing, however they end."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import signal
import sys
import time

import pytest
from hosts import MACHINES, Host
from hosts_slurm import PROCTRACKS
from kubernetes_real_image import PACKAGES, files_of
from slurm_cluster import ENV, Desk

pytestmark = pytest.mark.hosts

both = pytest.mark.parametrize("slurm", PROCTRACKS, indirect=True)


CONFORMANCE = """
import subprocess, sys
from pathlib import Path
from penstock import processes, targets
from penstock.deployment import prepare, start
from penstock.run_folder import Launch
from penstock.spec import reading
from penstock.testing.conformance import check_target

def leftovers():
    return subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout.splitlines()

prepared = prepare.prepare(reading.load(Path(sys.argv[1])))
run = start.write_run(prepared)
launch = Launch("one", prepared.plan, ("http://127.0.0.1:1",), str(run.admin_token_file), listen="network")
check_target(targets.load("slurm"), run, launch, sys.executable, leftovers)
"""


@pytest.mark.nightly  # in `make check` on a stub
@both
def test_target_keeps_its_contract(desk: Desk) -> None:
    file = desk.write(gateway={"on": "job", "auth": "keys", "drain_s": 2})
    desk.python(CONFORMANCE, file)
    assert desk.left() == []


@pytest.mark.parametrize(
    ("runtime", "image"), [("apptainer", "/root/vllm.sif"), ("pyxis", "ghcr.io#a/b:1"), ("podman-hpc", "a/b:1")]
)
def test_an_image_without_penstock_serves(desk: Desk, runtime: str, image: str) -> None:
    """The runtimes are stand-ins. They show their processes only what is mounted, and a Python like vLLM's."""
    desk.slurm.login.run([sys.executable, "-m", "venv", "--without-pip", "/root/image"])
    (site,) = desk.home.glob("image/lib/python*/site-packages")
    for path, name in [row for package in PACKAGES for row in files_of(package)]:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(path.read_bytes())
    (desk.home / "bin").mkdir(exist_ok=True)
    for name in ("apptainer", "podman-hpc", "srun", "pyxis"):
        shutil.copy(MACHINES / "container_runtime.sh", desk.home / "bin" / name)
    block = {"container": image, "container_runtime": runtime, "prologue": ["export SAID=once"]}
    desk.up(desk.write(slurm=block, engine={"env": {"NCCL_DEBUG": "INFO"}}))
    assert desk.answer().startswith("1:tell 2:me")
    desk.down()
    assert image in (desk.home / "containers.log").read_text()
    for name in ("bin", "image"):
        shutil.rmtree(desk.home / name)


@both
def test_a_deployment_comes_up_scales_and_leaves_nothing(desk: Desk) -> None:
    desk.up(desk.write())
    assert desk.answer().startswith("1:tell 2:me")
    desk.call("scale", "one", 2)
    status = desk.status()
    assert [row["state"] for row in status["replicas"]] == ["ready", "ready"]
    assert all(row["ends_at"] > status["observed_at"] for row in status["replicas"])
    assert "GET /health" in desk.call("logs", "one", "--replica", 1)
    desk.call("scale", "one", 1)
    assert [row["replica"] for row in desk.status()["replicas"]] == ["0"]
    desk.down()
    job = desk.slurm.job(desk.job())
    assert job["JobState"] == "COMPLETED", "it ended by itself, and was not cancelled"


@pytest.mark.nightly
def test_a_home_that_the_nodes_do_not_see_is_named_after_one_job(desk: Desk) -> None:
    file, env = desk.write(), {**ENV, "PENSTOCK_HOME": "/var/tmp/home-of-login"}

    def ask(*words: str) -> str:
        argv = [sys.executable, "-m", "penstock", *words]
        done = desk.slurm.login.run(argv, env=env, check=False)
        return done.stdout + done.stderr

    printed = ask("up", file)
    said = r"its job (\d+) could not start: node1 does not see /var/tmp/home-of-login/runs/one"
    job = int(re.findall(said, printed)[0])
    assert "Set PENSTOCK_HOME to a folder on a file system that all nodes have." in printed
    assert desk.slurm.job(job)["JobState"] == "FAILED" and not desk.slurm.job(job + 1), "one job"
    assert "the nodes do not see /var/tmp/home-of-login." in ask("doctor", file, "--quick")
    ask("down", "one", "--now")


# ---- when Slurm, a user or the power takes the job -------------------------------------------------------------------


def node_pids(desk: Desk, role: str) -> list[int]:
    """Of processes of that role, as this machine outside numbers them."""
    return [one.outer_pid for _, one in desk.marked() if one.env.get("PENSTOCK_ROLE") == role]


@both
def test_a_killed_node_is_swept_and_comes_back_and_a_job_cancelled_by_hand_stays_so(desk: Desk) -> None:
    desk.up(desk.write(args={"child": True}))
    job, engines = desk.job(), node_pids(desk, "engine")
    assert engines
    for pid in node_pids(desk, "node"):
        os.kill(pid, signal.SIGKILL)
    desk.wait(lambda: desk.job() != job and desk.replica()["state"] == "ready", "another job serves")
    assert not set(engines) & set(node_pids(desk, "engine"))
    assert f"its job {job} failed with code 137" in desk.call("status", "one")
    assert desk.answer().startswith("1:tell 2:me")
    job = desk.job()
    desk.slurm.run(["scancel", str(job)])
    desk.wait(lambda: desk.replica()["state"] == "failed", "status tells it")
    assert desk.replica()["reason"] == f"its job {job} was cancelled by hand"
    desk.slurm.wait_idle()
    assert desk.status()["phase"] == "failed"
    assert desk.slurm.run(["squeue", "-h"]) == ""
    desk.down()


SURVEY = """
import json, sys
from pathlib import Path
import msgspec
from penstock import targets
from penstock.spec import reading
found = targets.load("slurm").survey(reading.load(Path(sys.argv[1])), ["-c", "print({rank})"], float(sys.argv[2]))
print(json.dumps(msgspec.to_builtins(found)))
"""


@pytest.mark.nightly
def test_a_full_queue_is_told_in_words_by_a_survey_too_and_left_by_itself(desk: Desk) -> None:
    two = desk.write("two", hardware={"nodes": 2})
    rows = json.loads(desk.python(SURVEY, two, "60"))
    assert [(row["host"], row["exit_code"], row["out"]) for row in rows] == [("node1", 0, "0\n"), ("node2", 0, "1\n")]
    blocker = desk.slurm.submit("#!/bin/sh\nexec sleep 300", "-N2", "--exclusive", "--time=5")
    desk.slurm.wait(blocker, "RUNNING")
    (one,) = json.loads(desk.python(SURVEY, two, "4"))
    assert one["exit_code"] is None
    assert "no node free within 4 s" in one["err"]
    desk.up(desk.write(), "--no-wait")
    desk.wait(lambda: "(Resources)" in (desk.replica().get("reason") or ""), "the reason is told")
    row = desk.replica()
    assert row["state"] == "queued"
    assert "waits for nodes to become free" in row["reason"]
    desk.wait(lambda: bool(desk.replica()["starts_at"]), "Slurm estimates the start")
    desk.slurm.run(["scancel", str(blocker)])
    desk.wait(lambda: desk.status()["phase"] == "ready", "it starts")
    desk.down()


def test_a_replica_of_two_nodes_that_is_preempted_or_loses_one_leaves_at_once_and_its_next_job_serves(
    desk: Desk,
) -> None:
    desk.up(desk.write(hardware={"nodes": 2}, engine={"executor": "mp"}))
    assert [node["host"] for node in desk.replica()["announcement"]["nodes"]] == ["node1", "node2"]
    job = desk.job()
    high = desk.slurm.submit("#!/bin/sh\nexec sleep 300", "-N2", "--exclusive", "-p", "high")
    desk.slurm.wait(high, "RUNNING")
    desk.wait(lambda: desk.replica()["state"] == "queued", "its next job is in the queue")
    assert [host for host, one in desk.marked() if one.env.get("PENSTOCK_ROLE") in ("node", "engine")] == []
    assert f"its job {job} was ended by Slurm: preempted" in desk.call("status", "one")
    desk.slurm.run(["scancel", str(high)])
    desk.wait(lambda: desk.status()["phase"] == "ready", "it serves again")
    job = desk.job()
    (further,) = [one.outer_pid for _, one in desk.marked() if one.argv[-2:] == ["--rank", "1"]]
    os.kill(further, signal.SIGKILL)
    desk.wait(lambda: desk.job() != job and desk.replica()["state"] == "ready", "another job serves")
    assert desk.answer().startswith("1:tell 2:me")
    desk.down()


STREAM = """
import sys
from penstock.wire.client import Client
client = Client(sys.argv[1], timeout_s=60.0)
*_, reply = client.stream_chat([{"role": "user", "content": "hi"}], max_tokens=40)
print(reply.finish_reason)
"""


@both
@pytest.mark.parametrize("how", ["requeue", pytest.param("preempt", marks=pytest.mark.nightly)])
def test_a_stream_in_flight_ends_well_when_slurm_takes_the_job(desk: Desk, how: str) -> None:
    """40 tokens at 8 a second are five seconds: less than KillWait."""
    desk.up(desk.write(args={"tokens-per-s": 8}))
    job = desk.job()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reply = pool.submit(desk.python, STREAM, desk.status()["url"])
        desk.wait(lambda: desk.replica()["in_flight"] == 1, "the stream runs")
        if how == "requeue":
            desk.slurm.run(["scontrol", "requeue", str(job)])
        else:
            other = desk.slurm.submit("#!/bin/sh\nexec sleep 300", "-N2", "--exclusive", "-p", "high")
        assert reply.result().strip() == "length", desk.said()
    if how == "requeue":
        desk.event("phase", "degraded -> ready")
        desk.wait(lambda: desk.status()["phase"] == "ready", "it serves again, and not after two minutes")
        assert desk.job() == job, "it is the same replica"
        assert desk.answer().startswith("1:tell 2:me")
    else:
        desk.slurm.run(["scancel", str(other)])
    desk.down()


def test_a_node_without_power_gives_its_replica_to_another(desk: Desk) -> None:
    desk.up(desk.write())
    job = desk.job()
    where: Host = desk.slurm.hosts[desk.slurm.job(job)["NodeList"]]
    where.kill()
    words = f"job {job} on {where.name} has not reported"
    desk.wait(lambda: words in (desk.replica().get("reason") or ""), "status names the machine")
    desk.wait(lambda: desk.replica("1").get("state") == "ready", "its successor on the other node serves")
    assert desk.slurm.job(desk.job("1"))["NodeList"] != where.name
    assert desk.answer().startswith("1:tell 2:me")
    desk.wait(lambda: [row["replica"] for row in desk.status()["replicas"]] == ["1"], "the lost one is ended")
    listed = ["squeue", "-h", "-o", "%i"]
    desk.wait(lambda: str(job) not in desk.slurm.run(listed).split(), "Slurm has given the lost job up")
    desk.down()

    desk.slurm.hosts.heal()
    desk.slurm.run(["scontrol", "update", f"nodename={where.name}", "state=resume"], check=False)
    desk.slurm.wait_idle()
    aged = "touch -d '2 minutes ago' /tmp/penstock-*-0 && ls -d /tmp/penstock-*-0"
    (folder,) = where.run(["sh", "-c", aged]).stdout.split()
    desk.up(desk.write(slurm={"nodelist": where.name}))
    assert where.run(["ls", folder], check=False).returncode, "the next node there removes what the first one left"
    desk.down()


@pytest.mark.nightly
def test_before_the_time_limit_a_successor_takes_over(desk: Desk) -> None:
    desk.up(desk.write(slurm={"time": "2", "successor_s": 112}))
    first = desk.job()

    def is_taken_over() -> bool:
        assert desk.answer().startswith("1:tell 2:me"), "no request is lost meanwhile"
        status = desk.status()
        return [row["replica"] for row in status["replicas"]] == ["1"] and status["phase"] == "ready"

    desk.wait(is_taken_over, "the successor is alone")
    assert desk.slurm.wait(first, "COMPLETED")["ExitCode"] == "0:0"
    events = desk.call("logs", "one", "--part", "events")
    assert "replica leaving" in events
    desk.down()


def test_a_slurmctld_that_is_away_loses_nothing(desk: Desk) -> None:
    """`down` waits for one too: test_slurm_asked."""
    desk.up(desk.write())
    job, began = desk.job(), time.time()
    # slurmctld writes its state seconds after it said yes: until it would know this job again.
    desk.slurm.run(["scontrol", "update", f"JobId={job}", "Comment=kept"])
    saved = ["stat", "-c", "%.Y", "/var/tmp/slurmctld/job_state"]
    desk.wait(lambda: float(desk.slurm.login.run(saved).stdout) > began, "its state is saved")
    (controller,) = [one for one in desk.slurm.login.processes() if one.argv[:1] == ["slurmctld"]]
    os.kill(controller.outer_pid, signal.SIGKILL)
    try:
        assert desk.answer().startswith("1:tell 2:me")
        desk.wait(lambda: "Slurm does not answer" in (desk.replica()["reason"] or ""), "status says so")
        assert desk.status()["phase"] == "ready"
    finally:
        desk.slurm.login.run(["setsid", "--fork", "slurmctld", "-i"], check=False)
    desk.wait(lambda: desk.replica()["reason"] is None, "it is back")
    assert desk.job() == job
    assert desk.replica()["n_restarts"] == 0
    desk.down()
    assert desk.slurm.job(job)["JobState"] == "COMPLETED", "it ended by itself, and was not cancelled"
