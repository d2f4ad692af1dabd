"""Who is logged in to the chat page: a random token in a cookie, and the key that belongs to it.

`sessions.json` (mode 600) keeps the sha256 of each token with its key, so that a restart of the process logs nobody
out and a copy of the file opens no session by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import stat
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.paths import write_atomically

KEPT_S = 30 * 86400.0
_MOST = 2000  # then the oldest of the key that has most ends, so that nobody can end another's
_LOGOUT_S = 5.0  # a page that is logged out at once may not have opened the stream that tells it why
_MOST_WAITING = 100  # keys of one address
_PAUSE_S, _PAUSE_S_MAX = 0.1, 10.0  # from one answer to a wrong key to the next, of an address that sent too many
_RENEW_S = 86400.0  # how often the time of a session in use is written


@dataclass(frozen=True)
class Visitor:
    """Who sent a request. `session`: None where no login is needed; `key`: for the gateway, None where it needs none.

    `refuse`: the gateway refused the key, so the session ends; the words are shown on the login page.
    """

    session: str | None
    key: str | None
    refuse: Callable[[str], None]

    def refuse_soon(self, reason: str) -> None:
        """For an event of the page, which is to hear its end before."""
        asyncio.get_running_loop().call_later(_LOGOUT_S, self.refuse, reason)


def visitor(request: Any) -> Visitor:
    """Of a `gradio.Request`, or of a request of Starlette's: the server puts it there."""
    who = getattr(request, "request", request).state.visitor
    assert isinstance(who, Visitor)
    return who


class Session(msgspec.Struct, frozen=True):
    """`at`: when it was last used, Unix seconds, to the day."""

    key: str
    at: float


class Sessions:
    """The sessions of one page. `say` writes a line to the log; without a file, or space for it, they live in memory.

    `now` is Unix seconds.
    """

    def __init__(self, file: Path, now: float, say: Callable[[str], None] = lambda _: None) -> None:
        self._file, self._say = file, say
        self._sessions = {name: each for name, each in self._read().items() if now - each.at < KEPT_S}
        self._reasons: dict[str, str] = {}  # why the last sessions ended

    def open(self, key: str, now: float) -> str:
        """A new session with that key; its token, for the cookie."""
        token = secrets.token_urlsafe(32)
        self._sessions[name_of(token)] = Session(key, now)
        if len(self._sessions) > _MOST:
            most = Counter(each.key for each in self._sessions.values()).most_common(1)[0][0]
            names = [name for name, each in self._sessions.items() if each.key == most]
            del self._sessions[min(names, key=lambda name: self._sessions[name].at)]
        self._write()
        return token

    def find(self, token: str | None, now: float) -> tuple[str, str] | None:
        """The name of the session and its key; None for a token that opens none."""
        name = name_of(token or "")
        session = self._sessions.get(name)
        if session is None or now - session.at >= KEPT_S:
            return None
        if now - session.at > _RENEW_S:
            self._sessions[name] = Session(session.key, now)
            self._write()
        return name, session.key

    def close(self, name: str, reason: str) -> None:
        """Idempotent. `reason`: for `why`."""
        if self._sessions.pop(name, None) is None:
            return
        self._reasons[name] = reason
        if len(self._reasons) > _MOST:
            del self._reasons[next(iter(self._reasons))]
        self._write()

    def why(self, token: str | None) -> str | None:
        """Why the session of that token ended; None where nobody ended it."""
        return self._reasons.get(name_of(token or ""))

    def _read(self) -> dict[str, Session]:
        try:
            if stat.S_IMODE(self._file.stat().st_mode) & 0o077:
                self._say(f"{self._file} could be read by others: its sessions have ended")
                return {}
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, Session])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
            self._say(f"could not read {self._file}, so everyone logs in again: {exc}")
            return {}

    def _write(self) -> None:
        try:
            write_atomically(self._file, msgspec.json.encode(self._sessions), mode=0o600)
        except OSError as exc:
            self._say(f"could not write {self._file}, so a restart ends the sessions: {exc.strerror or exc}")


def name_of(token: str) -> str:
    """What the file and the log know of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


class Attempts:
    """Keys that are tried, by address: one at a time, and more than `most` wrong ones in `period_s` are too many."""

    def __init__(self, most: int = 10, period_s: float = 60.0) -> None:
        self._most, self._period_s = most, period_s
        self._failures: dict[str, deque[float]] = {}
        self._lines: dict[str, list[asyncio.Future[bool]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[bool]:
        """For the check of a key from that address; false when so many came after it that it is not checked."""
        line, turn = self._lines.setdefault(address, []), asyncio.get_running_loop().create_future()
        line.append(turn)
        if len(line) == 1:
            turn.set_result(True)
        elif len(line) > _MOST_WAITING:  # the newest stays: a flood of wrong keys must not keep a right one out
            line.pop(1).set_result(False)
        try:
            yield await turn
        finally:
            if turn in line:
                line.remove(turn)
                if not line:
                    del self._lines[address]
                elif not line[0].done():
                    line[0].set_result(True)

    def failed(self, address: str, now: float) -> float | None:
        """Count a wrong key; return how many seconds its answer waits where there were too many."""
        times = self._failures[address] = self._failures.pop(address, deque(maxlen=self._most + 1))
        is_one_too_many = len(times) >= self._most and now - times[-self._most] < self._period_s
        pause_s = min(max(0.0, times[-1] - now) + _PAUSE_S, _PAUSE_S_MAX) if is_one_too_many else None
        times.append(now + (pause_s or 0.0))
        if len(self._failures) > _MOST:
            del self._failures[next(iter(self._failures))]
        return pause_s
