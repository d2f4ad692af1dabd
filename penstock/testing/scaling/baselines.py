"""What others do, as scalers of the simulator: HPA, KEDA and Knative with their defaults, and fixed numbers.

Their words and defaults: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ (sync 15 s, 10%
tolerance, scale-down stabilisation 300 s, up by 100% or 4 pods in 15 s), https://keda.sh/docs/concepts/scaling-deployments/
(the metric is read every 30 s, its HPA divides the sum by the target), https://knative.dev/docs/serving/autoscaling/
(stable window 60 s, panic window 6 s at 200%, target 70% of the concurrency; decides every 2 s).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from penstock.deployment.autoscale import Sample

_SYNC_S, _TOLERANCE, _DOWN_WINDOW_S = 15.0, 0.1, 300.0


def static(number: int) -> Callable[[Sample], int]:
    return lambda _: number


class Hpa:
    """The sum of waiting requests (in the gateway and in engines) over `target`, as HPA's AverageValue.

    `poll_s`: how often the metric is read, 15 s by HPA's own adapter, 30 s by KEDA.
    """

    def __init__(self, target: float, least: int, most: int, poll_s: float = 15.0, initial: int = 1) -> None:
        self.target, self.least, self.most, self.poll_s = target, least, most, poll_s
        self.number = initial
        self._read_at = self._synced_at = -math.inf
        self._value = 0.0
        self._wanted: deque[tuple[float, int]] = deque()

    def __call__(self, sample: Sample) -> int:
        if sample.t - self._read_at >= self.poll_s:
            self._read_at = sample.t
            self._value = sample.held + sum(replica.waiting for replica in sample.replicas)
        if sample.t - self._synced_at >= _SYNC_S:
            self._synced_at = sample.t
            self._sync(sample.t)
        return self.number

    def _sync(self, now: float) -> None:
        ratio = self._value / self.target / max(1, self.number)
        wanted = self.number if abs(ratio - 1.0) <= _TOLERANCE else math.ceil(self._value / self.target)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - _DOWN_WINDOW_S:
            self._wanted.popleft()
        if wanted > self.number:
            self.number = min(wanted, max(2 * self.number, self.number + 4))
        else:
            self.number = min(self.number, max(number for _, number in self._wanted))
        self.number = min(max(self.number, self.least), self.most)


class Knative:
    """Requests in flight over 70% of `concurrency`, means of 60 s; of 6 s, and never down, while these are twice as
    much as there is."""

    def __init__(self, concurrency: float, least: int, most: int, initial: int = 1) -> None:
        self.target, self.least, self.most = 0.7 * concurrency, least, most
        self.number, self._panic_until = initial, -math.inf
        self._in_flight: deque[int] = deque(maxlen=60)

    def __call__(self, sample: Sample) -> int:
        self._in_flight.append(sample.in_flight)
        if int(sample.t) % 2:
            return self.number
        recent = list(self._in_flight)
        stable = math.ceil(sum(recent) / len(recent) / self.target)
        short = math.ceil(sum(recent[-6:]) / len(recent[-6:]) / self.target)
        ready = sum(replica.state == "ready" for replica in sample.replicas)
        if short >= 2 * max(1, ready):
            self._panic_until = sample.t + 60.0
        wanted = max(self.number, short) if sample.t < self._panic_until else max(stable, ready // 2)
        self.number = min(max(wanted, self.least), self.most)
        return self.number
