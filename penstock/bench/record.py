"""The folder of a finished load test, read: result.json, and request by request, gap by gap, second by second.

Only result.json must be there; rows that are absent or damaged are left out, never made up.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import UserError

RESULT, REQUESTS, GAPS, ENGINE = "result.json", "requests.csv", "itl.csv", "engine.csv"
# What may differ between two runs that are still alike: where they write, what they are called, when they ran.
_IDLE = {"out", "json", "folder", "url", "seed", "load_average", "formulas", "verb", "metrics"}


class Request(msgspec.Struct, frozen=True):
    """One row of requests.csv. Times in seconds from the start of the run; None: it did not come so far."""

    intended_s: float
    end_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    input_tokens: int | None
    output_tokens: int | None
    is_ok: bool


class EngineRow(msgspec.Struct, frozen=True):
    """What one page of metrics said at one time; `values` by column, those that it has."""

    time_s: float
    source: str
    values: dict[str, float]


class Result(msgspec.Struct, frozen=True):
    """A run: `summary` is result.json as it stands, `gaps` are ITLs in ms."""

    name: str
    summary: dict[str, Any]
    requests: tuple[Request, ...] = ()
    gaps: tuple[float, ...] = ()
    engine: tuple[EngineRow, ...] = ()

    def number(self, name: str) -> float | None:
        """A finite number of result.json, or None."""
        return _finite(self.summary.get(name))

    @property
    def done(self) -> tuple[Request, ...]:
        """The requests that were answered whole."""
        return tuple(request for request in self.requests if request.is_ok)


def load(path: Path) -> Result:
    """The run in a folder, or beside a result.json.  Raises UserError when there is none."""
    folder = path.parent if path.name.endswith(".json") else path
    file = path if path.name.endswith(".json") else folder / RESULT
    try:
        summary = msgspec.json.decode(file.read_bytes())
    except OSError as exc:
        why = (exc.strerror or str(exc)).lower()
        raise UserError(
            f'cannot read result "{file}": {why}', hint="Give a folder that `penstock bench serve --out` wrote."
        ) from exc
    except msgspec.DecodeError as exc:
        raise UserError(f'cannot read result "{file}": not JSON', detail=str(exc)) from exc
    if not isinstance(summary, dict):
        raise UserError(f'cannot read result "{file}": not an object')
    return Result(
        name=folder.resolve().name,
        summary=summary,
        requests=tuple(_requests(folder / REQUESTS)),
        gaps=tuple(_gaps(folder / GAPS)),
        engine=tuple(_engine(folder / ENGINE)),
    )


def differences(one: Result, other: Result) -> list[str]:
    """What was not the same in two runs, as "flags.concurrency: 8, then 16": flags, versions, machine, model."""
    found = []
    for block in ("flags", "versions", "machine", "model", "model_id", "dataset"):
        was, now = (dict(_flat(block, result.summary.get(block))) for result in (one, other))
        found += [
            f"{key}: {_said(was.get(key))}, then {_said(now.get(key))}"
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key) and key.rpartition(".")[2] not in _IDLE
        ]
    return found


def _said(value: object) -> str:
    return "not said" if value is None else str(value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif value is not None:
        yield name, value


def _requests(path: Path) -> Iterator[Request]:
    rows = list(_rows(path))
    begun = min((at for row in rows if (at := _finite(row.get("intended_s"))) is not None), default=0.0)
    for row in rows:
        intended, end = _finite(row.get("intended_s")), _finite(row.get("end_s"))
        if intended is None:
            continue
        is_ok = not row.get("error") and str(row.get("status") or "200").lower() in ("200", "ok", "complete")
        yield Request(
            intended - begun,
            None if end is None else end - begun,
            ttft_ms=_finite(row.get("ttft_ms")),
            tpot_ms=_finite(row.get("tpot_ms")),
            e2el_ms=_finite(row.get("e2el_ms")),
            input_tokens=_tokens(row.get("input_tokens")),
            output_tokens=_tokens(row.get("output_tokens")),
            is_ok=is_ok,
        )


def _gaps(path: Path) -> Iterator[float]:
    """Gaps in ms, one a line behind its request's index; lines that are damaged are left out."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines[1:]:
        value = _finite(line.rpartition(",")[2])
        if value is not None:
            yield value


def _engine(path: Path) -> Iterator[EngineRow]:
    for row in _rows(path):
        numbers = {name: value for name, text in row.items() if (value := _finite(text)) is not None}
        time_s = numbers.pop("time_s", None)
        if time_s is not None:
            yield EngineRow(time_s, row.get("source") or "", numbers)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            yield from csv.DictReader(stream)
    except (OSError, UnicodeDecodeError, csv.Error):
        return


def _tokens(text: str | None) -> int | None:
    count = _finite(text)
    return None if count is None else int(count)


def _finite(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
