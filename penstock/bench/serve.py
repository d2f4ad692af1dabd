"""`bench serve`: planned requests become messages, messages a run, a run its numbers."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import socket
import ssl
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec

from penstock import __version__
from penstock.bench.load import arrivals
from penstock.bench.load.arrivals import PlannedRequest
from penstock.bench.load.connections import UNFINISHED, Address
from penstock.bench.load.exchanges import ExchangeFile
from penstock.bench.load.run import Load, Outcome, Progress, Source
from penstock.bench.load.run import run as run_load
from penstock.bench.results import engine_metrics, folder, stats, validity
from penstock.bench.results.engine_metrics import Row
from penstock.bench.results.parse import body_of, parse_exchange
from penstock.bench.results.stats import Summary, Timed
from penstock.bench.results.validity import Generator, Verdict
from penstock.errors import PenstockError, UserError
from penstock.wire.client import tls_context

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_MAX_SPARE = 256
_WRITE_BYTES = 2**20


class Service(msgspec.Struct, frozen=True):
    """What is measured: the address, and how it is asked. `key` is sent, and never written anywhere.

    `page_keys`: what pages of `metrics_urls` ask for, where that is not `key`.
    """

    url: str
    model: str
    endpoint: str = "chat"
    streams: bool = True
    key: str | None = None
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = {}
    is_insecure: bool = False
    metrics_urls: tuple[str, ...] = ()
    page_keys: Mapping[str, str] = {}
    timeout_s: float = 600.0


class Run(msgspec.Struct, frozen=True):
    """What a run is, as it is kept while it lasts. `sources`: the pages of metrics; `most_failed`: a share."""

    service: Service
    pace: arrivals.Pace
    bounds_ms: Mapping[str, float] = {}
    n_warmup: int = 1
    flags: Mapping[str, Any] = {}
    most_failed: float = validity.MAX_FAILED_SHARE
    percentiles: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """A finished run. `result` is what result.json holds."""

    result: dict[str, Any]
    requests: list[Timed]
    rows: list[Row]
    summary: Summary
    generator: Generator
    verdict: Verdict
    is_open: bool
    was_interrupted: bool


def run(
    what: Run,
    requests: Sequence[PlannedRequest],
    on_progress: Callable[[Progress], None] | None = None,
    warmup: Sequence[PlannedRequest] = (),
    out: Path | None = None,
) -> Report:
    """Warm up, run, read the answers. Blocks.  Raises PenstockError, with the server's words, when the first one fails.

    `warmup`: prompts that no measured request repeats; without, `requests`. `out`: the folder for reads and rows.
    """
    service, pace = what.service, what.pace
    arrivals.check(pace, [request.offset_s for request in requests])
    if not requests:
        raise UserError("cannot run a load test without a request", hint="The dataset is empty.")
    address = resolve(service.url)
    tls = tls_context(service.is_insecure) if address.is_tls else None
    messages = [encode(service, address, request) for request in requests]
    if what.n_warmup:
        before = [encode(service, address, request) for request in warmup] or messages
        _warm_up(service, address, tls, before, what.n_warmup)
    sources = _sources(service, address)
    what = msgspec.structs.replace(what, sources=tuple(name for name, _ in sources))
    load = Load(
        requests=messages,
        wait_for=[request.wait_for for request in requests],
        times=arrivals.offsets(pace, [request.offset_s or 0.0 for request in requests]) if pace.is_open else None,
        concurrency=pace.concurrency,
        n_requests=pace.n_requests,
        duration_s=pace.duration_s,
        timeout_s=service.timeout_s,
        n_spare=min(_MAX_SPARE, 4 + int((pace.rate or 0) * 0.02)) if pace.is_open else 0,
    )
    with contextlib.ExitStack() as stack:
        file: BinaryIO = io.BytesIO()
        if out is not None:
            folder.begin(out, msgspec.structs.replace(what, service=_keyless(service)))
            file = stack.enter_context((out / folder.RAW).open("w+b", buffering=_WRITE_BYTES))
        outcome = run_load(address, load, tls, [source for _, source in sources], on_progress, file)
        return report(what, outcome, out)


def recover(out: Path) -> Report:
    """The report of a run that was killed, from the reads that it left.  Raises UserError."""
    what = folder.begun(out, Run)
    try:
        with (out / folder.RAW).open("rb") as file:
            exchanges = ExchangeFile(file)
            began_s, began_at = exchanges.began() or (0.0, 0.0)
            why = "the run was killed: these are the numbers so far"
            return report(what, Outcome(exchanges, began_s, began_s, began_at, cut_short=why), out)
    except OSError as exc:
        raise UserError(f'cannot read the run "{out}": {exc.strerror}') from exc


def resolve(url: str) -> Address:
    """The address behind a base URL, with or without "/v1".  Raises UserError, or PenstockError."""
    parts = parts_of(url)
    port, name = parts.port or (443 if parts.scheme == "https" else 80), str(parts.hostname)
    try:
        rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise PenstockError(f"cannot find the host of {url}: {exc.strerror}") from exc
    host = str(rows[0][4][0])
    if name == "localhost" and host == "::1":  # servers listen on 127.0.0.1 more often
        host = next((str(row[4][0]) for row in rows if row[0] == socket.AF_INET), host)
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.scheme, host, port, name, prefix)


def parts_of(url: str) -> urllib.parse.SplitResult:
    """A base URL in its parts, which have a host.

    Raises UserError, also for a URL with a password: it would be written into every result.
    """
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        str(parts.hostname).encode("idna")  # as the resolver will
    except ValueError:
        is_usable = False
    if "@" in url and (not is_usable or "@" in parts.netloc):
        raise UserError(
            "cannot use a base URL with a user or a password in it",
            hint="The key is read from OPENAI_API_KEY, and sent as a bearer token.",
        )
    if not is_usable:
        raise UserError(f'cannot use base URL "{url[:200]}"', hint="Give http://HOST:PORT or https://HOST.")
    return parts


def encode(service: Service, address: Address, request: PlannedRequest) -> bytes:
    """The whole HTTP message of one request.  Raises UserError."""
    body: dict[str, Any] = {"model": request.model or service.model}
    if service.endpoint == "chat":
        is_text = isinstance(request.prompt, str)
        body["messages"] = [{"role": "user", "content": request.prompt}] if is_text else request.prompt
    elif isinstance(request.prompt, str):
        body["prompt"] = request.prompt
    else:
        raise UserError("cannot send chat messages to /v1/completions", hint="--endpoint chat")
    body["max_tokens"] = request.output_tokens
    if service.temperature is not None:
        body["temperature"] = service.temperature
    if service.ignore_eos:
        body["ignore_eos"] = True
    if service.streams:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    try:
        data = msgspec.json.encode({**body, **service.extra_body})
    except UnicodeEncodeError as exc:
        raise UserError(
            "cannot send a request: it holds bytes that are not UTF-8 text", hint="Check --prompt."
        ) from exc
    path = address.prefix + _PATHS[service.endpoint]
    return _head(b"POST", address, path, service.key, len(data), request.headers) + data


def _head(
    method: bytes,
    address: Address,
    path: str,
    key: str | None,
    n_bytes: int | None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    lines = [
        b"%s %s HTTP/1.1" % (method, urllib.parse.quote(path, safe="/%?&=:").encode()),
        b"host: " + address.authority.encode("idna" if not address.authority.isascii() else "ascii"),
        f"user-agent: penstock-bench/{__version__}".encode(),
        b"accept: */*",
        b"accept-encoding: identity",
    ]
    if n_bytes is not None:
        lines += [b"content-type: application/json", b"content-length: %d" % n_bytes]
    lines += [f"{name}: {value}".encode() for name, value in headers.items()]
    if key and "authorization" not in map(str.lower, headers):
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                "cannot use the API key: it holds characters that no header may", hint="Check OPENAI_API_KEY."
            )
        lines.append(b"authorization: Bearer " + key.encode())
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _warm_up(
    service: Service, address: Address, tls: ssl.SSLContext | None, requests: Sequence[bytes], n_warmup: int
) -> None:
    """One request, which must be answered, then the others eight at a time. None of them is counted."""
    first = run_load(address, Load(requests[:1], concurrency=1, n_requests=1, timeout_s=service.timeout_s), tls)
    if first.was_interrupted:
        raise KeyboardInterrupt
    answer, _ = parse_exchange(next(first.exchanges.read()), service.streams)
    if answer.error is not None:
        raise _refused(service, answer)
    if n_warmup > 1:
        others = [*requests[1:], requests[0]]
        load = Load(others, concurrency=min(8, n_warmup - 1), n_requests=n_warmup - 1, timeout_s=service.timeout_s)
        if run_load(address, load, tls).was_interrupted:
            raise KeyboardInterrupt


def _refused(service: Service, answer: Timed) -> PenstockError:
    words = f": {answer.detail}" if answer.detail else ""
    message = f"could not get a first answer from {service.url}: {answer.error}{words}"
    if answer.status in (401, 403):
        return UserError(message, hint="Set OPENAI_API_KEY to a key that may use this model.")
    if answer.status in (400, 404, 422):
        return UserError(message, hint="Check --model, --endpoint and the requested lengths.")
    return PenstockError(message, hint="Is it running, and is this its address?", is_retryable=True)


def _sources(service: Service, address: Address) -> list[tuple[str, Source]]:
    """Pages to follow: those named, else the server's /metrics."""
    sources = []
    for url in service.metrics_urls or (f"{address.scheme}://{parts_of(service.url).netloc}/metrics",):
        place = address if not service.metrics_urls else resolve(url)
        # A key goes to the server it is for, and to no other.
        key = service.page_keys.get(url, service.key if place == address else None)
        sources.append((url, Source(place, _head(b"GET", place, parts_of(url).path or "/metrics", key, None))))
    return sources


