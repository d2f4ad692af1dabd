"""Pieces of a stream in batches: a browser is sent a few large changes a second, not one for each token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

_Piece = TypeVar("_Piece")


async def batches(source: AsyncGenerator[_Piece, None], every_s: float) -> AsyncGenerator[list[_Piece], None]:
    """What came in each `every_s` seconds, with an empty list where nothing did, so that a clock can go on.

    The last batch comes before the error that ended `source` is raised. Closing this closes `source`.
    """
    pieces: list[_Piece] = []

    async def read() -> None:
        async for piece in source:
            pieces.append(piece)

    reading = asyncio.create_task(read())
    try:
        while not reading.done():
            await asyncio.wait({reading}, timeout=every_s)
            batch = pieces.copy()
            pieces.clear()
            if batch or not reading.done():
                yield batch
        reading.result()
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reading
        await source.aclose()
