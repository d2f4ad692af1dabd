"""What goes wrong around the chat page, in a real Chromium: refusals, losses, waits, and answers that attack it."""

from __future__ import annotations

import contextlib
import json
import re
import socket

import pytest
from chat_page_driver import Chat, People, browser_fixture, cookies_fixture, people_fixture, rig_fixture, violations  # noqa: F401
from chat_page_rig import Answer, ChatPage, Gate
from golden_files import GOLDEN
from playwright.sync_api import expect
from waiting import left_s, until

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.nightly]


def test_killed_replica_leaves_the_text_and_offers_to_go_on(people: People, rig: ChatPage) -> None:
    rig.answers["long"] = Answer(("Half of it,", Gate()))
    chat = people.chat()
    chat.ask("long", "Half of it,")
    rig.kill_replicas()
    expect(chat.error).to_be_visible()
    expect(chat.conversation).to_contain_text("Half of it,")
    chat.wait_over()
    rig.answers["Half of it,"] = Answer((" and the other half.",))  # the answer to go on with is sent as it is
    rig.add_replica()
    chat.act("continue").click()
    expect(chat.conversation).to_contain_text("Half of it, and the other half.")
    expect(chat.error).to_have_count(0)
    chat.wait_over()
    assert chat.leaf["text"] == "Half of it, and the other half."


def test_killed_page_process_comes_back_with_all_that_was_there(people: People, rig: ChatPage) -> None:
    rig.answers["long"] = Answer(("Half of it", Gate()))
    chat = people.chat()
    chat.ask_and_wait("hello")
    chat.ask("long")
    chat.wait_kept("Half of it")
    chat.box.fill("not sent yet")
    with chat.page.expect_navigation(timeout=1000 * left_s()):  # by itself, as soon as the process answers
        rig.kill_page()
        rig.start_page()
    expect(chat.conversation).to_contain_text("Half of it")
    expect(chat.box).to_have_value("not sent yet")
    chat.box.press("Enter")
    expect(chat.conversation).to_contain_text("You said: not sent yet")


def test_key_that_is_revoked_while_chatting_leads_back_to_the_login(people: People, rig: ChatPage) -> None:
    key = rig.make_key("carol")
    chat = people.chat(is_logged_in=False, url=f"{rig.url}#key={key}")
    chat.ask_and_wait("hello")
    rig.revoke("carol")
    chat.ask("are you there?")
    chat.page.get_by_label("API key").fill(rig.make_key("carol2"))
    chat.page.keyboard.press("Enter")
    expect(chat.conversation).to_contain_text("You said: hello")
    # What the page learned first decides: the question was sent and failed, or it was not sent and is still typed.
    expect(chat.box).to_be_visible()
    until(lambda: "are you there?" in chat.box.input_value() + chat.conversation.inner_text(), "it is kept")


def test_gateway_that_is_away_is_said_and_comes_back_without_a_reload(people: People, rig: ChatPage) -> None:
    rig.stop_gateway()
    try:
        chat = people.chat()
        expect(chat.chip).to_have_text("offline")
        chat.ask("hello")
        expect(chat.error).to_be_visible()
        expect(chat.conversation).to_contain_text("hello")
        chat.wait_over()
    finally:
        rig.start_gateway()
    expect(chat.chip).to_have_text("ready")
    chat.act("retry").last.click()
    expect(chat.conversation).to_contain_text("You said: hello")
    expect(chat.error).to_have_count(0)


def test_wait_for_a_replica_and_the_place_in_the_queue_are_told(people: People, rig: ChatPage) -> None:
    gate = Gate()
    rig.answers["long"] = Answer(("Once", gate))
    with rig.another_gateway(max_in_flight=1):
        rig.announce("loading", progress={"stage": "loading weights", "fraction": 0.45, "eta_s": 12.0})
        chats = [people.chat() for _ in range(3)]
        expect(chats[0].chip).to_have_text("loading 45 %, 12 s")
        progress = {"stage": "loading weights", "shards_done": 17, "shards_total": 30, "fraction": 0.57, "eta_s": 40.0}
        rig.announce("loading", progress=progress)
        expect(chats[0].chip).to_contain_text("17/30")
        chats[0].ask("long")
        words = re.compile(r"waiting for a replica: loading 17/30 shards, about \d+ s · \d+ s")
        expect(chats[0].clock).to_have_text(words)
        rig.add_replica()
        expect(chats[0].conversation).to_contain_text("Once")
        expect(chats[0].chip).to_have_text("ready")
        chats[1].ask("second")
        expect(chats[1].clock).to_contain_text("in the queue")
        chats[2].ask("third")
        expect(chats[2].clock).to_contain_text("in the queue: 1 before you")
        gate.open()
        expect(chats[2].conversation).to_contain_text("You said: third")


