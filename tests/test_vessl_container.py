"""The program inside a run, without a run: its control port, its view of the file, its logs; and what verbs make of
what it tells."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml
from samples import demo_plan
from waiting import end

from penstock.deployment.container import __main__ as program
from penstock.deployment.container import control, holder
from penstock.deployment.container.holder import Holder, Settings
from penstock.errors import PenstockError, UserError
from penstock.run_folder import Desired, Part, Run, State
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.targets.vessl import folder
from penstock.targets.vessl.api import Account
from penstock.targets.vessl.api import control as client_of
from penstock.wire.answers import HttpError
from penstock.wire.client import Client
from penstock.wire.command import Done, Verb
from penstock.wire.container import PATH, ContainerView, End, Named

TOKEN = "a-token-of-24-characters"
GOLDEN = Path(__file__).parent / "golden" / "vessl" / "everything.yaml"
PLAN = msgspec.json.encode(demo_plan()).decode()
ACCOUNT = Account("https://api.example.org", "t", "acme", "serving")


class Recorder:
    """A holder that writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def view(self) -> ContainerView:
        return ContainerView("1", stage="fetching")

    def place(self, wanted: Named) -> ContainerView:
        self.calls.append(wanted)
        raise PenstockError("it is starting", is_retryable=True)

    def order(self, desired: Desired) -> None:
        self.calls.append(desired)

    def end(self, order: End) -> None:
        self.calls.append(order)

    def run_verb(self, verb: Verb) -> Done:
        self.calls.append(verb)
        return Done(3, "out", "err")


@pytest.fixture
def served() -> Iterator[tuple[Recorder, str]]:
    recorder = Recorder()
    server = control.listen("127.0.0.1", 0, TOKEN, recorder)
    yield recorder, f"http://127.0.0.1:{server.server_port}"
    server.close()


@pytest.mark.nightly
@pytest.mark.processes
def test_calls_reach_the_holder_with_the_token_and_wrong_ones_are_refused(served: tuple[Recorder, str]) -> None:
    recorder, url = served
    port = int(url.rpartition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]  # silent, and in nobody's way
    for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x"):
        for path in (PATH, f"{PATH}/end", "/other"):
            with pytest.raises(HttpError, match="401: the admin token is needed"):
                Client(url, token).post_json(path, End())
            with pytest.raises(HttpError, match="401"):
                Client(url, token).get_json(path)
    wrong = Client(url, TOKEN)
    for path, body, words in (
        ("/other", End(), "400: there is no such call"),
        (f"{PATH}/end", {"never": 1}, "400: Object contains unknown field"),
        (f"{PATH}/replicas", ["0"], "400: Expected `object`"),
        (f"{PATH}/verb", {"words": ["x" * 70_000]}, "400: the body needs a length of at most 65536 bytes"),
    ):
        with pytest.raises(HttpError, match=words):
            wrong.post_json(path, body)
    with pytest.raises(HttpError, match="404"):
        wrong.get_json("/folder")
    assert recorder.calls == []
    client = client_of(url, TOKEN, 5.0)
    assert msgspec.convert(client.get_json(PATH), ContainerView) == ContainerView("1", stage="fetching")
    client.post_json(f"{PATH}/desired", Desired("up", 2))
    client.post_json(f"{PATH}/end", End(now=True))
    assert client.post_json(f"{PATH}/verb", Verb(("keys",))) == {"code": 3, "out": "out", "err": "err"}
    with pytest.raises(HttpError, match="409: it is starting"):
        client.post_json(f"{PATH}/replicas", Named(("0",)))
    assert recorder.calls == [Desired("up", 2), End(True), Verb(("keys",)), Named(("0",))]
    for stranger in strangers:
        stranger.close()
    with pytest.raises(UserError, match=f"cannot listen on control port 127.0.0.1:{port}"):
        control.listen("127.0.0.1", port, TOKEN, Recorder())


