"""Conversations, their settings and statistics: values in, values out."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.chat import conversation as chats
from penstock.chat import statistics
from penstock.chat.conversation import Conversation, Turn
from penstock.chat.files import from_file, from_json, to_json, to_markdown
from penstock.chat.settings import BOUNDS, Limits, Settings, bound, changed, fields, problems
from penstock.chat.settings import shown as shown_settings
from penstock.errors import UserError
from penstock.spec.gateway import Price
from penstock.wire.answers import Reply, ToolCall

PIXEL = "data:image/png;base64,iVBORw0KGgo="
PLAIN = Settings()
LETTERS = st.characters(codec="utf-8")


def talk(*texts: str, settings: Settings = PLAIN) -> Conversation:
    """Questions and answers in turns: q0, a1, q2, ..."""
    conversation = chats.begin("c", 1.0, settings)
    for place, text in enumerate(texts):
        if place % 2:
            conversation = chats.answer(conversation, Turn(f"a{place}", conversation.leaf, "assistant", text))
        else:
            conversation = chats.ask(conversation, f"q{place}", text, (), 2.0 + place)
    return conversation


def shown(conversation: Conversation) -> str:
    return " ".join(turn.id for turn in chats.path(conversation))


def sent(conversation: Conversation) -> list[str]:
    return [f"{message['role'][0]}:{message['content']}" for message in map(dict, chats.messages(conversation))]  # type: ignore[index]


def test_a_question_edited_and_an_answer_asked_again_are_branches() -> None:
    first = talk("one", "1", "two", "2")
    assert (shown(first), first.title, first.updated_at) == ("q0 a1 q2 a3", "one", 4.0)
    edited = chats.answer(chats.edit(first, "q0", "q4", "ONE", 9.0), Turn("a5", "q4", "assistant", "I"))
    assert (shown(edited), chats.siblings(edited, "q0")) == ("q4 a5", ("q0", "q4"))
    assert shown(chats.choose(edited, "q0")) == "q0 a1 q2 a3"
    again = chats.retry_from(first, "a1")
    assert (shown(again), shown(chats.retry_from(first, "q2"))) == ("q0", "q0 a1 q2")
    again = chats.answer(again, Turn("b1", "q0", "assistant", "uno"))
    assert (shown(again), chats.siblings(again, "a1")) == ("q0 b1", ("a1", "b1"))
    assert shown(chats.delete(again, "b1")) == "q0 a1 q2 a3"
    assert shown(chats.delete(again, "a1")) == "q0 b1" and shown(chats.delete(first, "a3")) == "q0 a1 q2"
    empty = chats.delete(again, "q0")
    assert (empty.turns, empty.leaf, shown(empty)) == ({}, None, "")


def test_a_question_without_an_answer_is_not_sent_again() -> None:
    failed = chats.answer(talk("one"), Turn("a1", "q0", "assistant", error="the server is away"))
    assert sent(failed) == ["u:one"]
    assert sent(chats.ask(failed, "q2", "two", (), 3.0)) == ["u:two"]
    other = chats.ask(talk("one"), "q2", "two", (), 3.0)  # nobody answered: it takes the place of the first
    assert (shown(other), chats.siblings(other, "q2"), sent(other)) == ("q2", ("q0", "q2"), ["u:two"])
    half = chats.answer(talk("one"), Turn("a1", "q0", "assistant", "half", error="the engine was lost"))
    assert sent(chats.ask(half, "q2", "go on", (), 3.0)) == ["u:one", "a:half", "u:go on"]


def test_an_answer_grows_in_its_place() -> None:
    growing = talk("one", "h")
    whole = chats.answer(growing, Turn("a1", "q0", "assistant", "hello"))
    assert sent(whole) == ["u:one", "a:hello"] and chats.siblings(whole, "a1") == ("a1",)
    with pytest.raises(UserError, match="this question is no longer in the conversation"):
        chats.answer(growing, Turn("a2", "gone", "assistant", "x"))
    with pytest.raises(UserError, match="this message is no longer"):
        chats.delete(growing, "gone")
    with pytest.raises(UserError, match="this question is no longer"):
        chats.edit(growing, "a1", "q9", "x", 3.0)


def test_what_the_model_gets() -> None:
    whisper = Settings(system="whisper")
    assert sent(talk("one", settings=whisper)) == ["s:whisper", "u:one"]
    assert sent(talk("one", settings=replace(whisper, has_system=False))) == ["u:one"]
    picture = chats.ask(talk(), "q0", "what is it?", (PIXEL,), 2.0)
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    assert chats.messages(picture) == [{"role": "user", "content": parts}]
    thought = Turn("a1", "q0", "assistant", "", reasoning="hm", tool_calls=(ToolCall("find", '{"x": 1}'),))
    assert sent(chats.answer(talk("one"), thought)) == ["u:one", 'a:find({"x": 1})']


def test_an_overflow_sends_less_and_keeps_all() -> None:
    long = talk("a" * 40, "b" * 40, "two", "2", "three")
    less = chats.drop_oldest(long)
    assert shown(less) == shown(long) and sent(less) == ["u:two", "a:2", "u:three"]
    assert sent(chats.drop_oldest(long, 10)) == sent(less) and sent(chats.drop_oldest(long, 50)) == ["u:three"]
    assert sent(chats.edit(less, "q2", "q9", "new", 9.0)) == ["u:new"]
    assert sent(chats.edit(less, "q0", "q9", "new", 9.0)) == ["u:new"]  # another branch is sent whole
    assert len(sent(chats.retry_from(less, "q0"))) == 1 and len(sent(chats.delete(less, "q2"))) == 2
    with pytest.raises(UserError, match="only the last question is left") as error:
        chats.drop_oldest(chats.drop_oldest(less))
    assert "longer context" in str(error.value.hint)


def test_a_title_is_the_first_line() -> None:
    assert chats.title_of("\n  Why is\tthe sky blue? \nIn short.") == "Why is the sky blue?"
    assert chats.title_of("") == ""
    assert chats.title_of("word " * 40) == "word word word word word word word word word word word…"
    assert chats.title_of("x" * 200) == "x" * 59 + "…"


def test_markdown_has_the_branch_that_is_shown() -> None:
    conversation = chats.edit(talk("old", "1", settings=Settings(system="whisper")), "q0", "q9", "new", 3.0)
    calls = (ToolCall("find", "{}"),)
    turn = Turn("a9", "q9", "assistant", "yes", reasoning="hm", reasoning_s=3.2, tool_calls=calls)
    text = to_markdown(chats.answer(conversation, turn))
    start = "## system\n\nwhisper\n\n## user\n\nnew\n\n## assistant\n\n<details><summary>Reasoning, 3.2 s"
    assert text.startswith(start)
    assert text.endswith("Tool call `find`:\n\n```json\n{}\n```\n\nyes\n") and "old" not in text


@given(st.lists(st.tuples(st.text(LETTERS), st.booleans()), max_size=4))
def test_markdown_gives_back_what_was_said(rows: list[tuple[str, bool]]) -> None:
    hostile = [f"{text}\n## user\n\\## assistant \n{text}" if is_odd else f"x{text}" for text, is_odd in rows]
    conversation = talk("first", "1", *hostile, settings=Settings(system="## system"))
    thought = chats.answer(conversation, Turn("r", conversation.turns["a1"].parent, "assistant", "2", reasoning="hm"))
    for each in (conversation, thought):
        (read,) = from_file(to_markdown(each).encode(), 5.0)
        assert read.settings.system == "## system"
        before, after = chats.path(each), chats.path(read)
        same = [turn.text.replace("\r\n", "\n").strip() for turn in before]
        assert [turn.text for turn in after] == same
        assert [turn.reasoning for turn in after] == [turn.reasoning for turn in before]


def test_a_file_with_many_messages_of_one_role_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    n_copied = 0

    def counted(struct: Any, **changes: Any) -> Any:
        nonlocal n_copied
        n_copied += sum(len(value) for value in changes.values() if isinstance(value, str | tuple))
        return replace(struct, **changes)

    monkeypatch.setattr("penstock.chat.files.replace", counted)
    words = [f"word {index}" for index in range(1000)]
    (read,) = from_file("".join(f"## assistant\n{word}\n" for word in words).encode(), 1.0)
    assert [(turn.role, turn.text) for turn in chats.path(read)] == [("user", ""), ("assistant", "\n\n".join(words))]
    assert n_copied <= len(read.turns["m1"].text)


def check(conversation: Conversation) -> None:
    """All that must be true of a tree; `from_json` finds the rest."""
    order = {turn_id: place for place, turn_id in enumerate(conversation.turns)}
    for turn in conversation.turns.values():
        assert turn.parent is None or order[turn.parent] < order[turn.id]
        assert turn.id in chats.siblings(conversation, turn.id)
    branch = chats.path(conversation)
    assert [turn.role for turn in branch] == [("user", "assistant")[place % 2] for place in range(len(branch))]
    roles = [dict(message)["role"] for message in chats.messages(conversation)]
    assert all(first != second for first, second in itertools.pairwise(roles))
    (back,) = from_json(to_json(conversation))
    assert back == conversation and [*back.turns] == [*conversation.turns]


STEPS = ["ask", "answer", "edit", "retry", "delete", "choose", "drop"]


@hypothesis_settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 30)), max_size=25))
def test_any_sequence_keeps_the_tree_sound(steps: list[tuple[str, int]]) -> None:
    conversation = chats.begin("c", 0.0, Settings(system="s"))
    for place, (step, number) in enumerate(steps):
        ids = [*conversation.turns]
        turn_id, new_id = ids[number % len(ids)] if ids else "none", f"t{place}"
        try:
            if step == "ask":
                conversation = chats.ask(conversation, new_id, f"text {number}", (PIXEL,) * (number % 2), float(place))
            elif step == "answer":
                text = "" if number % 3 == 0 else "said"
                conversation = chats.answer(conversation, Turn(new_id, turn_id, "assistant", text))
            elif step == "edit":
                conversation = chats.edit(conversation, turn_id, new_id, "edited", float(place))
            elif step == "drop":
                conversation = chats.drop_oldest(conversation, number)
            else:
                act = {"retry": chats.retry_from, "delete": chats.delete, "choose": chats.choose}[step]
                conversation = act(conversation, turn_id)
        except UserError:
            continue
        check(conversation)


EXTRA = st.dictionaries(st.text(LETTERS, max_size=5), st.integers(-9, 9), max_size=2)


@given(st.text(LETTERS), st.floats(0, 1e9), EXTRA)
def test_json_gives_back_the_same(text: str, now: float, extra: dict[str, int]) -> None:
    asked = chats.ask(chats.begin("c", now, Settings(stop=(text,), extra=extra)), "q", text, (PIXEL,), now)
    figures = statistics.Statistics(ttft_s=now, replica=text)
    whole = chats.answer(asked, Turn("a", "q", "assistant", text, reasoning=text, statistics=figures, error=text))
    assert from_json(msgspec.json.encode([whole, asked])) == [whole, asked]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def damaged(path: str, value: Any) -> bytes:
    """A good conversation with one value in it replaced."""
    good = json.loads(to_json(talk("one", "1")))
    *way, last = path.split(".")
    functools.reduce(operator.getitem, way, good)[last] = value
    return json.dumps(good).encode("utf-8", "surrogatepass")


OUTER = ["id", "title", "turns", "leaf", "settings", "version", "created_at"]
PATHS = [*OUTER, "settings.stop", "turns.a1", "turns.q0.parent", "turns.a1.images"]
VALUES = JSON.map(lambda value: json.dumps(value).encode())


@given(st.one_of(st.binary(), st.builds(damaged, st.sampled_from(PATHS), JSON), VALUES))
def test_a_hostile_file_is_refused_or_sound(data: bytes) -> None:
    try:
        read = from_json(data)
    except UserError:
        return
    for conversation in read:
        check(conversation)


HOSTILE = {
    "nested": b"[" * 100_000,
    "no json": b"<html>",
    "many": json.dumps([{"messages": []}] * 10_001).encode(),
    "surrogate": b'"\\ud800',
    "itself": damaged("turns.q0.parent", "a1"),
    "no question": damaged("turns.a1.parent", None),
    "script": damaged("turns.q0.images", ["data:text/html;base64,PHNjcmlwdD4="]),
    "address": damaged("turns.q0.images", ["https://example.com/spy.png"]),
    "a number as id": damaged("id", "12"),
    "prototype": damaged("id", "__proto__"),
    "later": damaged("version", 2),
    "date": damaged("created_at", 1e300),
    "leaf": damaged("leaf", "gone"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_bad_file_is_the_users_mistake(data: bytes) -> None:
    with pytest.raises(UserError) as error:
        from_json(data)
    assert error.value.hint and len(error.value.detail or "") < 300


def test_turns_of_a_file_may_stand_in_any_order() -> None:
    whole = json.loads(to_json(talk("one", "1", "two")))
    whole["turns"] = dict(reversed(whole["turns"].items()))
    (read,) = from_json(json.dumps(whole))
    assert [*read.turns] == ["q0", "a1", "q2"] and shown(read) == "q0 a1 q2"


def test_messages_of_openai_become_a_conversation() -> None:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in (PIXEL, "https://x.example/a.png")]
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"role": "system", "content": "whisper"},
        {"role": "user", "content": [{"type": "text", "text": "what?"}, images[0]]},
        {"role": "user", "content": [images[1]]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
    ]
    (read,) = from_json(json.dumps({"model": "m", "messages": rows, "temperature": 1}), now=5.0)
    question, answer = chats.path(read)
    assert (read.settings.model, read.settings.system, read.created_at) == ("m", "whisper", 5.0)
    assert (question.text, question.images) == ("what?\n\nhttps://x.example/a.png", (PIXEL,))
    assert (answer.text, answer.tool_calls) == ("it is 42", (ToolCall("f", "{}"),))
    assert from_json(json.dumps(rows), now=5.0)[0].turns == read.turns
    (greeting,) = from_json('[{"role": "assistant", "content": "hello"}]')
    assert [turn.text for turn in chats.path(greeting)] == ["", "hello"]
    with pytest.raises(UserError):
        from_json('{"messages": [{"role": 1}]}')


def test_fields_of_a_request_leave_the_rest_to_the_server() -> None:
    assert fields(Settings()) == {"max_tokens": 512} and fields(Settings(max_tokens=None)) == {}
    chosen = Settings("m", temperature=0.0, top_k=5, seed=0, stop=("END",), json_mode=True, thinking="off")
    switches = {"enable_thinking": False, "thinking": False}
    expected = {"model": "m", "temperature": 0.0, "top_k": 5, "max_tokens": 512, "seed": 0, "stop": ["END"]}
    expected |= {"response_format": {"type": "json_object"}}
    assert fields(chosen, is_chat=False) == expected
    assert fields(chosen) == expected | {"chat_template_kwargs": switches}
    extra = {"messages": [], "stream": False, "logprobs": True, "chat_template_kwargs": {"x": 1, "thinking": True}}
    given_fields = fields(Settings(max_tokens=None, thinking="off", extra=extra))
    both = {"enable_thinking": False, "thinking": True, "x": 1}
    assert given_fields == {"logprobs": True, "chat_template_kwargs": both}


def test_settings_beyond_their_bounds_are_named() -> None:
    assert not problems(Settings()) and bound("max_tokens", Limits(4096)).high == 4096
    wrong = Settings(temperature=3.0, top_p=0.0, max_tokens=5000, stop=("",), extra={"stream": False})
    assert [str(problem) for problem in problems(wrong, Limits(4096))] == [
        "temperature: Temperature is 3 (From 0 to 2.)",
        "top_p: Top p is 0 (From 0.01 to 1.)",
        "max_tokens: Max tokens is 5000 (From 1 to 4,096.)",
        "stop: cannot use the stop texts (At most 16, none of them empty.)",
        "extra: cannot set stream (The conversation sets them.)",
    ]
    assert set(BOUNDS) <= {*Settings.__struct_fields__}


def test_settings_are_read_as_people_type_them() -> None:
    settings = changed(changed(Settings(seed=3), "top-p", "0.9"), "seed", "")
    assert settings == Settings(top_p=0.9) and shown_settings(settings, "top_p") == ("top_p: 0.9",)
    texts = (("seed", "1" * 5000), ("seed", "1" * 400), ("seed", "1.5"))
    for name, text in (*texts, ("top_p", "nan"), ("thinking", "loud"), ("extra", "{}")):
        with pytest.raises(UserError):
            changed(settings, name, text)


def test_an_answer_holds_what_the_server_said() -> None:
    reply = Reply("x", "stop", 2, 3, 0.1, 1.0, 9.0, "a-0", "r", "m-1", 1, "hm", 0.4, (ToolCall("f", "{}"),))
    turn = chats.answered(Turn("a1", "q0", "assistant", model="m"), reply)
    assert (turn.text, turn.reasoning, turn.reasoning_s, turn.model) == ("x", "hm", 0.4, "m-1")
    assert turn.tool_calls == reply.tool_calls and turn.statistics == statistics.of_reply(reply)


def test_the_line_below_an_answer_shows_what_is_known() -> None:
    whole = statistics.of_reply(Reply("x", "length", 18, 312, 0.21, 7.0, 46.04, "replica-1", "r"), Price(1.0, 1.0))
    words = "TTFT 210 ms · 46 tok/s · 312 tokens · 18 in · $0.00033 · replica 1 · cut off at max tokens"
    assert statistics.line(whole) == words
    few = statistics.Statistics(tokens_per_s=310.4, output_tokens=1, prompt_tokens=18, cached_tokens=12, replica="a-0")
    assert statistics.line(few) == "310 tok/s · 1 token · 18 in (12 cached) · replica a-0"
    unknown = Reply("x", "stop", None, None, None, 1.0, None, None, None)
    assert statistics.line(statistics.of_reply(unknown, Price(1.0, 1.0))) == ""
