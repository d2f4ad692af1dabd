"""`penstock bench sweep`: deploys each layout or takes what runs, measures load after load, writes table and page."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.arguments import add_json, complete, count, deployment_of, numbers, positive, share
from penstock.cli.bench.arguments import add_calibrate, add_layouts, add_lengths, add_new_seed, new_seed
from penstock.cli.output import print_json, print_step
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.bench.report.html import SweepPoint
    from penstock.bench.sweep import Search, Slo, SweepResult
    from penstock.cli.bench.deployment import Launch
    from penstock.spec.deployment import Deployment

_INTERRUPTED = 130
_CLOSED_ROUNDS = 4  # requests of a closed loop, for each that is in flight


class Place:
    """Where a layout answers: its address, the model's name there, its key, and the model whose tokenizer counts;
    `deployment`: the name of one that was started for it."""

    def __init__(
        self, url: str, served: str | None, key: str | None, model: str | None, deployment: str | None = None
    ) -> None:
        self.url, self.served, self.key, self.model, self.deployment = url, served, key, model, deployment

    @functools.cached_property
    def launch(self) -> Launch:
        """The deployment that answers there, where it is one of this machine's: looked up once for all loads."""
        from penstock.cli.bench.deployment import behind

        return behind(self.url, self.deployment)


# One run of a load test: (the options, where, requests/s, requests at once, the folder for its rows) -> result.json.
# Raises KeyboardInterrupt for a run that was ended before its time.
Measure = Callable[[argparse.Namespace, Place, float | None, int | None, Path], dict[str, Any]]


def register(sub: argparse.ArgumentParser) -> None:
    add_layouts(sub, ())
    sub.add_argument("--url", help="measure what runs there instead of deploying")
    sub.add_argument("--model", metavar="NAME", help="as the server knows it (default: its only one)")
    sub.add_argument("--endpoint", choices=("chat", "completions"), default="completions")
    sub.add_argument("--by", choices=("rate", "concurrency"), default="rate", help="what is raised")
    sub.add_argument("--slo", nargs="+", default=[], metavar="NAME:MS", help="ttft:2000 (its p99), p95_tpot:60, ...")
    sub.add_argument("--failed", type=share, default=0.01, metavar="SHARE", help="of requests that may fail")
    sub.add_argument("--steps", type=numbers, default=(), metavar="X,...", help="these loads alone, until one breaks")
    sub.add_argument("--first", type=positive, default=1.0, metavar="X", help="the load that is tried first")
    sub.add_argument("--most", type=positive, default=10_000.0, metavar="X", help="no load above it is tried")
    sub.add_argument("--requests", type=count, default=50, metavar="N", help="of each run, at least")
    sub.add_argument("--duration", type=positive, default=20.0, metavar="SECONDS", help="of a run at a rate, at least")
    kinds = "random, sharegpt:FILE, jsonl:FILE, prefix:n=8,prefix=1000,suffix=100, turns:turns=4, replay:FILE"
    sub.add_argument("--dataset", default="random", metavar="KIND:FILE", help=kinds)
    sub.add_argument("--prompt", metavar="TEXT", help="the same for every request")
    add_lengths(sub, "of a random prompt, exactly", "of every answer")
    sub.add_argument("--tokenizer", metavar="FOLDER", help="counts tokens (default: the model's own)")
    add_new_seed(sub)
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: $PENSTOCK_HOME/bench/sweep-TIME")
    add_calibrate(sub)
    add_json(sub)
    examples = (
        "penstock bench sweep --url http://127.0.0.1:8000 --slo ttft:500 tpot:50",
        "penstock bench sweep Qwen/Qwen3-8B --tensor 1,2 --by concurrency --steps 1,4,16,64",
    )
    complete(sub, _sweep, examples)


