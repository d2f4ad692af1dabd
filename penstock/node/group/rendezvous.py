"""How the nodes of one replica meet: on the gateway's board, the only place that every node reaches.

Rank 0 leads. Every start of the engine is an epoch:

    rank 0: gather             -> (all are here) go, with the formation -> ... -> over
    others: preparing -> here  ->                running                -> died or over

A node that vanishes stops posting; a restarted one is another instance. Both end the epoch for all.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.node.announcer import AdminClient
from penstock.wire.announcement import BoardView, MachineReading, Post, PostView
from penstock.world import REAL, Thread, World

_POST_EVERY_S = 0.5
_FORMING_POST_EVERY_S = 0.1  # nodes that form wait for each other's posts
GONE_AFTER_S = 6.0
PREPARING = "preparing"  # fetches the model; its post has a note that says how far it is
_FORMING = ("gather", "here")
# A copy of weights that is whole is news no more.
_RESTING, _RESTING_POST_EVERY_S = "whole", 2.0


class BoardClient:
    """Renews this node's post on the board and keeps what the others posted last.

    `on_leave` is called, from this thread, with each answer that orders the node to leave. Each post carries what
    `machine` reads then, as "machine".
    """

    def __init__(
        self,
        admin: AdminClient,
        replica: str,
        rank: int,
        on_leave: Callable[[], None],
        machine: Callable[[], MachineReading | None] = lambda: None,
        world: World = REAL,
    ) -> None:
        self._machine, self.world = machine, world
        self._thread: Thread | None = None
        self.rank = rank
        self.instance = secrets.token_hex(4)
        self._admin, self._replica, self._on_leave = admin, replica, on_leave
        self._changed = world.condition()
        self._mine: Post | None = None
        self._is_posted = False
        self._view: BoardView | None = None
        self._answered_at = 0.0
        self._pause_s = _POST_EVERY_S

    def start(self) -> None:
        """Begin to renew the post, in a thread. Safe to repeat."""
        if self._thread is None:
            self._thread = self.world.thread(self.run, "rendezvous")

    def post(self, epoch: str, **content: Any) -> None:
        """Replace this node's post, which is sent at once and then renewed. Does not block."""
        phase = content.get("phase")
        self._pause_s = _FORMING_POST_EVERY_S if phase in _FORMING else _POST_EVERY_S
        if phase == _RESTING:
            self._pause_s = _RESTING_POST_EVERY_S
        mine = Post(self._replica, self.rank, self.instance, epoch, msgspec.to_builtins(content))
        with self._changed:
            if mine != self._mine:
                self._mine, self._is_posted = mine, False
                self._changed.notify_all()

    def posts(self) -> dict[int, PostView]:
        """The last post of every other rank that is not gone."""
        with self._changed:
            view, answered_at = self._view, self._answered_at
        waited_s = self.world.now() - answered_at
        return {
            row.post.rank: row
            for row in (view.posts if view else ())
            if row.post.rank != self.rank and row.age_s + min(waited_s, 1.0) < GONE_AFTER_S
        }

    def can_judge(self) -> bool:
        """Whether the board is fresh and old enough that a rank missing from it is gone."""
        with self._changed:
            is_old = self._view is not None and self._view.age_s > GONE_AFTER_S
            return is_old and self.world.now() - self._answered_at < 3 * _POST_EVERY_S

    def silence_s(self) -> float:
        """How long the board has not answered."""
        with self._changed:
            return self.world.now() - self._answered_at

    def wait_posted(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_posted, timeout_s)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._mine is not None and not self._is_posted, self._pause_s)
                mine = self._mine
            if mine is None:
                continue
            try:
                post = msgspec.structs.replace(mine, content={**mine.content, "machine": self._machine()})
                answer = self._admin.post_json("/admin/board", msgspec.to_builtins(post))
                view = msgspec.convert(answer, BoardView)
            except (PenstockError, msgspec.ValidationError):
                # The gateway is down or starting: until it answers no node counts as gone.
                self.world.sleep(_POST_EVERY_S)
                continue
            if view.leave:
                self._on_leave()
            with self._changed:
                self._view, self._answered_at = view, self.world.now()
                self._is_posted = self._is_posted or self._mine == mine
                self._changed.notify_all()


def wait_for(
    is_so: Callable[[], bool], is_stopped: Callable[[], bool], timeout_s: float | None, world: World = REAL
) -> bool:
    """Poll until it is so (True), or the time is over or the node is stopped (False)."""
    deadline = math.inf if timeout_s is None else world.now() + timeout_s
    while not is_stopped():
        if is_so():
            return True
        if world.now() > deadline:
            return False
        world.sleep(0.1)
    return False
