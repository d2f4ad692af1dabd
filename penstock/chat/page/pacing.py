"""Pieces of a stream in batches: a browser gets a few large changes a second, not one a token. What stops a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Final, TypeVar

_Piece = TypeVar("_Piece")
_UPDATE_S: Final = 0.0011  # CPU time of one update of a page, measured
_CPU_SHARE: Final = 0.25  # of a core, that the updates of all pages may take together
_CHARS_PER_S: Final = 200_000  # what a browser may lay out again each second
_PAUSE_S: Final = (0.125, 2.0)


def pause_s(n_streams: int, n_chars: int) -> float:
    """Seconds from one update of an answer of `n_chars` characters to the next, when `n_streams` answers grow.

    8 updates a second for one visitor, fewer when all updates together would take more than a quarter of a core, and
    fewer when the answer is long, since the browser lays it out again. 100 visitors: 100 * 0.0011 / 0.25 = 0.44 s.
    """
    low, high = _PAUSE_S
    return min(high, max(low, n_streams * _UPDATE_S / _CPU_SHARE, n_chars / _CHARS_PER_S))


async def batches(
    source: AsyncGenerator[_Piece, None], every_s: float | Callable[[], float], stop: asyncio.Event | None = None
) -> AsyncGenerator[list[_Piece], None]:
    """What came in each `every_s` seconds, with an empty list where nothing did, so that a clock can go on.

    The last batch comes before the error that ended `source` is raised. Closing this, and `stop`, closes `source`.
    """
    pieces: list[_Piece] = []

    async def read() -> None:
        async for piece in source:
            pieces.append(piece)

    reading = asyncio.create_task(read())
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        while not (reading.done() or stopping.done()):
            timeout = every_s() if callable(every_s) else every_s
            await asyncio.wait({reading, stopping}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            batch = pieces.copy()
            pieces.clear()
            if batch or not reading.done():
                yield batch
        if pieces:  # they came, and the source ended, while the last batch was shown
            yield pieces.copy()
        if reading.done():
            reading.result()
    finally:
        stopping.cancel()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reading
        await source.aclose()


class StopButton:
    """The button that stops the answers of its tab of the page, each visitor's own."""

    def __init__(self) -> None:
        self._stops: dict[str, asyncio.Event] = {}

    @contextlib.contextmanager
    def armed(self, request: Any) -> Iterator[asyncio.Event]:
        """For the time of an answer; where the next one begins before this one has ended, the button is the next's."""
        stop = self._stops[request.session_hash] = asyncio.Event()
        try:
            yield stop
        finally:
            if self._stops.get(request.session_hash) is stop:
                del self._stops[request.session_hash]

    def press(self, request: Any) -> None:
        """In the event loop: an Event is not for other threads."""
        if stop := self._stops.get(request.session_hash):
            stop.set()
