"""Waits for what a place's API says."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.4


def wait(is_so: Callable[[], object], timeout_s: float) -> bool:
    """Whether it became so in time. Blocks."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True
