"""The verb `ui`: opens the chat page of a deployment in the browser, or serves one for any address until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import arguments, dashboard, keys
from penstock.cli.dashboard import PageAddress
from penstock.cli.output import print_step
from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.chat.page.config import PageConfig
    from penstock.run_folder import Part, Run

_START_S = 120.0  # gradio's import takes seconds, on a busy machine many
_LOOK_S = 0.3
_MEANING = "The key in it opens the chat page, and everything else that the deployment's owner may ask."


def register(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("--url", help="any OpenAI-compatible address instead of a deployment (key: $OPENAI_API_KEY)")
    add_port = arguments.whole(0, 65535)
    parser.add_argument(
        "--port", type=add_port, metavar="PORT", help="of a page served here (default: 7860), or of a tunnel's end"
    )
    parser.add_argument("--host", help="of a page served here (default: 127.0.0.1); beyond loopback it needs a key")
    parser.add_argument("--title", help="of a page served here")
    parser.add_argument("--model", help="the model that a page served here asks first")
    parser.add_argument("--system", metavar="TEXT", help="the system message of a page served here")
    parser.add_argument("--no-open", action="store_true", help="print the address, with the key, and open nothing")
    arguments.add_json(parser, "print the address and the key as JSON, and open nothing")
    examples = ("penstock ui", "penstock ui qwen --no-open", "penstock ui --url https://api.example.com/v1")
    arguments.complete(parser, _run, examples)


def page_address(page: str, key: str | None) -> PageAddress:
    """The link that logs in by itself. `page`: where the page is."""
    place = page.rstrip("/")
    return PageAddress(f"{place}/" if key is None else f"{place}/login", key, "ui", _MEANING)


def _run(options: argparse.Namespace) -> int:
    from penstock import paths, run_folder
    from penstock.chat.page import published

    url = options.url or (None if options.name else os.environ.get("OPENAI_BASE_URL"))
    folder = str(paths.home() / "ui")
    if url is None and options.name is None and published.names_a_server(os.environ):
        return _serve(options, published.config_of(os.environ, folder), os.environ.get("OPENAI_API_KEY"))
    if url is not None:
        from penstock.wire.client import Client

        url = Client(url).base_url
        return _serve(options, _config(url, folder), os.environ.get("OPENAI_API_KEY"))
    run = run_folder.choose(options.name)
    if run.is_ended():
        raise UserError(f'cannot open the chat page of "{run.name}": it is down', hint="penstock ls")
    part = page_of(run)
    if part is None:
        gateway, key = keys.address_and_key(run)
        return _serve(options, _config_of(run, gateway, folder), key)
    key = keys.owner_key(run) if _has_login(run) else None
    dashboard.show(options, run, page_address(part.url or "", key))
    return 0


def _has_login(run: Run) -> bool:
    page = run.deployment().chat_page
    return page is not None and page.login == "keys"


def page_of(run: Run) -> Part | None:
    """The page that the deployment has, once it answers; None where its file has none. One that its target placed has
    a `url` for clients outside alone.  Raises PenstockError."""
    from penstock.deployment.observe import now_state

    if run.deployment().chat_page is None:
        return None
    deadline, shown = time.monotonic() + _START_S, None
    while True:
        part = now_state(run, time.time()).ui
        if part is not None and part.state == "running" and (part.url or part.unit) is not None:
            return part
        is_waiting = part is None or part.state in ("starting", "queued") or part.note is None
        note = part.note if part is not None and is_waiting else None
        if note not in (None, shown):
            print_step(f"the chat page is not there yet: {note}")
            shown = note
        if not is_waiting or time.monotonic() > deadline:
            reason = part.note or (part.restarts[-1].reason if part.restarts else part.state) if part else "no state"
            message = f'could not open the chat page of "{run.name}": {reason}'
            raise PenstockError(message, hint=f"penstock logs {run.name} --part ui", is_retryable=True)
        time.sleep(_LOOK_S)


def _config(gateway: str, folder: str) -> PageConfig:
    from penstock.chat.page.config import PageConfig
    from penstock.chat.page.published import PORT

    return PageConfig(gateway, "127.0.0.1", PORT, folder, has_login=False)


def _config_of(run: Run, gateway: str, folder: str) -> PageConfig:
    import msgspec

    model, price = run.plan().served_names[0], run.deployment().gateway.price
    certificate = run.gateway_file().tls_cert if gateway.startswith("https") else None
    return msgspec.structs.replace(
        _config(gateway, folder), deployment=run.name, title=run.name, model=model, certificate=certificate,
        prices={} if price is None else {model: price},
    )  # fmt: skip


def _serve(options: argparse.Namespace, config: PageConfig, key: str | None) -> int:
    """A page of this command's own, until Ctrl-C."""
    import msgspec

    from penstock.chat.page import __main__ as page
    from penstock.hardware.network import free_lasting_ports
    from penstock.paths import home
    from penstock.run_folder import Run, reachable

    given = {name: getattr(options, name) for name in ("port", "host", "title", "model", "system")}
    if given["port"] == 0:
        given["port"] = free_lasting_ports(1)[0]
    config = msgspec.structs.replace(config, **{name: value for name, value in given.items() if value is not None})
    config = page.with_key(config, key)
    place = f"http://{reachable(f'{config.host}:{config.port}')}"
    run = Run(home() / "runs" / config.deployment if config.deployment else Path())
    is_over = threading.Event()
    shown = (options, run, page_address(place, key or None), place, is_over)
    # Not before the port is ours: the key in the link is for no other program.
    try:
        page.serve(config, threading.Thread(target=_show_once, args=shown, daemon=True).start)
    finally:
        is_over.set()
    return 0


def _show_once(
    options: argparse.Namespace, run: Run, address: PageAddress, place: str, is_over: threading.Event
) -> None:
    """As soon as it answers."""
    from penstock.wire.client import Client

    while not is_over.wait(_LOOK_S):
        with contextlib.suppress(PenstockError):
            Client(place, timeout_s=_LOOK_S).get_text("/health")
            dashboard.show(options, run, address)
            return
