"""Server-sent events, whole and cut anywhere."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.wire.sse import Event, Parser

GOLDEN = Path(__file__).parent / "golden" / "vllm-0.32.0"


def parse(*pieces: bytes) -> list[Event]:
    parser = Parser()
    return [event for piece in pieces for event in parser.feed(piece)]


def one_byte_at_a_time(stream: bytes) -> list[Event]:
    return parse(*(stream[i : i + 1] for i in range(len(stream))))


def test_an_event_ends_at_its_blank_line_and_not_before() -> None:
    parser = Parser()
    assert parser.feed(b"data: one\n") == []
    assert parser.feed(b"\n") == [Event("one")]


def test_several_data_lines_become_one_event_with_newlines() -> None:
    assert parse(b"data: a\ndata:  b\ndata\n\n") == [Event("a\n b\n")]


def test_comments_and_events_without_data_yield_nothing() -> None:
    assert parse(b": keep-alive\n\n: ping\nevent: only-a-name\n\nid: 7\nretry: 3\n\ndata: x\n\n") == [Event("x")]


def test_an_event_name_belongs_to_one_event_only() -> None:
    assert parse(b"event: error\ndata: a\n\ndata: b\n\n") == [Event("a", "error"), Event("b")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_all_three_line_endings_work_whole_and_one_byte_at_a_time(end: bytes) -> None:
    stream = end.join([b"data: a", b"data: b", b"", b"data: c", b"", b""])
    assert parse(stream) == one_byte_at_a_time(stream) == [Event("a\nb"), Event("c")]


def test_a_crlf_cut_between_pieces_is_one_line_end() -> None:
    assert parse(b"data: a\r", b"", b"\ndata: b\r", b"\n\r", b"\n") == [Event("a\nb")]


def test_a_utf8_character_cut_between_pieces_is_whole() -> None:
    stream = "data: 日本 🚰\n\n".encode()
    assert one_byte_at_a_time(stream) == [Event("日本 🚰")]


def test_bytes_that_are_not_utf8_do_not_stop_the_stream() -> None:
    assert parse(b"data: \xff\xfe!\n\ndata: x\n\n") == [Event("\ufffd\ufffd!"), Event("x")]


def test_a_byte_order_mark_at_the_start_is_dropped() -> None:
    assert one_byte_at_a_time(b"\xef\xbb\xbfdata: x\n\n") == [Event("x")]


def test_close_gives_a_last_event_whose_blank_line_never_came() -> None:
    parser = Parser()
    assert parser.feed(b"data: [DONE]\n") == []
    assert parser.close() == [Event("[DONE]")]
    assert parser.close() == []


def test_close_drops_a_line_that_was_cut_in_the_middle() -> None:
    parser = Parser()
    parser.feed(b'data: {"half')
    assert parser.close() == []


def test_a_line_without_end_is_refused_before_it_fills_the_memory() -> None:
    parser = Parser(line_bytes_max=100)
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(PenstockError, match="too large"):
        parser.feed(b"x" * 10)


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    parser = Parser(line_bytes_max=100)
    with pytest.raises(PenstockError, match="too large"):
        parser.feed(b"data: 0123456789\n" * 11)


def test_a_recorded_vllm_stream_has_its_chunks_and_its_end() -> None:
    stream = (GOLDEN / "chat_stream_usage.sse").read_bytes()
    events = parse(stream)
    assert len(events) == 7
    assert events[-1].data == "[DONE]"
    assert one_byte_at_a_time(stream) == events


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_where_a_stream_is_cut_never_changes_its_events(data: st.DataObject) -> None:
    stream = "data: 日本\r\ndata: x\r\r\n: note\nevent: e\ndata: y\n\ndata:\r\n\r\n".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert parse(*pieces) == parse(stream)
