"""The verbs under `penstock autoscale`, and the first of them: why a deployment was scaled."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from penstock.cli import arguments, autoscale_replay, autoscale_simulate
from penstock.cli.output import print_json, table
from penstock.text import printable, show_seconds

if TYPE_CHECKING:
    from penstock.deployment.events import Decided

_LAST_S = 3600.0


def register(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
    arguments.add_examples(
        parser, "penstock autoscale explain", "penstock autoscale simulate --trace code --start-s 100"
    )
    for name, text, add in (
        ("explain", "list the decisions of the last hour, with their numbers", _add_explain),
        ("replay", "decide for recorded samples, one JSON line each", autoscale_replay.register),
        ("simulate", "try the policy on a trace of requests, next to others", autoscale_simulate.register),
    ):
        verb = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        verb.set_defaults(verb_name=f"autoscale {name}")
        add(verb)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    text = "decisions of the last 90s, 10m, 2h or 1d (default: 1h)"
    parser.add_argument("--since", type=arguments.period_s, default=_LAST_S, metavar="TIME", help=text)
    arguments.add_json(parser, "print one JSON decision per line")
    examples = ("penstock autoscale explain", "penstock autoscale explain qwen --since 1d --json")
    arguments.complete(parser, _explain, examples)


def _explain(options: argparse.Namespace) -> int:
    import msgspec

    from penstock import run_folder
    from penstock.cli import status_text
    from penstock.deployment import events, observe

    run = run_folder.choose(options.name)
    made = events.decisions(run, time.time() - options.since)
    if options.json:
        for decision in made:
            print_json(msgspec.to_builtins(decision))
        return 0
    scaling = observe.now_state(run, time.time()).scaling
    now = "its number of replicas does not follow the load" if scaling is None else status_text.scaling_words(scaling)
    print(f"{run.name}: {now}")
    if made:
        rows = [(_time(each.at), f"{each.before} -> {_number(each.after)}", _why(each)) for each in made]
        print(table(rows, indent=2))
    elif scaling is not None:
        print(f"no decision in the last {show_seconds(options.since)}")
    return 0


def _time(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _number(after: int | None) -> str:
    return "auto" if after is None else str(after)


def _why(decision: Decided) -> str:
    return printable(decision.reason) + (f" (by {decision.who})" if decision.who else "")
