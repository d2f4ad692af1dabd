"""Verbs of deployments that run elsewhere: on a login node they run there; a gateway in a cluster is reached by a
tunnel. Also the verb `tunnel`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from penstock.cli import arguments
from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.run_folder import Run
    from penstock.targets import Login, Target, Tunnel

_WITH_FILE = ("up", "render", "doctor")
_THROUGH_TUNNEL = ("chat", "bench serve")
_HELD = ("tunnel", "dashboard", "ui")  # hold a tunnel open until Ctrl-C
_IN_STORE = ("keys", "usage")
_BY_FLAG = ("metrics", *_IN_STORE)  # name their deployment by --deployment
_WATCHING = ("top", "events", "requests", "metrics", "autoscale explain")
_WITH_NAME = ("status", "logs", "down", "scale", "sleep", "wake", *_HELD, *_IN_STORE, *_THROUGH_TUNNEL, *_WATCHING)
_FLAGS = ("replace", "dry_run", "no_wait", "quick", "json")

_ENDS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 1.0
_ANSWER_S = 60.0
_PAGE_S = 150.0  # until a chat page has started
_PAGE_PORTS = range(20_000, 30_000)  # outside the range of outgoing connections


class _ChatPage(NamedTuple):
    """A chat page elsewhere. `key` logs in; `url`: where this machine reaches it without a tunnel."""

    key: str | None
    tunnel: Callable[[int], AbstractContextManager[Tunnel]]
    url: str | None = None


class _Gateway(NamedTuple):
    """A gateway elsewhere. `place`: what a tunnel leads to, for people. `inside`: the command that runs `keys`,
    `usage` or `dashboard` next to it. `page_key`: that of its live page. `url`: where this machine reaches it without a
    tunnel. `chat_page`: None where the deployment has none."""

    name: str
    place: str
    needs_key: bool
    tunnel: Callable[[int], AbstractContextManager[Tunnel]]
    inside: Callable[[Sequence[str], bool], list[str]]
    page_key: Callable[[], str | None]
    url: str | None = None
    chat_page: Callable[[], _ChatPage | None] = lambda: None


def register(parser: argparse.ArgumentParser) -> None:
    text = "the deployment; optional when only one is remote"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    text = "on this machine (default: any free one)"
    parser.add_argument("--port", type=arguments.whole(0, 65535), metavar="PORT", help=text)
    arguments.complete(parser, _tunnel, ("penstock tunnel", "penstock tunnel llama70 --port 8000"))


def _tunnel(_: argparse.Namespace) -> int:
    message = "cannot open a tunnel: no deployment of that name runs on a login node or in a cluster"
    raise UserError(message, hint="`penstock status` prints the address of a deployment that runs here.")


def forward(options: argparse.Namespace, argv: Sequence[str]) -> int | None:
    """Run the verb where, or as, its deployment needs it; None when it is a verb like those of this machine."""
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
    living = run_folder.living() if typed is None else []
    names = [typed] if typed is not None else [run.name for run in living] or remote.names()
    if len(names) != 1 or not names[0]:
        return None
    name = names[0]
    is_ray = getattr(options, "ray_replica", None) is not None  # runs next to the gateway, as `keys` does
    login = remote.remembered(name)
    if login is not None and (is_ray or options.verb_name not in (*_HELD, *_THROUGH_TUNNEL)):
        return remote.run(login, list(argv) if typed else _named(argv, options, name), _is_terminal())
    port = _port(options, name)
    gateway = _in_target(_run_of(name), options.verb_name) if login is None else _on_login_node(login, name)
    if gateway is None:
        return None
    if is_ray:
        words = ["dashboard", name, "--ray", options.ray_replica, "--inside", *(["--json"] if options.json else [])]
        return subprocess.call(gateway.inside(words, _is_terminal()))
    if options.verb_name in _IN_STORE:
        code = subprocess.call(gateway.inside(_without_deployment(argv), _is_terminal()))
        if code == 0:
            _note_keys(name, options)
        return code
    if options.verb_name == "dashboard":
        return _show_page(gateway, port, options)
    if options.verb_name == "tunnel":
        return _hold_open(gateway, port)
    chat_page = gateway.chat_page() if options.verb_name == "ui" else None
    if chat_page is not None:
        return _show_chat_page(gateway, chat_page, port, options)
    return _ask(gateway, port, options)


def _note_keys(name: str, options: argparse.Namespace) -> None:
    """For `penstock events` of this machine: the store next to the gateway has no run folder."""
    from penstock import paths, run_folder
    from penstock.deployment.events import asked_by

    event = {"create": "key created", "rotate": "key rotated", "revoke": "key revoked"}.get(options.action)
    if event is not None:
        run_folder.Run(paths.home() / "runs" / name).add_event(event, options.key or options.name, who=asked_by())


def _port(options: argparse.Namespace, name: str) -> int:
    from penstock.targets.tunnel import local_port

    if options.verb_name == "ui" and options.port is None:
        # A browser keeps conversations by address: the same port each time, and another for each deployment.
        with contextlib.suppress(UserError):
            return local_port(_PAGE_PORTS[zlib.crc32(name.encode()) % len(_PAGE_PORTS)])
    return local_port(options.port if options.verb_name in ("tunnel", "ui") else None)


def _typed_name(options: argparse.Namespace) -> str | None:
    """The deployment that the command line names; "" where the verb runs here in any case."""
    if getattr(options, "is_inside", False):
        return ""
    if options.verb_name == "scale":
        return options.words[0] if len(options.words) > 1 else None
    if options.verb_name == "top":
        return options.names[0] if len(options.names) == 1 else "" if options.names else None
    if options.verb_name == "metrics":
        return "" if options.names else options.deployment
    if options.verb_name in _IN_STORE:
        return (
            "" if options.store or (not options.deployment and "PENSTOCK_STORE" in os.environ) else options.deployment
        )
    if options.verb_name in (*_THROUGH_TUNNEL, "ui") and (options.url or (options.name is None and _has_url(options))):
        return ""
    return "" if getattr(options, "all", False) is True else options.name


def _has_url(options: argparse.Namespace) -> bool:
    """Whether variables name a server."""
    from penstock.chat.page import published

    is_page = options.verb_name == "ui" and published.names_a_server(os.environ)
    return is_page or bool(os.environ.get("OPENAI_BASE_URL"))


def _named(argv: Sequence[str], options: argparse.Namespace, name: str) -> list[str]:
    if options.verb_name == "scale":
        at = list(argv).index("scale") + 1
        return [*argv[:at], name, *argv[at:]]
    if options.verb_name in _BY_FLAG:
        return [*argv, "--deployment", name]
    return [*argv, name]


def _without_deployment(argv: Sequence[str]) -> list[str]:
    flag = "--deployment"
    before = ["", *argv]
    return [word for word, last in zip(argv, before, strict=False) if flag not in (word.partition("=")[0], last)]


def _on_login_node(login: Login, name: str) -> _Gateway:
    from penstock.targets import login as remote

    url, needs_key, has_page = remote.status(login, name)
    return _Gateway(
        name,
        f'login node "{login.host}"',
        needs_key,
        lambda port: remote.tunnel(login, url, port),
        lambda words, is_terminal: remote.argv(login, [*words, "--deployment", name], is_terminal),
        lambda: _page_on(login, "dashboard", name)["key"],
        chat_page=lambda: _chat_page_on(login, name) if has_page else None,
    )


def _chat_page_on(login: Login, name: str) -> _ChatPage:
    from penstock.targets import login as remote

    facts = _page_on(login, "ui", name)
    url = facts["url"] or ""
    return _ChatPage(facts["key"], lambda port: remote.tunnel(login, url, port))


def _page_on(login: Login, verb: str, name: str) -> dict[str, str | None]:
    """Address and key of a page, as the verb prints them on the login node."""
    from penstock.targets import login as remote

    done = _run_inside(remote.argv(login, [verb, name, "--json"], False), _PAGE_S)
    why = (done.stderr or done.stdout).strip()[-500:] or None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if done.returncode == 0:
            facts = json.loads(done.stdout)
            return {"url": facts["url"], "key": facts["key"]}
        why = json.loads(done.stderr or done.stdout)["error"]["message"]
    raise PenstockError(f'could not open the page of "{name}"', detail=why)


def _run_inside(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A command that asks nothing, to its end.  Raises PenstockError."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as exc:
        why = f"no answer within {timeout_s:.0f} s" if isinstance(exc, subprocess.TimeoutExpired) else str(exc)
        raise PenstockError(f'could not run "{argv[0]}"', detail=why, is_retryable=True) from exc


def _in_target(run: Run | None, verb: str) -> _Gateway | None:
    """The gateway that this verb needs in the deployment's target; None where it is reached without help."""
    from penstock import targets
    from penstock.cli import dashboard

    if run is None or verb not in (*_HELD, *_IN_STORE, *_THROUGH_TUNNEL):
        return None
    target = targets.load(run.record().target)
    if "tunnels" not in target.capabilities:
        return None
    if run.is_ended():
        raise UserError(f'cannot reach the gateway of "{run.name}": it is down', hint=f"penstock up {run.name}")
    gateway = _Gateway(
        run.name,
        f'the gateway of "{run.name}"',
        run.deployment().gateway.auth == "keys",
        lambda port: target.tunnel(run, port),
        lambda words, is_terminal: target.inside(run, words, is_terminal),
        lambda: dashboard.key_of(run),
        run.public_url,
    )
    return gateway._replace(chat_page=lambda: _chat_page_in(target, run, gateway))


