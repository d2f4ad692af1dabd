"""`penstock bench sweep`: deploys each layout or takes what runs, measures load after load, writes table and page."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.bench.report.html import SweepPoint
    from penstock.bench.results.folder import Result
    from penstock.bench.sweep import Found, Search, Slo
    from penstock.cli.bench.deployment import Launch
    from penstock.spec.deployment import Deployment

_INTERRUPTED = 130
_CLOSED_ROUNDS = 4  # requests of a closed loop, for each that is in flight


class Place:
    """Where a layout answers: its address, the model's name there, its key, and the model whose tokenizer counts."""

    def __init__(self, url: str, served: str | None, key: str | None, model: str | None) -> None:
        self.url, self.served, self.key, self.model = url, served, key, model

    @functools.cached_property
    def launch(self) -> Launch:
        """The deployment that answers there, where it is one of this machine's: looked up once for all loads."""
        from penstock.cli.bench.deployment import behind

        return behind(self.url)


# One run of a load test: (the options, where, requests/s, requests at once, the folder for its rows) -> result.json.
# Raises KeyboardInterrupt for a run that was ended before its time.
Measure = Callable[[argparse.Namespace, Place, float | None, int | None, Path], dict[str, Any]]


def run(options: argparse.Namespace, deployment_of: Callable[[argparse.Namespace], Deployment]) -> int:
    """Search each layout, print its table and answer, write sweep.json and report.html."""
    from penstock.bench import sweep
    from penstock.bench.serve import parts_of
    from penstock.cli.bench.deployment import deployed_of

    slo = sweep.slo_of(options.slo, options.failed)
    if not slo.bounds and not options.steps:
        raise UserError("cannot tell when to stop", hint="Give --slo ttft:2000 tpot:60, or --steps 1,2,4,8.")
    if options.url and (options.tensor or options.source):
        raise UserError("cannot deploy layouts at --url", hint="Give FILE|MODEL with --tensor, or --url alone.")
    if options.url:
        parts_of(options.url)
    if options.calibrate and (options.by == "rate" or len(options.tensor or ()) > 1):
        raise UserError(
            "cannot calibrate from this sweep",
            detail="The planner's constants come from closed loops of one layout.",
            hint="--by concurrency --steps 1,8,32, and one --tensor.",
        )
    if options.by == "concurrency" and any(step != int(step) for step in options.steps):
        raise UserError("cannot have part of a request at once", hint="Whole numbers: --steps 1,2,4,8.")
    where = sweep.Search(options.by, options.first, most=options.most, steps=options.steps)
    deployment = None if options.url else deployment_of(options)
    folder = _folder(options.out)
    found: dict[str, Found] = {}
    refused: dict[str, str] = {}
    was_interrupted = False
    for tensor in options.tensor or (None,):
        layout = f"TP {tensor}" if tensor else "as it runs"
        try:
            with _place(options, deployment, tensor) as place:
                if options.calibrate:  # what cannot be fitted to is told before it is measured
                    deployed_of(options, place.launch.facts)
                found[layout] = _search(options, place, slo, where, folder / layout)
        except UserError as error:
            if tensor is None or deployment is None or len(options.tensor) == 1:
                raise
            refused[layout] = error.message
            _told(f"{layout}: {error.message}")
        except KeyboardInterrupt:  # while a layout was started: none of its runs is lost
            was_interrupted = True
        was_interrupted |= layout in found and found[layout].was_interrupted
        if was_interrupted:
            _told("interrupted: this is what was measured so far")
            break
    _tell(options, slo, found, refused, folder, was_interrupted)
    return _INTERRUPTED if was_interrupted else 0


def _search(options: argparse.Namespace, place: Place, slo: Slo, where: Search, folder: Path) -> Found:
    from penstock.bench import sweep

    n_runs = itertools.count()

    def measured(offered: float) -> dict[str, Any]:
        is_rate = where.kind == "rate"
        own = folder.with_name(f"{folder.name} {where.kind} {offered:.4g}".lower().replace(" ", "-"))
        # Other prompts for each load: those of the load before are in the engine's prefix cache.
        fresh = argparse.Namespace(**{**vars(options), "seed": options.seed + next(n_runs)})
        return measure(fresh, place, offered if is_rate else None, None if is_rate else int(offered), own)

    def told(point: sweep.Point) -> None:
        verdict = "inside" if point.is_inside else point.reason
        _told(f"{folder.name}: {point.offered:.4g} {sweep.LABELS[where.kind]}: {verdict}")

    return sweep.search(measured, slo, where, told)


