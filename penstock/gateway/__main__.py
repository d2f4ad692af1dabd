"""python -m penstock.gateway CONFIG.json: serves in the foreground until SIGTERM or SIGINT, then drains.

Exit codes: 0 after a drain, 2 when the config, an address or the store cannot be used. A second signal ends it at once
with 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from penstock.errors import PenstockError
from penstock.gateway import compiled

log = logging.getLogger("penstock.gateway")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.gateway", description="The gateway, alone.")
    parser.add_argument("config", type=Path, help="a JSON file, see docs/reference/gateway.md")
    options = parser.parse_args(arguments)
    compiled.activate()  # before any of the modules that it is for
    from penstock.gateway.config import load_config, read_token
    from penstock.gateway.workers.parent import serve

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s gateway: %(message)s")
    try:
        config = load_config(options.config)
        serve(config, read_token(Path(config.admin_token_file)))
    except PenstockError as error:
        facts = (error.message, (error.detail or "").replace("\n", "; "), error.hint)
        log.error(" | ".join(fact for fact in facts if fact))
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
