"""From a laptop that reaches only the login node: the verbs run there, and a tunnel leads to the gateway."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from hosts import ROOT
from hosts_slurm import Slurm
from launching import measured
from slurm_cluster import Desk
from waiting import end

from penstock.wire.client import Client

pytestmark = pytest.mark.hosts


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
def test_a_login_node_without_penstock_or_without_an_answer_is_told(laptop: Laptop) -> None:
    done = laptop.call("up", laptop.write(python="/usr/bin/python3"))
    assert done.returncode == 2
    assert 'cannot use login node "login": its /usr/bin/python3 has no penstock' in done.stderr
    assert not (laptop.folder / "home" / "runs" / "one").exists()
    done = laptop.call("up", laptop.write(login="nowhere"))
    assert done.returncode == 1
    assert "nowhere cannot be reached over ssh: there is no such host" in done.stderr
    done = laptop.call("up", laptop.write(login="-oProxyCommand=x"))
    assert "it is not a host name" in done.stderr
    assert laptop.call("tunnel", "one").returncode == 2
