"""Lines of logs: several as one stream, a file as it grows, one that is bounded, and a program's last message."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from penstock.errors import PenstockError

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


def file_lines(
    path: Path, follow: bool, last: int | None = None, is_over: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Whole lines of a log: all, or the `last` of them. With `follow` it also waits, for the file and for more lines,
    until the caller stops, or no more come and it `is_over`."""
    while not path.exists():
        if not follow or is_over():
            return
        time.sleep(_POLL_S)
    with path.open(encoding="utf-8", errors="replace") as stream:
        begun = ""
        for line in stream if last is None else collections.deque(stream, maxlen=last):
            begun = "" if line.endswith("\n") else line
            if not begun:
                yield line.rstrip("\n")
        was_over = False
        while follow:
            begun += stream.readline()
            if begun.endswith("\n"):
                yield begun.rstrip("\n")
                begun = ""
            elif stream.tell() > os.fstat(stream.fileno()).st_size:  # it was full, and begins anew
                stream.seek(0)
            elif was_over:
                break
            else:
                was_over = is_over()  # then read once more: its last lines may have come since
                time.sleep(_POLL_S)
        if begun:
            yield begun


def append_line(path: Path, line: bytes, most_bytes: int) -> None:
    """Append a line in one write: several processes may do so at once. A file that has grown to `most_bytes` becomes
    the `older` one, in place of the one before. A line that a full disk cut off is ended first. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        status = os.fstat(descriptor)
        is_cut = status.st_size > 0 and os.pread(descriptor, 1, status.st_size - 1) != b"\n"
        os.write(descriptor, (b"\n" if is_cut else b"") + line + b"\n")
        if status.st_size >= most_bytes:
            # Without waiting, and only while the name is still this file's: else another process has moved it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == status.st_ino:
                path.replace(older(path))
    except (BlockingIOError, FileNotFoundError):  # another process moves it, or just has
        pass
    finally:
        os.close(descriptor)


def older(path: Path) -> Path:
    """Where `append_line` keeps the lines before those of the file: events.jsonl -> events.1.jsonl."""
    return path.with_suffix(f".1{path.suffix}")


def kept_lines(path: Path, last_bytes: int | None = None) -> list[bytes]:
    """The whole lines of a file that `append_line` writes and of the older one, or those at its end."""
    content = b""
    for file in (path, older(path)):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as stream:
            missing = None if last_bytes is None else last_bytes - len(content)
            if missing is not None and missing < os.fstat(stream.fileno()).st_size:
                stream.seek(-max(0, missing), os.SEEK_END)
                stream.readline()
            content = stream.read() + content
    *lines, _ = content.split(b"\n")
    return lines
