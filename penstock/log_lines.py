"""Lines of logs: several as one stream, a file that is bounded and read as it grows, and a program's last message."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import queue
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from penstock.errors import PenstockError
from penstock.text import KIB, MIB

LOG_BYTES = 32 * MIB  # of a program's log, and of the older one
_STDERR, _PIECE_BYTES = 2, 256 * KIB
_POLL_S, _QUEUED_LINES = 0.2, 10_000
_SIGNS = ("rror", "annot", "ailed")


def last_words(lines: Iterable[str], signs: Sequence[str] = _SIGNS, most: int = 300) -> str | None:
    """The last line with one of these signs of an error, else the last line; None when there is none."""
    texts = [line.strip() for line in lines if line.strip()]
    errors = [line for line in texts if any(sign in line for sign in signs)]
    return (errors or texts)[-1][:most] if texts else None


def named(front: str, lines: Iterator[str]) -> Iterator[str]:
    return (f"{front} {line}" for line in lines)


def in_turn(sources: Sequence[Iterator[str]]) -> Iterator[str]:
    """Lines of one source after the other; after the last it raises the first PenstockError of any."""
    errors = []
    for source in sources:
        try:
            yield from source
        except PenstockError as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


def as_they_come(sources: Sequence[Iterator[str]]) -> Iterator[str]:
    """Lines of all sources as they come, until all have ended or one fails: its error is raised at once.

    A thread reads each, and waits while its lines are not taken.
    """
    arrived: queue.Queue[str | Exception | None] = queue.Queue(_QUEUED_LINES)

    def pump(source: Iterator[str]) -> None:
        try:
            for line in source:
                arrived.put(line)
            arrived.put(None)
        except Exception as exc:  # noqa: BLE001 - raised where the lines are read
            arrived.put(exc)

    for source in sources:
        threading.Thread(target=pump, args=(source,), daemon=True).start()
    n_left = len(sources)
    while n_left:
        line = arrived.get()
        if isinstance(line, Exception):
            raise line
        if line is None:
            n_left -= 1
        else:
            yield line


def older(path: Path, number: int = 1) -> Path:
    """Where the lines before those of a file are: gateway.log -> gateway.log.1, next to what a link leads to."""
    return Path(f"{path.resolve()}.{number}")


def bound_log(path: Path, most_bytes: int = LOG_BYTES, n_older: int = 1) -> None:
    """When a file has `most_bytes`, its lines go to the `older` one, in place of those there, and it begins again.

    It stays the same file for programs that append to it. What they write in that instant is lost, unless by `append`.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size < most_bytes:  # nearly always, and it is asked once a second or after each line
            return
    with contextlib.suppress(OSError), path.open("r+b") as stream:
        if not _lock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB) or stream.seek(0, os.SEEK_END) < most_bytes:
            return  # another process turns it, or just has
        for number in range(n_older - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                older(path, number).replace(older(path, number + 1))
        # What a full disk does not take is cut off as well, since that is what fills it.
        with contextlib.suppress(OSError), older(path).open("wb") as copy:
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(stream.fileno()).st_mode))
            stream.seek(0)
            shutil.copyfileobj(stream, copy)
        stream.truncate(0)


def bound_output() -> None:
    """`bound_log` for the file that this program's standard error is appended to, if it is one."""
    with contextlib.suppress(OSError):  # there is none
        if os.fstat(_STDERR).st_size >= LOG_BYTES and fcntl.fcntl(_STDERR, fcntl.F_GETFL) & os.O_APPEND:
            bound_log(Path(f"/proc/self/fd/{_STDERR}").resolve())


def append(path: Path, lines: bytes, most_bytes: int, n_older: int = 1, mode: int = 0o644) -> int:
    """Append whole lines in one write, and `bound_log` the file: several processes may do so at once.

    Returns how many bytes were written. A line that a full disk cut off is ended first. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        n_written = os.write(descriptor, b"\n" * is_cut + lines) - is_cut
    finally:
        os.close(descriptor)
    bound_log(path, most_bytes, n_older)
    return max(0, n_written)


def _lock(file: int | IO[bytes], operation: int) -> bool:
    """Return whether no other process has the lock. A file system may have no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


class LogReader:
    """Reads a bounded file, with the older one before it: each line once. `last_bytes`: only those at the end."""

    def __init__(self, path: Path, last_bytes: int = sys.maxsize) -> None:
        self.begun = b""  # a line without its end
        self._path, self._last_bytes = path, last_bytes
        self._files: tuple[object, object] | None = None
        self._at = 0  # in the file; below 0 from the end of the older one

    def lines(self) -> Iterator[bytes]:
        """The whole lines since the last call; none where the file is absent."""
        while piece := self._piece():
            *whole, self.begun = (self.begun + piece).split(b"\n")
            if len(self.begun) >= _PIECE_BYTES:
                whole, self.begun = [*whole, self.begun], b""
            yield from whole

    def _piece(self) -> bytes:
        before = older(self._path)
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as stream:
            _lock(stream, fcntl.LOCK_SH)
            now, earlier = os.fstat(stream.fileno()), before.stat() if before.exists() else None
            n_earlier = earlier.st_size if earlier is not None else 0
            files = (now.st_dev, now.st_ino), earlier and (earlier.st_ino, earlier.st_mtime_ns)
            is_cut = False
            if self._files is None or files[0] != self._files[0]:
                self._at, self.begun = max(-n_earlier, now.st_size - self._last_bytes), b""
                is_cut = self._at > -n_earlier
            elif files[1] != self._files[1]:
                self._at = max(0, self._at) - n_earlier
            elif self._at > now.st_size:  # emptied by another program
                self._at, self.begun = 0, b""
            self._files = files
            with before.open("rb") if self._at < 0 else contextlib.nullcontext(stream) as source:
                source.seek(self._at, os.SEEK_END if self._at < 0 else os.SEEK_SET)
                if is_cut:
                    self._at += len(source.readline())
                piece = source.read(_PIECE_BYTES)
            self._at += len(piece)
            return piece
        return b""


def file_lines(
    path: Path, follow: bool, last: int | None = None, is_over: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Whole lines of a log and the older one: all, or the `last` of them. With `follow` it also waits, for the file and
    for more lines, until the caller stops, or no more come and it `is_over`."""
    reader = LogReader(path)
    lines = reader.lines()
    if last is not None:
        recent = collections.deque(lines, last)
        lines = iter([*recent][bool(reader.begun and len(recent) == last) :])
    yield from map(_text, lines)
    while follow:
        was_over = is_over()  # then it is read once more: its last lines may have come since
        yield from map(_text, reader.lines())
        if was_over:
            break
        time.sleep(_POLL_S)
    if reader.begun and (follow or last != 0):
        yield _text(reader.begun)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
