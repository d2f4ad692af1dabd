"""GPU time of ready replicas, what it costs, and whose tokens it went into. Pure: the caller gives the times.

Worker 0 counts the time, once a second; the others would count the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from penstock.gateway.accounting.usage_store import GpuUse
from penstock.gateway.metrics.counters import Family
from penstock.gateway.routing.replicas import Replica
from penstock.wire.announcement import SERVING, GatewayView
from penstock.wire.live import Cost, KeyUse

# A process that was stopped for longer than this knows nothing of that time.
STEP_S_MAX = 10.0
# The store keeps sums of so many seconds: small enough that a restart loses little, large enough that a year is small.
SLOT_S = 300
SLOTS_MAX = 1024  # while the store is away: three days of one model
KEYS_MAX = 50


class GpuSeconds(NamedTuple):
    """GPU seconds of ready replicas, and those among them in which a request ran."""

    ready: float = 0.0
    busy: float = 0.0


class GpuTime:
    """Counts GPU seconds by model; `slots`: those that the store does not have yet, by Unix time and model."""

    def __init__(self, gpus_per_replica: int, gpu_hour_usd: float | None) -> None:
        self.gpu_hour_usd = gpu_hour_usd
        self.slots: dict[tuple[int, str], GpuSeconds] = {}
        self._n_gpus = gpus_per_replica
        self._totals: defaultdict[str, GpuSeconds] = defaultdict(GpuSeconds)
        self._last: float | None = None

    def count(self, replicas: Iterable[Replica], now: float, wall_s: float) -> None:
        """Adds the time since the last call. `now` is monotonic, `wall_s` Unix time."""
        step_s = 0.0 if self._last is None else min(now - self._last, STEP_S_MAX)
        self._last = now
        if not self._n_gpus or step_s <= 0:
            return
        slot = int(wall_s) // SLOT_S * SLOT_S
        for row in replicas:
            if row.announcement.state in SERVING and row.is_alive(now):  # asleep it holds its GPUs
                model, gpu_s = row.announcement.model, step_s * self._n_gpus
                n_running = 0 if (load := row.announcement.load) is None else load.running
                busy_s = gpu_s if max(row.in_flight, row.load_of_other_workers, n_running) > 0 else 0.0
                self._totals[model] = _plus(self._totals[model], gpu_s, busy_s)
                self.slots[slot, model] = _plus(self.slots.get((slot, model), GpuSeconds()), gpu_s, busy_s)
        while len(self.slots) > SLOTS_MAX:
            del self.slots[next(iter(self.slots))]

    def forget(self, written: Mapping[tuple[int, str], GpuSeconds]) -> None:
        """Drops slots that the store has, but the newest, which still grows."""
        for key in [key for key, seconds in written.items() if self.slots.get(key) == seconds]:
            if key[0] < max(at for at, _ in self.slots):
                del self.slots[key]

    def families(self) -> list[Family]:
        if not self._n_gpus:
            return []
        families: list[Family] = [
            ("gpu_seconds_total", {(("model", name),): round(t.ready, 3) for name, t in self._totals.items()}),
            ("gpu_busy_seconds_total", {(("model", name),): round(t.busy, 3) for name, t in self._totals.items()}),
        ]
        if self.gpu_hour_usd is not None:
            families.append(("gpu_hour_usd", {(): self.gpu_hour_usd}))
        return families


def _plus(seconds: GpuSeconds, ready: float, busy: float) -> GpuSeconds:
    return GpuSeconds(seconds.ready + ready, seconds.busy + busy)


class Spending(NamedTuple):
    """Growing sums at the time `at`: GPU seconds, tokens of prompts and answers, and the same tokens as engines count
    them, those of answers alone, and the energy of the engines' GPUs."""

    at: float
    gpu_s: float
    busy_s: float
    tokens: float
    engine_tokens: float
    output_tokens: float
    joules: float


