"""The chat page in a real Chromium: its process over a real gateway, with an engine that says what a test wrote."""

from __future__ import annotations

import base64
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from chat_page_driver import (  # noqa: F401
    PHONE,
    Chat,
    People,
    browser_fixture,
    cookies_fixture,
    people_fixture,
    rig_fixture,
    violations,
)
from chat_page_rig import Answer, ChatPage, Gate
from path_proxy import PathProxy
from playwright.sync_api import FilePayload, expect
from waiting import left_s, until

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
FIGURES = re.compile(r"TTFT .+ · 3 tokens · 18 in \(12 cached\) · \$[0-9.]+ · replica 0")
CACHED = {"prompt_tokens": 18, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 12}}


def test_first_question_is_answered_with_figures_and_kept(people: People, rig: ChatPage) -> None:
    rig.answers["hello"] = Answer(("Good ", "morning"), usage=CACHED)
    chat = people.chat()
    expect(chat.box).to_be_focused()
    expect(chat.chip).to_have_text("ready")
    chat.ask("hello", "Good morning")
    expect(chat.figures).to_have_text(FIGURES)
    chat.wait_over()
    expect(chat.conversation.get_by_role("group", name="Answer", exact=True).first).to_have_text("Good morning")
    expect(chat.box).to_have_value("")
    expect(chat.chats).to_have_text(["hello"])
    asked = rig.engine.asked[0].body
    assert (asked["max_tokens"], asked["messages"][-1]) == (512, {"role": "user", "content": "hello"})
    assert chat.leaf["text"] == "Good morning"


def test_login_wants_a_key_that_the_gateway_takes(people: People, rig: ChatPage) -> None:
    key = rig.make_key("bob")
    page = people.tab(is_logged_in=False)
    expect(page.get_by_label("API key")).to_be_focused()
    assert violations(page) == []
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("key")
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#penstock-message textarea")).to_be_visible()
    assert key not in page.content()
    chat = Chat(page, rig)
    chat.ask_and_wait("hello")
    until(lambda: rig.n_counted("bob") == 1, "the question is counted for who asked it")
    cookie = next(cookie for cookie in page.context.cookies() if cookie["name"].startswith("penstock-ui"))
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_text("You logged out.")).to_be_visible()
    page.goto(f"{rig.url}#key={rig.make_key('bob2')}")
    expect(chat.chats).to_have_text(["hello"])  # the conversations stay in the browser


@pytest.mark.nightly
def test_text_is_shown_before_the_answer_ends_and_reasoning_and_calls_are_folded(people: People, rig: ChatPage) -> None:
    def call(**function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": function}]}

    gates = Gate(), Gate()
    calls = call(name="get_weather", arguments=""), call(arguments='{"city": '), call(arguments='"Seoul"}')
    steps = ({"reasoning": "Let me think."}, gates[0], "The first words ", gates[1], "and the last.", *calls)
    rig.answers["slowly"] = Answer(steps, finish_reason="tool_calls")
    chat = people.chat()
    chat.ask("slowly")
    expect(chat.conversation.get_by_text("Reasoning")).to_be_visible()
    expect(chat.clock).to_be_visible()
    gates[0].open()
    expect(chat.conversation).to_contain_text("The first words")
    expect(chat.figures).to_have_count(0)
    gates[1].open()
    expect(chat.conversation).to_contain_text("The first words and the last.")
    chat.wait_answered()
    expect(chat.clock).to_have_count(0)
    for title, text in (("Reasoning", "Let me think."), ("get_weather", '"city": "Seoul"')):
        expect(chat.conversation.get_by_text(text)).to_be_hidden()
        chat.conversation.get_by_text(title).click()
        expect(chat.conversation.get_by_text(text)).to_be_visible()
    assert chat.leaf["reasoning"] == "Let me think."
    assert chat.leaf["tool_calls"] == [{"name": "get_weather", "arguments": '{"city": "Seoul"}'}]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["button", "closed tab", "escape", "new chat"])
def test_end_of_the_interest_ends_the_work_of_the_engine(people: People, rig: ChatPage, how: str) -> None:
    rig.answers["long"] = Answer(("Once upon a time", Gate()))
    chat = people.chat()
    chat.ask("long", "Once upon a time")
    (asked,) = rig.engine.asked
    if how == "button":
        chat.stop.click()
    elif how == "escape":
        chat.page.keyboard.press("Escape")
    elif how == "closed tab":
        chat.page.close()
    else:
        chat.new()
        chat.chats.click()
        expect(chat.conversation).to_contain_text("Once upon a time")
    until(lambda: asked.is_cut, "the engine's request ends")
    if how in ("button", "escape"):
        expect(chat.conversation).to_contain_text("Once upon a time")
        expect(chat.figures).to_contain_text("stopped")
        chat.ask_and_wait("and now?")


