"""Asks vLLM, without a GPU, whether it takes the arguments of `vllm serve`, and a model in a folder with them.

Exit code 2, and why on standard error, where it refuses them; 0 where it does not, or cannot be asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.planner import Plan


def words(plan: Plan, flags: Sequence[str]) -> tuple[str, ...]:
    """For Python, to ask about a plan: variables of vLLM, and the command line of its server."""
    env = [f"{name}={value}" for name, value in plan.env.items() if name.startswith("VLLM_")]
    return ("-m", __name__, *env, "serve", plan.model.path, *flags)


def main(argv: Sequence[str]) -> int:
    start = argv.index("serve")
    os.environ.update({name: value for name, _, value in (word.partition("=") for word in argv[:start])})
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    try:  # as vLLM 0.32 and 0.33 have them; where another version does not, its start will tell
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        return 0
    parser, command = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    options = parser.parse_args(argv[start:])  # a refusal exits with 2
    try:
        command.validate(options)
        options.model = options.model_tag
        if Path(options.model).is_dir():
            AsyncEngineArgs.from_cli_args(options).create_model_config()
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
