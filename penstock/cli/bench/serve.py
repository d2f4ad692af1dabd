"""`penstock bench`: its arguments, and what it prints. `bench.serve` measures.

Exit codes: 0 for a run, also one that is not valid (the result says so); 1 when nothing was completed; 2 for what
cannot be run; 130 after Ctrl-C, with the result so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.bench.requests import Subparsers
from penstock.errors import EXIT_OURS, PenstockError, UserError

if TYPE_CHECKING:
    from penstock.bench.datasets.tokenizers import Tokens
    from penstock.bench.load.arrivals import Ask, Pace
    from penstock.bench.load.run import Progress
    from penstock.bench.serve import Report, Service

_INTERRUPTED = 130
_TOKENS = 128  # of a prompt and of an answer, where nobody says
_MOST_ASKS = 1000  # of a data set, when a run ends by time: then from its beginning again
_TIMED = ("replay", "jsonl")  # data sets that may say when to send
_ARRIVALS = ("poisson", "constant", "gamma", "ramp", "replay")


def add_arguments(sub: argparse.ArgumentParser) -> Subparsers:
    """The verb `serve`; what is returned takes further ones."""
    verbs = sub.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    serve = verbs.add_parser(
        "serve",
        help="load an OpenAI endpoint, and measure what its users get",
        description="Load an OpenAI endpoint, and measure what its users get. The key is read from OPENAI_API_KEY.",
    )
    serve.set_defaults(verb=run_serve, verb_name="bench serve")
    _add_serve(serve)
    return verbs


def _add_serve(sub: argparse.ArgumentParser) -> None:
    place = sub.add_argument_group("where")
    text = "a deployment (default: the only one that runs, where no address is given)"
    place.add_argument("name", nargs="?", metavar="NAME", help=text)
    place.add_argument("--url", help="base address, with or without /v1 (default: $OPENAI_BASE_URL)")
    place.add_argument("--model", metavar="NAME", help="default: the only one that the server has")
    place.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="what to ask")
    place.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream the answers")
    place.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    pace = sub.add_argument_group("how fast")
    pace.add_argument("--requests", type=_count, metavar="N", help="how many (also --num-prompts)")
    pace.add_argument("--num-prompts", type=_count, dest="requests", metavar="N", help=argparse.SUPPRESS)
    pace.add_argument("--duration", type=_positive, metavar="SECONDS", help="send for so long; answers are waited for")
    pace.add_argument("--rate", type=_positive, metavar="R", help="requests/s, whatever the answers do (open loop)")
    pace.add_argument("--request-rate", type=_positive, dest="rate", metavar="R", help=argparse.SUPPRESS)
    pace.add_argument("--concurrency", type=_count, metavar="C", help="C at a time, the next when one ends")
    pace.add_argument("--max-concurrency", type=_count, dest="concurrency", metavar="C", help=argparse.SUPPRESS)
    pace.add_argument("--arrival", choices=_ARRIVALS, help="of an open loop (default: poisson)")
    pace.add_argument(
        "--burstiness", type=_positive, default=1.0, metavar="K", help="gamma arrivals: below 1 in bursts"
    )
    pace.add_argument("--rate-from", type=_not_negative, default=0.0, metavar="R", help="where a ramp to --rate starts")
    pace.add_argument("--warmup", type=_count_or_0, default=1, metavar="N", help="requests before, not counted")
    pace.add_argument("--timeout", type=_positive, default=600.0, metavar="SECONDS", help="for a whole answer")
    pace.add_argument("--seed", type=int, default=0, help="of times and prompts")
    what = sub.add_argument_group("what is asked")
    what.add_argument("--prompt", metavar="TEXT", help="the same for every request; prints hey's report too")
    text = "of a random prompt (default: 128): exactly, where the model's tokenizer is on this machine"
    what.add_argument("--input-tokens", type=_count, metavar="I", help=text)
    text = "of every answer, at most (default: 128)"
    what.add_argument("--output-tokens", "--max-tokens", type=_count, metavar="O", help=text)
    what.add_argument(
        "--dataset", metavar="KIND:FILE", help="random, sharegpt:FILE, jsonl:FILE, ... (docs/how-to/load-tests.md)"
    )
    what.add_argument("--tokenizer", metavar="FOLDER", help="counts tokens (default: the model's own)")
    what.add_argument("--ignore-eos", action="store_true", help="answers of exactly so many tokens (vLLM, llama.cpp)")
    what.add_argument("--temperature", type=_not_negative, default=0.0, metavar="T", help="of sampling; 0 is greedy")
    what.add_argument("--extra-body", type=_mapping, default={}, metavar="JSON", help="further fields of the request")
    out = sub.add_argument_group("what comes out")
    out.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="bounds: ttft:2000 tpot:60 e2el:9000")
    out.add_argument(
        "--metrics", action="append", default=[], metavar="URL", help="pages to follow (default: /metrics)"
    )
    out.add_argument("--out", type=Path, metavar="DIR", help="default: $PENSTOCK_HOME/bench/TIME")
    out.add_argument("--formulas", action="store_true", help="print how each number is computed")
    out.add_argument("--json", action="store_true", help="print the result as JSON")


def run_serve(options: argparse.Namespace) -> int:
    """Measures once, prints, writes the folder."""
    from penstock.gateway import compiled

    compiled.activate()
    from penstock.bench import serve
    from penstock.bench.load import arrivals
    from penstock.bench.results import folder as folders
    from penstock.cli.bench.deployment import behind
    from penstock.paths import home

    service, pace, bounds = _service(options), _pace(options), _bounds(options.goodput, options.stream)
    launch = behind(service.url)
    asks, warmup = _asks(options, pace, service, launch.model or service.model)
    arrivals.check(pace, [ask.offset_s for ask in asks])
    folder = options.out or folders.new_folder(home(), time.time())
    is_new = not folder.exists()
    folders.prepare(folder)
    shows = sys.stderr.isatty()
    if options.warmup:
        _say(options, f"warming up with {options.warmup} request{'s' * (options.warmup != 1)}, not counted")
    try:
        report = serve.run(service, asks, pace, bounds, options.warmup, _show_progress if shows else None, warmup)
    except PenstockError:
        with contextlib.suppress(OSError):  # nothing was measured: it is as empty as it was made
            if is_new:
                folder.rmdir()
        raise
    if shows:
        print("\r\033[K", end="", file=sys.stderr)
    flags = {**vars(options), "arrival": pace.arrival}
    report.result["flags"] = {key: value for key, value in sorted(flags.items()) if _is_plain(value)}
    report.result["folder"] = str(folder.resolve())
    launch.tell(report)
    folders.write(folder, report.result, report.requests, report.rows, report.is_open)
    launch.keep(folder)
    _write_page(folder)
    if options.json:
        print(json.dumps(report.result), flush=True)
    else:
        print(_text(options, pace, report))
        print(f"written to {folder} (report.html is the page)")
    if report.was_interrupted:
        return _INTERRUPTED
    return 0 if report.summary.completed else EXIT_OURS


def _write_page(folder: Path) -> None:
    """The page of what is in the folder."""
    from penstock.bench.report import html
    from penstock.bench.results import folder as record
    from penstock.cli.bench.requests import write

    write(folder / "report.html", html.page([record.load(folder)]))


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | list | dict | type(None))


def _text(options: argparse.Namespace, pace: Pace, report: Report) -> str:
    from penstock.bench import calibrate
    from penstock.bench.report import text as show
    from penstock.bench.results.folder import Result

    parts = []
    if options.prompt is not None or not options.stream:
        parts.append(show.hey_block(report.requests, report.summary, report.is_open))
    parts.append(show.serving_block(report.summary, pace.rate, pace.concurrency))
    if found := calibrate.pairs(Result("", report.result)):
        parts.append(show.prediction(found))
    parts.append(show.notes(report.summary, report.generator, report.verdict, report.requests))
    if options.formulas:
        parts.append(show.formulas())
    return "\n".join(parts)


def _show_progress(progress: Progress) -> None:
    from penstock.bench.report import text as show

    print(f"\r\033[K{show.progress_line(progress)}", end="", file=sys.stderr, flush=True)


def _service(options: argparse.Namespace) -> Service:
    from penstock.bench.serve import Service, parts_of
    from penstock.cli.bench.requests import client_of, only_model

    if options.name and options.url:
        raise UserError("cannot measure a deployment and an address at once", hint="Give its name, or --url.")
    url = options.url or (None if options.name else os.environ.get("OPENAI_BASE_URL")) or _url_of(options.name)
    for address in (url, *options.metrics):
        parts_of(address)
    key = os.environ.get("OPENAI_API_KEY")
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
        metrics_urls=tuple(options.metrics),
        timeout_s=options.timeout,
    )


def _url_of(name: str | None) -> str:
    """The gateway's address of a deployment, or of the only one that runs here.  Raises UserError."""
    from penstock import run_folder

    try:
        return run_folder.choose(name).url
    except UserError as error:
        if name is not None:
            raise
        raise UserError(error.message, hint="Name it, or --url http://HOST:PORT (also $OPENAI_BASE_URL).") from error


