"""From what the visitor asks for and what the gateway sends to what the page shows. Pure: no clock, no Gradio."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from penstock.chat import conversation as tree
from penstock.chat import statistics
from penstock.chat.conversation import Conversation, Turn
from penstock.chat.failures import Failure
from penstock.chat.page import footers
from penstock.chat.page.markup import Markup, sections, shown
from penstock.chat.waiting import show_waiting
from penstock.spec.gateway import Price
from penstock.text import show_seconds
from penstock.wire.answers import Chunk, Reply
from penstock.wire.waiting import Waiting

Act = Literal["ask", "edit", "retry", "continue", "shrink", "choose", "delete"]


class Order(msgspec.Struct, frozen=True):
    """What a button or the message box asks for. `turn`: the one that it is about; `images`: data URLs.

    `over_tokens`: by how much the question was too long, for "shrink".
    """

    act: Act = "ask"
    turn: str | None = None
    images: tuple[str, ...] = ()
    over_tokens: int = 1


class Shown(msgspec.Struct, frozen=True):
    """One box of the page. `title`: of a fold; `seconds`: what it took; `is_growing`: more comes."""

    role: Literal["user", "assistant"]
    kind: Literal["text", "fold", "footer"]
    text: str
    title: str = ""
    seconds: float | None = None
    is_growing: bool = False


def obey(conversation: Conversation, order: Order, question: Turn, now: float) -> tuple[Conversation, Turn | None]:
    """The conversation after an order, and the turn to answer: a question, an answer to be continued, or None.

    `question`: a new turn with the id, text and images that "ask" and "edit" take. Raises UserError.
    """
    turn_id = order.turn or ""
    match order.act:
        case "ask":
            conversation = tree.ask(conversation, question.id, question.text, question.images, now)
        case "edit":
            conversation = tree.edit(conversation, turn_id, question.id, question.text, now)
        case "choose":
            return tree.choose(conversation, turn_id), None
        case "delete":
            return tree.delete(conversation, turn_id), None
        case "continue":
            conversation = replace(tree.choose(conversation, turn_id), leaf=turn_id)
        case "retry" | "shrink":
            conversation = _without_failure(tree.retry_from(conversation, turn_id), turn_id)
            if order.act == "shrink":
                conversation = tree.drop_oldest(conversation, order.over_tokens)
    return replace(conversation, updated_at=now), conversation.turns[conversation.leaf or ""]


def _without_failure(conversation: Conversation, turn_id: str) -> Conversation:
    """An answer that only says why there is none makes room for the next."""
    turn = conversation.turns[turn_id]
    if turn.role == "user" or tree.spoken(turn) or turn.reasoning:
        return conversation
    return replace(tree.delete(conversation, turn_id), leaf=turn.parent)


class GrowingAnswer:
    """The answer below `question`; or `begun` goes on, an answer that broke off. Times are of one clock, in seconds."""

    def __init__(self, turn: Turn, prices: Mapping[str, Price], began_at: float) -> None:
        self._turn = turn
        self._prices = prices
        self._began_at = began_at
        self._markup, self._reasoning_markup = Markup(), Markup()
        self._sections = self._markup.add(turn.text)
        self._reasoning = "".join(self._reasoning_markup.add(turn.reasoning))
        self._texts, self._reasonings = [turn.text], [turn.reasoning]
        self._new, self._new_reasoning = "", ""
        self._reasoning_at_s: tuple[float, float] | None = None
        self._waiting: Waiting | None = None
        self._ttft_s: float | None = None
        self._reply: Reply | None = None
        self._failure: Failure | None = None
        self._end_reason: str | None = statistics.UNFINISHED
        self.n_chars = len(turn.text) + len(turn.reasoning)

    def take(self, piece: Chunk | Waiting | Reply) -> None:
        if isinstance(piece, Waiting):
            self._waiting = piece
        elif isinstance(piece, Reply):
            self._reply = piece
        else:
            self._ttft_s = piece.at_s if self._ttft_s is None else self._ttft_s
            self.n_chars += len(piece.text)
            if piece.tool_calls:
                self._turn = replace(self._turn, tool_calls=piece.tool_calls)
            elif piece.is_reasoning:
                self._new_reasoning += piece.text
                self._reasonings.append(piece.text)
                self._reasoning_at_s = (self._reasoning_at_s or (piece.at_s, 0))[0], piece.at_s
            else:
                self._new += piece.text
                self._texts.append(piece.text)

    def fail(self, failure: Failure) -> None:
        self._failure, self._end_reason = failure, None

    def stop(self) -> None:
        """Changes nothing where it was whole before."""
        self._end_reason = statistics.STOPPED

    def turn(self, now: float) -> Turn:
        """The answer as it stands, for the conversation."""
        text, reasoning = "".join(self._texts), "".join(self._reasonings)
        self._texts, self._reasonings = [text, ""], [reasoning]
        return replace(
            self._turn,
            text=text,
            reasoning=reasoning,
            reasoning_s=self._reasoning_s(),
            finish_reason=self._reply.finish_reason if self._reply else self._end_reason,
            statistics=self._statistics(now),
            error=self._failure.text if self._failure else None,
        )

    def _reasoning_s(self) -> float | None:
        if self._reply is not None and self._reply.reasoning_s is not None:
            return self._reply.reasoning_s
        if self._reasoning_at_s is None:
            return self._turn.reasoning_s
        return self._reasoning_at_s[1] - self._reasoning_at_s[0]

    def _statistics(self, now: float) -> statistics.Statistics | None:
        if self._reply is not None:
            names = self._turn.model or "", self._reply.model or ""  # the turn's is None where the server chose
            price = next((self._prices[name] for name in names if name in self._prices), None)
            return statistics.of_reply(self._reply, price)
        if self._ttft_s is None and self._end_reason is None:
            return None
        replica = self._waiting.replica if self._waiting else None
        return statistics.Statistics(
            ttft_s=self._ttft_s, duration_s=now - self._began_at, replica=replica, finish_reason=self._end_reason
        )

    def boxes(self, now: float) -> list[Shown]:
        """The answer while it grows, with the clock below."""
        if self._new:
            self._sections, self._new = self._markup.add(self._new), ""
        if self._new_reasoning:
            self._reasoning, self._new_reasoning = "".join(self._reasoning_markup.add(self._new_reasoning)), ""
        boxes = _folds(self._turn, self._reasoning, self._reasoning_s(), not self._sections)
        boxes += [Shown("assistant", "text", section, is_growing=True) for section in self._sections]
        words = show_waiting(self._waiting) if self._waiting else "sending"
        words = words if self._ttft_s is None else f"TTFT {show_seconds(self._ttft_s)}"
        return [*boxes, Shown("assistant", "footer", footers.clock(words, now - self._began_at), is_growing=True)]

    def last_boxes(self, conversation: Conversation, now: float) -> list[Shown]:
        return turn_boxes(conversation, self.turn(now), self._failure)


def conversation_boxes(conversation: Conversation, answered: Turn | None = None) -> list[Shown]:
    """The branch that is shown. `answered`: its last turn, a question that gets an answer now, or an answer that goes
    on, which is drawn as it grows."""
    turns = tree.path(conversation)
    if answered is not None and answered.role == "assistant":
        turns = turns[:-1]
    boxes = []
    for turn in turns:
        is_open = turn.role == "user" and turn is turns[-1] and answered is None
        boxes += turn_boxes(conversation, turn, is_open=is_open)
    return boxes


def turn_boxes(
    conversation: Conversation, turn: Turn, failure: Failure | None = None, is_open: bool = False
) -> list[Shown]:
    """One question or answer as it stands, with its footer. `is_open`: a question that nothing answers."""
    branches = tree.siblings(conversation, turn.id)
    footer = Shown(turn.role, "footer", footers.footer(turn, branches, failure, is_open))
    boxes = _folds(turn, shown(turn.reasoning), turn.reasoning_s, False)
    boxes += [Shown(turn.role, "text", section) for section in sections(turn.text)]
    if turn.images:
        boxes.append(Shown(turn.role, "footer", footers.images(turn.images)))
    return [*boxes, footer]


def _folds(turn: Turn, reasoning: str, seconds: float | None, is_growing: bool) -> list[Shown]:
    """Reasoning and tool calls."""
    boxes = []
    if reasoning:
        boxes.append(Shown(turn.role, "fold", reasoning, "Reasoning", seconds, is_growing))
    for call in turn.tool_calls:
        fence = max([*re.findall("`+", call.arguments), "``"], key=len) + "`"
        text = f"{fence}json\n{call.arguments}\n{fence}"
        # One line, judged with what stands before it: alone, a name that begins with a fence would be code.
        title = shown(f"Tool call: {' '.join(call.name.split()) or 'without a name'}")
        boxes.append(Shown(turn.role, "fold", text, title))
    return boxes
