"""Hosts by the `ssh` program of this machine, with the user's own ~/.ssh/config, and its errors in words.

Connections to a host are shared (ControlMaster): the first command costs a login, the next 10 ms. Hosts need neither
scp nor sftp.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from penstock import processes
from penstock.errors import PenstockError
from penstock.hardware.catalog import read_yaml
from penstock.log_lines import last_words
from penstock.paths import control_folder, home, is_private, make_private
from penstock.wire.structs import prepare_loaded

# To connect, and without a word from the host: three such silences end a connection. For programs and for a person.
_ALONE_S, _PATIENT_S = (5, 3), (20, 15)
_ALONE = dict.fromkeys(("ForwardX11", "ForwardAgent", "PermitLocalCommand", "RequestTTY"), "no")
_NO_LOGIN = 255  # ssh's own exit code: it did not get as far as the command
_LEGAL = re.compile(r"(ssh://)?([A-Za-z0-9_][\w.+-]*@)?(\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9_][\w.:-]*)(:\d+)?/?\Z")
T = TypeVar("T")


class HostError(PenstockError):
    """A host that failed. Retryable: it could not be reached, so what runs there is unknown."""


class Done(NamedTuple):
    """A command that has ended on a host."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace")


def is_legal(host: str) -> bool:
    """Whether ssh takes this for a host, and never for one of its options."""
    return _LEGAL.match(host) is not None


def short_name(host: str) -> str:
    """A host for messages: without its user."""
    return host.removeprefix("ssh://").rpartition("@")[2].rstrip("/")


def reading(complaint: str) -> tuple[str, str | None]:
    """What a complaint of ssh or of a host's shell means, and what to do. Pure."""
    lower = complaint.lower()
    for sign, meaning, hint in read_yaml("penstock.targets", "ssh_complaints.yaml"):
        if sign in lower:
            return meaning, hint
    return last_words(complaint.splitlines(), signs=()) or "ssh printed nothing", None


class Ssh:
    """The ssh program with the settings of one deployment. Its methods block; threads may share it.

    `owner` names who shares the connections (the id of a run): they end with `close`, or a minute after the last use.
    `marks`: the environment by which the connections are found as processes of a run. `is_interactive`: for a person
    at a terminal, who may type a password; the person's own settings hold, and no connection is shared.
    """

    def __init__(
        self, config: str | None, owner: str, marks: Mapping[str, str] | None = None, is_interactive: bool = False
    ) -> None:
        self._is_interactive = is_interactive
        self._config = str(Path(config).expanduser()) if config else None
        self._folder = control_folder(owner)
        # A shared connection outlives the command that made it: it must not look like the controller.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._env = {**kept, **(marks or {}), **({processes.MARK_ROLE: "ssh"} if marks else {})}

    def argv(self, host: str, shares: bool = True, more: Sequence[str] = ()) -> list[str]:
        """The words before the command, with `more` options. Unless interactive, ssh fails where it would ask."""
        assert is_legal(host), host
        connect_s, silence_s = _PATIENT_S if self._is_interactive else _ALONE_S
        options: dict[str, object] = {"ConnectTimeout": connect_s}
        options |= {"ServerAliveInterval": silence_s, "ServerAliveCountMax": 3}
        if not self._is_interactive:
            options |= {"BatchMode": "yes", **_ALONE}
            options |= {"ControlMaster": "auto", "ControlPersist": 60} if shares else {"ControlMaster": "no"}
            options |= {"ControlPath": f"{self._folder}/%C" if shares else "none"}
            # Ports that ~/.ssh/config forwards are for people: a second connection would fail on them.
            options |= {"ClearAllForwardings": "yes"} if shares else {}
        words = ["ssh", *(["-F", self._config] if self._config else [])]
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [*words, *more, "--", host]

    def popen(
        self, host: str, words: Sequence[str], stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a command whose input stays open: on the host it reads an end when we stop."""
        self._make_folder()
        argv = [*self.argv(host), shlex.join(words)]
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=self._env)

    def run(self, host: str, words: Sequence[str], given: bytes = b"", timeout_s: float = 30.0) -> Done:
        """Run a command to its end; `given` is its input, the words reach the host's shell quoted.

        Raises HostError when the host could not be reached; the exit code is the command's.
        """
        self._make_folder()
        argv, env = [*self.argv(host), shlex.join(words)], self._env
        with _memory_file() as out, _memory_file() as err:
            try:
                code = subprocess.run(argv, input=given, stdout=out, stderr=err, env=env, timeout=timeout_s).returncode
            except subprocess.TimeoutExpired:
                raise _away(host, f"no answer within {timeout_s:.0f} s: timed out") from None
            out.seek(0)
            err.seek(0)
            done = Done(code, out.read(), err.read().decode("utf-8", "replace"))
        if done.code == _NO_LOGIN or done.code < 0:
            raise _away(host, done.err)
        return done

    def check_run(self, host: str, words: Sequence[str], given: bytes = b"", timeout_s: float = 30.0) -> Done:
        """As `run`.  Raises HostError with the command's complaint unless it exits with 0."""
        done = self.run(host, words, given, timeout_s)
        if done.code:
            raise failed(host, f"`{words[0]}` failed", done)
        return done

    def close(self, hosts: Sequence[str]) -> None:
        """End the shared connections. Safe to repeat."""
        if not is_private(self._folder):
            return
        # Processes, not threads: at the exit of the interpreter no thread can start.
        leaving = []
        for host in hosts:
            null = subprocess.DEVNULL
            argv = self.argv(host, more=["-O", "exit"])
            leaving.append(subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, env=self._env))
        for child in leaving:
            try:
                child.wait(5.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> None:
        if self._is_interactive:
            return
        # The owner of the socket's folder can use our connections.
        make_private(self._folder, self._env.get(processes.MARK_RUN, home() / "runs" / "none"))


def _memory_file() -> IO[bytes]:
    """Not a pipe: a connection that is left open for others holds the error output open too. No disk can be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("ssh"), "w+b")
    return tempfile.TemporaryFile()  # macOS


def failed(host: str, what: str, done: Done) -> HostError:
    """The error of a command that failed, or of a host that could not be reached."""
    if done.code == _NO_LOGIN or done.code < 0:
        return _away(host, done.err)
    complaint = done.err or done.text
    meaning, hint = reading(complaint)
    return HostError(f"{what} on {short_name(host)}: {meaning}", detail=_last_lines(complaint), hint=hint)


def _away(host: str, complaint: str) -> HostError:
    meaning, hint = reading(complaint)
    name = short_name(host)
    hint = hint and hint.replace("HOST", host).replace("NAME", name)
    message = f"{name} cannot be reached over ssh: {meaning}"
    return HostError(message, detail=_last_lines(complaint), hint=hint, is_retryable=True)


def _last_lines(text: str) -> str | None:
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and set(line.strip()) != {"@"}]
    return "\n".join(line[:300] for line in lines[-5:]) or None


def at_once(hosts: Sequence[str], ask: Callable[[str], T]) -> dict[str, T | PenstockError]:
    """What `ask` returns, or the error that it raises, for all hosts at the same time."""

    def answer(host: str) -> T | PenstockError:
        try:
            return ask(host)
        except PenstockError as exc:
            return exc

    names = list(dict.fromkeys(hosts))
    if not names:
        return {}
    prepare_loaded()
    with ThreadPoolExecutor(min(64, len(names)), thread_name_prefix="ssh") as pool:
        return dict(zip(names, pool.map(answer, names), strict=True))