def _chat_page_in(target: Target, run: Run, gateway: _Gateway) -> _ChatPage | None:
    from penstock.cli import ui

    part = ui.page_of(run)
    if part is None:
        return None
    key = os.environ.get("OPENAI_API_KEY") or _owner_key(gateway)
    return _ChatPage(key, lambda port: target.tunnel(run, port, "ui"), part.url)


def _run_of(name: str) -> Run | None:
    """The run of that name; one that another machine started gets a folder here."""
    from penstock import paths, run_folder, targets
    from penstock.spec.deployment import is_legal_name

    try:
        adopted = targets.discover(name)
    except PenstockError as exc:
        print(f'penstock: could not look for "{name}" elsewhere: {exc.message}', file=sys.stderr)
        adopted = None
    if adopted is not None:
        print(f'penstock: found "{name}" in {adopted.where}', file=sys.stderr)
        return adopted.run
    run = run_folder.Run(paths.home() / "runs" / name)
    return run if is_legal_name(name) and run.exists() else None


def _ask(gateway: _Gateway, port: int, options: argparse.Namespace) -> int:
    """Run a verb that talks to a gateway, through a tunnel where that is needed."""
    from penstock.targets.tunnel import local_port

    with contextlib.ExitStack() as stack:
        options.name, options.reached = None, gateway.name
        if options.verb_name == "ui":  # a page served here: --port is its own
            port = local_port(None)
            options.title = options.title or gateway.name
        options.url = gateway.url or stack.enter_context(gateway.tunnel(port)).url
        if gateway.needs_key and "OPENAI_API_KEY" not in os.environ:
            os.environ["OPENAI_API_KEY"] = _owner_key(gateway)
        return int(options.verb(options) or 0)


