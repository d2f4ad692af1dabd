"""The browser's half of the chat page in a real Chromium: history, drafts, shortcuts, without Gradio around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import WAIT_S, chromium
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from penstock.chat.page import theme

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

URL = "http://chat.test/x/"
HOSTILE = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e'
# What the layout gives the scripts to work with; `shown` is what Gradio would draw.
BODY = """
<aside class="sidebar open">
<button class="toggle-button" onclick="this.parentNode.classList.toggle('open')">=</button>
<div id="penstock-history"></div></aside>
<main><h1>demo</h1><div id="penstock-status"></div><p id="shown"></p>
<button id="penstock-show" hidden onclick="shown.textContent = JSON.parse(penstock.current()).title || '-'"></button>
<button id="penstock-stop" onclick="document.body.classList.remove('penstock-busy')">Stop</button>
<label id="penstock-message">Message <textarea></textarea></label></main>
"""
# Whether the browser keeps so many turns of a conversation.
STORED = """([id, n]) => new Promise((tell) => {
  const opening = indexedDB.open("penstock");
  opening.onsuccess = () => {
    const reading = opening.result.transaction("conversations").objectStore("conversations").get(id);
    reading.onsuccess = () => (opening.result.close(), tell(Object.keys(reading.result?.turns ?? {}).length === n));
  };
})"""
BUSY = "document.body.classList.add('penstock-busy')"
STYLE = "<style>.sidebar:not(.open) div { display: none !important; }</style>"
LOAD = "<script>penstock.ready.then(() => document.querySelector('#penstock-show').click())</script>"  # as Gradio does
DOCUMENT = f'<!doctype html><html lang="en"><title>demo</title>{theme.head()}{STYLE}<body>{BODY}{LOAD}</html>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """The harness at URL."""
    with browser.new_context(viewport={"width": 1200, "height": 800}, timezone_id="UTC") as context:
        context.set_default_timeout(1000 * WAIT_S)
        context.route("**/*", answer)
        yield context


def answer(route: Route) -> None:
    """What the page's process would: the page, its status, and the two routes of files."""
    place = route.request.url.removeprefix(URL)
    if place == "status":
        route.fulfill(
            json={
                "state": "ok",
                "models": [{"id": "m", "state": "loading", "progress": {"fraction": 0.45, "eta_s": 12}}],
            }
        )
    elif place == "markdown":
        route.fulfill(body=f"# {json.loads(route.request.post_data or '')['title']}")
    elif place == "import":
        body = route.request.post_data or ""
        if body.startswith("["):
            route.fulfill(body=body)
        else:
            route.fulfill(status=422, json={"message": "cannot read the conversations", "hint": "Give JSON."})
    else:
        route.fulfill(body=DOCUMENT, content_type="text/html")


def start(context: BrowserContext) -> Page:
    page = context.new_page()
    page.on("pageerror", lambda error: pytest.fail(str(error)))
    page.goto(URL)
    return page


def said(key: str, title: str, text: str, updated_at: float = 1_800_000_000.0) -> dict[str, Any]:
    turn = {"id": f"{key}-q", "parent": None, "role": "user", "text": text}
    return {"id": key, "title": title, "created_at": updated_at, "updated_at": updated_at, "turns": {turn["id"]: turn},
            "leaf": turn["id"], "settings": {"model": "m"}, "version": 1}  # fmt: skip


def take(page: Page, conversation: dict[str, Any]) -> None:
    page.evaluate("async (one) => { await penstock.fresh(); await penstock.took(one); }", conversation)


