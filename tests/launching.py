"""What the tests with real processes share: a home of its own, the CLI, and a way out that leaves nothing behind.

    with a_place(tmp_path) as place:
        run = place.up(place.write("one"))
        ask(run)

The engine is the fake one. At the end the place takes down what it started and asserts that nothing is left: no
process, no temporary folder, no taken port, no shared memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from waiting import left_s, until

from penstock import processes, run_folder, targets
from penstock.cli import main
from penstock.deployment import observe, prepare, start
from penstock.errors import PenstockError
from penstock.hardware.network import free_port
from penstock.run_folder import Launch, ReplicaStatus, Run, State
from penstock.spec import reading
from penstock.testing.demo_prompts import DEMO_PROMPTS, MAX_TOKENS
from penstock.testing.fake_engine.requests import expected_text
from penstock.wire.answers import Reply
from penstock.wire.client import Client

PROMPT = "tell me a story"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def call(*words: object) -> Done:
    """Run a command of the CLI in this process, whose standard output is its: one at a time."""
    assert threading.current_thread() is threading.main_thread(), (
        "another command's output would be mixed with this one's"
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run([str(word) for word in words])
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def started(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A command of the CLI as a process of its own; killed on the way out when it still runs."""
    argv = [sys.executable, "-m", "penstock.cli.main", *map(str, words)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def measured(code: int, out: str) -> dict[str, Any]:
    """What `bench serve --json` printed. On a busy machine it may say (exit code 1) that it was late itself."""
    result = json.loads(out)
    assert isinstance(result, dict)
    reasons = [reason for reason in result["invalid_because"] if not reason.startswith("the generator ")]
    assert (code, reasons) == (int(not result["valid"]), []), out
    return result


def interrupt(*words: object, when: Callable[[], bool]) -> Done:
    """Start a command, press Ctrl-C as soon as it is so, and wait for its end."""
    with started(*words) as child:
        until(lambda: when() or child.poll() is not None, "the moment to interrupt")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=left_s())
        return Done(child.returncode, out, err)


def port_is_free(address: str) -> bool:
    """Whether "host:port" (a URL will do) refuses connections."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((parts.hostname or "", parts.port or 0)) != 0


def kill(*pids: int) -> None:
    """kill -9, all of them before any can react."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def private_folders(run_id: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"penstock-{run_id}-*"))


class Asking:
    """One streamed request in a thread: its text, or the error that ended it."""

    def __init__(self, url: str, n_tokens: int, key: str | None = None) -> None:
        self.n_tokens, self.text = n_tokens, ""
        self.reply: Reply | None = None
        self.error: PenstockError | None = None
        self._client = Client(url, api_key=key, timeout_s=left_s())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> Asking:
        """Wait for its end, of whatever kind."""
        self._thread.join(left_s())
        assert not self._thread.is_alive(), "the request never ended"
        return self

    def check_is_whole(self) -> None:
        self.end()
        assert self.error is None, f"{self.error} after {self.text!r}"
        assert self.text == expected_text(PROMPT, self.n_tokens)

    def _run(self) -> None:
        try:
            for piece in self._client.stream_chat([{"role": "user", "content": PROMPT}], max_tokens=self.n_tokens):
                if isinstance(piece, Reply):
                    self.reply = piece
                else:
                    self.text += piece.text
        except PenstockError as error:
            self.error = error


