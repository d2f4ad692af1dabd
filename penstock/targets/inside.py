"""`penstock keys`, `usage`, `dashboard --ray` next to a gateway, asked for by another machine: the two ends of that."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import PenstockError
from penstock.wire.command import Done

_VERBS = ("keys", "usage", "dashboard")
_RUN_S = 60.0
_SEEN_S = 1.0  # a gateway reads changed keys every half second: they count when the answer comes


def run(words: Sequence[str], environ: Mapping[str, str]) -> Done:
    """The verb's output and exit code. Blocks; runs no other verb."""
    if not words or words[0] not in _VERBS:
        return Done(2, "", f"penstock: only {', '.join(_VERBS)} run next to a gateway\n")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )
    except subprocess.TimeoutExpired:
        return Done(1, "", f"penstock: no answer within {_RUN_S:.0f} s\n")
    if words[0] == "keys" and done.returncode == 0:
        time.sleep(_SEEN_S)
    return Done(done.returncode, done.stdout, done.stderr)


def main(ask: Callable[[list[str]], Done]) -> None:
    """The program on the machine that asks: prints what `ask` answers to its arguments, and exits as the verb did."""
    try:
        done = ask(sys.argv[1:])
    except PenstockError as exc:
        sys.exit(f"penstock: {'. '.join(filter(None, [exc.message, exc.detail, exc.hint]))}")
    sys.stdout.write(done.out)
    sys.stderr.write(done.err)
    sys.exit(done.code)
