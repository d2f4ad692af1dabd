from __future__ import annotations

import contextlib
import json
import tracemalloc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.body_fields import replace_field
from penstock.gateway.request import Request, RequestFacts, UnreadableError, read_facts, read_form_model, read_timeout_s
from penstock.wire.http1 import parse_request

FORM = b"multipart/form-data; boundary=xYz"


def facts_of(body: bytes, *lines: bytes, method: bytes = b"POST", wants_prefix: bool = False) -> RequestFacts:
    head = parse_request(b"\r\n".join((method + b" /v1/completions HTTP/1.1", b"Host: a", *lines)))
    return read_facts(Request(head, body, b"id", 0.0), wants_prefix=wants_prefix)


def test_body_is_read_for_what_routes_it() -> None:
    body = b'{"model":"m","stream":true,"user":"u1","priority":-3,"messages":[{"role":"user"}],"x":{"y":[1]}}'
    facts = facts_of(body)
    assert (facts.model, facts.streams, facts.priority, facts.session) == ("m", True, -3, b'"u1"')
    assert (facts.path, facts.n_body_bytes, facts.wants_usage) == (b"/v1/completions", len(body), False)
    lines = (b"X-Session-Id: s", b"X-Penstock-Priority: 7", b"X-Request-Timeout: 1500ms")  # stronger than the body
    facts = facts_of(b'{"model":"m","user":"u1","priority":-3}', *lines)
    assert (facts.session, facts.priority, facts.timeout_s) == (b"s", 7, 1.5)
    facts = facts_of(b"", method=b"GET")
    assert (facts.model, facts.streams, facts.n_body_bytes) == (None, False, 0)


def test_fields_that_nothing_is_decided_by_are_for_the_engine_to_judge() -> None:
    odd = b'{"stream":null,"stream_options":null,"user":[],"priority":null,"previous_response_id":null,"n":-1}'
    for body in (odd, b"{}"):
        facts = facts_of(body)
        assert (facts.streams, facts.session, facts.priority) == (False, b"", 0)
        assert (facts.output_tokens_max, facts.n_choices, facts.wants_usage) == (None, 1, False)


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("stream", (b"1", b"0", b'"true"', b'"yes"', b'"on"', b"1.0", b"[]", b"{}", b'"\\u0074rue"')),
        ("stream_options", (b"5", b"[1]", b'"include_usage"', b'{"include_usage":1}', b'{"include\\u005fusage":[]}')),
        *((name, (b'"5"', b"5.0", b"1e3", b"true", b"[5]")) for name in (*LIMITS, "n", "priority")),
    ],
)
def test_fields_that_an_engine_would_read_as_another_type_are_refused(field: str, values: tuple[bytes, ...]) -> None:
    """vLLM takes 1, "yes" and "5" for true and 5."""
    for value in values:
        for key in (field.encode(), b"\\u00%02x%s" % (ord(field[0]), field[1:].encode())):
            with pytest.raises(UnreadableError, match=field):
                facts_of(b'{"model":"m","messages":[],"%s": %s}' % (key, value))


def test_a_field_stands_once_however_it_is_written() -> None:
    inner = b'{"model":"x","stream":1,"str\\u0065am":2,"x":"\\"stream\\""}'
    messages = b'"messages":[%s,%s]' % (inner, inner)
    for field in ("model", "stream", "stream_options", "max_tokens", "user", "x", "messages"):
        plain, escaped = field.encode(), b"".join(b"\\u%04X" % ord(letter) for letter in field)
        last = b"%s\\u00%02x" % (plain[:-1], plain[-1])
        for keys in ((plain, plain), (plain, escaped), (escaped, plain), (last, escaped), (plain, last)):
            with pytest.raises(UnreadableError, match=f"two of its fields are named '{field}'"):
                facts_of(b'{"%s" :null,%s,"%s": null}' % (keys[0], messages, keys[1]))
    facts = facts_of(b'{"y":%s,%s,"user":"u","stream":true,"model":"\\u006d"}' % (inner, messages))
    assert (facts.model, facts.streams, facts.session) == ("m", True, b'"u"')
    with pytest.raises(UnreadableError, match="more than 256 fields"):
        facts_of(b"{%s}" % b",".join(b'"%d":1' % number for number in range(257)))


