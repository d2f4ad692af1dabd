"""An answer of the chat page as it grows: pieces in, boxes and turns out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from penstock.chat import conversation as tree
from penstock.chat import statistics
from penstock.chat.conversation import Conversation, Turn
from penstock.chat.page import sessions, streaming
from penstock.chat.page.answering import conversation_boxes
from penstock.chat.page.sessions import Visitor
from penstock.chat.page.streaming import Chat, Update
from penstock.chat.settings import Settings
from penstock.errors import PenstockError
from penstock.spec.gateway import Price
from penstock.wire.answers import BrokenAnswer, Chunk, HttpError, Reply, ServerWords
from penstock.wire.waiting import Waiting

Piece = Chunk | Waiting | Reply
REFUSED: list[str] = []
VISITOR = Visitor("s", "sk", REFUSED.append)
REPLY = Reply("Good", "stop", 18, 2, 0.21, 1.5, 46.0, "a-0", "r", cached_tokens=12, reasoning="hm", reasoning_s=0.5)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "pause_s", lambda *_: 0.001)
    monkeypatch.setattr(sessions, "_LOGOUT_S", 0.0)


class FakeUpstream:
    def __init__(self, *pieces: Piece | PenstockError | None, tokenized: object = None) -> None:
        self.pieces, self.tokenized = pieces, tokenized
        self.sent: list[Any] = []

    async def stream_chat(self, key: str | None, messages: list[Any], fields: dict[str, Any]) -> AsyncGenerator[Piece]:
        self.sent.append((key, messages, fields))
        for piece in self.pieces:
            if piece is None:
                await asyncio.sleep(3600)
            elif isinstance(piece, PenstockError):
                raise piece
            else:
                yield piece

    async def count(self, *_: object) -> object:
        return self.tokenized


def answer(upstream: FakeUpstream, turn_id: str = "q", stops: bool = False) -> Turn:
    """The answer that the browser keeps in the end."""
    return tree.path(updates(upstream, turn_id, stops)[-1][1])[-1]  # type: ignore[arg-type]


def updates(upstream: FakeUpstream, turn_id: str = "q", stops: bool = False) -> list[Update]:
    asked = tree.ask(tree.begin("c", 0.0, Settings("m", max_tokens=512)), "q", "hello", (), 1.0)
    half = tree.answer(asked, Turn("half", "q", "assistant", "Good"))

    async def grow() -> list[Update]:
        chat, stop = Chat(upstream, {"m": Price(1.0, 1.0)}), asyncio.Event()  # type: ignore[arg-type]
        conversation = half if turn_id == "half" else asked
        sent = []
        async for update in chat.answer(conversation, conversation.turns[turn_id], VISITOR, stop):
            sent.append(update)
            if stops and chat.n_streams:
                stop.set()
        await asyncio.sleep(0.01)  # of a session that ends soon
        assert all(boxes for boxes, _ in sent)
        assert isinstance(sent[-1][1], Conversation) and not chat.n_streams
        return sent

    return asyncio.run(grow())


def test_a_whole_answer_has_its_figures() -> None:
    pieces = (Waiting("prompt"), Chunk("hm", 0.1, is_reasoning=True), Chunk("Good", 0.6), REPLY)
    upstream = FakeUpstream(*pieces)
    turn = answer(upstream)
    assert (turn.parent, turn.text, turn.reasoning, turn.reasoning_s) == ("q", "Good", "hm", 0.5)
    assert turn.statistics is not None and turn.statistics.cost_usd == 0.00002 and turn.statistics.replica == "a-0"
    assert upstream.sent[0][0] == "sk" and upstream.sent[0][2] == {"model": "m", "max_tokens": 512}


def test_an_answer_that_is_stopped_keeps_what_was_said() -> None:
    turn = answer(FakeUpstream(Chunk("half", 0.1), None), stops=True)
    assert turn.statistics is not None
    assert (turn.text, turn.finish_reason, turn.statistics.finish_reason) == ("half", "stopped", "stopped")
    turn = answer(FakeUpstream(Waiting("queue", ahead=3), None), stops=True)
    assert turn.text == "" and turn.statistics is not None and turn.statistics.finish_reason == "stopped"


def test_an_answer_that_is_kept_before_its_end_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_KEPT_EACH_S", 0.0)
    monkeypatch.setattr(streaming, "pause_s", lambda *_: 0.0)
    sent = updates(FakeUpstream(Chunk("half", 0.1), None), stops=True)
    kept = [news for _, news in sent if isinstance(news, Turn)]
    assert kept and kept[0].statistics is not None
    assert (kept[0].finish_reason, statistics.line(kept[0].statistics)) == ("unfinished", "TTFT 100 ms · unfinished")


def test_a_question_can_be_asked_when_nothing_answers_it() -> None:
    asked = tree.ask(tree.begin("c", 0.0, Settings()), "q", "hello", (), 1.0)
    assert "Ask" in conversation_boxes(asked)[-1].text
    for boxes, _ in updates(FakeUpstream(Chunk("Good", 0.1), REPLY)):
        assert "Ask" not in "".join(box.text for box in boxes if box.role == "user")


def test_a_stop_after_the_end_changes_nothing() -> None:
    assert answer(FakeUpstream(Chunk("Good", 0.1), REPLY, None), stops=True).finish_reason == "stop"


def test_a_lost_answer_goes_on_where_it_broke_off() -> None:
    upstream = FakeUpstream(Chunk(" morning", 0.1), REPLY)
    turn = answer(upstream, "half")
    assert (turn.id, turn.text, turn.error) == ("half", "Good morning", None)
    assert upstream.sent[0][1][-1] == {"role": "assistant", "content": "Good"}
    assert upstream.sent[0][2]["continue_final_message"] is True
    lost = answer(FakeUpstream(Chunk("half", 0.1), BrokenAnswer("gone")))
    assert lost.text == "half" and lost.error is not None and "What was said stays" in lost.error


def test_a_question_that_is_too_long_says_how_much() -> None:
    words = ServerWords(
        "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025"
    )
    refusal = HttpError("refused", 400, words=words)
    turn = answer(FakeUpstream(refusal, tokenized={"count": 2000, "max_model_len": 1024}))
    assert turn.error is not None and turn.error.startswith("This is 1,488 tokens too long for the model")
    turn = answer(FakeUpstream(refusal))
    assert turn.error is not None and turn.error.startswith("This is too long for the model, which takes 1,024 tokens")


def test_a_key_that_is_refused_ends_the_session() -> None:
    turn = answer(FakeUpstream(HttpError("refused", 401)))
    assert turn.error is not None and [turn.error] == REFUSED
    REFUSED.clear()
