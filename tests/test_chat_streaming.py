"""An answer of the chat page as it grows: pieces in, batches with a clock between them, boxes and turns out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.chat import conversation as tree
from penstock.chat import statistics
from penstock.chat.conversation import Conversation, Turn
from penstock.chat.page import plain_answer, sessions, streaming
from penstock.chat.page.answering import conversation_boxes
from penstock.chat.page.pacing import StopButton, batches
from penstock.chat.page.plain_answer import PlainAnswer, grow, together
from penstock.chat.page.sessions import Visitor
from penstock.chat.page.streaming import Chat, Update
from penstock.chat.settings import Settings
from penstock.errors import PenstockError
from penstock.spec.gateway import Price
from penstock.wire.answers import BrokenAnswer, Chunk, HttpError, Reply, ServerWords
from penstock.wire.waiting import Waiting

REFUSED: list[str] = []
VISITOR = Visitor("s", "sk", REFUSED.append)
REPLY = Reply("Good", "stop", 18, 2, 0.21, 1.5, 46.0, "a-0", "r", cached_tokens=12, reasoning="hm", reasoning_s=0.5)
SO = Chunk("so", 0.1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "pause_s", lambda *_: 0.001)
    monkeypatch.setattr(plain_answer, "_PAUSE_S", 0.001)
    monkeypatch.setattr(sessions, "_LOGOUT_S", 0.0)
    REFUSED.clear()


class Source:
    """Gives what is in `pieces`: None is a wait without end, an error is raised."""

    def __init__(self, *pieces: Any, tokenized: object = None) -> None:
        self.pieces, self.tokenized = pieces, tokenized
        self.sent: list[Any] = []
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[Any, None]:
        try:
            for piece in self.pieces:
                if piece is None:
                    await asyncio.Event().wait()
                elif isinstance(piece, PenstockError):
                    raise piece
                else:
                    yield piece
        finally:
            self.is_closed = True

    def stream_chat(self, *asked: object) -> AsyncGenerator[Any, None]:
        self.sent.append(asked)
        return self.stream()

    async def count(self, *_: object) -> object:
        return self.tokenized


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_what_comes_while_a_batch_is_shown_is_not_lost_when_the_source_ends() -> None:
    async def read() -> list[int]:
        is_shown, seen = asyncio.Event(), list[int]()

        async def late() -> AsyncGenerator[int, None]:
            yield 1
            await is_shown.wait()
            yield 2

        async for batch in batches(late(), 0.001):
            seen += batch
            is_shown.set()
            await let_others_run()
        return seen

    assert asyncio.run(read()) == [1, 2]


def test_a_cancelled_reader_closes_the_source() -> None:
    source = Source(None)

    async def read() -> None:
        reading = asyncio.create_task(anext(batches(source.stream(), 3600)))
        await let_others_run()
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


# ---- Chat ------------------------------------------------------------------------------------------------------------


def answer(upstream: Source, turn_id: str = "q", stops: bool = False) -> Turn:
    """The answer that the browser keeps in the end."""
    return tree.path(updates(upstream, turn_id, stops)[-1][1])[-1]  # type: ignore[arg-type]


def updates(upstream: Source, turn_id: str = "q", stops: bool = False) -> list[Update]:
    asked = tree.ask(tree.begin("c", 0.0, Settings("m", max_tokens=512)), "q", "hello", (), 1.0)
    half = tree.answer(asked, Turn("half", "q", "assistant", "Good"))

    async def read() -> list[Update]:
        chat, stop = Chat(upstream, {"m": Price(1.0, 1.0)}), asyncio.Event()  # type: ignore[arg-type]
        conversation = half if turn_id == "half" else asked
        sent = []
        async for update in chat.answer(conversation, conversation.turns[turn_id], VISITOR, stop):
            sent.append(update)
            if stops and chat.n_streams:
                stop.set()
        await let_others_run()
        assert all(boxes for boxes, _ in sent)
        assert isinstance(sent[-1][1], Conversation) and not chat.n_streams
        return sent

    return asyncio.run(read())


def test_a_whole_answer_has_its_figures() -> None:
    upstream = Source(Waiting("prompt"), Chunk("hm", 0.1, is_reasoning=True), Chunk("Good", 0.6), REPLY)
    turn = answer(upstream)
    assert (turn.parent, turn.text, turn.reasoning, turn.reasoning_s) == ("q", "Good", "hm", 0.5)
    assert turn.statistics == statistics.of_reply(REPLY, Price(1.0, 1.0)) and turn.statistics.cost_usd == 0.00002
    assert upstream.sent[0][0] == "sk" and upstream.sent[0][2] == {"model": "m", "max_tokens": 512}


@pytest.mark.parametrize(
    ("pieces", "text", "reason"),
    [
        ((Chunk("half", 0.1), None), "half", "stopped"),
        ((Waiting("queue", ahead=3), None), "", "stopped"),
        ((Chunk("Good", 0.1), REPLY, None), "Good", "stop"),  # after the end
    ],
)
def test_an_answer_that_is_stopped_keeps_what_was_said(pieces: tuple[Any, ...], text: str, reason: str) -> None:
    turn = answer(Source(*pieces), stops=True)
    assert turn.statistics is not None
    assert (turn.text, turn.finish_reason, turn.statistics.finish_reason) == (text, reason, reason)


def test_an_answer_that_is_kept_before_its_end_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_KEPT_EACH_S", 0.0)
    monkeypatch.setattr(streaming, "pause_s", lambda *_: 0.0)
    sent = updates(Source(Chunk("half", 0.1), None), stops=True)
    kept = next(news for _, news in sent if isinstance(news, Turn))
    assert kept.statistics is not None
    assert (kept.finish_reason, statistics.line(kept.statistics)) == ("unfinished", "TTFT 100 ms · unfinished")


def test_pieces_that_came_together_are_one_update() -> None:
    assert len(updates(Source(*[Chunk("so ", 0.1)] * 100, REPLY))) == 3  # the beginning, the pieces, the end


def test_a_question_can_be_asked_when_nothing_answers_it() -> None:
    asked = tree.ask(tree.begin("c", 0.0, Settings()), "q", "hello", (), 1.0)
    assert "Ask" in conversation_boxes(asked)[-1].text
    for boxes, _ in updates(Source(Chunk("Good", 0.1), REPLY)):
        assert "Ask" not in "".join(box.text for box in boxes if box.role == "user")


def test_a_lost_answer_goes_on_where_it_broke_off() -> None:
    upstream = Source(Chunk(" morning", 0.1), REPLY)
    turn = answer(upstream, "half")
    assert (turn.id, turn.text, turn.error) == ("half", "Good morning", None)
    assert upstream.sent[0][1][-1] == {"role": "assistant", "content": "Good"}
    assert upstream.sent[0][2]["continue_final_message"] is True
    lost = answer(Source(Chunk("half", 0.1), BrokenAnswer("gone")))
    assert lost.text == "half" and lost.error is not None and "What was said stays" in lost.error


@pytest.mark.parametrize(
    ("tokenized", "words"),
    [
        ({"count": 2000, "max_model_len": 1024}, "This is 1,488 tokens too long for the model"),
        ({"count": 10, "max_model_len": 1024}, "This is too long for the model, which takes 1,024 tokens"),
        (None, "This is too long for the model, which takes 1,024 tokens"),
    ],
)
def test_a_question_that_is_too_long_says_how_much(tokenized: object, words: str) -> None:
    said = "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025"
    turn = answer(Source(HttpError("refused", 400, words=ServerWords(said)), tokenized=tokenized))
    assert turn.error is not None and turn.error.startswith(words)


def test_a_key_that_is_refused_ends_the_session() -> None:
    turn = answer(Source(HttpError("refused", 401)))
    assert turn.error is not None and [turn.error] == REFUSED


# ---- Completion and Compare: text, and the line below it -------------------------------------------------------------


def request(session: str = "mine") -> Any:
    return SimpleNamespace(session_hash=session, state=SimpleNamespace(visitor=VISITOR))


def last(*pieces: Any) -> PlainAnswer:
    async def read() -> list[PlainAnswer]:
        answers = [answer async for answer in grow(Source(*pieces).stream(), Price(1.0, 2.0, 0.5), request())]
        await let_others_run()
        return answers

    return asyncio.run(read())[-1]


@pytest.mark.parametrize(
    ("pieces", "text", "below"),
    [
        ((Waiting("loading", shards_done=17, shards_total=30),), "", "loading 17/30 shards"),
        ((Chunk("hm", 0.1, is_reasoning=True),), "", "reasoning"),
        ((SO,), "so", "writing"),
        ((Chunk("Good <i>", 0.2), BrokenAnswer("x", words=ServerWords("lost <b>"))), "Good <i>", "(lost &lt;b&gt;)"),
        (
            (Chunk("hm", 0.1, is_reasoning=True), Chunk("Good ", 0.2), Chunk("morning", 0.3), REPLY),
            "Good morning",
            "TTFT 210 ms · 46 tok/s · 2 tokens · 18 in (12 cached) · $0.000016 · replica a-0"
            " · reasoning 500 ms · 1.5 s in all",
        ),
    ],
)
def test_what_is_waited_for_and_then_the_figures_stand_below(pieces: tuple[Any, ...], text: str, below: str) -> None:
    answer = last(*pieces)
    assert answer.text == text and below in answer.below


def test_a_refused_key_ends_the_session() -> None:
    assert "key" in last(HttpError("no", 401)).below and len(REFUSED) == 1


def test_a_press_stops_the_answer_of_its_own_tab() -> None:
    mine, other = Source(SO, None), Source(SO, None)

    async def read() -> PlainAnswer:
        button = StopButton()
        with button.armed(request()) as stop, button.armed(request("other")) as other_stop:
            going_on = grow(other.stream(), None, request("other"), other_stop)
            await anext(going_on)
            growing = grow(mine.stream(), None, request(), stop)
            for _ in range(3):  # the clock goes on while nothing comes
                await anext(growing)
            button.press(request())
            stopped = [answer async for answer in growing][-1]
            assert (mine.is_closed, other.is_closed) == (True, False)
            await going_on.aclose()
        return stopped

    assert asyncio.run(read()) == PlainAnswer("so", '<div class="penstock-foot">stopped</div>')
    assert other.is_closed


def test_two_answers_grow_side_by_side_and_are_closed_together() -> None:
    async def one(*texts: str) -> AsyncGenerator[PlainAnswer, None]:
        for text in texts:
            yield PlainAnswer(text, "")

    sources = [Source(SO, None), Source(SO, None)]

    async def read() -> list[tuple[str, ...]]:
        rows = [tuple(answer.text for answer in row) async for row in together(one("a", "ab", "abc"), one("x"))]
        growing = together(*(grow(source.stream(), None, request()) for source in sources))
        await anext(growing)
        await growing.aclose()
        return rows

    assert asyncio.run(read())[-1] == ("abc", "x")
    assert [source.is_closed for source in sources] == [True, True]
