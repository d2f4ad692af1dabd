"""Copies the logs of a run folder to standard output, which is the log of the container, with each line's part."""

from __future__ import annotations

from pathlib import Path

from penstock.log_lines import LogReader

PARTS = ("replica-*", "gateway", "controller", "prometheus", "ui")


class LogCopy:
    """Reads on where it stopped. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[Path, LogReader] = {}

    def lines(self) -> list[str]:
        """What was written since the last call, each line behind "[PART] "."""
        paths = [path for part in PARTS for path in sorted(self._folder.glob(f"{part}.log"))]
        readers = {path: self._readers.setdefault(path, LogReader(path)) for path in paths}
        return [
            f"[{path.stem}] {line.decode('utf-8', 'replace')}"
            for path, reader in readers.items()
            for line in reader.lines()
        ]
