"""A run's folder: result.json, requests.csv (a row a request), itl.csv (a row a gap, ms), engine.csv."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.bench.results.engine_metrics import COLUMNS, Row
from penstock.bench.results.stats import Timed
from penstock.errors import UserError

REQUEST_COLUMNS = (
    *("index", "intended_s", "sent_s", "first_token_s", "end_s", "ttft_ms", "tpot_ms", "e2el_ms"),
    *("input_tokens", "output_tokens", "n_chunks", "status", "error", "replica"),
)

RESULT, REQUESTS, GAPS, ENGINE = "result.json", "requests.csv", "itl.csv", "engine.csv"
# What may differ between two runs that are still alike: where they write, what they are called, when they ran.
_IDLE = {"out", "json", "folder", "url", "seed", "load_average", "formulas", "verb", "metrics"}


class Request(msgspec.Struct, frozen=True):
    """One row of requests.csv. Times in seconds from the start of the run; None: it never came."""

    intended_s: float
    end_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    input_tokens: int | None
    output_tokens: int | None
    is_ok: bool


class Result(msgspec.Struct, frozen=True):
    """A run: `summary` is result.json, `gaps` are ITLs in ms, `engine` what pages of metrics said."""

    name: str
    summary: dict[str, Any]
    requests: tuple[Request, ...] = ()
    gaps: tuple[float, ...] = ()
    engine: tuple[Row, ...] = ()

    def number(self, name: str) -> float | None:
        return _finite(self.summary.get(name))

    @property
    def done(self) -> tuple[Request, ...]:
        return tuple(request for request in self.requests if request.is_ok)


def new_folder(home: Path, now: float) -> Path:
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = home / "bench"
    taken = [base / name, *(base / f"{name}-{number}" for number in range(2, 1000))]
    return next((path for path in taken if not path.exists()), taken[-1])


def prepare(folder: Path) -> None:
    """Make the folder before the run, which may take an hour.  Raises UserError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise UserError(f'cannot write results to "{folder}": {exc.strerror}', hint="--out DIR") from exc


def write(
    folder: Path, result: Mapping[str, Any], requests: Sequence[Timed], rows: Sequence[Row], is_open: bool
) -> None:
    """Write all files.  Raises UserError when the disk refuses."""
    try:
        _write_csv(folder / REQUESTS, REQUEST_COLUMNS, (request_row(request, is_open) for request in requests))
        _write_csv(folder / GAPS, ("index", "itl_ms"), _gap_rows(requests))
        columns = ("time_s", "source", "kind", *COLUMNS)
        _write_csv(folder / ENGINE, columns, ([r.time_s, r.source, r.kind, *map(r.values.get, COLUMNS)] for r in rows))
        (folder / RESULT).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", "utf-8")
    except OSError as exc:
        raise UserError(f'could not write results to "{folder}": {exc.strerror}', hint="--out DIR") from exc


def request_row(request: Timed, is_open: bool) -> list[Any]:
    times = request.token_times_s
    is_whole = request.error is None
    ttft_s, tpot_s = (request.ttft_s(is_open), request.tpot_s) if is_whole else (None, None)
    return [
        request.index,
        round(request.intended_s, 6),
        round(request.sent_s, 6),
        round(times[0], 6) if times else None,
        round(request.end_s, 6),
        None if ttft_s is None else round(ttft_s * 1000, 4),
        None if tpot_s is None else round(tpot_s * 1000, 4),
        round(request.e2el_s(is_open) * 1000, 4) if is_whole else None,
        request.input_tokens,
        request.output_tokens,
        len(times),
        request.status,
        request.error,
        request.replica,
    ]


def _gap_rows(requests: Sequence[Timed]) -> Iterable[tuple[int, str]]:
    for request in requests:
        if request.error is None:
            yield from [(request.index, f"{gap * 1000:.3f}") for gap in request.gaps_s()]


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def load(path: Path) -> Result:
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


def differences(a: Result, b: Result) -> list[str]:
    """What was not the same in two runs, as "flags.concurrency: 8, then 16": flags, versions, machine, model."""
    lines = []
    for block in ("flags", "versions", "machine", "model", "model_id", "dataset"):
        was, now = (dict(_flat(block, result.summary.get(block))) for result in (a, b))
        lines += [
            f"{key}: {_shown(was.get(key))}, then {_shown(now.get(key))}"
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key) and key.rpartition(".")[2] not in _IDLE
        ]
    return lines


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


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


def _engine(path: Path) -> Iterator[Row]:
    for row in _rows(path):
        numbers: dict[str, float | None] = {name: _finite(text) for name, text in row.items()}
        time_s = numbers.pop("time_s", None)
        if time_s is not None:
            yield Row(time_s, row.get("source") or "", row.get("kind") or "", numbers)


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
