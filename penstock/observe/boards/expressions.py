"""What several boards ask for. Pure.

GPU panels fall back on a DCGM exporter where nodes read no GPU themselves.
"""

from __future__ import annotations

from penstock.engines.vllm import names as vllm
from penstock.observe.panels import PLAIN, RATE, Panel, Query, Thresholds, Unit, mean, once, rate

# Outcomes that no client caused.
_FAILED = '{outcome=~"broken|no_replica|late|queue_full"}'
TTFT = "penstock_time_to_first_token_seconds"
TPOT = "penstock_time_per_output_token_seconds"
RUNNING = f"({vllm.RUNNING} or llamacpp:requests_processing)"
QUEUED = f"({vllm.WAITING} or llamacpp:requests_deferred)"
KV = vllm.KV_USE
PREEMPTIONS = vllm.SERIES["preemptions"]


# llama.cpp counts prompt tokens without cached ones, vLLM with them.
_LLAMACPP_PROMPT = f"rate(llamacpp:prompt_tokens_total[{RATE}]) + rate(llamacpp:prompt_tokens_cached_total[{RATE}])"


def tokens(by: str = "") -> tuple[str, str]:
    """Tokens per second into engines, cached ones too, and out of them."""
    group = f" by ({by})" if by else ""
    into = f"rate({vllm.SERIES['prompt_tokens']}[{RATE}]) or {_LLAMACPP_PROMPT}"
    out = f"rate({vllm.SERIES['generation_tokens']}[{RATE}]) or rate(llamacpp:tokens_predicted_total[{RATE}])"
    return f"sum{group} ({into})", f"sum{group} ({out})"


def hits(by: str = "") -> str:
    """The share of prompt tokens that were cached."""
    group = f" by ({by})" if by else ""
    of_vllm = f"{rate(vllm.SERIES['prefix_hits'], by)} / ({rate(vllm.SERIES['prefix_queries'], by)} > 0)"
    return f"{of_vllm} or {rate('llamacpp:prompt_tokens_cached_total', by)} / (sum{group} ({_LLAMACPP_PROMPT}) > 0)"


def share_failed() -> str:
    """0, not nothing, where requests ended and none failed: then no series of failures exists."""
    all_requests = f"({rate('penstock_requests_total')} > 0)"
    return f"{rate(f'penstock_requests_total{_FAILED}')} / {all_requests} or 0 * {all_requests}"


TOKENS_IN, TOKENS_OUT = tokens()
READY, DESIRED = (f"sum({once(f'penstock_replicas_{word}')})" for word in ("ready", "desired"))
GPU_USE = f"avg({once('penstock_gpu_utilization_ratio')}) or avg(DCGM_FI_DEV_GPU_UTIL) / 100"
POWER = f"sum({once('penstock_gpu_power_watts')}) or sum(DCGM_FI_DEV_POWER_USAGE)"
# The exporter counts millijoules.
ENERGY = (
    f"({rate('penstock_gpu_energy_joules_total')} or sum(rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[{RATE}])) / 1000)"
)


def stat(
    title: str, about: str, unit: Unit, expr: str, thresholds: Thresholds = PLAIN, width: int = 3, legend: str = ""
) -> Panel:
    return Panel(title, about, unit, "stat", (Query(expr, legend),), thresholds, width)


PHASES = Panel(
    "Phases in the engine",
    "Mean seconds of a request in the engine's queue, in prefill and in decode.",
    "s",
    "stack",
    tuple(Query(mean(f"{vllm.PREFIX}request_{phase}_time_seconds"), phase) for phase in ("queue", "prefill", "decode")),
)