def _owner_key(gateway: _Gateway) -> str:
    """A new secret of the owner's key in the deployment's store."""
    # argparse takes no optional word after a flag.
    for words in (["keys", "rotate", "owner", "--grace", "12h", "--json"], ["keys", "create", "owner", "--json"]):
        done = _run_inside(gateway.inside(words, False), _ANSWER_S)
        if done.returncode == 0:
            return str(json.loads(done.stdout)["key"])
    message = f'could not create a key of "{gateway.name}"'
    detail = (done.stderr or done.stdout).strip()[-500:] or None
    raise PenstockError(message, detail=detail, hint="Set OPENAI_API_KEY to one that you have.")


def _show_page(gateway: _Gateway, port: int, options: argparse.Namespace) -> int:
    """Open the live page, through a tunnel where that is needed."""
    from penstock import paths, run_folder
    from penstock.cli import dashboard

    def show(url: str) -> None:
        dashboard.show(options, run, dashboard.PageAddress(f"{url}/dashboard", key))

    run = run_folder.Run(paths.home() / "runs" / gateway.name)

    key = gateway.page_key()
    if gateway.url is None:
        return _hold(gateway.tunnel, gateway.place, port, f"dashboard {gateway.name}", show)
    show(gateway.url)
    return 0


def _show_chat_page(gateway: _Gateway, page: _ChatPage, port: int, options: argparse.Namespace) -> int:
    """Open the chat page, through a tunnel where that is needed."""
    from penstock import paths, run_folder
    from penstock.cli import dashboard, ui

    run = run_folder.Run(paths.home() / "runs" / gateway.name)

    def show(url: str) -> None:
        dashboard.show(options, run, ui.page_address(url, page.key))

    if page.url is None:
        return _hold(page.tunnel, gateway.place, port, f"ui {gateway.name}", show)
    show(page.url)
    return 0


def _hold_open(gateway: _Gateway, port: int) -> int:
    again = f"tunnel {gateway.name} --port {port}"
    text = f"{gateway.name} is at {{url}}/v1 until Ctrl-C"
    return _hold(gateway.tunnel, gateway.place, port, again, lambda url: print(text.format(url=url), flush=True))


def _hold(
    opened: Callable[[int], AbstractContextManager[Tunnel]],
    place: str,
    port: int,
    again: str,
    begin: Callable[[str], None],
) -> int:
    """A tunnel to `place` until Ctrl-C; `begin` gets its URL. `again`: the verb that opens another one."""
    with opened(port) as tunnel:
        begin(tunnel.url)
        is_over = threading.Event()
        for number in _ENDS:
            signal.signal(number, lambda *_: is_over.set())
        while not is_over.wait(_LOOK_S):
            stderr = tunnel.last_words()
            if stderr is not None:
                hint = f"Run it again: penstock {again}"
                raise PenstockError(f"lost the tunnel to {place}", detail=stderr or None, hint=hint, is_retryable=True)
    return 0


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
