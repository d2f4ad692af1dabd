"""Logs on hosts, as lines: of one host, or of several with their names in front."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.log_lines import as_they_come, in_turn, named
from penstock.targets.openssh import Done, Ssh, failed, short_name


class Source(NamedTuple):
    """A log on a host."""

    host: str
    python: str
    path: str


def lines(ssh: Ssh, sources: Sequence[Source], follow: bool, last: int | None) -> Iterator[str]:
    """Lines of all sources. With `follow` as they come; the programs on the hosts end when the caller stops.

    Raises HostError for a host that cannot be reached: after the lines of the others, with `follow` at once.
    """
    readers: list[_Reader] = []
    try:
        for source in sources:
            readers.append(_Reader(ssh, source, follow, last))
        if len(readers) == 1:
            yield from readers[0].lines()
        else:
            fronted = [named(f"{short_name(reader.host)}:", reader.lines()) for reader in readers]
            yield from as_they_come(fronted) if follow else in_turn(fronted)
    finally:
        for reader in readers:
            reader.end()


class _Reader:
    """A program that prints a log on its host."""

    def __init__(self, ssh: Ssh, source: Source, follow: bool, last: int | None) -> None:
        self.host = source.host
        # A file, not a pipe: a connection that is left open for others holds the error output open too.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        words = [source.python, "-m", "penstock.targets.ssh.agent", "logs", source.path]
        words += [*(["--follow"] if follow else []), *(["--last", str(last)] if last is not None else [])]
        self._child = ssh.popen(source.host, words, subprocess.PIPE, self._errors)

    def lines(self) -> Iterator[str]:
        """What it prints.  Raises HostError when it ended badly, or its connection did."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            yield line.decode("utf-8", "replace").rstrip("\n")
        code = self._child.wait()
        if code:
            self._errors.seek(0)
            # ssh prints nothing when a shared connection is lost.
            complaint = self._errors.read().decode("utf-8", "replace").strip() or "the connection broke"
            raise failed(self.host, "could not read a log", Done(code, b"", complaint))

    def end(self) -> None:
        """End it, on the host too. Safe to repeat."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._errors):
            if stream is not None:
                stream.close()
