"""Every metric that a deployment shows, from the tables of the gateway and of the engines. Pure.

An engine's series have OWN_LABELS in addition where the gateway passes them on (`/metrics/engines`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from penstock import engines
from penstock.wire.metric_names import METRICS, PREFIX, Kind

GATEWAY = "penstock"
OWN_LABELS = ("replica", "node", "deployment")
_PARTS = ("_bucket", "_sum", "_count")


class Row(NamedTuple):
    """A family by its name on the page. `since`: the engine's first version with it, None for older ones."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    about: str
    source: str  # GATEWAY or an engine
    since: str | None = None


class Rename(NamedTuple):
    """A name of older versions of an engine, and the one that `/metrics/engines` shows for it."""

    old: str
    name: str
    source: str


def rows() -> list[Row]:
    """The gateway's families, then each engine's."""
    own = [
        Row(PREFIX + name, metric.kind, metric.labels, metric.unit, metric.about, GATEWAY)
        for name, metric in METRICS.items()
    ]
    return own + [
        Row(name, family.kind, (*OWN_LABELS, *family.labels), "", family.about, engine.name, family.since)
        for engine in _engines()
        for name, family in engine.families.items()
    ]


def renames() -> list[Rename]:
    return [Rename(old, name, engine.name) for engine in _engines() for old, name in engine.renamed.items()]


def prefixes() -> tuple[str, ...]:
    """How names of engines' families begin."""
    return tuple(engine.prefix for engine in _engines())


@functools.cache
def samples() -> dict[str, Row]:
    """The row of each name that a query can ask for: of a histogram its _bucket, _sum and _count."""
    return {row.name + part: row for row in rows() for part in (_PARTS if row.kind == "histogram" else ("",))}


def _engines() -> list[engines.Engine]:
    return [engines.load(name) for name in engines.TABLE if name != "fake"]  # which has vLLM's names