def test_reload_keeps_the_conversation_the_draft_and_the_half_of_an_answer(people: People, rig: ChatPage) -> None:
    rig.answers["long"] = Answer(("Half of it", Gate()))
    chat = people.chat()
    chat.ask_and_wait("hello")
    chat.ask("long", "Half of it")
    chat.wait_kept("Half of it")
    chat.box.fill("not sent yet")
    chat.page.reload()
    expect(chat.conversation).to_contain_text("You said: hello")
    expect(chat.conversation).to_contain_text("Half of it")
    expect(chat.box).to_have_value("not sent yet")
    chat.box.press("Enter")
    expect(chat.conversation).to_contain_text("You said: not sent yet")


@pytest.mark.nightly
def test_question_that_is_sent_before_an_answer_is_over_goes_when_it_is(people: People, rig: ChatPage) -> None:
    gates = [Gate(), Gate()]
    rig.answers["long"] = Answer(("Half of it", gates[0]))
    rig.answers["next"] = Answer(("Half of that", gates[1]))
    chat = people.chat()
    chat.ask("long", "Half of it")
    chat.ask("next")
    gates[0].open()
    expect(chat.conversation).to_contain_text("Half of that")
    until(lambda: chat.texts()[:3] == ["long", "Half of it", "next"], "the question follows the answer")
    chat.ask("another")
    chat.box.fill("another thought")
    gates[1].open()
    expect(chat.figures).to_have_count(2)
    chat.wait_over()
    assert chat.leaf["text"] == "Half of that", "what was changed since is not sent"
    expect(chat.box).to_have_value("another thought")


@pytest.mark.nightly
def test_answer_is_drawn_as_markdown(people: People, rig: ChatPage) -> None:
    text = (
        "It costs $5 and $6, while $E=mc^2$ and \\(a+b\\) are formulas:\n\n$$\\int_0^1 x\\,dx$$\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('hello <b>')\n```\n\nGrüße, 你好, 👋 &amp; <br>."
    )
    rig.answers["markdown"] = Answer((text,))
    context = people.context(permissions=["clipboard-read", "clipboard-write"])
    chat = people.chat(context)
    chat.ask_and_wait("markdown", "It costs $5 and $6, while")
    expect(chat.conversation.locator(".katex")).to_have_count(3)
    expect(chat.conversation.locator("table td").first).to_have_text("1")
    expect(chat.conversation).to_contain_text("Grüße, 你好, 👋 &")
    chat.conversation.locator("pre").hover()
    chat.conversation.locator(".code_wrap button, button.copy-code, pre button").first.click()
    copied = functools.partial(chat.page.evaluate, "navigator.clipboard.readText()")
    until(lambda: copied().strip() == "print('hello <b>')", "the code is copied")
    chat.act("copy").last.click()
    until(lambda: copied() == text, "the answer is copied")


@pytest.mark.nightly
def test_branches_of_an_edited_question_and_a_second_answer_and_a_question_without_one(
    people: People, rig: ChatPage
) -> None:
    rig.answers["first"] = Answer(("Answer one",))
    chat = people.chat()
    chat.ask_and_wait("first", "Answer one")
    rig.answers["first"] = Answer(("Answer two",))
    chat.act("retry").click()
    expect(chat.conversation).to_contain_text("Answer two")
    expect(chat.conversation).to_contain_text("2/2")
    chat.wait_over()
    chat.page.get_by_role("button", name="Previous answer").click()
    expect(chat.conversation).to_contain_text("Answer one")
    chat.wait_over()
    chat.act("edit").first.click()
    editor = chat.page.locator("#penstock-chat textarea, #penstock-edit textarea, #penstock-message textarea").first
    expect(editor).to_have_value("first")
    editor.fill("second")
    editor.press("Enter")
    expect(chat.conversation).to_contain_text("You said: second")
    chat.wait_answered()
    chat.page.get_by_role("button", name="Previous question").click()
    expect(chat.conversation).to_contain_text("Answer two")
    chat.wait_over()
    chat.act("delete").last.click()
    expect(chat.conversation).not_to_contain_text("Answer two")
    chat.wait_over()
    assert {*chat.texts()} == {"first", "second", "Answer one", "You said: second"}
    chat.page.get_by_role("button", name="Undo").click()
    expect(chat.conversation).to_contain_text("Answer two")
    chat.page.reload()
    for answer in ("Answer two", "Answer one"):
        expect(chat.conversation).to_contain_text(answer)
        chat.act("delete").last.click()
        expect(chat.conversation).not_to_contain_text(answer)
        chat.wait_over()
    chat.page.get_by_role("button", name="Ask", exact=True).click()
    expect(chat.conversation).to_contain_text("Answer two")


