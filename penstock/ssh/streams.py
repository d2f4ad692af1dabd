"""Logs that lie on hosts, as lines: of one host, or of several with their names in front."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence

from penstock.ssh.program import Piped, Ssh, short_name

_QUEUED_LINES = 10_000


class Source:
    """A log on a host."""

    def __init__(self, host: str, python: str, path: str) -> None:
        self.host, self.python, self.path = host, python, path

    def words(self, follow: bool, last: int | None) -> list[str]:
        words = [self.python, "-m", "penstock.remote_node", "logs", self.path]
        return [*words, *(["--follow"] if follow else []), *(["--last", str(last)] if last is not None else [])]


def lines(ssh: Ssh, sources: Sequence[Source], follow: bool, last: int | None) -> Iterator[str]:
    """Lines of all sources. With `follow` as they come; the programs on the hosts end when the caller stops."""
    if len(sources) == 1:
        yield from _of_one(ssh, sources[0], follow, last)
    elif not follow:
        for source in sources:
            yield from (f"{short_name(source.host)}: {line}" for line in _of_one(ssh, source, follow, last))
    else:
        yield from _merged(ssh, sources, last)


def _open(ssh: Ssh, source: Source, follow: bool, last: int | None) -> Piped:
    return ssh.popen(source.host, source.words(follow, last), subprocess.PIPE, subprocess.DEVNULL)


def _of_one(ssh: Ssh, source: Source, follow: bool, last: int | None) -> Iterator[str]:
    child = _open(ssh, source, follow, last)
    try:
        yield from _read(child)
    finally:
        _end(child)


def _merged(ssh: Ssh, sources: Sequence[Source], last: int | None) -> Iterator[str]:
    arrived: queue.Queue[str] = queue.Queue(_QUEUED_LINES)
    children = [_open(ssh, source, True, last) for source in sources]

    def pump(name: str, child: Piped) -> None:
        for line in _read(child):
            arrived.put(f"{name}: {line}")

    try:
        for source, child in zip(sources, children, strict=True):
            threading.Thread(target=pump, args=(short_name(source.host), child), daemon=True).start()
        while True:
            yield arrived.get()
    finally:
        for child in children:
            _end(child)


def _read(child: Piped) -> Iterator[str]:
    assert child.stdout is not None
    for line in child.stdout:
        yield line.decode("utf-8", "replace").rstrip("\n")


def _end(child: Piped) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()
