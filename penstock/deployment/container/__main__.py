"""The program of a container that holds a whole deployment: gateway, controller and replicas, as one machine has them.

    PENSTOCK_SECRET=TOKEN[:HASH] python -m penstock.deployment.container FILE --target TARGET --control PORT
        [--weights FOLDER] [--max-hours H]

FILE is the deployment file, whose target placed the container; TARGET places the replicas inside. The machines of verbs
reach it by the control port (`wire/container.py`). It ends when it is told to, by SIGTERM, after H hours, when another
process ended the deployment, and a few minutes after a start that failed: what serves nothing shall not be charged.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock import __version__, paths
from penstock.deployment.container import control
from penstock.deployment.container.holder import Holder, Settings
from penstock.deployment.container.log_copy import LogCopy
from penstock.errors import PenstockError, UserError
from penstock.run_folder import Run
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.text import show_seconds
from penstock.wire.container import SECRET_VARIABLE

_TICK_S = 0.3
_KEEP_EVERY_S = 5.0
_FAILED_S = 300.0  # so long a failed start can be asked why it failed
_SHORTEST_TOKEN = 16


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.deployment.container")
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", required=True, help="places the replicas inside")
    parser.add_argument("--control", type=int, required=True, help="the control port")
    parser.add_argument("--weights", help="the folder of models from a hub, in place of cache.weights")
    parser.add_argument("--max-hours", type=float, help="ends after so long")
    parser.add_argument("--failed-s", type=float, default=_FAILED_S, help="how long a failed start stays")
    options = parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    token, key_hash = _secret()
    deployment = inside(reading.load(options.file), options.target, options.weights)
    holder = Holder(deployment, Settings(token, key_hash), stop)
    server = control.listen("0.0.0.0", options.control, token, holder)
    deadline = float("inf") if options.max_hours is None else time.monotonic() + options.max_hours * 3600
    try:
        return _serve(holder, stop, deadline, options.failed_s)
    finally:
        server.close()


def inside(deployment: Deployment, target: str, weights: str | None) -> Deployment:
    """The file as the container has it: its gateway and its chat page listen for those who reach the container."""
    page = deployment.ui
    if not isinstance(page, bool):
        page = msgspec.structs.replace(page, host="0.0.0.0")
    elif page:
        page = msgspec.structs.replace(deployment.chat_page, host="0.0.0.0") if deployment.chat_page else page
    cache = deployment.cache if weights is None else msgspec.structs.replace(deployment.cache, weights=weights)
    gateway = msgspec.structs.replace(deployment.gateway, host="0.0.0.0")
    changes = {deployment.target: None, "target": target, "gateway": gateway, "cache": cache, "ui": page}
    return msgspec.structs.replace(deployment, **changes)


def _secret() -> tuple[str, str | None]:
    """The admin token, and the hash of a client's key; no process that is started here has them in its variables."""
    token, _, key_hash = os.environ.pop(SECRET_VARIABLE, "").strip().partition(":")
    if len(token) < _SHORTEST_TOKEN:
        message = f"{SECRET_VARIABLE} has no token of at least {_SHORTEST_TOKEN} characters"
        raise UserError(message, hint="`penstock up` makes the secret; by hand: openssl rand -hex 24")
    return token, key_hash or None


def _serve(holder: Holder, stop: threading.Event, deadline: float, failed_s: float) -> int:
    starter = threading.Thread(target=holder.start, name="start", daemon=True)
    starter.start()
    run = Run(paths.home() / "runs" / holder.deployment.name)
    logs, why, failed_at, kept_at = LogCopy(run.path / "logs"), "", None, 0.0
    while not why:
        _print(logs.lines())
        now = time.monotonic()
        if stop.is_set():
            why = "it was ordered to end"
        elif now > deadline:
            why = "its time (max_hours) is over"
        elif holder.run is not None and (holder.run.desired().state == "down" or not holder.run.exists()):
            why = "the deployment was ended"
        elif holder.has_failed:
            failed_at = now if failed_at is None else failed_at
            if now - failed_at > failed_s:
                why = f"its start failed {show_seconds(failed_s)} ago"
        else:
            failed_at = None
        if not why and now - kept_at > _KEEP_EVERY_S:
            holder.keep_up()
            kept_at = now
        stop.wait(0 if why else _TICK_S)
    print(f"penstock: ending, since {why}", flush=True)
    holder.finish()
    _print(logs.lines())
    print("penstock: everything ended", flush=True)
    return 1 if failed_at is not None else 0


def _print(lines: Sequence[str]) -> None:
    if lines:
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    try:
        print(f"penstock {__version__}: a whole deployment in this container", flush=True)
        paths.folder()
        sys.exit(main())
    except PenstockError as exc:
        sys.exit(f"penstock: {exc.message}. {exc.detail or ''} {exc.hint or ''}")
