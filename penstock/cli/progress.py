"""The progress display of a start."""

from __future__ import annotations

import json
import os
import time
from typing import IO, Any

from penstock.cli.status_text import progress_text
from penstock.run_folder import Part, ReplicaStatus, State
from penstock.wire.announcement import ACTIVE, Progress


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
        self._show_part("controller", state.controller)
        self._show_part("gateway", state.gateway)
        for replica in state.replicas:
            if self._bars is not None:
                self._show_bar(replica)
            elif self._as_json:
                self._show_event(replica)
            else:
                self._show_line(replica)
            self._show_loading(replica)

    def _show_part(self, name: str, part: Part) -> None:
        """A part that its target places and that waits: its bar goes when it runs."""
        waits = part.state in ("queued", "starting")
        if not waits and name not in self._last and name not in self._tasks:
            return
        note = (part.note or "") if waits else ""
        if self._bars is not None:
            self._update_bar(name, part.state, note, 0.0 if waits else 1.0)
            self._bars.update(self._tasks[name], visible=waits)
        elif self._as_json:
            event = {"event": "progress", "part": name, "state": part.state, "reason": note or None}
            self._print_change(name, json.dumps(event))
        else:
            self._print_change(name, f"{part.state} {note}".strip(), f"{self._elapsed()} {name}: ")

    def _show_bar(self, replica: ReplicaStatus) -> None:
        progress = _progress(replica)
        done = 1.0 if replica.state in ACTIVE else progress.fraction or 0.0 if progress else 0.0
        self._update_bar(f"replica {replica.replica}", replica.state, progress_text(replica), done)

    def _update_bar(self, name: str, state: str, words: str, done: float) -> None:
        fields = {"state": state, "words": words[:80]}
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=1.0, **fields)
        self._bars.update(self._tasks[name], completed=done, **fields)

    def _show_event(self, replica: ReplicaStatus) -> None:
        import msgspec

        progress = _progress(replica)
        facts = msgspec.to_builtins(progress) if progress else None
        event = {"event": "progress", "replica": replica.replica, "state": replica.state, "progress": facts}
        self._print_change(replica.replica, json.dumps(event | {"reason": replica.reason}))

    def _show_line(self, replica: ReplicaStatus) -> None:
        front = f"{self._elapsed()} replica {replica.replica}: "
        self._print_change(replica.replica, f"{replica.state} {progress_text(replica)}".strip(), front)

    def _show_loading(self, replica: ReplicaStatus) -> None:
        """Once, above the bars: what was measured of the weights' disk, and whose compiled code is used. As JSON it is
        in `penstock events`."""
        node = replica.announcement
        if node is None or self._as_json:
            return
        for kind, words in (("weights", node.loading), ("code", node.carried)):
            key = f"{kind} {replica.replica}"
            if not words:
                continue
            if self._bars is None:
                self._print_change(key, words, f"{self._elapsed()} replica {replica.replica}: ")
            elif self._last.get(key) != words:
                self._last[key] = words
                self._bars.console.print(f"replica {replica.replica}: {words}", markup=False, highlight=False)

    def _elapsed(self) -> str:
        return f"[{time.monotonic() - self._began:5.1f} s]"

    def _print_change(self, key: str, text: str, front: str = "") -> None:
        if self._last.get(key) != text:
            self._last[key] = text
            print(front + text, file=self._stream, flush=True)


def _progress(replica: ReplicaStatus) -> Progress | None:
    return replica.announcement.progress if replica.announcement else None
