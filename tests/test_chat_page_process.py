"""The chat page as a child of a real deployment with the fake engine: it is killed, comes back, and is adopted."""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from launching import Place, a_place, ask, call, kill, now, pid_of, pids, started
from waiting import left_s, until

from penstock.hardware.network import free_port
from penstock.run_folder import Part, Run

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("chat_page")]

# An audit hook sees each connection and each name that is looked up. https://docs.python.org/3/library/audit_events.html
HOOK = """
import os, sys
def hear(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[1] if event == "socket.connect" else arguments[:2]
        if isinstance(address, tuple):
            with open({log!r}, "a") as stream:
                stream.write(f"{{address[0]}}:{{address[1]}}\\n")
if os.environ.get("PENSTOCK_ROLE") == "ui":
    sys.modules["uvloop"] = None  # it connects unheard
    sys.addaudithook(hear)
"""

WITHOUT_GRADIO = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "gradio" else find(name, *more)
"""


Hook = Callable[[str], object]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with a_place(tmp_path) as place:
        yield place


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hook:
    """Python that each process of the deployment runs at its start."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "sitecustomize.py").write_text


def part_of(run: Run) -> Part:
    part = now(run).ui
    assert part is not None
    return part


def wait_running(run: Run, n_restarts: int = 0) -> str:
    def is_so() -> bool:
        return (part_of(run).state, part_of(run).n_restarts) == ("running", n_restarts)

    until(is_so, "the page runs")
    return str(part_of(run).url)


def state_of(client: httpx.Client) -> str:
    """ "ok", "offline" or "logged out"."""
    return str(client.get("/status").json()["state"])


@pytest.mark.nightly
def test_it_logs_in_comes_back_with_its_sessions_and_asks_no_other_host(
    place: Place, tmp_path: Path, hook: Hook
) -> None:
    log = tmp_path / "connections"
    hook(HOOK.format(log=str(log)))
    run = place.up(place.write("one", gateway={"auth": "keys"}, ui={"port": 0, "title": "Ask us"}))
    key = call("keys", "create", "alice", "--json").json["key"]
    url = wait_running(run)
    place.addresses.add(url)
    assert url in call("status").out and call("ui", "--json").json["url"] == f"{url}/login"
    with httpx.Client(base_url=url, timeout=20) as client:
        assert state_of(client) == "logged out"
        assert client.post("/login", data={"key": "sk-wrong"}).status_code == 401
        assert client.post("/login", data={"key": key}).status_code == 303
        page = client.get("/")
        assert page.status_code == 200 and "Ask us" in page.text and state_of(client) == "ok"

        first = pid_of(run, "ui")
        kill(first)
        ask(run, key=key)  # the page is never needed
        assert wait_running(run, 1) == url and pid_of(run, "ui") != first, "at the same address"
        assert state_of(client) == "ok", "logged in still"
        assert f"its process {first} was gone" in call("status").out

        second, controller = pid_of(run, "ui"), pid_of(run, "controller")
        kill(controller)
        until(lambda: pids(run, "controller") not in ([], [controller]), "another controller")
        until(lambda: now(run).controller.state == "running", "that runs")
        assert pid_of(run, "ui") == second, "the new controller adopts it"
    assert "serves" in call("logs", "--part", "ui").out
    assert call("down").code == 0
    place.assert_nothing_left()
    asked = set(log.read_text().split())
    assert {address.rpartition(":")[0] for address in asked} == {"127.0.0.1"}, asked


def test_without_the_extra_the_deployment_serves_and_says_so(
    place: Place, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook(WITHOUT_GRADIO)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "gradio" else find(name, *more))
    started = call("up", place.write("one", ui=True))
    line = "the chat page is not installed: pip install 'penstock[ui]'"
    assert started.code == 0 and f"warning: ui: {line}" in started.err
    run = place.run()
    ask(run)
    until(lambda: part_of(run).note is not None, "status says so")
    assert line in call("status").out and line in call("ui").err
    assert "ui absent" in call("events").out


@pytest.mark.nightly
def test_any_address_gets_a_page_until_ctrl_c(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.up(place.write("one"))
    port = free_port("127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    with started("ui", "--url", run.url, "--port", port, "--json") as child:
        assert child.stdout is not None
        facts = json.loads(child.stdout.readline())
        assert facts == {"url": f"http://127.0.0.1:{port}/login", "key": "sk-mine"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            assert client.post("/login", data={"key": "sk-other"}).status_code == 401, "others on this machine"
            assert client.post("/login", data={"key": "sk-mine"}).status_code == 303
            assert state_of(client) == "ok"
        with started("ui", "--url", run.url, "--port", port, "--json") as other:
            out, _ = other.communicate(timeout=left_s())
            assert other.returncode == 2 and "address already in use" in out.lower() and "sk-mine" not in out
        child.send_signal(signal.SIGINT)
        assert child.wait(left_s()) == 0
