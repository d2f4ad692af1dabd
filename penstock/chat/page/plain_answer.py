"""An answer without a conversation around it, as the tabs Completion and Compare show it: a text, and a line below."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from html import escape
from typing import Any, NamedTuple

from penstock.chat import failures, statistics
from penstock.chat.page.pacing import batches
from penstock.chat.page.sessions import visitor
from penstock.chat.page.upstream import Answer
from penstock.chat.waiting import show_waiting
from penstock.errors import PenstockError
from penstock.spec.gateway import Price
from penstock.text import show_seconds
from penstock.wire.answers import Chunk, Reply
from penstock.wire.waiting import Waiting

_PAUSE_S = 0.125


class PlainAnswer(NamedTuple):
    """`below` is HTML: the clock while it grows, then its figures, or why there is no more of it."""

    text: str
    below: str


async def grow(
    pieces: Answer, price: Price | None, request: Any, stop: asyncio.Event | None = None
) -> AsyncGenerator[PlainAnswer, None]:
    """The answer as it grows, some times a second, until its end or `stop`. Failures are its last line.
    Closing this, and `stop`, closes `pieces`.

    `request`: whose it is; a key that the gateway refuses ends the session.
    """
    began_at, texts, words, below = time.monotonic(), list[str](), "sending", ""
    try:
        async with contextlib.aclosing(batches(pieces, _PAUSE_S, stop)) as arriving:
            async for batch in arriving:
                for piece in batch:
                    match piece:
                        case Waiting():
                            words = show_waiting(piece)
                        case Chunk():
                            texts.append("" if piece.is_reasoning else piece.text)
                            words = "reasoning" if piece.is_reasoning else "writing"
                        case Reply():
                            figures = [statistics.line(statistics.of_reply(piece, price))]
                            if piece.reasoning_s is not None:
                                figures.append(f"reasoning {show_seconds(piece.reasoning_s)}")
                            below = _line(" · ".join([*figures, f"{show_seconds(piece.duration_s)} in all"]))
                text = "".join(texts)
                texts = [text]
                yield PlainAnswer(text, below or _line(f"{words} · {time.monotonic() - began_at:.0f} s"))
        if stop is not None and stop.is_set() and not below:
            yield PlainAnswer("".join(texts), _line("stopped"))
    except PenstockError as error:
        failure = failures.failure_of(error, has_text=any(texts))
        if failure.kind == "key":
            visitor(request).refuse_soon(failure.text)
        yield PlainAnswer("".join(texts), f'<div class="penstock-error" role="alert">{escape(failure.text)}</div>')


async def together(*growing: AsyncGenerator[PlainAnswer, None]) -> AsyncGenerator[tuple[PlainAnswer, ...], None]:
    """The newest of each, whenever one has more. Closing this closes them all.

    For one event of the page: of two events of one click, the second starts when the first has ended.
    """
    newest = [PlainAnswer("", "")] * len(growing)
    coming = {asyncio.ensure_future(anext(each, None)): place for place, each in enumerate(growing)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place, answer = coming.pop(task), task.result()
                if answer is not None:
                    newest[place] = answer
                    coming[asyncio.ensure_future(anext(growing[place], None))] = place
            if coming:
                yield tuple(newest)
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for each in growing:
            await each.aclose()


def _line(words: str) -> str:
    return f'<div class="penstock-foot">{escape(words)}</div>'
