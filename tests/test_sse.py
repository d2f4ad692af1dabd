"""Server-sent events, whole and cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.wire.sse import Event, Parser

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def parse(*pieces: bytes) -> list[Event]:
    parser = Parser()
    return [event for piece in pieces for event in parser.feed(piece)]


def one_byte_at_a_time(stream: bytes) -> list[Event]:
    return parse(*(stream[i : i + 1] for i in range(len(stream))))


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\ndata:  b\ndata\n\n", [Event("a\n b\n")]),
        (b": keep-alive\n\n: ping\nevent: only-a-name\n\nid: 7\nretry: 3\n\ndata: x\n\n", [Event("x")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [Event("a", "error"), Event("b")]),
        ("data: 日本 🚰\n\n".encode(), [Event("日本 🚰")]),
        (b"data: \xff\xfe!\n\ndata: x\n\n", [Event("\ufffd\ufffd!"), Event("x")]),
        (b"\xef\xbb\xbfdata: x\n\n", [Event("x")]),
        *((b"data: a|data: b||data: c||".replace(b"|", end), [Event("a\nb"), Event("c")]) for end in LINE_ENDS),
    ],
    ids=["several data lines", "comments", "names", "UTF-8", "not UTF-8", "byte order mark", "LF", "CR LF", "CR"],
)
def test_events_are_read_whole_and_one_byte_at_a_time(stream: bytes, events: list[Event]) -> None:
    assert parse(stream) == one_byte_at_a_time(stream) == events


def test_an_event_ends_at_its_blank_line_or_with_the_stream_which_drops_a_cut_line() -> None:
    parser = Parser()
    assert [parser.feed(piece) for piece in (b"data: one\n", b"\n")] == [[], [Event("one")]]
    assert parser.feed(b"data: [DONE]\n") == []
    assert [parser.close() for _ in range(2)] == [[Event("[DONE]")], []]
    parser.feed(b'data: {"half')
    assert parser.close() == []


@pytest.mark.parametrize("pieces", [(b"data: " + b"x" * 90, b"x" * 10), (b"data: 0123456789\n" * 11,)])
def test_a_line_or_an_event_without_end_is_refused_before_it_fills_the_memory(pieces: tuple[bytes, ...]) -> None:
    parser = Parser(line_bytes_max=100)
    for piece in pieces[:-1]:
        parser.feed(piece)
    with pytest.raises(PenstockError, match="too large"):
        parser.feed(pieces[-1])


@settings(max_examples=30)
@given(st.data())
def test_where_a_stream_is_cut_never_changes_its_events(data: st.DataObject) -> None:
    stream = "data: 日本\r\ndata: x\r\r\n: note\nevent: e\ndata: y\n\ndata:\r\n\r\n".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert parse(*pieces) == parse(stream)
