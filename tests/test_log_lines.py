"""Every log has a bound: where a program's is full it begins again, and who reads it misses no line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_rig import Rig
from samples import deployment, run_folder
from test_controller_place import READY, Ticks

from penstock import log_lines
from penstock.deployment.container.log_copy import LogCopy
from penstock.deployment.controller.child import Child
from penstock.deployment.observe import Observation, last_words
from penstock.gateway.accounting import access_log
from penstock.log_lines import LogReader, bound_log, file_lines, older
from penstock.node.__main__ import TimedLines
from penstock.run_folder import Handle, Part, Run, Unit
from penstock.targets import Placement
from penstock.targets.cloudera import application, view
from penstock.targets.slurm.commands import Queue
from penstock.targets.slurm.target import Slurm

SEEN = Observation({Unit(kind, "0"): Placement("placed") for kind in ("replica", "gateway")}, READY, Part("running"))
ABSENT: Any = SimpleNamespace(role="program", start_s=1.0, prepare=lambda: None, command=lambda _: "not installed")
LOOKS: dict[str, Callable[[Run], object]] = {
    "gateway": lambda _: None,  # when it starts
    "controller": lambda _: Ticks().tick_of(SEEN),
    "node": lambda _: TimedLines(io.StringIO()).write("a line\n"),
    "child": lambda run: Child(run, ABSENT, None).try_turn(0.0),
    "job": lambda run: Slurm().keep_up(run),
    "application": lambda run: application.Child(run, "program", []).keep_up(now=-1.0),
}


@pytest.mark.loopback
@pytest.mark.parametrize("mode", ["ab", "wb"])
@pytest.mark.parametrize("program", LOOKS)
async def test_the_log_of_every_program_is_bounded(program: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program, where it is appended to, or by what started it."""
    run = run_folder(deployment(name="d"))
    log, is_kept = run.log("program"), mode == "wb" and program in ("gateway", "controller", "node")
    run.write_handle(Handle("slurm", {"replica/0": {"job": "1"}}))
    run.log("replica-0").symlink_to(log)
    monkeypatch.setattr(bound_log, "__defaults__", (5, 1))
    monkeypatch.setattr(log_lines, "LOG_BYTES", 5)
    monkeypatch.setattr(Queue, "cached", lambda _: {})
    with log.open(mode, buffering=0) as stream:
        monkeypatch.setattr(log_lines, "_STDERR", stream.fileno())
        stream.write(b"lines\n")
        async with Rig() if program == "gateway" else contextlib.nullcontext():
            LOOKS[program](run)
    assert (log.read_bytes(), older(log).exists()) == (b"lines\n" if is_kept else b"", not is_kept)


@pytest.mark.parametrize(("n_read", "n_new"), [(0, 0), (2, 1), (5, 0), (5, 1), (2, 9), (5, 9)])
def test_who_reads_a_log_misses_no_line_where_it_turns(n_read: int, n_new: int, tmp_path: Path) -> None:
    """Also who lags behind while the file grows beyond where it was read to."""
    log, lines = tmp_path / "replica-0.log", [f"{number:09}" for number in range(5 + n_new)]
    followed, copy = file_lines(log, follow=True, is_over=lambda: True), LogCopy(tmp_path)
    ends = dict[int, tuple[int, bytes]]()

    def looked() -> list[str]:
        return view._new_lines(0, lambda ending: Path(f"{log}{ending}").read_bytes(), ends, is_whole=False)

    def write(lines: list[str]) -> None:
        with log.open("a") as stream:
            stream.write("".join(f"{line}\n" for line in lines))

    write(lines[:3])
    bound_log(log, 1)
    write(lines[3:5])
    first, copied, seen = [*islice(followed, n_read)], copy.lines(), looked()
    bound_log(log, 1)
    write(lines[5:])
    assert first + [*followed] == (lines if n_read else lines[3:])
    assert copied + copy.lines() == [f"[replica-0] {line}" for line in lines] and seen + looked() == lines
    assert [*file_lines(log, False)] == lines[3:] and [*file_lines(log, False, last=2)] == lines[-2:]
    assert [*LogReader(log, 25).lines()] == [line.encode() for line in lines[-2:]] and last_words(log) == ""
    write(["an error"])
    bound_log(log, 1)
    assert last_words(log) == "; its last line: an error"


@pytest.mark.loopback
def test_a_log_is_read_in_whole_lines_to_its_last_one(tmp_path: Path) -> None:
    log, copy = tmp_path / "gateway.log", LogCopy(tmp_path)

    def is_over(text: str = "") -> bool:
        with log.open("a") as stream:
            stream.write(text)  # after it was read, before it was over
        return bool(text)

    assert copy.lines() == [*file_lines(log, follow=True, is_over=lambda: True)] == []
    log.write_text("one\nthr")
    assert [*file_lines(log, False)] == [*file_lines(log, False, last=2)] == ["one", "thr"]
    followed = file_lines(log, True, last=2, is_over=is_over)
    assert (next(followed), copy.lines()) == ("one", ["[gateway] one"])
    assert [*file_lines(log, True, last=0, is_over=lambda: is_over("ee\nfo"))] == ["three", "fo"]
    assert (next(followed), copy.lines()) == ("three", ["[gateway] three"])
    log.write_text("4\n")  # another program has emptied it
    assert (next(followed), copy.lines()) == ("4", ["[gateway] 4"])
    log.write_text("y" * 300_000)
    assert [len(line) for line in copy.lines()] == [len("[gateway] ") + 256 * 1024]


def test_several_threads_write_an_access_log_as_it_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "ROTATE_BYTES", 500)
    files = [tmp_path / "access.log", *(tmp_path / f"access.log.{number}" for number in range(1, 7))]

    def write(name: str) -> None:
        for number in range(100):
            access_log.AccessLog(str(files[0])).append([f"{name}{number:03}\n".encode()])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    lines = "".join(file.read_text() for file in files if file.exists()).split()
    assert sorted(lines) == [f"{name}{number:03}" for name in "abcd" for number in range(100)]
    for name in "efgh":
        write(name)
    assert [file.exists() for file in files] == [True] * 6 + [False] and files[0].stat().st_size < 500
    assert {file.stat().st_mode & 0o777 for file in files[:6]} == {0o600}