def test_no_token_goes_to_an_address_in_clear_text() -> None:
    with pytest.raises(UserError, match="it would go in clear text"):
        client_of("http://run.example.org", TOKEN, 5.0)
    assert client_of("https://run.example.org", TOKEN, 5.0).api_key == TOKEN


# ---- the program -----------------------------------------------------------------------------------------------------


def of_golden() -> Deployment:
    command = yaml.safe_load(GOLDEN.read_text("utf-8"))["run"][0]["command"]
    return reading.parse(command.rpartition("<<'END_OF_PENSTOCK_FILE'\n")[2].partition("\nEND_OF")[0])


def test_inside_the_file_is_that_of_one_machine_whose_ports_are_reached() -> None:
    outer = of_golden()
    inner = program.inside(outer, "local", "/penstock-weights")
    assert (inner.target, inner.vessl, inner.gateway.host) == ("local", None, "0.0.0.0")
    assert inner.cache.weights == "/penstock-weights" and inner.gateway.port == outer.gateway.port
    page = inner.chat_page
    assert page is not None and page.host == "0.0.0.0" and page.login == "keys"
    assert reading.parse(reading.to_yaml(inner)) == inner, "a file that `up` takes on one machine"
    assert program.inside(outer, "local", None).cache == outer.cache


def test_a_container_without_a_secret_does_not_start_and_takes_it_out_of_the_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", f"{TOKEN}:abc")
    assert program._secret() == (TOKEN, "abc")
    for secret in (None, "", "short", ":" + "0" * 64):
        if secret is not None:
            monkeypatch.setenv("PENSTOCK_SECRET", secret)
        with pytest.raises(UserError, match="PENSTOCK_SECRET has no token of at least 16 characters"):
            program._secret()


def test_a_deployment_that_has_not_started_tells_its_stage_and_takes_no_order() -> None:
    holder = Holder(of_golden(), Settings(TOKEN), threading.Event())
    assert holder.view().stage == "starting" and not holder.has_failed
    with pytest.raises(PenstockError, match="has not started"):
        holder.order(Desired("up", 2))
    with pytest.raises(PenstockError, match="has not started"):
        holder.run_verb(Verb(("keys",)))


