"""Which metrics a PromQL expression names, so that a rule or a panel over a name that nobody writes is an error. Pure.

Grammar: https://prometheus.io/docs/prometheus/latest/querying/basics/
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from penstock.observe.names import samples

# Prometheus writes these itself: https://prometheus.io/docs/concepts/jobs_instances/
SYNTHETIC = frozenset({"up", "scrape_duration_seconds", "scrape_samples_scraped", "ALERTS", "ALERTS_FOR_STATE"})
# https://github.com/NVIDIA/dcgm-exporter/blob/main/etc/default-counters.csv
DCGM = frozenset(
    f"DCGM_FI_DEV_{name}"
    for name in (
        *("SM_CLOCK", "MEM_CLOCK", "MEMORY_TEMP", "GPU_TEMP", "POWER_USAGE", "TOTAL_ENERGY_CONSUMPTION"),
        *("PCIE_REPLAY_COUNTER", "GPU_UTIL", "MEM_COPY_UTIL", "XID_ERRORS", "FB_FREE", "FB_USED"),
        "NVLINK_BANDWIDTH_TOTAL",
    )
)

# Words that stand where a metric could, and that no function's bracket follows.
_KEYWORDS = frozenset(
    (
        *("and", "or", "unless", "atan2", "bool", "offset", "inf", "nan", "start", "end"),
        *("by", "without", "on", "ignoring", "group_left", "group_right"),
        *("sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values", "bottomk", "topk"),
        *("quantile", "limitk", "limit_ratio"),
    )
)
_STRING = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)""")
_NAMED = re.compile(r"""__name__\s*=\s*("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')""")
_BRACES = re.compile(r"\{[^{}]*\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_LABELS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)", re.IGNORECASE)
# Numbers and durations, which hold letters (1e3, 5m), and variables of Grafana ($model, ${model:regex}).
_NUMBER = re.compile(r"(?<![\w:.])(?:0x[0-9a-f]+|[0-9][0-9.]*(?:e[+-]?[0-9]+)?[a-z0-9]*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:\{[^}]*\}|\w+)")
_WORD = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\()?")


def names_in(expr: str) -> set[str]:
    """The metric names of an expression, also of one with Grafana's variables.

    'sum by (model) (rate(penstock_requests_total{outcome="ok"}[5m]))' gives {"penstock_requests_total"}.
    """
    names = {match[1][1:-1] for match in _NAMED.finditer(expr)}
    bare = _VARIABLE.sub(" ", _STRING.sub('""', expr))
    for pattern in (_BRACES, _RANGE, _LABELS, _NUMBER):
        bare = pattern.sub(" ", bare)
    words = [match[1] for match in _WORD.finditer(bare) if match[2] is None]
    return names | {word for word in words if word.lower() not in _KEYWORDS}


def unknown_names(expr: str, recorded: frozenset[str] = frozenset()) -> set[str]:
    """Names of an expression that neither we, an engine, DCGM nor Prometheus writes, nor a recording rule."""
    return {name for name in names_in(expr) if not (name in recorded or is_known(name))}


def is_known(name: str) -> bool:
    return name in SYNTHETIC or name in DCGM or name in samples()


def with_matchers(expr: str, matchers: Callable[[str], list[str]]) -> str:
    """`expr` with further label matchers on each series; `matchers` gives those of a name, as `replica=~"$replica"`.

    The names may not be words of the expression's labels or strings too.
    """
    for name in names_in(expr):
        added = ", ".join(matchers(name))
        if added:
            named = re.compile(rf"(?<![\w:]){name}(?![\w:])(?:\{{(\s*\}})?)?")
            expr = named.sub(partial(_with, name, added), expr)
    return expr


def _with(name: str, added: str, match: re.Match[str]) -> str:
    has_others = match[0].endswith("{")
    return f"{name}{{{added}{', ' if has_others else '}'}"
