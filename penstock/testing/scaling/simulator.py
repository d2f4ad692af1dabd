"""Replicas under a trace, second by second: which first tokens come within the promise, and how many replicas it took.

Theory of operation. Requests wait in one queue, first come first served, until a ready replica has a free place; the
one with fewest requests takes it. A replica divides each second: prompts are read one after another at the prefill
rate, for at most `PREFILL_SHARE` of it while answers are written; all answers share the rest at the decode rate, none
faster than `stream_tokens_s`. All streams of a replica advance equally, so that one counter tells them all: a request
that begins at `c` tokens ends when the counter has reached `c` plus its own. That makes a second cost the requests that
begin or end in it, and three hours about a second.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from penstock.deployment.autoscale import ReplicaSample, Sample
from penstock.testing.scaling.traces import Arrival, Trace

PREFILL_SHARE = 0.9
_KV_TOKENS = 400_000.0  # of a replica's cache: Llama 8B in bf16 has about this on 80 GB
_DRAIN_MOST_S = 600.0

# What decides: gets the sample of the second that ended, returns how many replicas there should be.
Scaler = Callable[[Sample], int]


class Capacity(msgspec.Struct, frozen=True):
    """What one replica can: tokens a second when it does only that, requests at once, seconds from order to ready."""

    start_s: float = 100.0
    prefill_tokens_s: float = 12_000.0
    decode_tokens_s: float = 1_500.0
    max_running: int = 64
    stream_tokens_s: float = 60.0


class Outcome(msgspec.Struct, frozen=True):
    """What happened. One row a second: replicas that cost (starting, ready, draining), ready ones, requests held.

    `ttft_s`, `arrived_s`: of every request that got a first token, in order of that. `lost`: requests without one at
    the end, an hour after the last arrival.
    """

    duration_s: float
    wanted: tuple[int, ...]
    paid: tuple[int, ...]
    ready: tuple[int, ...]
    held: tuple[int, ...]
    arrived_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    hold_s: tuple[float, ...]
    lost: int

    @property
    def replica_hours(self) -> float:
        return sum(self.paid) / 3600


class Replica:
    """One simulated replica. `load`: requests in it."""

    def __init__(self, name: str, capacity: Capacity, ordered: float, is_ready: bool = False) -> None:
        self.name, self.capacity, self.ordered = name, capacity, ordered
        self.state: Literal["starting", "ready", "draining"] = "ready" if is_ready else "starting"
        self.drains_since = 0.0
        self.load = 0
        self._prompts: deque[list[float]] = deque()  # [tokens left, arrived, output tokens]
        self._counter = 0.0  # tokens that each stream has got since the replica began
        self._ends: list[float] = []  # a heap of the counters at which streams end
        self._kv_tokens = 0.0

    def add(self, arrival: Arrival) -> None:
        self._prompts.append([float(arrival.prompt_tokens), arrival.t, float(arrival.output_tokens)])
        self.load += 1

    def advance(self, second: float, firsts: list[tuple[float, float]]) -> int:
        """One second: appends (arrived, first token) of prompts that were read; the tokens that were written."""
        used = self._prefill(second, firsts)
        streams = len(self._ends)
        if not streams:
            return 0
        speed = min(self.capacity.stream_tokens_s, self.capacity.decode_tokens_s * (1.0 - used) / streams)
        before = self._counter
        self._counter += speed
        tokens = speed * streams
        while self._ends and self._ends[0] <= self._counter:
            tokens -= self._counter - max(before, heapq.heappop(self._ends))
            self.load -= 1
        if not self._ends:
            self._counter = 0.0
        return int(tokens)

    def _prefill(self, second: float, firsts: list[tuple[float, float]]) -> float:
        """The share of the second that prompts took. One that is read in it begins to write in it."""
        rate, used, clock = self.capacity.prefill_tokens_s, 0.0, second
        most = PREFILL_SHARE if self._ends else 1.0
        while self._prompts:
            prompt = self._prompts[0]
            clock = max(clock, prompt[1])
            room = min(most - used, second + 1.0 - clock)
            if room <= 1e-9:
                break
            need = prompt[0] / rate
            if need > room:
                prompt[0] -= room * rate
                return used + room
            clock += need
            used += need
            self._prompts.popleft()
            firsts.append((prompt[1], clock))
            if prompt[2] > 1:
                heapq.heappush(self._ends, self._counter + prompt[2] - 1)
            else:
                self.load -= 1
        return used

    def sample(self, now: float) -> ReplicaSample:
        waiting = max(0, len(self._prompts) - 1)
        return ReplicaSample(
            self.name,
            self.state,
            now - self.ordered,
            self.load - waiting,
            waiting,
            min(1.0, self.load * 1500 / _KV_TOKENS),
        )


class _Fleet:
    """The replicas, and the queue before them."""

    def __init__(self, capacity: Capacity, initial: int) -> None:
        self.capacity = capacity
        self.replicas = [Replica(str(number), capacity, -capacity.start_s, True) for number in range(initial)]
        self.queue: deque[Arrival] = deque()
        self._number = initial

    def resize(self, wanted: int, now: float) -> None:
        """Orders what is missing. Of what is too much, those that start end at once, then the youngest drain."""
        live = [replica for replica in self.replicas if replica.state != "draining"]
        for _ in range(wanted - len(live)):
            self.replicas.append(Replica(str(self._number), self.capacity, now))
            self._number += 1
        leaving = sorted(live, key=lambda replica: (replica.state != "starting", -replica.ordered))
        for replica in leaving[: max(0, len(live) - wanted)]:
            if replica.state == "starting":
                self.replicas.remove(replica)
            else:
                replica.state, replica.drains_since = "draining", now

    def turn(self, now: float) -> None:
        """Starts and drains that are over."""
        for replica in [*self.replicas]:
            if replica.state == "starting" and now - replica.ordered >= self.capacity.start_s:
                replica.state = "ready"
            elif replica.state == "draining" and (not replica.load or now - replica.drains_since > _DRAIN_MOST_S):
                self.replicas.remove(replica)

    def dispatch(self, ready: Sequence[Replica]) -> float | None:
        """Sends the first of the queue, or returns None where no replica has a place; else when it had arrived."""
        best = min(ready, key=_load, default=None)
        if best is None or best.load >= self.capacity.max_running:
            return None
        arrival = self.queue.popleft()
        best.add(arrival)
        return arrival.t


def _load(replica: Replica) -> int:
    return replica.load


def simulate(
    trace: Trace,
    scaler: Scaler,
    capacity: Capacity | None = None,
    initial: int = 1,
    ttft_s: float = 2.0,
) -> Outcome:
    """Runs a trace with `initial` replicas ready at its beginning. Deterministic."""
    fleet = _Fleet(capacity or Capacity(), initial)
    wanted: list[int] = []
    paid: list[int] = []
    n_ready: list[int] = []
    held: list[int] = []
    firsts: list[tuple[float, float]] = []
    holds: list[float] = []
    arrivals, index, total = trace.arrivals, 0, len(trace.arrivals)
    second, n_first = 0, 0
    while second < trace.duration_s or (n_first < total and second < trace.duration_s + 3600):
        now = float(second)
        fleet.turn(now)
        ready = [replica for replica in fleet.replicas if replica.state == "ready"]
        first, prompt_tokens = index, 0
        while fleet.queue and (arrived := fleet.dispatch(ready)) is not None:
            holds.append(now - arrived)
        while index < total and arrivals[index].t < now + 1.0:
            fleet.queue.append(arrivals[index])
            prompt_tokens += arrivals[index].prompt_tokens
            index += 1
            if len(fleet.queue) == 1 and fleet.dispatch(ready) is not None:
                holds.append(0.0)
        output_tokens = sum([replica.advance(now, firsts) for replica in fleet.replicas])
        if second < trace.duration_s:
            paid.append(len(fleet.replicas))
            n_ready.append(len(ready))
            held.append(len(fleet.queue))
        sample = Sample(
            t=now + 1.0,
            arrivals=index - first,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            in_flight=sum([replica.load for replica in fleet.replicas]) + len(fleet.queue),
            held=len(fleet.queue),
            ttft_good=sum([token - arrived <= ttft_s for arrived, token in firsts[n_first:]]),
            ttft_total=len(firsts) - n_first,
            replicas=tuple([replica.sample(now + 1.0) for replica in fleet.replicas]),
        )
        n_first = len(firsts)
        number = scaler(sample)
        if second < trace.duration_s:
            wanted.append(number)
        fleet.resize(number, now + 1.0)
        second += 1
    return Outcome(
        duration_s=trace.duration_s,
        wanted=tuple(wanted),
        paid=tuple(paid),
        ready=tuple(n_ready),
        held=tuple(held),
        arrived_s=tuple(arrived for arrived, _ in firsts),
        ttft_s=tuple(token - arrived for arrived, token in firsts),
        hold_s=tuple(holds),
        lost=total - len(firsts),
    )
