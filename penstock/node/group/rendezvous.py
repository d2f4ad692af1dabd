"""How the nodes of one replica find each other, over the gateway's board: the only place that every node reaches.

Rank 0 leads. Every start of the engine is an epoch of its own:

    rank 0: gather  -> (all are here) probe -> (all have probed) go, with the formation -> ... -> over
    others: here    -> probed                               -> running -> died or over

A node that vanishes stops posting; one that came again is another instance. Both end the epoch for all.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.hardware import NodeFacts
from penstock.node.announcer import Admin
from penstock.wire.announcement import BoardView, Post, PostView

_POST_EVERY_S = 0.5
_FORMING_POST_EVERY_S = 0.1  # nodes that form wait for each other's every word
_GONE_AFTER_S = 6.0
_FORMING = ("gather", "here", "probe", "probed")
_PROBE_TIMEOUT_S = 3.0
_NONCE_BYTES = 16


class Group(threading.Thread):
    """This node's seat at the board: posts what it last said, and knows what the others last said."""

    def __init__(self, admin: Admin, replica: str, rank: int, on_leave: Callable[[], None]) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self.rank = rank
        self.instance = secrets.token_hex(4)
        self._admin, self._replica, self._on_leave = admin, replica, on_leave
        self._changed = threading.Condition()
        self._mine: Post | None = None
        self._is_posted = False
        self._view: BoardView | None = None
        self._seen_at = 0.0
        self._pause_s = _POST_EVERY_S

    def say(self, epoch: str, **content: Any) -> None:
        """Replace what this node says; it is posted at once and again and again."""
        self._pause_s = _FORMING_POST_EVERY_S if content.get("phase") in _FORMING else _POST_EVERY_S
        mine = Post(self._replica, self.rank, self.instance, epoch, msgspec.to_builtins(content))
        with self._changed:
            if mine != self._mine:
                self._mine, self._is_posted = mine, False
                self._changed.notify_all()

    def others(self) -> dict[int, PostView]:
        """The last post of every other rank that is not gone."""
        with self._changed:
            view, seen_at = self._view, self._seen_at
        waited_s = time.monotonic() - seen_at
        posts = view.posts if view else ()
        return {
            row.post.rank: row
            for row in posts
            if row.post.rank != self.rank and row.age_s + min(waited_s, 1.0) < _GONE_AFTER_S
        }

    def can_judge(self) -> bool:
        """Whether the board is fresh and old enough that who is missing from it is really gone."""
        with self._changed:
            view, seen_at = self._view, self._seen_at
        return view is not None and view.age_s > _GONE_AFTER_S and time.monotonic() - seen_at < 3 * _POST_EVERY_S

    def silence_s(self) -> float:
        """How long the board has not answered."""
        with self._changed:
            return time.monotonic() - self._seen_at

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
                answer = self._admin.post_json("/admin/board", msgspec.to_builtins(mine))
                view = msgspec.convert(answer, BoardView)
            except (PenstockError, msgspec.ValidationError):
                time.sleep(_POST_EVERY_S)  # the gateway is down or starting: nobody is judged meanwhile
                continue
            if view.leave:
                self._on_leave()
            with self._changed:
                self._view, self._seen_at = view, time.monotonic()
                self._is_posted = self._is_posted or self._mine == mine
                self._changed.notify_all()


class Door:
    """A port on all addresses of this node that says who it is: proof that an address leads here, and nowhere else.

    Two machines may have the same private address (a container bridge); the nonce tells them apart.
    """

    def __init__(self, port: int = 0, nonce: str | None = None) -> None:
        self.nonce = nonce or secrets.token_hex(_NONCE_BYTES)
        self._socket = socket.create_server(("0.0.0.0", port), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def close(self) -> None:
        # A thread in accept() keeps the socket open after close() alone.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_PROBE_TIMEOUT_S)
                connection.sendall(self.nonce.encode())


@contextlib.contextmanager
def open_door(port: int = 0, nonce: str | None = None) -> Iterator[Door]:
    """A door that is closed at the end; port 0 is any free one.  Raises OSError where the port is taken."""
    door = Door(port, nonce)
    try:
        yield door
    finally:
        door.close()


def knock(address: str, port: int, nonce: str) -> float | None:
    """Seconds that the way to the door of that nonce takes, there and back; None when it does not lead there."""
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), _PROBE_TIMEOUT_S) as connection:
            took_s = time.monotonic() - began
            told = connection.recv(2 * _NONCE_BYTES, socket.MSG_WAITALL)
    except OSError:
        return None
    return took_s if told == nonce.encode() else None


def reached(doors: Mapping[int, tuple[NodeFacts, int, str]]) -> dict[int, list[str]]:
    """By rank, the addresses that lead to its door from here. `doors`: facts, port and nonce. Blocks a few seconds."""
    found: dict[int, list[str]] = {rank: [] for rank in doors}
    lock = threading.Lock()

    def try_address(rank: int, address: str, port: int, nonce: str) -> None:
        if knock(address, port, nonce) is not None:
            with lock:
                found[rank].append(address)

    threads = [
        threading.Thread(target=try_address, args=(rank, one.address, port, nonce), daemon=True)
        for rank, (facts, port, nonce) in doors.items()
        for one in facts.interfaces
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PROBE_TIMEOUT_S)
    return found


def wait_for(is_so: Callable[[], bool], is_stopped: Callable[[], bool], timeout_s: float | None) -> bool:
    """Poll until it is so (True), the time is over, or we are stopped (False)."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not is_stopped():
        if is_so():
            return True
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return False