def report(what: Run, outcome: Outcome, out: Path | None = None) -> Report:
    """The numbers of what was recorded; its rows go to the folder `out` on the way."""
    is_open, service = what.pace.is_open, what.service
    requests: list[Timed] = []
    tokens = stats.TokenTimes()
    n_reads = 0
    with folder.request_writer(out, is_open) if out is not None else contextlib.nullcontext(_ignore) as write:
        for raw in outcome.exchanges.read():
            request, times = parse_exchange(raw, service.streams)
            requests.append(request)
            n_reads += len(raw.reads)
            if request.error is None:
                tokens.add(times)
            write(request, times)
    summary = stats.summarise(requests, tokens, is_open, what.bounds_ms, UNFINISHED, what.percentiles)
    generator = validity.describe(
        [request for request in requests if is_open and request.error != UNFINISHED],
        outcome.lag_s,
        outcome.cpu_s,
        outcome.ended_s - outcome.began_s,
        n_reads,
        outcome.n_connections,
    )
    verdict = validity.judge(generator, summary, outcome.was_interrupted, outcome.cut_short, what.most_failed)
    rows = _rows(outcome.exchanges, what.sources)
    engine = engine_metrics.summarise(rows)
    result = {
        **_numbers(summary),
        "valid": verdict.valid,
        "invalid_because": list(verdict.reasons),
        "validity_bounds": verdict.bounds,
        "generator": msgspec.to_builtins(generator),
        "engine": engine,
        "prefix_hit_rate": engine_metrics.hit_rate(engine, requests),
        **_energy(engine_metrics.power_watts(rows), summary),
        "warmup_requests": what.n_warmup,
        "percentiles": list(what.percentiles),
        "goodput_bounds_ms": dict(what.bounds_ms),
        "pace": msgspec.to_builtins(what.pace),
        "service": msgspec.to_builtins(_keyless(service)),
        "flags": dict(what.flags),
        "began_at": outcome.began_at,
        "model": service.model,
        "versions": {"penstock": __version__, "python": sys.version.split()[0]},
        "formulas": dict(stats.FORMULAS),
        "machine": machine_facts(),
    }
    return Report(result, requests, rows, summary, generator, verdict, is_open, outcome.was_interrupted)


