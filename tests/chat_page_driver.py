"""A person in front of the chat page, in Chromium: what the browser tests do, by what is on the screen.

A module of tests that imports the fixtures has one browser and one process of the page.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from chat_page_rig import ChatPage, chat_page
from chromium import WAIT_S, chromium
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request, expect
from waiting import until

WIDE, PHONE = {"width": 1360, "height": 900}, {"width": 360, "height": 740}
# Whether the browser's database has the end of this tab's conversation. One without turns is not kept.
_IS_KEPT = """() => new Promise((tell) => {
  const { id, turns, leaf } = JSON.parse(penstock.current());
  const opening = indexedDB.open("penstock");
  opening.onsuccess = () => {
    const reading = opening.result.transaction("conversations").objectStore("conversations").get(id);
    reading.onsuccess = () => {
      opening.result.close();
      tell(!leaf || JSON.stringify(reading.result?.turns[leaf]) === JSON.stringify(turns[leaf]));
    };
  };
})"""
# What Chromium says of a page's own requests that fail on purpose: the tests of failures allow it.
_NETWORK = re.compile("AbortError|network ?error|Connection errored|Failed to|ERR_|EventSource", re.IGNORECASE)


class Chat:
    """One tab. Locators and `expect` wait."""

    def __init__(self, page: Page, rig: ChatPage) -> None:
        self.page, self.rig = page, rig
        self.box = page.locator("#penstock-message textarea")
        self.conversation = page.locator("#penstock-chat")
        self.figures = page.locator(".penstock-figures")  # below each answer that has ended
        self.clock = page.locator(".penstock-clock")  # below the answer that grows
        self.error = page.locator(".penstock-error")
        self.chats = page.locator("#penstock-history li .open")
        self.stop = page.locator("button#penstock-stop, #penstock-stop button")
        self.chip = page.locator("#penstock-state")

    def ask(self, text: str, shows: str | None = None) -> None:
        """Until the conversation shows that."""
        self.box.fill(text)
        self.box.press("Enter")
        if shows is not None:
            expect(self.conversation).to_contain_text(shows)

    def ask_and_wait(self, text: str, answer: str | None = None) -> None:
        """Until the answer is whole, and kept."""
        n_before = self.figures.count()
        self.ask(text, answer or f"You said: {text}")
        self.wait_answered(n_before + 1)

    def act(self, name: str) -> Locator:
        """The buttons below questions and answers: copy, retry, edit, delete, choose, continue, shrink."""
        return self.page.locator(f"button[data-act={name}]")

    def wait_answered(self, n: int = 1) -> None:
        """Until there are figures below `n` answers, and the last is kept."""
        expect(self.figures).to_have_count(n)
        self.wait_over()

    def wait_over(self) -> None:
        """Until the last event is over, and kept: the page is drawn a moment before."""
        expect(self.page.locator("body.penstock-busy")).to_have_count(0)
        self.wait_kept()

    def wait_kept(self, text: str | None = None) -> None:
        """Until what this tab has outlives it; `text`: of the answer that grows."""
        if text is not None:
            until(lambda: self.leaf["text"] == text, f"{text!r} has come")
        self.page.wait_for_function(_IS_KEPT)

    @property
    def leaf(self) -> dict[str, Any]:
        """The last turn of what is kept in this tab."""
        conversation = self.stored()
        return conversation["turns"][conversation["leaf"]]  # type: ignore[no-any-return]

    def stored(self) -> dict[str, Any]:
        """This tab's conversation, as the browser has it."""
        return json.loads(self.page.evaluate("penstock.current()"))  # type: ignore[no-any-return]

    def texts(self) -> list[str]:
        """Of all turns, the oldest first."""
        return [turn["text"] for turn in self.stored()["turns"].values()]

    def new(self) -> None:
        """A new conversation, when it is drawn."""
        self.page.get_by_role("button", name="New chat").click()
        expect(self.figures).to_have_count(0)


class People:
    """Tabs of one test, logged in unless told otherwise; no request went to another host and no script failed."""

    def __init__(self, browser: Browser, rig: ChatPage, cookies: list[Any]) -> None:
        self.browser, self.rig, self.cookies = browser, rig, cookies
        self.contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.origins = {f"127.0.0.1:{rig.port}"}

    def context(self, *, is_logged_in: bool = True, **options: Any) -> BrowserContext:
        context = self.browser.new_context(**{"viewport": WIDE, "timezone_id": "UTC", **options})
        context.set_default_timeout(1000 * WAIT_S)
        if is_logged_in:
            context.add_cookies(self.cookies)
        self.contexts.append(context)
        return context

    def tab(self, context: BrowserContext | None = None, *, url: str | None = None, **options: Any) -> Page:
        page = (context or self.context(**options)).new_page()
        page.on("request", self._note)
        page.on("console", lambda message: self._complain(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url or self.rig.url)
        return page

    def chat(self, context: BrowserContext | None = None, **options: Any) -> Chat:
        """A tab whose message box can be typed in."""
        chat = Chat(self.tab(context, **options), self.rig)
        expect(chat.box).to_be_visible()
        return chat

    def __enter__(self) -> People:
        return self

    def __exit__(self, *_: object) -> None:
        for context in self.contexts:
            context.close()
        assert not self.complaints, self.complaints
        assert self.hosts <= self.origins, self.hosts

    def _note(self, request: Request) -> None:
        if request.url.startswith("http"):
            self.hosts.add(request.url.split("/")[2])

    def _complain(self, text: str) -> None:
        if not _NETWORK.search(text):
            self.complaints.append(text)


def violations(page: Page) -> list[str]:
    """Serious and critical ones of axe, with where they are."""
    rules = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {[node['html'][:200] for node in rule['nodes']][:4]}"
        for rule in rules
        if rule["impact"] in ("serious", "critical")
    ]


def log_in(browser: Browser, rig: ChatPage, name: str = "ann") -> list[Any]:
    """The cookies of somebody who came by the address that `penstock ui` opens."""
    with contextlib.closing(browser.new_context()) as context:
        context.set_default_timeout(1000 * WAIT_S)
        page = context.new_page()
        page.goto(f"{rig.url}#key={rig.make_key(name)}")
        page.locator("#penstock-message textarea").wait_for()
        assert "key=" not in page.url
        cookies: list[Any] = context.cookies()
        return cookies


@pytest.fixture(scope="module", name="browser")
def browser_fixture() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", name="rig")
def rig_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatPage]:
    with chat_page(tmp_path_factory.mktemp("chat-page")) as rig:
        yield rig


@pytest.fixture(scope="module", name="cookies")
def cookies_fixture(browser: Browser, rig: ChatPage) -> list[Any]:
    """Of somebody who is logged in."""
    return log_in(browser, rig)


@pytest.fixture(name="people")
def people_fixture(browser: Browser, rig: ChatPage, cookies: list[Any]) -> Iterator[People]:
    rig.answers.clear()
    rig.engine.asked.clear()
    with People(browser, rig, cookies) as people:
        yield people
