"""Spans of requests as OTLP's JSON. Pure. https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding

Written by templates: 3 us a span where structs and their encoder take 12. What repeats from request to request is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock import __version__
from penstock.gateway import genai_names as names
from penstock.gateway.accounting.exchange import Exchange, Record, text

_MAX_KNOWN: Final = 4096
_KIND_SERVER: Final = 2
_ERROR: Final = b',"status":{"code":2}'

_json = msgspec.json.Encoder().encode

_SPAN: Final = (
    b'{"traceId":"%s","spanId":"%s","parentSpanId":"%s","flags":%d,"startTimeUnixNano":"%d","endTimeUnixNano":"%d",'
    b'%s,"attributes":[%s,{"key":"' + names.INPUT_TOKENS.encode() + b'","value":{"intValue":"%d"}},'
    b'{"key":"' + names.CACHED_TOKENS.encode() + b'","value":{"intValue":"%d"}},'
    b'{"key":"' + names.OUTPUT_TOKENS.encode() + b'","value":{"intValue":"%d"}},'
    b'{"key":"' + names.REQUEST_ID.encode() + b'","value":{"stringValue":"%s"}},'
    b'{"key":"' + names.HOLD_S.encode() + b'","value":{"doubleValue":%.6f}},'
    b'{"key":"' + names.OWN_S.encode() + b'","value":{"doubleValue":%.6f}}%s],"events":[%s]}'
)
_FIRST_CHUNK: Final = b',{"key":"' + names.FIRST_CHUNK_S.encode() + b'","value":{"doubleValue":%.6f}}'
_EVENT: Final = b'{"timeUnixNano":"%d","name":"%s"}'
_EVENTS: Final = (
    b'{"timeUnixNano":"%d","name":"connect"},{"timeUnixNano":"%d","name":"first byte"},'
    b'{"timeUnixNano":"%d","name":"end"}'
)


class SpanWriter:
    """Writes the spans of a gateway's requests."""

    def __init__(self, deployment: str) -> None:
        resource = {"service.name": "penstock", "service.version": __version__, "penstock.deployment": deployment}
        scope = {"name": "penstock.gateway", "version": __version__}
        self._before = b'{"resourceSpans":[{"resource":{"attributes":[%s]},"scopeSpans":[{"scope":%s,"spans":[' % (
            _attributes(resource),
            _json(scope),
        )
        self._known: dict[tuple[object, ...], tuple[bytes, bytes]] = {}

    def write(self, spans: Sequence[bytes]) -> bytes:
        """The body of one export."""
        return self._before + b",".join(spans) + b"]}]}]}"

    def span(self, record: Record, unix_offset_s: float) -> bytes:
        """`unix_offset_s`: Unix time less monotonic time."""
        row, exchange = record
        trace, facts = exchange.trace, exchange.facts
        assert trace is not None
        head, same = self._same(record)
        start_s = facts.received_at + unix_offset_s
        end_s = start_s + row.duration_ms / 1000
        first_chunk = b""
        if exchange.first_at and exchange.streams:
            first_chunk = _FIRST_CHUNK % (exchange.first_at - facts.received_at)
        return _SPAN % (
            *(trace.trace_id, trace.span_id, trace.parent_id, trace.is_sampled, start_s * 1e9, end_s * 1e9),
            *(head, same, row.prompt_tokens, row.cached_tokens, row.output_tokens, facts.request_id),
            *(exchange.hold_s, exchange.own_s, first_chunk, _events(exchange, unix_offset_s, end_s)),
        )

    def _same(self, record: Record) -> tuple[bytes, bytes]:
        """The name and the attributes that many requests share."""
        row, exchange = record
        facts, head = exchange.facts, exchange.head
        user_agent = head.get(b"user-agent")
        key = (
            *(row.model, row.replica, row.status, exchange.outcome, exchange.key, exchange.client, exchange.streams),
            *(head.method, head.path, facts.model, facts.output_tokens_max, user_agent),
        )
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = _head(record), _attributes(_shared(record, user_agent))
        return known


def _head(record: Record) -> bytes:
    row, exchange = record
    operation = names.OPERATIONS.get(exchange.head.path)
    name = f"{operation} {row.model}" if operation else f"{text(exchange.head.method)} {text(exchange.head.path)}"
    return b'"name":%s,"kind":%d%s' % (_json(name), _KIND_SERVER, _ERROR if _error(record) else b"")


def _error(record: Record) -> str | None:
    """Servers' spans fail by what the server did: https://opentelemetry.io/docs/specs/semconv/http/http-spans/#status"""
    row, exchange = record
    if exchange.outcome not in ("complete", "client_gone", "refused"):
        return exchange.outcome
    return str(row.status) if row.status >= 500 else None


def _shared(record: Record, user_agent: bytes | None) -> dict[str, Any]:
    row, exchange = record
    facts, head = exchange.facts, exchange.head
    values = {
        names.OPERATION: names.OPERATIONS.get(head.path),
        names.PROVIDER: "penstock",
        names.REQUEST_MODEL: facts.model,
        names.RESPONSE_MODEL: row.model,
        names.STREAM: exchange.streams,
        names.MAX_TOKENS: facts.output_tokens_max,
        names.METHOD: text(head.method),
        names.PATH: text(head.path),
        names.STATUS: row.status,
        names.USER_AGENT: None if user_agent is None else text(user_agent),
        names.CLIENT: exchange.client or None,
        names.KEY: exchange.key or None,
        names.REPLICA: row.replica or None,
        names.ERROR: _error(record),
    }
    return {name: value for name, value in values.items() if value is not None}


def _attributes(values: dict[str, Any]) -> bytes:
    return b",".join([b'{"key":%s,"value":%s}' % (_json(name), _value(value)) for name, value in values.items()])


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return b'{"boolValue":%s}' % _json(value)
    if isinstance(value, int):
        return b'{"intValue":"%d"}' % value
    return b'{"stringValue":%s}' % _json(value)


def _events(exchange: Exchange, unix_offset_s: float, end_s: float) -> bytes:
    """When a wait for a replica was over, when the engine had the request, its first and its last byte."""
    sent_at, first_at, last_at = exchange.sent_at, exchange.first_at, exchange.last_at
    if sent_at and first_at and not exchange.hold_s:  # as nearly always
        moments = sent_at + unix_offset_s, first_at + unix_offset_s, last_at + unix_offset_s
        return _EVENTS % (moments[0] * 1e9, moments[1] * 1e9, moments[2] * 1e9)
    events = []
    if exchange.hold_s:
        held_until = exchange.facts.received_at + exchange.own_s + exchange.hold_s
        events.append((held_until, b"hold"))
    if sent_at:
        events.append((sent_at, b"connect"))
    if first_at:
        events += [(first_at, b"first byte"), (last_at, b"end")]
    return b",".join([_EVENT % (min(at + unix_offset_s, end_s) * 1e9, name) for at, name in events])
