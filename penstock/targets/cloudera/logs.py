"""Logs of units. The API has none, so the pods write files, of which the API gives only the whole."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

# The whole bytes of one log; None while there is none.
Read = Callable[[], bytes | None]

_LOOK_S = 1.5


def lines(reads: Sequence[Read], follow: bool, last: int | None, is_over: Callable[[], bool]) -> Iterator[str]:
    """Lines of all logs, those of the second and later ones with "n1: " in front; `is_over` ends a followed one."""
    ends = [0] * len(reads)
    first = [_new_lines(rank, read, ends, is_whole=not follow) for rank, read in enumerate(reads)]
    kept = list(itertools.chain.from_iterable(first))
    yield from kept if last is None else kept[-last:] if last else []
    while follow and not is_over():
        time.sleep(_LOOK_S)
        for rank, read in enumerate(reads):
            yield from _new_lines(rank, read, ends, is_whole=False)


def _new_lines(rank: int, read: Read, ends: list[int], is_whole: bool) -> list[str]:
    """What was written since the last look; `is_whole`: the line that is begun too."""
    data = read() or b""
    if len(data) < ends[rank]:  # it was begun again
        ends[rank] = 0
    new = data[ends[rank] :]
    cut = len(new) if is_whole else new.rfind(b"\n") + 1
    ends[rank] += cut
    front = f"n{rank}: " if rank else ""
    return [f"{front}{line}" for line in new[:cut].decode("utf-8", "replace").splitlines()]
