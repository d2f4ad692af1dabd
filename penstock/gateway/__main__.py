"""python -m penstock.gateway CONFIG.json: serves in the foreground until SIGTERM or SIGINT, then drains.

Exit codes: 0 after a drain, 2 when the config or an address cannot be used. A second signal ends it at once with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from penstock.errors import PenstockError
from penstock.gateway.assembly import Gateway
from penstock.gateway.config import GatewayConfig, load_config, read_token

log = logging.getLogger("penstock.gateway")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.gateway", description="The gateway, alone.")
    parser.add_argument("config", type=Path, help="a JSON file, see docs/gateway.md")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s gateway: %(message)s")
    try:
        config = load_config(options.config)
        gateway = Gateway(config, read_token(Path(config.admin_token_file)))
    except PenstockError as error:
        facts = (error.message, (error.detail or "").replace("\n", "; "), error.hint)
        log.error(" | ".join(fact for fact in facts if fact))
        return error.exit_code
    _run(gateway, config)
    return 0


def _run(gateway: Gateway, config: GatewayConfig) -> None:
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        log.info("uvloop is not installed: serving on asyncio, slower")
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(gateway, config))


async def _serve(gateway: Gateway, config: GatewayConfig) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await gateway.start()
    await stop.wait()
    n_cut = await gateway.stop()
    if n_cut:
        log.warning("%d requests were not done within drain_s %.1f", n_cut, config.drain_s)


if __name__ == "__main__":
    raise SystemExit(main())
