"""Bounds of the page's connections: how many there are, from where, and how long those may take that have no login.

A connection is a stranger's unless a request of a visitor (`sessions.visitor`) runs on it. Strangers' connections end
in time and give way to new ones: idle ones first, then the oldest. A visitor's answer is never cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

# Not httptools, which some installations of uvicorn have too: it takes a request's head of any size.
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.chat.page.proxied import Proxies
from penstock.wire.addresses import network_of

_REQUEST_S = 20.0  # for a stranger's request and its answer
_BODY_S = 300.0  # for the body of a visitor's request
_LOOK_S = 1.0
_MOST = 4096
_MOST_STRANGERS = 64  # of one address; a proxy's counts for all people behind it
_FILES_EACH, _OTHER_FILES = 3, 64  # a connection, and its requests to the gateway: the tab Compare sends two


class Connections:
    """All connections of one page. `n_files`: how many files its process may open."""

    def __init__(self, n_files: int, proxies: Proxies) -> None:
        self._most = max(1, min(_MOST, (n_files - _OTHER_FILES) // _FILES_EACH))
        self._proxies = proxies
        self.open: set[Connection] = set()

    def add(self, new: Connection) -> None:
        """Add a connection, for which strangers' ones may be closed; close it where visitors have them all."""
        if not self._proxies.trusts(new.address):
            same = [each for each in self.open if each.network == new.network and each.is_strangers]
            if len(same) >= _MOST_STRANGERS:
                self._close_some(same)
        if len(self.open) >= self._most:
            self._close_some(each for each in self.open if each.is_strangers)
        if len(self.open) < self._most:
            self.open.add(new)
        else:
            new.transport.abort()

    def _close_some(self, strangers: Iterable[Connection]) -> None:
        """Close a sixteenth, since a look at all of them takes milliseconds."""
        first = sorted(strangers, key=lambda each: (not each.is_idle, each.since))
        for connection in first[: 1 + len(first) // 16]:
            self.open.remove(connection)
            connection.transport.abort()


class Connection(H11Protocol):
    """`since`: when it was opened, or its last answer ended, by the clock of its loop."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = connections

    @property
    def is_strangers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or "visitor" not in self.cycle.scope["state"]

    @property
    def is_idle(self) -> bool:
        """Return whether it waits for another request, of which nothing has come."""
        return self.timeout_keep_alive_task is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.network, self.since = network_of(self.address), self.loop.time()
        self._timer = self.loop.call_later(_LOOK_S, self._look)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._all.open.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def _look(self) -> None:
        """Close it when its request takes too long."""
        spent_s = self.loop.time() - self.since
        if spent_s > _REQUEST_S if self.is_strangers else self.cycle.more_body and spent_s > _BODY_S:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_LOOK_S, self._look)
