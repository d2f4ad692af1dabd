"""Every verb of a deployment in a cluster, from a machine that did not start it."""

# ruff: noqa: F811 - fixtures of test_kubernetes_target
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from kubernetes_cluster import Namespace
from launching import Place, call, measured, wait_until
from test_kubernetes_target import file_for, kinds_left, place  # noqa: F401 - fixtures

from penstock import processes
from penstock.deployment import leftovers
from penstock.wire.client import Client

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]


class Machine:
    """Another machine with the kubeconfig."""

    def __init__(self, folder: Path, space: Namespace) -> None:
        self.home = folder / "home"
        folder.mkdir()
        self._config = folder / "kubeconfig"
        self._config.write_bytes(space.kubeconfig.read_bytes())
        self.env = {**os.environ, **space.env, "PENSTOCK_HOME": str(self.home), "KUBECONFIG": str(self._config)}

    def argv(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "penstock", *map(str, words)]

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(*words), env=self.env, capture_output=True, text=True, timeout=120)

    def choose_namespace(self, name: str) -> None:
        words = ["kubectl", "config", "set-context", "--current", f"--namespace={name}"]
        subprocess.run(words, env=self.env, check=True, capture_output=True)


@pytest.fixture
def other(tmp_path: Path, kubernetes: Namespace) -> Machine:
    return Machine(tmp_path / "other", kubernetes)


@pytest.mark.nightly
def test_every_verb_works_from_another_machine(place: Place, kubernetes: Namespace, other: Machine) -> None:
    file = file_for(place, kubernetes={"expose": "none"}, ui=True)
    done = call("up", file, "--json")
    assert done.code == 0, done
    done_there = other.call("status", "one")
    assert 'penstock: found "one" in context' in done_there.stderr, done_there
    assert done_there.stdout.startswith("one is ready"), done_there
    assert "(in its cluster; here: " in done_there.stdout
    other.choose_namespace("kube-system")
    done_there = other.call("chat", "one", "-m", "tell me a story", "--max-tokens", 8)
    assert done_there.stdout.startswith("1:tell 2:me"), done_there
    _check_keys(other)
    done_there = other.call("bench", "serve", "one", "--requests", 4, "--concurrency", 2, "--max-tokens", 4, "--json")
    assert measured(done_there.returncode, done_there.stdout)["completed"] == 4
    for part, sign in (("replicas", "ready after"), ("gateway", ""), ("controller", "")):
        done_there = other.call("logs", "one", "--part", part, "-n", 200)
        assert done_there.returncode == 0 and sign in done_there.stdout, done_there
    assert "one has 2 replicas" in other.call("scale", "one", 2).stdout
    assert call("status", "one", "--json").json["desired_replicas"] == 2, "the first machine sees it too"
    assert "replica 1 placed" in call("logs", "one", "--part", "events").out
    _check_tunnel(other)
    _check_watching(other)
    _check_chat_page(other)
    done_there = other.call("up", file)
    assert "runs already" in done_there.stdout, done_there
    follower = subprocess.Popen(other.argv("logs", "one", "-f"), env=other.env, stdout=subprocess.PIPE, text=True)
    done_there = other.call("down", "one")
    assert (done_there.returncode, "one is down" in done_there.stdout) == (0, True), done_there
    out = follower.communicate(timeout=60)[0]
    assert (follower.returncode, "[1] " in out) == (0, True), "what is followed ends with the deployment"
    assert kinds_left(kubernetes) == []
    assert call("status", "one").out.startswith("one is down"), "the first machine sees that it is gone"


def _check_keys(other: Machine) -> None:
    done = other.call("keys", "create", "alice", "--deployment", "one")
    assert done.returncode == 0 and done.stdout.startswith("sk-"), done
    assert {"first", "alice", "owner"} <= set(other.call("keys", "list", "--deployment", "one").stdout.split())
    assert other.call("keys", "revoke", "nobody", "--deployment", "one").returncode == 2
    done = other.call("usage", "--deployment", "one", "--json")
    assert '"key": "owner"' in done.stdout, done
    done = other.call("dashboard", "one", "--ray", "0")
    assert (done.returncode, "its replicas run without Ray" in done.stderr) == (2, True), done


