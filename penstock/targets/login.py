"""Deployments that live on a login node: the same verbs, run there by the user's own `ssh`.

This machine keeps only where that is, in `runs/NAME/remote.json`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from penstock import paths, run_folder, targets
from penstock.errors import PenstockError, UserError
from penstock.spec import reading
from penstock.spec.deployment import Deployment, is_legal_name
from penstock.targets import Login, Tunnel
from penstock.targets.openssh import Done, Ssh, failed
from penstock.targets.tunnel import forwarded

_NOTE = "remote.json"
_ANSWER_S = 60.0
_NO_CONNECTION = 255  # ssh(1), EXIT STATUS


def login_of(deployment: Deployment) -> Login | None:
    """Where the verbs of a deployment must run; None for here."""
    return targets.load(deployment.target).login(deployment) if deployment.target in targets.TABLE else None


def remember(name: str, login: Login) -> None:
    """Note where a deployment of that name lives."""
    path = paths.folder() / name
    path.mkdir(exist_ok=True)
    paths.write_atomically(path / _NOTE, msgspec.json.encode(login))


def remembered(name: str) -> Login | None:
    """The login node of the deployment of that name; None when it is here or does not exist."""
    path = paths.home() / "runs" / name
    if not is_legal_name(name) or run_folder.Run(path).exists():
        return None
    try:
        return msgspec.json.decode((path / _NOTE).read_bytes(), type=Login)
    except (OSError, msgspec.MsgspecError):
        return None


def names() -> list[str]:
    """All deployments that live on login nodes."""
    parent = paths.home() / "runs"
    folders = sorted(parent.iterdir()) if parent.is_dir() else []
    return [path.name for path in folders if remembered(path.name) is not None]


def put(login: Login, deployment: Deployment) -> str:
    """Write the resolved file on the login node and check that penstock is there; the file's path there."""
    path = f".penstock/files/{deployment.name}.yaml"
    check = shlex.join([login.python, "-c", "import penstock; print(penstock.__version__)"])
    line = f"mkdir -p .penstock/files && cat >{shlex.quote(path)} && {check}"
    done = _ssh(login).run(login.host, ["sh", "-c", line], reading.to_yaml(deployment).encode(), _ANSWER_S)
    if done.code:
        raise UserError(
            f'cannot use login node "{login.host}": its {login.python} has no penstock',
            detail=done.err.strip()[-500:] or None,
            hint=f"Install it there (pip install penstock), or set {deployment.target}.python to a Python that has it.",
        )
    return path


def argv(login: Login, words: Sequence[str], is_terminal: bool) -> list[str]:
    """The command that runs a verb there, with our input and output."""
    options = _ssh(login).argv(login.host, more=["-t", "-q"] if is_terminal else [])
    return [*options, shlex.join(_verb(login, words))]


def run(login: Login, words: Sequence[str], is_terminal: bool) -> int:
    """Run a verb there, with our input and output; its exit code."""
    code = subprocess.call(argv(login, words, is_terminal))
    if code == _NO_CONNECTION:
        raise _unreachable(login, "")
    return code


def status(login: Login, name: str) -> tuple[str, bool, bool]:
    """The URL of a deployment's gateway, as seen from the login node, whether its clients need a key, and whether it
    has a chat page."""
    done = _ssh(login).run(login.host, _verb(login, ["status", name, "--json"]), timeout_s=_ANSWER_S)
    try:
        facts = json.loads(done.out)
        url, needs_key, has_page = facts["url"], facts.get("auth") == "keys", facts.get("ui") is not None
    except (ValueError, KeyError, TypeError) as exc:
        raise PenstockError(
            f'could not reach login node "{login.host}" for "{name}"', detail=(done.err or done.text).strip()[-500:]
        ) from exc
    if url is None:
        raise run_folder.no_address(name)
    return str(url), needs_key, has_page


def tunnel(login: Login, url: str, port: int) -> contextlib.AbstractContextManager[Tunnel]:
    """A tunnel from this port to a URL as the login node sees it, for as long as the block lasts."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    forward = f"127.0.0.1:{port}:{host}:{parts.port}"
    words = _ssh(login).argv(login.host, more=["-N", "-o", "ExitOnForwardFailure=yes", "-L", forward])
    return forwarded(words, port, lambda complaint: _unreachable(login, complaint))


def _ssh(login: Login) -> Ssh:
    return Ssh(login.ssh_config, "login", is_interactive=True)


def _verb(login: Login, words: Sequence[str]) -> list[str]:
    return [login.python, "-m", "penstock", *words]


def _unreachable(login: Login, complaint: str) -> PenstockError:
    return failed(login.host, "", Done(_NO_CONNECTION, b"", complaint))