def _numbers(summary: Summary) -> dict[str, Any]:
    facts = msgspec.to_builtins(summary)
    del facts["spreads"], facts["user_tokens_per_s"]
    for name in stats.METRICS:
        spread = summary.spreads.get(name)
        for word in ("mean", "median", "std", "p90", "p95", "p99", "max"):
            facts[f"{word}_{name}_ms"] = getattr(spread, word) if spread else None
        facts |= {f"{word}_{name}_ms": value for word, value in (spread.chosen if spread else {}).items()}
    facts["user_tokens_per_s"] = msgspec.to_builtins(summary.user_tokens_per_s)
    return dict(facts)


def _energy(power_watts: float | None, summary: Summary) -> dict[str, float]:
    """Empty where the GPUs' power, or the tokens, are unknown."""
    if power_watts is None or not summary.total_output_tokens:
        return {}
    joules = power_watts * summary.duration
    return {"gpu_power_watts": power_watts, "joules_per_token": joules / summary.total_output_tokens}


def _ignore(_: Timed, __: Sequence[float]) -> None:
    """Where rows go without a folder."""


def _keyless(service: Service) -> Service:
    """As it may be written: without its key, and without what follows the port."""
    parts = parts_of(service.url)
    key = "given" if service.key else None
    return msgspec.structs.replace(service, url=f"{parts.scheme}://{parts.netloc}", key=key, page_keys={})


def _rows(exchanges: ExchangeFile, names: Sequence[str]) -> list[Row]:
    rows = []
    for kind, name in enumerate(names, 1):
        for raw in exchanges.read(kind):
            body = body_of(raw) if raw.error is None else None
            row = None if body is None else engine_metrics.read_page(body.decode("utf-8", "replace"), raw.end_s, name)
            if row is not None:
                rows.append(row)
    return sorted(rows, key=lambda row: row.time_s)


def machine_facts() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "platform": platform.platform(),
    }
