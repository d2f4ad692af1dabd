"""`penstock gateway`. Exit codes: 0 after a drain, 1 after a second signal, 2 when it cannot start."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import arguments
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.gateway.config import GatewayConfig, ServedModel
    from penstock.gateway.service import Sockets
    from penstock.spec.gateway import Traces, Upstream

_amount = arguments.whole(1, 10**12)
_POLICIES = ("least-load", "prefix", "round-robin", "sticky")
# Option -> block and field of the settings, type, metavar, help.
_BOUNDS: dict[str, tuple[str, str, Callable[[str], object], str, str]] = {
    "--queue-requests": ("queue", "n_requests", _amount, "N", "requests that may wait (default: 4096)"),
    "--queue-bytes": ("queue", "body_bytes", _amount, "N", "of their bodies together (default: 1073741824)"),
    "--queue-key-share": ("queue", "key_share", arguments.share, "X", "one key's part of the queue (default: 0.5)"),
    "--max-header-bytes": ("limits", "head_bytes", _amount, "N", "of a request's head (default: 32768)"),
    "--max-headers": ("limits", "n_headers", _amount, "N", "header lines (default: 100)"),
    "--max-body-bytes": ("limits", "body_bytes", _amount, "N", "of a request's body (default: 33554432)"),
    "--max-connections": ("limits", "n_connections", _amount, "N", "of clients, per worker (default: 16384)"),
    "--max-connections-per-address": ("limits", "n_connections_per_address", _amount, "N", "of one (default: half)"),
    "--idle-timeout": ("limits", "idle_s", arguments.seconds, "SECONDS", "between requests (default: 120)"),
    "--header-timeout": ("limits", "head_s", arguments.seconds, "SECONDS", "for a head to come (default: 20)"),
    "--body-timeout": ("limits", "body_s", arguments.seconds, "SECONDS", "between pieces of a body (default: 30)"),
    "--stall-timeout": ("limits", "stall_s", arguments.seconds, "SECONDS", "client reads nothing (default: 300)"),
    "--total-timeout": ("limits", "total_s", arguments.seconds, "SECONDS", "request and answer (default: none)"),
}


def _pair(example: str) -> Callable[[str], tuple[str, str]]:
    def read(text: str) -> tuple[str, str]:
        model, equals, value = text.partition("=")
        # A name may hold "=" no more than it may hold a line end: it is looked up, written into logs and metrics.
        if not (equals and model and value) or not model.isprintable():
            raise arguments.refusal(text, example)
        return model, value

    return read


_engine = _pair("MODEL=URL, like qwen=http://127.0.0.1:9100")
_key = _pair("MODEL=FILE or MODEL=env:NAME, like qwen=qwen.key")
_alias = _pair("MODEL=NAME, like qwen=gpt-4o")


def _traces(text: str) -> Traces:
    from penstock.spec.gateway import Traces

    return Traces(text)


def _days(text: str) -> int | None:
    if text == "all":
        return None
    return arguments.whole(1, 10**6, what='"all" or a whole number of days')(text)


def register(sub: argparse.ArgumentParser) -> None:
    """`dest` of an argument is the field of the config that it sets, where there is one."""
    add = sub.add_argument
    add("--listen", default="127.0.0.1:9300", metavar="ADDRESS", help="address for clients: HOST:PORT or unix:/path")
    text = "a running engine: http://HOST:PORT or unix:/path; repeat it for more engines and models"
    add("--upstream", action="append", required=True, type=_engine, metavar="MODEL=URL", help=text)
    text = "the key that a model's engines ask for: a file of mode 600, or env:NAME for a variable"
    add("--upstream-key", action="append", default=[], type=_key, metavar="MODEL=FILE", help=text)
    add("--alias", action="append", default=[], type=_alias, metavar="MODEL=NAME", help="another name")
    add("--auth", choices=("none", "keys"), default="none", help="none: on loopback and Unix sockets only")
    add("--store", metavar="FILE|URL", help="keys and usage: a SQLite file, or postgresql://...")
    text = "how long a request's row is kept; older ones become sums by day"
    add("--ledger-days", type=_days, default=90, metavar="N|all", help=text)
    add("--policy", choices=_POLICIES, default="least-load", help="which engine of a model gets a request")
    add("--workers", type=arguments.whole(1, 64), default=1, metavar="N", help="processes on the one port")
    add("--max-in-flight", type=_amount, metavar="N", help="requests on one engine; others wait here")
    text = "web pages that may read answers, or *"
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", dest="allowed_origins", help=text)
    text = "open a route that administers engines, like /v1/load_lora_adapter"
    add("--engine-route", action="append", default=[], metavar="/PATH", dest="engine_routes", help=text)
    add("--path-prefix", metavar="/PATH", help="serve every route below this path too")
    add("--tls-cert", metavar="FILE", help="certificate chain, PEM: clients speak TLS")
    add("--tls-key", metavar="FILE", help="its key, PEM, without a passphrase")
    add("--access-log", metavar="FILE|stderr", help="one JSON line a request, without prompts and keys")
    text = "send a span of each request to an OpenTelemetry collector, like http://127.0.0.1:4318"
    add("--traces", type=_traces, metavar="URL", help=text)
    add("--admin", metavar="ADDRESS", help="admin address: HOST:PORT or unix:/path (needs its token)")
    add("--admin-token-file", metavar="FILE", help="the token of admin calls and /metrics; a file of mode 600")
    add("--hold", type=arguments.seconds, default=60.0, metavar="SECONDS", dest="hold_s", help="to wait for an engine")
    text = "to finish requests after SIGTERM"
    add("--drain", type=arguments.seconds, default=30.0, metavar="SECONDS", dest="drain_s", help=text)
    for option, (_, _, read, metavar, text) in _BOUNDS.items():
        add(option, type=read, metavar=metavar, help=text)
    arguments.add_json(sub, "print the addresses as one line of JSON")
    examples = (
        "penstock gateway --upstream qwen=http://127.0.0.1:9100",
        "penstock gateway --upstream m=http://10.0.0.1:8000 --upstream m=http://10.0.0.2:8000 --policy prefix",
        "penstock gateway --upstream m=unix:/run/m.sock --listen 0.0.0.0:8000 --auth keys --store keys.db",
    )
    arguments.complete(sub, run, examples)


def run(options: argparse.Namespace) -> int:
    """Serves until a signal. Raises UserError."""
    import logging
    import secrets

    from penstock.gateway import compiled

    compiled.activate()  # before any of the modules that it is for
    from penstock.gateway.workers.parent import serve
    from penstock.paths import read_token

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s gateway: %(message)s")
    with admin_folder() as folder:
        config = make_config(options, folder)
        # Without a token nobody but its workers calls the admin address: a socket that only this user reaches.
        token = read_token(Path(config.admin_token_file)) if config.admin_token_file else secrets.token_hex(16)
        serve(config, token, lambda sockets: _tell(options, config, sockets))
    return 0


@contextlib.contextmanager
def admin_folder() -> Iterator[Path]:
    """A folder for the admin socket. The folders of gateways that were killed are removed.

    Its lock ends with the last process of the gateway, in whichever namespace, so a free lock proves that all are gone.
    """
    import fcntl
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(prefix="penstock-gw-") as name:
        folder = Path(name)
        for lock in folder.parent.glob("penstock-gw-*/lock"):
            with contextlib.suppress(OSError), lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.stat().st_uid == os.geteuid():
                    shutil.rmtree(lock.parent)
        with (folder / "new").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "new").rename(folder / "lock")  # never seen without its owner
            yield folder


def make_config(options: argparse.Namespace, folder: Path) -> GatewayConfig:
    """The checked config. Raises UserError. `folder` holds the admin socket when no admin address is given."""
    from penstock.gateway.config import GatewayConfig, check, is_local_address, parse_address
    from penstock.observe import names
    from penstock.spec.gateway import Limits, QueueBounds

    if options.auth == "none" and parse_address(options.listen) and not is_local_address(options.listen):
        detail = "Anyone who can reach that address could use the engines; without keys, only this machine may."
        hint = "--auth keys --store FILE, after `penstock keys create --store FILE`; or listen on 127.0.0.1."
        raise UserError(f"cannot listen on {options.listen} with --auth none", detail=detail, hint=hint)
    if options.auth == "keys" and options.store is None:
        message = "cannot check keys without a store"
        hint = "--store FILE, after `penstock keys create --name NAME --store FILE`"
        raise UserError(message, detail="--auth keys looks keys up in the store, and none is named.", hint=hint)
    if options.admin and not options.admin_token_file:
        message = "cannot open an admin address without its token"
        hint = "(umask 077; openssl rand -hex 16 > token); --admin-token-file token"
        raise UserError(message, detail="Anyone who can call it decides where requests go.", hint=hint)
    bounds: dict[str, dict[str, Any]] = {"limits": {}, "queue": {}}
    for option, (block, field, *_) in _BOUNDS.items():
        value = getattr(options, option.strip("-").replace("-", "_"))
        if value is not None:
            bounds[block][field] = value
    settings = {name: value for name, value in vars(options).items() if name in GatewayConfig.__struct_fields__}
    settings |= {
        "admin": options.admin or f"unix:{folder}/admin.sock",
        "admin_token_file": options.admin_token_file or "",
        "models": _models(options),
        "upstreams": _upstreams(options),
        "limits": Limits(**bounds["limits"]),
        "queue": QueueBounds(**bounds["queue"]),
        "allowed_origins": tuple(options.allowed_origins),
        "engine_routes": tuple(options.engine_routes),
        "engine_families": names.prefixes(),
        "renamed": {rename.old: rename.name for rename in names.renames()},
    }
    config = GatewayConfig(**settings)
    check(config, "these arguments of `penstock gateway`")
    return config


def _upstreams(options: argparse.Namespace) -> tuple[Upstream, ...]:
    from penstock.spec.gateway import Upstream

    places = dict(options.upstream_key)
    strangers = [model for model in places if model not in dict(options.upstream)]
    if strangers:
        raise UserError(f"--upstream-key names model {strangers[0]!r}, which no --upstream has")
    upstreams = []
    for model, url in options.upstream:
        place = places.get(model, "")
        if place.startswith("env:"):
            upstreams.append(Upstream(url, model, key_env=place.removeprefix("env:")))
        else:
            upstreams.append(Upstream(url, model, key_file=place or None))
    return tuple(upstreams)


def _models(options: argparse.Namespace) -> tuple[ServedModel, ...]:
    from penstock.gateway.config import ServedModel

    names = list(dict.fromkeys(model for model, _ in options.upstream))
    strangers = [model for model, _ in options.alias if model not in names]
    if strangers:
        raise UserError(f"--alias names model {strangers[0]!r}, which no --upstream has", hint=f"one of {names}")
    return tuple(ServedModel(name, tuple(alias for model, alias in options.alias if model == name)) for name in names)


def _tell(options: argparse.Namespace, config: GatewayConfig, sockets: Sockets) -> None:
    listen = _bound(config.listen, sockets.public, "https" if config.tls_cert else "http")
    listen += config.path_prefix or ""
    admin = _bound(config.admin, sockets.admin, "http") if options.admin else None
    if options.json:
        facts: dict[str, Any] = {
            "listen": listen,
            "admin": admin,
            "auth": config.auth,
            "policy": config.policy,
            "workers": config.workers,
            "upstreams": [{"model": upstream.model, "url": upstream.url} for upstream in config.upstreams],
        }
        print(json.dumps(facts), flush=True)
        return
    counts = Counter(upstream.model for upstream in config.upstreams)
    engines = {name: "1 engine" if count == 1 else f"{count} engines" for name, count in counts.items()}
    models = ", ".join(f"{model.name} ({engines[model.name]})" for model in config.models)
    ends = f"; admin on {admin}" if admin else ""
    keys = "keys needed" if config.auth == "keys" else "no keys"
    print(f"listening on {listen}, {keys}: {models}{ends}", flush=True)


def _bound(text: str, sock: Any, scheme: str) -> str:
    if text.startswith("unix:"):
        return text
    return f"{scheme}://{text.rpartition(':')[0]}:{sock.getsockname()[1]}"
