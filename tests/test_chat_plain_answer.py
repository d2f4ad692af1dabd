"""Answers of the tabs Completion and Compare: text, and the line below it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.chat.page import plain_answer, sessions
from penstock.chat.page.pacing import StopButton
from penstock.chat.page.plain_answer import PlainAnswer, grow, together
from penstock.chat.page.sessions import Visitor
from penstock.errors import PenstockError
from penstock.spec.gateway import Price
from penstock.wire.answers import BrokenAnswer, Chunk, HttpError, Reply
from penstock.wire.waiting import Waiting

PIECE = Chunk | Waiting | Reply
REPLY = Reply(
    text="Good morning",
    finish_reason="length",
    prompt_tokens=18,
    output_tokens=2,
    ttft_s=0.21,
    duration_s=1.5,
    tokens_per_s=46.0,
    replica="1",
    request_id="r",
    cached_tokens=12,
)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_answer, "_PAUSE_S", 0.001)


class Source:
    def __init__(self, *pieces: PIECE | PenstockError | None) -> None:
        self.pieces, self.is_closed = pieces, False

    async def stream(self) -> AsyncGenerator[PIECE, None]:
        try:
            for piece in self.pieces:
                if piece is None:
                    await asyncio.sleep(3600)
                elif isinstance(piece, PenstockError):
                    raise piece
                else:
                    yield piece
        finally:
            self.is_closed = True


def grown(
    *pieces: PIECE | PenstockError | None, price: Price | None = None, refused: list[str] | None = None
) -> list[PlainAnswer]:
    request = SimpleNamespace(
        state=SimpleNamespace(visitor=Visitor("s", "k", ([] if refused is None else refused).append))
    )

    async def read() -> list[PlainAnswer]:
        answers = [answer async for answer in grow(Source(*pieces).stream(), price, request)]
        await asyncio.sleep(0.01)  # of a session that ends soon
        return answers

    return asyncio.run(read())


def test_the_figures_of_a_whole_answer_stand_below_it() -> None:
    last = grown(Chunk("Good ", 0.2), Chunk("morning", 0.3), REPLY, price=Price(1.0, 2.0, 0.5))[-1]
    assert last.text == "Good morning"
    for part in ("TTFT 210 ms", "46 tok/s", "2 tokens", "18 in (12 cached)", "replica 1", "cut off", "1.5 s in all"):
        assert part in last.below


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Waiting("loading", shards_done=17, shards_total=30), "loading 17/30 shards"),
        (Chunk("hm", 0.1, is_reasoning=True), "reasoning"),
        (Chunk("so", 0.1), "writing"),
    ],
)
def test_what_is_waited_for_stands_below_until_then(piece: PIECE, words: str) -> None:
    assert words in grown(piece)[-1].below


def test_reasoning_is_no_text_of_the_answer() -> None:
    assert grown(Chunk("hm", 0.1, is_reasoning=True), Chunk("so", 0.2), REPLY)[-1].text == "so"


def test_what_was_said_before_a_failure_stays_and_hostile_words_are_text() -> None:
    last = grown(Chunk("Good <i>", 0.2), BrokenAnswer("the answer broke off: <script>"))[-1]
    assert last.text == "Good <i>"
    assert "broke off" in last.below and "<script>" not in last.below


def test_a_refused_key_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_LOGOUT_S", 0.0)
    refused: list[str] = []
    last = grown(HttpError("no", 401), refused=refused)[-1]
    assert len(refused) == 1 and "key" in last.below


def test_a_press_stops_the_answer_of_its_own_tab() -> None:
    mine, other = Source(Chunk("so", 0.1), None), Source(Chunk("so", 0.1), None)

    def request(session: str) -> Any:
        return SimpleNamespace(session_hash=session, state=SimpleNamespace(visitor=Visitor(None, None, print)))

    async def read() -> PlainAnswer:
        button = StopButton()
        with button.armed(request("mine")) as stop, button.armed(request("other")) as other_stop:
            going_on = grow(other.stream(), None, request("other"), other_stop)
            await anext(going_on)
            growing = grow(mine.stream(), None, request("mine"), stop)
            await anext(growing)
            button.press(request("mine"))
            last = [answer async for answer in growing][-1]
            assert not other.is_closed
            await going_on.aclose()
        button.press(request("mine"))
        return last

    assert asyncio.run(read()) == PlainAnswer("so", '<div class="penstock-foot">stopped</div>')
    assert mine.is_closed


async def one(*texts: str, wait_s: float = 0.0) -> AsyncGenerator[PlainAnswer, None]:
    for text in texts:
        await asyncio.sleep(wait_s)
        yield PlainAnswer(text, "")


def test_two_answers_grow_side_by_side() -> None:
    async def read() -> list[tuple[str, ...]]:
        rows = together(one("a", "ab", "abc"), one("x"))
        return [tuple(answer.text for answer in row) async for row in rows]

    assert asyncio.run(read())[-1] == ("abc", "x")


def test_closing_two_answers_closes_both() -> None:
    sources = [Source(Chunk("a", 0.1), None), Source(Chunk("b", 0.1), None)]
    request = SimpleNamespace(state=SimpleNamespace(visitor=Visitor(None, None, print)))

    async def read() -> None:
        rows = together(*(grow(source.stream(), None, request) for source in sources))
        await anext(rows)
        await rows.aclose()

    asyncio.run(read())
    assert [source.is_closed for source in sources] == [True, True]
