"""python -m penstock.chat.page CONFIG.json: serves the chat page in the foreground until SIGTERM or SIGINT.

Exit codes: 0 after a signal, 2 when the settings, the extra or the port cannot be used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.chat.page.config import PageConfig
from penstock.errors import PenstockError, UserError


def main(arguments: Sequence[str]) -> int:
    try:
        config = load(Path(arguments[0]))
        settings = environment(config, os.environ)
        os.environ.clear()
        os.environ.update(settings)
        from penstock.chat.page import server  # it imports gradio, which reads the environment

        server.serve(config, say)
    except PenstockError as error:
        facts = (error.message, (error.detail or "").replace("\n", "; "), error.hint)
        say(" | ".join(fact for fact in facts if fact))
        return error.exit_code
    return 0


def say(text: str) -> None:
    print(f"penstock: chat page: {text}", file=sys.stderr, flush=True)


def load(path: Path) -> PageConfig:
    """Raises UserError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PageConfig)
    except OSError as exc:
        raise UserError(f'cannot read "{path}": {exc.strerror}') from exc
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise UserError(f'cannot use "{path}": {exc}') from exc


def environment(config: PageConfig, before: Mapping[str, str]) -> dict[str, str]:
    """What gradio must find when it is imported: no telemetry, no hub, no share link, uploads in our folder.

    Its own variables go: they would change where it listens and which files it serves.
    """
    # https://www.gradio.app/guides/environment-variables
    folder = Path(config.folder)
    kept = {name: value for name, value in before.items() if not name.startswith("GRADIO_")}
    settings = {
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_RUN_HISTORY": "False",
        "GRADIO_TEMP_DIR": str(folder / "uploads"),
        "GRADIO_EXAMPLES_CACHE": str(folder / "examples"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return kept | settings | ({"SSL_CERT_FILE": config.ca_file} if config.ca_file else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
