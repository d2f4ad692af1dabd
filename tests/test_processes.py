"""Processes started, found, recognised and ended; here with sleeping children of Python."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from waiting import until

from penstock import processes
from penstock.processes import MARK_REPLICA, MARK_ROLE, MARK_RUN, MARK_RUN_ID
from penstock.wire.announcement import Process

pytestmark = pytest.mark.processes

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
# Maps a file of the user and one of its own, and keeps a third one open.
MAPS = """
import mmap, sys, time
with open(sys.argv[1], "rb") as stream:
    weights = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
with open(sys.argv[2], "w+b") as stream:
    stream.truncate(4096)
    mapped = mmap.mmap(stream.fileno(), 4096)
kept = open(sys.argv[3], "wb")
print("up", flush=True)
time.sleep(60)
"""
LEADER_ENDS = """
import ctypes, threading, time
def live():
    time.sleep(0.3)
    print("up", flush=True)
    time.sleep(60)
threading.Thread(target=live).start()
ctypes.CDLL(None).pthread_exit(None)
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


@pytest.mark.nightly
def test_a_started_process_is_marked_and_found_by_run_and_replica(starter: Starter) -> None:
    process, one = starter.start(), starter.start(replica="1")
    (marked,) = processes.find_marked(starter.run, "0")
    assert (marked.pid, marked.started_at, marked.role) == (process.pid, process.started_at, process.role)
    assert (marked.run, marked.run_id, marked.replica, marked.role) == (starter.run, "0a1b", "0", "node")
    assert marked.command.startswith(sys.executable)
    assert {found.pid for found in processes.find_marked(starter.run)} == {process.pid, one.pid}
    assert processes.find_marked(starter.run + "x") == []


def test_a_process_is_ended_once_or_twice_but_never_by_its_pid_alone(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = starter.start()
    stranger = msgspec.structs.replace(process, started_at=process.started_at - 100)
    assert not processes.is_alive(stranger)
    assert processes.end([stranger], 0.0) == []
    boot_time = psutil.boot_time()
    with monkeypatch.context() as patch:
        patch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
        assert processes.is_alive(process), "a step of the clock makes it no stranger"
    for _ in range(2):
        assert processes.end([process], 5.0) == []
        assert not processes.is_alive(process)


@pytest.mark.nightly
def test_a_sweep_kills_one_replica_also_one_that_ignores_the_polite_end_and_spares_the_others(starter: Starter) -> None:
    zero, one = starter.start(STUBBORN, "0"), starter.start(STUBBORN, "1")
    processes.signal_process(zero, signal.SIGTERM)
    assert processes.wait_gone([zero], 0.0) == [zero]
    assert [found.pid for found in processes.sweep(starter.run, "0")] == [zero.pid]
    assert not psutil.pid_exists(zero.pid) and processes.is_alive(one)
    assert processes.sweep(starter.run, keep=[one.pid]) == []
    assert [found.pid for found in processes.sweep(starter.run)] == [one.pid]
    assert processes.sweep(starter.run) == []


def test_a_sweep_unlinks_the_shared_memory_of_what_it_kills_and_no_file_of_the_user(
    starter: Starter, tmp_path: Path
) -> None:
    names = [f"penstock-test-{tmp_path.name}-{name}" for name in ("users", "mapped", "open")]
    users, *segments = paths = [Path("/dev/shm") / name for name in names]
    users.write_bytes(bytes(4096))
    try:
        until(lambda: time.time() - users.stat().st_ctime > 1.2, "it is older than a start, known to one second")
        process = starter.start(MAPS, "0", *map(str, paths))
        assert processes.shared_memory([process]) == sorted(map(str, segments))
        processes.unlink_shared_memory(map(str, segments))
        assert all(segment.exists() for segment in segments), "a living process uses them"
        processes.sweep(starter.run)
        assert [path.exists() for path in paths] == [True, False, False]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@pytest.mark.nightly
def test_a_process_whose_threads_still_end_is_alive_although_it_is_a_zombie(starter: Starter) -> None:
    """So is a killed engine that still gives the memory of its GPUs back."""
    process = starter.start(LEADER_ENDS)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert processes.is_alive(process)
    assert processes.end([process], 0.0) == []
