"""How often `bench compare` is wrong: pairs of equal queues, and pairs of which one is 30% slower, in one table.

    python benchmarks/bench_compare.py [--pairs 200] [--requests 1000]

Each pair is two runs of so many requests. "false": equal runs called different (5% is promised, 7% the bar). "power":
runs of which one takes 1.3 times as long, called different. "best": the power of a test that knows how the number
varies between runs, which no test of two runs can beat by much. "known": pairs that had a verdict at all.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

from penstock.bench.results import bootstrap
from penstock.bench.results.stats import percentile

SLOWER = 1.3
Service = Callable[[random.Random], float]


def exponential(rng: random.Random) -> float:
    return rng.expovariate(1)


def answers(rng: random.Random) -> float:
    """Lengths of answers: mean 1, coefficient of variation 0.53."""
    return rng.lognormvariate(-0.125, 0.5)


class System(NamedTuple):
    """`servers` at a `load` (open loop), or with so many `clients` (closed loop)."""

    name: str
    servers: int
    service: Service
    load: float = 0.0
    clients: int = 0

    def run(self, rng: random.Random, n: int) -> list[float]:
        """Times of `n` requests in order of arrival, after a fifth more that fill the queue."""
        free = [0.0] * self.servers
        ready = [0.0] * self.clients
        times: list[float] = []
        now = 0.0
        for _ in range(n + n // 5):
            now = heapq.heappop(ready) if ready else now + rng.expovariate(self.load * self.servers)
            end = max(now, heapq.heappop(free)) + self.service(rng)
            heapq.heappush(free, end)
            if self.clients:
                heapq.heappush(ready, end)
            times.append(end - now)
        return times[-n:]


SYSTEMS = [
    *(System(f"1 server, load {load}", 1, exponential, load) for load in (0.5, 0.8, 0.95)),
    *(System(f"8 at once, load {load}", 8, answers, load) for load in (0.5, 0.8, 0.95)),
    System("closed, 32 clients, 8 at once", 8, answers, clients=32),
    System("closed, 32 clients, 32 at once", 32, answers, clients=32),
]


def verdict(a: list[float], b: list[float], share: float, seed: int) -> bool | None:
    """Whether they are called different; None: unknown."""
    if not (bootstrap.is_steady(a) and bootstrap.is_steady(b)):
        return None
    interval = bootstrap.quantile_difference(a, b, share, seed)
    return None if interval is None else not interval.is_noise


def row(system: System, share: float, n_pairs: int, n: int) -> str:
    rng = random.Random(1)
    pairs = [(system.run(rng, n), system.run(rng, n)) for _ in range(n_pairs)]
    slower = [(a, [SLOWER * value for value in b]) for a, b in pairs]
    equal, shifted = ([verdict(a, b, share, seed) for seed, (a, b) in enumerate(each)] for each in (pairs, slower))
    gaps = [percentile(sorted(b), share) - percentile(sorted(a), share) for a, b in pairs]
    low, high = (percentile(sorted(gaps), tail) for tail in (0.025, 0.975))
    best = sum(not low <= percentile(sorted(b), share) - percentile(sorted(a), share) <= high for a, b in slower)
    counts = (equal.count(True), shifted.count(True), best, n_pairs - equal.count(None))
    numbers = "".join(f"{count / n_pairs:>8.0%}" for count in counts)
    return f"{system.name:32}p{share * 100:<5g}{numbers}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    print(f"{'':32}{'':6}" + "".join(f"{word:>8}" for word in ("false", "power", "best", "known")))
    for system in SYSTEMS:
        for share in (0.5, 0.99):
            print(row(system, share, options.pairs, options.requests), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
