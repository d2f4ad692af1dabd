"""A node's HTTP client of its engine: health, metrics, names, and one token as a probe."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.engines import Call, Metrics
from penstock.errors import PenstockError
from penstock.planner import Plan
from penstock.wire import prometheus
from penstock.wire.announcement import EngineLoad
from penstock.wire.answers import HttpError, NoAnswer
from penstock.wire.client import Client

_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 120.0
_SLEEP_TIMEOUT_S = 900.0  # hundreds of GiB to or from the memory of a machine, or from a disk
_NO_SUCH_ROUTE = (404, 405, 501)  # an embedding or reranking model has no /v1/completions
_MISSED_MAX = 3  # timeouts in a row; an error answer or a refused connection counts at once
_ADAPTERS_MAX = 1024


class StallWatch:
    """How long requests have run without a step of the engine. Pure: the clock is passed in."""

    def __init__(self) -> None:
        self._iterations = -1.0
        self._since_s: float | None = None

    def observe(self, running: float, iterations: float, now_s: float) -> float:
        """Seconds since the last step, 0 while nothing runs. `now_s` is monotonic."""
        if running <= 0 or iterations != self._iterations:
            self._iterations, self._since_s = iterations, now_s
            return 0.0
        assert self._since_s is not None
        return now_s - self._since_s


class IdleWatch:
    """How long an engine has had nothing to do, as of the last look. Pure: the clock is passed in."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._iterations: float | None = None
        self._since_s: float | None = None

    def observe(self, n_requests: float, iterations: float, now_s: float) -> None:
        """`n_requests` run or wait. `now_s` is monotonic."""
        if n_requests > 0 or iterations != self._iterations or self._since_s is None:
            self._iterations, self._since_s = iterations, now_s
        self.idle_s = now_s - self._since_s

    def forget(self) -> None:
        self._since_s, self.idle_s = None, 0.0


class EngineClient:
    """One engine from its start to its end. All calls block; none raises but `make`.

    `unreachable`: why its address does not lead to it, after a failed health check. A restart would not help.
    """

    def __init__(self, url: str, key: str | None, metrics: Metrics, plan: Plan) -> None:
        self.url = url
        self.load: EngineLoad | None = None
        self.unreachable: str | None = None
        self._names, self._plan = metrics, plan
        self._http = Client(url, key, timeout_s=_TIMEOUT_S)
        self._slow_http = Client(url, key, timeout_s=_PROBE_TIMEOUT_S)
        self._key = key
        self._stall, self._idle, self._missed = StallWatch(), IdleWatch(), 0

    def is_up(self) -> bool:
        try:
            self._http.get_text("/health")
        except PenstockError:
            self.unreachable = self._why_unreachable()
            return False
        self.unreachable = None
        return True

    def health_problem(self) -> str | None:
        """Why its health check failed, or None; a few timeouts in a row count as late answers."""
        try:
            self._http.get_text("/health")
        except PenstockError as exc:
            self._missed += 1
            if isinstance(exc, NoAnswer) and self._missed < _MISSED_MAX:
                return None
            self.unreachable = self._why_unreachable()
            return exc.message if self.unreachable is None else None
        self._missed, self.unreachable = 0, None
        return None

    def _why_unreachable(self) -> str | None:
        """None where a connection is accepted or refused: the kernel accepts it for an engine that hangs, too."""
        parts = urlsplit(self.url)
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), _TIMEOUT_S):
                return None
        except ConnectionRefusedError:
            return None
        except OSError as exc:
            return f"this node cannot reach its own address {parts.hostname}: {exc.strerror or exc}"

    def gives_token(self) -> bool:
        """Whether it answers a request. A healthy engine may die of its first one, as vLLM with a pipeline did."""
        body = {"model": self._plan.served_names[0], "prompt": "1", "max_tokens": 1, "temperature": 0}
        try:
            answer = self._slow_http.post_json("/v1/completions", body)
        except PenstockError as exc:
            if isinstance(exc, HttpError) and exc.status in _NO_SUCH_ROUTE:
                print("penstock: this model generates no text, so its health alone makes it ready", flush=True)
                return True
            print(f"penstock: the probe request failed: {exc.message}", flush=True)
            return False
        return bool(answer.get("choices"))

    def adapters(self) -> tuple[str, ...]:
        """The names that it serves besides the model's."""
        try:
            rows: list[Any] = self._http.get_json("/v1/models").get("data") or []
        except PenstockError:
            return ()
        names = [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        return tuple(name for name in names if name not in self._plan.served_names)[:_ADAPTERS_MAX]

    def stalled_s(self, now_s: float) -> float:
        """How long it has made no step while requests run. Sets `load`."""
        samples = self._metrics()
        if samples is None:
            return 0.0
        names = self._names
        running = samples.get(names.running, 0.0)
        # The sum over data-parallel ranks.
        kv_use = samples.get(names.kv_use, 0.0) / self._plan.layout.data if names.kv_use else 0.0
        self.load = EngineLoad(
            running,
            samples.get(names.waiting, 0.0),
            round(kv_use, 3),
            prompt_tokens=sum(samples.get(name, 0.0) for name in names.prompt_tokens),
            output_tokens=samples.get(names.output_tokens or "", 0.0),
            cached_tokens=samples.get(names.cached_tokens or "", 0.0),
            at_s=round(now_s, 3),
        )
        iterations = sum(samples.get(name, 0.0) for name in names.iterations)
        self._idle.observe(running + self.load.waiting, iterations, now_s)
        return self._stall.observe(running, iterations, now_s)

    @property
    def idle_s(self) -> float:
        """For how long it had had no request when `stalled_s` looked."""
        return self._idle.idle_s

    def forget_idleness(self) -> None:
        self._idle.forget()

    def make(self, calls: Sequence[Call]) -> None:
        """Calls of its own API, one after another, which may take minutes.  Raises PenstockError."""
        client = Client(self.url, self._key, timeout_s=_SLEEP_TIMEOUT_S)
        for call in calls:
            client.send("POST", call.path, msgspec.json.encode(call.body) if call.body is not None else None)

    def is_busy(self) -> bool | None:
        """Whether requests run or wait; None when it does not answer."""
        samples = self._metrics()
        names = (self._names.running, self._names.waiting)
        return None if samples is None else any(samples.get(name) for name in names)

    def _metrics(self) -> dict[str, float] | None:
        try:
            return prometheus.parse(self._http.get_text("/metrics"))
        except PenstockError:
            return None
