"""`penstock bench serve`: its arguments, and what it prints. `bench.serve` measures."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.cli import keys
from penstock.cli.arguments import (
    add_json,
    complete,
    count,
    count_or_zero,
    json_object,
    not_negative,
    number,
    positive,
    share,
)
from penstock.cli.bench.arguments import add_lengths, add_new_seed, new_seed
from penstock.cli.output import print_json, print_step
from penstock.errors import EXIT_OURS, PenstockError, UserError

if TYPE_CHECKING:
    from penstock.bench.datasets.tokenizers import Tokens
    from penstock.bench.load.arrivals import Pace, PlannedRequest
    from penstock.bench.load.run import Progress
    from penstock.bench.serve import Report, Service
    from penstock.run_folder import Run

_INTERRUPTED = 130
_TOKENS = 128  # of a prompt and of an answer by default
# Prompts that are drawn where a run ends by time, and comes to them again: counted ones cost time, words do not.
_MOST_DRAWN, _MOST_WORDS = 1000, 10_000
_TIMED = ("replay", "jsonl")  # data sets that may say when to send
_ARRIVALS = ("poisson", "constant", "gamma", "ramp", "replay")


def register(sub: argparse.ArgumentParser) -> None:
    sub.description = f"{sub.description} The key is read from OPENAI_API_KEY."
    place = sub.add_argument_group("where")
    text = "a deployment (default: the only one that runs, where no address is given)"
    place.add_argument("name", nargs="?", metavar="NAME", help=text)
    place.add_argument("--url", help="base address, with or without /v1 (default: $OPENAI_BASE_URL)")
    place.add_argument("--model", metavar="NAME", help="default: the only one that the server has")
    place.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="what to ask")
    place.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream the answers")
    place.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    pace = sub.add_argument_group("how fast")
    pace.add_argument("--requests", type=count, metavar="N", help="how many (also --num-prompts)")
    pace.add_argument("--num-prompts", type=count, dest="requests", metavar="N", help=argparse.SUPPRESS)
    pace.add_argument("--duration", type=positive, metavar="SECONDS", help="send for so long; answers are waited for")
    text = "requests/s, whatever the answers do (open loop); inf: all at once"
    pace.add_argument("--rate", type=_rate, metavar="R", help=text)
    pace.add_argument("--request-rate", type=_rate, dest="rate", metavar="R", help=argparse.SUPPRESS)
    text = "C at a time, the next when one ends; with --rate: at most C in flight"
    pace.add_argument("--concurrency", type=count, metavar="C", help=text)
    pace.add_argument("--max-concurrency", type=count, dest="concurrency", metavar="C", help=argparse.SUPPRESS)
    pace.add_argument("--arrival", choices=_ARRIVALS, help="of an open loop (default: poisson)")
    pace.add_argument("--burstiness", type=positive, default=1.0, metavar="K", help="gamma arrivals: below 1 in bursts")
    pace.add_argument("--rate-from", type=not_negative, default=0.0, metavar="R", help="where a ramp to --rate starts")
    pace.add_argument("--speed", type=positive, default=1.0, metavar="X", help="of a replay: 2 is twice as fast")
    text = "of a trace's times (default: recognised)"
    pace.add_argument("--trace-unit", choices=("s", "ms", "us", "ns"), help=text)
    pace.add_argument("--warmup", type=count_or_zero, default=1, metavar="N", help="requests before, not counted")
    pace.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="for a whole answer")
    add_new_seed(pace)
    what = sub.add_argument_group("what is asked")
    what.add_argument("--prompt", metavar="TEXT", help="the same for every request; prints hey's report too")
    text = "of a random prompt (default: 128): exactly, where the model's tokenizer is on this machine"
    add_lengths(what, text, "of every answer, at most (default: 128)")
    text = "random lengths from 1 - SHARE to 1 + SHARE of the above"
    what.add_argument("--random-range-ratio", type=share, default=0.0, metavar="SHARE", help=text)
    what.add_argument(
        "--dataset", metavar="KIND:FILE", help="random, sharegpt:FILE, jsonl:FILE, ... (docs/how-to/load-tests.md)"
    )
    what.add_argument("--tokenizer", metavar="FOLDER", help="counts tokens (default: the model's own)")
    what.add_argument("--ignore-eos", action="store_true", help="answers of exactly so many tokens (vLLM, llama.cpp)")
    what.add_argument("--temperature", type=not_negative, default=0.0, metavar="T", help="of sampling; 0 is greedy")
    what.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of the request"
    )
    out = sub.add_argument_group("what comes out")
    out.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="bounds: ttft:2000 tpot:60 e2el:9000")
    text = "pages to follow (default: /metrics)"
    out.add_argument("--metrics", action="append", default=[], metavar="URL", help=text)
    text = "of every latency, besides the usual ones: 50,99,99.9"
    out.add_argument("--percentiles", type=_percentiles, default=(), metavar="P,...", help=text)
    out.add_argument("--metric-percentiles", type=_percentiles, dest="percentiles", help=argparse.SUPPRESS)
    out.add_argument("--save-result", action="store_true", help="also write vllm.json, as `vllm bench serve` does")
    out.add_argument("--out", type=Path, metavar="DIR", help="default: $PENSTOCK_HOME/bench/TIME")
    out.add_argument("--formulas", action="store_true", help="print how each number is computed")
    add_json(sub, "print the result as JSON")
    examples = (
        "penstock bench serve --concurrency 8 --requests 200",
        "penstock bench serve --url http://127.0.0.1:8000 --rate 4 --duration 60 --goodput ttft:500 tpot:50",
        "penstock bench serve --dataset replay:trace.csv --duration 300",
    )
    complete(sub, _serve, examples)


def _rate(text: str) -> float:
    return math.inf if text == "inf" else positive(text)


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(number(0, 100, is_above=True)(word) for word in text.split(","))


def _serve(options: argparse.Namespace) -> int:
    import msgspec

    from penstock.gateway import compiled

    compiled.activate()
    from penstock.bench import serve
    from penstock.bench.load import arrivals
    from penstock.bench.report import html, vllm
    from penstock.bench.results import folder as folders
    from penstock.cli.bench.deployment import behind
    from penstock.cli.bench.requests import write
    from penstock.paths import home

    options.seed = new_seed() if options.seed is None else options.seed
    service, pace, bounds = _service(options), _pace(options), _bounds(options.goodput, options.stream)
    launch = behind(service.url, vars(options).get("reached"))
    requests, warmup = _requests(options, pace, service, launch.model or service.model)
    arrivals.check(pace, [request.offset_s for request in requests])
    if pace.n_requests is None and pace.duration_s is None:  # a trace, to its end
        pace = msgspec.structs.replace(pace, n_requests=len(requests))
    if offs := [abs(request.n_off) for request in requests if request.n_off]:
        _say(options, f"{len(offs)} of {len(requests)} prompts are off by up to {max(offs)} tokens: no text was exact")
    folder = options.out or folders.new_folder(home(), time.time())
    is_new = not folder.exists()
    folders.prepare(folder)
    plain = (str, int, float, list, dict, type(None))
    flags = {key: value for key, value in sorted(vars(options).items()) if isinstance(value, plain)}
    what = serve.Run(service, pace, bounds, options.warmup, {**flags, "arrival": pace.arrival})
    what = msgspec.structs.replace(what, percentiles=options.percentiles)
    shows = sys.stderr.isatty()
    if options.warmup:
        _say(options, f"warming up with {options.warmup} request{'s' * (options.warmup != 1)}, not counted")
    try:
        report = serve.run(what, requests, _show_progress if shows else None, warmup, folder)
    except PenstockError:
        with contextlib.suppress(OSError):  # nothing was measured: it is as empty as it was made
            if is_new:
                folder.rmdir()
        raise
    if shows:
        print("\r\033[K", end="", file=sys.stderr)
    report.result["folder"] = str(folder.resolve())
    launch.tell(report)
    folders.write(folder, report.result, report.rows)
    launch.keep(folder)
    if options.save_result:
        vllm.save(folder)
    write(folder / "report.html", html.page([folders.load(folder)]))
    if options.json:
        print_json(report.result)
    else:
        print(_text(options, pace, report))
        print(f"written to {folder} (report.html is the page)")
    if report.was_interrupted:
        return _INTERRUPTED
    return 0 if report.verdict.valid else EXIT_OURS


def _text(options: argparse.Namespace, pace: Pace, report: Report) -> str:
    from penstock.bench import calibrate
    from penstock.bench.report import text
    from penstock.bench.results.folder import Result

    parts = []
    if options.prompt is not None or not options.stream:
        parts.append(text.hey_block(report.requests, report.summary, report.is_open))
    parts.append(text.serving_block(report.summary, pace.rate, pace.concurrency))
    if pairs := calibrate.pairs(Result("", report.result)):
        parts.append(text.prediction(pairs))
    parts.append(text.notes(report))
    parts.append(f"seed: {options.seed} (--seed {options.seed} asks the same again)")
    if options.formulas:
        parts.append(text.formulas())
    return "\n".join(parts)


def _show_progress(progress: Progress) -> None:
    from penstock.bench.report import text

    print(f"\r\033[K{text.progress_line(progress)}", end="", file=sys.stderr, flush=True)


def _service(options: argparse.Namespace) -> Service:
    from penstock.bench.serve import Service, parts_of
    from penstock.cli.bench.requests import client_of, only_model

    if options.name and options.url:
        raise UserError("cannot measure a deployment and an address at once", hint="Give its name, or --url.")
    url = options.url or (None if options.name else os.environ.get("OPENAI_BASE_URL"))
    key = os.environ.get("OPENAI_API_KEY")
    pages, page_keys = options.metrics, {}
    if url is None:
        run = _run_of(options.name)
        url, key = keys.address_and_key(run)
        page_keys = {f"{url}/metrics": run.scrape_key(), **_engine_pages(run)}
        pages = pages or [*page_keys]
    for address in (url, *pages):
        parts_of(address)
    return Service(
        url=url,
        model=options.model or only_model(client_of(url, key, options.insecure)),
        endpoint=options.endpoint,
        streams=options.stream,
        key=key,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        extra_body=options.extra_body,
        is_insecure=options.insecure,
        metrics_urls=tuple(pages),
        page_keys=page_keys,
        timeout_s=options.timeout,
    )


def _engine_pages(run: Run) -> dict[str, str]:
    """/metrics of the engines on this machine, or at this end of a tunnel, with their key: of the prefix cache."""
    from penstock.spec.gateway import is_loopback
    from penstock.wire.announcement import engine_key

    announced = [replica.announcement for replica in state.replicas] if (state := run.state()) is not None else []
    urls = [node.url for node in announced if node is not None and node.url]
    key = engine_key(run.admin_token())
    return {f"{url}/metrics": key for url in urls if is_loopback(urlsplit(url).hostname or "")}


def _run_of(name: str | None) -> Run:
    """That deployment, or the only one that runs here.  Raises UserError."""
    from penstock import run_folder

    try:
        return run_folder.choose(name)
    except UserError as error:
        if name is not None:
            raise
        raise UserError(error.message, hint="Name it, or --url http://HOST:PORT (also $OPENAI_BASE_URL).") from error


def _pace(options: argparse.Namespace) -> Pace:
    from penstock.bench.load.arrivals import Pace, check

    if options.rate == math.inf:  # as vLLM's load generator: all at once, or as many as may be in flight
        options.rate, options.concurrency = None, options.concurrency or options.requests
    is_trace = (options.dataset or "").startswith("replay:") and options.rate is options.concurrency is None
    pace = Pace(
        rate=options.rate,
        concurrency=options.concurrency,
        arrival=options.arrival or ("replay" if is_trace else "gamma" if options.burstiness != 1 else "poisson"),
        burstiness=options.burstiness,
        rate_from=options.rate_from,
        n_requests=options.requests,
        duration_s=options.duration,
        seed=options.seed,
    )
    check(pace)
    if not pace.is_open and options.arrival is not None:
        _say(options, f"--arrival {options.arrival} is for an open loop: here the next one goes when one ends")
    return pace


def _requests(
    options: argparse.Namespace, pace: Pace, service: Service, model: str
) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """The requests of the run and of its warm-up; prints how well random texts are counted.

    `model`: its path, or its name.
    """
    from penstock.bench.datasets import synthetic, tokenizers
    from penstock.bench.datasets.files import Wanted
    from penstock.bench.load.arrivals import PlannedRequest
    from penstock.cli.bench.requests import client_of, drawn, requests_of

    is_chat = options.endpoint == "chat"
    kind = (options.dataset or "random").partition(":")[0]
    if (options.trace_unit and kind != "replay") or (options.speed != 1 and kind not in _TIMED):
        raise UserError("cannot change the times of what has none", hint="--dataset replay:FILE")
    ratio = options.random_range_ratio
    if ratio and (kind != "random" or options.prompt is not None):
        raise UserError("cannot vary the lengths of what is not random", hint="--dataset random")
    if options.dataset is not None:
        has_times = pace.arrival == "replay" and options.dataset.partition(":")[0] in _TIMED
        wanted = Wanted(
            n_requests=pace.n_requests or (synthetic.MOST_REQUESTS if has_times else _MOST_DRAWN),
            seed=options.seed,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            chat=is_chat,
            until_s=pace.duration_s if has_times else None,
            trace_unit=options.trace_unit,
            speed=options.speed,
            range_ratio=ratio,
        )
        client = client_of(service.url, service.key, service.is_insecure)
        return requests_of(options, wanted, options.warmup, model, client, service.model)
    n_output = options.output_tokens or _TOKENS
    if options.prompt is not None:
        if options.input_tokens is not None:
            raise UserError("cannot give a prompt a length", hint="--prompt TEXT, or --input-tokens N of random text.")
        return [PlannedRequest(options.prompt, None, n_output)], []
    n_input = options.input_tokens or _TOKENS
    tokens = _counter(options.tokenizer, model)
    n_sent = pace.n_requests or math.ceil((pace.rate or 0.0) * (pace.duration_s or 0.0))
    if isinstance(tokens, str):
        _say(options, f"prompts of about {n_input} tokens, random words: {tokens}")
        tokens, n_sent = tokenizers.Words(), n_sent or _MOST_WORDS
    else:
        lengths = f"{n_input} tokens, give or take {ratio:.0%}" if ratio else f"exactly {n_input} tokens"
        _say(options, f"prompts of {lengths}, counted by {tokens.source}")
    n_drawn = min(n_sent or _MOST_DRAWN, _MOST_WORDS)
    wanted, counter = Wanted(n_drawn, options.seed, n_input, n_output, is_chat, range_ratio=ratio), tokens
    return drawn("random", wanted, options.warmup, lambda: counter)


def _counter(named: str | None, model: str) -> Tokens | str:
    """The model's tokenizer where it is on this machine, or why it cannot count.  Raises UserError for a named one."""
    from penstock.bench.datasets.tokenizers import tokens_of

    try:
        return tokens_of(named or model)
    except UserError as error:
        if named is not None:
            raise
        return f"{error.message.partition(': ')[2] or error.message} (--tokenizer FOLDER)"


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.json:
        print_step(text)


def _bounds(words: list[str], streams: bool) -> dict[str, float]:
    """{"ttft": 2000.0} of ["ttft:2000"]; a metric once, and one that is measured.  Raises UserError."""
    from penstock.bench.results.stats import METRICS
    from penstock.bench.sweep import slo_of

    names = [word.partition(":")[0] for word in words]
    bounds = dict(zip(names, (bound.most_ms for bound in slo_of(words).bounds), strict=True))
    if len(bounds) < len(words) or not bounds.keys() <= {*METRICS}:
        raise UserError(f"cannot use bounds {' '.join(words)[:60]}", hint=f"Each of {', '.join(METRICS)} once.")
    if not streams and bounds.keys() - {"e2el"}:
        raise UserError("cannot bound tokens of whole answers", hint="Without --no-stream, or e2el:MS.")
    return bounds
