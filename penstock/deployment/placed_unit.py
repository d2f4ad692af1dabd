"""Starts a gateway, a controller or a chat page whose target brought the deployment to its machine, not the run folder.

    python -m penstock.deployment.placed_unit gateway RUN_FOLDER --listen HOST:PORT --admin HOST:PORT
        [--store STORE] [--shared] [--tls FOLDER]
    python -m penstock.deployment.placed_unit controller RUN_FOLDER --unit NAME --listen HOST:PORT --admin HOST:PORT
    python -m penstock.deployment.placed_unit ui RUN_FOLDER --listen HOST:PORT --gateway URL
        [--tls FOLDER]

The folder holds spec.yaml, plan.json, artifact.json and secrets/; the rest is made here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock import __version__, processes, targets
from penstock.deployment import gateway_config, ui
from penstock.errors import PenstockError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore
from penstock.paths import write_atomically
from penstock.run_folder import Desired, Record, Run


def main(argv: Sequence[str] | None = None) -> int:
    """Never returns where it can: the unit's own program takes over this process, and its signals."""
    parser = argparse.ArgumentParser(prog="python -m penstock.deployment.placed_unit")
    parser.add_argument("kind", choices=("gateway", "controller", "ui"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--unit", default="0")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--admin")
    parser.add_argument("--gateway", help="the base URL that the chat page asks")
    parser.add_argument("--store", help="keys and usage, in place of a file in the run folder")
    parser.add_argument("--shared", action="store_true", help="the store is on a file system of several machines")
    parser.add_argument("--tls", type=Path, help="a folder with tls.crt and, of a gateway, tls.key: clients speak TLS")
    options = parser.parse_args(argv)
    run = Run(options.run)
    if options.kind == "ui":
        host, _, port = options.listen.rpartition(":")
        certificate = None if options.tls is None else str(options.tls / "tls.crt")
        program = ["-m", "penstock.chat.page"]
        program.append(str(ui.write_config(run, options.gateway, host, int(port), certificate)))
    else:
        _write_gateway_config(run, options.listen, options.admin, options.store, options.tls)
        program = ["-m", "penstock.gateway", str(run.gateway_config)]
    if options.shared and (place := run.gateway_file().store) is not None:
        store.share(place)
    if options.kind == "gateway" and run.first_key_file.exists() and (place := run.gateway_file().store) is not None:
        with contextlib.closing(store.connect(place)) as database:
            KeyStore(database).introduce("first", run.first_key_file.read_text("utf-8").strip(), time.time())
    if options.kind == "controller":
        _complete(run)
        program = ["-m", "penstock.deployment.controller", str(run.path), "--unit", options.unit]
    marks = processes.marks(str(run.path), run.name, options.kind)
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **marks})


def _write_gateway_config(run: Run, listen: str, admin: str, store: str | None, tls: Path | None) -> None:
    deployment = run.deployment()
    config = gateway_config.make(run, deployment, run.plan(), listen, admin)
    if store is not None and deployment.gateway.store is None:
        config = msgspec.structs.replace(config, store=store)
    if tls is not None:
        config = msgspec.structs.replace(config, tls_cert=str(tls / "tls.crt"), tls_key=str(tls / "tls.key"))
    write_atomically(run.gateway_config, msgspec.json.format(msgspec.json.encode(config), indent=2), mode=0o600)


def _complete(run: Run) -> None:
    """What `up` would have written; what a controller before this one left in the target follows."""
    deployment = run.deployment()
    target = targets.load(deployment.target)
    record = Record(
        secrets.token_hex(6), deployment.name, target.name, time.time(), __version__, target.placed(deployment)
    )
    write_atomically(run.path / "run.json", msgspec.json.encode(record))
    for folder in (run.path / "logs", run.gateway_folder):
        folder.mkdir(exist_ok=True)
    (run.path / "events.jsonl").touch()
    run.write_desired(Desired("up", deployment.replicas.first))
    target.fetch(run)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PenstockError as exc:
        sys.exit(f"penstock: {exc.message}. {exc.hint or ''}")