N_PEOPLE = 100


@pytest.mark.nightly
def test_hundred_people_stream_at_once(people: People, rig: ChatPage) -> None:
    """The question that a browser posts, posted again as from other tabs."""
    gate = Gate()
    rig.answers["all"] = Answer(("It is here", gate, " and whole"))
    chat, joins = people.chat(), list[dict[str, Any]]()
    chat.page.on("request", lambda each: joins.append(each.post_data_json) if "queue/join" in each.url else None)
    chat.ask("all", "It is here")
    jar = {cookie["name"]: cookie["value"] for cookie in people.cookies}
    with httpx.Client(base_url=rig.url, cookies=jar, timeout=left_s()) as client, ThreadPoolExecutor(N_PEOPLE) as pool:

        def stream(person: str) -> str:
            client.post("gradio_api/queue/join", json=joins[0] | {"session_hash": person}).raise_for_status()
            return client.get("gradio_api/queue/data", params={"session_hash": person}).text

        streams = pool.map(stream, [f"person{i}" for i in range(N_PEOPLE)])
        try:
            until(lambda: rig.engine.n_open("all") == N_PEOPLE + 1, "all are answered at once")
        finally:
            gate.open()
        assert all(" and whole" in end and '"success":true' in end for end in streams)


@pytest.mark.nightly
def test_keyboard_alone_is_enough(people: People, rig: ChatPage) -> None:
    chat = people.chat()
    keyboard, keys = chat.page.keyboard, chat.page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(chat.box).to_be_focused()
    keyboard.type("line one?")
    expect(keys).to_have_count(0)
    keyboard.press("Shift+Enter")
    keyboard.type("line two")
    keyboard.press("Enter")
    chat.wait_answered()
    assert rig.engine.asked[0].question == "line one?\nline two"
    keyboard.press("Control+Shift+O")
    expect(chat.conversation).not_to_contain_text("line one")
    keyboard.type("a new one")
    keyboard.press("Enter")
    expect(chat.chats).to_have_count(2)
    chat.wait_answered()
    keyboard.press("Control+b")
    expect(chat.chats.first).not_to_be_in_viewport()
    keyboard.press("Control+k")
    expect(chat.page.get_by_role("searchbox")).to_be_focused()
    expect(chat.chats.first).to_be_in_viewport()
    chat.chats.last.focus()
    keyboard.press("?")
    expect(keys).to_contain_text("Stop the answer")
    keyboard.press("Escape")
    keyboard.press("Enter")
    expect(chat.conversation).to_contain_text("line one")


@pytest.mark.nightly
def test_image_goes_to_the_model_once_the_settings_are_right_and_stays(people: People, rig: ChatPage) -> None:
    rig.add_replica(input_modalities=["text", "image"])
    chat = people.chat()
    expect(chat.page.get_by_role("button", name="Attach images")).to_be_visible()
    chat.page.get_by_role("button", name="Settings").click()
    temperature = chat.page.locator("#penstock-settings").get_by_label("Temperature")
    temperature.fill("9")
    file = FilePayload(name="dot.png", mimeType="image/png", buffer=PIXEL)
    chat.page.locator("#penstock-ask input[type=file]").set_input_files(file)
    image = chat.page.get_by_role("img", name="image 1")
    expect(image).to_be_visible()
    chat.page.locator("#penstock-send").click()
    expect(chat.page.get_by_text("Temperature is 9")).to_be_visible()
    expect(image).to_be_visible()
    assert not rig.engine.asked
    temperature.fill("")
    chat.ask_and_wait("what is it?")
    parts = {part["type"]: part for part in rig.engine.asked[0].body["messages"][-1]["content"]}
    assert sorted(parts) == ["image_url", "text"]
    assert parts["image_url"]["image_url"]["url"].startswith("data:image/png;base64,")
    chat.page.reload()
    expect(chat.conversation.get_by_role("img", name="image 1 of the question")).to_be_visible()