def _sweep(options: argparse.Namespace) -> int:
    from penstock import paths
    from penstock.bench import sweep
    from penstock.bench.results import folder as folders
    from penstock.bench.serve import parts_of
    from penstock.cli.bench.deployment import deployed_of

    slo = sweep.slo_of(options.slo, options.failed)
    if not slo.bounds and not options.steps:
        raise UserError("cannot decide when to stop", hint="Give --slo ttft:2000 tpot:60, or --steps 1,2,4,8.")
    if options.url and (options.tensor or options.source):
        raise UserError("cannot deploy layouts at --url", hint="Give FILE|MODEL with --tensor, or --url alone.")
    if options.url:
        parts_of(options.url)
    if options.calibrate and (options.by == "rate" or len(options.tensor or ()) > 1):
        detail = "The planner's constants come from closed loops of one layout."
        hint = "--by concurrency --steps 1,8,32, and one --tensor."
        raise UserError("cannot calibrate from this sweep", detail=detail, hint=hint)
    if options.by == "concurrency" and any(step != int(step) for step in options.steps):
        raise UserError("cannot have part of a request at once", hint="Whole numbers: --steps 1,2,4,8.")
    options.seed = new_seed() if options.seed is None else options.seed
    where = sweep.Search(options.by, options.first, most=options.most, steps=options.steps)
    deployment = None if options.url else deployment_of(options)
    folder = options.out or paths.home() / "bench" / time.strftime("sweep-%Y%m%d-%H%M%S")
    folders.prepare(folder)
    results: dict[str, SweepResult] = {}
    refused: dict[str, str] = {}
    was_interrupted = False
    for tensor in options.tensor or (None,):
        layout = f"TP {tensor}" if tensor else "as it runs"
        try:
            with _place(options, deployment, tensor) as place:
                if options.calibrate:  # what cannot be fitted to is refused before it is measured
                    deployed_of(options, place.launch.facts)
                results[layout] = _search(options, place, slo, where, folder / layout)
        except UserError as error:
            if tensor is None or deployment is None or len(options.tensor) == 1:
                raise
            refused[layout] = error.message
            print_step(f"{layout}: {error.message}")
        except KeyboardInterrupt:  # while a layout was started: none of its runs is lost
            was_interrupted = True
        was_interrupted |= layout in results and results[layout].was_interrupted
        if was_interrupted:
            print_step("interrupted: this is what was measured so far")
            break
    _write(options, slo, results, refused, folder, was_interrupted)
    return _INTERRUPTED if was_interrupted else 0


def _search(options: argparse.Namespace, place: Place, slo: Slo, where: Search, folder: Path) -> SweepResult:
    from penstock.bench import sweep

    n_runs = itertools.count()

    def measured(offered: float) -> dict[str, Any]:
        is_rate = where.kind == "rate"
        own = folder.with_name(f"{folder.name} {where.kind} {offered:.4g}".lower().replace(" ", "-"))
        # Other prompts for each load: those of the load before are in the engine's prefix cache.
        fresh = argparse.Namespace(**{**vars(options), "seed": options.seed + next(n_runs)})
        return measure(fresh, place, offered if is_rate else None, None if is_rate else int(offered), own)

    def report(point: sweep.Point) -> None:
        verdict = "inside" if point.is_inside else point.reason
        print_step(f"{folder.name}: {point.offered:.4g} {sweep.LABELS[where.kind]}: {verdict}")

    return sweep.search(measured, slo, where, report)


def measure(
    options: argparse.Namespace, place: Place, rate: float | None, concurrency: int | None, folder: Path
) -> dict[str, Any]:
    """One run by `bench serve`'s own function, its rows in `folder`; KeyboardInterrupt where it was interrupted."""
    from penstock.bench import serve
    from penstock.bench.datasets.files import Wanted
    from penstock.bench.load import arrivals
    from penstock.bench.results import folder as folders
    from penstock.cli.bench.requests import client_of, only_model, requests_of

    n_least = math.ceil(rate * options.duration) if rate else _CLOSED_ROUNDS * (concurrency or 1)
    n_requests = max(options.requests, n_least)
    client = client_of(place.url, place.key)
    served = place.served or only_model(client)
    is_chat = options.endpoint == "chat"
    wanted = Wanted(n_requests, options.seed, options.input_tokens, options.output_tokens, chat=is_chat)
    requests, warmup = requests_of(options, wanted, 1, place.model, client, served)
    service = serve.Service(url=place.url, model=served, endpoint=options.endpoint, key=place.key, ignore_eos=True)
    pace = arrivals.Pace(rate=rate, concurrency=concurrency, n_requests=n_requests, seed=options.seed)
    flags = {"rate": rate, "concurrency": concurrency, "requests": n_requests, "seed": options.seed}
    folders.prepare(folder)
    what = serve.Run(service, pace, flags=flags, most_failed=options.failed)
    report = serve.run(what, requests, warmup=warmup, out=folder)
    place.launch.tell(report)
    folders.write(folder, report.result, report.rows)
    place.launch.keep(folder)
    if report.was_interrupted:
        raise KeyboardInterrupt
    return report.result


