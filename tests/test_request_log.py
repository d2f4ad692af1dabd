"""What is written of requests: lines of the access log, spans, and who takes them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manual_world import ManualWorld
from store_rig import record as ended

from penstock.errors import UserError
from penstock.gateway.accounting import span_export
from penstock.gateway.accounting.access_log import AccessLog, write_lines
from penstock.gateway.accounting.record import Record
from penstock.gateway.accounting.span_export import SpanExporter, read_headers
from penstock.gateway.accounting.spans import SpanWriter
from penstock.gateway.request import RequestFacts
from penstock.gateway.trace_context import TraceContext
from penstock.wire.http1 import parse_request

WORLD = ManualWorld(100.0)
OFFSET_S = 1_790_000_000.0
TRACE = TraceContext(b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331", b"00f067aa0ba902b7", True)
HOSTILE = 'x"\\\x1b[31m\u2028{}'


def record(head: str = "", path: str = "/v1/chat/completions", **changes: Any) -> Record:
    """A stream: received at 10 s, sent at 10.25, first byte at 10.5, last at 11, with 6 tokens."""
    facts = RequestFacts(path.encode(), b"id-1", 10.0, 10)
    facts.model, facts.streams = "alias", True
    times = {"own_s": 0.25, "sent_at": 10.25, "first_at": 10.5, "last_at": 11.0, "ended_at": 11.01}
    more = {"head": parse_request(f"POST {path}?secret=1 HTTP/1.1\r\nhost: a{head}".encode()), "facts": facts}
    values = {"at": OFFSET_S + 10, "output_tokens": 6, "streams": True, "trace": TRACE, "key": "alice"}
    return ended(**times | more | values | changes)


def line_of(kept: Record) -> dict[str, Any]:
    (text,) = write_lines([kept])
    assert text.count(b"\n") == 1 and text.endswith(b"\n")
    line: dict[str, Any] = json.loads(text)
    return line


def span_of(kept: Record) -> dict[str, Any]:
    writer = SpanWriter("demo")
    body = json.loads(writer.write([writer.span(kept, OFFSET_S), writer.span(kept, OFFSET_S)]))
    (resource,) = body["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    first, again = scope["spans"]
    assert first == again
    names = {each["key"]: each["value"]["stringValue"] for each in resource["resource"]["attributes"]}
    assert (names["service.name"], names["penstock.deployment"]) == ("penstock", "demo")
    span: dict[str, Any] = first
    return span


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    pairs = [(each["key"], *each["value"].values()) for each in span["attributes"]]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_a_line_has_what_happened_and_no_query() -> None:
    line = line_of(record("\r\nuser-agent: openai/1"))
    assert line == {
        "time": "2026-09-21T14:13:30.000Z", "request_id": "id-1", "trace_id": TRACE.trace_id.decode(), "key": "alice",
        "model": "m", "replica": "0", "method": "POST", "path": "/v1/chat/completions", "status": 200,
        "outcome": "complete", "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 6, "hold_ms": 0.0,
        "ttft_ms": 500.0, "itl_mean_ms": 100.0, "duration_ms": 1010.0, "own_ms": 250.0, "user_agent": "openai/1",
        "client": "10.0.0.9",
    }  # fmt: skip
    refused = record(trace=None, outcome="no_replica", streams=False, sent_at=0.0, first_at=0.0, last_at=0.0)
    line = line_of(refused)
    assert [line[name] for name in ("trace_id", "ttft_ms", "itl_mean_ms")] == [None] * 3, "what did not happen is null"


def test_hostile_values_stay_one_line_of_json() -> None:
    agent = f"\r\nuser-agent: {HOSTILE}".replace("\x1b", "\t")
    kept = record(agent, key=HOSTILE)
    assert line_of(kept)["key"] == HOSTILE
    assert "secret" not in write_lines([kept])[0].decode()
    assert attributes(span_of(record(agent, key=f"{HOSTILE}%d")))["penstock.key"] == f"{HOSTILE}%d"
    (text,) = write_lines([record(key="a\r\nb\x00")])
    assert b"\r" not in text and text.count(b"\n") == 1
    bytes_of_latin_1 = parse_request(b"GET / HTTP/1.1\r\nhost: a\r\nuser-agent: \xff\xfe")
    assert line_of(ended(head=bytes_of_latin_1))["user_agent"] == "ÿþ"


def test_a_span_hangs_below_its_parent_and_has_moments() -> None:
    span = span_of(record("\r\nuser-agent: openai/1"))
    assert (span["traceId"], span["spanId"], span["parentSpanId"]) == (
        TRACE.trace_id.decode(), TRACE.span_id.decode(), TRACE.parent_id.decode(),
    )  # fmt: skip
    assert (span["name"], span["kind"], span["flags"], span.get("status")) == ("chat m", 2, 1, None)
    ms = [(int(each["timeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e6 for each in span["events"]]
    assert ms == pytest.approx([250, 500, 1000], abs=0.01)
    assert [each["name"] for each in span["events"]] == ["connect", "first byte", "end"]
    assert (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e6 == pytest.approx(1010, abs=0.01)
    assert attributes(span).items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "alias", "gen_ai.usage.input_tokens": "10",
        "gen_ai.usage.cache_read.input_tokens": "4", "gen_ai.usage.output_tokens": "6",
        "gen_ai.response.time_to_first_chunk": 0.5, "gen_ai.request.stream": True, "http.response.status_code": "200",
        "penstock.request_id": "id-1", "user_agent.original": "openai/1", "client.address": "10.0.0.9",
    }.items()  # fmt: skip


def test_a_failed_span_says_why_and_a_held_one_how_long() -> None:
    failed = record(status=503, outcome="no_replica", sent_at=0.0, first_at=0.0, hold_s=0.5, own_s=0.0)
    span = span_of(failed)
    assert (span["status"], attributes(span)["error.type"]) == ({"code": 2}, "no_replica")
    assert [each["name"] for each in span["events"]] == ["hold"]
    assert int(span["events"][0]["timeUnixNano"]) - int(span["startTimeUnixNano"]) == pytest.approx(5e8, abs=1000)
    assert attributes(span_of(record(status=500)))["error.type"] == "500"
    assert "status" not in span_of(record(status=499, outcome="client_gone"))
    assert span_of(record(path="/tokenize"))["name"] == "POST /tokenize"
    held = record(hold_s=0.1, own_s=0.15)
    assert [each["name"] for each in span_of(held)["events"]] == ["hold", "connect", "first byte", "end"]


# The file.


def test_a_file_that_another_program_renamed_is_left_to_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    AccessLog("stderr").append([b"{}\n"])
    assert capfd.readouterr().err == "{}\n"
    place = tmp_path / "access.log"
    log = AccessLog(str(place))
    log.append([b"1\n"])
    place.rename(tmp_path / "old")
    log.append([b"2\n"])
    place.unlink()
    log.append([b"3\n"])
    assert ((tmp_path / "old").read_text(), place.read_text()) == ("1\n", "3\n")


def test_a_full_disk_costs_lines_and_tears_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "access.log"
    log = AccessLog(str(place))
    log.append([b"1\n"])
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data, write=os.write: write(fd, data[:3]))
        log.append([b"2\n", b"333\n", b"4\n"])

        def fail(fd: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        full.setattr(os, "write", fail)
        log.append([b"5\n"])
    log.append([b"6\n"])
    assert place.read_text() == "1\n2\n3\n6\n"
    assert log.n_lost == 3
    with pytest.raises(UserError, match="cannot write access log"):
        AccessLog(str(tmp_path / "absent" / "access.log"))


# The collector.


Post = Callable[..., tuple[SpanExporter, list[int]]]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Post:
    """An exporter whose collector gives these answers, and then takes all; with the numbers of spans that it got."""

    def exporter(*answers: Exception | tuple[int, bytes]) -> tuple[SpanExporter, list[int]]:
        left, n_spans = list(answers), list[int]()

        def post(body: bytes) -> tuple[int, bytes]:
            answer = left.pop(0) if left else (200, b"{}")
            if isinstance(answer, Exception):
                raise answer
            n_spans.append(len(json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]))
            return answer

        sender = SpanExporter("http://127.0.0.1:4318", SpanWriter("demo"), {"a": "b"}, WORLD)
        monkeypatch.setattr(sender, "_post", post)
        return sender, n_spans

    return exporter


def test_spans_wait_for_a_collector_that_is_away_and_are_sent_once(exporter: Post) -> None:
    sender, n_spans = exporter(OSError("away"), (503, b""))
    sender.add([b"{}"] * 1500)
    for now in (100.0, 101.0, 105.0, 106.0, 114.0):
        WORLD.time_s = now
        sender.send()
        assert n_spans == ([] if now < 105 else [256])  # the one that was answered with 503
    WORLD.time_s = 116.0
    sender.send()
    assert (n_spans, sender.n_lost) == ([256, 256, 256, 256, 256, 256, 220], 0)


def test_lost_spans_are_counted(exporter: Post) -> None:
    partial = b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "no"}}'
    sender, _ = exporter((400, b"bad"), (200, partial), (200, b"<html>"), OSError("away"))
    for n_lost in (1, 3, 3):
        sender.add([b"{}"])
        sender.send()
        assert sender.n_lost == n_lost
    sender.add([b"{}"] * (span_export.MAX_WAITING + 5))
    assert sender.n_lost == 8
    sender.close()
    assert sender.n_lost == 8 + span_export.MAX_WAITING


def test_headers_of_exports_are_those_of_the_environment() -> None:
    environment = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, team=x,broken,=y,bad=%0a", "OTHER": "z=1"}
    assert read_headers(environment) == {"api-key": "a b", "team": "x"}
    own = {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "k=v"} | environment
    assert read_headers(own) == {"k": "v"}
    assert read_headers({}) == {}
