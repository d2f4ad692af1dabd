"""Runs the verbs of deployments on a login node there; and the verb `tunnel`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli import arguments
from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.targets import Login

_WITH_FILE = ("up", "render", "doctor")
_THROUGH_TUNNEL = ("chat", "bench serve")
_WITH_NAME = ("status", "logs", "down", "scale", "keys", "usage", "tunnel", *_THROUGH_TUNNEL)
_FLAGS = ("replace", "dry_run", "no_wait", "quick", "json")

_ENDS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 1.0


def register(parser: argparse.ArgumentParser) -> None:
    text = "the deployment; optional when only one is remote"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    text = "on this machine (default: any free one)"
    parser.add_argument("--port", type=arguments.whole(0, 65535), metavar="PORT", help=text)
    arguments.complete(parser, _tunnel, ("penstock tunnel", "penstock tunnel llama70 --port 8000"))


def _tunnel(_: argparse.Namespace) -> int:
    raise UserError(
        "cannot open a tunnel: no deployment of that name runs on a login node",
        hint="`penstock status` prints the address of a deployment that runs here.",
    )


def forward(options: argparse.Namespace, argv: Sequence[str]) -> int | None:
    """Run the verb on the login node where its deployment lives; None when that is this machine."""
    if options.verb_name in _WITH_FILE and options.source is not None:
        return _with_file(options)
    if options.verb_name in _WITH_NAME:
        return _with_name(options, argv)
    return None


def _with_file(options: argparse.Namespace) -> int | None:
    from penstock.targets import login as remote

    deployment = arguments.deployment_of(options)
    login = remote.login_of(deployment)
    if login is None:
        return None
    try:
        words = [options.verb_name, remote.put(login, deployment)]
    except PenstockError as exc:
        is_rehearsal = options.verb_name == "render" or getattr(options, "dry_run", False)
        if not (is_rehearsal and exc.is_retryable):
            raise
        print(f"penstock: {exc.message}: rendered here, with this machine's paths", file=sys.stderr)
        return None
    words += [f"--{flag.replace('_', '-')}" for flag in _FLAGS if getattr(options, flag, False)]
    if getattr(options, "timeout", None) is not None:
        words += ["--timeout", f"{options.timeout:g}"]
    is_start = options.verb_name == "up" and not options.dry_run
    if is_start:
        remote.remember(deployment.name, login)  # also when it fails half way: its logs are there
    code = remote.run(login, words, _is_terminal())
    if is_start and code == 0 and not options.json:
        print(f"  here     penstock chat {deployment.name}   penstock tunnel {deployment.name}", flush=True)
    return code


def _with_name(options: argparse.Namespace, argv: Sequence[str]) -> int | None:
    from penstock import run_folder
    from penstock.targets import login as remote

    typed = _typed_name(options)
    name = typed
    if name is None:
        elsewhere = remote.names()
        name = elsewhere[0] if len(elsewhere) == 1 and not run_folder.living() else None
    login = remote.remembered(name) if name is not None else None
    if name is None or login is None:
        return None
    if options.verb_name in _THROUGH_TUNNEL:
        with remote.tunnel(login, name) as tunnel:
            options.name, options.url = None, tunnel.url
            if tunnel.needs_key and "OPENAI_API_KEY" not in os.environ:
                os.environ["OPENAI_API_KEY"] = remote.owner_key(login, name)
            return int(options.verb(options) or 0)
    if options.verb_name == "tunnel":
        return _hold(login, name, options.port)
    return remote.run(login, list(argv) if typed else _named(argv, options, name), _is_terminal())


def _typed_name(options: argparse.Namespace) -> str | None:
    """The deployment that the command line names."""
    if options.verb_name == "scale":
        return options.words[0] if len(options.words) > 1 else None
    if options.verb_name in ("keys", "usage"):
        return None if options.store else options.deployment
    if options.verb_name in _THROUGH_TUNNEL and (
        options.url or (options.name is None and os.environ.get("OPENAI_BASE_URL"))
    ):
        return ""
    return "" if getattr(options, "all", False) is True else options.name


def _named(argv: Sequence[str], options: argparse.Namespace, name: str) -> list[str]:
    if options.verb_name == "scale":
        at = list(argv).index("scale") + 1
        return [*argv[:at], name, *argv[at:]]
    if options.verb_name in ("keys", "usage"):
        return [*argv, "--deployment", name]
    return [*argv, name]


def _hold(login: Login, name: str, port: int | None) -> int:
    from penstock.targets import login as remote

    with remote.tunnel(login, name, port) as tunnel:
        print(f"{name} is at {tunnel.url}/v1 until Ctrl-C", flush=True)
        is_over = threading.Event()
        for number in _ENDS:
            signal.signal(number, lambda *_: is_over.set())
        while not is_over.wait(_LOOK_S):
            stderr = tunnel.last_words()
            if stderr is not None:
                raise PenstockError(
                    f'lost the tunnel to login node "{login.host}"',
                    detail=stderr or None,
                    hint=f"Run it again: penstock tunnel {name} --port {tunnel.url.rpartition(':')[2]}",
                    is_retryable=True,
                )
    return 0


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
