"""One engine process: started in a session, its output read, ended with all it forked."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from penstock import processes
from penstock.engines import Command
from penstock.paths import make_private
from penstock.wire.announcement import Process

_TAIL_LINES = 400  # enough to reach from "see root cause above" back to the cause in vLLM's tracebacks
_MAX_LINE_BYTES = 64 * 1024
_SEARCH_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")  # an engine's come before the user's, and do not replace them


class EngineProcess:
    """A running engine. `on_line` is called for every line of its output, from another thread.

    `end` also ends what else carries this node's marks (`replica`, and `rank` where a replica has several nodes).
    """

    def __init__(
        self, command: Command, folder: Path, marks: processes.Marks, on_line: Callable[[str], None] | None = None
    ) -> None:
        self.folder = folder
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._marks, self._on_line = marks, on_line
        shutil.rmtree(folder, ignore_errors=True)
        make_private(folder, marks.run)
        (folder / "tmp").mkdir(mode=0o700)
        for name, text in command.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
        for link, target in command.links.items():
            _link(Path(link), Path(target))
        # The engine holds a lock on its folder, so that `clean` knows one that it cannot see (in a container).
        lock = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH)
        self._child = subprocess.Popen(
            command.argv, env=_environment(command, folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
        os.close(lock)
        self._reader = threading.Thread(target=self._read, name="engine-output", daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._child.poll()

    def processes(self) -> tuple[Process, ...]:
        """The engine and all it forked, the engine's own process first."""
        family = []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._child.pid)
            for entry in [root, *root.children(recursive=True)]:
                family.append(processes.identify(entry.pid, "engine" if entry == root else _role(entry)))
        return tuple(family)

    def end(self, grace_s: float) -> None:
        """SIGTERM, wait `grace_s`, kill all with these marks, and remove its folder. Blocks; safe to repeat."""
        segments = processes.shared_memory(self.processes())
        if self.exit_code() is None and grace_s > 0:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(grace_s)
        if self.exit_code() is None:
            self._child.kill()
        # An engine's children outlive a killed parent (vLLM's EngineCore does), so the mark finds them, not the pid.
        processes.sweep(self._marks.run, self._marks.replica, self._marks.rank)
        self._finish(segments)

    def end_alone(self) -> None:
        """As `end`, for a helper of the engine: only itself and what it forked."""
        segments = processes.shared_memory(self.processes())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._finish(segments)

    def join_output(self) -> None:
        """After its end: until all its output is read."""
        self._reader.join(5)

    def _finish(self, segments: list[str]) -> None:
        self._child.wait(10)
        self._reader.join(5)
        processes.unlink_shared_memory(segments)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        rest = b""
        while chunk := os.read(descriptor, 65536):
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line)
        self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            print(text, flush=True, file=sys.stdout)
            self.tail.append(text)
            if self._on_line is not None:
                self._on_line(text)


def _environment(command: Command, folder: Path) -> dict[str, str]:
    extra = command.env
    # SPT_NOENV keeps setproctitle (vLLM uses it) from overwriting the environment, where the marks are read.
    ours = {"TMPDIR": str(folder / "tmp"), "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1", processes.MARK_ROLE: "engine"}
    paths = {name: [text for env in (extra, os.environ) if (text := env.get(name))] for name in _SEARCH_PATHS}
    joined = {name: os.pathsep.join(texts) for name, texts in paths.items() if texts}
    return {**command.defaults, **os.environ, **ours, **extra, **joined}


def _link(link: Path, target: Path) -> None:
    """Relative, so that a copy of the whole folder is right elsewhere. After an error (a full disk, another start that
    was faster) the engine makes a folder there, or finds one."""
    with contextlib.suppress(OSError):
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.symlink_to(os.path.relpath(target, link.parent))


def _role(entry: psutil.Process) -> str:
    title = " ".join(entry.cmdline())[:80]
    if "resource_tracker" in title:
        return "resource tracker"
    return title.split("::")[-1].strip() if title.startswith("VLLM::") else title or entry.name()
