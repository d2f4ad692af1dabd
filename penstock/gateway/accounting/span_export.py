"""Sends spans to a collector: OTLP over HTTP, https://opentelemetry.io/docs/specs/otlp/#otlphttp. Blocks its caller."""

from __future__ import annotations

import http.client
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.gateway.accounting.record import Record
from penstock.gateway.accounting.spans import SpanWriter
from penstock.world import REAL, World

# What everyone who sends spans reads: https://opentelemetry.io/docs/specs/otel/protocol/exporter/
HEADERS_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
MAX_WAITING: Final = 8192  # some 10 MB
MAX_BATCH: Final = 256  # a body that is small enough for memory that is used again: 0.1 us a span, 1.2 with 1024
# The ledger waits so long for a collector that hangs, and then leaves it alone for a while.
TIMEOUT_S: Final = 1.0
PAUSE_S: Final = 5.0
PAUSE_S_MAX: Final = 60.0
_MAY_WORK_LATER: Final = frozenset((429, 502, 503, 504))
_MAX_ANSWER_BYTES: Final = 64 * 1024

log = logging.getLogger(__name__)


class _Partial(msgspec.Struct):
    rejectedSpans: int | str = 0


class _Answer(msgspec.Struct):
    partialSuccess: _Partial | None = None


def read_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """The headers of exports: "api-key=a%20b,team=x" -> {"api-key": "a b", "team": "x"}. Broken ones are left out."""
    value = next((environment[name] for name in HEADERS_VARIABLES if environment.get(name)), "")
    headers = {}
    for pair in value.split(","):
        name, equals, text = pair.partition("=")
        name, text = name.strip(), unquote(text.strip())
        if equals and name and name.isascii() and name.isprintable() and text.isascii() and text.isprintable():
            headers[name] = text
    return headers


class SpanExporter:
    """`endpoint`: http://HOST:4318 or https. Spans that find the queue full, or the collector away, are lost."""

    def __init__(
        self,
        endpoint: str,
        writer: SpanWriter,
        headers: Mapping[str, str] | None = None,
        world: World = REAL,
    ) -> None:
        self._world = world
        parts = urlsplit(endpoint)
        self._is_tls, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._path = parts.path.rstrip("/") + "/v1/traces"
        self._headers = {"content-type": "application/json", **(headers or read_headers(os.environ))}
        self._writer = writer
        self._waiting: deque[bytes] = deque()
        self._connection: http.client.HTTPConnection | None = None
        self._pause_until = 0.0
        self._pause_s = PAUSE_S
        self.n_lost = 0

    def write(self, records: Sequence[Record]) -> None:
        """Add the spans of those that are sampled, to be sent with the next `send`."""
        offset_s = self._world.unix() - self._world.now()  # each time: the clock may be set
        sampled = [record for record in records if record.trace is not None and record.trace.is_sampled]
        self.add([self._writer.span(record, offset_s) for record in sampled])

    def add(self, spans: Sequence[bytes]) -> None:
        n_free = max(0, MAX_WAITING - len(self._waiting))
        self._waiting.extend(spans[:n_free])
        self.n_lost += max(0, len(spans) - n_free)

    def send(self, *, is_last: bool = False) -> None:
        """Sends what waits, unless the collector has just failed; with `is_last` what fails is lost."""
        now = self._world.now()
        while self._waiting and (is_last or now >= self._pause_until):
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            try:
                status, answer = self._post(self._writer.write(batch))
            except (OSError, http.client.HTTPException) as error:
                self._fail(batch, str(error) or type(error).__name__, now, is_last)
                break
            if status in _MAY_WORK_LATER:
                self._fail(batch, f"it answered {status}", now, is_last)
                break
            self._note(status, answer, len(batch))

    def close(self) -> None:
        self.send(is_last=True)
        self.n_lost += len(self._waiting)
        self._waiting.clear()
        self._drop_connection()

    def _note(self, status: int, answer: bytes, n_spans: int) -> None:
        if status >= 300:
            self.n_lost += n_spans
            log.error("traces: the collector refused %d spans with %d", n_spans, status)
            return
        if self._pause_s > PAUSE_S:
            log.warning("traces: the collector works again, %d spans are lost", self.n_lost)
        self._pause_s, self._pause_until = PAUSE_S, 0.0
        try:
            partial = msgspec.json.decode(answer, type=_Answer).partialSuccess if answer else None
            self.n_lost += int(partial.rejectedSpans) if partial is not None else 0
        except (msgspec.DecodeError, ValueError):
            pass  # an answer that is no JSON, of a proxy

    def _fail(self, batch: list[bytes], reason: str, now: float, is_last: bool) -> None:
        if self._pause_s == PAUSE_S:
            log.error("traces: collector %s: %s; requests continue without their spans", self._host, reason)
        self._pause_until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        if is_last:
            self.n_lost += len(batch)
        else:
            self._waiting.extendleft(reversed(batch))

    def _post(self, body: bytes) -> tuple[int, bytes]:
        if self._connection is not None:
            try:
                return self._post_on(self._connection, body)
            except (ConnectionError, http.client.RemoteDisconnected):
                self._drop_connection()  # the collector closed it while nothing was sent
        kind: Any = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        self._connection = connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            return self._post_on(connection, body)
        except (OSError, http.client.HTTPException):
            self._drop_connection()
            raise

    def _post_on(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes]:
        connection.request("POST", self._path, body, self._headers)
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER_BYTES)
        if response.read(1):
            self._drop_connection()  # nobody needs the rest
        return response.status, answer

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
