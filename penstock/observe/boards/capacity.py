"""What it costs, who uses it, and how much room is left. Pure."""

from __future__ import annotations

from penstock.observe.boards.expressions import (
    ENERGY,
    KV,
    POWER,
    QUEUED,
    READY,
    RUNNING,
    TOKENS_IN,
    TOKENS_OUT,
    stat,
)
from penstock.observe.panels import RANGE, Board, Panel, Query, high, low, once, rate, rate_once

_GPU_S, _BUSY_S = "penstock_gpu_seconds_total", "penstock_gpu_busy_seconds_total"
_BUSY = f"{rate_once(_BUSY_S)} / ({rate_once(_GPU_S)} > 0)"
_USD_PER_GPU_H = once("penstock_gpu_hour_usd")
# GPUs (GPU seconds per second) by the price of one for an hour.
_USD_PER_H = f"sum({rate_once(_GPU_S, 'deployment')} * on (deployment) {_USD_PER_GPU_H})"
_USD_PER_MILLION = f"{_USD_PER_H} / 3600 * 1e6 / ({TOKENS_IN} + {TOKENS_OUT} > 0)"
_JOULES = f"{ENERGY} / ({TOKENS_OUT} > 0)"
# Cached tokens are prompt tokens too.
_KEY_TOKENS = 'penstock_key_tokens_total{kind!="cached"}'


def _usd_by_key() -> str:
    """Of what a model's GPUs cost, the part that a key has of its tokens."""
    model = "deployment, model"
    share = f"{rate(_KEY_TOKENS, f'{model}, key')} / on ({model}) group_left () ({rate(_KEY_TOKENS, model)} > 0)"
    cost = f"{rate_once(_GPU_S, model)} * on (deployment) group_left () {_USD_PER_GPU_H}"
    return f"topk(10, sum by (key) ({share} * on ({model}) group_left () ({cost})))"


_COST = (
    stat(
        "GPU hours", "Of ready replicas, in the shown time.", "h",
        f"sum(max by (deployment, model) (increase({_GPU_S}[{RANGE}]))) / 3600", width=4,
    ),
    stat(
        "Busy", "Share of GPU time of ready replicas in which a request ran. The rest is paid for and idle.", "share",
        _BUSY, low(0.2, 0.5), 4,
    ),
    stat("Cost per hour", "Of the GPUs of ready replicas.", "USD/h", _USD_PER_H, width=4),
    stat("Cost per million tokens", "Prompt and output tokens together, now.", "USD", _USD_PER_MILLION, width=4),
    stat("Energy per output token", "Of all GPUs, for prompts too.", "J", _JOULES, width=4),
    stat("Power", "That all GPUs draw.", "W", POWER, width=4),
    Panel(
        "GPU time", "GPUs of ready replicas, and those in which a request runs.", "", "graph",
        (Query(rate_once(_GPU_S), "ready"), Query(rate_once(_BUSY_S), "busy")),
    ),
    Panel(
        "Cost per million tokens", "Prompt and output tokens together; busier replicas are cheaper.", "USD", "graph",
        (Query(_USD_PER_MILLION, "cost"),),
    ),
    Panel("Energy per output token", "Of all GPUs, for prompts too.", "J", "graph", (Query(_JOULES, "energy"),)),
)  # fmt: skip

_USE = (
    Panel(
        "Tokens by key", "Prompt and output tokens per second of the ten keys with the most.", "tokens/s", "stack",
        (Query(f"topk(10, {rate(_KEY_TOKENS, 'key')})", "{{key}}"),),
    ),
    Panel(
        "Cost by key", "Each key's part of the GPUs' cost by its tokens, idle time included.", "USD/h", "stack",
        (Query(_usd_by_key(), "{{key}}"),),
    ),
    Panel(
        "Tokens by model", "Tokens per second in the ledger; cached ones are prompt tokens too.", "tokens/s", "graph",
        (Query(rate("penstock_tokens_total", "model, kind"), "{{model}} {{kind}}"),),
    ),
)  # fmt: skip

_HEADROOM = (
    Panel(
        "Free KV cache", "Of the fullest replica, now and its least in an hour. None left: requests wait.",
        "share", "graph",
        (
            Query(f"1 - max({KV})", "now"),
            Query(f"1 - max(max_over_time({KV}[1h]))", "least in an hour"),
        ),
    ),
    Panel(
        "Requests per replica", "Running and waiting, by ready replica: what decides about another one.", "", "graph",
        (
            Query(f"sum{RUNNING} / ({READY} > 0)", "running"),
            Query(f"(sum{QUEUED} + sum(penstock_requests_waiting)) / ({READY} > 0)", "waiting"),
        ),
        high(10, 50),
    ),
    Panel(
        "Free GPU memory", "Of all GPUs; engines take what they are given at their start.", "bytes", "graph",
        (
            Query(
                f"sum({once('penstock_gpu_memory_total_bytes')}) - sum({once('penstock_gpu_memory_used_bytes')})"
                " or sum(DCGM_FI_DEV_FB_FREE) * 2 ^ 20",
                "free",
            ),
        ),
    ),
)  # fmt: skip

CAPACITY = Board(
    "capacity",
    "penstock: capacity and cost",
    "What it costs, who uses it, and how much room is left.",
    (("Cost", _COST), ("Use", _USE), ("Headroom", _HEADROOM)),
)
