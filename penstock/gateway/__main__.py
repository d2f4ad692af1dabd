"""python -m penstock.gateway CONFIG.json: serves in the foreground until SIGTERM or SIGINT, then drains.

Exit codes: 0 after a drain, 1 after a second signal, 2 when the config, an address or the store cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.gateway import compiled
from penstock.paths import read_token, write_atomically
from penstock.wire.announcement import GatewayAddress

if TYPE_CHECKING:
    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.service import Sockets

log = logging.getLogger("penstock.gateway")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.gateway", description="The gateway, alone.")
    parser.add_argument("config", type=Path, help="a JSON file, see docs/reference/gateway.md")
    parser.add_argument("--address", type=Path, help="write here where this gateway serves, once it listens")
    parser.add_argument("--sockets", type=lambda text: tuple(map(int, text.split(","))), default=(), metavar="N,M")
    parser.add_argument("--unit", default="0", help="the name of this gateway in that file")
    parser.add_argument("--hosts", nargs="+", default=["127.0.0.1"], help="addresses of this machine, the best first")
    options = parser.parse_args(arguments)
    compiled.activate()  # before any of the modules that it is for
    from penstock.gateway.config import load_config
    from penstock.gateway.workers.parent import serve

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s gateway: %(message)s")
    try:
        config = load_config(options.config)
        token = read_token(Path(config.admin_token_file))
        if options.address is None:
            serve(config, token, inherited=options.sockets)
        else:
            serve(_with_free_port(config), token, lambda sockets: _write_address(options, sockets))
    except PenstockError as error:
        facts = (error.message, (error.detail or "").replace("\n", "; "), error.hint)
        log.error(" | ".join(fact for fact in facts if fact))
        return error.exit_code
    return 0


def _with_free_port(config: GatewayConfig) -> GatewayConfig:
    """The config with any free port, where the port that it names is taken on this machine."""
    from penstock.gateway.service import open_sockets

    try:
        open_sockets(config).close()
    except UserError as error:
        host = config.listen.rpartition(":")[0]
        log.warning("%s: taking any other port", error.message)
        return msgspec.structs.replace(config, listen=f"{host}:0")
    return config


def _write_address(options: argparse.Namespace, sockets: Sockets) -> None:
    """Clients that connect from now on wait in the socket's queue until the gateway serves."""
    port, admin_port = sockets.public.getsockname()[1], sockets.admin.getsockname()[1]
    admin = tuple(f"{host}:{admin_port}" for host in options.hosts)
    address = GatewayAddress(options.unit, f"{options.hosts[0]}:{port}", admin)
    write_atomically(options.address, msgspec.json.encode(address))
    log.info("clients: http://%s, admin: %s", address.listen, ", ".join(admin))


if __name__ == "__main__":
    raise SystemExit(main())
