"""`penstock keys`, `usage` and `dashboard --ray` next to the gateway: `python -m penstock.targets.cloudera.inside RUN
WORDS...`.

The API runs no command in a pod, so the words go into a file of the project, which the application's program answers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

import msgspec

from penstock.errors import PenstockError
from penstock.paths import write_atomically
from penstock.run_folder import Run
from penstock.targets import inside
from penstock.targets.cloudera import names, placing, session
from penstock.targets.cloudera.api import Workbench
from penstock.wire.command import Done, Verb

_FOLDER = "asked"
_ANSWER_S, _LOOK_S = 90.0, 0.5
_UNREAD_S = 600.0  # an answer may hold a secret: one whose asker was ended does not stay


def answer_all(run: Run) -> None:
    """Run what was asked since the last call; of the application's program."""
    for path in (run.path / _FOLDER).glob("*.answer"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNREAD_S:
                path.unlink()
    for path in sorted((run.path / _FOLDER).glob("*.question")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # one that is not whole yet is read again
            verb = msgspec.json.decode(path.read_bytes(), type=Verb)
            path.unlink()
            write_atomically(
                path.with_suffix(".answer"), msgspec.json.encode(inside.run(verb.words, _environment(run))), mode=0o600
            )


def _environment(run: Run) -> dict[str, str]:
    store = run.deployment().gateway.store or str(run.store_file)
    return {**os.environ, "PENSTOCK_STORE": store, "COLUMNS": os.environ.get("COLUMNS", "120")}


def ask(workbench: Workbench, run: Run, words: tuple[str, ...]) -> Done:
    """Ask the application's program, and wait.  Raises PenstockError."""
    placing.require_gateway(workbench, run)
    name = f"{names.in_project(names.run_path(run.name))}/{_FOLDER}/{secrets.token_hex(8)}"
    workbench.upload(f"{name}.question", msgspec.json.encode(Verb(words)))
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        data = workbench.download(f"{name}.answer")
        if data is not None:
            workbench.delete_file(f"{name}.answer")  # it may hold a key
            return msgspec.json.decode(data, type=Done)
        time.sleep(_LOOK_S)
    workbench.delete_file(f"{name}.question")
    message = f'the application of "{run.name}" did not answer within {_ANSWER_S:.0f} s'
    raise PenstockError(message, hint=f"Whether it runs: penstock status {run.name}", is_retryable=True)


def _asked(arguments: list[str]) -> Done:
    run, words = Run(Path(arguments[0])), tuple(arguments[1:])
    if session.is_inside(run):
        return inside.run(words, _environment(run))
    block = names.block_of(run.deployment())
    workbench = session.connect(block)
    session.find_project(workbench, block)
    return ask(workbench, run, words)


if __name__ == "__main__":
    inside.main(_asked)
