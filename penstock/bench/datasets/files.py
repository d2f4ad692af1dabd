"""Data sets that are read from files: ShareGPT's JSON, JSON lines, traces of arrival times. Nothing is downloaded."""

from __future__ import annotations

import csv
import datetime
import io
import itertools
import math
import random
from collections.abc import Callable, Iterator
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
# Columns of public traces -> (time, prompt tokens, answer tokens), the time's unit in seconds (None: a date).
# https://github.com/Azure/AzurePublicDataset, https://github.com/kvcache-ai/Mooncake, https://github.com/HPMLL/BurstGPT
_TRACES: tuple[tuple[tuple[str, str, str], float | None], ...] = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), None),
    (("timestamp", "input_length", "output_length"), 1e-3),
    (("Timestamp", "Request tokens", "Response tokens"), 1.0),
    (("offset_s", "input_tokens", "output_tokens"), 1.0),
)


class Wanted(msgspec.Struct, frozen=True):
    """How much of a data set, and how long. None: as the data say, or the shape's default.

    `chat`: prompts go into a chat template, so special tokens are not counted. `until_s`: where a trace ends.
    """

    n_requests: int = 100
    seed: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    chat: bool = True
    until_s: float | None = None


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
        requests.append(
            PlannedRequest(prompt, None, limit, offset_s=float(offset) if isinstance(offset, int | float) else None)
        )
    if not requests:
        raise UserError(f'cannot use "{path}": it is empty')
    if requests[0].offset_s is not None:
        return requests[: wanted.n_requests]
    return _repeated(requests, wanted.n_requests)


def replay(path: str, wanted: Wanted, writer: Callable[[], Callable[[int], str]]) -> list[PlannedRequest]:
    """Arrival times and lengths of a recorded trace, with texts of those lengths; times count from the first row."""
    write = writer()
    requests: list[PlannedRequest] = []
    first: float | None = None
    before = 0.0
    for number, row in itertools.islice(_trace_rows(path), wanted.n_requests):
        try:
            at, n_in, n_out = _trace_row(row)
        except (ValueError, TypeError, KeyError) as exc:
            names = "; ".join(", ".join(columns) for columns, _ in _TRACES)
            raise UserError(
                f'cannot use "{path}", line {number}: not a row of a trace', detail=str(exc), hint=f"Columns: {names}."
            ) from exc
        first = at if first is None else first
        if at - first < before:
            raise UserError(f'cannot use "{path}", line {number}: its time is before the row above it')
        before = at - first
        if wanted.until_s is not None and before >= wanted.until_s:
            break
        n_in, n_out = wanted.input_tokens or max(1, n_in), wanted.output_tokens or max(1, n_out)
        requests.append(PlannedRequest(write(n_in), n_in, n_out, offset_s=round(before, 6)))
    if not requests:
        raise UserError(f'cannot use "{path}": it is empty')
    return requests


def _trace_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.endswith(".csv"):
        return enumerate(csv.DictReader(io.StringIO(_text(path, "replay"))), 2)
    return _json_lines(path, "replay")


def _trace_row(row: dict[str, Any]) -> tuple[float, int, int]:
    """(seconds, prompt tokens, answer tokens)."""
    for (time, n_in, n_out), unit_s in _TRACES:
        if time in row:
            at = _date_s(row[time]) if unit_s is None else float(row[time]) * unit_s
            return at, int(row[n_in]), int(row[n_out])
    raise KeyError("no column of times")


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
