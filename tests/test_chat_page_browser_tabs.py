"""Completion, Compare and Use it elsewhere of the chat page, in a real Chromium."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from chat_page_driver import People, browser_fixture, cookies_fixture, people_fixture, rig_fixture, violations  # noqa: F401
from chat_page_rig import Answer, ChatPage, Gate
from playwright.sync_api import Page, expect
from waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.nightly]

HOSTILE = 'it\'s "quoted" $(touch /tmp/pwned) \\ <img src=x onerror=alert(1)>'


def opened(people: People, name: str) -> Page:
    page = people.tab()
    page.get_by_role("tab", name=name, exact=True).click()
    return page


def test_raw_prompt_is_completed_and_stopped(people: People, rig: ChatPage) -> None:
    gate = Gate()
    rig.answers["Once upon"] = Answer((" a time", gate, " <b>it</b> was"))
    rig.answers["for ever"] = Answer(("and on", Gate()))
    page = opened(people, "Completion")
    tab, below = page.locator("#penstock-completion"), page.locator("#penstock-completion .penstock-foot")
    expect(tab.get_by_label("Model")).to_have_value("demo")
    tab.get_by_label("Prompt").fill("Once upon")
    tab.get_by_label("Stop texts, one a line").fill("END\n\n###")
    tab.get_by_role("button", name="Submit").click()
    expect(tab.get_by_label("Answer")).to_have_value(" a time")
    expect(below).to_contain_text("writing")
    gate.open()
    expect(tab.get_by_label("Answer")).to_have_value(" a time <b>it</b> was")
    expect(below).to_contain_text("3 tokens · 18 in")
    asked = rig.engine.asked[0]
    assert asked.path == "/v1/completions"
    sent = {name: asked.body[name] for name in ("model", "prompt", "max_tokens", "temperature", "stop")}
    assert sent == {"model": "demo", "prompt": "Once upon", "max_tokens": 50, "temperature": 0, "stop": ["END", "###"]}
    tab.get_by_label("Prompt").fill("for ever")
    tab.get_by_role("button", name="Submit").click()
    expect(tab.get_by_label("Answer")).to_have_value("and on")
    tab.get_by_role("button", name="Stop").click()
    until(lambda: rig.engine.asked[1].is_cut, "the engine's request ends")
    expect(below).to_have_text("stopped")
    assert violations(page) == []


def test_two_answers_grow_at_once_side_by_side(people: People, rig: ChatPage) -> None:
    gate = Gate()
    rig.answers["why?"] = Answer(
        ("because ", gate, "<script>alert(1)</script> **so**\n```python\nprint(" + "1, " * 99 + ")  # so\n```\n")
    )
    page = opened(people, "Compare")
    tab = page.locator("#penstock-compare")
    tab.get_by_text("Right: settings").click()
    tab.get_by_label("System message").last.fill("Be brief.")
    tab.get_by_label("Question for both").fill("why?")
    tab.get_by_role("button", name="Ask both").click()
    expect(tab.get_by_text("because")).to_have_count(2)
    until(lambda: len(rig.engine.asked) == 2, "both are asked before one has ended")
    gate.open()
    expect(tab.locator("strong", has_text="so")).to_have_count(2)
    expect(tab.locator(".penstock-foot", has_text="3 tokens")).to_have_count(2)
    systems = [asked.body["messages"][0]["content"] for asked in rig.engine.asked]
    assert sorted(systems) == ["Be brief.", "why?"]
    assert violations(page) == []


def test_conversation_leaves_as_a_command_that_carries_it(people: People, rig: ChatPage) -> None:
    chat = people.chat()
    chat.ask_and_wait(HOSTILE, "You said: it's")
    chat.page.get_by_role("tab", name="Use it elsewhere").click()
    tab = chat.page.locator("#penstock-elsewhere")
    text = tab.locator(".penstock-code textarea:visible")
    expect(text).to_have_value(re.compile("curl"))
    tab.get_by_label("Address").fill("https://llm.example.org/v1")
    expect(text).to_have_value(re.compile("https://llm.example.org/v1/chat/completions"))
    command = text.input_value()
    body = json.loads(shlex.split(command.replace("\\\n", " "))[2])
    assert body["messages"] == [{"role": "user", "content": HOSTILE}]
    assert "$PENSTOCK_KEY" in command
    tab.get_by_role("tab", name="Zed").click()
    expect(text).to_have_value(re.compile("openai_compatible"))
    assert violations(chat.page) == []


def test_what_was_typed_on_any_tab_outlives_a_reload(people: People, rig: ChatPage) -> None:
    chat = people.chat()
    boxes = {"Completion": "Prompt", "Compare": "Question for both"}
    for tab, label in boxes.items():
        chat.page.get_by_role("tab", name=tab, exact=True).click()
        chat.page.get_by_label(label, exact=True).fill(f"typed in {tab}")
    chat.page.get_by_role("button", name="Settings", exact=True).click()
    settings = chat.page.locator("#penstock-settings")
    settings.get_by_label("System message", exact=True).fill("Be brief.")
    chat.page.reload()
    expect(settings.get_by_label("System message", exact=True)).to_have_value("Be brief.")
    chat.ask_and_wait("hello")
    assert rig.engine.asked[0].body["messages"][0] == {"role": "system", "content": "Be brief."}
    for tab, label in boxes.items():
        chat.page.get_by_role("tab", name=tab, exact=True).click()
        expect(chat.page.get_by_label(label, exact=True)).to_have_value(f"typed in {tab}")


# What the page draws waits for letGo().
HELD = """
window.hold = () => { window.held = new Promise((go) => { window.letGo = go; }); };
window.hold();
const ask = window.fetch;
window.fetch = async (...given) => {
  const answer = await ask(...given);
  if (String(given[0]).includes("run/predict")) await window.held;
  return answer;
};
"""


def test_a_question_that_is_sent_before_the_page_is_drawn_is_asked_after_it(people: People) -> None:
    chat = people.chat()
    chat.page.add_init_script(HELD)
    chat.page.reload()
    for send in (chat.box.press, lambda _: chat.page.locator("#penstock-send").click()):
        expect(chat.box).to_be_visible()
        chat.box.fill("early")
        send("Enter")
        chat.page.evaluate("letGo()")
        expect(chat.conversation).to_contain_text("You said: early")
        chat.wait_answered()
        chat.page.evaluate("hold()")
        chat.page.get_by_role("button", name="New chat").click()
