"""The verbs under `penstock bench`: one table, and the arguments that several of them share.

Exit codes: 0 for what was measured, also when a sweep's least load is too much; 1 when an engine fails, or a run of
`serve` is not valid (too many requests failed, or the generator was late); 2 for input that cannot be used; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import secrets
from pathlib import Path

from penstock.cli.arguments import add_engine, add_examples, add_source, count, count_or_zero, counts

# The verb -> its help, and its module in this folder with the function that adds its arguments.
VERBS = {
    "serve": ("load an OpenAI endpoint, and measure what its users get", "serve:register"),
    "compare": ("show what changed between two runs, and whether it is more than noise", "report:register_compare"),
    "report": ("make one HTML page of runs, with charts inside it", "report:register"),
    "sweep": ("raise the load until a bound breaks", "sweep:register"),
    "throughput": ("time many prompts on vLLM without HTTP", "offline:register_throughput"),
    "latency": ("time one batch again and again on vLLM without HTTP", "offline:register_latency"),
}


def register(sub: argparse.ArgumentParser) -> None:
    verbs = sub.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    add_examples(sub, "penstock bench serve --concurrency 8 --requests 200", "penstock bench compare RUN1 RUN2")
    for name, (text, target) in VERBS.items():
        module, function = target.split(":")
        verb = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        verb.set_defaults(verb_name=f"bench {name}")
        getattr(importlib.import_module(f"penstock.cli.bench.{module}"), function)(verb)


def add_layouts(sub: argparse.ArgumentParser, default: tuple[int, ...]) -> None:
    add_source(sub)
    add_engine(sub)
    text = "tensor-parallel sizes, one after the other: 1,2,4"
    sub.add_argument("--tensor", type=counts, default=default, metavar="T,...", help=text)


def add_lengths(sub: argparse._ActionsContainer, input_text: str, output_text: str) -> None:
    sub.add_argument("--input-tokens", type=count, metavar="I", help=input_text)
    sub.add_argument("--output-tokens", "--max-tokens", type=count, metavar="O", help=output_text)


def add_seed(sub: argparse._ActionsContainer, text: str, default: int | None = 0) -> None:
    sub.add_argument("--seed", type=count_or_zero, default=default, metavar="N", help=text)


def add_new_seed(sub: argparse._ActionsContainer) -> None:
    """--seed, None by default: a command that is run again must not ask what the prefix cache knows."""
    add_seed(sub, "of times and prompts (default: a new one for each run)", None)


def new_seed() -> int:
    return secrets.randbelow(10**9)


def add_calibrate(sub: argparse.ArgumentParser) -> None:
    text = (
        "Default: what was launched where a deployment of this machine was measured, else TP 1 on this machine's GPU."
    )
    group = sub.add_argument_group("calibration of `penstock plan`", text)
    group.add_argument("--calibrate", type=Path, metavar="FILE", help="write the planner's constants from these runs")
    group.add_argument("--calibrate-model", metavar="MODEL", help="the model to calibrate for")
    group.add_argument("--gpu", metavar="ID", help="a catalogue id; else this machine's")
    group.add_argument("--layout", type=counts, metavar="T[,P[,D]]", help="tensor, pipeline, data sizes; else 1")
    group.add_argument("--engine-version", metavar="V", help="vLLM's version; else the newest")
