"""The gateway inside a job: `python -m penstock.deployment.gateway_job RUN_FOLDER JOB [ADDRESS ...]`.

It listens on the port that the file names, or any when that is taken, and then says where, in the run's folder on the
shared file system. `ADDRESS`: of the login node, so that of several networks the one is told that leads there.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.gateway import compiled
from penstock.hardware import network
from penstock.paths import write_atomically
from penstock.run_folder import Run
from penstock.wire.announcement import GatewayAddress

if TYPE_CHECKING:
    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.service import Sockets

log = logging.getLogger("penstock.gateway")


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM, then drain; the exit code of the process."""
    compiled.activate()  # before any of the modules that it is for
    from penstock.gateway.config import load_config, read_token
    from penstock.gateway.workers.parent import serve

    run, job, seen_from = Run(Path(argv[0])), argv[1], argv[2:]
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s gateway: %(message)s")
    try:
        config = _with_free_port(load_config(run.gateway_config))
        hosts = own_addresses(seen_from)
        serve(config, read_token(Path(config.admin_token_file)), lambda sockets: _tell(run, job, hosts, sockets))
    except PenstockError as error:
        facts = (error.message, (error.detail or "").replace("\n", "; "), error.hint)
        log.error(" | ".join(fact for fact in facts if fact))
        return error.exit_code
    return 0


def _with_free_port(config: GatewayConfig) -> GatewayConfig:
    from penstock.gateway.service import open_sockets

    try:
        open_sockets(config).close()
    except UserError as error:
        host = config.listen.rpartition(":")[0]
        log.warning("%s: any other port then", error.message)
        return msgspec.structs.replace(config, listen=f"{host}:0")
    return config


def own_addresses(seen_from: Sequence[str]) -> list[str]:
    """This machine's addresses, first those from which it reaches one of these."""
    found = []
    for address in seen_from:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only asks the routes
            found.append(str(probe.getsockname()[0]))
    found += [one.address for one in network.interfaces() if not one.is_virtual]
    beyond = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return beyond or ["127.0.0.1"]


def _tell(run: Run, job: str, hosts: Sequence[str], sockets: Sockets) -> None:
    """Whoever connects now waits in the socket's queue until the gateway serves."""
    port, admin_port = sockets.public.getsockname()[1], sockets.admin.getsockname()[1]
    address = GatewayAddress(job, f"{hosts[0]}:{port}", tuple(f"{host}:{admin_port}" for host in hosts))
    write_atomically(run.gateway_address_file, msgspec.json.encode(address))
    log.info("clients: http://%s, admin: %s", address.listen, ", ".join(address.admin))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
