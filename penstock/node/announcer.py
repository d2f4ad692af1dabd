"""A node's calls to its gateway: the client of the admin address, and the announcement that it renews there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.errors import PenstockError
from penstock.wire.announcement import AnnounceAnswer, Announcement, GatewayAddress, MachineReading, engine_key
from penstock.wire.gateways import ask_each, clients
from penstock.world import REAL, World

_TIMEOUT_S = 3.0


class AdminClient:
    """The gateway's admin address as this node reaches it; of several URLs it uses the one that answered last.

    A URL whose host name has several addresses stands for several gateways: all get every call. `file` is read before
    every call: the gateway may have moved, and its old job still answers while it drains.
    """

    def __init__(self, urls: Sequence[str], token: str, file: Path | None = None) -> None:
        assert urls or file
        self._token, self._file = token, file
        self._urls, self._at = [] if file else list(urls), 0
        self.engine_key = engine_key(token)

    def _read_file(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # not there yet, or the file system is away
            gateway = msgspec.json.decode(self._file.read_bytes(), type=GatewayAddress)
            urls = [f"http://{address}" for address in gateway.admin]
            if urls != self._urls:
                self._urls, self._at = urls, 0

    def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """As `Client.post_json`: the first answer. After a failure the next call tries the next URL."""
        return self.post_all(path, body)[0]

    def post_all(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As `post_json`: the answers of all gateways that answer, one at least."""
        self._read_file()
        if not self._urls:
            raise PenstockError("the gateway has no address yet", is_retryable=True)
        at = self._at
        try:
            gateways = clients(self._urls[at], self._token, _TIMEOUT_S)
            return ask_each(gateways, lambda gateway: gateway.post_json(path, body))
        except PenstockError:
            self._at = (at + 1) % len(self._urls)
            raise

    def own_address(self) -> str | None:
        """This machine's end of a connection to the gateway; None while no address can be reached. Blocks."""
        self._read_file()
        for url in self._urls[self._at :] + self._urls[: self._at]:
            parts = urlsplit(url)
            try:
                with socket.create_connection((parts.hostname or "", parts.port or 80), _TIMEOUT_S) as probe:
                    return str(probe.getsockname()[0])
            except OSError:
                continue
        return None


class Announcer:
    """Posts the newest announcement to the gateway: every `every_s` seconds, and at once when it changes.

    `on_answer` is called, from this thread, with each answer; of several gateways' the orders add up. Each post carries
    what `machines` reads then; another reading is no change.
    """

    every_s = 1.0

    def __init__(
        self,
        admin: AdminClient,
        on_answer: Callable[[AnnounceAnswer], None],
        machines: Callable[[], tuple[MachineReading, ...]] = tuple,
        world: World = REAL,
    ) -> None:
        self._world = world
        self._admin, self._on_answer, self._machines = admin, on_answer, machines
        self._changed = world.condition()
        self._newest: Announcement | None = None
        self._posted: Announcement | None = None
        self._refused: Announcement | None = None

    def start(self) -> None:
        self._world.thread(self.run, "announcer")

    def announce(self, announcement: Announcement) -> None:
        with self._changed:
            if announcement != self._newest:
                self._newest = announcement
                self._changed.notify_all()

    def is_posted(self) -> bool:
        with self._changed:
            return self._posted == self._newest

    def wait_posted(self, timeout_s: float) -> None:
        """Block until the gateway has the newest announcement or cannot be reached, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest in (self._posted, self._refused), timeout_s)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None and self._newest != self._posted, self.every_s)
                newest = self._newest
            if newest is None:
                continue
            try:
                announcement = msgspec.structs.replace(newest, machines=self._machines())
                self._on_answer(_joined(self._admin.post_all("/admin/announce", msgspec.to_builtins(announcement))))
                is_taken = True
            except (PenstockError, msgspec.ValidationError):
                is_taken = False
            with self._changed:
                self._posted, self._refused = (newest, None) if is_taken else (self._posted, newest)
                self._changed.notify_all()
            if not is_taken:
                self._world.sleep(0.5)  # the gateway is down or starting: the controller restarts it


def _joined(answers: Sequence[dict[str, Any]]) -> AnnounceAnswer:
    """The first gateway's answer, with the wake that any of them orders, and what any of them heard."""
    rows = [msgspec.convert(answer, AnnounceAnswer) for answer in answers]
    return msgspec.structs.replace(rows[0], wake=any(row.wake for row in rows), heard=any(row.heard for row in rows))