@pytest.mark.nightly
def test_settings_go_with_the_question_and_stay_with_the_conversation(people: People, rig: ChatPage) -> None:
    chat = people.chat()
    panel = chat.page.locator("#penstock-settings")
    chat.page.get_by_role("button", name="Settings").click()
    typed = {"System message": "Be brief.", "Temperature": "0.2", "Top p": "0.9", "Top k": "40", "Min p": "0.05"}
    for label, text in {**typed, "Seed": "7", "Stop": "END\n\\n\\n"}.items():
        panel.get_by_label(re.compile(rf"^\s*{label}")).fill(text)
    panel.get_by_label("JSON mode").check()
    panel.get_by_label("off", exact=True).check()
    chat.ask_and_wait("hello")
    sent = rig.engine.asked[0].body
    numbers = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "max_tokens": 512}
    more = {"stop": ["END", "\n\n"], "response_format": {"type": "json_object"}}
    more["chat_template_kwargs"] = {"enable_thinking": False, "thinking": False}
    assert {name: sent[name] for name in (*numbers, *more)} == {**numbers, **more}
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    chat.page.reload()
    for label, text in typed.items():
        expect(panel.get_by_label(re.compile(rf"^\s*{label}"))).to_have_value(text)
    chat.page.get_by_role("button", name="Settings").click()
    panel.get_by_label("Send the system message").uncheck()
    chat.ask_and_wait("and now")
    assert "system" not in [message["role"] for message in rig.engine.asked[1].body["messages"]]
    chat.new()  # it begins with the settings used last
    chat.ask_and_wait("once more")
    sent = rig.engine.asked[2].body
    assert len(sent["messages"]) == 1 and {name: sent[name] for name in numbers} == numbers


@pytest.mark.parametrize("look", ["light", "phone", pytest.param("dark", marks=pytest.mark.nightly)])
def test_page_has_no_serious_violation(people: People, rig: ChatPage, look: str) -> None:
    steps = (
        {"reasoning": "Hm."},
        "Text, `code`, [a link](https://example.com), $x$\n\n```python\nprint(" + "1, " * 99 + ")\n```\n",
    )
    rig.answers["all"] = Answer((*steps, "\n| a | b |\n|---|---|\n| 1 | 2 |\n"))
    options: dict[str, Any] = {"dark": {"color_scheme": "dark"}, "phone": {"viewport": PHONE, "has_touch": True}}
    chat = people.chat(**options.get(look, {}))
    chat.ask("all")
    chat.wait_answered()
    assert not (found := violations(chat.page)), "\n".join(found)
    assert chat.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if look == "phone":
        expect(chat.box).to_be_in_viewport()
        expect(chat.figures).to_be_in_viewport()
        chat.page.locator("h1").click()
        chat.page.keyboard.press("?")
        keys = chat.page.get_by_role("dialog", name="Keyboard shortcuts").bounding_box()
        assert keys and keys["x"] >= 0 and keys["x"] + keys["width"] <= PHONE["width"]
    if look == "dark":
        assert chat.page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


@pytest.mark.nightly
def test_answer_of_200_kb_is_shown_and_kept_whole(people: People, rig: ChatPage) -> None:
    text = "".join(f"Line {i} of a very long answer, as models write them.\n\n" for i in range(3700))
    assert len(text) > 200_000
    rig.answers["long"] = Answer(tuple(text[i : i + 2000] for i in range(0, len(text), 2000)))
    chat = people.chat()
    chat.ask_and_wait("long", "Line 3699 of")
    assert chat.leaf["text"] == text
    chat.page.reload()
    expect(chat.conversation).to_contain_text("Line 3699 of")


@pytest.mark.nightly
@pytest.mark.parametrize("strips", [True, False])
def test_page_works_below_a_path(people: People, rig: ChatPage, strips: bool) -> None:
    with PathProxy(rig.port, "/x/y", strips=strips) as proxy:
        people.origins.add(proxy.url.split("/")[2])
        page = people.tab(url=f"{proxy.url}#key={rig.make_key(f'proxy-{strips}')}", is_logged_in=False)
        expect(page.locator("#penstock-message textarea")).to_be_visible()
        page.locator("#penstock-message textarea").fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator("#penstock-chat")).to_contain_text("You said: hello")
        expect(page.locator("#penstock-state")).to_have_text("ready")
        assert proxy.outside == []
