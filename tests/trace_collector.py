"""A collector of spans: OTLP over HTTP, JSON from our gateway and protobuf from vLLM."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Ids are in hex."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str


class TraceCollector:
    """Runs in a thread while its context lasts."""

    def __init__(self) -> None:
        self._bodies: list[tuple[str, bytes]] = []
        bodies = self._bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces" and self.headers.get("content-encoding") is None:
                    bodies.append((self.headers["content-type"], body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> TraceCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self, trace_id: str) -> list[Span]:
        found = [span for kind, body in list(self._bodies) for span in _READERS[kind](body)]
        return [span for span in found if span.trace_id == trace_id]


def _of_json(body: bytes) -> list[Span]:
    spans = json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return [Span(span["traceId"], span["spanId"], span["parentSpanId"], span["name"]) for span in spans]


def _of_protobuf(body: bytes) -> list[Span]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(body)
    spans = [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
    return [Span(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name) for span in spans]


_READERS = {"application/json": _of_json, "application/x-protobuf": _of_protobuf}
