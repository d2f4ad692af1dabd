"""The verbs `sleep` and `wake`."""

from __future__ import annotations

import argparse
import sys
from typing import Literal

from penstock.cli import arguments
from penstock.cli.output import print_json


def register_sleep(parser: argparse.ArgumentParser) -> None:
    _register(parser, "sleep")
    arguments.complete(
        parser, lambda options: _order(options, "sleep"), ("penstock sleep", "penstock sleep qwen --json")
    )


def register_wake(parser: argparse.ArgumentParser) -> None:
    _register(parser, "wake")
    arguments.complete(
        parser, lambda options: _order(options, "wake"), ("penstock wake", "penstock wake qwen --no-wait")
    )


def _register(parser: argparse.ArgumentParser, word: str) -> None:
    arguments.add_name(parser)
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    text = f"stop waiting after this time; the order to {word} stays"
    parser.add_argument("--timeout", type=arguments.seconds, metavar="SECONDS", help=text)
    arguments.add_json(parser, "print one JSON event per line")


def _order(options: argparse.Namespace, word: Literal["sleep", "wake"]) -> int:
    from penstock import run_folder
    from penstock.cli import progress
    from penstock.deployment import sleep

    run = run_folder.choose(options.name)
    sleep.order(run, word)
    if not options.no_wait:
        with progress.StartDisplay(sys.stdout, options.json) as display:
            sleep.wait(run, word, display.show, options.timeout)
    done = {"sleep": "asleep", "wake": "awake"}[word] if not options.no_wait else f"ordered to {word}"
    if options.json:
        print_json({"event": done, "name": run.name})
    else:
        print(f"{run.name} is {done}" + ("; a request wakes it" if done == "asleep" else ""))
    return 0
