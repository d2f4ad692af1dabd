"""Every further node of a replica: runs its part of the engine while the first node says so, and says how it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.engines import Diagnosis, Engine
from penstock.errors import PenstockError
from penstock.hardware import NodeFacts
from penstock.node.group.addresses import Formation
from penstock.node.group.rendezvous import Group, open_door, reached
from penstock.node.local_processes import Parts
from penstock.node.ready_file import ReadyFile
from penstock.planner import Plan

_TICK_S = 0.1
_LOOK_EVERY_S = 2.0
_HEAD = 0
_GATEWAY_GONE_S = 3.0
_LEAD_ENDS = ("stopping", "failed")

Start = Callable[[Formation], Parts]


class Follower:
    """Follows rank 0 through epochs until it is told to stop, or rank 0 ends for good.

    SIGTERM comes to every node at once, and rank 0 still drains: our part is kept until rank 0 has ended, a second
    signal comes, or the gateway is gone too: nobody is left to drain for, nor to say that rank 0 has ended.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        engine: Engine,
        tell: Callable[[], NodeFacts],
        start: Start,
        ready_file: ReadyFile,
    ) -> None:
        self.stops, self._began = 0, time.monotonic()
        self._ready_file = ready_file
        self._plan, self._group, self._engine, self._tell, self._start = plan, group, engine, tell, start
        self._wake = threading.Event()
        self._ended: set[str] = set()
        self._stop_by: float | None = None
        self._last: tuple[str, Mapping[str, Any]] = ("", {})

    def stop(self, *_: object) -> None:
        self.stops += 1
        self._stop_by = self._stop_by or time.monotonic() + self._plan.drain_s
        self._wake.set()

    def leave(self) -> None:
        """The gateway's order to leave: as a first stop, however often it is repeated."""
        if not self.stops:
            self.stop()

    def run(self) -> int:
        """0 in the end, however it came."""
        self._group.say("", phase="here")
        while not self._must_leave():
            epoch, content = self._lead()
            if content.get("phase") == "gather" and epoch not in self._ended:
                self._one_epoch(epoch)
                self._ended.add(epoch)
            elif content.get("phase") in _LEAD_ENDS or (self.stops and content.get("phase") != "go"):
                break
            self._pause()
        return 0

    def _one_epoch(self, epoch: str) -> None:
        """From rank 0's call to the end of our part of the engine."""
        with open_door() as door:
            try:
                facts = self._tell()
            except PenstockError as exc:
                self._report(epoch, Diagnosis(exc.message, exc.hint, is_final=not exc.is_retryable))
                return
            self._group.say(epoch, phase="here", facts=facts, port=door.port, nonce=door.nonce)
            content = self._wait_phase(epoch, "probe")
            if content is None:
                return
            doors = msgspec.convert(content["doors"], dict[int, tuple[NodeFacts, int, str]], strict=False)
            self._group.say(epoch, phase="probed", reached=reached(doors))
            content = self._wait_phase(epoch, "go")
        if content is None:
            return
        made = msgspec.convert(content["formation"], Formation)
        print(f"penstock: node {self._group.rank} starts its part, {made.spots[self._group.rank].address}", flush=True)
        parts = self._start(made)
        try:
            self._group.say(epoch, phase="running")
            self._ready_file.set(is_ready=True)
            self._while_running(epoch, parts)
        finally:
            self._ready_file.set(is_ready=False)
            parts.end(0.0)

    def _while_running(self, epoch: str, parts: Parts) -> None:
        next_look = 0.0
        while not self._must_leave():
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_EVERY_S
                parts.look()
            code = parts.exit_code()
            if code is not None:
                if self._lead()[1].get("phase") == "go":
                    self._report(epoch, self._why(code, parts))
                return
            now, content = self._lead()
            if now != epoch or content.get("phase") != "go":
                return
            self._pause()

    def _why(self, code: int, parts: Parts) -> Diagnosis:
        if parts.engine is not None:
            return self._engine.diagnose(code, list(parts.engine.tail))
        return Diagnosis(f"Ray ended: {parts.ray_words()}")

    def _report(self, epoch: str, died: Diagnosis) -> None:
        print(f"penstock: {died.reason}", flush=True)
        self._group.say(epoch, phase="died", reason=died.reason, hint=died.hint, is_final=died.is_final)
        self._group.wait_posted(2.0)

    def _lead(self) -> tuple[str, Mapping[str, Any]]:
        """Rank 0's epoch and what it says; what it last said while nobody can judge whether it is gone.

        What was said before this process started, a "stopping", was for the one before it.
        """
        row = self._group.others().get(_HEAD)
        if row is not None and row.age_s < time.monotonic() - self._began:
            self._last = (row.post.epoch, row.post.content)
        elif self._group.can_judge():
            self._last = ("", {})
        return self._last

    def _wait_phase(self, epoch: str, phase: str) -> Mapping[str, Any] | None:
        """What rank 0 says in that phase; None when the epoch ended before."""
        while not self._must_leave():
            now, content = self._lead()
            if now != epoch or content.get("phase") in ("over", *_LEAD_ENDS):
                return None
            if content.get("phase") == phase:
                return content
            self._pause()
        return None

    def _must_leave(self) -> bool:
        if self.stops == 0:
            return False
        is_late = self._stop_by is not None and time.monotonic() > self._stop_by
        return self.stops > 1 or is_late or self._group.silence_s() > _GATEWAY_GONE_S

    def _pause(self) -> None:
        self._wake.wait(_TICK_S)
        self._wake.clear()
