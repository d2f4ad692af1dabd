"""How many replicas the load needs: `scale` maps what was seen and what is remembered to a number and one sentence.

Pure: no clock, no input or output. A sample is one second as gateways and announcements saw it; the controller records
the same lines, which `penstock autoscale replay` reads.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from penstock.spec.deployment import Replicas

# Samples that are older say nothing of now: then nothing ends.
STALE_S = 15.0


class ReplicaSample(msgspec.Struct, frozen=True):
    """One replica in one second: seconds since its start was ordered, requests in it, share of its KV cache in use."""

    id: str = ""
    state: Literal["starting", "ready", "draining"] = "ready"
    age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """One second. `t`: seconds since any fixed moment (since 1970 where a schedule is given).

    `arrivals` requests with `prompt_tokens` came in it, `output_tokens` were generated. `in_flight`: requests that have
    no complete answer, `held` of them in the gateway. `ttft_good` of `ttft_total` first tokens kept the promise.
    """

    t: float
    arrivals: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    in_flight: int = 0
    held: int = 0
    ttft_good: int = 0
    ttft_total: int = 0
    replicas: tuple[ReplicaSample, ...] = ()


class Recent(msgspec.Struct, frozen=True):
    """Samples in any order. Those up to `State.t` have been counted, so the ones since the last decision suffice."""

    samples: tuple[Sample, ...] = ()


class Policy(msgspec.Struct, frozen=True):
    """What is asked, and what one replica is and can: seconds from the order to the first token, prefill and decode
    tokens/s when it does only that, requests that run at once, KV tokens/s being measured where they are not known."""

    replicas: Replicas = Replicas()
    start_s: float = 100.0
    prefill_tokens_s: float = 12_000.0
    decode_tokens_s: float = 1_500.0
    max_running: int = 64
    ttft_s: float = 2.0


class State(msgspec.Struct, frozen=True):
    """What `scale` remembers between decisions; serialises to JSON. `State()` begins."""

    t: float | None = None
    replicas: int | None = None


class Decision(msgspec.Struct, frozen=True):
    """How many replicas there should be, what to pass to the next call, and why, in one sentence with its numbers."""

    replicas: int
    state: State
    reason: str


def scale(recent: Recent, state: State, policy: Policy, now: float) -> Decision:
    """The number of replicas wanted at `now`, between `min` and `max`. Pure; equal inputs give equal decisions."""
    asked = policy.replicas
    samples = sorted(recent.samples, key=lambda sample: sample.t)
    before = state.replicas if state.replicas is not None else max(asked.min, 0)
    if not samples or now - samples[-1].t > STALE_S:
        return Decision(_bounded(before, asked), state, f"no sample in the last {STALE_S:g} s")
    last = samples[-1]
    span = max(1.0, last.t - samples[0].t + 1.0)
    prompt = sum(sample.prompt_tokens for sample in samples) / span
    output = sum(sample.output_tokens for sample in samples) / span
    load = prompt / policy.prefill_tokens_s + output / policy.decode_tokens_s
    wanted = math.ceil(load + 0.3 * math.sqrt(load)) + (1 if last.held else 0)
    number = _bounded(max(wanted, 1 if last.in_flight or last.held else 0), asked)
    return Decision(number, State(t=last.t, replicas=number), f"load {load:.2f} replicas")


def _bounded(number: int, asked: Replicas) -> int:
    return min(max(number, asked.min), asked.max)
