"""The verb `top`: a live view of deployments in the terminal.

A thread for each deployment keeps its newest snapshot; the main thread draws once a second and when a key is pressed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli import arguments
from penstock.cli.output import width
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from penstock.cli.terminal import Keyboard
    from penstock.cli.top_text import Watched
    from penstock.run_folder import Run
    from penstock.wire.live import Snapshot

_PERIOD_S = 1.0
_LOOK_S = 5.0  # for deployments that were started since
_RETRY_S = 2.0
_SILENT_S = 4.0  # a snapshot comes each second
_FIRST_S = 5.0  # a gateway that does not answer takes so long
_LOG_S, _LOG_LINES = 2.0, 200
_N_EVENTS = 20


def register(parser: argparse.ArgumentParser) -> None:
    text = "the deployments (default: all that run)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    parser.add_argument("--once", action="store_true", help="print it once, as text; also where there is no terminal")
    arguments.add_json(parser, "print one JSON object a second; with --once, one")
    arguments.complete(parser, _run, ("penstock top", "penstock top qwen", "penstock top --once --json"))


def _run(options: argparse.Namespace) -> int:
    deployments = Deployments(options.names)
    try:
        deployments.wait_first()
        if options.json:
            return _print_json(deployments, options.once)
        if options.once or not _is_terminal():
            return _print_once(deployments)
        return _Screen(deployments).run()
    finally:
        deployments.stop()


def _is_terminal() -> bool:
    """Whether it can move its cursor, and has a keyboard."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _print_json(deployments: Deployments, is_once: bool) -> int:
    import msgspec

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            facts = {"at": round(time.time(), 3), "deployments": deployments.watched()}
            print(msgspec.json.encode(facts).decode(), flush=True)  # NaN is null
            if is_once:
                break
            time.sleep(_PERIOD_S)
    return 0


def _print_once(deployments: Deployments) -> int:
    from penstock.cli import top_text

    seen = deployments.watched()
    print(top_text.once(seen, width(), _clock) if seen else "no deployment runs; start one: penstock up")
    return 0


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


# ---- what is seen ----------------------------------------------------------------------------------------------------


