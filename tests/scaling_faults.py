"""Controllers and gateways killed while the number of replicas changes, on any place that runs on this machine.

Engines are counted over the whole time: each start of a replica, and how many of one ran at once. Every fault is a row
of the table in docs/measurements/faults.md (pytest -s prints it).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from launching import PROMPT, Asking, kill, wait_until

from penstock.run_folder import ReplicaStatus, Run
from penstock.wire.answers import Reply
from penstock.wire.client import Client

WAIT_S = 90.0
# 0 to 2 replicas, each for one request at a time, that load for long enough to be hit, and end together.
FIELDS: dict[str, Any] = {
    "args": {"load-s": 2.0, "tokens-per-s": 20},
    "replicas": {"min": 0, "max": 2, "idle_s": 10},
    "gateway": {"max_in_flight": 1, "hold_s": 100},
}


def marked(run_id: str, role: str) -> dict[int, str]:
    """The processes of a run with that role on this machine and on hosts that are made of it: pid -> replica."""
    found = {}
    run_mark, role_mark = f"PENSTOCK_RUN_ID={run_id}".encode(), f"PENSTOCK_ROLE={role}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = Path(entry.path, "environ").read_bytes().split(b"\0")
                if run_mark in words and role_mark in words:
                    replicas = [word[17:].decode() for word in words if word.startswith(b"PENSTOCK_REPLICA=")]
                    found[int(entry.name)] = (replicas or [""])[0]
    return found


class Starts:
    """All engines of a run from now on, looked for every 20 ms. One counts when it was seen twice: a node that forks
    looks like two for a moment."""

    def __init__(self, run_id: str) -> None:
        self.most_at_once: dict[str, int] = defaultdict(int)
        self._run_id, self._seen = run_id, dict[int, str]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def of(self, replica: str) -> int:
        """How often its engine was started."""
        return sum(name == replica for name in self._seen.values())

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(10.0)

    def _look(self) -> None:
        before: dict[int, str] = {}
        while not self._is_over.wait(0.02):
            engines = marked(self._run_id, "engine")
            steady = {pid: name for pid, name in engines.items() if before.get(pid) == name}
            before = engines
            self._seen |= steady
            for name in steady.values():
                n_now = list(steady.values()).count(name)
                self.most_at_once[name] = max(self.most_at_once[name], n_now)


@dataclass
class World:
    """A deployment on some place. `run`: its folder, as this process can read it; `scale` is the verb; `submitted`: the
    orders for a replica that the place has taken."""

    where: str
    run: Run
    url: str
    scale: Callable[[object], object]
    submitted: Callable[[str], int]
    key: str | None = None
    rows: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run_id = self.run.record().id
        self.starts = Starts(self.run_id)

    def pid(self, role: str) -> int:
        """Of the controller or the gateway: the oldest with that role, the others being its workers."""
        wait_until(lambda: bool(marked(self.run_id, role)), f"a {role} runs", WAIT_S)
        return min(marked(self.run_id, role))

    def rows_now(self) -> tuple[ReplicaStatus, ...]:
        state = self.run.state()
        return state.replicas if state is not None else ()

    def number(self) -> int:
        """The number that is wanted, as it was decided."""
        return int(json.loads(self.run.scaling_file.read_bytes())["replicas"])

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        try:
            wait_until(lambda: bool(is_so()), what, WAIT_S)
        except AssertionError as exc:
            log = self.run.log("controller").read_text("utf-8", "replace")[-2000:]
            raise AssertionError(f"{self.where}: {exc}; {self.run.state()}, {self.run.handle()}, {log}") from exc

    def wait_ready(self, n_replicas: int) -> None:
        """Exactly so many serve, and the controller of now says so."""
        began = time.time()

        def is_so() -> bool:
            state = self.run.state()
            is_new = state is not None and state.observed_at > began
            return is_new and [row.state for row in self.rows_now()] == ["ready"] * n_replicas

        self.wait(is_so, f"{n_replicas} ready")

    def asks(self, n_streams: int, n_tokens: int) -> list[Asking]:
        return [Asking(self.url, n_tokens, key=self.key) for _ in range(n_streams)]

    def ask(self) -> Reply:
        messages = [{"role": "user", "content": PROMPT}]
        return Client(self.url, api_key=self.key, timeout_s=WAIT_S).chat(messages, max_tokens=8)

    @contextlib.contextmanager
    def fault(self, part: str, phase: str, n_ready: int, *streams: Asking, lost: int = 0) -> Iterator[None]:
        """The block kills; then so many replicas are ready again, and all streams but `lost` are answered whole."""
        began = time.monotonic()
        yield
        self.wait_ready(n_ready)
        seconds = time.monotonic() - began
        n_lost = sum(stream.end().error is not None for stream in streams)
        self.rows.append(f"| {self.where} | {part} | {phase} | {seconds:.1f} | {n_lost} of {len(streams)} |")
        print(self.rows[-1], flush=True)
        assert n_lost == lost, [stream.error for stream in streams]

    def kill_unnoted(self, replica: str, order: Callable[[], object]) -> None:
        """Kill the controller between the start of this replica, which `order` asks for, and its note: it runs up to
        there in small steps. Where the two are less than a step apart, the note is taken back."""
        n_before, pid, key = self.submitted(replica), self.pid("controller"), f"replica/{replica}"
        deadline = time.monotonic() + WAIT_S
        try:
            os.kill(pid, signal.SIGSTOP)
            order()
            while self.submitted(replica) == n_before and key not in self.run.handle().units:
                assert time.monotonic() < deadline, f"{self.where}: replica {replica} was never placed"
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.004)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.01)
        finally:
            os.kill(pid, signal.SIGKILL)
        self.wait(lambda: self.submitted(replica) > n_before, f"replica {replica} is started")
        handle = self.run.handle()
        units = {each: facts for each, facts in handle.units.items() if each != key}
        self.run.write_handle(msgspec.structs.replace(handle, units=units, ordered=(replica,)))


def nodes_of(run_id: str) -> Callable[[str], int]:
    """Orders that a place without a queue has taken: the nodes that it started, of which it shows only the living."""
    return lambda replica: sum(name == replica for name in marked(run_id, "node").values())


def live(world: World) -> None:
    """Every phase of a controller's work, killed once. The number of starts of each replica is what was ordered."""
    starts = world.starts
    streams = world.asks(4, 160)
    world.wait(lambda: world.number() == 2, "requests wait: two are wanted")
    with world.fault("controller", "decided, not placed", 2, *streams):
        kill(world.pid("controller"))
    assert (starts.of("0"), starts.of("1")) == (1, 1)

    world.scale(2)
    world.wait_ready(2)
    n_before = starts.of("1")  # what was decided until the number was pinned is no matter
    streams = world.asks(2, 160)
    world.wait(lambda: len(world.rows_now()) == 2 and all(row.in_flight for row in world.rows_now()), "both are busy")
    world.scale(1)
    world.wait(lambda: any(row.is_draining for row in world.rows_now()), "one drains")
    with world.fault("controller", "one drains", 1, *streams):
        kill(world.pid("controller"))
    assert starts.of("1") == n_before

    world.kill_unnoted("1", lambda: world.scale(2))
    with world.fault("controller", "placed, not noted", 2):
        pass
    assert starts.of("1") == n_before + 1, "the one that was started is the one that serves"

    world.scale(1)
    world.wait_ready(1)
    world.scale(2)
    world.wait(lambda: "replica/1" in world.run.handle().units and starts.of("1") == n_before + 2, "the second loads")
    with world.fault("controller", "one loads", 2):
        kill(world.pid("controller"))
    assert starts.of("1") == n_before + 2

    end_unnoted(world)
    world.wait(lambda: "1" not in marked(world.run_id, "node").values(), "it is not forgotten")
    assert starts.of("0") == 1


