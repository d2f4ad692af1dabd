"""A unit's lines in the log of a run: the container writes each behind "[PART] "."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from penstock.errors import PenstockError
from penstock.run_folder import Unit
from penstock.targets.vessl.api import Api, LogLine

_PAGE = 1000
_POLL_S = 3.0
_LATE_S = 5.0  # lines come late and out of order: the newest are held back for so long, as VESSL's CLI does
_NEXT_S = 1e-6
_sleep, _clock = time.sleep, time.time  # tests replace them


def lines(
    api: Api, execution_id: int, unit: Unit, follow: bool, last: int | None, has_ended: Callable[[], bool]
) -> Iterator[str]:
    """All of a unit's lines, or the `last`; with `follow` then more, until the run has ended.  Raises PenstockError."""
    front = f"[{unit.kind}-{unit.name}] " if unit.kind == "replica" else f"[{unit.kind}] "
    shown, since = list[str](), 0.0
    for line in _pages(api, execution_id, 0.0, _clock() - _LATE_S if follow else None):
        since = line.timestamp + _NEXT_S
        shown += _of(line, front)
    yield from shown if last is None else shown[len(shown) - min(last, len(shown)) :]
    while follow:
        is_over = has_ended()
        for line in _pages(api, execution_id, since, None if is_over else _clock() - _LATE_S):
            since = line.timestamp + _NEXT_S
            yield from _of(line, front)
        if is_over:
            return
        _sleep(_POLL_S)


def _of(line: LogLine, front: str) -> list[str]:
    return [text.removeprefix(front) for text in line.message.splitlines() if text.startswith(front)]


def _pages(api: Api, execution_id: int, since: float, until: float | None) -> Iterator[LogLine]:
    """Lines from that time on, page by page."""
    for _ in itertools.count():
        try:
            page = api.logs(execution_id, since, _PAGE)
        except PenstockError as exc:
            if not exc.is_retryable or since == 0.0:
                raise
            return  # while a log is followed, the next look may succeed
        old = [line for line in page if until is None or line.timestamp <= until]
        yield from old
        if len(page) < _PAGE or len(old) < len(page):
            return
        since = page[-1].timestamp + _NEXT_S
