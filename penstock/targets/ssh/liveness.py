"""Which processes live on hosts: one `cat` a host, all hosts at once, remembered for a moment.

A controller asks several times a second, and must not wait for a dead host: a thread asks each host, and the controller
gets what is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

import msgspec

from penstock.errors import PenstockError
from penstock.targets.openssh import HostError, Ssh, at_once
from penstock.wire.announcement import Process

_FRESH_S = 1.5
_PATIENCE_S = 0.3  # for a host that has answered before
_FIRST_S = 8.0  # for one that never answered
_ASK_S = 6.0
_AWAY_AFTER_S = 5.0  # grace period before a silent host counts as down
_TICKS_PER_S = 100  # USER_HZ of Linux, on every machine that runs an engine


class Look(msgspec.Struct, frozen=True):
    """What is known of a host. `started`: when each living process of those that were `asked` for started, by pid.

    `good_at`: the clock when it answered last. `error`: why the last question had no answer.
    """

    asked: frozenset[int] = frozenset()
    boot: str = ""
    started: dict[int, float] = {}
    good_at: float | None = None
    tried_at: float | None = None
    error: str | None = None

    def is_away(self, now: float) -> bool:
        """Whether it is unknown what runs there."""
        return self.error is not None and (self.good_at is None or now - self.good_at > _AWAY_AFTER_S)

    def has(self, process: Process, boot: str) -> bool:
        """Whether that very process lived when the host answered last."""
        return self.boot == boot and self.started.get(process.pid) == process.started_at


class Watch:
    """The hosts of one run. Safe to use from several threads."""

    def __init__(self, ssh: Ssh) -> None:
        self._ssh = ssh
        self._changed = threading.Condition()
        self._looks: dict[str, Look] = {}
        self._asking: set[str] = set()

    def see(self, wanted: Mapping[str, Collection[int]]) -> dict[str, Look]:
        """What is known of these processes; hosts are asked again when that is old. Blocks for a moment at most, for
        some seconds only where a host was never asked."""
        now = time.monotonic()
        with self._changed:
            old = [host for host, pids in wanted.items() if not self._is_fresh(host, pids, now)]
            unknown = [host for host in old if not self._knows(host, wanted[host])]
            self._start(old, wanted)
            self._changed.wait_for(lambda: not self._asking & set(old), _PATIENCE_S)
            # The answer of a question that was ending was forgotten: ask again.
            self._start([host for host in unknown if not self._knows(host, wanted[host])], wanted)
            self._changed.wait_for(lambda: all(self._knows(host, wanted[host]) for host in unknown), _FIRST_S)
            return {host: self._looks.get(host, Look(error="not checked yet")) for host in wanted}

    def _start(self, hosts: Collection[str], wanted: Mapping[str, Collection[int]]) -> None:
        for host in hosts:
            if host not in self._asking:
                self._asking.add(host)
                threading.Thread(target=self._ask, args=(host, frozenset(wanted[host])), daemon=True).start()

    def see_now(self, wanted: Mapping[str, Collection[int]]) -> dict[str, Look]:
        """Ask all of these hosts now. Blocks for some seconds when one of them is dead."""
        looks = at_once(list(wanted), lambda host: self._fetch(host, frozenset(wanted[host])))
        return {host: look for host, look in looks.items() if isinstance(look, Look)}

    def forget(self, hosts: Collection[str]) -> None:
        """Forget what is known of these hosts: it has changed."""
        with self._changed:
            for host in hosts:
                self._looks.pop(host, None)

    def _is_fresh(self, host: str, pids: Collection[int], now: float) -> bool:
        look = self._looks.get(host)
        is_old = look is None or look.tried_at is None or now - look.tried_at >= _FRESH_S
        return not is_old and self._knows(host, pids)

    def _knows(self, host: str, pids: Collection[int]) -> bool:
        look = self._looks.get(host)
        return look is not None and (look.asked >= set(pids) or look.error is not None)

    def _ask(self, host: str, pids: frozenset[int]) -> None:
        try:
            self._fetch(host, pids)
        finally:
            with self._changed:
                self._asking.discard(host)
                self._changed.notify_all()

    def _fetch(self, host: str, pids: frozenset[int]) -> Look:
        try:
            boot, started = alive(self._ssh, host, pids)
            now = time.monotonic()
            look = Look(pids, boot, started, now, now)
        except PenstockError as exc:
            before = self._looks.get(host, Look())
            look = msgspec.structs.replace(before, tried_at=time.monotonic(), error=exc.message)
        with self._changed:
            self._looks[host] = look
        return look


def alive(ssh: Ssh, host: str, pids: Collection[int]) -> tuple[str, dict[int, float]]:
    """The boot id of a host, and when each of these processes that lives started.  Raises HostError."""
    files = ["/proc/sys/kernel/random/boot_id", *(f"/proc/{pid}/stat" for pid in sorted(pids))]
    done = ssh.run(host, ["sh", "-c", f"cat {' '.join(files)} 2>/dev/null; echo ."], timeout_s=_ASK_S)
    lines = done.text.splitlines()
    at = next((number for number, line in enumerate(lines) if len(line) == 36 and line.count("-") == 4), None)
    if at is None or not lines or lines[-1] != ".":
        raise HostError(f"{host} gave no answer", detail=done.err or None, is_retryable=True)
    started = {}
    for line in lines[at + 1 : -1]:
        # proc(5): pid (name) state ppid ...; field 22 is when it started.
        pid, _, rest = line.partition(" (")
        fields = rest.rpartition(")")[2].split()
        if pid.isdigit() and len(fields) > 19 and fields[0] not in ("Z", "X"):
            started[int(pid)] = round(int(fields[19]) / _TICKS_PER_S, 2)
    return lines[at], started
