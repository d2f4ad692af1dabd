"""Several logs as one stream of lines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

from penstock.errors import PenstockError

_QUEUED_LINES = 10_000


def named(front: str, lines: Iterator[str]) -> Iterator[str]:
    """These lines with a word in front of each."""
    return (f"{front} {line}" for line in lines)


def in_turn(sources: Sequence[Iterator[str]]) -> Iterator[str]:
    """Lines of one source after the other. When all have been read it raises the first PenstockError of theirs."""
    errors = []
    for source in sources:
        try:
            yield from source
        except PenstockError as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


def as_they_come(sources: Sequence[Iterator[str]]) -> Iterator[str]:
    """Lines of all sources as they come, until all have ended or one of them fails: its error is raised at once.

    Each is read by a thread of its own, which waits when nobody takes its lines.
    """
    arrived: queue.Queue[str | Exception | None] = queue.Queue(_QUEUED_LINES)

    def pump(source: Iterator[str]) -> None:
        end: Exception | None = None
        try:
            for line in source:
                arrived.put(line)
        except Exception as exc:  # noqa: BLE001 - raised where the lines are read
            end = exc
        arrived.put(end)

    for source in sources:
        threading.Thread(target=pump, args=(source,), daemon=True).start()
    n_left = len(sources)
    while n_left:
        got = arrived.get()
        if isinstance(got, Exception):
            raise got
        if got is None:
            n_left -= 1
        else:
            yield got