def end_unnoted(world: World) -> None:
    """The controller is killed between an order and its note, and the replica is not wanted any more."""
    world.scale(1)
    world.wait_ready(1)
    world.kill_unnoted("1", lambda: world.scale(2))
    with world.fault("controller", "placed, not noted, not wanted any more", 1):
        world.scale(1)
    world.wait(lambda: not world.run.handle().ordered, "what became of it is noted")


def wake(world: World) -> None:
    """From zero and back: the controller is killed at zero, between the order and its note, and while one loads."""
    starts = world.starts

    def sleep() -> int:
        world.wait(lambda: world.number() == 0 and not world.run.handle().units, "nobody asks: all end")
        return starts.of("0")

    world.scale("auto")
    n_before, killed, held = sleep(), world.pid("controller"), list[Asking]()
    kill(killed)
    world.wait(lambda: {*marked(world.run_id, "controller")} - {killed}, "its successor")
    world.kill_unnoted("0", lambda: held.extend(world.asks(1, 8)))
    with world.fault("controller", "at zero, and again: woken, not noted", 1, *held):
        pass
    assert starts.of("0") == n_before + 1

    n_before = sleep()
    held = world.asks(1, 8)
    world.wait(lambda: "replica/0" in world.run.handle().units and starts.of("0") == n_before + 1, "one loads")
    with world.fault("controller", "woken, one loads", 1, *held):
        kill(world.pid("controller"))
    assert starts.of("0") == n_before + 1


def gateway(world: World) -> None:
    """The gateway is killed while one loads, drains and wakes: its own requests end with it, no replica does."""
    starts = world.starts
    world.scale(1)
    world.wait_ready(1)
    n_before = starts.of("0"), starts.of("1")
    streams = world.asks(1, 400)
    world.scale(2)
    world.wait(lambda: starts.of("1") == n_before[1] + 1, "the second loads")
    with world.fault("gateway", "one loads", 2, *streams, lost=1):
        kill(world.pid("gateway"))
    world.ask()
    streams = world.asks(2, 240)
    world.wait(lambda: len(world.rows_now()) == 2 and all(row.in_flight for row in world.rows_now()), "both are busy")
    world.scale(1)
    world.wait(lambda: any(row.is_draining for row in world.rows_now()), "one drains")
    with world.fault("gateway", "one drains", 1, *streams, lost=2):
        kill(world.pid("gateway"))
    world.ask()
    assert (starts.of("0"), starts.of("1")) == (n_before[0], n_before[1] + 1)
    world.scale("auto")
    world.wait(lambda: world.number() == 0 and not world.run.handle().units, "nobody asks: all end")
    streams = world.asks(1, 8)
    world.wait(lambda: starts.of("0") == n_before[0] + 1, "it wakes one")
    with world.fault("gateway", "woken, one loads", 1, *streams, lost=1):
        kill(world.pid("gateway"))
    world.ask()
    assert starts.of("0") == n_before[0] + 1


def check(world: World) -> None:
    """In the end: no replica ever ran twice at once."""
    world.starts.end()
    assert set(world.starts.most_at_once.values()) == {1}, dict(world.starts.most_at_once)
