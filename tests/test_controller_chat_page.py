"""The controller's chat page, turn by turn: no process, no sleep."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import a_place

from penstock.deployment import ui
from penstock.deployment.controller.chat_page import ChatPage
from penstock.deployment.controller.child import Child
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore, hash_of
from penstock.run_folder import Desired, Run
from penstock.wire.announcement import Process

pytestmark = pytest.mark.loopback


class Watched(Child):
    """With processes that live and answer as the test says."""

    def __init__(self, run: Run, is_placed: bool) -> None:
        super().__init__(run, ChatPage(run, is_placed=is_placed), None)
        self.run, self.answers, self.started = run, True, list[list[str]]()

    def _start(self, argv: list[str]) -> Process:
        self.started.append(argv)
        return Process(4_000_000 + len(self.started), 1.0, "ui")

    def _answers(self) -> bool:
        return self.answers


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """The chat page of a deployment, which is down at the end."""
    runs = list[Run]()

    def written(is_placed: bool = False, **fields: Any) -> Watched:
        run, _ = place.written(place.write("one", **({"ui": {"port": 0, "title": "Ask us"}} | fields)))
        place.addresses.clear()
        runs.append(run)
        return Watched(run, is_placed)

    with a_place(tmp_path) as place:
        yield written
        for run in runs:
            run.write_desired(Desired("down", 0))


def test_the_page_gets_its_settings_and_keeps_its_port(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch()
    run = watched.run
    monkeypatch.setattr("penstock.processes.is_alive", lambda process: len(watched.started) > 1)
    watched.turn(0.0)
    config = json.loads(run.ui_config.read_text())
    assert (config["title"], config["has_login"], config["key_file"]) == ("Ask us", False, None)
    assert config["gateway"] == run.url and config["folder"] == str(run.ui_folder)
    url = watched.part.url
    assert url == f"http://127.0.0.1:{config['port']}" and watched.started[0][-1] == str(run.ui_config)
    watched.turn(1.0)  # it is gone
    watched.turn(3.0)
    assert len(watched.started) == 2 and watched.part.url == url and watched.part.n_restarts == 1
    watched.turn(4.0)
    assert watched.part.state == "running"


def test_a_slow_start_is_waited_for_and_a_hung_page_is_not(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, killed = watch(), list[int]()
    monkeypatch.setattr("penstock.processes.is_alive", lambda process: True)
    monkeypatch.setattr("penstock.processes.signal_process", lambda process, number: killed.append(number))
    watched.turn(0.0)
    watched.answers = False
    watched.turn(100.0)
    assert not killed, "gradio takes its time to be imported"
    watched.answers = True
    watched.turn(101.0)
    watched.answers = False
    watched.turn(120.0)
    watched.turn(122.0)
    assert len(killed) == 1 and watched.part.restarts[-1].reason == "it did not answer for 20 s"


def test_an_absent_extra_is_one_line_in_up_and_status(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        watched.turn(0.0)
        line = "the chat page is not installed: pip install 'penstock[ui]'"
        assert (watched.part.state, watched.part.note, watched.started) == ("gone", line, [])
        assert ui.warning(watched.run.deployment(), None) == f"ui: {line}"
    watched.turn(60.0)
    assert watched.part.state == "starting" and watched.part.note is None


def test_a_port_that_is_taken_is_one_line_too(watch: Watch) -> None:
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        watched = watch(ui={"port": port})
        deployment = watched.run.deployment()
        watched.turn(0.0)
        assert f"cannot listen on 127.0.0.1:{port}: address already in use" in str(watched.part.note)
        assert "set ui.port" in str(ui.warning(deployment, None))
        assert ui.warning(deployment, watched.run) is None, "a run that is replaced holds it itself"
    watched.turn(60.0)
    assert watched.part.state == "starting"


def test_without_a_login_everyone_uses_one_key_of_the_deployment(watch: Watch) -> None:
    run = watch(ui={"port": 0, "login": "none"}, gateway={"auth": "keys"}).run
    config = json.loads(ui.write_config(run, run.url, "127.0.0.1", 7860).read_text())
    file = Path(config["key_file"])
    assert not config["has_login"] and file.stat().st_mode & 0o077 == 0 and run.ui_folder.stat().st_mode & 0o077 == 0
    secret = file.read_text()
    with contextlib.closing(store.connect(str(run.gateway_file().store))) as database:
        keys = KeyStore(database)
        assert keys.find(ui.KEY).secrets[0].hash == hash_of(secret)
        ui.write_config(run, run.url, "127.0.0.1", 7860)
        assert file.read_text() == secret, "a restart of the page changes nothing"
        keys.revoke(ui.KEY, time.time())
        ui.write_config(run, run.url, "127.0.0.1", 7860)
        assert file.read_text() != secret and keys.find(ui.KEY).secrets[0].hash == hash_of(file.read_text())
    assert secret not in run.ui_config.read_text() + run.events_file.read_text()


def test_next_to_a_placed_controller_it_is_for_other_machines_and_follows_the_gateway(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, ended = watch(is_placed=True, gateway={"auth": "keys"}), list[object]()
    monkeypatch.setattr("penstock.hardware.network.own_addresses", lambda seen_from: ["10.0.0.7"])
    monkeypatch.setattr("penstock.processes.is_alive", lambda process: True)
    monkeypatch.setattr("penstock.processes.end", lambda processes, grace_s: ended.append(processes))
    watched.turn(0.0)
    config = json.loads(watched.run.ui_config.read_text())
    assert (config["host"], watched.part.url) == ("0.0.0.0", f"http://10.0.0.7:{config['port']}")
    assert config["has_login"] and config["key_file"] is None, "with keys people log in"
    watched.turn(1.0)
    assert (watched.part.state, ended) == ("running", [])
    monkeypatch.setattr(Run, "known_url", "http://10.0.0.9:8000")
    watched.turn(2.0)
    assert watched.part.restarts[-1].reason == "its gateway moved to http://10.0.0.9:8000" and len(ended) == 1
    monkeypatch.setattr(Run, "known_url", None)
    watched.turn(4.0)
    watched.turn(5.0)
    assert watched.part.state == "running", "the gateway is being placed: the page says offline until it is there"
