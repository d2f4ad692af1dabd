"""Pieces in batches, with a clock that goes on between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from penstock.chat.page.pacing import StopButton, batches


class Source:
    """Gives what is in `pieces`, a None of which is a wait, then raises `error`, or ends."""

    def __init__(self, *pieces: int | None, error: Exception | None = None) -> None:
        self.pieces, self.error = pieces, error
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for piece in self.pieces:
                if piece is None:
                    await asyncio.sleep(3600)
                else:
                    yield piece
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


async def all_of(source: Source) -> list[list[int]]:
    return [batch async for batch in batches(source.stream(), 0.001)]


def test_pieces_that_came_together_are_one_batch() -> None:
    assert asyncio.run(all_of(Source(1, 2, 3))) == [[1, 2, 3]]
    assert asyncio.run(all_of(Source())) == []


def test_the_last_pieces_come_before_the_error() -> None:
    seen: list[int] = []

    async def read() -> None:
        async for batch in batches(Source(1, 2, error=ValueError("broken")).stream(), 0.001):
            seen.extend(batch)

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())
    assert seen == [1, 2]


def test_nothing_for_a_while_is_an_empty_batch_and_closing_closes_the_source() -> None:
    source = Source(1, None, 2)

    async def read() -> list[list[int]]:
        stream = batches(source.stream(), 0.001)
        first = [await anext(stream) for _ in range(3)]
        await stream.aclose()
        return first

    assert asyncio.run(read()) == [[1], [], []]
    assert source.is_closed


def test_what_comes_while_a_batch_is_shown_is_not_lost_when_the_source_ends() -> None:
    async def late() -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.sleep(0.005)
        yield 2

    async def read() -> list[list[int]]:
        seen = []
        async for batch in batches(late(), 0.001):
            seen.append(batch)
            await asyncio.sleep(0.02)
        return seen

    assert [piece for batch in asyncio.run(read()) for piece in batch] == [1, 2]


def test_a_cancelled_reader_closes_the_source() -> None:
    source = Source(None)

    async def read() -> None:
        reading = asyncio.create_task(anext(batches(source.stream(), 3600)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(read())
    assert source.is_closed


def test_the_stop_button_belongs_to_the_newest_answer() -> None:
    button, request = StopButton(), SimpleNamespace(session_hash="tab")
    first, second = button.armed(request), button.armed(request)
    first.__enter__()
    newer = second.__enter__()
    first.__exit__(None, None, None)  # it was left for another conversation, and ends late
    button.press(request)
    assert newer.is_set()
    second.__exit__(None, None, None)
    button.press(request)
