"""A gateway in a job of its own, on a real Slurm, and a laptop that reaches only the login node: verbs run there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hosts import ROOT, HostProcess
from hosts_slurm import PROCTRACKS, Slurm
from launching import measured
from slurm_cluster import ENV, Desk
from waiting import end

from penstock.wire.client import Client

pytestmark = pytest.mark.hosts


JOB = {"on": "job", "auth": "keys", "hold_s": 30}


def up(desk: Desk, file: str, *words: str) -> str:
    """The key that the first `up` shows."""
    desk.names.append("one")
    key = re.search(r"sk-\S+", desk.call("up", file, *words))
    assert key is not None
    return key.group()


def answer(desk: Desk, key: str) -> str:
    argv = [sys.executable, "-m", "penstock", "chat", "one", "-m", "tell me a story", "--max-tokens", "8"]
    return desk.slurm.login.run(argv, env={**ENV, "OPENAI_API_KEY": key}).stdout.strip()


def address(desk: Desk) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((desk.run_path() / "gateway" / "address.json").read_text("utf-8"))
    return found


@pytest.mark.parametrize("slurm", PROCTRACKS, indirect=True)
@pytest.mark.nightly
def test_a_gateway_in_a_job_serves_comes_back_and_leaves_nothing(desk: Desk) -> None:
    key = up(desk, desk.write(gateway=JOB))
    assert answer(desk, key).startswith("1:tell 2:me")
    first = address(desk)
    status = desk.status()
    assert (status["url"], status["gateway"]["state"]) == (f"http://{first['listen']}", "running")
    first_job = desk.job("0", kind="gateway")
    row = re.compile(rf"gateway +running +- +0 +job {first_job} on node")
    desk.wait(lambda: row.search(desk.call("status", "one")) is not None, "the queue tells its node too")
    assert [host for host, one in desk.marked() if one.env.get("PENSTOCK_ROLE") == "gateway"] != ["login"]
    made = desk.call("keys", "create", "--name", "ada", "--deployment", "one")
    assert answer(desk, re.search(r"sk-\S+", made).group()).startswith("1:tell")  # type: ignore[union-attr]

    desk.slurm.run(["scancel", str(first_job)])
    desk.wait(lambda: address(desk)["unit"] != first["unit"], "another job tells its address")
    assert answer(desk, key).startswith("1:tell 2:me")
    desk.wait(lambda: desk.status()["phase"] == "ready", "it is ready again")
    assert desk.status()["gateway"]["n_restarts"] == 1
    assert desk.replica()["n_restarts"] == 0
    job = desk.job(address(desk)["unit"], kind="gateway")
    desk.down()
    assert desk.slurm.job(job)["JobState"] == "COMPLETED", "it drained"


def test_with_the_controller_in_a_job_nothing_stays_on_the_login_node(desk: Desk) -> None:
    block = {"controller": "job", "time": "10"}
    key = up(desk, desk.write(gateway={**JOB, "drain_s": 2}, slurm=block, observe={"prometheus": True}))
    assert answer(desk, key).startswith("1:tell 2:me")
    assert [one.argv for host, one in desk.marked() if host == "login"] == []

    def controllers() -> list[HostProcess]:
        return [one for _, one in desk.marked() if one.argv[1:3] == ["-m", "penstock.deployment.controller"]]

    def watchers() -> list[HostProcess]:
        return [one for _, one in desk.marked() if one.env.get("PENSTOCK_ROLE") == "prometheus"]

    n_watchers = 1 if shutil.which("prometheus") else 0
    desk.wait(lambda: len(watchers()) == n_watchers, "Prometheus runs in its job")
    (before,) = controllers()
    os.kill(before.outer_pid, 9)
    desk.wait(lambda: [one.pid for one in controllers()] not in ([], [before.pid]), "its script starts it again")
    desk.call("scale", "one", 2)
    assert [row["state"] for row in desk.status()["replicas"]] == ["ready", "ready"]

    job = desk.job("0", kind="controller")
    desk.slurm.run(["scontrol", "update", f"jobid={job}", "timelimit=1"])
    desk.wait(lambda: desk.status()["controller"]["unit"] == "1", "the next controls")
    desk.wait(lambda: len(watchers()) == n_watchers, "one Prometheus is left, that of the next")
    desk.call("scale", "one", 1)
    desk.slurm.run(["scancel", str(desk.job("1", kind="controller"))])
    desk.wait(lambda: desk.status()["controller"]["state"] == "gone", "status tells that nobody controls")
    desk.call("up", "/root/one.yaml")
    desk.wait(lambda: desk.status()["controller"]["unit"] == "2", "up starts another")
    broken = desk.write(gateway={**JOB, "drain_s": 2}, slurm=block, args={"crash-at-start": "ValueError: no"})
    code, _, said = desk.ask("up", broken, "--replace")
    assert code == 1 and "What it was to replace is started again." in said
    desk.wait(lambda: desk.status()["phase"] == "ready", "what ran is back")
    assert answer(desk, key).startswith("1:tell 2:me")
    desk.down()


@pytest.mark.nightly
def test_a_gateway_that_waits_is_told_and_down_ends_it(desk: Desk) -> None:
    blocker = desk.slurm.submit("#!/bin/sh\nexec sleep 300", "-N2", "--exclusive", "--time=5")
    desk.slurm.wait(blocker, "RUNNING")
    desk.names.append("one")
    desk.call("up", desk.write(gateway=JOB), "--no-wait")
    desk.wait(lambda: desk.status()["gateway"]["state"] == "queued", "its job is in the queue")
    assert desk.status()["url"] is None
    assert "none yet: its gateway waits" in desk.call("status", "one")
    code, _, said = desk.ask("chat", "one", "-m", "x")
    assert (code, 'the gateway of "one" has no address yet' in said) == (1, True), said
    desk.call("down", "one")
    desk.slurm.run(["scancel", str(blocker)])
    desk.slurm.wait_idle()
    assert desk.left() == []


# ---- from a laptop ---------------------------------------------------------------------------------------------------


class Laptop:
    """A machine with ssh and without Slurm."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk, self.folder = desk, folder
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").symlink_to(str(shutil.which("ssh")))
        self.env = {
            "PATH": str(folder / "bin"),
            "HOME": str(folder),
            "PENSTOCK_HOME": str(folder / "home"),
            "PENSTOCK_SSH_CONFIG": str(desk.slurm.hosts.ssh_config),
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
        }
        # The Python that has penstock, on all hosts.
        python = desk.home / "python-with-penstock"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} PENSTOCK_NATIVE=0 exec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def write(self, **block: object) -> str:
        file = yaml.safe_load((self.desk.home / Path(self.desk.write()).name).read_text("utf-8"))
        file["slurm"] |= {"login": "login", "python": "/root/python-with-penstock", **block}
        (self.folder / "one.yaml").write_text(yaml.safe_dump(file), "utf-8")
        return str(self.folder / "one.yaml")

    def argv(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "penstock", *map(str, words)]

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(*words), env=self.env, capture_output=True, text=True)

    @contextmanager
    def holding(self, *words: object) -> Iterator[str]:
        """The first line of a verb that goes on until Ctrl-C."""
        child = subprocess.Popen(self.argv(*words), env=self.env, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            child.send_signal(signal.SIGINT)
            assert end(child) == 0


@pytest.fixture
def laptop(slurm: Slurm, tmp_path: Path) -> Iterator[Laptop]:
    desk = Desk(slurm)
    yield Laptop(desk, tmp_path)
    desk.ask("down", "one", "--now")


def test_every_verb_works_by_name_from_a_laptop(laptop: Laptop) -> None:
    file = laptop.write()
    done = laptop.call("up", file, "--set", "engine.args.load-s=0.1", "--set", "ui=true")
    assert done.returncode == 0, done
    assert "one is ready" in done.stdout
    assert "penstock tunnel one" in done.stdout
    assert "one is ready" in laptop.call("status").stdout
    done = laptop.call("chat", "one", "-m", "tell me a story", "--max-tokens", 8)
    assert done.stdout.startswith("1:tell 2:me"), (done, laptop.desk.said())
    assert "one has 2 replicas" in laptop.call("scale", "one", 2).stdout
    assert "GET /health" in laptop.call("logs", "one", "--replica", 1, "-n", 20).stdout
    assert laptop.call("up", file, "--set", "engine.args.load-s=0.2").returncode == 2, "its exit code is passed on"
    done = laptop.call("bench", "serve", "one", "--requests", 4, "--concurrency", 2, "--max-tokens", 4, "--json")
    assert measured(done.returncode, done.stdout)["completed"] == 4
    with laptop.holding("tunnel") as line:
        url = line.split()[3].removesuffix("/v1")
        assert Client(url).chat([{"role": "user", "content": "a b"}], max_tokens=2).text == "1:a 2:b"
    with laptop.holding("ui", "one", "--no-open") as page:
        assert Client(page.removesuffix("/")).get_text("/health") == "ok\n"
        assert laptop.desk.status()["ui"]["state"] == "running"
    child = subprocess.Popen(
        laptop.argv("tunnel"), env=laptop.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline()
    for ssh in psutil.Process(child.pid).children():
        ssh.kill()
    said = child.communicate()[1]
    assert child.returncode == 1 and 'lost the tunnel to login node "login"' in said, said
    done = laptop.call("down")
    assert (done.returncode, "one is down" in done.stdout) == (0, True), done
    assert laptop.desk.left() == []


@pytest.mark.nightly
def test_from_a_laptop_the_tunnel_leads_to_the_job(laptop: Laptop) -> None:
    desk = laptop.desk
    words = ("gateway.on=job", "gateway.auth=keys", "slurm.controller=job", "ui=true")
    done = laptop.call("up", laptop.write(), *(word for each in words for word in ("--set", each)))
    assert done.returncode == 0, done
    assert re.search(r"sk-\S+", done.stdout) is not None  # and the owner needs none
    assert laptop.call("chat", "one", "-m", "tell me a story", "--max-tokens", 8).stdout.startswith("1:tell 2:me")
    with laptop.holding("ui", "--no-open") as line:
        page, _, key = line.partition("#key=")
        with urllib.request.urlopen(page, f"key={key}".encode()) as answer:
            assert answer.status == 200 and "127.0.0.1" not in desk.status()["ui"]["url"]
    assert laptop.call("down").returncode == 0
    assert desk.left() == []