def measure(
    options: argparse.Namespace, place: Place, rate: float | None, concurrency: int | None, folder: Path
) -> dict[str, Any]:
    """One run by `bench serve`'s own function, its rows in `folder`; KeyboardInterrupt where somebody ended it."""
    from penstock.bench import serve
    from penstock.bench.datasets.files import Wanted
    from penstock.bench.load import arrivals
    from penstock.bench.results import folder as folders
    from penstock.cli.bench.requests import asks_of, client_of, only_model

    n_requests = max(
        options.requests, math.ceil(rate * options.duration) if rate else _CLOSED_ROUNDS * (concurrency or 1)
    )
    client = client_of(place.url, place.key)
    served = place.served or only_model(client)
    is_chat = options.endpoint == "chat"
    wanted = Wanted(n_requests, options.seed, options.input_tokens, options.output_tokens, chat=is_chat)
    asks, warmup = asks_of(options, wanted, 1, place.model, client, served)
    service = serve.Service(
        url=place.url,
        model=served,
        endpoint=options.endpoint,
        key=place.key,
        ignore_eos=True,
    )
    pace = arrivals.Pace(rate=rate, concurrency=concurrency, n_requests=n_requests, seed=options.seed)
    report = serve.run(service, asks, pace, {}, warmup=warmup)
    folders.prepare(folder)
    report.result["flags"] = {
        "rate": rate,
        "concurrency": concurrency,
        "requests": n_requests,
        "seed": options.seed,
    }
    place.launch.tell(report)
    folders.write(folder, report.result, report.requests, report.rows, report.is_open)
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
    from penstock.deployment import start, stop
    from penstock.spec.deployment import Parallel

    name = f"{deployment.name[:50]}-bench"
    changed = {"name": name, "gateway": msgspec.structs.replace(deployment.gateway, port=0)}
    if tensor is not None:
        # A layout of its own file stays where only the tensor size is changed.
        cut = deployment.parallel if isinstance(deployment.parallel, Parallel) else Parallel()
        changed["parallel"] = msgspec.structs.replace(cut, tensor=tensor)
    _told(f"starting {name}{f' with tensor {tensor}' if tensor else ''} ...")
    started = start.up(msgspec.structs.replace(deployment, **changed))
    if started.was_running:
        raise UserError(f'cannot sweep: deployment "{name}" runs already', hint=f"End it: penstock down {name}")
    run = run_folder.find(name)
    try:
        start.wait_ready(run, lambda _: None)
        yield Place(run.url, name, started.key, deployment.model)
    finally:
        with start.ctrl_c_ignored():
            if not run.is_ended():
                stop.down(run, now=True)


def _tell(
    options: argparse.Namespace,
    slo: Slo,
    found: dict[str, Found],
    refused: dict[str, str],
    folder: Path,
    was_interrupted: bool,
) -> None:
    import msgspec

    from penstock.bench import sweep
    from penstock.bench.report import html

    answers = [sweep.answer_text(layout, one) for layout, one in found.items()]
    answers += [f"{layout}: {reason}" for layout, reason in refused.items()]
    points = list(_points(found))
    facts = {
        "by": options.by,
        "slo": str(slo),
        "layouts": {layout: msgspec.to_builtins(one) for layout, one in found.items()},
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
        print(json.dumps(facts), flush=True)
        return
    for layout, one in found.items():
        print(f"{sweep.table_text(layout, one)}\n")
    print("\n".join([f"bound: {slo}", *answers, f"written to {folder}"]))


def _points(found: dict[str, Found]) -> Iterator[SweepPoint]:
    from penstock.bench.report.html import SweepPoint
    from penstock.bench.results.folder import Result

    for layout, one in found.items():
        for point, result in zip(one.points, one.results, strict=True):
            run: Result = Result(f"{layout} {point.offered:.4g}", dict(result))
            yield SweepPoint(layout, point.offered, run, point.is_inside, point.reason)


def _folder(asked: Path | None) -> Path:
    """The sweep's own folder, made before anything runs.  Raises UserError."""
    from penstock import paths

    path = asked or paths.home() / "bench" / time.strftime("sweep-%Y%m%d-%H%M%S")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(f'cannot write results to "{path}": {exc.strerror}', hint="--out DIR") from exc
    return path


def _told(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
