"""Data sets that are read from files: ShareGPT's JSON, JSON lines, traces of arrival times. Nothing is downloaded."""

from __future__ import annotations

import csv
import datetime
import io
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.bench.datasets.tokenizers import Tokens
from penstock.bench.load.arrivals import PlannedRequest
from penstock.errors import UserError

# The filters of vLLM's own benchmarks (vllm 0.32 `benchmarks/datasets/datasets.py`, is_valid_sequence), in tokens.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
_PUBLISHED = {
    "sharegpt": "Nothing is downloaded. The usual file is ShareGPT_V3_unfiltered_cleaned_split.json of the hub's data "
    "set anon8231489123/ShareGPT_Vicuna_unfiltered.",
    "replay": "Nothing is downloaded. Traces: Azure/AzurePublicDataset (CSV), kvcache-ai/Mooncake (JSONL).",
}
UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# Columns of public traces -> (time, prompt tokens, answer tokens), and the unit of numbers there.
# https://github.com/Azure/AzurePublicDataset, https://github.com/kvcache-ai/Mooncake, https://github.com/HPMLL/BurstGPT
_TRACES: tuple[tuple[tuple[str, str, str], str], ...] = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), "s"),
    (("timestamp", "input_length", "output_length"), "ms"),
    (("Timestamp", "Request tokens", "Response tokens"), "s"),
    (("offset_s", "input_tokens", "output_tokens"), "s"),
)
# A first time as large as this is a Unix time in that unit.
_UNIX = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (1e9, "s"))
# Requests/s on average, for numbers whose size does not say their unit: what was in seconds is too fast in
# milliseconds, and what was in microseconds too slow. Few rows may well be a burst.
_MOST_PLAUSIBLE_RATE = 100.0
_LEAST_PLAUSIBLE_RATE = {"s": 0.01, "ms": 0.1}
_LEAST_ROWS = 5
_NO_HEADERS = frozenset(("host", "content-length", "transfer-encoding", "connection"))


class Wanted(msgspec.Struct, frozen=True):
    """How much of a data set, and how long. None: as the data say, or the shape's default.

    `chat`: prompts go into a chat template, so special tokens are not counted. `until_s`: where a trace ends.
    `trace_unit`: of its times; `speed`: 2 replays it in half the time. `range_ratio`: by which random lengths vary.
    """

    n_requests: int = 100
    seed: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    chat: bool = True
    until_s: float | None = None
    trace_unit: str | None = None
    speed: float = 1.0
    range_ratio: float = 0.0


