"""A run's folder: result.json, requests.csv, itl.csv, engine.csv. Written whole; a reader needs no penstock.

`requests.csv` has one row a request in the order of sending; `itl.csv` has one row for every gap between two token
events: the request's index, milliseconds. Times are seconds from the start of the run.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.scrape import COLUMNS, Row
from penstock.bench.stats import Timed
from penstock.errors import UserError

REQUEST_COLUMNS = (
    *("index", "intended_s", "sent_s", "first_token_s", "end_s", "ttft_ms", "tpot_ms", "e2el_ms"),
    *("input_tokens", "output_tokens", "n_chunks", "status", "error", "replica"),
)


def new_folder(home: Path, now: float) -> Path:
    """A name for a run of its own under `home`/bench; not made yet."""
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = home / "bench"
    taken = [base / name, *(base / f"{name}-{number}" for number in range(2, 1000))]
    return next((path for path in taken if not path.exists()), taken[-1])


def prepare(folder: Path) -> None:
    """Makes the folder before the run: nobody wants to learn after an hour that it cannot be written.

    Raises UserError.
    """
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
    """Writes all files. Raises UserError when the disk will not have them."""
    try:
        _write_csv(folder / "requests.csv", REQUEST_COLUMNS, (request_row(request, is_open) for request in requests))
        _write_csv(folder / "itl.csv", ("index", "itl_ms"), _gap_rows(requests))
        columns = ("time_s", "source", "kind", *COLUMNS)
        _write_csv(folder / "engine.csv", columns, ([r.time_s, r.source, r.kind, *_cells(r)] for r in rows))
        (folder / "result.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", "utf-8")
    except OSError as exc:
        raise UserError(f'could not write results to "{folder}": {exc.strerror}', hint="--out DIR") from exc


def request_row(request: Timed, is_open: bool) -> list[Any]:
    """One row of requests.csv, by REQUEST_COLUMNS; None becomes an empty cell."""
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


def _cells(row: Row) -> list[float | None]:
    return [row.values[word] for word in COLUMNS]


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
