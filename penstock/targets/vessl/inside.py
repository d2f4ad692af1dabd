"""Runs `keys` or `usage` next to the gateway, by the run's control port, as if it ran here.

python -m penstock.targets.vessl.inside RUN_FOLDER URL WORD ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Run
from penstock.targets.vessl.api import control
from penstock.wire.container import PATH, Done, Verb

_ANSWER_S = 90.0


def main(argv: Sequence[str]) -> int:
    """The verb's own exit code; its output goes where ours goes."""
    run, url, words = Run(Path(argv[0])), argv[1], tuple(argv[2:])
    answer = control(url, run.admin_token(), _ANSWER_S).post_json(f"{PATH}/verb", Verb(words))
    done = msgspec.convert(answer, Done)
    sys.stdout.write(done.out)
    sys.stderr.write(done.err)
    return done.code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PenstockError as exc:
        sys.exit(f"penstock: {exc.message}")
