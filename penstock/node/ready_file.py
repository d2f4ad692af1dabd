"""The file of a readiness probe: it exists while this node is ready, and at no other time."""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.paths import write_atomically


class ReadyFile:
    """Nothing where `path` is None. A file that an earlier process left is removed at once."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._is_ready = True
        self.set(is_ready=False)

    def set(self, *, is_ready: bool) -> None:
        if self._path is None or is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        with contextlib.suppress(OSError):  # a full disk must not end an engine; the probe fails then
            if is_ready:
                write_atomically(self._path, b"ready\n")
            else:
                self._path.unlink(missing_ok=True)
