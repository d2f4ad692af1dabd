"""Deployments on a real Slurm: jobs are placed, grow, drain and end, and leave nothing, however they end."""

from __future__ import annotations

import re
import sys

import pytest
from hosts_slurm import PROCTRACKS
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
