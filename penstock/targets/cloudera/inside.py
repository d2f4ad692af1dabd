"""`penstock keys` and `usage` next to the gateway's store: `python -m penstock.targets.cloudera.inside RUN WORDS...`.

The API runs no command in a pod, so the words go into a file of the project, which the application's program answers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from penstock.errors import PenstockError
from penstock.paths import write_atomically
from penstock.run_folder import Run
from penstock.targets.cloudera import names, session
from penstock.targets.cloudera.api import Workbench

VERBS = ("keys", "usage")
_FOLDER = "asked"
_ANSWER_S, _LOOK_S, _RUN_S = 60.0, 0.5, 30.0
_SEEN_S = 1.0  # a gateway reads changed keys every half second: they count when the answer comes


class Question(msgspec.Struct, frozen=True):
    words: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True):
    """What the command printed; `code`: its exit code."""

    code: int
    out: str
    err: str


def answer_all(run: Run) -> None:
    """Run what was asked since the last call; of the application's program."""
    for path in sorted((run.path / _FOLDER).glob("*.question")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # one that is not whole yet is read again
            question = msgspec.json.decode(path.read_bytes(), type=Question)
            path.unlink()
            write_atomically(path.with_suffix(".answer"), msgspec.json.encode(_run(run, question.words)), mode=0o600)


def _run(run: Run, words: tuple[str, ...]) -> Answer:
    if not words or words[0] not in VERBS:
        return Answer(2, "", f"penstock: only {' and '.join(VERBS)} run next to a gateway\n")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *words],
            env=_environment(run),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(1, "", f"penstock: no answer within {_RUN_S:.0f} s\n")
    if words[0] == "keys" and done.returncode == 0:
        time.sleep(_SEEN_S)
    return Answer(done.returncode, done.stdout, done.stderr)


def _environment(run: Run) -> dict[str, str]:
    store = run.deployment().gateway.store or str(run.store_file)
    return {**os.environ, "PENSTOCK_STORE": store, "COLUMNS": os.environ.get("COLUMNS", "120")}


def ask(workbench: Workbench, run: Run, words: tuple[str, ...]) -> Answer:
    """Ask the application's program, and wait.  Raises PenstockError."""
    name = f"{names.in_project(names.run_path(run.name))}/{_FOLDER}/{secrets.token_hex(8)}"
    workbench.upload(f"{name}.question", msgspec.json.encode(Question(words)))
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        data = workbench.download(f"{name}.answer")
        if data is not None:
            workbench.delete_file(f"{name}.answer")  # it may hold a key
            return msgspec.json.decode(data, type=Answer)
        time.sleep(_LOOK_S)
    workbench.delete_file(f"{name}.question")
    raise PenstockError(
        f'the application of "{run.name}" did not answer within {_ANSWER_S:.0f} s',
        hint=f"Whether it runs: penstock status {run.name}",
        is_retryable=True,
    )


def main(words: list[str]) -> int:
    run = Run(Path(words[0]))
    if session.is_inside(run):
        return subprocess.call([sys.executable, "-m", "penstock", *words[1:]], env=_environment(run))
    block = names.block_of(run.deployment())
    workbench = session.connect(block)
    session.find_project(workbench, block)
    answer = ask(workbench, run, tuple(words[1:]))
    sys.stdout.write(answer.out)
    sys.stderr.write(answer.err)
    return answer.code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PenstockError as exc:
        sys.exit(f"penstock: {exc.message}. {exc.hint or ''}")
