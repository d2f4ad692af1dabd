"""What the chat page's tests in Chromium share: for each module of tests one browser and one process of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chat_page_driver import People, log_in
from chat_page_rig import ChatPage, chat_page
from chromium import chromium
from playwright.sync_api import Browser


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
