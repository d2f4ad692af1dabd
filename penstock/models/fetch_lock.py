"""One downloader of a model in a cache, however many ask, also on a file system without locks (NFS, Lustre).

The owner's file is made with O_EXCL and rewritten every 5 s with a counter and its progress. One whose file stands
still for 60 s, by the clock of the process that waits, is gone: clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.paths import write_atomically

NAME = ".penstock-fetch.lock"
_BEAT_S, _POLL_S = 5.0, 0.5
STALE_S = 60.0  # since the last beat of its owner
_SETTLE_S = 1.0  # longer than another process takes from its decision to take over to its write


class Owner(msgspec.Struct, frozen=True):
    """Who fetches: `host` with its view of processes, process, its start in clock ticks; `line` is its progress."""

    host: str
    pid: int
    started_at: int
    token: str
    n_beats: int = 0
    line: str = ""


def owner_of(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


class FetchLock:
    """`with FetchLock(folder, say):` the process that is inside fetches. `line` is what others show while they wait."""

    def __init__(self, folder: Path, say: Callable[[str], None], line: Callable[[], str] = str) -> None:
        self._path, self._say, self._line = folder / NAME, say, line
        self._owner = Owner(_view(), os.getpid(), _started_at(os.getpid()), secrets.token_hex(8))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.is_lost = False

    def __enter__(self) -> FetchLock:
        while not self._create():
            self._wait()
            if self._take_over():
                break
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_ours():
            self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(self._owner))
        return True

    def _wait(self) -> None:
        """Until the file is gone, or its owner is."""
        seen, since = None, time.monotonic()
        while self._path.exists():
            owner = owner_of(self._path)
            if owner != seen:
                if owner is not None:
                    who = f"process {owner.pid} on {owner.host.partition(' ')[0]}"
                    self._say(f"waiting for {who}, which fetches it" + (f": {owner.line}" if owner.line else ""))
                seen, since = owner, time.monotonic()
            if time.monotonic() - since > STALE_S or (owner is not None and _is_dead(owner)):
                return
            time.sleep(_POLL_S)

    def _take_over(self) -> bool:
        """The last of several that write the file has it."""
        if not self._path.exists():
            return False
        self._write()
        time.sleep(_SETTLE_S)
        return self._is_ours()

    def _write(self) -> None:
        write_atomically(self._path, msgspec.json.encode(self._owner))

    def _is_ours(self) -> bool:
        owner = owner_of(self._path)
        return owner is not None and owner.token == self._owner.token

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            if not self._is_ours():  # this process stood still for a minute, and another one took over
                self.is_lost = True
                return
            self._owner = msgspec.structs.replace(self._owner, n_beats=self._owner.n_beats + 1, line=self._line())
            with contextlib.suppress(OSError):  # a full disk: the next beat may succeed
                self._write()


def _view() -> str:
    """The host, and which processes it sees: containers may have one name, and each has a process 1."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 - a link that leads nowhere
    except OSError:
        return socket.gethostname()


def _is_dead(owner: Owner) -> bool:
    if owner.host != _view():
        return False
    return _started_at(owner.pid) != owner.started_at


def _started_at(pid: int) -> int:
    """When a process started, in clock ticks since boot (field 22 of proc(5)); 0 when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0
