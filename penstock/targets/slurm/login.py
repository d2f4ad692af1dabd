"""Deployments that live on a login node: the same verbs, run there over ssh. This machine keeps only where that is.

`runs/NAME/remote.json` in the local home is such a note. Everything goes through the user's own `ssh`, with his
settings and keys; $PENSTOCK_SSH_CONFIG, or `slurm.ssh_config`, names another file than ~/.ssh/config.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import msgspec

from penstock import paths, run_folder
from penstock.errors import PenstockError, UserError
from penstock.hardware import network
from penstock.hardware.network import free_port
from penstock.spec import reading
from penstock.spec.deployment import Deployment, is_legal_name

_NOTE = "remote.json"
_HOST = re.compile(r"[\w.@%:+-]+\Z")
_CONNECT_S = 20
_SILENCE_S = 15  # three of these without a word from the login node end a connection
_ANSWER_S = 60.0
_TUNNEL_S = 20.0
_NO_CONNECTION = 255  # ssh(1), EXIT STATUS


class Login(msgspec.Struct, frozen=True):
    """A login node, as ssh calls it, and the Python there that has penstock."""

    host: str
    python: str = "python3"
    ssh_config: str | None = None


def login_of(deployment: Deployment) -> Login | None:
    """Where the verbs of a deployment must run; None for here."""
    block = deployment.slurm
    if deployment.target != "slurm" or block is None or block.login is None or shutil.which("sbatch") is not None:
        return None
    if not _HOST.match(block.login) or block.login.startswith("-"):
        raise UserError(f'cannot use slurm.login "{block.login}": it is no host', hint="example: login: ada@cluster")
    config = os.environ.get("PENSTOCK_SSH_CONFIG") or block.ssh_config
    return Login(block.login, block.python or "python3", str(Path(config).expanduser().resolve()) if config else None)


def remember(name: str, login: Login) -> None:
    """Note where a deployment of that name lives."""
    path = paths.folder() / name
    path.mkdir(exist_ok=True)
    paths.write_atomically(path / _NOTE, msgspec.json.encode(login))


def remembered(name: str) -> Login | None:
    """Where the deployment of that name lives; None for here, or nowhere."""
    path = paths.home() / "runs" / name
    if not is_legal_name(name) or run_folder.Run(path).exists():
        return None
    try:
        return msgspec.json.decode((path / _NOTE).read_bytes(), type=Login)
    except (OSError, msgspec.MsgspecError):
        return None


def names() -> list[str]:
    """Of all deployments that live elsewhere."""
    parent = paths.home() / "runs"
    found = sorted(parent.iterdir()) if parent.is_dir() else []
    return [path.name for path in found if remembered(path.name) is not None]


def put(login: Login, deployment: Deployment) -> str:
    """Write the resolved file on the login node, and see that penstock is there; its path for the verbs there."""
    path = f".penstock/files/{deployment.name}.yaml"
    check = f"{shlex.quote(login.python)} -c {shlex.quote('import penstock; print(penstock.__version__)')}"
    line = f"mkdir -p .penstock/files && cat >{shlex.quote(path)} && {check}"
    done = _ssh(login, line, reading.to_yaml(deployment))
    if done.returncode:
        raise UserError(
            f'cannot use login node "{login.host}": its {login.python} has no penstock',
            detail=done.stderr.strip()[-500:] or None,
            hint="Install it there (pip install penstock), or set slurm.python to a Python that has it.",
        )
    return path


def run(login: Login, words: Sequence[str], is_terminal: bool) -> int:
    """Run a verb there, with our input and output; its exit code."""
    code = subprocess.call([*_argv(login, is_terminal), _line(login, words)])
    if code == _NO_CONNECTION:
        raise _unreachable(login, None)
    return code


def address(login: Login, name: str) -> str:
    """The gateway's URL of a deployment, as the login node has it."""
    done = _ssh(login, _line(login, ["status", name, "--json"]))
    try:
        url = json.loads(done.stdout)["url"]
    except (ValueError, KeyError, TypeError) as exc:
        raise PenstockError(
            f'could not reach login node "{login.host}" for "{name}"',
            detail=(done.stderr or done.stdout).strip()[-500:],
        ) from exc
    if url is None:
        raise run_folder.no_address(name)
    return str(url)


class Tunnel:
    """An open tunnel: `url` is its end on this machine."""

    def __init__(self, url: str, child: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        self.url, self._child, self._said = url, child, said

    def last_words(self) -> str | None:
        """What ssh said, when it has ended; None while the tunnel is there."""
        if self._child.poll() is None:
            return None
        self._said.seek(0)
        return self._said.read().decode("utf-8", "replace").strip()[-500:]


@contextlib.contextmanager
def tunnel(login: Login, name: str, port: int | None = None) -> Iterator[Tunnel]:
    """A way from this machine to the deployment's gateway, for as long as the block lasts.

    Raises UserError when something else has the port: it would be taken for the deployment, and told its keys.
    """
    if port is not None:
        try:
            network.check_port("127.0.0.1", port)
        except UserError as exc:
            raise UserError(
                exc.message, detail=exc.detail, hint="Give another --port, or none for a free one."
            ) from exc
    parts = urlsplit(address(login, name))
    local = port or free_port("127.0.0.1")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    forward = f"127.0.0.1:{local}:{host}:{parts.port}"
    words = _argv(login, False, ["-N", "-o", "ExitOnForwardFailure=yes", "-L", forward])
    # A file, not a pipe: nobody reads what ssh says while it lives, and a full pipe would stop it.
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=said, start_new_session=True)
        try:
            made = Tunnel(f"http://127.0.0.1:{local}", child, said)
            _wait_open(made, login, local)
            yield made
        finally:
            child.terminate()
            child.wait()


def _wait_open(tunnel: Tunnel, login: Login, port: int) -> None:
    deadline = time.monotonic() + _TUNNEL_S
    while time.monotonic() < deadline:
        said = tunnel.last_words()
        if said is not None:
            raise _unreachable(login, said)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise _unreachable(login, f"the tunnel did not open within {_TUNNEL_S:.0f} s")


def _argv(login: Login, is_terminal: bool, more: Sequence[str] = ()) -> list[str]:
    config = ["-F", login.ssh_config] if login.ssh_config else []
    options = [f"ConnectTimeout={_CONNECT_S}", f"ServerAliveInterval={_SILENCE_S}", "ServerAliveCountMax=3"]
    words = [word for option in options for word in ("-o", option)]
    return ["ssh", *config, *words, *(["-t", "-q"] if is_terminal else []), *more, "--", login.host]


def _line(login: Login, words: Sequence[str]) -> str:
    """A command line for the login shell there, whose home is where we land."""
    return shlex.join([login.python, "-m", "penstock", *words])


def _ssh(login: Login, line: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            [*_argv(login, False), line], input=stdin, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise _unreachable(login, f"no answer within {_ANSWER_S:.0f} s") from exc
    if done.returncode == _NO_CONNECTION:
        raise _unreachable(login, done.stderr)
    return done


def _unreachable(login: Login, said: str | None) -> PenstockError:
    return PenstockError(
        f'could not reach login node "{login.host}"',
        detail=(said or "").strip()[-500:] or None,
        hint=f"Try: ssh {login.host} true. $PENSTOCK_SSH_CONFIG names another file than ~/.ssh/config.",
        is_retryable=True,
    )
