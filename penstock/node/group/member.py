"""Every node of a replica but the first: runs its ranks of the engine while rank 0 says so, and reports on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from penstock.engines import Diagnosis, Engine
from penstock.errors import PenstockError
from penstock.models.fetch_files import Progress
from penstock.node.group.addresses import Formation, Introduction
from penstock.node.group.rendezvous import PREPARING, BoardClient
from penstock.node.local_processes import NodeProcesses
from penstock.node.ready_file import ReadyFile
from penstock.node.staging import Show
from penstock.planner import Plan

_TICK_S = 0.1
_LOOK_EVERY_S = 1.0
_HEAD = 0
_GATEWAY_GONE_S = 3.0
_LEADER_ENDS = ("stopping", "failed")


class GroupMember:
    """Follows rank 0 through epochs until it is stopped, or rank 0 ends for good.

    All ranks get SIGTERM together. This rank keeps its engine until rank 0 has drained, a second signal comes, or the
    gateway is gone too: then there is nothing to drain, and no board that shows rank 0's end. While rank 0 serves,
    `on_ready` is called often.
    """

    def __init__(
        self,
        plan: Plan,
        board: BoardClient,
        engine: Engine,
        introduce: Callable[[Show], Introduction],
        start: Callable[[Formation], NodeProcesses],
        on_ready: Callable[[], None],
        ready_file: ReadyFile,
    ) -> None:
        self._world = board.world
        self.stops, self._began = 0, self._world.now()
        self._plan, self._board, self._engine, self._introduce, self._start = plan, board, engine, introduce, start
        self._on_ready, self._ready_file = on_ready, ready_file
        self._wake = self._world.event()
        self._ended: set[str] = set()  # epochs that ran or failed here; any other may be entered again
        self._has_died = False  # in the last epoch; rank 0 has to read why
        self._stop_by: float | None = None
        self._last: tuple[str, Mapping[str, Any]] = ("", {})
        self._note = ""

    def stop(self) -> None:
        self.stops += 1
        self._stop_by = self._stop_by or self._world.now() + self._plan.drain_s
        self._wake.set()

    def leave(self) -> None:
        """The gateway's order to leave: a first stop, never a second one."""
        if not self.stops:
            self.stop()

    def run(self) -> int:
        """Blocks until it ends; always 0."""
        self._board.post("", phase="here", note="")
        # At once, at the same time as rank 0: the nodes pass the model's files on to each other.
        self._prepare()
        while not self._must_leave():
            epoch, content = self._leader()
            if content.get("phase") == "gather" and epoch not in self._ended:
                self._run_epoch(epoch)
            elif content.get("phase") in _LEADER_ENDS or (self.stops and content.get("phase") != "go"):
                break
            elif not self._has_died:  # rank 0 has not begun, or goes on without this node
                self._board.post("", phase="here", note=self._note)
            self._pause()
        return 0

    def _run_epoch(self, epoch: str) -> None:
        self._has_died = False
        introduction = self._introduction(epoch)
        if introduction is None:
            return
        self._board.post(epoch, phase="here", introduction=introduction)
        content = self._wait_go(epoch)
        if content is None:
            return
        self._ended.add(epoch)
        formation = msgspec.convert(content["formation"], Formation)
        rank = self._board.rank
        print(f"penstock: node {rank} starts its ranks at {formation.nodes[rank].address}", flush=True)
        local = self._start(formation)
        try:
            self._board.post(epoch, phase="running")
            self._ready_file.set(is_ready=True)
            self._while_running(epoch, local)
        finally:
            self._ready_file.set(is_ready=False)
            local.end(0.0)

    def _prepare(self) -> Future[Introduction]:
        """This node's introduction, made in a thread that no exit waits for."""
        made: Future[Introduction] = Future()

        def make() -> None:
            try:
                made.set_result(self._introduce(self._show))
            except BaseException as exc:  # noqa: BLE001 - raised again by who asks for the result
                made.set_exception(exc)

        self._world.thread(make, "prepare")
        return made

    def _show(self, progress: Progress) -> None:
        self._note = progress.line

    def _introduction(self, epoch: str) -> Introduction | None:
        """Waits until this node has what its ranks need, in rank 0's sight; None if it fails or the epoch is over."""
        made = self._prepare()
        while not made.done():
            if self._must_leave() or self._leader()[0] != epoch:
                return None
            self._board.post(epoch, phase=PREPARING, note=self._note)
            self._pause()
        try:
            return made.result()
        except PenstockError as exc:
            self._post_death(epoch, Diagnosis(exc.message, exc.hint, is_final=not exc.is_retryable))
            return None

    def _while_running(self, epoch: str, local: NodeProcesses) -> None:
        next_look = 0.0
        while not self._must_leave():
            if self._world.now() >= next_look:
                next_look = self._world.now() + _LOOK_EVERY_S
                local.look()
            leader_epoch, content = self._leader()
            is_going = content.get("phase") == "go"
            code = local.exit_code()
            if code is not None:
                if is_going:
                    self._post_death(epoch, self._diagnose(code, local))
                return
            if leader_epoch != epoch or not is_going:
                return
            if content.get("is_ready"):
                self._on_ready()
            self._pause()

    def _diagnose(self, code: int, local: NodeProcesses) -> Diagnosis:
        if local.engine is not None:
            return self._engine.diagnose(code, list(local.engine.tail))
        return Diagnosis(f"Ray ended: {local.ray_last_words()}")

    def _post_death(self, epoch: str, death: Diagnosis) -> None:
        self._ended.add(epoch)
        self._has_died = True
        print(f"penstock: {death.reason}", flush=True)
        self._board.post(epoch, phase="died", reason=death.reason, hint=death.hint, is_final=death.is_final)
        self._board.wait_posted(2.0)

    def _leader(self) -> tuple[str, Mapping[str, Any]]:
        """Rank 0's epoch and post; its last ones until it certainly is gone.

        A post from before this process started ("stopping") was for the process before it.
        """
        row = self._board.posts().get(_HEAD)
        if row is not None and row.age_s < self._world.now() - self._began:
            self._last = (row.post.epoch, row.post.content)
        elif self._board.can_judge():
            self._last = ("", {})
        return self._last

    def _wait_go(self, epoch: str) -> Mapping[str, Any] | None:
        """Rank 0's post that starts this epoch; None when the epoch ended before."""
        while not self._must_leave():
            leader_epoch, content = self._leader()
            if leader_epoch != epoch or content.get("phase") in ("over", *_LEADER_ENDS):
                return None
            if content.get("phase") == "go":
                return content
            self._pause()
        return None

    def _must_leave(self) -> bool:
        is_late = self._stop_by is not None and self._world.now() > self._stop_by
        return self.stops > 1 or is_late or (self.stops > 0 and self._board.silence_s() > _GATEWAY_GONE_S)

    def _pause(self) -> None:
        self._wake.wait(_TICK_S)
        self._wake.clear()
