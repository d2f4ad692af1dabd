"""Runs `keys` or `usage` next to the gateway, by the run's control port, as if it ran here.

python -m penstock.targets.vessl.inside RUN_FOLDER URL WORD ...
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.run_folder import Run
from penstock.targets import inside
from penstock.targets.vessl.api import control
from penstock.wire.command import Done, Verb
from penstock.wire.container import PATH

_ANSWER_S = 90.0


def ask(arguments: list[str]) -> Done:
    run, url, words = Run(Path(arguments[0])), arguments[1], tuple(arguments[2:])
    return msgspec.convert(control(url, run.admin_token(), _ANSWER_S).post_json(f"{PATH}/verb", Verb(words)), Done)


if __name__ == "__main__":
    inside.main(ask)
