"""The verbs under `penstock autoscale`: one table."""

from __future__ import annotations

import argparse
import importlib

# The verb -> its help, and the module of this folder with the function that adds its arguments.
VERBS = {
    "replay": ("decide for recorded samples, one JSON line each", "autoscale_replay:register"),
    "simulate": ("try the policy on a trace of requests, next to others", "autoscale_simulate:register"),
}


def register(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
    for name, (text, target) in VERBS.items():
        module, function = target.split(":")
        verb = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        verb.set_defaults(verb_name=f"autoscale {name}")
        getattr(importlib.import_module(f"penstock.cli.{module}"), function)(verb)
