"""Spans of requests as OTLP's JSON. Pure. https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding

Most of a span is the same for many requests: that is kept as a template, with places for ids, times and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock import __version__
from penstock.gateway import genai_names as names
from penstock.gateway.accounting.record import Record, text

_MAX_KNOWN: Final = 4096
_KIND_SERVER: Final = 2

_json = msgspec.json.Encoder().encode

# Trace, span, parent; start and end; tokens; the request's id; then the events.
_BEGIN: Final = (
    b'{"traceId":"%s","spanId":"%s","parentSpanId":"%s","startTimeUnixNano":"%d","endTimeUnixNano":"%d","flags":1,'
)
_COUNT: Final = b'{"key":"%s","value":{"intValue":"%%d"}},'
_COUNTS: Final = b"".join(
    [_COUNT % name.encode() for name in (names.INPUT_TOKENS, names.CACHED_TOKENS, names.OUTPUT_TOKENS)]
)
_REQUEST_ID: Final = b'{"key":"%s","value":{"stringValue":"%%s"}}' % names.REQUEST_ID.encode()
_FIRST_CHUNK: Final = b',{"key":"%s","value":{"doubleValue":%%.6f}}' % names.FIRST_CHUNK_S.encode()
_EVENT: Final = b'{"timeUnixNano":"%d","name":"%s"}'
_USUAL_EVENTS: Final = (
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
        self._known: dict[tuple[object, ...], bytes] = {}

    def write(self, spans: Sequence[bytes]) -> bytes:
        """The body of one export."""
        return self._before + b",".join(spans) + b"]}]}]}"

    def span(self, record: Record, unix_offset_s: float) -> bytes:
        """`unix_offset_s`: Unix time less monotonic time."""
        trace, facts = record.trace, record.facts
        assert trace is not None
        offset_ns = int(unix_offset_s * 1e9)
        start_ns = int(facts.received_at * 1e9) + offset_ns
        end_ns = start_ns + int(record.duration_s * 1e9)
        first_s = record.first_token_s
        more: tuple[object, ...] = (first_s,) if first_s is not None else ()
        has_usual = record.sent_at > 0 and record.first_at > 0 and not record.hold_s
        if has_usual:
            moments = (record.sent_at, record.first_at, record.last_at)
            more += tuple([int(at * 1e9) + offset_ns for at in moments])
        else:
            more += (_events(record, offset_ns, end_ns),)
        return self._template(record, has_usual) % (
            *(trace.trace_id, trace.span_id, trace.parent_id, start_ns, end_ns),
            *(record.prompt_tokens, record.cached_tokens, record.output_tokens, facts.request_id, *more),
        )

    def _template(self, record: Record, has_usual: bool) -> bytes:
        facts, head = record.facts, record.head
        key = (
            *(record.model, record.replica, record.status, record.outcome, record.key, record.client, record.streams),
            *(head.method, head.path, facts.model, facts.output_tokens_max, head.get(b"user-agent"), has_usual),
            record.first_at > 0,
        )
        template = self._known.get(key)
        if template is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            same = b"%s,%s," % (_name(record), b'"attributes":[' + _attributes(_shared(record)))
            events = b'],"events":[%s]}' % (_USUAL_EVENTS if has_usual else b"%s")
            first_chunk = b"" if record.first_token_s is None else _FIRST_CHUNK
            same = same.replace(b"%", b"%%")
            template = self._known[key] = _BEGIN + same + _COUNTS + _REQUEST_ID + first_chunk + events
        return template


def _name(record: Record) -> bytes:
    operation = names.OPERATIONS.get(record.head.path)
    name = f"{operation} {record.model}" if operation else f"{text(record.head.method)} {text(record.head.path)}"
    status = b',"status":{"code":2}' if _error(record) else b""
    return b'"name":%s,"kind":%d%s' % (_json(name), _KIND_SERVER, status)


def _error(record: Record) -> str | None:
    """Servers' spans fail by what the server did: https://opentelemetry.io/docs/specs/semconv/http/http-spans/#status"""
    if record.outcome not in ("complete", "client_gone", "refused"):
        return record.outcome
    return str(record.status) if record.status >= 500 else None


def _shared(record: Record) -> dict[str, Any]:
    """The attributes that many requests share."""
    facts, head = record.facts, record.head
    user_agent = head.get(b"user-agent")
    values = {
        names.OPERATION: names.OPERATIONS.get(head.path),
        names.PROVIDER: "penstock",
        names.REQUEST_MODEL: facts.model or record.model,
        names.STREAM: record.streams,
        names.MAX_TOKENS: facts.output_tokens_max,
        names.METHOD: text(head.method),
        names.PATH: text(head.path),
        names.STATUS: record.status,
        names.USER_AGENT: None if user_agent is None else text(user_agent),
        names.CLIENT: record.client or None,
        names.KEY: record.key or None,
        names.REPLICA: record.replica or None,
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


def _events(record: Record, offset_ns: int, end_ns: int) -> bytes:
    """When a wait for a replica was over, when the engine had the request, its first and its last byte."""
    events = []
    if record.hold_s:
        events.append((record.facts.received_at + record.own_s + record.hold_s, b"hold"))
    if record.sent_at:
        events.append((record.sent_at, b"connect"))
    if record.first_at:
        events += [(record.first_at, b"first byte"), (record.last_at, b"end")]
    return b",".join([_EVENT % (min(int(at * 1e9) + offset_ns, end_ns), name) for at, name in events])
