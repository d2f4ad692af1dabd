"""The policy next to the others on one trace: what each of them cost, and which promises it kept."""

from __future__ import annotations

import math

import msgspec

from penstock.deployment.autoscale import Policy, Recent, Sample, State, scale
from penstock.testing.scaling.baselines import Hpa, Knative, static
from penstock.testing.scaling.scores import Reference, Scores, reference, scores
from penstock.testing.scaling.simulator import Capacity, Outcome, Scaler, simulate
from penstock.testing.scaling.traces import Trace

OURS = "penstock"
_FIRST_S = 120.0


class Row(msgspec.Struct, frozen=True):
    """One scaler on one trace."""

    name: str
    scores: Scores
    outcome: Outcome


class Follower:
    """`scale`, with what it remembers, as a scaler. `decisions`: (second, number, reason) of each change."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.state = policy, State()
        self.decisions: list[tuple[float, int, str]] = []

    def __call__(self, sample: Sample) -> int:
        decision = scale(Recent((sample,)), self.state, self.policy, sample.t)
        if not self.decisions or self.decisions[-1][1] != decision.replicas:
            self.decisions.append((sample.t, decision.replicas, decision.reason))
        self.state = decision.state
        return decision.replicas


def capacity_of(policy: Policy) -> Capacity:
    return Capacity(policy.start_s, policy.prefill_tokens_s, policy.decode_tokens_s, policy.max_running)


def first_replicas(trace: Trace, policy: Policy) -> int:
    """What the first two minutes need: a run begins with it, so that it is judged by how it follows the load."""
    work = 0.0
    for arrival in trace.arrivals:
        if arrival.t >= _FIRST_S:
            break
        work += arrival.prompt_tokens / policy.prefill_tokens_s + arrival.output_tokens / policy.decode_tokens_s
    need = math.ceil(work / _FIRST_S + 0.5) if work else 0
    return min(max(need, policy.replicas.min), policy.replicas.max)


def others(policy: Policy) -> dict[str, Scaler]:
    """Scalers with the defaults of others, within the same bounds."""
    least, most = policy.replicas.min, policy.replicas.max
    return {
        "HPA, waiting 10": Hpa(10.0, least, most),
        "KEDA, queue 5": Hpa(5.0, least, most, poll_s=30.0),
        "Knative, concurrency 16": Knative(16.0, least, most),
    }


def run(trace: Trace, scaler: Scaler, policy: Policy) -> Outcome:
    return simulate(trace, scaler, capacity_of(policy), first_replicas(trace, policy), policy.ttft_s)


def compared(trace: Trace, policy: Policy) -> tuple[Reference, list[Row]]:
    """The references, and a row each for penstock, the others, and the constant number that keeps the promise."""
    known = reference(trace, capacity_of(policy), policy.ttft_s)
    rows = []
    scalers: dict[str, Scaler] = {OURS: Follower(policy), **others(policy)}
    for name, scaler in scalers.items():
        outcome = run(trace, scaler, policy)
        rows.append(Row(name, scores(outcome, known, policy.ttft_s), outcome))
    constant = simulate(trace, static(known.peak), capacity_of(policy), known.peak, policy.ttft_s)
    rows.append(Row(f"always {known.peak}", scores(constant, known, policy.ttft_s), constant))
    return known, rows
