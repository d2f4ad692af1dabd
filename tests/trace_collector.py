"""A collector of spans: OTLP over HTTP, JSON from our gateway and protobuf from vLLM."""

from __future__ import annotations

import json
from typing import NamedTuple

from loopback_server import LoopbackHandler, LoopbackServer


class Span(NamedTuple):
    """Ids are in hex."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str


class TraceCollector(LoopbackServer):
    def __init__(self) -> None:
        super().__init__(_Handler)
        self.bodies: list[tuple[str, bytes]] = []

    def spans(self, trace_id: str) -> list[Span]:
        found = [span for kind, body in list(self.bodies) for span in _READERS[kind](body)]
        return [span for span in found if span.trace_id == trace_id]


class _Handler(LoopbackHandler):
    server: TraceCollector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces" and self.headers.get("content-encoding") is None:
            self.server.bodies.append((self.headers["content-type"], body))
        self.send(200)


def _of_json(body: bytes) -> list[Span]:
    spans = json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return [Span(span["traceId"], span["spanId"], span["parentSpanId"], span["name"]) for span in spans]


def _of_protobuf(body: bytes) -> list[Span]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(body)
    spans = [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
    return [Span(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name) for span in spans]


_READERS = {"application/json": _of_json, "application/x-protobuf": _of_protobuf}
