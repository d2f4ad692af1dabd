"""The progress display of a start."""

from __future__ import annotations

import json
import os
import time
from typing import IO, Any

from penstock.cli.status_text import progress_text
from penstock.run_folder import ReplicaStatus, State
from penstock.wire.announcement import Progress


class StartDisplay:
    """Shows a start: a live bar per replica on a terminal, a line per change elsewhere, events with `as_json`."""

    def __init__(self, stream: IO[str], as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json
        self._live = stream.isatty() and not as_json and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()
        self._last: dict[str, str] = {}
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> StartDisplay:
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}  {task.fields[words]}"),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, state: State) -> None:
        """Show a state; called for every change."""
        for replica in state.replicas:
            if self._bars is not None:
                self._show_bar(replica)
            elif self._as_json:
                self._show_event(replica)
            else:
                self._show_line(replica)

    def _show_bar(self, replica: ReplicaStatus) -> None:
        progress = _progress(replica)
        fields = {"state": replica.state, "words": progress_text(replica)[:80]}
        if replica.replica not in self._tasks:
            self._tasks[replica.replica] = self._bars.add_task(f"replica {replica.replica}", total=1.0, **fields)
        done = 1.0 if replica.state == "ready" else progress.fraction or 0.0 if progress else 0.0
        self._bars.update(self._tasks[replica.replica], completed=done, **fields)

    def _show_event(self, replica: ReplicaStatus) -> None:
        import msgspec

        progress = _progress(replica)
        facts = msgspec.to_builtins(progress) if progress else None
        event = {"event": "progress", "replica": replica.replica, "state": replica.state, "progress": facts}
        self._print_change(replica, json.dumps(event | {"reason": replica.reason}))

    def _show_line(self, replica: ReplicaStatus) -> None:
        elapsed = time.monotonic() - self._began
        front = f"[{elapsed:5.1f} s] replica {replica.replica}: "
        self._print_change(replica, f"{replica.state} {progress_text(replica)}".strip(), front)

    def _print_change(self, replica: ReplicaStatus, text: str, front: str = "") -> None:
        if self._last.get(replica.replica) != text:
            self._last[replica.replica] = text
            print(front + text, file=self._stream, flush=True)


def _progress(replica: ReplicaStatus) -> Progress | None:
    return replica.announcement.progress if replica.announcement else None