@pytest.mark.nightly
def test_a_conversation_outlives_a_reload_and_its_draft_too(context: BrowserContext) -> None:
    page = start(context)
    new = json.loads(page.evaluate("penstock.current()"))
    assert new["turns"] == {} and new["leaf"] is None
    page.locator("textarea").fill("half a thou")
    page.reload()
    expect(page.locator("textarea")).to_have_value("half a thou")
    page.locator("textarea").evaluate("(box) => { box.value = ''; }")  # Gradio empties it once it is sent
    page.evaluate("(one) => penstock.took(JSON.stringify(one))", said(new["id"], "Sky", "why is it blue?"))
    expect(page.get_by_role("button", name="Sky", exact=True)).to_have_attribute("aria-current", "true")
    page.locator("textarea").fill("and the sea")
    page.reload()
    expect(page.locator("#shown")).to_have_text("Sky")
    expect(page.locator("textarea")).to_have_value("and the sea")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#shown")).to_have_text("-")
    expect(page.locator("textarea")).to_have_value("")
    assert json.loads(page.evaluate("penstock.current()"))["settings"] == {"model": "m"}
    page.get_by_role("button", name="Sky", exact=True).click()
    expect(page.locator("textarea")).to_have_value("and the sea")


@pytest.mark.nightly
def test_search_reads_titles_and_texts_and_a_title_is_only_text(context: BrowserContext) -> None:
    page = start(context)
    take(page, said("a1", "Sky", "why is it BLUE?"))
    take(page, said("a2", HOSTILE, "grass"))
    listed = page.locator("#penstock-history .open")
    expect(listed).to_have_count(2)
    page.keyboard.press("Control+k")
    page.keyboard.type("blue why")
    expect(listed).to_have_text(["Sky"])
    page.get_by_role("searchbox").fill("onerror")
    expect(listed).to_have_count(1)
    page.get_by_role("searchbox").fill("nothing such")
    expect(page.get_by_text("No chat has these words.")).to_be_visible()
    assert page.evaluate("window.hacked") is None


@pytest.mark.nightly
def test_rename_delete_and_undo(context: BrowserContext) -> None:
    page = start(context)
    take(page, said("a1", "Sky", "x"))
    take(page, said("a2", "Sea", "y"))
    page.get_by_role("button", name="Menu of Sky").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.get_by_role("textbox", name="New title").fill("Heaven")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Heaven", exact=True)).to_be_visible()
    page.get_by_role("button", name="Menu of Sea").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(page.locator("#penstock-history .open")).to_have_text(["Heaven"])
    expect(page.locator("#shown")).to_have_text("-")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#penstock-history .open")).to_have_count(2)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete all").click()
    expect(page.get_by_text("Your chats stay in this browser.")).to_be_visible()
    page.reload()
    expect(page.get_by_text("Your chats stay in this browser.")).to_be_visible()


@pytest.mark.nightly
def test_export_and_import(context: BrowserContext) -> None:
    page = start(context)
    one = said("a1", "Why: the sky?", "x")
    take(page, one)
    with page.expect_download() as exported:
        page.get_by_role("button", name="Export all").click()
    file = exported.value.path()
    assert json.loads(file.read_text()) == [one]
    page.get_by_role("button", name="Menu of Why: the sky?").click()
    with page.expect_download() as exported:
        page.get_by_role("menuitem", name="Export as Markdown").click()
    assert exported.value.suggested_filename == "Why-the-sky.md"
    assert exported.value.path().read_text() == "# Why: the sky?"
    chooser = page.locator("input[type=file]")
    body = json.dumps([one, {**one, "updated_at": 5.0}, said("a3", HOSTILE, "z")])
    chooser.set_input_files({"name": "chats.json", "mimeType": "application/json", "buffer": body.encode()})
    expect(page.get_by_text("2 imported, 1 already here.")).to_be_visible()
    expect(page.locator("#penstock-history .open")).to_have_count(3)
    chooser.set_input_files({"name": "bad.json", "mimeType": "application/json", "buffer": b"<b>"})
    expect(page.get_by_text("Could not import bad.json: cannot read the conversations. Give JSON.")).to_be_visible()
    assert page.evaluate("window.hacked") is None


