"""python -m penstock.chat.page [CONFIG.json]: serves the chat page in the foreground until SIGTERM or SIGINT.

Without a file: as the variables of published pages say (published.py), with the key in OPENAI_API_KEY, if any.
Exit code 2: the settings, the extra or the port cannot be used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.chat.page import published
from penstock.chat.page.config import PageConfig
from penstock.errors import PenstockError, UserError
from penstock.paths import home, write_atomically
from penstock.spec.gateway import is_loopback
from penstock.wire.client import Client

EXTRA = "pip install 'penstock[ui]'"


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments:
            config = load(Path(arguments[0]))
        else:
            config = published.config_of(os.environ, str(home() / "ui"))
            config = with_key(config, os.environ.get("OPENAI_API_KEY"))
        serve(config)
    except PenstockError as error:
        facts = (error.message, (error.detail or "").replace("\n", "; "), error.hint)
        say("error: " + " | ".join(fact for fact in facts if fact))
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


def with_key(config: PageConfig, key: str | None) -> PageConfig:
    """The page of one key, which it asks for: not everyone who reaches it may use the key.  Makes `config.folder`.

    Raises UserError, also for an address or a key that no request can have.
    """
    Client(config.gateway, key)
    folder = Path(config.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not key:
            return config
        write_atomically(folder / "key", key.encode(), mode=0o600)
    except OSError as exc:
        raise UserError(f'cannot write "{folder}": {exc.strerror}', hint="Set PENSTOCK_HOME to a folder.") from exc
    return msgspec.structs.replace(config, key_file=str(folder / "key"), has_login=True)


def serve(config: PageConfig, on_listening: Callable[[], None] = lambda: None) -> None:
    """As `server.serve`; gradio finds the environment that it must.  Raises UserError."""
    if not config.has_login and not is_loopback(config.host):
        message = f"cannot serve the chat page on {config.host} without a login: everyone who reaches it could use it"
        raise UserError(message, hint="Listen on 127.0.0.1, or set OPENAI_API_KEY: people then log in with that key.")
    if importlib.util.find_spec("gradio") is None:
        raise UserError("cannot serve the chat page: Gradio is not installed", hint=f"Install it: {EXTRA}")
    settings = environment(config, os.environ)
    os.environ.clear()
    os.environ.update(settings)
    from penstock.chat.page import server  # it imports gradio, which reads the environment

    with contextlib.suppress(KeyboardInterrupt):
        server.serve(config, say, on_listening)


def environment(config: PageConfig, before: Mapping[str, str]) -> dict[str, str]:
    """What gradio must find when it is imported: no telemetry, no hub, no share link, uploads in our folder.

    Its own variables go: they would change where it listens and which files it serves.
    """
    # https://www.gradio.app/guides/environment-variables
    folder = Path(config.folder)
    return {
        **{name: value for name, value in before.items() if not name.startswith("GRADIO_")},
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_RUN_HISTORY": "False",
        "GRADIO_TEMP_DIR": str(folder / "uploads"),
        "GRADIO_EXAMPLES_CACHE": str(folder / "examples"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
