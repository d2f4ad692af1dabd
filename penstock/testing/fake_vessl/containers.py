"""A run of the fake VESSL: its status walks as VESSL's does, and its command is executed for real, on this machine.

A container is a process with a home of its own; what it started carries a mark in its variables, by which all of it
ends with it. Mounted folders are folders below that home, so their paths in the command are replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "FAKE_VESSL_RUN"
_ENDED = ("completed", "failed", "terminated")
_POLL_S = 0.05


@dataclass
class Pace:
    """How long each stage takes, in seconds. `pull_error`: why the image cannot be pulled. `endpoint_s`: after the
    start, until the addresses are told. `grace_s`: between TERM and KILL. `late_s`: until a log line can be read."""

    queue_s: float = 0.05
    pull_s: float = 0.05
    endpoint_s: float = 0.1
    grace_s: float = 20.0
    late_s: float = 0.0
    pull_error: str | None = None


@dataclass
class Container:
    id: int
    yaml_spec: str
    form: dict[str, Any]
    folder: Path
    variables: Mapping[str, str]
    pace: Pace
    status: str = "queued"
    reason: str = ""
    created_at: float = field(default_factory=time.time)
    logs: list[tuple[float, str]] = field(default_factory=list)
    started_at: float | None = None

    def __post_init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._wanted_end: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._live, name=f"run-{self.id}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED

    def endpoints(self) -> list[dict[str, Any]]:
        """As the API tells them: without an address before the ports are published."""
        is_known = self.started_at is not None and time.time() - self.started_at >= self.pace.endpoint_s
        is_known = is_known and self.status == "running"
        return [
            {**port, "endpoint": f"http://127.0.0.1:{port['port']}" if is_known else "", "is_port_opened": is_known}
            for port in self.form.get("ports", [])
        ]

    def lines(self, since: float, most: int | None) -> list[tuple[float, str]]:
        """Those that can be read by now, the oldest first; the last of them where there are more than `most`."""
        until = time.time() - self.pace.late_s
        rows = sorted(row for row in list(self.logs) if since <= row[0] <= until)
        return rows if most is None else rows[-most:]

    def terminate(self, status: str = "terminated", reason: str = "", without_grace: bool = False) -> None:
        """As an order of the user, or with another status as the platform's own act."""
        with self._lock:
            if self.has_ended:
                return
            self._wanted_end = status
            self.reason = reason or self.reason
            self.status = {"running": "stopping", "idle": status}.get(self.status, self.status)
            process = self._process
        if process is not None:
            self._end(process, 0.0 if without_grace else self.pace.grace_s)

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def processes(self) -> list[int]:
        """Pids of all that carries its mark."""
        found, wanted = [], f"{MARK}={self._mark}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def _live(self) -> None:
        for status, pause_s in (("queued", 0.0), ("pending", self.pace.queue_s), ("initializing", self.pace.pull_s)):
            self.status = status
            deadline = time.monotonic() + pause_s
            while time.monotonic() < deadline and self._wanted_end is None:
                time.sleep(_POLL_S)
            if self._wanted_end is not None:
                self.status = self._wanted_end
                return
        if self.pace.pull_error is not None:
            self.status, self.reason = "failed", self.pace.pull_error
            return
        self._run()

    @property
    def command(self) -> str:
        return "\n".join(str(row["command"] if isinstance(row, dict) else row) for row in self.form["run"])

    def _run(self) -> None:
        command = self.command
        for path in {**self.form.get("mount", {}), **self.form.get("import", {})}:
            folder = self.folder / path.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            command = command.replace(path, str(folder))
        here = Path(sys.executable).parent
        variables = {
            "PATH": f"{here}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PENSTOCK_HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            **self.variables,
            MARK: self._mark,
        }
        with self._lock:
            wanted_end = self._wanted_end
            if wanted_end is not None:
                self.status = wanted_end
                return
            self._process = process = subprocess.Popen(
                ["sh", "-c", command], cwd=self.folder, env=variables, text=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self.status, self.started_at = "running", time.time()
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        code = process.wait()
        self.kill()
        reader.join(5.0)
        process.stdout.close()
        if self._wanted_end is not None:
            self.status = self._wanted_end
        elif self.form.get("termination_protection"):
            self.status = "idle"
        else:
            self.status, self.reason = ("completed", "") if code == 0 else ("failed", f"exit code {code}")

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.logs.append((time.time(), line.rstrip("\n")))

    def _end(self, process: subprocess.Popen[str], grace_s: float) -> None:
        def kill() -> None:
            deadline = time.monotonic() + grace_s
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self.kill()

        if grace_s:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        threading.Thread(target=kill, daemon=True).start()

    def kill(self) -> None:
        """End all of its processes; what a container started ends with it."""
        for _ in range(100):
            pids = self.processes()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
