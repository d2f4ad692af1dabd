"""What GPU time costs, and whose tokens it went into. Pure."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.gateway.accounting.usage_store import GpuUse
from penstock.gateway.metrics.counters import Family
from penstock.wire.announcement import GatewayView
from penstock.wire.live import Cost, KeyUse

KEYS_MAX = 50


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
    grown = Spending(*map(operator.sub, newer, older))
    gpu_s, tokens, joules = grown.gpu_s, grown.tokens or grown.engine_tokens, grown.joules
    if grown.at <= 0:
        return Cost()
    usd = None if gpu_hour_usd is None or gpu_s <= 0 else gpu_s / 3600 * gpu_hour_usd
    return Cost(
        usd_per_hour=None if usd is None else round(usd / grown.at * 3600, 4),
        usd_per_million_tokens=None if usd is None or tokens <= 0 else round(usd / tokens * 1e6, 4),
        idle_share=None if gpu_s <= 0 else round(min(1.0, max(0.0, 1 - grown.busy_s / gpu_s)), 4),
        joules_per_token=None if joules <= 0 or grown.output_tokens <= 0 else round(joules / grown.output_tokens, 4),
    )


def key_uses(families: Iterable[Family], gpu_hour_usd: float | None) -> tuple[KeyUse, ...]:
    """Use by key and model since the gateway started, those with the most tokens first. The cost is the key's part of
    the GPUs' by its tokens, where the price of a GPU is known."""
    counts = dict(families)
    tokens: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for labels, n in counts.get("key_tokens_total", {}).items():
        facts = dict(labels)
        tokens[facts["key"], facts["model"]][facts["kind"]] = int(n)
    requests = counts.get("key_requests_total", {})
    n_requests = {(dict(labels)["key"], dict(labels)["model"]): int(n) for labels, n in requests.items()}
    gpu_time = {
        dict(labels)["model"]: GpuUse(gpu_s, 0.0, None if gpu_hour_usd is None else gpu_s / 3600 * gpu_hour_usd)
        for labels, gpu_s in counts.get("gpu_seconds_total", {}).items()
    }
    parts = [(group, kinds.get("prompt", 0), kinds.get("output", 0)) for group, kinds in tokens.items()]
    shares = gpu_shares([(group, group[1], prompt + output) for group, prompt, output in parts], gpu_time)
    uses = [
        KeyUse(*group, n_requests.get(group, 0), prompt, output, shares[group].usd if group in shares else None)
        for group, prompt, output in parts
    ]
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
    n_tokens: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)  # by group and model
    of_model = Counter[str]()
    for group, model, n in lines:
        if model in gpu_time:
            n_tokens[group][model] += n
            of_model[model] += n

    def share(of_group: Counter[str]) -> GpuShare:
        uses = [(gpu_time[model], n, of_model[model]) for model, n in of_group.items()]
        prices = [use.usd * n / n_all for use, n, n_all in uses if use.usd is not None and n_all]
        usd, n_group = sum(prices) if prices else None, of_group.total()
        gpu_s, busy_s = sum(use.gpu_s for use, _, _ in uses), sum(use.busy_s for use, _, _ in uses)
        return GpuShare(
            None if usd is None else round(usd, 6),
            None if usd is None or not n_group else round(usd / n_group * 1e6, 4),
            round(1 - busy_s / gpu_s, 4) if gpu_s > 0 else None,
        )

    return {group: share(of_group) for group, of_group in n_tokens.items()}
