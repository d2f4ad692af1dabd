"""`penstock bench compare`, `report`, `sweep`, `throughput`, `latency`: their arguments, and what they print.

Exit codes: 0, also for a sweep whose least load is too much (its answer says so); 1 when an engine or a server fails;
2 for what cannot be understood.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import arguments as cli_arguments
from penstock.cli.bench import serve
from penstock.cli.bench.requests import Subparsers
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.bench.offline import Row, Table, Task
    from penstock.planner import Plan
    from penstock.spec.deployment import Deployment

DeploymentOf = Callable[[argparse.Namespace], "Deployment"]
_MOST = 10**9


def register(sub: argparse.ArgumentParser) -> None:
    """The verbs under `penstock bench`, which must name one."""
    sub.set_defaults(verb=run_compare)
    add_verbs(serve.add_arguments(sub), cli_arguments.deployment_of)


def add_verbs(verbs: Subparsers, deployment_of: DeploymentOf) -> None:
    """Add these verbs under `penstock bench`. `deployment_of` reads FILE|MODEL, --engine and --set of the options."""

    def verb(name: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(verb=action)
        return sub

    compare = verb("compare", run_compare, "say what changed between two runs, and whether it is more than noise")
    compare.add_argument("a", type=Path, metavar="A", help="the folder of a run")
    compare.add_argument("b", type=Path, metavar="B", help="the folder of another")
    compare.add_argument("--seed", type=_whole, default=0, metavar="N", help="of the bootstrap")
    _add_json(compare)
    report = verb("report", run_report, "make one HTML page of runs, with drawings inside it")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders that `penstock bench serve` wrote")
    report.add_argument("--plan", type=Path, metavar="FILE", help="what `penstock plan --json` said, to stand beside")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the first folder")
    report.add_argument("--png", action="store_true", help="the drawings as PNG files too (needs matplotlib)")
    _add_calibrate(report)
    _add_json(report)
    _add_sweep(verb("sweep", lambda o: _sweep(o, deployment_of), "raise the load until a bound breaks"))
    throughput = verb("throughput", lambda o: run_throughput(o, deployment_of), "time many prompts without HTTP")
    _add_deployed(throughput)
    throughput.add_argument("--num-prompts", type=_count, default=100, metavar="N", help="how many (default: 100)")
    _add_data(throughput)
    throughput.add_argument("--warmup", type=_whole, default=0, metavar="N", help="rounds that are not timed")
    _add_json(throughput)
    latency = verb("latency", lambda o: run_latency(o, deployment_of), "time one batch again and again without HTTP")
    _add_deployed(latency)
    for flag, default, text in (
        ("--batch-size", 8, "prompts in the batch"),
        ("--input-len", 32, "tokens of each prompt"),
        ("--output-len", 128, "tokens of each answer"),
        ("--num-iters", 10, "rounds that are timed"),
    ):
        latency.add_argument(flag, type=_count, default=default, metavar="N", help=text)
    latency.add_argument("--num-iters-warmup", type=_whole, default=3, metavar="N", help="rounds before, not timed")
    latency.add_argument("--seed", type=_whole, default=0, metavar="N", help="of the prompts")
    _add_json(latency)


def _add_deployed(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", nargs="?", metavar="FILE|MODEL", help="a YAML file, a model folder or a hub id")
    sub.add_argument("--engine", choices=("auto", "vllm", "llamacpp"), help="same as --set engine.kind=...")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field of the file")
    text = "tensor-parallel sizes, one after the other: 1,2,4"
    sub.add_argument("--tensor", type=_sizes, default=(1,), metavar="T,...", help=text)


def _add_data(sub: argparse.ArgumentParser) -> None:
    kinds = "random, sharegpt:FILE, jsonl:FILE, prefix:n=8,prefix=1000,suffix=100, turns:turns=4, replay:FILE"
    sub.add_argument("--dataset", default="random", metavar="KIND:FILE", help=kinds)
    sub.add_argument("--prompt", metavar="TEXT", help="the same for every request")
    sub.add_argument("--input-tokens", type=_count, metavar="I", help="of a random prompt, exactly")
    sub.add_argument("--output-tokens", "--max-tokens", type=_count, metavar="O", help="of every answer")
    sub.add_argument("--tokenizer", metavar="FOLDER", help="counts tokens (default: the model's own)")
    sub.add_argument("--seed", type=_whole, default=0, metavar="N", help="of prompts and times")


def _add_sweep(sub: argparse.ArgumentParser) -> None:
    _add_deployed(sub)
    sub.set_defaults(tensor=())
    sub.add_argument("--url", help="measure what runs there instead of deploying")
    sub.add_argument("--model", metavar="NAME", help="as the server knows it (default: its only one)")
    sub.add_argument("--endpoint", choices=("chat", "completions"), default="completions")
    sub.add_argument("--by", choices=("rate", "concurrency"), default="rate", help="what is raised")
    sub.add_argument("--slo", nargs="+", default=[], metavar="NAME:MS", help="ttft:2000 (its p99), p95_tpot:60, ...")
    sub.add_argument("--failed", type=_share, default=0.01, metavar="SHARE", help="of requests that may fail")
    sub.add_argument("--steps", type=_numbers, default=(), metavar="X,...", help="these loads alone, until one breaks")
    sub.add_argument("--first", type=_positive, default=1.0, metavar="X", help="the load that is tried first")
    sub.add_argument("--most", type=_positive, default=10_000.0, metavar="X", help="no load above it is tried")
    sub.add_argument("--requests", type=_count, default=50, metavar="N", help="of each run, at least")
    sub.add_argument("--duration", type=_positive, default=20.0, metavar="SECONDS", help="of a run at a rate, at least")
    _add_data(sub)
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: $PENSTOCK_HOME/bench/sweep-TIME")
    _add_calibrate(sub)
    _add_json(sub)


def _add_calibrate(sub: argparse.ArgumentParser) -> None:
    text = (
        "Default: what was launched where a deployment of this machine was measured, else TP 1 on this machine's GPU."
    )
    group = sub.add_argument_group("calibration of `penstock plan`", text)
    group.add_argument("--calibrate", type=Path, metavar="FILE", help="write the planner's constants from these runs")
    group.add_argument("--calibrate-model", metavar="MODEL", help="what `penstock plan` will be asked about")
    group.add_argument("--gpu", metavar="ID", help="a catalogue id; else this machine's")
    group.add_argument("--layout", type=_sizes, metavar="T[,P[,D]]", help="tensor, pipeline, data sizes; else 1")
    group.add_argument("--engine-version", metavar="V", help="vLLM's version; else the newest")


def _add_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print JSON")


def run_compare(options: argparse.Namespace) -> int:
    """Both runs beside each other, with the interval of each difference."""
    import msgspec

    from penstock.bench.results import compare, folder

    found = compare.compare(folder.load(options.a), folder.load(options.b), options.seed)
    print(json.dumps(msgspec.to_builtins(found)) if options.json else compare.text(found))
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Writes the page, and what else was asked for; says where."""
    from penstock.bench.report import figures, html, png
    from penstock.bench.results import folder
    from penstock.cli.bench.deployment import calibrated
    from penstock.cli.bench.requests import write

    if options.png:
        png.check()
    runs = [folder.load(path) for path in options.runs]
    made = calibrated(options, runs) if options.calibrate else None
    plan = _json_object(options.plan) if options.plan else None
    first = options.runs[0].parent if options.runs[0].suffix == ".json" else options.runs[0]
    out = options.out or first / "report.html"
    write(out, html.page(runs, plan))
    written = [out]
    if options.png:
        written += png.save(figures.of_runs(runs), out.parent)
    if made is not None:
        write(options.calibrate, made)
        written.append(options.calibrate)
    print(json.dumps({"written": [str(path) for path in written]}) if options.json else "\n".join(map(str, written)))
    return 0


