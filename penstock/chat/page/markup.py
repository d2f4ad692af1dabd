"""What a model wrote, as Markdown that the page may show. Pure.

The page's renderer takes HTML and loads images, and would find formulas between the prices of "$5 and $6". So HTML
outside code becomes text, images of other hosts become links, and what is a formula gets delimiters that no text has.
"""

from __future__ import annotations

import re
from typing import Final

# Private-use characters: https://www.unicode.org/charts/PDF/UE000.pdf
DISPLAY: Final = ("\ue000", "\ue001")
INLINE: Final = ("\ue002", "\ue003")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_PRIVATE = re.compile("[\ue000-\ue003]")
_CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
# Tags that tables and chemistry need, without attributes.
_TAG = re.compile(r"<(?!/?(?:br|sub|sup)\s*/?>|https?://[^\s<>]*>)(?=[A-Za-z/!?])", re.IGNORECASE)
_IMAGE = re.compile(r"!\[([^\]]*)\]\(\s*<?(?!data:image/)([^)\s>]*)[^)]*\)")
_REFERENCE_IMAGE = re.compile(r"!(?=\[)(?!\[[^\]]*\]\(\s*<?data:image/)")
_SINGLE = r"(?<![\\$\w])\$(?![\s$])((?:\\.|[^$\\\n])+?)(?<!\s)\$(?![\d\w$])"
_FORMULA = re.compile(rf"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|{_SINGLE}", re.DOTALL)


class Markup:
    """A text that grows: `add` gives all of it as it is shown. What stands before the last empty line is done once."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._rest = ""

    def add(self, text: str) -> str:
        self._rest += text
        cut = _last_break(self._rest)
        if cut:
            self._done = ["".join([*self._done, shown(self._rest[:cut])])]
            self._rest = self._rest[cut:]
        return "".join([*self._done, shown(self._rest)])


def shown(text: str) -> str:
    """The whole of a text, as the page may show it: '<b> $x$ costs $5' -> '&lt;b> \\ue002x\\ue003 costs $5'."""
    parts: list[str] = []
    prose: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        is_end = bool(fence and mark and mark[1].startswith(fence) and not line[mark.end() :].strip("`~ \r\n"))
        if not fence and mark is None:
            prose.append(line)
            continue
        parts += [_prose("".join(prose)), line]
        prose = []
        fence = "" if is_end else fence or (mark[1] if mark else "")
    return "".join([*parts, _prose("".join(prose))])


def _prose(text: str) -> str:
    pieces, at = [], 0
    for span in _CODE_SPAN.finditer(text):
        pieces += [_plain(text[at : span.start()]), span[0]]
        at = span.end()
    return "".join([*pieces, _plain(text[at:])])


def _plain(text: str) -> str:
    pieces, at = [], 0
    text = _PRIVATE.sub("", text)
    for formula in _FORMULA.finditer(text):
        pieces += [_harmless(text[at : formula.start()]), _delimited(formula)]
        at = formula.end()
    return "".join([*pieces, _harmless(text[at:])])


def _delimited(formula: re.Match[str]) -> str:
    display, bracketed, inline, single = formula.groups()
    tex = next(part for part in (display, bracketed, inline, single) if part is not None)
    left, right = DISPLAY if display is not None or bracketed is not None else INLINE
    return left + tex.replace("<", "\\lt ").replace(">", "\\gt ") + right


def _harmless(text: str) -> str:
    text = _IMAGE.sub(lambda image: f"[image: {image[1] or 'without a name'}]({image[2]})", text)
    return _TAG.sub("&lt;", _REFERENCE_IMAGE.sub("&#33;", text))


def _last_break(text: str) -> int:
    """Where the last paragraph begins, outside fenced code; 0 where all may still change."""
    cut, at, fence, is_formula = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        is_formula ^= not fence and line.count("$$") % 2 == 1
        if not line.strip() and not fence and not is_formula and line.endswith("\n"):
            cut = at
    return cut
