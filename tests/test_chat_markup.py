"""What the page shows of a turn: the model's Markdown, and the line of buttons and figures below."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from golden_files import table
from msgspec.structs import replace

from penstock.chat.conversation import Turn
from penstock.chat.failures import Failure
from penstock.chat.page import footers
from penstock.chat.page import markup as markup_module
from penstock.chat.page.footers import footer
from penstock.chat.page.markup import Markup, sections, shown
from penstock.chat.statistics import Statistics


@pytest.mark.parametrize(("text", "expected"), table("chat/markup.yaml"))
def test_html_and_images_become_text_and_formulas_get_their_delimiters(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_text_that_grows_is_shown_as_the_whole() -> None:
    chance = random.Random(1)
    words = ["`", "``", "```", "\n", "\n\n", "$", "$$", "\\[", "\\]", "\\(", "\\)", "\\", " ", "a", "1", "<b>", "~~~"]
    words += ["![x](http://e/)", "![", "](", ")", "- ", "> ", "\r"]
    for _ in range(1000):
        text = "".join(chance.choices(words, k=chance.randint(1, 14)))
        markup, cuts = Markup(), sorted(chance.choices(range(len(text) + 1), k=3))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert [markup.add(piece) for piece in pieces][-1] == sections(text), text


@pytest.mark.parametrize(
    "text",
    ["\\[ ", "\\( ", "$a ", "$$ ", "$$x", "` ", "`a", "![", "![](", "![a](<", "<a", "<https://", "![x]( ", "```a`\n",
     "```\n~~~\n", "![a]", "- ", "> ", "\n", "$a$b", "\\\\", "![](data:image/", "- ```", "$\\a"],
)  # fmt: skip
def test_hostile_text_costs_no_more_than_its_length(text: str) -> None:
    def cpu_s(n_chars: int) -> float:
        begun = time.process_time()
        shown(text * (n_chars // len(text)))
        return time.process_time() - begun

    # 16 times the text: 16 times the time, and 256 times where it grows with the square, on any machine.
    assert min(cpu_s(20_000) for _ in range(3)) < 64 * max(cpu_s(1_250) for _ in range(3))


def test_code_that_grows_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    n_read = 0

    def counted(text: str, fence: str) -> Iterator[Any]:
        nonlocal n_read
        n_read += len(text)
        return parts(text, fence)

    parts = markup_module._parts
    monkeypatch.setattr(markup_module, "_parts", counted)
    markup, code = Markup(), "x = 1  # <b>\n" * 25
    markup.add("```\n")
    for _ in range(400):
        markup.add(code)
    assert n_read == len("```\n") + 400 * len(code)


def test_long_text_is_cut_where_nothing_hangs_together() -> None:
    text = "Some words of a paragraph.\n\n- item\n\n  more of the item\n\n```\ncode\n\ncode\n```\n\n" * 500
    pieces = sections(text)
    assert "".join(pieces) == text
    assert {piece[:10] for piece in pieces} == {"Some words"}
    assert max(map(len, pieces)) < 13_000
    assert sections("x" * 50_000) == ["x" * 50_000]


# ---- the line below -------------------------------------------------------------------------------------------------

ANSWER = Turn("a1", "q1", "assistant", "Good morning", finish_reason="stop")
QUESTION = Turn("q1", None, "user", "hello")


def acts(html: str) -> list[str]:
    return re.findall(r'data-act="([a-z]+)"', html)


def test_buttons_are_those_of_the_role() -> None:
    assert acts(footer(ANSWER, ("a1",))) == ["copy", "retry", "delete"]
    for reason in ("length", "stopped", "unfinished"):
        cut = replace(ANSWER, finish_reason=reason)
        assert acts(footer(cut, ("a1",))) == ["copy", "retry", "continue", "delete"]
    assert acts(footer(QUESTION, ("q1",))) == ["copy", "edit", "delete"]
    assert acts(footer(QUESTION, ("q1",), is_open=True)) == ["copy", "retry", "edit", "delete"]


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
    assert "&lt;b&gt;" in footers.clock("<b>", 1.0)
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