class Deployments:
    """Those of these names, or all that run; the newest figures of each."""

    def __init__(self, names: Sequence[str]) -> None:
        from penstock import run_folder
        from penstock.cli import top_text  # noqa: F401 - so that its types are prepared, and those of the next line
        from penstock.deployment import live, observe  # noqa: F401
        from penstock.wire.structs import prepare_loaded

        prepare_loaded()
        self._is_all = not names
        self._stop = threading.Event()
        self._watchers: dict[str, _Watcher] = {}
        self._looked_at = time.monotonic()
        self._add(run_folder.living() if self._is_all else [run_folder.find(name) for name in dict.fromkeys(names)])

    def watched(self) -> list[Watched]:
        if self._is_all and time.monotonic() - self._looked_at > _LOOK_S:
            from penstock import run_folder

            self._looked_at = time.monotonic()
            self._add(run_folder.living())
        newest = [watcher.newest() for watcher in self._watchers.values()]
        return [watched for watched in newest if watched is not None]

    def run_of(self, name: str) -> Run:
        return self._watchers[name].run

    def wait_first(self) -> None:
        for watcher in self._watchers.values():
            watcher.has_first.wait(_FIRST_S)

    def stop(self) -> None:
        self._stop.set()

    def _add(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.name not in self._watchers:
                self._watchers[run.name] = _Watcher(run, self._stop)


class _Watcher:
    """One deployment: what its gateway streams, and while none answers, what `status` knows."""

    def __init__(self, run: Run, stop: threading.Event) -> None:
        self.run, self._stop = run, stop
        self.watched: Watched | None = None
        self._kept_at = time.monotonic()
        self.has_first = threading.Event()
        threading.Thread(target=self._watch, name=f"top {run.name}", daemon=True).start()

    def _watch(self) -> None:
        from penstock.deployment import live
        from penstock.wire.live import Snapshot

        while not self._stop.is_set():
            note = "it has no gateway"
            try:
                for item in live.follow(self.run):
                    if isinstance(item, Snapshot):
                        self._keep(item, None)
                    if self._stop.is_set():
                        return
            except PenstockError as exc:
                note = exc.message
            except Exception as exc:  # noqa: BLE001 - its traceback would be drawn over the screen
                note = f"penstock failed: {type(exc).__name__}: {exc}"
            with contextlib.suppress(PenstockError, OSError):
                self._keep(None, f"{note}: below is what `status` knows")
            self._stop.wait(_RETRY_S)

    def _keep(self, snapshot: Snapshot | None, note: str | None) -> None:
        from penstock.cli import top_text
        from penstock.deployment import live, observe

        run, address = self.run, None
        state = run.state() if snapshot is not None else observe.now_state(run, time.time())
        events = (snapshot.events if snapshot is not None else ()) or run.events(recent=True)[-_N_EVENTS:]
        with contextlib.suppress(PenstockError):
            address = live.shown(run).url
        self.watched = top_text.join(run.name, snapshot, state, events, address, note)
        self._kept_at = time.monotonic()
        self.has_first.set()

    def newest(self) -> Watched | None:
        """What was seen last; a gateway that hangs is noted before its connection is given up."""
        import msgspec

        silent_s = time.monotonic() - self._kept_at
        if self.watched is None or self.watched.note is not None or silent_s < _SILENT_S:
            return self.watched
        return msgspec.structs.replace(self.watched, note=f"nothing was heard of its gateway for {silent_s:.0f} s")


class _Log:
    """The last lines of one replica's log, read again every two seconds: its target may need that long to answer."""

    def __init__(self, run: Run, replica: str) -> None:
        self.run, self.replica, self.lines = run, replica, list[str]()
        self._is_over = threading.Event()
        threading.Thread(target=self._read, name="top log", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    def _read(self) -> None:
        from penstock.deployment import logs

        while not self._is_over.is_set():
            try:
                self.lines = list(logs.lines(self.run, "replicas", logs.Selection(self.replica, _LOG_LINES)))
            except (PenstockError, OSError) as exc:
                self.lines = [f"could not read its log: {exc}"]
            self._is_over.wait(_LOG_S)


# ---- the screen ------------------------------------------------------------------------------------------------------


class _Screen:
    """Draws, and changes what is drawn by keys, until q or Ctrl-C."""

    def __init__(self, deployments: Deployments) -> None:
        from rich.console import Console

        from penstock.cli.top_view import View

        self._deployments = deployments
        # Rich takes these for the size, and a terminal can be resized.
        environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self._console = Console(highlight=False, markup=False, emoji=False, _environ=environ)
        self._view = View()
        self._log: _Log | None = None
        self._seen: list[Watched] = []

    def run(self) -> int:
        from rich.live import Live

        from penstock.cli.terminal import Keyboard

        live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        with contextlib.suppress(KeyboardInterrupt, EOFError), Keyboard() as keyboard, live:
            self._watch(keyboard, live)
        self._read_log_of(None)
        return 0

    def _watch(self, keyboard: Keyboard, live: Live) -> None:
        from penstock.cli import top_view

        due_at = time.monotonic()
        while True:
            if time.monotonic() >= due_at:
                due_at = time.monotonic() + _PERIOD_S
                if not self._view.is_paused:
                    self._seen = self._deployments.watched()
            live.update(self._drawn(), refresh=True)
            for key in keyboard.read(due_at - time.monotonic()):
                if key == "suspend":
                    _suspend(keyboard, live)
                view = top_view.press(self._view, key, self._seen, self._console.width)
                if view is None:
                    return
                self._view = view
                self._read_log_of(view.replica if view.page == "replica" else None)

    def _drawn(self) -> Text:
        from rich.text import Text

        from penstock.cli import top_view

        size = top_view.Size(*self._console.size)
        log = self._log.lines if self._log is not None else ()
        text = Text(no_wrap=True, overflow="crop", end="")
        for number, line in enumerate(top_view.screen(self._view, self._seen, size, _clock, log)):
            text.append("\n" if number else "")
            for part, style in line:
                text.append(part, style or None)
        return text

    def _read_log_of(self, replica: str | None) -> None:
        from penstock.cli import top_view

        watched = top_view.chosen(self._view, self._seen)
        if self._log is not None and (
            watched is None or (self._log.run.name, self._log.replica) != (watched.name, replica)
        ):
            self._log.close()
            self._log = None
        if self._log is None and replica is not None and watched is not None:
            self._log = _Log(self._deployments.run_of(watched.name), replica)


def _suspend(keyboard: Keyboard, live: Live) -> None:
    """Ctrl-Z: the terminal is the shell's until `fg`."""
    live.stop()
    keyboard.give_back()
    os.kill(os.getpid(), signal.SIGSTOP)
    keyboard.take()
    live.start()
