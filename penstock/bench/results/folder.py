"""A run's folder: result.json, requests.csv (a row a request), itl.csv (a row a gap, ms), engine.csv."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.bench.results.engine_metrics import COLUMNS, Row
from penstock.bench.results.stats import Timed, gaps_s
from penstock.errors import UserError

REQUEST_COLUMNS = (
    *("index", "intended_s", "sent_s", "first_token_s", "end_s", "ttft_ms", "tpot_ms", "e2el_ms"),
    *("input_tokens", "output_tokens", "n_chunks", "status", "error", "replica"),
)

RESULT, REQUESTS, GAPS, ENGINE = "result.json", "requests.csv", "itl.csv", "engine.csv"
# While a run lasts: its reads, and what it is. A run that was killed leaves both, and no result.
RAW, RUN = "reads.msgpack", "run.json"
_MOST_GAPS = 500_000  # that are read back, for a chart
# What may differ between two runs that are still alike: where they write, what they are called, when they ran.
_IDLE = {"out", "json", "folder", "url", "seed", "load_average", "formulas", "verb", "verb_name", "metrics"}
_IDLE |= {"save_result", "percentiles", "goodput"}  # what is written and judged, not what is asked
_Run = TypeVar("_Run", bound=msgspec.Struct)


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
    def invalid_because(self) -> str | None:
        """Why the run is not valid; None where it is."""
        reasons = self.summary.get("invalid_because")
        if self.summary.get("valid") is not False:
            return None
        return "; ".join(map(str, reasons)) if isinstance(reasons, list) and reasons else "no reason given"

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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise UserError(f'cannot write results to "{folder}": {exc.strerror}', hint="--out DIR") from exc


def begin(folder: Path, run: msgspec.Struct) -> None:
    """Keep what the run is, for when it is killed.  Raises UserError."""
    with writable(folder):
        (folder / RUN).write_bytes(msgspec.json.encode(run))


def is_unfinished(folder: Path) -> bool:
    """Whether a run was killed before it had a result, and left its reads."""
    return (folder / RAW).exists() and (folder / RUN).exists() and not (folder / RESULT).exists()


def begun(folder: Path, kind: type[_Run]) -> _Run:
    """What an unfinished run is.  Raises UserError."""
    try:
        return msgspec.json.decode((folder / RUN).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as exc:
        raise UserError(f'cannot read the run "{folder}"', detail=str(exc)) from exc


@contextlib.contextmanager
def request_writer(folder: Path, is_open: bool) -> Iterator[Callable[[Timed, Sequence[float]], None]]:
    """Writes requests.csv and itl.csv, a request and its token times at a time.  Raises UserError."""
    with (
        writable(folder),
        (folder / REQUESTS).open("w", encoding="utf-8", newline="") as requests,
        (folder / GAPS).open("w", encoding="utf-8") as gaps,
    ):
        rows = csv.writer(requests, lineterminator="\n")
        rows.writerow(REQUEST_COLUMNS)
        gaps.write("index,itl_ms\n")

        def add(request: Timed, times: Sequence[float]) -> None:
            rows.writerow(request_row(request, is_open))
            if request.error is None:
                gaps.writelines([f"{request.index},{gap * 1000:.3f}\n" for gap in gaps_s(times)])

        yield add


def write(folder: Path, result: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write engine.csv and, when all else is there, result.json; the raw reads go.  Raises UserError."""
    with writable(folder):
        with (folder / ENGINE).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("time_s", "source", "kind", *COLUMNS))
            writer.writerows([row.time_s, row.source, row.kind, *map(row.values.get, COLUMNS)] for row in rows)
        (folder / RESULT).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", "utf-8")
        for name in (RAW, RUN):
            (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """What the disk refuses is a UserError."""
    try:
        yield
    except OSError as exc:
        raise UserError(f'could not write results to "{folder}": {exc.strerror}', hint="--out DIR") from exc


def request_row(request: Timed, is_open: bool) -> list[Any]:
    first_s = request.first_token_s
    is_whole = request.error is None
    ttft_s, tpot_s = (request.ttft_s(is_open), request.tpot_s) if is_whole else (None, None)
    return [
        request.index,
        round(request.intended_s, 6),
        round(request.sent_s, 6),
        None if first_s is None else round(first_s, 6),
        round(request.end_s, 6),
        None if ttft_s is None else round(ttft_s * 1000, 4),
        None if tpot_s is None else round(tpot_s * 1000, 4),
        round(request.e2el_s(is_open) * 1000, 4) if is_whole else None,
        request.input_tokens,
        request.output_tokens,
        request.n_events,
        request.status,
        request.error,
        request.replica,
    ]


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
    begun = min((at for row in rows(path) if (at := _finite(row.get("intended_s"))) is not None), default=0.0)
    for row in rows(path):
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


def _gaps(path: Path) -> list[float]:
    """Gaps in ms; damaged lines are left out, and every second one each time that there are too many."""
    gaps: list[float] = []
    step = 1
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number % step == 0 and (value := _finite(line.rpartition(",")[2])) is not None:
                    gaps.append(value)
                if len(gaps) > _MOST_GAPS:
                    gaps, step = gaps[::2], step * 2
    except (OSError, UnicodeDecodeError):
        return []
    return gaps


def _engine(path: Path) -> Iterator[Row]:
    for row in rows(path):
        numbers: dict[str, float | None] = {name: _finite(text) for name, text in row.items()}
        time_s = numbers.pop("time_s", None)
        if time_s is not None:
            yield Row(time_s, row.get("source") or "", row.get("kind") or "", numbers)


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file; none of one that cannot be read."""
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