def run_throughput(options: argparse.Namespace, deployment_of: DeploymentOf) -> int:
    """vLLM's offline throughput: all prompts at once, a row for each tensor size."""
    from penstock.bench import offline
    from penstock.bench.datasets import synthetic
    from penstock.bench.datasets.files import Wanted
    from penstock.bench.datasets.tokenizers import tokens_of
    from penstock.cli.bench.requests import dataset

    deployment = deployment_of(options)
    wanted = Wanted(options.num_prompts, options.seed, options.input_tokens, options.output_tokens, chat=False)
    asks = synthetic.from_spec(dataset(options), wanted, lambda: tokens_of(options.tokenizer or deployment.model))
    task = offline.throughput_task(asks, options.warmup)
    return _print_rows(options, offline.run(deployment, options.tensor, lambda _: task, _told), offline.THROUGHPUT)


def run_latency(options: argparse.Namespace, deployment_of: DeploymentOf) -> int:
    """vLLM's offline latency: one batch again and again, a row for each tensor size."""
    from penstock.bench import offline

    def task(plan: Plan) -> Task:
        if options.input_len + options.output_len > plan.max_model_len:
            raise UserError(
                f"cannot ask for {options.input_len} + {options.output_len} tokens: max_model_len is "
                f"{plan.max_model_len}",
                hint="Lower --input-len or --output-len.",
            )
        return offline.latency_task(
            plan.model.vocab,
            (options.batch_size, options.input_len, options.output_len),
            (options.num_iters_warmup, options.num_iters),
            options.seed,
        )

    return _print_rows(options, offline.run(deployment_of(options), options.tensor, task, _told), offline.LATENCY)


def _print_rows(options: argparse.Namespace, rows: Iterator[Row], table: Table) -> int:
    """Each row as it is measured; as JSON all at the end, or those there are when somebody has enough."""
    from penstock.bench import offline

    done: list[Row] = []
    try:
        for row in rows:
            if not options.json:
                print(table.line(row) if done else f"{table.head}\n{table.line(row)}", flush=True)
            done.append(row)
    finally:
        if options.json and done:
            print(json.dumps(offline.facts(done)))
    return 1 if any(row.is_broken for row in done) else 0


def _told(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


def _sweep(options: argparse.Namespace, deployment_of: DeploymentOf) -> int:
    from penstock.cli.bench import sweep

    return sweep.run(options, deployment_of)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not JSON"
        raise UserError(f'cannot read plan "{path}": {why}', hint="Give what `penstock plan --json` printed.") from exc
    if not isinstance(found, dict):
        raise UserError(f'cannot read plan "{path}": not an object')
    return found


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_count(word) for word in text.split(","))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < _MOST:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number above 0")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_positive(word) for word in text.split(","))


def _share(text: str) -> float:
    value = 0.0 if text == "0" else _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a share from 0 to 1")
    return value
