"""The suite's own promises: a home for every test; a skip is said aloud, and fails where nothing may be skipped."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quick_tier

from penstock import paths

pause = asyncio.sleep
SKIPPED = ("test_x.py", 3, "Skipped: no such machine")


@pytest.fixture
def conftest(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))


def report(outcome: Any = "skipped") -> pytest.TestReport:
    return pytest.TestReport("test_x.py::test_y", SKIPPED, {}, outcome, SKIPPED, "call")


class Terminal:
    """What pytest's terminal reporter is asked to write."""

    def __init__(self, *reports: pytest.TestReport) -> None:
        self.stats = {"skipped": list(reports)} if reports else {}
        self.text = ""

    def section(self, title: str, **_: object) -> None:
        self.text += title + "\n"

    def write_line(self, line: str) -> None:
        self.text += line + "\n"


def test_skipped_tests_are_listed_with_their_reasons(conftest: Any) -> None:
    terminal, nothing = Terminal(report()), Terminal()
    conftest.pytest_terminal_summary(terminal)
    assert "NOT TESTED: 1 skipped\ntest_x.py::test_y: no such machine\n" in terminal.text
    conftest.pytest_terminal_summary(nothing)
    assert nothing.text == ""


def test_where_all_is_required_a_skip_is_a_failure(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REQUIRE_ALL", "1")
    judged, expected = conftest._judge(report()), report()
    assert judged.outcome == "failed"
    assert judged.longrepr == "skipped, and PENSTOCK_REQUIRE_ALL=1 allows no skip: no such machine"
    expected.wasxfail = "known"
    assert conftest._judge(expected).outcome == "skipped"
    monkeypatch.delenv("PENSTOCK_REQUIRE_ALL")
    assert conftest._judge(report()).outcome == "skipped"


@pytest.mark.parametrize(("marker", "package"), [("vllm", "vllm"), ("llamacpp", "xllamacpp")])
def test_a_test_that_needs_an_absent_engine_is_skipped(
    conftest: Any, monkeypatch: pytest.MonkeyPatch, marker: str, package: str
) -> None:
    class Item:
        def get_closest_marker(self, name: str) -> bool:
            return name == marker

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=f"the package {package} is not installed"):
        conftest.pytest_runtest_setup(Item())


def test_every_test_has_a_home_of_its_own(home: Path, tmp_path: Path) -> None:
    assert paths.home() == home and home.is_relative_to(tmp_path) and not home.exists()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (partial(time.sleep, 0.001), "time.sleep.*World"),
        (lambda: asyncio.run(pause(0.001)), "asyncio.sleep.*World"),
        (lambda: subprocess.run([sys.executable, "-V"]), "subprocess.Popen.*mark it `processes`"),
        (lambda: socket.create_connection(("127.0.0.1", 9)), "socket.connect.*mark it `loopback`"),
        (lambda: socket.socket().bind(("127.0.0.1", 0)), "socket.bind.*mark it `loopback`"),
    ],
)
def test_a_quick_test_may_not_wait_nor_use_processes_or_sockets(act: Callable[[], object], words: str) -> None:
    with pytest.raises(quick_tier.Attempt, match=words):
        act()
    quick_tier.WATCH.attempts.clear()
    asyncio.run(asyncio.sleep(0))


def test_an_attempt_that_the_code_swallowed_fails_its_test_at_the_end() -> None:
    watch = quick_tier.Watch()
    swallowed = contextlib.suppress(quick_tier.Attempt)
    with (
        pytest.raises(quick_tier.Attempt, match="a test of the quick tier: a pause"),
        quick_tier.watched(frozenset(), watch),
        swallowed,
    ):
        watch.refuse("wait", "a pause")
    assert watch.allowed is None
    watch.refuse("wait", "a pause between two tests")


def test_a_thread_that_an_earlier_test_left_is_not_blamed_on_this_one() -> None:
    watch, go, done = quick_tier.Watch(), threading.Event(), list[bool]()

    def left() -> None:
        go.wait()
        watch.refuse("wait", "a pause")
        done.append(True)

    thread = threading.Thread(target=left, daemon=True)
    thread.start()
    with quick_tier.watched(frozenset(), watch):
        go.set()
        thread.join()
    assert done == [True]