@pytest.mark.parametrize("field", ["stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "messages"])
@pytest.mark.parametrize("value", [b"[" + b"[]," * 200_000 + b"1]", b"{" + b'"":{},' * 100_000 + b'"a":1}'])
def test_values_of_many_parts_become_no_objects(field: str, value: bytes) -> None:
    body = b'{"model":"m","%s":%s}' % (field.encode(), value)
    tracemalloc.start()
    with contextlib.suppress(UnreadableError):
        facts_of(body, wants_prefix=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Copies of the value, and no object for each of its parts: those would take 20 times its size.
    assert most < 4 * len(body)


def test_limits_of_tokens_are_whole_numbers_and_usage_is_wanted_where_the_options_tell_it() -> None:
    for value, limit in ((b"7", 7), (b"9" * 400, 10**18), *((odd, None) for odd in (b"0", b"-1", b"null"))):
        assert facts_of(b'{"max_tokens":%s,"n":%s}' % (value, value)).output_tokens_max == limit
    wanted, not_wanted = b'{"include_usage":true}', (b'{"include_usage":null}', b'{"include_usage":false}', b"null")
    for options in (wanted, *not_wanted):
        facts = facts_of(b'{"stream":true,"stream_options": %s }' % options)
        assert facts.wants_usage is (options == wanted)


def test_timeouts_are_read() -> None:
    values = ((b"30", 30), (b"1.5", 1.5), (b"2s", 2), (b"250ms", 0.25))
    assert [read_timeout_s(value) for value, _ in values] == [timeout_s for _, timeout_s in values]
    for wrong in (b"", b"0", b"-1", b"1m", b"nan", b"inf", b"1e9", b"999999999", b"1,5"):
        with pytest.raises(UnreadableError):
            read_timeout_s(wrong)


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b'--xYz\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (name, more, value)


MODEL, END = part(b"model", b"m"), b"--xYz--\r\n"


def test_model_of_a_form_is_found_wherever_it_stands() -> None:
    file = part(b"file", b"RIFF\x00\r\n\r\nname=model" * 1000, b'; filename="model"\r\nContent-Type: audio/wav')
    for body in (MODEL + file, file + part(b"timestamp_granularities[]", b"word") + MODEL):
        assert read_form_model(FORM, body + END) == "m"
    assert read_form_model(FORM, file + END) is None
    assert read_form_model(b'multipart/form-data; boundary="xYz"', MODEL + END) == "m"
    assert read_form_model(b"multipart/form-data;boundary=xYz; charset=UTF-8", MODEL + END) == "m"
    assert read_form_model(FORM, b"--xYz\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n--xYz--") == "m"
    assert read_form_model(FORM, part(b"model", b"") + END) == ""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        *(
            (FORM, body)
            for body in (b"", b"preamble\r\n" + MODEL + END, b"\r\n" + MODEL + END, MODEL, MODEL[:-2] + END)
        ),
        *((FORM, part(b"model", value) + END) for value in (b"\xff", b"m" * 5000, b"--xYz", b"a\r\n--xYz b")),
        (FORM, b"--xYz\r\n\r\nm\r\n" + END),
        (FORM, MODEL + MODEL + END),
        (FORM, MODEL.replace(b"\r\n\r\n", b"\n\n") + END),
        (FORM, MODEL.replace(b"Content", b"X: y\r\n Content") + END),
        (FORM, MODEL.replace(b'"model"', b'"mod\\el"') + END),
        (FORM, MODEL.replace(b'"model"', b'"x"; name="model"') + END),
        (FORM, MODEL.replace(b"name=", b"name*=utf-8''") + END),
        (FORM, MODEL.replace(b"\r\n\r\n", b"\r\nContent-Disposition: form-data; name=x\r\n\r\n") + END),
        (FORM, MODEL.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n") + END),
        (FORM, MODEL.replace(b"\r\n\r\n", b"\r\nContent-Type: text/plain; charset=utf-16\r\n\r\n") + END),
        (FORM, part(b"model", b"m", b'; filename="x"') + END),
        (FORM, part(b"x", b"") * 300 + END),
        *(
            (b"multipart/" + kind, MODEL + END)
            for kind in (
                *(b"form-data", b"mixed; boundary=xYz", b"form-data; boundary=xYz; boundary=C", b"form-data; x=y"),
                *(b"form-data; boundary=C; boundary=xYz", b'form-data; boundary="x\\Yz"', b"form-data, boundary=xYz"),
                *(b'form-data; x="; boundary=C"; boundary=xYz', b"form-data; charset=utf-16; boundary=xYz"),
            )
        ),
    ],
)
def test_forms_that_two_parsers_may_read_in_two_ways_are_refused(kind: bytes, body: bytes) -> None:
    with pytest.raises(UnreadableError):
        read_form_model(kind, body)


_PIECES = (b"", b"\r\n", b"\r\n\r\n", b"--", b"--xYz", b"--xYz--", b"name=", b'"', b";", b":", b"m", b"\0")


@settings(max_examples=400, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 20), st.sampled_from(_PIECES)), max_size=5))
def test_a_malformed_form_is_refused_and_nothing_else_is_raised(changes: list[tuple[int, int, bytes]]) -> None:
    body = MODEL + part(b"file", b"x", b'; filename="f"') + END
    for at, n_gone, piece in changes:
        body = body[:at] + piece + body[at + n_gone :]
    with contextlib.suppress(UnreadableError):
        read_form_model(FORM, body)


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"x":%s}' % (b"[" * 5000 + b"]" * 5000), b'{"model":"\xff"}', b'{"messages":%s}' % (b"[" * 5000)),
        *(b"", b"[]", b'{"model":1}', b'{"model":', b'{"stream_options":[}'),
    ],
)
def test_bodies_that_no_parser_takes_are_refused(body: bytes) -> None:
    for wants_prefix in (False, True):
        with pytest.raises(UnreadableError):
            facts_of(body, wants_prefix=wants_prefix)
    with pytest.raises(UnreadableError, match="content-type"):
        facts_of(b"{}", b"Content-Type: application/json", b"Content-Type: multipart/form-data; boundary=b")