@pytest.mark.parametrize(
    ("free_mib", "n_ranks", "refusal", "warning"),
    [
        (60, 2, "cannot start 2 ranks", None),
        (60, 1, None, None),
        (500, 2, None, "/dev/shm has 500"),
        (2000, 2, None, None),
    ],
)
def test_ranks_do_not_start_where_dev_shm_has_no_room_for_them(
    free_mib: int, n_ranks: int, refusal: str | None, warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = SimpleNamespace(free=free_mib * 2**20, total=free_mib * 2**20)
    monkeypatch.setattr("psutil.disk_usage", lambda _: size)
    if refusal is not None:
        with pytest.raises(UserError, match=refusal) as caught:
            list(holder._shared_memory(n_ranks))
        assert caught.value.hint
        return
    warnings = list(holder._shared_memory(n_ranks))
    assert [text.startswith(str(warning)) for text in warnings] == ([True] if warning else [])


# ---- on the machine of a verb ----------------------------------------------------------------------------------------


def adopted(home: Path) -> Run:
    text = GOLDEN.read_text("utf-8").replace("    PLAN\n", f"    {PLAN}\n")
    found = folder.Found("run 7", "run.yaml", text)
    run = folder.adopt("llama8", found, lambda _: ("replica", "gateway", "controller", "ui"))
    assert run.path == home / "runs" / "llama8"
    folder.note_addresses(run, "https://g.example.org", "https://c.example.org")
    return run


def test_a_run_of_another_machine_becomes_a_folder_without_a_token(home: Path) -> None:
    run = adopted(home)
    assert run.url == "https://g.example.org" and run.public_page_url == "https://c.example.org"
    folder.note(run, ACCOUNT, 7)
    assert folder.note_of(run) == folder.Note("https://api.example.org", "acme", "serving", 7)
    assert run.deployment() == of_golden() and run.handle().units.keys() == {
        "replica/0", "gateway/0", "controller/0", "ui/0",
    }  # fmt: skip
    assert not run.admin_token_file.exists()
    with pytest.raises(PenstockError, match="has its admin address on loopback"):
        _ = run.admin_url
    with pytest.raises(PenstockError, match='cannot read run 8, which calls itself "penstock-llama8"'):
        folder.adopt("llama8", folder.Found("run 8", "run.yaml", ""), lambda _: ("replica",))


def test_the_containers_state_is_shown_without_its_processes(home: Path) -> None:
    run = adopted(home)
    state = State(
        1.0, "starting", 1, controller=Part("running", n_restarts=2), gateway=Part("gone"),
        prometheus=Part("running", url="http://127.0.0.1:9090"), ui=Part("gone", note="gradio is not installed"),
    )  # fmt: skip
    files = {"state.json": msgspec.json.encode(state).decode(), "events.jsonl": "", "desired.json": ""}
    folder.take(run, ContainerView("1", units={"replica/4": None}, files=files))
    seen = run.state()
    assert seen is not None and seen.prometheus is not None and seen.ui is not None
    assert (seen.controller.unit, seen.controller.n_restarts, seen.gateway.state) == ("0", 2, "starting")
    assert (seen.prometheus.note, seen.ui.note, seen.ui.url) == (
        "its container", "gradio is not installed", "https://c.example.org",
    )  # fmt: skip
    assert run.handle().replicas.keys() == {"4"}
    folder.take(run, ContainerView("1", stage="starting", files={"state.json": "torn"}))
    assert run.handle().replicas.keys() == {"4"} and run.state() == seen
    end = {
        "state.json": msgspec.json.encode(State(2.0, "down", 0)),
        "desired.json": msgspec.json.encode(Desired("down", 0)),
    }
    folder.take(run, ContainerView("1", files={name: text.decode() for name, text in end.items()}))
    assert run.state() == seen and run.desired().state == "up", "the run is charged until VESSL says that it has ended"
    folder.write_end(run, "failed", "VESSL ended run 7 as failed: exit code 1")
    over = run.state()
    assert run.is_ended() and over is not None and run.events()[-1].event == "ended"
    assert (over.phase, over.reason) == ("failed", "VESSL ended run 7 as failed: exit code 1")


@pytest.mark.processes
@pytest.mark.parametrize("has_penstock", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_an_image_without_penstock_gets_it_from_the_volume_and_the_shell_is_replaced(
    has_penstock: bool, tmp_path: Path
) -> None:
    """The run's command with a `python3` that writes down how it is called, and the process that it is."""
    command = yaml.safe_load(GOLDEN.read_text("utf-8"))["run"][0]["command"]
    python = tmp_path / "python3"
    check = "exit 0" if has_penstock else 'case "$1" in -c) exit 1;; esac'
    python.write_text(f'#!/bin/sh\necho "$$ $*" >>"$HOME/calls"\n{check}\n', "utf-8")
    python.chmod(0o755)
    variables = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    child = subprocess.Popen(["sh", "-c", command], env=variables, cwd=tmp_path)
    assert end(child) == 0
    calls = [line.split(" ", 1) for line in (tmp_path / "calls").read_text("utf-8").splitlines()]
    install = [] if has_penstock else ["-m pip install --quiet /penstock-code/*.whl"]
    assert [words for _, words in calls] == [
        "-c import penstock.deployment.container",
        *install,
        f"-m penstock.deployment.container {tmp_path}/penstock.yaml --target local --control 9001 "
        "--weights /penstock-weights --max-hours 0.5",
    ]
    assert int(calls[-1][0]) == child.pid, "TERM reaches penstock, not a shell"
    assert reading.load(tmp_path / "penstock.yaml") == of_golden()