def sharegpt(path: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[PlannedRequest]:
    """First question and answer of ShareGPT conversations, drawn by the seed, filtered as vLLM does."""
    rows = _json(path, "sharegpt")
    if not isinstance(rows, list):
        raise UserError(f'cannot use "{path}": not a list of conversations', hint=_PUBLISHED["sharegpt"])
    pairs = [pair for row in rows if (pair := _first_two(row)) is not None]
    random.Random(wanted.seed).shuffle(pairs)
    counter = tokens()
    requests: list[PlannedRequest] = []
    for prompt, answer in pairs:
        if len(requests) == wanted.n_requests:
            break
        n_in = counter.count(prompt, special=not wanted.chat)
        n_out = wanted.output_tokens or counter.count(answer, special=False)
        is_long_enough = n_in >= MIN_TOKENS and n_out >= (1 if wanted.output_tokens else MIN_TOKENS)
        if is_long_enough and n_in <= MAX_PROMPT_TOKENS and n_in + n_out <= MAX_TOTAL_TOKENS:
            requests.append(PlannedRequest(prompt, n_in, n_out))
    if not requests:
        raise UserError(
            f'cannot use "{path}": no conversation in it is usable',
            detail=f"{len(rows)} rows, {len(pairs)} with two turns; prompts of {MIN_TOKENS} to {MAX_PROMPT_TOKENS} "
            f"tokens, at most {MAX_TOTAL_TOKENS} with the answer.",
        )
    return _repeated(requests, wanted.n_requests)


def _first_two(row: Any) -> tuple[str, str] | None:
    turns = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    return (texts[0], texts[1]) if isinstance(texts[0], str) and isinstance(texts[1], str) else None


def jsonl(path: str, wanted: Wanted, _: Callable[[], Tokens]) -> list[PlannedRequest]:
    """One request a line: {"prompt": text} or {"messages": [...]}, with "max_tokens" and, ascending, "offset_s"."""
    requests = []
    before = 0.0
    for number, row in _json_lines(path, "jsonl"):
        prompt = row.get("messages") or row.get("prompt")
        limit = wanted.output_tokens or row.get("max_tokens") or row.get("output_tokens") or 200
        is_text = isinstance(prompt, str) or (
            isinstance(prompt, list) and all(isinstance(part, dict) and part.get("role") for part in prompt)
        )
        if not prompt or not is_text or not isinstance(limit, int) or limit < 1:
            raise UserError(
                f'cannot use "{path}", line {number}: no prompt, or no whole number of max_tokens',
                hint='{"prompt": "text", "max_tokens": 64} or {"messages": [{"role": "user", "content": "text"}]}',
            )
        offset = row.get("offset_s")
        if isinstance(offset, int | float):
            if not before <= offset < math.inf:
                raise UserError(f'cannot use "{path}", line {number}: its time is before the row above it, or below 0')
            before = float(offset)
        offset_s = offset / wanted.speed if isinstance(offset, int | float) else None
        model, headers = row.get("model"), row.get("headers", {})
        if not isinstance(model, str | None) or not _are_headers(headers):
            raise UserError(
                f'cannot use "{path}", line {number}: its model is no text, or its headers are no headers',
                hint='{"prompt": "text", "model": "adapter-1", "headers": {"x-user": "7"}}',
            )
        requests.append(PlannedRequest(prompt, None, limit, offset_s=offset_s, model=model, headers=headers))
    if not requests:
        raise UserError(f'cannot use "{path}": it is empty')
    if requests[0].offset_s is not None:
        return requests[: wanted.n_requests]
    return _repeated(requests, wanted.n_requests)


def _are_headers(headers: Any) -> bool:
    return isinstance(headers, dict) and all(
        isinstance(value, str)
        and (name + value).isascii()
        and (name + value).isprintable()
        and name.replace("-", "").replace("_", "").isalnum()
        and name.lower() not in _NO_HEADERS
        for name, value in headers.items()
    )


Write = Callable[[int, Sequence[int], int], tuple[str, int]]


def replay(path: str, wanted: Wanted, writer: Callable[[], Write]) -> list[PlannedRequest]:
    """Arrival times and lengths of a recorded trace, with texts of those lengths; times count from the first row.

    Rows that share `hash_ids` share the beginnings of their texts. The writer takes tokens, ids and the tokens of a
    block, and gives a text with its tokens.
    """
    write = writer()
    rows: list[tuple[float, int, int, list[int]]] = []
    first: float | None = None
    before, n_seen, unit, is_clear = 0.0, 0, wanted.trace_unit, True
    for number, row in itertools.islice(_trace_rows(path), wanted.n_requests):
        try:
            columns, usual = next((columns, usual) for columns, usual in _TRACES if columns[0] in row)
            if unit is None:
                unit, is_clear = _unit_of(row[columns[0]], usual)
                is_clear = is_clear or columns[0] == "offset_s"
            at = _time_s(row[columns[0]], unit, is_named=wanted.trace_unit is not None) / wanted.speed
            n_in, n_out = (max(1, int(row[column])) for column in columns[1:])
            ids = [int(block) for block in row.get("hash_ids") or ()]
        except (ValueError, TypeError, KeyError, StopIteration) as exc:
            names = "; ".join(", ".join(columns) for columns, _ in _TRACES)
            raise UserError(
                f'cannot use "{path}", line {number}: not a row of a trace', detail=str(exc), hint=f"Columns: {names}."
            ) from exc
        first = at if first is None else first
        if at - first < before:
            raise UserError(f'cannot use "{path}", line {number}: its time is before the row above it')
        before = at - first
        n_seen += 1
        if wanted.until_s is not None and before >= wanted.until_s:
            break
        rows.append((before, wanted.input_tokens or n_in, wanted.output_tokens or n_out, ids))
    if not rows:
        raise UserError(f'cannot use "{path}": it is empty')
    if not is_clear:  # also by the row after the last
        _check_rate(path, n_seen, before * wanted.speed, str(unit))
    return _traced(rows, write, wanted)


def _check_rate(path: str, n_rows: int, length_s: float, unit: str) -> None:
    """Raises UserError where the times are hardly in that unit."""
    is_fast = n_rows >= _LEAST_ROWS and 0 < length_s * _MOST_PLAUSIBLE_RATE < n_rows
    if is_fast or length_s * _LEAST_PLAUSIBLE_RATE.get(unit, 0.0) > n_rows:
        raise UserError(
            f'cannot tell the unit of the times in "{path}": {n_rows} requests in {length_s:.3g} s, read as {unit}',
            hint="--trace-unit s, ms, us or ns.",
        )


def _traced(rows: list[tuple[float, int, int, list[int]]], write: Write, wanted: Wanted) -> list[PlannedRequest]:
    _, n_tokens, _, longest = max(rows, key=lambda row: len(row[3]))
    block_tokens = 1  # the smallest power of two with which the ids hold the tokens: 512 in Mooncake's traces
    while longest and block_tokens * len(longest) < n_tokens:
        block_tokens *= 2
    requests = []
    for at, n_in, n_out, ids in rows:
        text, n_tokens = write(n_in, () if wanted.input_tokens else ids, block_tokens)
        requests.append(PlannedRequest(text, n_tokens, n_out, offset_s=round(at, 6), n_off=n_tokens - n_in))
    return requests


def _trace_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.endswith(".csv"):
        return enumerate(csv.DictReader(io.StringIO(_text(path, "replay"))), 2)
    return _json_lines(path, "replay")


def _unit_of(value: Any, usual: str) -> tuple[str, bool]:
    """The unit of a trace's times, by its first one, and whether that is certain."""
    try:
        at = float(value)
    except ValueError:
        return "s", True  # a date
    named = next((unit for least, unit in _UNIX if at >= least), None)
    return named or usual, named is not None


def _time_s(value: Any, unit: str, is_named: bool) -> float:
    try:
        at = float(value)
    except ValueError:
        return _date_s(value)
    if unit == "ms" and at != int(at) and not is_named:
        raise ValueError(f"a time of {at:g} ms; if it is in seconds: --trace-unit s")
    return at * UNITS_S[unit]


def _date_s(text: str) -> float:
    """Azure writes "2023-11-16 18:17:03.9799600": seven digits, where Python reads six."""
    whole, _, fraction = str(text).strip().partition(".")
    stamp = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp()
    digits = fraction.rstrip("Z").partition("+")[0]
    return stamp + (float(f"0.{digits}") if digits else 0.0)


def _repeated(requests: list[PlannedRequest], n_wanted: int) -> list[PlannedRequest]:
    return list(itertools.islice(itertools.cycle(requests), n_wanted))


def _json_lines(path: str, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_text(path, kind).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as exc:
            raise UserError(f'cannot use "{path}", line {number}: not JSON', detail=str(exc)) from exc
        if not isinstance(row, dict):
            raise UserError(f'cannot use "{path}", line {number}: not an object')
        yield number, row


def _json(path: str, kind: str) -> Any:
    try:
        return msgspec.json.decode(_text(path, kind))
    except msgspec.DecodeError as exc:
        raise UserError(f'cannot use "{path}": not JSON', detail=str(exc), hint=_PUBLISHED.get(kind)) from exc


def existing(path: str, kind: str) -> Path:
    """The file of a data set.  Raises UserError, with where the data are published, when there is none."""
    if not path:
        raise UserError(f"cannot use data set {kind}: no file", hint=f"{kind}:FILE. {_PUBLISHED.get(kind, '')}".strip())
    try:
        with Path(path).expanduser().open("rb"):
            return Path(path).expanduser()
    except OSError as exc:
        why = (exc.strerror or str(exc)).lower()
        raise UserError(f'cannot read data set "{path}": {why}', hint=_PUBLISHED.get(kind)) from exc


def _text(path: str, kind: str) -> str:
    try:
        return existing(path, kind).read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise UserError(f'cannot read data set "{path}": it is not UTF-8 text', hint=_PUBLISHED.get(kind)) from exc