def _check_tunnel(other: Machine) -> None:
    key = other.call("keys", "create", "bob", "--deployment", "one").stdout.strip()
    child = subprocess.Popen(other.argv("tunnel", "one"), env=other.env, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = child.stdout.readline().split()[3].removesuffix("/v1")
        assert Client(url, key).chat([{"role": "user", "content": "a b"}], max_tokens=2).text == "1:a 2:b"
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0


def _check_watching(other: Machine) -> None:
    done = other.call("top", "one", "--once", "--json")
    watched = json.loads(done.stdout)["deployments"][0]
    assert (watched["name"], watched["note"], watched["snapshot"]["replicas"][0]["state"]) == ("one", None, "ready"), (
        done
    )
    done = other.call("events", "one")
    assert all(event in done.stdout for event in ("replica ready", "replica 1 placed", "key created: bob")), done
    assert "complete 200" in other.call("requests", "one", "--slow").stdout
    assert "penstock_replicas_desired 2" in other.call("metrics", "--deployment", "one").stdout
    assert 'vllm:num_requests_running{replica="0"' in other.call("metrics", "--engines", "--deployment", "one").stdout
    argv = other.argv("dashboard", "one", "--no-open")
    child = subprocess.Popen(argv, env=other.env, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        page, _, key = child.stdout.readline().strip().partition("#key=")
        snapshot = Client(page.removesuffix("/dashboard"), key).get_json("/dashboard/live?once")
        assert (snapshot["deployment"], snapshot["now"]["n_desired"]) == ("one", 2)
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0


def _check_chat_page(other: Machine) -> None:
    """From a pod's packages to a person who logged in, who sees the models of the gateway."""
    child = subprocess.Popen(other.argv("ui", "one", "--no-open"), env=other.env, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        page, _, key = child.stdout.readline().strip().partition("#key=")
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with visitor.open(page, f"key={key}".encode(), timeout=30) as answer:
            assert (answer.status, answer.url) == (200, page.removesuffix("login"))
        with visitor.open(page.removesuffix("login") + "status", timeout=30) as answer:
            assert json.load(answer)["models"][0]["id"] == "one"
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
    assert "in its cluster; here: " in other.call("status", "one").stdout
    assert "chat page: serves http://one-gateway:8000" in other.call("logs", "one", "--part", "ui").stdout


@pytest.mark.nightly
def test_an_exposed_one_is_asked_directly_and_belongs_to_all(
    place: Place, kubernetes: Namespace, other: Machine
) -> None:
    file = file_for(place)
    done = other.call("doctor", file)
    print(done.stdout, done.stderr)
    assert "knows 3 machines" in done.stdout, done
    assert call("up", file).code == 0
    out = call("status", "one").out
    assert re.search(r"address +http://10\.\S+:8000/v1\n", out), out
    done = other.call("up", file, "--set", "engine.drain_s=5")
    assert done.returncode == 2 and 'deployment "one" runs with other settings' in done.stderr, done
    done = other.call("run", file, "tell me a story", "--name", "one")
    assert done.stdout.startswith("1:tell 2:me"), done
    assert "one is down" in other.call("down", "one", "--now").stdout
    assert 'cannot reach the gateway of "one": it is down' in other.call("chat", "one", "-m", "x").stderr


def test_an_image_that_is_not_there_ends_a_start_with_the_reason(place: Place, kubernetes: Namespace) -> None:
    done = call("up", file_for(place, kubernetes={"image": "missing.example/vllm:1"}))
    assert done.code == 1, done
    assert "could not start" in done.err and "cannot pull image missing.example/vllm:1" in done.err
    assert kinds_left(kubernetes) == []


@pytest.mark.nightly
def test_an_api_server_that_is_away_loses_nothing(place: Place, kubernetes: Namespace) -> None:
    assert call("up", file_for(place)).code == 0
    kubernetes.cluster.api_away()
    try:
        done = call("status", "one")
        assert done.code == 0 and "this is what was seen at" in done.out, done
        state = place.run("one").state()
        assert state is not None and [row.state for row in state.replicas] == ["ready"]
    finally:
        kubernetes.cluster.api_back()
    wait_until(lambda: call("status", "one").out.startswith("one is ready\n"), "status is as before")
    assert call("down", "one").code == 0


@pytest.mark.nightly
def test_clean_removes_what_has_no_anchor_and_nothing_else(
    place: Place, kubernetes: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("up", file_for(place)).code == 0
    rendered = call("render", file_for(place), "--name", "two").out
    done = subprocess.run(
        ["kubectl", "apply", "--server-side", "-f", "-"],
        env={**os.environ, **kubernetes.env}, input=rendered, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    with monkeypatch.context() as patch:  # what other tests of this machine have may be in use
        patch.setattr(leftovers, "every_temporary", dict)
        patch.setattr(processes, "find_marked", lambda *_: [])
        assert call("clean").out == "nothing is left behind\n"
        kubernetes.kubectl("delete", "configmap", "two-run")
        assert '"two"' in call("clean").out
        assert call("clean", "--yes").out.splitlines()[-1] == "removed"
    assert not [name for name in kinds_left(kubernetes) if name.partition("/")[2].startswith("two-")]
    assert call("status", "one").out.startswith("one is ready")
    assert call("down", "one").code == 0
