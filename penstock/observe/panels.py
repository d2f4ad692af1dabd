"""What a dashboard is made of: boards of panels with queries, and the forms of their PromQL. Pure.

A query names whole families; `select` adds the matchers of a board's variables to each. `x / (y > 0)` has no value
where nothing happened, in place of NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from penstock.observe.names import samples
from penstock.observe.promql import unknown_names, with_matchers
from penstock.wire import metric_names

# "stack" is a graph whose series add up.
Kind = Literal["stat", "graph", "stack", "table"]
Unit = Literal[
    "", "share", "s", "requests/s", "requests/min", "tokens/s", "tokens", "bytes", "bytes/s", "W", "°C", "Hz", "USD",
    "USD/h", "J", "h", "1/s", "up",
]  # fmt: skip
Colour = Literal["green", "orange", "red", "blue"]
# (None, colour) holds below the first value.
Thresholds = tuple[tuple[float | None, Colour], ...]


class Query(NamedTuple):
    """`legend` in Grafana's words, where {{replica}} is a label; `unit` of a table's column where it has another."""

    expr: str
    legend: str = ""
    unit: Unit = ""


class Panel(NamedTuple):
    """`about` says what it shows and when to worry. `width` in 24ths of the board."""

    title: str
    about: str
    unit: Unit
    kind: Kind
    queries: tuple[Query, ...]
    thresholds: Thresholds = ()
    width: int = 8


class Board(NamedTuple):
    """`name` is its file and the end of its uid. `rows`: title and panels."""

    name: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    def panels(self) -> Iterator[Panel]:
        for _, panels in self.rows:
            yield from panels


# A board's range for rates, and its whole time range: Grafana's words.
RATE = "$__rate_interval"
RANGE = "$__range"

_QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def high(warn: float, bad: float) -> Thresholds:
    return ((None, "green"), (warn, "orange"), (bad, "red"))


def low(bad: float, warn: float) -> Thresholds:
    return ((None, "red"), (bad, "orange"), (warn, "green"))


PLAIN: Thresholds = ((None, "blue"),)


def once(name: str) -> str:
    """A gauge that every gateway writes, once."""
    return f"max by ({', '.join(('deployment', *metric_names.metric(name).labels))}) ({name})"


def rate(series: str, by: str = "") -> str:
    name = series.partition("{")[0]
    is_each = name.startswith(metric_names.PREFIX) and metric_names.metric(name).joined == "each"
    return rate_once(name, by) if is_each else f"sum{f' by ({by})' if by else ''} (rate({series}[{RATE}]))"


def rate_once(name: str, by: str = "") -> str:
    """Of a counter that every gateway has whole."""
    labels = ", ".join(("deployment", *metric_names.metric(name).labels))
    return f"sum{f' by ({by})' if by else ''} (max by ({labels}) (rate({name}[{RATE}])))"


def quantile(share: float, name: str, by: str = "") -> str:
    return f"histogram_quantile({share}, sum by (le{f', {by}' if by else ''}) (rate({name}_bucket[{RATE}])))"


def mean(name: str, by: str = "") -> str:
    return f"{rate(f'{name}_sum', by)} / ({rate(f'{name}_count', by)} > 0)"


def quantiles(name: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, name), word) for share, word in _QUANTILES)


def attained(promise: str, name: str) -> str:
    """The share of requests within the target, which is a bucket's bound; "2" and "2.0" are both in use for one."""
    target = f'count_values by (deployment) ("le", penstock_slo_target_seconds{{metric="{promise}"}})'
    buckets = f"sum by (deployment, le) (rate({name}_bucket[{RATE}]))"
    sides = (f'label_replace({side}, "le", "$1.0", "le", "([0-9]+)")' for side in (buckets, target))
    return f"sum({' and on (deployment, le) '.join(sides)}) / ({rate(f'{name}_count')} > 0)"


def select(expr: str, matchers: dict[str, str]) -> str:
    """`expr` with the matchers of those labels that each family of ours or of an engine has.

    `matchers`: by label, as {"replica": 'replica=~"$replica"'}. The series of a DCGM exporter and Prometheus's own know
    neither models nor replicas. Raises ValueError for a name that is in no table.
    """
    if unknown := unknown_names(expr):
        raise ValueError(f"no metric has the name {', '.join(sorted(unknown))}: {expr}")
    return with_matchers(expr, lambda name: [text for label, text in matchers.items() if label in _labels(name)])


def _labels(name: str) -> tuple[str, ...]:
    row = samples().get(name)
    if row is not None:
        return ("deployment", *row.labels)
    return ("deployment",) if name in ("up", "ALERTS") else ()
