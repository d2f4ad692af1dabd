"""A conversation: a tree of questions and answers, of which one branch, root to leaf, is shown and sent.

Every function gives a new conversation. `turns` keeps the order in which turns came, each after its parent. Its JSON is
what a browser keeps and a file exports; JavaScript keeps the order of keys that are no plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from penstock.chat import statistics
from penstock.chat.settings import Settings
from penstock.chat.statistics import Statistics
from penstock.errors import UserError
from penstock.spec.gateway import Price
from penstock.wire.answers import Reply, ToolCall
from penstock.wire.client import Message

VERSION = 1
_TITLE_CHARS = 60
_CHARS_PER_TOKEN = 4  # of English text, to guess how many turns an overflow is


class Turn(msgspec.Struct, frozen=True):
    """A question or an answer. `images`: data URLs. `error`: why there is no answer, or no more of it.

    `id` is a text of letters, digits, "-" and "_", and no plain number. `reasoning_s`: seconds until the answer began.
    """

    id: str
    parent: str | None
    role: Literal["user", "assistant"]
    text: str = ""
    images: tuple[str, ...] = ()
    reasoning: str = ""
    reasoning_s: float | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    model: str | None = None
    finish_reason: str | None = None
    statistics: Statistics | None = None
    error: str | None = None


class Conversation(msgspec.Struct, frozen=True):
    """`leaf`: the last turn of the branch that is shown; None when it is empty. Times are seconds since 1970, UTC.

    `last_dropped`: the model gets the branch after this turn; None, and a turn of another branch, is all of it.
    """

    id: str
    title: str
    created_at: float
    updated_at: float
    turns: dict[str, Turn] = {}
    leaf: str | None = None
    settings: Settings = Settings()
    version: int = VERSION
    last_dropped: str | None = None


def begin(conversation_id: str, now: float, settings: Settings) -> Conversation:
    """An empty one. Its title is made of the first question."""
    return Conversation(conversation_id, "", now, now, settings=settings)


def ask(conversation: Conversation, turn_id: str, text: str, images: tuple[str, ...], now: float) -> Conversation:
    """The question at the end of the branch. After a question without an answer it takes that one's place, and the
    other stays as a branch: questions and answers alternate."""
    last = conversation.turns.get(conversation.leaf or "")
    parent = last.parent if last is not None and last.role == "user" else conversation.leaf
    titled = replace(conversation, title=conversation.title or title_of(text), updated_at=now)
    return _with(titled, Turn(turn_id, parent, "user", text, images))


def answer(conversation: Conversation, turn: Turn) -> Conversation:
    """The answer below the question `turn.parent`; one of the same id is replaced, as while an answer grows.

    Raises UserError when the question is not there.
    """
    _turn(conversation, turn.parent, "user")
    old = conversation.turns.get(turn.id, turn)
    assert (turn.role, turn.role, turn.parent) == ("assistant", old.role, old.parent), turn.id
    return _with(conversation, turn)


def answered(turn: Turn, reply: Reply, price: Price | None = None) -> Turn:
    """The answer `turn` with all that the server said."""
    return replace(
        turn,
        text=reply.text,
        reasoning=reply.reasoning,
        reasoning_s=reply.reasoning_s,
        tool_calls=reply.tool_calls,
        model=reply.model or turn.model,
        finish_reason=reply.finish_reason,
        statistics=statistics.of_reply(reply, price),
    )


def path(conversation: Conversation) -> tuple[Turn, ...]:
    """The branch that is shown, root to leaf."""
    return tuple(reversed([*_upwards(conversation, conversation.leaf)]))


def siblings(conversation: Conversation, turn_id: str) -> tuple[str, ...]:
    """The ids of the branches at this turn, itself included, oldest first."""
    parent = _turn(conversation, turn_id).parent
    return tuple(turn.id for turn in conversation.turns.values() if turn.parent == parent)


def choose(conversation: Conversation, turn_id: str) -> Conversation:
    """Shows the branch of that turn, down to its newest leaf."""
    *_, newest = _below(conversation, _turn(conversation, turn_id).id)
    return replace(conversation, leaf=newest)


def edit(conversation: Conversation, turn_id: str, new_id: str, text: str, now: float) -> Conversation:
    """Another question in place of this one, with its images; the old one stays as a branch."""
    old = _turn(conversation, turn_id, "user")
    edited = replace(conversation, updated_at=now)
    return _with(edited, Turn(new_id, old.parent, "user", text, old.images))


def retry_from(conversation: Conversation, turn_id: str) -> Conversation:
    """The branch ends at the question: `turn_id`, or the one that it answers. The next answer is a sibling."""
    turn = _turn(conversation, turn_id)
    return replace(conversation, leaf=turn.id if turn.role == "user" else turn.parent)


def delete(conversation: Conversation, turn_id: str) -> Conversation:
    """Without that turn and what follows it. The newest branch beside it is shown, else what was before it."""
    parent = _turn(conversation, turn_id).parent
    gone = {*_below(conversation, turn_id)}
    left = {turn.id: turn for turn in conversation.turns.values() if turn.id not in gone}
    last_dropped = None if conversation.last_dropped in gone else conversation.last_dropped
    pruned = replace(conversation, turns=left, last_dropped=last_dropped)
    if conversation.leaf not in gone:
        return pruned
    others = [turn.id for turn in left.values() if turn.parent == parent]
    return choose(pruned, others[-1]) if others else replace(pruned, leaf=parent)


def drop_oldest(conversation: Conversation, over_tokens: int = 1) -> Conversation:
    """Sends fewer of the oldest questions and answers, which stay in the conversation: at least one pair, and about
    `over_tokens` tokens.

    Raises UserError when only the last question is sent.
    """
    sent = _sent(conversation)
    n_chars, first = 0, 0
    while first + 2 < len(sent) and n_chars < max(1, over_tokens) * _CHARS_PER_TOKEN:
        n_chars += 1 + sum(len(turn.text) for turn in sent[first : first + 2])
        first += 2
    if not first:
        raise UserError(
            "cannot send less: only the last question is left",
            hint="Shorten it, lower max tokens, or choose a model with a longer context.",
        )
    return replace(conversation, last_dropped=sent[first - 1].id)


def messages(conversation: Conversation) -> list[Message]:
    """The branch as OpenAI's API takes it: the system message unless it is off, images as parts, no reasoning.

    Questions without an answer are left out, but for the last: models refuse two questions in a row. No tool ever
    answered a call, so that an answer of calls is sent as their text.
    """
    settings, sent = conversation.settings, _sent(conversation)
    listed: list[Message] = []
    if settings.has_system and settings.system:
        listed.append({"role": "system", "content": settings.system})
    for place, turn in enumerate(sent):
        if turn.role == "assistant":
            if said := spoken(turn):
                listed.append({"role": "assistant", "content": said})
        elif place + 2 >= len(sent) or spoken(sent[place + 1]):
            listed.append({"role": "user", "content": _content(turn)})
    return listed


def spoken(turn: Turn) -> str:
    """What a turn says: its text, or the tool calls of an answer without one."""
    return turn.text or "\n".join(f"{call.name}({call.arguments})" for call in turn.tool_calls)


def title_of(text: str) -> str:
    """The first line of a question, cut at a word: "Why is the sky blue?\\nIn short." -> "Why is the sky blue?"."""
    line = next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
    if len(line) <= _TITLE_CHARS:
        return line
    head = line[: _TITLE_CHARS - 1]
    return (head.rsplit(" ", 1)[0] if " " in head else head) + "…"


def _with(conversation: Conversation, turn: Turn) -> Conversation:
    return replace(conversation, turns={**conversation.turns, turn.id: turn}, leaf=turn.id)


def _turn(conversation: Conversation, turn_id: str | None, role: str | None = None) -> Turn:
    turn = conversation.turns.get(turn_id or "")
    if turn is None or role not in (None, turn.role):
        what = {"user": "question", "assistant": "answer"}.get(role or "", "message")
        raise UserError(f"this {what} is no longer in the conversation", hint="Reload the page, or choose another.")
    return turn


def _upwards(conversation: Conversation, leaf: str | None) -> Iterator[Turn]:
    while leaf is not None:
        turn = conversation.turns[leaf]
        yield turn
        leaf = turn.parent


def _below(conversation: Conversation, turn_id: str) -> Iterator[str]:
    """The turn and all that follow it, oldest first: parents stand before their children."""
    seen = {turn_id}
    yield turn_id
    for turn in conversation.turns.values():
        if turn.parent in seen:
            seen.add(turn.id)
            yield turn.id


def _sent(conversation: Conversation) -> tuple[Turn, ...]:
    """The part of the branch that the model gets, which begins with a question."""
    branch = path(conversation)
    ids = [turn.id for turn in branch]
    n_dropped = ids.index(conversation.last_dropped) + 1 if conversation.last_dropped in ids else 0
    return branch[n_dropped:] or branch


def _content(turn: Turn) -> object:
    if not turn.images:
        return turn.text
    images: Iterable[object] = ({"type": "image_url", "image_url": {"url": url}} for url in turn.images)
    return [{"type": "text", "text": turn.text}, *images] if turn.text else [*images]
