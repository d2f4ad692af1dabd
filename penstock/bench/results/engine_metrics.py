"""The /metrics pages of engines and gateways during a run, as rows. Pure.

Values are summed over labels, so over the engines of one page; `kv_use` of several is a sum too.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from penstock.bench.results.stats import Timed
from penstock.engines.vllm import names as vllm_names
from penstock.wire import prometheus

COLUMNS = (
    *("running", "waiting", "kv_use", "prefix_queries", "prefix_hits"),
    *("prompt_tokens", "generation_tokens", "preemptions", "energy_joules", "gpus"),
)
_COUNTERS = frozenset(
    ("prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "preemptions", "energy_joules")
)
_LLAMACPP = {
    "running": "llamacpp:requests_processing",
    "waiting": "llamacpp:requests_deferred",
    "kv_use": "llamacpp:kv_cache_usage_ratio",
    "prompt_tokens": "llamacpp:prompt_tokens_total",
    "generation_tokens": "llamacpp:tokens_predicted_total",
}
_GATEWAY = {"running": "penstock_requests_in_flight", "waiting": "penstock_requests_waiting"}
# Kind of page -> our word -> its name.
PAGES: Mapping[str, Mapping[str, str]] = {"vllm": vllm_names.SERIES, "llamacpp": _LLAMACPP, "gateway": _GATEWAY}
# A GPU that two replicas share has two series.
_GPU_ENERGY = re.compile(r'^penstock_gpu_energy_joules_total\{.*?uuid="((?:[^"\\]|\\.)*)".*\} (\S+)$', re.MULTILINE)
_GPU_MEMORY = re.compile(r'^penstock_gpu_memory_total_bytes\{.*?uuid="((?:[^"\\]|\\.)*)"', re.MULTILINE)
# A reading of a GPU reaches the gateway's page up to two seconds later.
_LATE_S = 3.0
_LEAST_S = 5.0


class Row(msgspec.Struct, frozen=True):
    """One page at one time, seconds from the start of the run."""

    time_s: float
    source: str
    kind: str
    values: dict[str, float | None]


def read_page(text: str, time_s: float, source: str) -> Row | None:
    """The row of one page; None for an unknown kind."""
    samples = prometheus.parse(text)
    for kind, names in PAGES.items():
        if any(name in samples for name in names.values()):
            values = {word: samples.get(names.get(word, "")) for word in COLUMNS}
            return Row(time_s, source, kind, values | (_energy(text) if kind == "gateway" else {}))
    return None


def _energy(text: str) -> dict[str, float | None]:
    """Of all GPUs of the page, where each of them reports its own."""
    joules = {uuid: float(value) for uuid, value in _GPU_ENERGY.findall(text)}
    if not joules or not joules.keys() >= set(_GPU_MEMORY.findall(text)):
        return {}
    return {"energy_joules": sum(joules.values()), "gpus": float(len(joules))}


def power_watts(rows: Sequence[Row]) -> float | None:
    """The mean power of all GPUs behind a gateway, from the rows of its page that were read under load.

    None where that is less than some seconds, a GPU reports no energy, or one came or went.
    """
    pages = [row for row in rows if row.time_s >= _LATE_S and row.values["energy_joules"] is not None]
    of_one = sorted((row for row in pages if row.source == pages[0].source), key=lambda row: row.time_s)
    joules = [row.values["energy_joules"] or 0.0 for row in of_one]
    if len({row.values["gpus"] for row in of_one}) != 1 or joules != sorted(joules):
        return None
    times = [row.time_s for row in of_one]
    # All rows, since each alone may be a second older than the next.
    return statistics.linear_regression(times, joules).slope if times[-1] - times[0] >= _LEAST_S else None


def hit_rate(summary: Mapping[str, Mapping[str, float | str | None]], requests: Sequence[Timed] = ()) -> float | None:
    """The share of prompt tokens that came from prefix caches, over all pages; without such counters, by the usage of
    the answers. None where nothing says it."""
    counts = [(facts.get("prefix_queries"), facts.get("prefix_hits")) for facts in summary.values()]
    known = [(queries, hits) for queries, hits in counts if isinstance(queries, float) and isinstance(hits, float)]
    if not known:
        answers = [(request.input_tokens, request.cached_tokens) for request in requests if request.error is None]
        known = [(float(n), float(hits)) for n, hits in answers if n is not None and hits is not None]
    n_queries = sum(queries for queries, _ in known)
    return sum(hits for _, hits in known) / n_queries if n_queries > 0 else None


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, float | str | None]]:
    """By source: mean and max of gauges, growth of counters, and the prefix hit rate over the interval."""
    out: dict[str, dict[str, float | str | None]] = {}
    for source in dict.fromkeys(row.source for row in rows):
        of_source = sorted((row for row in rows if row.source == source), key=lambda row: row.time_s)
        facts: dict[str, float | str | None] = {"kind": of_source[0].kind, "n_scrapes": len(of_source)}
        for word in COLUMNS:
            values = [value for row in of_source if (value := row.values[word]) is not None]
            if not values:
                continue
            if word in _COUNTERS:
                facts[word] = values[-1] - values[0]
            else:
                facts[f"{word}_mean"], facts[f"{word}_max"] = sum(values) / len(values), max(values)
        queries, hits = facts.get("prefix_queries"), facts.get("prefix_hits")
        if isinstance(queries, float) and isinstance(hits, float) and queries > 0:
            facts["prefix_hit_rate"] = hits / queries
        out[source] = facts
    return out
