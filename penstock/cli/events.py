"""The verb `events`: what happened to a deployment, and who changed it."""

from __future__ import annotations

import argparse
import time

from penstock.cli import arguments
from penstock.cli.output import print_json

_LAST = 50


def register(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="print new events until the deployment has ended")
    text = f"the last N events (default: {_LAST}, with --since all)"
    parser.add_argument("-n", "--lines", "--tail", type=arguments.count_or_zero, metavar="N", help=text)
    text = "events of the last 90s, 10m, 2h or 1d"
    parser.add_argument("--since", type=arguments.period_s, metavar="TIME", help=text)
    arguments.add_json(parser, "print one JSON event per line")
    arguments.complete(parser, _run, ("penstock events", "penstock events qwen --follow", "penstock events --since 1h"))


def _run(options: argparse.Namespace) -> int:
    import msgspec

    from penstock import run_folder
    from penstock.deployment import events

    run = run_folder.choose(options.name)
    since = None if options.since is None else time.time() - options.since
    last = _LAST if options.lines is None and since is None else options.lines
    for event in (events.followed if options.follow else events.listed)(run, since, last):
        if options.json:
            print_json(msgspec.to_builtins(event))
        else:
            print(events.line_of(event), flush=options.follow)
    return 0
