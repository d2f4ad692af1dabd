"""Parses recorded bytes into status, events with their times, and usage, after the run. Pure.

A token event carries text, reasoning or a tool call, or an empty piece of a completion; a chat's role event is none.
An event's time is that of the read that brought its last byte.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.bench.load.exchanges import Raw
from penstock.bench.results.stats import Timed, gaps_s
from penstock.errors import PenstockError
from penstock.wire import sse
from penstock.wire.http1 import CHUNK_SIZES, END, ProtocolError, Reader, ResponseHead, parse_response

CUT_SHORT = "answer cut short"
NOT_JSON = "answer is not JSON"
EMPTY = "empty"
ERROR_EVENT = "error event"
_SHOWN_CHARS = 200


class _Delta(msgspec.Struct):
    role: str | None = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Events:
    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: _Usage | None = None
        self.has_finished = False
        self.has_answer = False  # a token, or a reason for none
        self.error: str | None = None
        self.detail = ""

    def take(self, data: bytes | str, at_s: float) -> None:
        if data in (b"[DONE]", sse.DONE):
            self.has_finished = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.error, self.detail = NOT_JSON, str(data)[:_SHOWN_CHARS]
            return
        if event.error:
            self.error, self.detail = ERROR_EVENT, _error_text(event.error)
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            if choice.finish_reason is not None:
                self.has_finished = self.has_answer = True
            if _is_token(choice) or (choice.message is not None and choice.message.content):
                self.has_answer = True
                self.times.append(at_s)
                break


def _is_token(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is not None:
        if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls:
            return True
        return delta.content is not None and delta.role is None and choice.finish_reason is None
    return choice.text is not None and (choice.text != "" or choice.finish_reason is None)


def parse_exchange(raw: Raw, streams: bool) -> tuple[Timed, list[float]]:
    """An exchange in numbers, and the times of its token events. `streams`: server-sent events were asked for."""
    if raw.error is not None and not raw.reads:
        return _timed(raw, None, _Events(), 0, raw.error, raw.detail)
    events = _Events()
    try:
        head, body, pieces, is_whole = _unwrap(raw)
    except ProtocolError as broken:
        return _timed(raw, None, events, 0, raw.error or "malformed HTTP", str(broken))
    if head is None:
        return _timed(raw, None, events, 0, raw.error or CUT_SHORT, raw.detail)
    if head.status != 200:
        return _timed(raw, head, events, len(body), f"http {head.status}", _error_text_in(body))
    if streams and b"json" not in (head.get(b"content-type") or b""):
        _take_stream(pieces, events)
    else:
        events.take(body, raw.end_s)
        events.has_finished = True
        events.times.clear()  # an answer that comes whole has no first token
    error = raw.error or events.error
    if error is None and not (is_whole and events.has_finished):
        error = CUT_SHORT
    if error is None and not events.has_answer:
        error, events.detail = EMPTY, "the answer has no token, and no finish_reason"
    return _timed(raw, head, events, len(body), error, raw.detail or events.detail)


def body_of(raw: Raw) -> bytes | None:
    try:
        head, body, _, is_whole = _unwrap(raw)
    except ProtocolError:
        return None
    return body if head is not None and head.status == 200 and is_whole else None


def _unwrap(raw: Raw) -> tuple[ResponseHead | None, bytes, list[tuple[float, bytes]], bool]:
    """The final head, the body, its pieces with their times, and whether it is whole."""
    reader = Reader(parse_response, 65536)
    head: ResponseHead | None = None
    pieces: list[tuple[float, bytes]] = []
    is_whole = False
    is_aligned = False
    for at_s, data in zip(raw.times, raw.reads, strict=True):
        if is_aligned:
            # One whole chunk in a read, which is nearly every read of a stream: 0.4 us instead of 1.6.
            line_end = data.find(b"\r\n", 0, 6)
            size = CHUNK_SIZES.get(data[:line_end])
            if size is not None and len(data) == line_end + size + 4 and data.endswith(b"\r\n"):
                pieces.append((at_s, data[line_end + 2 : -2]))
                continue
        reader.feed(data)
        while not is_whole and (event := reader.next_event()) is not None:
            if event is END:
                is_whole = head is not None and head.status >= 200
            elif isinstance(event, bytes):
                pieces.append((at_s, event))
            else:
                head = event
        is_aligned = reader.is_between_chunks
    if not is_whole and raw.error is None:
        is_whole = reader.may_end_here
    return head, b"".join([piece for _, piece in pieces]), pieces, is_whole


def _take_stream(pieces: list[tuple[float, bytes]], events: _Events) -> None:
    """Events out of a body's pieces. Servers send whole events nearly always: those go without the parser."""
    parser: sse.Parser | None = None
    take = events.take
    for at_s, piece in pieces:
        if parser is None:
            # A read that is whole events of one line each, as servers send them.
            if piece.startswith(b"data: ") and piece.endswith(b"\n\n") and b"\r" not in piece:
                if piece.count(b"\n") == 2:
                    take(piece[6:-2], at_s)
                    continue
                lines = piece[6:-2].split(b"\n\ndata: ")
                if not any(b"\n" in line for line in lines):
                    for event in lines:
                        take(event, at_s)
                    continue
            parser = sse.Parser()
        try:
            for parsed in parser.feed(piece):
                events.take(parsed.data.strip(), at_s)
        except PenstockError as error:
            events.error = error.message
            return
        if parser.is_between_events:
            parser = None
    if parser is not None and pieces:
        for parsed in parser.close():
            events.take(parsed.data.strip(), pieces[-1][0])


def _timed(
    raw: Raw, head: ResponseHead | None, events: _Events, n_bytes: int, error: str | None, detail: str
) -> tuple[Timed, list[float]]:
    usage, times = events.usage, events.times
    replica = head.get(b"x-penstock-replica") if head is not None else None
    timed = Timed(
        index=raw.index,
        intended_s=raw.intended_s,
        asked_s=raw.asked_s,
        sent_s=raw.sent_s,
        end_s=raw.end_s,
        dial_s=raw.dial_s,
        answered_s=raw.times[0] if raw.times else None,
        first_token_s=times[0] if times else None,
        last_token_s=times[-1] if times else None,
        n_events=len(times),
        max_gap_s=max(gaps_s(times), default=None),
        input_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None,
        n_bytes=n_bytes,
        status=head.status if head is not None else None,
        error=error,
        detail=detail,
        replica=replica.decode("latin-1") if replica else None,
    )
    return timed, times


def _error_text_in(body: bytes) -> str:
    """A server's own words in the body of an error."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:_SHOWN_CHARS].decode("utf-8", "replace")
    return _error_text(value.get("error", value) if isinstance(value, dict) else value)


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:_SHOWN_CHARS]
