"""A host as it answers: its Python, its folder, and penstock on it, brought once a version."""

from __future__ import annotations

import hashlib
import shlex
import threading
from pathlib import Path
from typing import Any

import msgspec

from penstock.spec.blocks import Ssh as Block
from penstock.targets.openssh import HostError, Ssh, failed, short_name
from penstock.targets.ssh import bundle, host_setup
from penstock.targets.ssh.bundle import HostPython

_LOOK_S = 20.0
_INSTALL_S = 600.0
_LEAST_PYTHON = "3.11"
_NOT_FOUND = (126, 127)  # a shell's exit codes for a program that it cannot start


class HostFacts(msgspec.Struct, frozen=True):
    """A host at one moment. `folder`: the file's `ssh.folder` there. `absent`: those of the paths that it lacks."""

    name: str
    folder: str
    free_bytes: int
    python: HostPython
    versions: tuple[str, ...]
    absent: tuple[str, ...]


class PreparedHost(msgspec.Struct, frozen=True):
    """A host with penstock on it: the interpreter that has it."""

    host: str
    folder: str
    python: str


def look(ssh: Ssh, host: str, block: Block, paths: tuple[str, ...] = ()) -> HostFacts:
    """What a host is; `paths` are looked for. Changes nothing.  Raises HostError, also for a Python that is too old."""
    asked = {"folder": block.folder, "packages": list(bundle.NEEDED), "paths": paths}
    return msgspec.convert(_ask(ssh, host, block, "look", asked, _LOOK_S), HostFacts)


class HostInstaller:
    """Brings this penstock to hosts. One archive for each kind of Python is made and kept."""

    def __init__(self, ssh: Ssh, block: Block, cache: Path) -> None:
        self._ssh, self._block, self._cache = ssh, block, cache
        self._lock = threading.Lock()
        self._members: dict[bytes, tuple[str, list[bundle.Member]]] = {}
        self._archives: dict[str, bytes] = {}

    def bring(self, host: str, facts: HostFacts) -> PreparedHost:
        """Penstock on that host, ready to run; nothing is sent when it is there.  Raises PenstockError."""
        with self._lock:
            kind = msgspec.json.encode(facts.python, order="sorted")
            if kind not in self._members:
                members = bundle.contents(facts.python, self._cache)
                self._members[kind] = bundle.key_of(members), members
            key, members = self._members[kind]
        # An environment relies on the Python that made it and on its packages, and that may change at the same path.
        base = (self._block.python, facts.python.implementation, facts.python.minor, *sorted(facts.python.has))
        name = f"{key}-{hashlib.sha256(' '.join(base).encode()).hexdigest()[:6]}"
        if name not in facts.versions:
            with self._lock:
                if key not in self._archives:
                    self._archives[key] = bundle.tarball(members)
            asked = {"folder": facts.folder, "key": name}
            try:
                _ask(self._ssh, host, self._block, "install", asked, _INSTALL_S, self._archives[key])
            except HostError as exc:
                raise _cannot_bring(host, facts, exc) from exc
        return PreparedHost(host, facts.folder, f"{facts.folder}/versions/{name}/venv/bin/python")


def _cannot_bring(host: str, facts: HostFacts, exc: HostError) -> HostError:
    return HostError(
        f"could not bring penstock to {short_name(host)}: {exc.message.partition(': ')[2] or exc.message}",
        detail=f"Into {facts.folder}. {exc.detail or ''}".strip(),
        hint=exc.hint or "Set ssh.folder to a folder that is writable there.",
        is_retryable=exc.is_retryable,
    )


def _ask(
    ssh: Ssh, host: str, block: Block, verb: str, asked: dict[str, Any], timeout_s: float, archive: bytes = b""
) -> dict[str, Any]:
    """What `host_setup` answers on that host."""
    source = Path(host_setup.__file__).read_bytes()
    words = [*_python_words(block.python), "-c", host_setup.BOOT, verb, msgspec.json.encode(asked).decode()]
    done = ssh.run(host, words, b"%d\n%b%b" % (len(source), source, archive), timeout_s)
    name = short_name(host)
    if done.code in _NOT_FOUND:
        raise HostError(
            f'there is no Python on {name}: "{block.python}" does not start',
            detail=done.err.strip() or None,
            hint=f"Install Python {_LEAST_PYTHON} or newer there, or set ssh.python to the path of one.",
        )
    if done.code:
        raise failed(host, f'"{block.python}" failed', done)
    # The host's shell may print a greeting first.
    line = next((line for line in reversed(done.text.splitlines()) if line.startswith("{")), None)
    if line is None:
        raise failed(host, f'"{block.python}" gave no answer', done)
    answer: dict[str, Any] = msgspec.json.decode(line)
    if "too_old" in answer:
        raise HostError(
            f'the Python of {name} is too old: "{block.python}" is {answer["too_old"]}',
            detail=f"penstock needs {_LEAST_PYTHON} or newer.",
            hint="Set ssh.python to a newer one (its path on the host).",
        )
    if "problem" in answer:
        raise failed(host, f"could not {verb}", done._replace(err=answer["problem"]))
    return answer


def _python_words(python: str) -> list[str]:
    """The words that start this interpreter by a host's shell; "~/" is that host's home."""
    path = f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)
    return ["sh", "-c", f'exec {path} "$@"', "sh"]
