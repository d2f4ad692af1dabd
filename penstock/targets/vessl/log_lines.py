"""A unit's lines in the log of a container, which writes each behind "[PART] "."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from penstock.errors import PenstockError
from penstock.log_lines import last_words
from penstock.run_folder import Unit
from penstock.targets.vessl.api import LogLine

# All lines from that time on (Unix seconds), the oldest first.
Read = Callable[[float], list[LogLine]]

_POLL_S = 3.0
_LATE_S = 5.0  # lines come late and out of order: the newest are held back for so long, as VESSL's CLI does
_NEXT_S = 1e-6
_sleep, _clock = time.sleep, time.time  # tests replace them


def lines(read: Read, unit: Unit, follow: bool, last: int | None, has_ended: Callable[[], bool]) -> Iterator[str]:
    """All of a unit's lines, or the `last`; with `follow` then more, until `has_ended`.  Raises PenstockError."""
    front = f"[{unit.kind}-{unit.name}] " if unit.kind == "replica" else f"[{unit.kind}] "
    is_over = has_ended() if follow else True
    rows = _settled(read(0.0), is_over)
    shown = [text for row in rows for text in _of(row, front)]
    yield from shown if last is None else shown[len(shown) - min(last, len(shown)) :]
    while not is_over:
        _sleep(_POLL_S)
        since = rows[-1].timestamp + _NEXT_S if rows else 0.0
        try:
            is_over = has_ended()
            more = _settled(read(since), is_over)
        except PenstockError as exc:
            if not exc.is_retryable:
                raise
            is_over = False
            continue  # the next look may succeed
        yield from (text for row in more for text in _of(row, front))
        rows = more or rows


def own_words(read: Read) -> str | None:
    """Why a container could not start, in its own words; None where there are none."""
    return last_words(own_lines(read))


def own_lines(read: Read) -> list[str]:
    """What the container said that no part wrote; none where VESSL does not answer."""
    with contextlib.suppress(PenstockError):
        return [text for row in read(0.0) for text in row.message.splitlines() if text and not text.startswith("[")]
    return []


def _settled(rows: list[LogLine], is_over: bool) -> list[LogLine]:
    """Without those that an older line may still come before."""
    until = _clock() - _LATE_S
    return rows if is_over else [row for row in rows if row.timestamp <= until]


def _of(line: LogLine, front: str) -> list[str]:
    return [text.removeprefix(front) for text in line.message.splitlines() if text.startswith(front)]
