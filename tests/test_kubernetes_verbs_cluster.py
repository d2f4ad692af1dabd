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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes_cluster import Namespace
from launching import Place, call, measured
from test_kubernetes_target import file_for, kinds_left, place, up  # noqa: F401 - fixtures

from penstock import processes
from penstock.deployment import leftovers
from penstock.wire.client import Client

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]


class Machine:
    """Another machine with the kubeconfig."""

    def __init__(self, folder: Path, space: Namespace) -> None:
        folder.mkdir()
        config = folder / "kubeconfig"
        config.write_bytes(space.kubeconfig.read_bytes())
        self.env = {**os.environ, **space.env, "PENSTOCK_HOME": str(folder / "home"), "KUBECONFIG": str(config)}

    def argv(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "penstock", *map(str, words)]

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(*words), env=self.env, capture_output=True, text=True, timeout=120)

    def out(self, *words: object) -> str:
        """What a verb prints that must go well."""
        done = self.call(*words)
        assert done.returncode == 0, done
        return done.stdout

    @contextmanager
    def held(self, *words: object) -> Iterator[str]:
        """The first line of a verb that goes on until Ctrl-C."""
        with subprocess.Popen(self.argv(*words), env=self.env, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout is not None
                yield child.stdout.readline().strip()
            finally:
                child.send_signal(signal.SIGINT)
                assert child.wait(60) == 0


@pytest.fixture
def other(tmp_path: Path, kubernetes: Namespace) -> Machine:
    return Machine(tmp_path / "other", kubernetes)


@pytest.mark.nightly
def test_every_verb_works_from_another_machine(place: Place, kubernetes: Namespace, other: Machine) -> None:
    file = file_for(place, kubernetes={"expose": "none"}, ui=True)
    up(place, file)
    status = other.call("status", "one")
    assert 'penstock: found "one" in context' in status.stderr, status
    assert status.stdout.startswith("one is ready") and "(in its cluster; here: " in status.stdout, status
    choose = ["kubectl", "config", "set-context", "--current", "--namespace=kube-system"]
    subprocess.run(choose, env=other.env, check=True, capture_output=True)
    assert other.out("chat", "one", "-m", "tell me a story", "--max-tokens", 8).startswith("1:tell 2:me")
    _check_keys(other)
    done = other.call("bench", "serve", "one", "--requests", 4, "--concurrency", 2, "--max-tokens", 4, "--json")
    assert measured(done.returncode, done.stdout)["completed"] == 4
    for part, sign in (("replicas", "ready after"), ("gateway", ""), ("controller", "")):
        assert sign in other.out("logs", "one", "--part", part, "-n", 200)
    assert "one has 2 replicas" in other.out("scale", "one", 2)
    assert call("status", "one", "--json").json["desired_replicas"] == 2, "the first machine sees it too"
    assert "replica 1 placed" in call("logs", "one", "--part", "events").out
    _check_watching(other)
    _check_chat_page(other)
    assert "runs already" in other.out("up", file)
    follower = subprocess.Popen(other.argv("logs", "one", "-f"), env=other.env, stdout=subprocess.PIPE, text=True)
    assert "one is down" in other.out("down", "one")
    out = follower.communicate(timeout=60)[0]
    assert (follower.returncode, "[1] " in out) == (0, True), "what is followed ends with the deployment"
    assert kinds_left(kubernetes) == []
    assert call("status", "one").out.startswith("one is down"), "the first machine sees that it is gone"


def _check_keys(other: Machine) -> None:
    key = other.out("keys", "create", "bob", "--deployment", "one").strip()
    assert {"first", "bob", "owner"} <= set(other.out("keys", "list", "--deployment", "one").split())
    assert other.call("keys", "revoke", "nobody", "--deployment", "one").returncode == 2
    assert '"key": "owner"' in other.out("usage", "--deployment", "one", "--json")
    done = other.call("dashboard", "one", "--ray", "0")
    assert (done.returncode, "its replicas run without Ray" in done.stderr) == (2, True), done
    with other.held("tunnel", "one") as line:
        client = Client(line.split()[3].removesuffix("/v1"), key)
        assert client.chat([{"role": "user", "content": "a b"}], max_tokens=2).text == "1:a 2:b"


def _check_watching(other: Machine) -> None:
    watched = json.loads(other.out("top", "one", "--once", "--json"))["deployments"][0]
    state = watched["snapshot"]["replicas"][0]["state"]
    assert (watched["name"], watched["note"], state) == ("one", None, "ready"), watched
    events = other.out("events", "one")
    assert all(event in events for event in ("replica ready", "replica 1 placed", "key created: bob")), events
    assert "complete 200" in other.out("requests", "one", "--slow")
    assert "penstock_replicas_desired 2" in other.out("metrics", "--deployment", "one")
    assert 'vllm:num_requests_running{replica="0"' in other.out("metrics", "--engines", "--deployment", "one")
    with other.held("dashboard", "one", "--no-open") as line:
        page, _, key = line.partition("#key=")
        snapshot = Client(page.removesuffix("/dashboard"), key).get_json("/dashboard/live?once")
        assert (snapshot["deployment"], snapshot["now"]["n_desired"]) == ("one", 2)


def _check_chat_page(other: Machine) -> None:
    """From a pod's packages to a person who logged in, who sees the models of the gateway."""
    with other.held("ui", "one", "--no-open") as line:
        page, _, key = line.partition("#key=")
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with visitor.open(page, f"key={key}".encode(), timeout=30) as answer:
            assert (answer.status, answer.url) == (200, page.removesuffix("login"))
        with visitor.open(page.removesuffix("login") + "status", timeout=30) as answer:
            assert json.load(answer)["models"][0]["id"] == "one"
    assert "chat page: serves http://one-gateway:8000" in other.out("logs", "one", "--part", "ui")


@pytest.mark.nightly
def test_an_exposed_one_is_asked_directly_and_belongs_to_all(
    place: Place, kubernetes: Namespace, other: Machine
) -> None:
    file = file_for(place)
    assert "knows 3 machines" in other.call("doctor", file).stdout
    up(place, file)
    out = call("status", "one").out
    assert re.search(r"address +http://10\.\S+:8000/v1\n", out), out
    done = other.call("up", file, "--set", "engine.drain_s=5")
    assert done.returncode == 2 and 'deployment "one" runs with other settings' in done.stderr, done
    assert other.out("run", file, "tell me a story", "--name", "one").startswith("1:tell 2:me")
    assert "one is down" in other.out("down", "one", "--now")
    assert 'cannot reach the gateway of "one": it is down' in other.call("chat", "one", "-m", "x").stderr


def test_an_image_that_is_not_there_ends_a_start_with_the_reason(place: Place, kubernetes: Namespace) -> None:
    done = call("up", file_for(place, kubernetes={"image": "missing.example/vllm:1"}))
    assert done.code == 1, done
    assert "could not start" in done.err and "cannot pull image missing.example/vllm:1" in done.err
    assert kinds_left(kubernetes) == []


@pytest.mark.nightly
def test_clean_removes_what_has_no_anchor_and_nothing_else(
    place: Place, kubernetes: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    up(place, file_for(place))
    rendered = call("render", file_for(place), "--name", "two").out
    kubernetes.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
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