def _pace(options: argparse.Namespace) -> Pace:
    from penstock.bench.load.arrivals import Pace, check

    pace = Pace(
        rate=options.rate,
        concurrency=options.concurrency,
        arrival=options.arrival or ("gamma" if options.burstiness != 1 else "poisson"),
        burstiness=options.burstiness,
        rate_from=options.rate_from,
        n_requests=options.requests,
        duration_s=options.duration,
        seed=options.seed,
    )
    check(pace)
    if pace.concurrency is not None and options.arrival is not None:
        _say(options, f"--arrival {options.arrival} is for an open loop: here the next one goes when one ends")
    return pace


def _asks(options: argparse.Namespace, pace: Pace, service: Service, model: str) -> tuple[list[Ask], list[Ask]]:
    """What is asked, and what the warm-up asks; a word of how well it is counted, where texts are random.

    `model`: its path, or its name.
    """
    from penstock.bench.datasets import synthetic
    from penstock.bench.datasets.files import Wanted
    from penstock.cli.bench.requests import asks_of, client_of, drawn

    is_chat = options.endpoint == "chat"
    if options.dataset is not None:
        has_times = pace.arrival == "replay" and options.dataset.partition(":")[0] in _TIMED
        wanted = Wanted(
            n_requests=pace.n_requests or (synthetic.MOST_REQUESTS if has_times else _MOST_ASKS),
            seed=options.seed,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            chat=is_chat,
            until_s=pace.duration_s if has_times else None,
        )
        client = client_of(service.url, service.key, service.is_insecure)
        return asks_of(options, wanted, options.warmup, model, client, service.model)
    n_output = options.output_tokens or _TOKENS
    if options.prompt is not None:
        if options.input_tokens is not None:
            raise UserError("cannot give a prompt a length", hint="--prompt TEXT, or --input-tokens N of random text.")
        return synthetic.fixed(options.prompt, n_output), []
    n_input = options.input_tokens or _TOKENS
    counter = _counter(options.tokenizer, model)
    if isinstance(counter, str):
        _say(options, f"prompts of about {n_input} tokens, random words: {counter}")
        wanted = Wanted(min(pace.n_requests or synthetic.MOST, synthetic.MOST), options.seed, n_input, n_output)
        return drawn(
            lambda part: synthetic.random_words(n_input, n_output, part.n_requests, part.seed), wanted, options.warmup
        )
    _say(options, f"prompts of exactly {n_input} tokens, counted by {counter.source}")
    n_sent = pace.n_requests or math.ceil((pace.rate or 0.0) * (pace.duration_s or 0.0)) or _MOST_ASKS
    wanted = Wanted(min(n_sent, synthetic.MOST), options.seed, n_input, n_output, chat=is_chat)
    return drawn(lambda part: synthetic.from_spec("random", part, lambda: counter), wanted, options.warmup)


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
        print(text, file=sys.stderr)


def _bounds(words: list[str], streams: bool) -> dict[str, float]:
    """{"ttft": 2000.0} of ["ttft:2000"]; a metric once, and one that is measured.  Raises UserError."""
    from penstock.bench.results.stats import GOODPUT_NAMES

    bounds: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in GOODPUT_NAMES or not 0 < value < math.inf or name in bounds:
            raise UserError(
                f'cannot use goodput bound "{word[:60]}"', hint="NAME:MILLISECONDS, with ttft, tpot, itl or e2el"
            )
        if not streams and name != "e2el":
            raise UserError(f"cannot bound {name} of whole answers", hint="Without --no-stream, or e2el:MS.")
        bounds[name] = value
    return bounds


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) < 10**9):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number above 0")
    return int(text)


def _count_or_0(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number from 0 on")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # NaN, and 1e999, are no JSON for the server
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a JSON object")
    return value
