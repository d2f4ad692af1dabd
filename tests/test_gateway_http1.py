"""Bytes in, events out: whole and one byte at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from smuggling import CORPUS, read_all

from penstock.wire import http1
from penstock.wire.http1 import END, ProtocolError, Reader, RequestHead, ResponseHead


def whole(data: bytes) -> list[bytes]:
    return [data]


def one_byte_at_a_time(data: bytes) -> list[bytes]:
    return [data[index : index + 1] for index in range(len(data))]


cuts = pytest.mark.parametrize("cut", [whole, one_byte_at_a_time])
Cut = Callable[[bytes], list[bytes]]

GOOD_BODIES = {
    b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello": b"hello",
    b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n": b"hello",
    b"POST /v1/x HTTP/1.1\r\nhost:a\r\nTRANSFER-ENCODING:  Chunked \r\n\r\n"
    b"3;name=value\r\nhel\r\n2\r\nlo\r\n00\r\nTrailer: x\r\n\r\n": b"hello",
    b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\n\r\n\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n": b"\r\n\r\n0123456789",
}


@cuts
def test_request_head_keeps_order_values_and_query(cut: Cut) -> None:
    data = b"GET /v1/models?a=b HTTP/1.1\r\nHost: a:1\r\nX-Two: \t1 \r\nx-two: 2\r\nEmpty:\r\n\r\n"
    head, end = read_all(Reader(http1.parse_request), cut(data))
    assert head.headers == ((b"host", b"a:1"), (b"x-two", b"1"), (b"x-two", b"2"), (b"empty", b""))
    assert (head.target, head.path, head.keeps_alive, head.length) == (b"/v1/models?a=b", b"/v1/models", True, 0)
    assert end is END


@cuts
def test_pipelined_requests_come_whole_one_after_the_other(cut: Cut) -> None:
    data = b"".join(GOOD_BODIES) * 2
    events = read_all(Reader(http1.parse_request), cut(data))
    assert events[1::3] == list(GOOD_BODIES.values()) * 2
    assert [(head.method, head.path) for head in events[::3]] == [(b"POST", b"/v1/x")] * 2 * len(GOOD_BODIES)
    assert events[2::3] == [END] * 2 * len(GOOD_BODIES)


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
# What is not 400; everything malformed is in `smuggling`.
REFUSED = {
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n": 501,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": 505,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: more\r\n\r\n": 417,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * http1.MAX_HEAD_BYTES + b"\r\n\r\n": 431,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * http1.MAX_HEADERS + b"\r\n": 431,
    CHUNKED + b"0\r\n" + b"X: %s\r\n" % (b"y" * 200) * 170 + b"\r\n": 431,
    CHUNKED + b"123456789\r\nx": 400,
    b"GET / HTTP/1.1\n": 400,
}


@cuts
def test_refusals_have_their_status(cut: Cut) -> None:
    for data, status in REFUSED.items():
        with pytest.raises(ProtocolError) as caught:
            read_all(Reader(http1.parse_request), cut(data))
        assert caught.value.status == status, data[:60]
    start = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "  # the largest that is allowed is taken
    data = start + b"x" * (http1.MAX_HEAD_BYTES - len(start)) + b"\r\n\r\n"
    assert read_all(Reader(http1.parse_request), cut(data))[1] is END


def test_connections_are_kept_alive_where_that_is_safe() -> None:
    for head, keeps_alive in (
        (b"GET / HTTP/1.1\r\nHost: a", True),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: foo, CLOSE", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive", False),
    ):
        assert http1.parse_request(head).keeps_alive is keeps_alive
    for head, keeps_alive in (
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2", False),
        (b"HTTP/1.1 200 OK", False),
    ):
        assert http1.parse_response(head).keeps_alive is keeps_alive
    assert http1.parse_request(b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-Continue").expects_continue
    assert not http1.parse_request(b"POST / HTTP/1.0\r\nExpect: 100-continue").expects_continue


@cuts
def test_response_bodies_are_framed_by_length_chunks_or_the_end(cut: Cut) -> None:
    reader = Reader(http1.parse_response)
    data = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        b"HTTP/1.1 204 No Content\r\n\r\n"
        b"HTTP/1.1 299 \r\nTransfer-Encoding: chunked\r\n\r\n2\r\nyo\r\n0\r\n\r\n"
        b"HTTP/1.1 500\r\n\r\nuntil the end"
    )
    events = read_all(reader, cut(data))
    assert [event.status for event in events if isinstance(event, ResponseHead)] == [100, 200, 204, 299, 500]
    assert [event for event in events if isinstance(event, bytes)] == [b"hi", b"yo", b"until the end"]
    assert events.count(END) == 4
    assert reader.may_end_here
    twice = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2"
    for malformed in (b"HTTP/2 200 OK", b"HTTP/1.1 20 OK", b"200 OK", twice):
        with pytest.raises(ProtocolError):
            http1.parse_response(malformed)


def test_written_heads_and_chunks_read_back_the_same() -> None:
    head = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    data = head + http1.write_chunk(b"x" * 300) + http1.LAST_CHUNK
    request, body, end = read_all(Reader(http1.parse_request), [data])
    assert isinstance(request, RequestHead)
    assert (request.target, body, end) == (b"/x", b"x" * 300, END)
    assert http1.write_response_head(503, [(b"retry-after", b"5")]) == (
        b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n\r\n"
    )
    assert http1.write_response_head(299, []) == b"HTTP/1.1 299 \r\n\r\n"


def test_a_read_that_is_one_whole_message_is_taken_at_once_and_nothing_else_is() -> None:
    reader = Reader(http1.parse_request)
    head = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
    whole = reader.take_whole(head + b"hello")
    assert whole is not None
    assert (whole[0].length, whole[1]) == (5, b"hello")
    for data in (head[:-1], head + b"hell", head + b"hello" + head, CHUNKED + b"0\r\n\r\n"):
        assert reader.take_whole(data) is None
        assert reader.is_between_messages
    reader.feed(head + b"hel")
    reader.next_event()
    assert reader.take_whole(b"lo") is None
    for data in CORPUS:
        with contextlib.suppress(ProtocolError):
            assert Reader(http1.parse_request).take_whole(data) is None


def test_chunks_that_pass_as_they_are_are_whole_and_plain() -> None:
    reader = Reader(http1.parse_response)
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert reader.next_event() is not None
    assert reader.next_event() is None
    cut = (b"5\r\nhell", b"5", b"5\r\nhelloXX")
    for data in (*cut, b"5;x\r\nhello\r\n", b"0\r\nX: y\r\n\r\n", b"0x5\r\nhello\r\n", b"-1\r\n"):
        assert reader.take_chunks(data) is None
    assert reader.take_chunks(b"5\r\nhello\r\na\r\n0123456789\r\n") is False
    assert reader.take_chunks(b"1\r\nx\r\n0\r\n\r\n") is True
    assert reader.is_between_messages


def test_heads_that_differ_in_their_length_alone_are_parsed_alike() -> None:
    heads: http1.Heads[http1.RequestHead] = http1.Heads(http1.parse_request)
    for name in (b"content-length", b"Content-Length", b"CONTENT-LENGTH"):
        for digits in (b"5", b"123", b"007", b"5", b"9" * 18):
            for end in (b"", b"\r\nConnection: close"):
                text = b"POST /v1/x?y HTTP/1.1\r\nHost: localhost\r\nX-B: c\r\n" + name + b": " + digits + end
                head, expected = heads.parse(text), http1.parse_request(text)
                assert (head.length, head.keeps_alive, head.path) == (int(digits), not end, b"/v1/x")
                assert [name for name, _ in head.headers] == [name for name, _ in expected.headers]
                assert head.pick(frozenset((b"x-b", b"x-c"))) == {b"x-b": b"c"}
                assert head.keep(frozenset((b"content-length", b"host", b"connection"))) == b"x-b: c\r\n"


@pytest.mark.parametrize("digits", [b"", b" ", b"+1", b"1_0", b"0x1", b"1, 1", b"9" * 19, b"1\n", b"\xb2"])
def test_a_known_head_does_not_lend_its_goodness_to_another_length(digits: bytes) -> None:
    heads: http1.Heads[http1.RequestHead] = http1.Heads(http1.parse_request)
    for rest in (b"", b"\r\nAccept: */*"):
        begin = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        assert heads.parse(begin + b"7" + rest).length == 7
        with pytest.raises(http1.ProtocolError):
            heads.parse(begin + digits + rest)
        with pytest.raises(http1.ProtocolError):
            heads.parse(begin + b"7\r\nContent-Length: 7" + rest)
    answers: http1.Heads[http1.ResponseHead] = http1.Heads(http1.parse_response)
    for length in (b"5", b"6", b"0", b"7"):  # one that does not count is never lent
        assert answers.parse(b"HTTP/1.1 304 Not Modified\r\ncontent-length: " + length).length == 0
        assert answers.parse(b"HTTP/1.1 200 OK\r\ncontent-length: " + length).length == int(length)
        assert answers.parse(b"HTTP/1.1 200 OK\r\nx: y").length is None


def test_shared_heads_keep_no_secrets_and_not_too_many() -> None:
    heads: http1.Heads[http1.ResponseHead] = http1.Heads(http1.parse_response, 4, keeps_secrets=False)
    heads.parse(b"HTTP/1.1 200 OK\r\nset-cookie: a=b")
    heads.parse(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 4096)
    assert not heads._heads
    for n in range(20):
        heads.parse(b"HTTP/1.1 200 OK\r\nx: %d" % n)
        assert 0 < len(heads._heads) <= 4
