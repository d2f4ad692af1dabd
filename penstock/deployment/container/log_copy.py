"""Copies the logs of a run folder to standard output, which is the log of the container, with each line's part."""

from __future__ import annotations

from pathlib import Path

_PIECE_BYTES = 256 * 1024
PARTS = ("replica-*", "gateway", "controller", "prometheus", "ui")


class LogCopy:
    """Reads on where it stopped. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[int, int]] = {}  # inode and bytes

    def lines(self) -> list[str]:
        """What was written since the last call, each line behind "[PART] "."""
        paths = [path for part in PARTS for path in sorted(self._folder.glob(f"{part}.log"))]
        return [line for path in paths for line in self._of(path)]

    def _of(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as stream:
                facts = path.stat()
                inode, n_read = self._read.get(path, (facts.st_ino, 0))
                if inode != facts.st_ino or facts.st_size < n_read:  # it was rotated
                    n_read = 0
                stream.seek(n_read)
                piece = stream.read(_PIECE_BYTES)
        except OSError:
            return []
        whole, _, rest = piece.rpartition(b"\n")
        if not whole and len(piece) == _PIECE_BYTES:  # a line without an end
            whole, rest = piece, b""
        self._read[path] = (facts.st_ino, n_read + len(piece) - len(rest))
        if not whole:
            return []
        return [f"[{path.stem}] {line}" for line in whole.decode("utf-8", "replace").split("\n")]
