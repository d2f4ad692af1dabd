"""A controller that is killed between a start and its note: what runs is taken over or ended, and started once.

The simulation kills it at every step; this is the real one. Engines are counted over the whole time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from launching import Place, call, pid_of, pids, wait_ready
from waiting import until

from penstock.run_folder import Run

pytestmark = pytest.mark.processes


def marked(run_id: str, role: str) -> dict[int, str]:
    """The processes of a run with that role: pid -> replica."""
    found = {}
    run_mark, role_mark = f"PENSTOCK_RUN_ID={run_id}".encode(), f"PENSTOCK_ROLE={role}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = Path(entry.path, "environ").read_bytes().split(b"\0")
                if run_mark in words and role_mark in words:
                    replicas = [word[17:].decode() for word in words if word.startswith(b"PENSTOCK_REPLICA=")]
                    found[int(entry.name)] = (replicas or [""])[0]
    return found


class Starts:
    """All engines of a run from now on. One counts when it was seen twice: a node that forks looks like two for a
    moment."""

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
        self._thread.join()

    def _look(self) -> None:
        before: dict[int, str] = {}
        while not self._is_over.wait(0.02):
            engines = marked(self._run_id, "engine")
            steady = {pid: name for pid, name in engines.items() if before.get(pid) == name}
            before = engines
            self._seen |= steady
            for name in steady.values():
                self.most_at_once[name] = max(self.most_at_once[name], list(steady.values()).count(name))


@pytest.fixture
def starts(place: Place) -> Iterator[Starts]:
    run = place.up(place.write("one"))
    made = Starts(run.record().id)
    yield made
    made.end()


def scale(number: int) -> None:
    assert call("scale", "one", number, "--no-wait").code == 0


def kill_unnoted(run: Run, order: Callable[[], object]) -> None:
    """Kill the controller between the start of replica 1, which `order` asks for, and its note: it runs up to there in
    small steps. Where the two are less than a step apart, the note is taken back."""
    pid, n_before = pid_of(run, "controller"), len(marked(run.record().id, "node"))

    def is_started() -> bool:
        os.kill(pid, signal.SIGSTOP)
        if len(marked(run.record().id, "node")) > n_before or "replica/1" in run.handle().units:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    try:
        os.kill(pid, signal.SIGSTOP)  # it takes the order when it runs on
        order()
        until(is_started, "replica 1 is placed")
    finally:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(marked(run.record().id, "node")) > n_before, "its node runs")
    units = {key: facts for key, facts in run.handle().units.items() if key != "replica/1"}
    run.write_handle(msgspec.structs.replace(run.handle(), units=units, ordered=("1",)))


def test_what_a_killed_controller_started_and_did_not_note_is_taken_over_or_ended(place: Place, starts: Starts) -> None:
    run = place.run()
    kill_unnoted(run, lambda: scale(2))
    wait_ready(run, 2)
    assert (starts.of("0"), starts.of("1")) == (1, 1), "the one that was started is the one that serves"
    place.note(run)
    scale(1)
    until(lambda: len(pids(run, "node")) == 1, "the second has ended")
    wait_ready(run)
    kill_unnoted(run, lambda: scale(2))
    scale(1)
    until(lambda: not run.handle().ordered, "what became of it is noted")
    until(lambda: len(pids(run, "node")) == 1, "it is not forgotten")
    wait_ready(run)
    starts.end()
    assert starts.of("0") == 1 and set(starts.most_at_once.values()) == {1}, dict(starts.most_at_once)
