"""Processes started, found, recognised and ended; here with sleeping children of Python."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from penstock import processes
from penstock.processes import MARK_REPLICA, MARK_ROLE, MARK_RUN, MARK_RUN_ID
from penstock.wire.announcement import Process

pytestmark = pytest.mark.processes

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
MAPS = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as stream:
    mapped = mmap.mmap(stream.fileno(), 4096)
print("up", flush=True)
time.sleep(60)
"""


class Starter:
    """Starts marked children of one run and ends them after the test."""

    def __init__(self, folder: Path) -> None:
        self.run = str(folder)
        self.log = folder / "log"
        self.started: list[Process] = []

    def start(self, code: str = SLEEP, replica: str = "0", *words: str) -> Process:
        marks = {MARK_RUN: self.run, MARK_RUN_ID: "0a1b", MARK_ROLE: "node", MARK_REPLICA: replica}
        before = self.log.stat().st_size if self.log.exists() else 0
        process = processes.start_detached([sys.executable, "-S", "-c", code, *words], marks, self.log)
        self.started.append(process)
        while self.log.stat().st_size == before:
            assert processes.is_alive(process), self.log.read_text()
        return process


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    processes.end(starter.started, 0.0)


def test_a_started_process_is_marked_and_found_by_run_and_replica(starter: Starter) -> None:
    process = starter.start()
    (marked,) = processes.find_marked(starter.run)
    assert (marked.pid, marked.started_at, marked.role) == (process.pid, process.started_at, process.role)
    assert (marked.run, marked.run_id, marked.replica, marked.role) == (starter.run, "0a1b", "0", "node")
    assert marked.command.startswith(sys.executable)
    assert starter.log.read_text() == "up\n"
    one = starter.start(replica="1")
    assert [marked.pid for marked in processes.find_marked(starter.run, "1")] == [one.pid]
    assert processes.find_marked(starter.run + "x") == []
    assert len(processes.find_marked(starter.run)) == 2


def test_a_process_is_ended_once_or_twice_but_never_by_its_pid_alone(starter: Starter) -> None:
    process = starter.start()
    stranger = msgspec.structs.replace(process, started_at=process.started_at - 100)
    assert not processes.is_alive(stranger)
    assert processes.end([stranger], 0.0) == []
    assert processes.is_alive(process)
    for _ in range(2):
        assert processes.end([process], 5.0) == []
        assert not processes.is_alive(process)


def test_one_that_ignores_the_polite_end_is_killed(starter: Starter) -> None:
    process = starter.start(STUBBORN)
    processes.signal_process(process, signal.SIGTERM)
    assert processes.wait_gone([process], 0.0) == [process]
    assert processes.end([process], 0.0) == []
    assert not psutil.pid_exists(process.pid)


def test_a_sweep_ends_one_replica_and_spares_the_others(starter: Starter) -> None:
    zero, one = starter.start(STUBBORN, "0"), starter.start(STUBBORN, "1")
    assert [found.pid for found in processes.sweep(starter.run, "0")] == [zero.pid]
    assert processes.is_alive(one)
    assert processes.sweep(starter.run, keep=[one.pid]) == []
    assert [found.pid for found in processes.sweep(starter.run)] == [one.pid]
    assert processes.sweep(starter.run) == []


def test_a_sweep_unlinks_the_shared_memory_of_what_it_kills(starter: Starter, tmp_path: Path) -> None:
    segment = Path("/dev/shm") / f"penstock-test-{tmp_path.name}"
    segment.write_bytes(bytes(4096))
    try:
        process = starter.start(MAPS, "0", str(segment))
        assert processes.shared_memory([process]) == [str(segment)]
        processes.unlink_shared_memory([str(segment)])
        assert segment.exists(), "a living process maps it"
        processes.sweep(starter.run)
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)
