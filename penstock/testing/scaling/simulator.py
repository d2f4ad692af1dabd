"""Replicas under a trace: which first tokens come within the promise, and how many replicas it took.

Theory of operation. Requests wait in one queue, first come first served, until a ready replica has a free place; the
one with fewest requests takes it. A replica reads prompts one after another at the prefill rate, in `PREFILL_SHARE` of
its time while answers are written; all answers share the rest at the decode rate, none faster than `stream_tokens_s`.
All streams of a replica advance equally, so that one counter tells them all: a request that begins at `c` tokens ends
when the counter has reached `c` plus its own. Nothing changes between two events, the end of a prompt or of an answer,
so that a request costs two of them however long it is. The scaler is asked once a second.

benchmarks/simulator_check.py compares it with a real replica.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from penstock.deployment.autoscale import ReplicaSample, Sample
from penstock.testing.scaling.traces import Arrival, Trace

PREFILL_SHARE = 0.9
_KV_TOKENS = 400_000.0  # of a replica's cache: Llama 8B in bf16 has about this on 80 GB
_DRAIN_MOST_S = 600.0
_LEAST_TOKENS = 1e-6  # less is an error of rounding

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
    """One simulated replica. `load`: requests in it; `written`: tokens that no sample has yet; `version`: of its next
    event."""

    def __init__(self, name: str, capacity: Capacity, ordered: float, is_ready: bool = False) -> None:
        self.name, self.capacity, self.ordered = name, capacity, ordered
        self.state: Literal["starting", "ready", "draining"] = "ready" if is_ready else "starting"
        self.drains_since = 0.0
        self.load, self.written, self.version = 0, 0.0, 0
        self._prompts: deque[list[float]] = deque()  # [tokens left, arrived, output tokens]
        self._clock = 0.0
        self._counter = 0.0  # tokens that each stream has got since the replica began
        self._ends: list[float] = []  # a heap of the counters at which streams end
        self._read_rate = self._speed = 0.0

    def add(self, arrival: Arrival, now: float) -> None:
        self.advance(now)
        self._prompts.append([float(arrival.prompt_tokens), arrival.t, float(arrival.output_tokens)])
        self.load += 1
        self._set_rates()

    def _set_rates(self) -> None:
        capacity, streams = self.capacity, len(self._ends)
        share = (PREFILL_SHARE if streams else 1.0) if self._prompts else 0.0
        self._read_rate = capacity.prefill_tokens_s * share
        # Reading stops the writing of all, also of one that would not fill the replica.
        alone = min(capacity.stream_tokens_s, capacity.decode_tokens_s / streams) if streams else 0.0
        self._speed = alone * (1.0 - share)
        self.version += 1

    def next_event(self) -> float:
        """When the first prompt has been read, or the first answer is complete."""
        moment = math.inf
        if self._prompts:
            moment = self._clock + self._prompts[0][0] / self._read_rate
        if self._ends:
            moment = min(moment, self._clock + (self._ends[0] - self._counter) / self._speed)
        return moment

    def advance(self, now: float) -> None:
        """To a moment up to the next event."""
        elapsed = now - self._clock
        self._clock = now
        if self._prompts:
            self._prompts[0][0] -= elapsed * self._read_rate
        if self._ends:
            self._counter += elapsed * self._speed
            self.written += elapsed * self._speed * len(self._ends)

    def turn(self, now: float, firsts: list[tuple[float, float]]) -> None:
        """The event at `now`: appends (arrived, first token) of a prompt that was read, lets go what is complete."""
        self.advance(now)
        if self._prompts and self._prompts[0][0] <= _LEAST_TOKENS:
            _, arrived, output = self._prompts.popleft()
            firsts.append((arrived, now))
            self.written += 1
            if output > 1:
                heapq.heappush(self._ends, self._counter + output - 1)
            else:
                self.load -= 1
        while self._ends and self._ends[0] <= self._counter + _LEAST_TOKENS:
            heapq.heappop(self._ends)
            self.load -= 1
        if not self._ends:
            self._counter = 0.0
        self._set_rates()

    def take_written(self, now: float) -> int:
        """Whole tokens since the call before."""
        self.advance(now)
        tokens = int(self.written)
        self.written -= tokens
        return tokens

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
    """The replicas, the queue before them, and what happens next."""

    def __init__(self, capacity: Capacity, initial: int) -> None:
        self.capacity = capacity
        self.replicas = [Replica(str(number), capacity, -capacity.start_s, True) for number in range(initial)]
        self.ready = [*self.replicas]
        self.queue: deque[Arrival] = deque()
        self.firsts: list[tuple[float, float]] = []
        self.holds: list[float] = []
        self._number = initial
        self._events: list[tuple[float, int, int, Replica]] = []  # moment, number and version of the replica

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
        """Starts and drains that are over; what waits goes where there is a place now."""
        for replica in [*self.replicas]:
            if replica.state == "starting" and now - replica.ordered >= self.capacity.start_s:
                replica.state = "ready"
            elif replica.state == "draining" and (not replica.load or now - replica.drains_since > _DRAIN_MOST_S):
                self.replicas.remove(replica)
                replica.version += 1  # what is in it is lost
        self.ready = [replica for replica in self.replicas if replica.state == "ready"]
        while self.queue and self._send(self.queue[0], now):
            self.queue.popleft()

    def take(self, arrival: Arrival) -> None:
        self.run_to(arrival.t)
        if self.queue or not self._send(arrival, arrival.t):
            self.queue.append(arrival)

    def run_to(self, moment: float) -> None:
        """All events up to a moment; who has a place then takes the first of the queue."""
        events, most = self._events, self.capacity.max_running
        while events and events[0][0] <= moment:
            now, _, version, replica = heapq.heappop(events)
            if version != replica.version:
                continue
            replica.turn(now, self.firsts)
            while self.queue and replica.state == "ready" and replica.load < most:
                arrival = self.queue.popleft()
                self.holds.append(now - arrival.t)
                replica.add(arrival, now)
            self._expect(replica)

    def _send(self, arrival: Arrival, now: float) -> bool:
        """Whether a ready replica had a place."""
        best = min(self.ready, key=_load, default=None)
        if best is None or best.load >= self.capacity.max_running:
            return False
        self.holds.append(now - arrival.t)
        best.add(arrival, now)
        self._expect(best)
        return True

    def _expect(self, replica: Replica) -> None:
        moment = replica.next_event()
        if moment < math.inf:
            heapq.heappush(self._events, (moment, int(replica.name), replica.version, replica))


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
    arrivals, index, total, firsts = trace.arrivals, 0, len(trace.arrivals), fleet.firsts
    second, n_first = 0, 0
    while second < trace.duration_s or (n_first < total and second < trace.duration_s + 3600):
        end = float(second) + 1.0
        fleet.turn(end - 1.0)
        first, prompt_tokens = index, 0
        while index < total and arrivals[index].t < end:
            fleet.take(arrivals[index])
            prompt_tokens += arrivals[index].prompt_tokens
            index += 1
        fleet.run_to(end)
        if second < trace.duration_s:
            paid.append(len(fleet.replicas))
            n_ready.append(len(fleet.ready))
            held.append(len(fleet.queue))
        sample = Sample(
            t=end,
            arrivals=index - first,
            prompt_tokens=prompt_tokens,
            output_tokens=sum([replica.take_written(end) for replica in fleet.replicas]),
            in_flight=sum([replica.load for replica in fleet.replicas]) + len(fleet.queue),
            held=len(fleet.queue),
            ttft_good=sum([token - arrived <= ttft_s for arrived, token in firsts[n_first:]]),
            ttft_total=len(firsts) - n_first,
            replicas=tuple([replica.sample(end) for replica in fleet.replicas]),
        )
        n_first = len(firsts)
        number = scaler(sample)
        if second < trace.duration_s:
            wanted.append(number)
        fleet.resize(number, end)
        second += 1
    return Outcome(
        duration_s=trace.duration_s,
        wanted=tuple(wanted),
        paid=tuple(paid),
        ready=tuple(n_ready),
        held=tuple(held),
        arrived_s=tuple(arrived for arrived, _ in firsts),
        ttft_s=tuple(token - arrived for arrived, token in firsts),
        hold_s=tuple(fleet.holds),
        lost=total - len(firsts),
    )