@dataclass
class Place:
    """A PENSTOCK_HOME of its own, what was started in it, and its end."""

    folder: Path
    addresses: set[str] = field(default_factory=set)  # that must be free in the end
    run_paths: dict[str, str] = field(default_factory=dict)  # path -> id of every run seen
    segments: set[str] = field(default_factory=set)  # shared memory that a run's processes mapped

    def write(self, name: str = "one", args: dict[str, Any] | None = None, **fields: Any) -> Path:
        """A deployment file with the fake engine. `fields` are those of the file; `engine` and `gateway` are merged."""
        engine = {"kind": "fake", "args": args or {}, "drain_s": 10, **fields.pop("engine", {})}
        gateway = {"port": 0, "auth": "none", "hold_s": 20, "drain_s": 10, **fields.pop("gateway", {})}
        facts = {"name": name, "model": "penstock-demo", "engine": engine, "gateway": gateway, **fields}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(facts), "utf-8")
        return path

    def up(self, file: Path, *flags: object) -> Run:
        """`penstock up` that must go well."""
        done = call("up", file, "--json", *flags)
        assert done.code == 0, done
        return self.note(run_folder.find(str(done.events[0]["name"])))

    def written(self, file: Path) -> tuple[Run, Launch]:
        """A run whose folder is written and that is not placed yet, and the launch of its nodes."""
        prepared = prepare.prepare(reading.load(file))
        run = start.write_run(prepared, [free_port("127.0.0.1") for _ in range(2)])
        return self.note(run), Launch("one", prepared.plan, ("http://127.0.0.1:1",), str(run.admin_token_file))

    def run(self, name: str = "one") -> Run:
        return self.note(run_folder.find(name))

    def note(self, run: Run) -> Run:
        """Remember what must be gone in the end."""
        with contextlib.suppress(OSError):  # half removed
            self.run_paths[str(run.path)] = run.record().id
            if "tunnels" not in targets.load(run.record().target).capabilities:  # else they are no addresses of ours
                self.addresses |= {run.url, run.admin_url}
            self.segments.update(processes.shared_memory(processes.find_marked(str(run.path))))
            for announcement in (replica.announcement for replica in now(run).replicas):
                if announcement is not None:
                    self.addresses |= {announcement.url} if announcement.url is not None else set()
                    self.segments.update(announcement.shared_memory)
        return run

    def assert_nothing_left(self) -> None:
        for path in self.run_paths:
            self.assert_nothing_left_of(path)
        assert [address for address in self.addresses if not port_is_free(address)] == []
        assert [segment for segment in self.segments if Path(segment).exists()] == []

    def assert_nothing_left_of(self, run_path: str) -> None:
        assert processes.find_marked(run_path) == []
        assert private_folders(self.run_paths[run_path]) == []

    def end(self) -> None:
        """Take everything down, and whatever survives that by force; then say what survived."""
        living = [self.note(run) for run in run_folder.every()]
        failures = []
        for run in living:
            if run.desired().state == "up":
                done = call("down", run.name, "--now")
                failures += [done] if done.code else []
        try:
            assert not failures
            self.assert_nothing_left()
        finally:
            for path, run_id in self.run_paths.items():
                processes.sweep(path)
                for folder in private_folders(run_id):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def a_place(folder: Path) -> Iterator[Place]:
    """A place to start deployments in, with a home of its own, and checked to leave nothing."""
    home, place = folder / "home", Place(folder)

    def is_empty() -> bool:
        return not any(process.run.startswith(str(home)) for process in processes.find_marked())

    with pytest.MonkeyPatch.context() as patch, _bounded():
        patch.setenv("PENSTOCK_HOME", str(home))
        try:
            yield place
        finally:
            place.end()
            until(is_empty, f"nothing of {home} runs")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """End a test that hangs in a call, at the deadline of the whole run, with a minute for its way out."""

    def on_alarm(*_: object) -> None:
        signal.alarm(60)
        pytest.fail("not done at the deadline of the whole run of tests")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(math.ceil(left_s()))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def now(run: Run) -> State:
    return observe.now_state(run, time.time())


def wait_ready(run: Run, n_replicas: int = 1) -> None:
    """Block until exactly so many replicas are ready; AssertionError for one that failed."""

    def is_so() -> bool:
        replicas = now(run).replicas
        assert not [row for row in replicas if row.state == "failed"], replicas
        return [row.state for row in replicas] == ["ready"] * n_replicas

    until(is_so, f"{n_replicas} replica(s) ready")


def replica_of(run: Run, name: str = "0") -> ReplicaStatus:
    return next(replica for replica in now(run).replicas if replica.replica == name)


def engine_pid(run: Run, name: str = "0") -> int:
    announcement = replica_of(run, name).announcement
    assert announcement is not None and announcement.processes, "the replica runs"
    return announcement.processes[0].pid


def pids(run: Run, role: str, replica: str | None = None) -> list[int]:
    """Living processes of a run by role: "controller", "watchdog", "gateway", "node", "engine"."""
    return [process.pid for process in processes.find_marked(str(run.path), replica) if process.role == role]


def pid_of(run: Run, role: str) -> int:
    """The one process of a role; its child counts as a second until that executes its own program."""
    return until(lambda: found[0] if len(found := pids(run, role)) == 1 else 0, f"there is one {role}")


def ask(run: Run, n_tokens: int = 8, key: str | None = None) -> Reply:
    """A request through the gateway that must be answered right."""
    client = Client(run.url, api_key=key, timeout_s=left_s())
    reply = client.chat([{"role": "user", "content": PROMPT}], max_tokens=n_tokens)
    assert reply.text == expected_text(PROMPT, n_tokens)
    return reply


def check_texts(client: Client) -> None:
    """Of an engine that has the demo model: it answers what is known of that."""
    for row in [row for row in DEMO_PROMPTS if row.kind == "chat"][:8]:
        messages = [{"role": "user", "content": row.prompt}]
        assert client.chat(messages, model="one", max_tokens=MAX_TOKENS, temperature=0).text == row.text
