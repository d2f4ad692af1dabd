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
from penstock.text import show_seconds
from penstock.wire import prometheus
from penstock.wire.announcement import EngineLoad
from penstock.wire.answers import HttpError, NoAnswer
from penstock.wire.client import Client

_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 120.0
_SLEEP_TIMEOUT_S = 900.0  # hundreds of GiB to or from the memory of a machine, or from a disk
_NO_SUCH_ROUTE = (404, 405, 501)  # an embedding or reranking model has no /v1/completions
_ADAPTERS_MAX = 1024


class StandstillWatch:
    """How long the engine's counters of work have stood still. Pure: the clock is passed in."""

    def __init__(self) -> None:
        self.stands_s = 0.0
        self._iterations: float | None = None
        self._since_s: float | None = None

    def observe(self, counts: bool, iterations: float, now_s: float) -> float:
        """Seconds since the last step, or since the time began to count. `now_s` is monotonic."""
        if not counts or iterations != self._iterations or self._since_s is None:
            self._iterations, self._since_s = iterations, now_s
        self.stands_s = now_s - self._since_s
        return self.stands_s

    def forget(self) -> None:
        self._since_s, self.stands_s = None, 0.0


class EngineClient:
    """One engine from its start to its end. All calls block; none raises but `make`.

    `unreachable`: why its address does not lead to it, after a failed health check. A restart would not help.
    `is_silent`: it takes connections, and did not answer the last check. `alive_at_s`: its last answer, or byte of a
    stream, in monotonic seconds.
    """

    def __init__(self, url: str, key: str | None, metrics: Metrics, plan: Plan) -> None:
        self.url = url
        self.load: EngineLoad | None = None
        self.unreachable: str | None = None
        self.is_silent, self.alive_at_s = False, 0.0
        self._names, self._plan = metrics, plan
        self._http = Client(url, key, timeout_s=_TIMEOUT_S)
        self._slow_http = Client(url, key, timeout_s=_PROBE_TIMEOUT_S)
        self._key = key
        self._stall, self._idle = StandstillWatch(), StandstillWatch()

    def is_up(self) -> bool:
        try:
            self._http.get_text("/health")
        except PenstockError:
            self.unreachable = self._why_unreachable()
            return False
        self.unreachable = None
        return True

    def health_problem(self, now_s: float) -> str | None:
        """Why its health check failed, or None. A silent one is busy, until it has shown no life for `stall_s`."""
        try:
            self._http.get_text("/health")
        except PenstockError as exc:
            self.is_silent, self.alive_at_s = isinstance(exc, NoAnswer), self.alive_at_s or now_s
            silent_s = now_s - self.alive_at_s
            if self.is_silent and silent_s < self._plan.stall_s:
                return None
            why = f"no answer and no byte of a stream for {show_seconds(silent_s)}" if self.is_silent else exc.message
            self.unreachable = self._why_unreachable()
            return why if self.unreachable is None else None
        self.is_silent, self.alive_at_s, self.unreachable = False, now_s, None
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
        try:
            samples = prometheus.parse(self._http.get_text("/metrics"))
        except PenstockError:
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
        self._idle.observe(running + self.load.waiting <= 0, iterations, now_s)
        return self._stall.observe(running > 0, iterations, now_s)

    @property
    def idle_s(self) -> float:
        """For how long it had had no request when `stalled_s` looked."""
        return self._idle.stands_s

    def forget_idleness(self) -> None:
        self._idle.forget()

    def make(self, calls: Sequence[Call]) -> None:
        """Calls of its own API, one after another, which may take minutes.  Raises PenstockError."""
        client = Client(self.url, self._key, timeout_s=_SLEEP_TIMEOUT_S)
        for call in calls:
            client.send("POST", call.path, msgspec.json.encode(call.body) if call.body is not None else None)

    def is_busy(self, now_s: float) -> bool | None:
        """Whether requests run or wait, or it is silent as in `health_problem`; None when it is gone."""
        try:
            samples = prometheus.parse(self._http.get_text("/metrics"))
        except PenstockError as exc:
            return True if isinstance(exc, NoAnswer) and now_s - self.alive_at_s < self._plan.stall_s else None
        self.alive_at_s = now_s
        return any(samples.get(name) for name in (self._names.running, self._names.waiting))
