"""The lines below questions and answers."""

from __future__ import annotations

import re

import pytest

from penstock.chat.conversation import Turn
from penstock.chat.failures import Failure
from penstock.chat.page import footers
from penstock.chat.page.footers import footer
from penstock.chat.statistics import Statistics

ANSWER = Turn("a1", "q1", "assistant", "Good morning", finish_reason="stop")


def acts(html: str) -> list[str]:
    return re.findall(r'data-act="([a-z]+)"', html)


def test_buttons_are_those_of_the_role() -> None:
    assert acts(footer(ANSWER, ("a1",))) == ["copy", "retry", "delete"]
    question = Turn("q1", None, "user", "hello")
    assert acts(footer(question, ("q1",))) == ["copy", "edit", "delete"]
    assert acts(footer(question, ("q1",), is_open=True)) == ["copy", "retry", "edit", "delete"]


@pytest.mark.parametrize("reason", ["length", "stopped", "unfinished"])
def test_answer_that_did_not_end_can_go_on(reason: str) -> None:
    cut = Turn("a1", "q1", "assistant", "Good", finish_reason=reason)
    assert "continue" in acts(footer(cut, ("a1",)))


def test_branches_lead_to_the_one_before_and_the_one_after() -> None:
    html = footer(ANSWER, ("a0", "a1"))
    assert '<button type="button" data-act="choose" data-turn="a0" title="Previous answer"' in html
    assert "<span>2/2</span>" in html
    assert 'disabled title="Next answer"' in html


def test_figures_and_errors_are_escaped() -> None:
    figures = Statistics(ttft_s=0.2, replica="<img src=x onerror=alert(1)>")
    broken = Turn("a1", "q1", "assistant", "Good", statistics=figures, error="<script>alert(1)</script>")
    html = footer(broken, ("a1",))
    assert "<script" not in html and "<img" not in html
    assert "continue" in acts(html)
    assert "&lt;b&gt;" in footers.waiting("<b>", 1.0)
    assert '"><script' not in footers.images(['data:image/png;base64,"><script>'])


@pytest.mark.parametrize(
    ("failure", "offered"),
    [
        (Failure("Busy.", "overload", retry_after_s=7), 'data-act="retry" data-turn="a1" data-in="7"'),
        (Failure("Too long.", "too_long", over_tokens=588), 'data-act="shrink" data-turn="a1" data-over="588"'),
        (Failure("No key.", "key"), '<a href="login">'),
        (Failure("No system message.", "system"), 'data-act="plain" data-turn="a1"'),
    ],
)
def test_failure_offers_what_helps(failure: Failure, offered: str) -> None:
    assert offered in footer(Turn("a1", "q1", "assistant", error=failure.text), ("a1",), failure)
