"""The lines below questions and answers: figures, the clock, errors and buttons, as HTML.

Everything that comes from a model, a server or a visitor is escaped. Buttons say in data attributes what they do;
chat.js listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.chat import statistics
from penstock.chat.conversation import Turn
from penstock.chat.failures import Failure

_CUT_OFF = ("length", statistics.STOPPED, statistics.UNFINISHED)
_GO_ON = "Let the model go on where the answer ends"


def clock(words: str, elapsed_s: float) -> str:
    """ "in the queue: 3 before you · 4 s"."""
    return f'<div class="penstock-foot penstock-clock">{escape(words)} · {elapsed_s:.0f} s</div>'


def footer(turn: Turn, branches: Sequence[str], failure: Failure | None = None, is_open: bool = False) -> str:
    """What belongs below a turn that is whole. `is_open`: a question that nothing answers."""
    is_answer = turn.role == "assistant"
    whose = "answer" if is_answer else "question"
    parts = [_error(turn, failure)] if turn.error else []
    buttons = [*_branch_buttons(turn, branches, whose), _button("copy", turn.id, "Copy", f"Copy this {whose}")]
    if is_answer:
        figures = statistics.line(turn.statistics) if turn.statistics else ""
        parts.append(f'<span class="penstock-figures">{escape(figures)}</span>')
        buttons.append(_button("retry", turn.id, "Retry", "Ask again; this answer stays as a branch"))
        if turn.text and not turn.error and turn.finish_reason in _CUT_OFF:
            buttons.append(_button("continue", turn.id, "Continue", _GO_ON))
    else:
        if is_open:
            buttons.append(_button("retry", turn.id, "Ask", "Ask this question, which has no answer"))
        buttons.append(_button("edit", turn.id, "Edit", "Edit this question; the old one stays as a branch"))
    buttons.append(_button("delete", turn.id, "Delete", f"Delete this {whose} and what follows"))
    parts.append(f'<span class="penstock-acts" role="group" aria-label="This {whose}">{"".join(buttons)}</span>')
    return f'<div class="penstock-foot">{"".join(parts)}</div>'


def images(urls: Sequence[str]) -> str:
    tags = (f'<img src="{escape(url)}" alt="image {place} of the question">' for place, url in enumerate(urls, 1))
    return f'<div class="penstock-images">{"".join(tags)}</div>'


def _error(turn: Turn, failure: Failure | None) -> str:
    """The sentence, and the one action that helps."""
    kind = failure.kind if failure else ""
    buttons = []
    if kind == "key":
        buttons.append('<a href="login">Log in again</a>')
    elif kind == "too_long" and failure:
        over = f' data-over="{failure.over_tokens or 1}"'
        buttons.append(_button("shrink", turn.id, "Leave out the oldest messages and ask again", more=over))
    elif kind == "system":
        buttons.append(_button("plain", turn.id, "Ask again without the system message"))
    elif kind == "overload" and failure and failure.retry_after_s is not None:
        after = f' data-in="{failure.retry_after_s:.0f}"'
        buttons.append(_button("retry", turn.id, "Ask again", more=after))
    elif turn.text:
        buttons.append(_button("continue", turn.id, "Continue", _GO_ON))
    text = escape(turn.error or "")
    return f'<div class="penstock-error" role="alert"><span>{text}</span> {"".join(buttons)}</div>'


def _branch_buttons(turn: Turn, branches: Sequence[str], whose: str) -> list[str]:
    if len(branches) < 2:
        return []
    at = branches.index(turn.id)
    before = _button("choose", branches[at - 1] if at else None, "‹", f"Previous {whose}")
    after = _button("choose", branches[at + 1] if at + 1 < len(branches) else None, "›", f"Next {whose}")
    return [before, f"<span>{at + 1}/{len(branches)}</span>", after]


def _button(act: str, turn_id: str | None, label: str, title: str = "", more: str = "") -> str:
    about = f' data-turn="{escape(turn_id)}"' if turn_id is not None else " disabled"
    named = f' title="{escape(title)}"' if title else ""
    named += f' aria-label="{escape(title)}"' if label in "‹›" else ""
    return f'<button type="button" data-act="{act}"{about}{named}{more}>{label}</button>'
