"""What a model wrote, as Markdown that the page may show. Pure, and linear in the length of what is hostile, too.

The page's renderer takes HTML and loads images, and would find formulas between the prices of "$5 and $6". So HTML
outside code becomes text, images of other hosts become links, and what is a formula gets delimiters that no text has.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

# Private-use characters: https://www.unicode.org/charts/PDF/UE000.pdf
DISPLAY: Final = ("\ue000", "\ue001")
INLINE: Final = ("\ue002", "\ue003")
_PRIVATE = re.compile("[\ue000-\ue003]")
# Models indent the code of lists and quotes. https://spec.commonmark.org/0.31.2/#fenced-code-blocks
_FENCE = re.compile(r"(?:[ \t]|>|[-*+][ \t]|\d{1,9}[.)][ \t])*+(`{3,}(?=[^`\n]*+$)|~{3,})", re.MULTILINE)
_SECTION_CHARS = 12_000
_TOP = re.compile(r"[^\W\d_]|#")  # a paragraph or heading that belongs to no list, quote or table
_LINE = re.compile(r"[^\n]*+\n|[^\n]++")
# What may begin code or a formula; an escaped character begins neither.
_OPENING = re.compile(r"\\\[|\\\(|\\.|`+|\$\$|(?<![$\w])\$(?![\s$])", re.DOTALL)
_CLOSING = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
_SINGLE = re.compile(r"\$((?:\\.|[^$\\\n])+?)(?<!\s)\$(?![\d\w$])")
# Tags that tables and chemistry need, without attributes.
_TAG = re.compile(r"<(?!/?(?:br|sub|sup)\s*/?>|https?://[^\s<>]*+>)(?=[A-Za-z/!?])", re.IGNORECASE)
_IMAGE = re.compile(r"!\[([^\]\[]*+)\]\(\s*+<?(?!data:image/)([^)(\s>]*+)[^)(]*+\)")
_ANY_IMAGE = re.compile(r"!(?=\[)(?!\[[^\]\[]*+\]\(\s*+<?data:image/)")


class Markup:
    """A text that grows: `add` gives all of it as it is shown, in sections. What is settled is done once.

    A browser lays a section out again at each change, so that an answer of 30,000 tokens in one would stall it.
    """

    def __init__(self) -> None:
        self._sections: list[str] = []
        self._done, self._rest, self._fence = "", "", ""

    def add(self, text: str) -> list[str]:
        self._rest += text.replace("\r", "")
        parts = list(_parts(self._rest, self._fence))
        n_settled = next((at for at, part in enumerate(parts) if not part.is_settled), len(parts))
        done, length = [self._done], len(self._done)
        for part in parts[:n_settled]:
            if length >= _SECTION_CHARS and not part.is_code and _TOP.match(part.text):
                self._sections.append("".join(done))
                done, length = [], 0
            done.append(_drawn(part))
            length += len(done[-1])
            self._fence = part.fence
        self._done = "".join(done)
        self._rest = "".join(part.text for part in parts[n_settled:])
        last = self._done + "".join(map(_drawn, parts[n_settled:]))
        return [*self._sections, last] if last else [*self._sections]


def sections(text: str) -> list[str]:
    """The whole of a text in sections, as `Markup` gives it."""
    return Markup().add(text)


def shown(text: str) -> str:
    """The whole of a text, as the page may show it: '<b> $x$ costs $5' -> '&lt;b> \\ue002x\\ue003 costs $5'."""
    return "".join(sections(text))


class _Part(NamedTuple):
    """A line of fenced code, or a paragraph. `fence`: open after it; `is_settled`: more text cannot change it."""

    text: str
    is_code: bool
    fence: str
    is_settled: bool


def _parts(text: str, fence: str) -> Iterator[_Part]:
    start = at = 0
    is_formula = False
    for line in _LINE.findall(text):
        at += len(line)
        before, (is_code, fence) = fence, _step(line, fence)
        is_formula ^= not is_code and line.count("$$") % 2 == 1
        if not is_code and (is_formula or line.strip()):
            continue
        end, is_settled = at - len(line) if is_code else at, line.endswith("\n")
        if end > start:
            yield _Part(text[start:end], False, before, is_settled)
        if is_code:
            yield _Part(line, True, fence, is_settled)
        start, is_formula = at, False
    if at > start:
        yield _Part(text[start:], False, fence, False)


def _step(line: str, fence: str) -> tuple[bool, str]:
    """Whether a line is code or its fence, and the fence that is open after it."""
    mark = _FENCE.match(line)
    if not fence:
        return mark is not None, mark[1] if mark else ""
    is_end = mark is not None and mark[1].startswith(fence) and not line[mark.end() :].strip()
    return True, "" if is_end else fence


def _drawn(part: _Part) -> str:
    return part.text if part.is_code else _prose(part.text)


def _prose(text: str) -> str:
    """Code spans stay, formulas get their delimiters, the rest is made harmless."""
    pieces: list[str] = []
    at = position = 0
    runs: dict[str, list[int]] = {}
    for run in re.finditer("`+", text):
        runs.setdefault(run[0], []).append(run.start())
    absent: set[str] = set()  # delimiters that do not come again: looked for once
    while opening := _OPENING.search(text, position):
        mark, start, position = opening[0], opening.start(), opening.end()
        if mark[0] == "`":
            places = runs.get(mark, ())
            if (place := bisect_left(places, position)) < len(places):
                position = places[place] + len(mark)
                pieces += [_harmless(text[at:start]), text[start:position]]
                at = position
        elif mark in _CLOSING and mark not in absent:
            end = text.find(_CLOSING[mark], position)
            if end < 0:
                absent.add(mark)
            elif text[position:end].strip():
                delimiters = INLINE if mark == "\\(" else DISPLAY
                pieces += [_harmless(text[at:start]), _delimited(text[position:end], delimiters)]
                at = position = end + 2
        elif mark == "$" and (formula := _SINGLE.match(text, start)):
            pieces += [_harmless(text[at:start]), _delimited(formula[1], INLINE)]
            at = position = formula.end()
    return "".join([*pieces, _harmless(text[at:])])


def _delimited(tex: str, delimiters: tuple[str, str]) -> str:
    left, right = delimiters
    return left + _PRIVATE.sub("", tex).replace("<", "\\lt ").replace(">", "\\gt ") + right


def _harmless(text: str) -> str:
    text = _PRIVATE.sub("", text)
    text = _IMAGE.sub(lambda image: f"[image: {image[1] or 'without a name'}]({image[2]})", text)
    return _TAG.sub("&lt;", _ANY_IMAGE.sub("&#33;", text))
