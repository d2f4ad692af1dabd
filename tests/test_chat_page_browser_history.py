"""Conversations that a real Chromium keeps: list, search, drafts, export, tabs, and a browser that is full."""

from __future__ import annotations

import json

import pytest
from chat_page_driver import People, browser_fixture, cookies_fixture, people_fixture, rig_fixture  # noqa: F401
from chat_page_rig import Answer, ChatPage, Gate
from playwright.sync_api import FilePayload, Page, expect
from waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.nightly]


def choose(page: Page, title: str, item: str) -> None:
    """In the menu of a conversation."""
    page.get_by_role("button", name=f"Menu of {title}", exact=True).click()
    page.get_by_role("menuitem", name=item).click()


def test_list_is_searched_renamed_deleted_and_put_back(people: People) -> None:
    chat = people.chat()
    page = chat.page
    chat.ask_and_wait("apples")
    chat.new()
    chat.ask_and_wait("pears")
    expect(chat.chats).to_have_text(["pears", "apples"])
    page.keyboard.press("Control+k")
    page.keyboard.type("APPLES said:")
    expect(chat.chats).to_have_text(["apples"])
    chat.chats.click()
    expect(chat.conversation).to_contain_text("You said: apples")
    page.get_by_role("searchbox").fill("nothing such")
    expect(page.get_by_text("No chat has these words.")).to_be_visible()
    page.get_by_role("searchbox").fill("")
    choose(page, "pears", "Rename")
    page.get_by_role("textbox", name="New title").fill("Fruit")
    page.keyboard.press("Enter")
    expect(chat.chats).to_have_text(["Fruit", "apples"])
    choose(page, "apples", "Delete")
    expect(chat.chats).to_have_text(["Fruit"])
    expect(chat.figures).to_have_count(0)  # it was the one on the screen
    page.get_by_role("button", name="Undo").click()
    expect(chat.chats).to_have_text(["Fruit", "apples"])
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete all").click()
    expect(page.get_by_text("Your chats stay in this browser.")).to_be_visible()
    page.reload()
    expect(page.get_by_text("Your chats stay in this browser.")).to_be_visible()


def test_each_conversation_has_its_draft(people: People) -> None:
    chat = people.chat()
    chat.box.fill("half a thou")
    chat.page.reload()
    expect(chat.box).to_have_value("half a thou")
    chat.ask_and_wait("sky")
    chat.box.fill("and the sea")
    chat.new()
    expect(chat.box).to_have_value("")
    chat.chats.click()
    expect(chat.box).to_have_value("and the sea")


def test_export_is_imported_by_another_browser(people: People) -> None:
    chat = people.chat()
    chat.ask_and_wait("What is a penstock?")
    with chat.page.expect_download() as markdown:
        choose(chat.page, "What is a penstock?", "Export as Markdown")
    assert markdown.value.suggested_filename == "What-is-a-penstock.md"
    assert markdown.value.path().read_text().startswith("## user\n\nWhat is a penstock?\n\n## assistant\n\nYou said:")
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="Export all").click()
    other = people.chat()
    expect(other.page.get_by_text("Your chats stay in this browser.")).to_be_visible()
    chooser = other.page.get_by_label("File of chats")
    chooser.set_input_files(download.value.path())
    expect(other.chats).to_have_text(["What is a penstock?"])
    other.chats.click()
    expect(other.conversation).to_contain_text("You said: What is a penstock?")
    one = chat.stored()
    assert other.stored() == one
    rows = [one, {**one, "updated_at": one["updated_at"] + 5}, {**one, "id": "a3"}]
    for name, body in (("chats.json", json.dumps(rows)), ("bad.json", json.dumps([one | {"id": "../<img>"}]))):
        chooser.set_input_files(FilePayload(name=name, mimeType="application/json", buffer=body.encode()))
        said = other.page.locator("#penstock-notices")
        expect(said).to_contain_text("2 imported, 1 already here." if name == "chats.json" else "Could not import bad")
        expect(other.chats).to_have_count(3)


def test_two_tabs_share_the_list_and_lose_nothing(people: People, rig: ChatPage) -> None:
    first = people.chat()
    second = people.chat(first.page.context)
    first.ask_and_wait("sky")
    expect(second.chats).to_have_text(["sky"])
    second.ask_and_wait("sea")
    expect(first.chats).to_have_text(["sea", "sky"])
    expect(first.conversation).not_to_contain_text("sea")
    second.chats.filter(has_text="sky").click()
    expect(second.conversation).to_contain_text("You said: sky")
    # Both ask at once in one conversation: neither the server nor the other tab knows of both answers.
    tabs = {"left": (first, Gate()), "right": (second, Gate())}
    for question, (chat, gate) in tabs.items():
        rig.answers[question] = Answer(("so ", gate, question))
        chat.ask(question, "so")
    for chat, gate in tabs.values():
        gate.open()
        chat.wait_over()
    some = {"sky", "You said: sky", "left", "right", "so right"}
    for chat, _ in tabs.values():
        until(lambda chat=chat: len(chat.texts()) == 6 and some <= {*chat.texts()}, "the turns of both")  # type: ignore[misc]


def test_full_browser_says_so_and_the_chat_goes_on(people: People) -> None:
    chat = people.chat()
    chat.page.evaluate(
        "() => { IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"
    )
    chat.ask("sky")
    expect(chat.page.get_by_text("This browser has no room for more.")).to_be_visible()
    expect(chat.figures).to_have_count(1)
    assert chat.texts() == ["sky", "You said: sky"]


def test_browser_without_storage_keeps_chats_until_the_tab_closes(people: People) -> None:
    context = people.context()
    context.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('no'); } })")
    chat = people.chat(context)
    for question in ("sky", "sea"):
        chat.ask(question)
        expect(chat.figures).to_have_count(1)
        expect(chat.page.locator("body.penstock-busy")).to_have_count(0)
        chat.new()
    chat.chats.filter(has_text="sky").click()
    expect(chat.conversation).to_contain_text("You said: sky")