TOO_LONG = (
    "This model's maximum context length is 1024 tokens. However, you requested 1612 tokens (1100 in the messages, 512 "
    "in the completion). Please reduce the length of the messages or completion."
)


def test_refusals_offer_to_leave_out_the_oldest_and_to_ask_again(people: People, rig: ChatPage) -> None:
    chat = people.chat()
    chat.ask_and_wait("the oldest")
    rig.answers["too much"] = Answer((TOO_LONG,), status=400)
    chat.ask("too much")
    expect(chat.error).to_contain_text("588 tokens too long")
    chat.wait_over()
    rig.answers.clear()
    chat.act("shrink").click()
    expect(chat.conversation).to_contain_text("You said: too much")
    assert "the oldest" not in json.dumps(rig.engine.asked[-1].body["messages"])
    chat.wait_over()
    for question, after_s in (("busy", 3600), ("still busy", 5)):
        headers = {"Retry-After": str(after_s)}
        rig.answers[question] = Answer(("too many requests",), status=429, headers=headers)
        chat.ask(question)
        again = chat.error.locator("button[data-act=retry]")
        expect(again).to_contain_text(re.compile(r"by itself in \d+ s"))
        chat.wait_over()
        del rig.answers[question]
        if after_s > 60:
            again.click()
        expect(chat.conversation).to_contain_text(f"You said: {question}")
        chat.wait_over()


HOSTILE = (GOLDEN / "chat" / "hostile.md").read_text("utf-8").rstrip()
# Our reader of Markdown takes the last line for code, the page's does not.
COVER = (GOLDEN / "chat" / "cover.md").read_text("utf-8")


def test_html_that_gets_into_an_answer_stays_in_its_box(people: People, rig: ChatPage) -> None:
    rig.answers[COVER] = Answer((COVER,))
    chat = people.chat()
    chat.ask(COVER)
    chat.wait_answered()
    chat.page.evaluate("document.querySelectorAll('.md form').forEach((form) => form.requestSubmit())")
    chat.ask_and_wait("hello")
    chat.new()  # a click, which a link over the page would get
    expect(chat.figures).to_have_count(0)
    assert chat.page.url == rig.url


def test_hostile_answer_does_nothing_and_asks_no_other_host(people: People, rig: ChatPage) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    pieces = [HOSTILE[i : i + 40] for i in range(0, len(HOSTILE), 40)]
    rig.answers[HOSTILE] = Answer(({"reasoning": HOSTILE}, *pieces, {"tool_calls": [call]}))
    chat = people.chat()
    chat.ask(HOSTILE)
    chat.wait_answered()
    expect(chat.conversation).to_contain_text("The end of it.")
    for fold in chat.conversation.locator(".thought-group > .title").all():
        fold.click()
    expect(chat.conversation.locator("[aria-expanded=true]")).to_have_count(2)
    for address in chat.conversation.locator("a[href]").evaluate_all(
        "links => links.map((link) => link.getAttribute('href'))"
    ):
        assert address.startswith(("https://", "http://", "#", "login")), address
    assert chat.page.evaluate("window.hacked ?? null") is None
    chat.page.reload()
    expect(chat.conversation).to_contain_text("The end of it.")
    assert chat.page.evaluate("window.hacked ?? null") is None
    assert chat.page.locator("#penstock-chat :is(script, iframe, form, video, object, embed, link)").count() == 0


def test_half_open_connections_cut_nobodys_answer_and_keep_nobody_out(people: People, rig: ChatPage) -> None:
    gate = Gate()
    rig.answers["long"] = Answer(("Once upon a time", gate, " and ever after"))
    chat, process = people.chat(), rig.process
    chat.ask("long", "Once upon a time")
    with contextlib.ExitStack() as strangers:
        for index in range(1500):
            peer = strangers.enter_context(socket.create_connection(("127.0.0.1", rig.port)))
            peer.sendall(
                (b"", b"GET / HTTP/1.1\r\nhost: h\r\n", b"POST /login HTTP/1.1\r\ncontent-length: 9\r\n\r\nk")[
                    index % 3
                ]
            )
        other = people.chat(is_logged_in=False, url=f"{rig.url}#key={rig.make_key('dora')}")
        other.ask_and_wait("hello")
        gate.open()
        chat.wait_answered()
    assert chat.leaf["text"] == "Once upon a time and ever after"
    assert rig.process is process and process is not None and process.poll() is None
