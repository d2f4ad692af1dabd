"""A host as it answers: its Python, its folder, and penstock on it, brought once a version."""

from __future__ import annotations

import hashlib
import secrets
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
_INSTALL_S = 120.0
_LEAST_PYTHON = "3.11"
_NOT_FOUND = (126, 127)  # what a shell says of a program that it cannot start


class Looked(msgspec.Struct, frozen=True):
    """A host at one moment. `name`: its own. `folder`: the file's `ssh.folder` there. `absent`: paths that it lacks."""

    name: str
    folder: str
    python: HostPython
    versions: tuple[str, ...]
    absent: tuple[str, ...]


class Contact(msgspec.Struct, frozen=True):
    """A host with penstock on it: the interpreter that has it."""

    host: str
    folder: str
    python: str


def look(ssh: Ssh, host: str, block: Block, paths: tuple[str, ...] = ()) -> Looked:
    """What a host is; `paths` are looked for. Changes nothing.  Raises HostError, also for a Python that is too old."""
    told = _ask(ssh, host, block, "look", {"folder": block.folder, "packages": list(bundle.NEEDED), "paths": paths})
    python = msgspec.convert(
        {name: told[name] for name in ("version", "implementation", "platform", "libc", "has")}, HostPython
    )
    return Looked(told["host"], told["folder"], python, tuple(told["versions"]), tuple(told["absent"]))


class Bringer:
    """Brings this penstock to hosts. What a bundle is made of is read once."""

    def __init__(self, ssh: Ssh, block: Block, cache: Path) -> None:
        self._ssh, self._block, self._cache = ssh, block, cache
        self._lock = threading.Lock()
        self._made: dict[bytes, tuple[str, list[bundle.Member]]] = {}
        self._packed: dict[str, bytes] = {}

    def bring(self, host: str, looked: Looked) -> Contact:
        """Penstock on that host, ready to run; nothing is sent when it is there.  Raises PenstockError."""
        with self._lock:
            kind = msgspec.json.encode(looked.python, order="sorted")
            if kind not in self._made:
                members = bundle.contents(looked.python, self._cache)
                self._made[kind] = bundle.key_of(members), members
            key, members = self._made[kind]
        # Its base counts too, which may be made anew at the same path: an environment belongs to the Python that made
        # it, and relies on the packages which that one has.
        base = (self._block.python, looked.python.implementation, looked.python.minor, *sorted(looked.python.has))
        name = f"{key}-{_short_hash(' '.join(base))}"
        contact = Contact(host, looked.folder, f"{looked.folder}/versions/{name}/venv/bin/python")
        if name in looked.versions:
            return contact
        with self._lock:
            packed = self._packed.get(key) or bundle.tarball(members)
            self._packed[key] = packed
        _ask(self._ssh, host, self._block, "prepare", {"folder": looked.folder})
        # Hosts may share this folder: each has a file of its own, and one of them will be first.
        path = f"{looked.folder}/versions/.{name}-{secrets.token_hex(4)}.tar.gz"
        try:
            self._ssh.put(host, packed, path)
        except HostError as exc:
            raise _cannot_bring(host, looked, exc) from exc
        try:
            _ask(self._ssh, host, self._block, "install", {"folder": looked.folder, "key": name, "bundle": path})
        except HostError as exc:
            raise _cannot_bring(host, looked, exc) from exc
        return contact


def _cannot_bring(host: str, looked: Looked, exc: HostError) -> HostError:
    return HostError(
        host,
        f"could not bring penstock to {short_name(host)}: {exc.message.partition(': ')[2] or exc.message}",
        detail=f"Into {looked.folder}. {exc.detail or ''}".strip(),
        hint=exc.hint or "Set ssh.folder to a folder that is writable there.",
        is_away=exc.is_away,
    )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _ask(ssh: Ssh, host: str, block: Block, verb: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What `host_setup` answers on that host."""
    source = Path(host_setup.__file__).read_bytes()
    words = [*_python_words(block.python), "-c", host_setup.BOOT, verb, msgspec.json.encode(asked).decode()]
    done = ssh.run(host, words, source, _INSTALL_S if verb == "install" else _LOOK_S)
    name = short_name(host)
    if done.code in _NOT_FOUND:
        raise HostError(
            host, f'there is no Python on {name}: "{block.python}" does not start', detail=done.err.strip() or None,
            hint=f"Install Python {_LEAST_PYTHON} or newer there, or set ssh.python to the path of one.", is_away=False,
        )  # fmt: skip
    if done.code:
        raise failed(host, f'"{block.python}" failed', done)
    # The shell of a host may print a greeting of its own before us.
    line = next((line for line in reversed(done.text.splitlines()) if line.startswith("{")), None)
    if line is None:
        raise failed(host, f'"{block.python}" gave no answer', done)
    told: dict[str, Any] = msgspec.json.decode(line)
    if "too_old" in told:
        raise HostError(
            host, f'the Python of {name} is too old: "{block.python}" is {told["too_old"]}',
            detail=f"penstock needs {_LEAST_PYTHON} or newer.",
            hint="Set ssh.python to a newer one (its path on the host).", is_away=False,
        )  # fmt: skip
    if "problem" in told:
        raise failed(host, f"could not {verb}", done._replace(err=told["problem"]))
    return told


def _python_words(python: str) -> list[str]:
    """The words that start this interpreter by a host's shell; "~/" is that host's home."""
    if python.startswith("~/"):
        return ["sh", "-c", f'exec "$HOME"/{shlex.quote(python[2:])} "$@"', "sh"]
    return ["sh", "-c", f'exec {shlex.quote(python)} "$@"', "sh"]