@contextlib.contextmanager
def _place(options: argparse.Namespace, deployment: Deployment | None, tensor: int | None) -> Iterator[Place]:
    """What runs at --url; or a deployment of this layout, started for the sweep and ended after it."""
    if deployment is None:
        yield Place(options.url, options.model, os.environ.get("OPENAI_API_KEY"), options.model)
        return
    import msgspec

    from penstock import run_folder
    from penstock.deployment import live, start, stop
    from penstock.spec.deployment import Parallel

    name = f"{deployment.name[:50]}-bench"
    changed = {"name": name, "gateway": msgspec.structs.replace(deployment.gateway, port=0)}
    if tensor is not None:
        # The rest of the layout in the file stays where only the tensor size is changed.
        cut = deployment.parallel if isinstance(deployment.parallel, Parallel) else Parallel()
        changed["parallel"] = msgspec.structs.replace(cut, tensor=tensor)
    print_step(f"starting {name}{f' with tensor {tensor}' if tensor else ''} ...")
    started = start.up(msgspec.structs.replace(deployment, **changed))
    if started.was_running:
        raise UserError(f'cannot sweep: deployment "{name}" runs already', hint=f"End it: penstock down {name}")
    run = run_folder.find(name)
    try:
        start.wait_ready(run, lambda _: None)
        with live.url(run) as url:
            yield Place(url, name, started.key, deployment.model, name)
    finally:
        with stop.ctrl_c_ignored():
            if not run.is_ended():
                stop.down(run, now=True)


def _write(
    options: argparse.Namespace,
    slo: Slo,
    results: dict[str, SweepResult],
    refused: dict[str, str],
    folder: Path,
    was_interrupted: bool,
) -> None:
    import msgspec

    from penstock.bench import sweep
    from penstock.bench.report import html, text

    answers = [sweep.answer_text(layout, result) for layout, result in results.items()]
    answers += [f"{layout}: {reason}" for layout, reason in refused.items()]
    points = list(_points(results))
    answers += dict.fromkeys(f"note: {note}" for point in points for note in text.caveats(point.run.summary))
    facts = {
        "by": options.by,
        "slo": str(slo),
        "layouts": {layout: msgspec.to_builtins(result) for layout, result in results.items()},
        "refused": refused,
        "interrupted": was_interrupted,
        "folder": str(folder),
    }
    (folder / "sweep.json").write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", "utf-8")
    page = html.sweep_page(points, sweep.LABELS[options.by], str(slo), answers)
    (folder / "report.html").write_text(page, "utf-8")
    if options.calibrate and not was_interrupted:  # constants of half the loads would pass for those of all
        from penstock.cli.bench.deployment import calibrated
        from penstock.cli.bench.requests import write

        write(options.calibrate, calibrated(options, [point.run for point in points]))
    if options.json:
        print_json(facts)
        return
    for layout, result in results.items():
        print(f"{sweep.table_text(layout, result)}\n")
    print("\n".join([f"bound: {slo}", *answers, f"written to {folder}"]))


def _points(results: dict[str, SweepResult]) -> Iterator[SweepPoint]:
    from penstock.bench.report.html import SweepPoint
    from penstock.bench.results.folder import Result

    for layout, result in results.items():
        for point, summary in zip(result.points, result.results, strict=True):
            run = Result(f"{layout} {point.offered:.4g}", dict(summary))
            yield SweepPoint(layout, point.offered, run, point.is_inside, point.reason)