@pytest.mark.nightly
def test_two_tabs_share_the_list_and_lose_nothing(context: BrowserContext) -> None:
    left, right = start(context), start(context)
    take(left, said("a1", "Sky", "x"))
    expect(right.get_by_role("button", name="Sky", exact=True)).to_be_visible()
    assert json.loads(right.evaluate("penstock.current()"))["turns"] == {}
    right.get_by_role("button", name="Sky", exact=True).click()
    right.wait_for_function("JSON.parse(penstock.current()).id == 'a1'")
    right.evaluate(BUSY)  # it takes nothing from others
    for page, turn in ((left, "left"), (right, "right")):
        more = {"id": turn, "parent": "a1-q", "role": "assistant", "text": turn}
        page.evaluate("(news) => penstock.took(news)", {"id": "a1", "updated_at": 1.9e9, "leaf": turn, "turn": more})
    # Not by asking the page for its conversation: that would tell the server of the other tab's turn.
    right.wait_for_function(STORED, arg=["a1", 3])
    whole = said("a1", "Sky", "x", 1.95e9)  # the server's, which knows nothing of the other tab
    whole["turns"]["right"] = {"id": "right", "parent": "a1-q", "role": "assistant", "text": "right, done"}
    right.evaluate("(one) => penstock.took(one)", whole)
    expect(left.locator("#shown")).to_have_text("Sky")
    left.wait_for_function("Object.keys(JSON.parse(penstock.current()).turns).length == 3")
    right.wait_for_function("Object.keys(JSON.parse(penstock.current()).turns).length == 3")


@pytest.mark.nightly
def test_an_answer_that_arrives_late_is_kept_where_it_belongs(context: BrowserContext) -> None:
    page = start(context)
    take(page, said("a1", "Sky", "x"))
    page.evaluate(BUSY)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#penstock-stop")).to_be_hidden()
    expect(page.locator("#shown")).to_have_text("-")
    late = {"id": "late", "parent": "a1-q", "role": "assistant", "text": "late"}
    page.evaluate("(news) => penstock.took(news)", {"id": "a1", "updated_at": 1.9e9, "leaf": "late", "turn": late})
    assert json.loads(page.evaluate("penstock.current()"))["id"] != "a1"
    page.get_by_role("button", name="Sky", exact=True).click()
    page.wait_for_function("JSON.parse(penstock.current()).turns.late?.text == 'late'")


@pytest.mark.nightly
def test_a_full_browser_says_so_and_the_chat_goes_on(context: BrowserContext) -> None:
    page = start(context)
    page.evaluate(
        "() => { IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"
    )
    take(page, said("a1", "Sky", "x"))
    expect(page.get_by_text("This browser has no room for more.")).to_be_visible()
    assert json.loads(page.evaluate("penstock.current()"))["id"] == "a1"


@pytest.mark.nightly
def test_a_browser_without_storage_keeps_chats_until_the_tab_closes(context: BrowserContext) -> None:
    context.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('no'); } })")
    page = start(context)
    take(page, said("a1", "Sky", "x"))
    take(page, said("a2", "Sea", "y"))
    page.get_by_role("button", name="Sky", exact=True).click()
    expect(page.locator("#shown")).to_have_text("Sky")


@pytest.mark.nightly
def test_shortcuts_and_the_chip(context: BrowserContext) -> None:
    page = start(context)
    expect(page.locator("#penstock-state")).to_have_text("loading 45 %, 12 s")
    page.locator("textarea").fill("what?")
    page.keyboard.type("?")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.locator("h1").click()
    page.keyboard.type("?")
    expect(page.get_by_role("dialog")).to_contain_text("Stop the answer")
    page.keyboard.press("Escape")
    page.evaluate(BUSY)
    expect(page.locator("#penstock-stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#penstock-stop")).to_be_hidden()
    page.keyboard.press("Control+b")
    expect(page.locator("#penstock-history")).to_be_hidden()
    page.keyboard.press("Control+k")
    expect(page.get_by_role("searchbox")).to_be_focused()