def prefix_of(body: bytes) -> bytes:
    return facts_of(body, wants_prefix=True).prefix


def test_prefix_stays_the_same_as_a_conversation_grows() -> None:
    system, first = b'{"role":"system","content":"Be brief."}', b'{"role":"user","content":"hi"}'
    later = b',{"role":"assistant","content":"hello"},{"role":"user","content":"more"}'
    for start in (first, system + b"," + first):
        assert prefix_of(b'{"messages":[%s]}' % start) == prefix_of(b'{"messages":[%s%s]}' % (start, later))
    assert prefix_of(b'{"messages":[%s]}' % first) != prefix_of(b'{"messages":[{"role":"user","content":"ho"}]}')
    odd, turn = b'{"role":"system","content":"a \\"b\\", [c}"}', b'{"role": "user", "content": ["x, y", {}]}'
    assert prefix_of(b'{"messages":[ %s ]}' % odd) == odd
    assert prefix_of(b'{"messages":[ %s ]}' % b" ,\n".join([odd, *[turn] * 4])) == odd + turn, "and the first question"


def test_prefix_of_prompts_is_their_beginning() -> None:
    assert prefix_of(b'{"prompt":"%s"}' % (b"a" * 5000)) == b'"' + b"a" * 1023
    assert prefix_of(b'{"input":["x"]}') == b'["x"]'
    assert prefix_of(b"{}") == b""
    assert facts_of(b'{"prompt":"a"}').prefix == b""
    turn = b'{"role":"system","content":"%s"}' % (b"\\\\" * 5000)
    assert prefix_of(b'{"messages":[%s,{}]}' % turn) == turn[:1024]


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"m"}',
        '{"n":1, "model" :\t"m" ,"x":{"model":"m"}}',
        '{"x":{"model":"m"},"messages":[{"content":"\\"model\\":\\"m\\""}],"model":"m"}',
        '{"tools":[{"model":"m"},{"model":"m2"}],"model":"m","y":{"model":{"type":"string"}}}',
        "{}",
        ' { "x":{"model":"m"}}',
    ],
)
def test_field_is_replaced_where_it_stands(body: str) -> None:
    replaced = replace_field(body.encode(), "model", lambda _: b'"other"')
    assert json.loads(replaced) == json.loads(body) | {"model": "other"}
    for hidden in (b'{"model":"m",%s"n":1}' % (b'"x":{"model":"m"},' * 10), b'{"mod\\u0065l":"m"}'):
        with pytest.raises(msgspec.DecodeError, match="its model is written in a way"):
            replace_field(hidden, "model", lambda _: b'"other"')
