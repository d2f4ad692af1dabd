"""Asks a Prometheus: https://prometheus.io/docs/prometheus/latest/querying/api/"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlencode

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

_TIMEOUT_S = 60.0
_REFUSED = (400, 422)  # a query that cannot be read; one that cannot be evaluated


class Series(msgspec.Struct, frozen=True):
    """One series of an answer: (Unix seconds, value), oldest first. A scalar has no labels."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


class Alert(msgspec.Struct, frozen=True, rename={"since": "activeAt"}):
    """An alert that is pending or firing. `since`: RFC 3339."""

    labels: dict[str, str]
    annotations: dict[str, str]
    state: str
    since: str = ""
    value: str = ""


class Span(msgspec.Struct, frozen=True):
    """From `start` to `end` (Unix seconds), a value each `step_s`."""

    start: float
    end: float
    step_s: float


def ask(url: str, query: str, span: Span | None = None) -> list[Series]:
    """The answer to a query, now or over a span.  Raises UserError with Prometheus's words and position."""
    words: dict[str, Any] = {"query": query}
    if span is not None:
        words |= {"start": span.start, "end": span.end, "step": span.step_s}
    return series_of(_get(url, f"/api/v1/{'query' if span is None else 'query_range'}?{urlencode(words)}", query))


def alerts(url: str) -> list[Alert]:
    """Pending and firing, firing ones first."""
    data = _get(url, "/api/v1/alerts", "alerts")
    found = [msgspec.convert(row, Alert) for row in data["alerts"]]
    return sorted(found, key=lambda alert: (alert.state != "firing", alert.since))


def series_of(data: dict[str, Any]) -> list[Series]:
    """The series in the field "data" of an answer: a vector, a matrix or a scalar."""
    kind, result = data["resultType"], data["result"]
    if kind in ("scalar", "string"):
        return [Series({}, _points([result]))]
    return [Series(row["metric"], _points(row["values"] if kind == "matrix" else [row["value"]])) for row in result]


def _points(pairs: list[tuple[float, str]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(at), _number(text)) for at, text in pairs)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # a string
        return math.nan


def _get(url: str, path: str, query: str) -> dict[str, Any]:
    try:
        answer = Client(url, timeout_s=_TIMEOUT_S).get_json(path)
    except HttpError as exc:
        if exc.status not in _REFUSED:
            raise
        words = exc.message.partition(f"answered {exc.status}: ")[2].removeprefix('invalid parameter "query": ')
        raise UserError(f"cannot evaluate {query!r}: {words}", hint="Numbers in front are line:column.") from exc
    if not isinstance(answer, dict) or answer.get("status") != "success":
        raise PenstockError(f"cannot read the answer of {url}: it is not Prometheus's")
    data: dict[str, Any] = answer["data"]
    return data
