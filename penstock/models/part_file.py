"""A file on its way here: its bytes go to the disk and through the hash as they come, so that none is read again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from penstock.errors import PenstockError

_BLOCK_BYTES = 1 << 20


class CannotContinueError(PenstockError):
    """The source does not go on behind the bytes that are here: they are thrown away before the next try."""

    def __init__(self, message: str) -> None:
        super().__init__(message, is_retryable=True)


class PartFile:
    """A partial file, open to be continued: what is in it already is hashed first, once. For one thread.

    `report` gets the number of bytes of each change, negative for what is thrown away. Nothing is buffered: a process
    that is killed loses no byte that was written. `git_size`: the whole size of a file that git names by its SHA-1.
    """

    def __init__(self, path: Path, report: Callable[[int], None] = lambda _: None, git_size: int | None = None) -> None:
        self.path, self.report, self._git_size = path, report, git_size
        self._stream = path.open("a+b", buffering=0)
        self._start_hashes()
        self.read_written()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._stream.close()

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes at the end.  Raises OSError; what fitted on the disk is kept and counted."""
        rest = memoryview(data)
        while rest:
            n_bytes = self._stream.write(rest)
            self._hash(rest[:n_bytes])
            self.report(n_bytes)
            rest = rest[n_bytes:]

    def clear(self) -> None:
        """Begin anew."""
        self._reopen()
        self._stream.truncate(0)
        self.report(-self.n_bytes)
        self._start_hashes()

    def read_written(self) -> None:
        """Hash what is in the file behind the bytes that were written here, also when it was replaced."""
        self._reopen()
        self._stream.seek(self.n_bytes)
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        while n_bytes := self._stream.readinto(buffer):
            self._hash(buffer[:n_bytes])

    def sync(self) -> None:
        """Until the bytes are on the disk."""
        os.fsync(self._stream.fileno())

    @property
    def sha256(self) -> str:
        """Of all bytes so far, hexadecimal."""
        return self._sha256.hexdigest()

    @property
    def git_sha1(self) -> str | None:
        """The name that git gives these bytes: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects"""
        return self._git_sha1.hexdigest() if self._git_sha1 is not None else None

    def _reopen(self) -> None:
        self._stream.close()
        self._stream = self.path.open("a+b", buffering=0)

    def _start_hashes(self) -> None:
        self.n_bytes = 0
        self._sha256 = hashlib.sha256()
        head = None if self._git_size is None else b"blob %d\0" % self._git_size
        self._git_sha1 = None if head is None else hashlib.sha1(head, usedforsecurity=False)

    def _hash(self, data: memoryview) -> None:
        self._sha256.update(data)  # lets other threads run: about 2 GB/s a core with SHA instructions
        if self._git_sha1 is not None:
            self._git_sha1.update(data)
        self.n_bytes += len(data)