class SpendingMeter:
    """Adds up what replicas count, which begin again at 0 with each start, and drivers with each load."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, ...], float] = {}
        self._prompt_tokens = self._output_tokens = self._joules = 0.0

    def read(self, families: Iterable[Family], view: GatewayView, now: float) -> Spending:
        """To be called with all counters, of all workers, as often as a row is wanted."""
        before, self._before = self._before, {}
        for row in view.replicas:
            name, load = row.announcement.replica, row.announcement.load
            if load is not None:
                self._prompt_tokens += self._growth(before, ("prompt", name), load.prompt_tokens)
                self._output_tokens += self._growth(before, ("output", name), load.output_tokens)
        gpus = [gpu for row in view.replicas for machine in row.announcement.machines for gpu in machine.gpus]
        for uuid, joules in {gpu.uuid: gpu.energy_joules for gpu in gpus}.items():  # two replicas may share one
            if joules is not None:
                self._joules += self._growth(before, ("gpu", uuid), joules)
        counts = dict(families)
        tokens = sum(n for labels, n in counts.get("tokens_total", {}).items() if dict(labels)["kind"] != "cached")
        ready, busy = (sum(counts.get(name, {}).values()) for name in ("gpu_seconds_total", "gpu_busy_seconds_total"))
        engine_tokens = self._prompt_tokens + self._output_tokens
        return Spending(now, ready, busy, tokens, engine_tokens, self._output_tokens, self._joules)

    def _growth(self, before: Mapping[tuple[str, ...], float], key: tuple[str, ...], value: float) -> float:
        if not math.isfinite(value):
            return 0.0
        self._before[key] = value
        return max(0.0, value - before.get(key, value))


def cost_between(older: Spending, newer: Spending, gpu_hour_usd: float | None) -> Cost:
    """What the time between cost. Tokens are the ledger's, without a store the engines'.

    2 GPUs for an hour at $3 with 6 million tokens: $6 an hour, $1 per million tokens.
    """
    gpu_s, seconds = newer.gpu_s - older.gpu_s, newer.at - older.at
    if seconds <= 0:
        return Cost()
    engine_tokens = newer.engine_tokens - older.engine_tokens
    tokens = newer.tokens - older.tokens or engine_tokens
    output_tokens, joules = newer.output_tokens - older.output_tokens, newer.joules - older.joules
    usd = None if gpu_hour_usd is None or gpu_s <= 0 else gpu_s / 3600 * gpu_hour_usd
    return Cost(
        usd_per_hour=None if usd is None else round(usd / seconds * 3600, 4),
        usd_per_million_tokens=None if usd is None or tokens <= 0 else round(usd / tokens * 1e6, 4),
        idle_share=None if gpu_s <= 0 else round(min(1.0, max(0.0, 1 - (newer.busy_s - older.busy_s) / gpu_s)), 4),
        joules_per_token=None if joules <= 0 or output_tokens <= 0 else round(joules / output_tokens, 4),
    )


def key_uses(families: Iterable[Family], gpu_hour_usd: float | None) -> tuple[KeyUse, ...]:
    """Use by key and model since the gateway started, those with the most tokens first. The cost is the key's part of
    the GPUs' by its tokens, where the price of a GPU is known."""
    counts = dict(families)
    tokens: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    of_model: defaultdict[str, float] = defaultdict(float)
    for labels, n in counts.get("key_tokens_total", {}).items():
        facts = dict(labels)
        tokens[facts["key"], facts["model"]][facts["kind"]] = n
        of_model[facts["model"]] += n if facts["kind"] != "cached" else 0.0
    requests = counts.get("key_requests_total", {})
    n_requests = {(dict(labels)["key"], dict(labels)["model"]): n for labels, n in requests.items()}
    gpu_s = {dict(labels)["model"]: n for labels, n in counts.get("gpu_seconds_total", {}).items()}
    uses = []
    for (key, model), kinds in tokens.items():
        prompt, output = kinds.get("prompt", 0.0), kinds.get("output", 0.0)
        usd = None
        if gpu_hour_usd is not None and model in gpu_s and of_model[model] > 0:
            usd = round(gpu_s[model] / 3600 * gpu_hour_usd * (prompt + output) / of_model[model], 6)
        uses.append(KeyUse(key, model, int(n_requests.get((key, model), 0)), int(prompt), int(output), usd))
    uses.sort(key=lambda use: (-(use.prompt_tokens + use.output_tokens), use.key, use.model))
    return tuple(uses[:KEYS_MAX])


class GpuShare(NamedTuple):
    """A part of the GPUs' cost, what a million of its tokens cost, and how much of its models' GPU time was idle."""

    usd: float | None
    usd_per_million_tokens: float | None
    idle_share: float | None


def gpu_shares(
    lines: Iterable[tuple[tuple[str, ...], str, int]], gpu_time: Mapping[str, GpuUse]
) -> dict[tuple[str, ...], GpuShare]:
    """By group, for (group, model, tokens of prompts and answers): a model's dollars are shared by tokens.

    $6 of one model, 2 million tokens of alice and 1 million of bob: $4 and $2, $2 per million tokens.
    """
    rows = [row for row in lines if row[1] in gpu_time]
    of_model: defaultdict[str, int] = defaultdict(int)
    for _, model, n_tokens in rows:
        of_model[model] += n_tokens
    tokens: defaultdict[tuple[str, ...], int] = defaultdict(int)
    usd: dict[tuple[str, ...], float] = {}
    models: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for group, model, n_tokens in rows:
        tokens[group] += n_tokens
        models[group].add(model)
        price = gpu_time[model].usd
        if price is not None and of_model[model]:
            usd[group] = usd.get(group, 0.0) + price * n_tokens / of_model[model]
    return {
        group: GpuShare(
            None if group not in usd else round(usd[group], 6),
            None if group not in usd or not n_tokens else round(usd[group] / n_tokens * 1e6, 4),
            _idle_share([gpu_time[model] for model in models[group]]),
        )
        for group, n_tokens in tokens.items()
    }


def _idle_share(uses: Collection[GpuUse]) -> float | None:
    ready, busy = sum(use.gpu_s for use in uses), sum(use.busy_s for use in uses)
    return round(1 - busy / ready, 4) if ready > 0 else None
