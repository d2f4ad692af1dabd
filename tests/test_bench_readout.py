"""What the kept reads say: events and their times, usage, and every way in which an answer can be broken."""

from __future__ import annotations

import json

import pytest

from penstock.bench.load.exchanges import Raw
from penstock.bench.results import engine_metrics
from penstock.bench.results.parse import parse_exchange
from penstock.engines.vllm import names as vllm_names
from penstock.wire.http1 import LAST_CHUNK, write_chunk

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-penstock-replica: 2\r\n\r\n"
)


def token(text: str | None = "a", **more: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": None}]})


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
FINISH = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
DONE = b"data: [DONE]\n\n"


def raw(*reads: bytes, **fields: object) -> Raw:
    times = [0.1 * (index + 1) for index in range(len(reads))]
    plain = {"intended_s": 0.0, "asked_s": 0.0, "sent_s": 0.0, "end_s": times[-1] if times else 0.0, "dial_s": 0.0}
    return Raw(index=0, times=times, reads=list(reads), **{**plain, **fields})  # type: ignore[arg-type]


def chunks(*events: bytes) -> list[bytes]:
    return [write_chunk(data) for data in events]


def test_a_stream_gives_its_token_times_and_its_usage() -> None:
    ends = write_chunk(FINISH) + write_chunk(USAGE) + write_chunk(DONE) + LAST_CHUNK
    found, times = parse_exchange(
        raw(HEAD + write_chunk(ROLE), *chunks(token("a"), token("b"), token("c")), ends), True
    )
    assert times == pytest.approx((0.2, 0.3, 0.4))
    assert (found.first_token_s, found.last_token_s, found.n_events) == (times[0], times[2], 3)
    assert found.max_gap_s == pytest.approx(0.1)
    assert (found.input_tokens, found.output_tokens, found.error, found.status) == (7, 3, None, 200)
    assert found.replica == "2"
    assert found.answered_s == pytest.approx(0.1)


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_however_the_bytes_are_cut_the_tokens_are_the_same(size: int, line_end: bytes) -> None:
    events = (token("a"), b": ping\n\n", token("b") + token("c"), USAGE, DONE)
    whole = HEAD + b"".join(chunks(*(event.replace(b"\n", line_end) for event in events))) + LAST_CHUNK
    found, times = parse_exchange(raw(*[whole[at : at + size] for at in range(0, len(whole), size)]), True)
    assert (len(times), found.output_tokens, found.error) == (3, 3, None)
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("choice", "is_token"),
    [
        *(({"delta": {"reasoning": "hm"}}, True), ({"delta": {"tool_calls": [{}]}}, True)),
        ({"delta": {"reasoning_content": "hm"}}, True),
        *(({"delta": {"content": ""}}, True), ({"delta": {"role": "assistant", "content": "a"}}, True)),
        *(({"text": "a"}, True), ({"text": ""}, True), ({"text": "", "finish_reason": "stop"}, False)),
        *(({"delta": {"role": "assistant", "content": ""}}, False), ({"delta": {}}, False)),
        ({"delta": {"content": ""}, "finish_reason": "stop"}, False),
    ],
)
def test_what_counts_as_a_token(choice: dict[str, object], is_token: bool) -> None:
    _, times = parse_exchange(raw(HEAD, *chunks(event({"choices": [choice]}), DONE), LAST_CHUNK), True)
    assert bool(times) is is_token


@pytest.mark.parametrize(
    ("reads", "fields", "error"),
    [
        ([], {"error": "connection refused"}, "connection refused"),
        ([HEAD, *chunks(token())], {"error": "connection closed"}, "connection closed"),
        ([HEAD, *chunks(token()), LAST_CHUNK], {}, "answer cut short"),
        ([HEAD, *chunks(token(), DONE)], {}, "answer cut short"),
        ([HEAD, *chunks(b"data: {oops\n\n", DONE), LAST_CHUNK], {}, "answer is not JSON"),
        ([HEAD, *chunks(event({"error": {"message": "died"}}), DONE), LAST_CHUNK], {}, "error event"),
        ([HEAD + b"zz\r\n"], {}, "malformed HTTP"),
        ([b'HTTP/1.1 429 Slow\r\ncontent-length: 32\r\n\r\n{"error": {"message": "slower"}}  '], {}, "http 429"),
        ([b"HTTP/1.1 2"], {}, "answer cut short"),
        # Without a token or a reason why there is none.
        ([HEAD, *chunks(DONE), LAST_CHUNK], {}, "empty"),
        ([HEAD, *chunks(USAGE, DONE), LAST_CHUNK], {}, "empty"),
        ([HEAD, *chunks(ROLE, DONE), LAST_CHUNK], {}, "empty"),
        ([HEAD, *chunks(event({"choices": []}), DONE), LAST_CHUNK], {}, "empty"),
        ([HEAD, *chunks(FINISH, DONE), LAST_CHUNK], {}, None),  # the model ended at once
        ([HEAD, *chunks(event({"choices": [{"text": "", "finish_reason": "length"}]}), DONE), LAST_CHUNK], {}, None),
        ([HEAD, *chunks(token(), DONE), LAST_CHUNK], {}, None),
    ],
)
def test_a_broken_answer_is_told_by_its_kind(reads: list[bytes], fields: dict[str, object], error: str | None) -> None:
    answer, _ = parse_exchange(raw(*reads, **fields), True)
    assert answer.error == error and (error != "http 429" or answer.detail == "slower")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"choices": []}, "empty"),
        ({"usage": {"completion_tokens": 0}}, "empty"),
        ({"choices": [{"message": {"content": "a"}}]}, None),
        ({"choices": [{"text": "a b"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, None),
        ({"choices": [{"message": {"content": ""}, "finish_reason": "length"}]}, None),
    ],
)
def test_a_whole_answer_has_usage_and_no_first_token_and_needs_a_choice(
    body: dict[str, object], error: str | None
) -> None:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
    found, times = parse_exchange(raw(head + data), False)
    assert (times, found.error, found.n_bytes) == ([], error, len(data))
    assert found.e2el_s(False) == pytest.approx(0.1)
    assert found.output_tokens == (2 if "choices" in body and "usage" in body else 0 if "usage" in body else None)


def test_pages_of_metrics_are_told_apart_and_summed_up() -> None:
    names = vllm_names.SERIES

    def page(hits: int, running: int) -> str:
        return f"{names['running']} {running}\n{names['prefix_queries']} {hits * 2}\n{names['prefix_hits']} {hits}\n"

    rows = [engine_metrics.read_page(page(10, 1), 0.0, "a"), engine_metrics.read_page(page(40, 3), 1.0, "a")]
    rows.append(engine_metrics.read_page("penstock_requests_in_flight 4\n", 0.5, "b"))
    assert engine_metrics.read_page("process_cpu_seconds_total 4\n", 0.5, "b") is None
    facts = engine_metrics.summarise([row for row in rows if row is not None])
    assert facts["a"]["kind"] == "vllm"
    assert (facts["a"]["running_mean"], facts["a"]["running_max"], facts["a"]["prefix_hits"]) == (2.0, 3.0, 30.0)
    assert facts["a"]["prefix_hit_rate"] == 0.5
    assert facts["b"] == {"kind": "gateway", "n_scrapes": 1, "running_mean": 4.0, "running_max": 4.0}


def energy_page(*joules: float | None, copies: int = 1) -> str:
    lines = ["penstock_requests_in_flight 1"]
    for replica in range(copies):
        for index, value in enumerate(joules):
            labels = f'{{replica="{replica}",node="n",gpu="{index}",uuid="GPU-\\"{index}"}}'
            lines.append(f"penstock_gpu_memory_total_bytes{labels} 8")
            if value is not None:
                lines.append(f"penstock_gpu_energy_joules_total{labels} {value}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("pages", "watts"),
    [
        ({0.0: (5.0, 5.0), 3.0: (100.0, 1e6), 9.0: (1900.0, 1e6 + 600), 13.0: (3100.0, 1e6 + 1000)}, 400.0),
        ({3.0: (0.0,), 7.0: (100.0,)}, None),
        ({0.0: (0.0,), 2.0: (100.0,)}, None),
        ({3.0: (0.0,), 9.0: (100.0, 50.0), 13.0: (100.0, 60.0)}, None),
        ({3.0: (900.0,), 9.0: (100.0,), 13.0: (1000.0,)}, None),
        ({3.0: (0.0, None), 9.0: (100.0, None)}, None),
        ({3.0: (), 9.0: ()}, None),
    ],
    ids=["two GPUs", "too short", "not under load", "one came", "counted anew", "one reports none", "no GPU"],
)
@pytest.mark.parametrize("copies", [1, 2])
def test_power_is_that_of_all_gpus_under_load(
    pages: dict[float, tuple[float | None, ...]], watts: float | None, copies: int
) -> None:
    texts = {at: energy_page(*values, copies=copies) for at, values in pages.items()}
    rows = [engine_metrics.read_page(text, at, "a") for at, text in texts.items()]
    power = engine_metrics.power_watts([row for row in rows if row is not None])
    assert power == (watts if watts is None else pytest.approx(watts))


def test_power_is_right_though_pages_hold_old_readings() -> None:
    """500 W, read each second and posted up to a second later."""
    late_s = (0.2, 1.1, 0.4, 0.9, 0.3, 1.2, 0.6, 0.2, 1.0)
    rows = [
        engine_metrics.read_page(energy_page(500.0 * (3 + n - late)), 3.0 + n, "a") for n, late in enumerate(late_s)
    ]
    assert engine_metrics.power_watts([row for row in rows if row is not None]) == pytest.approx(500, rel=0.03)


def test_the_hit_rate_is_that_of_the_answers_where_the_engine_counts_none() -> None:
    usage = {"prompt_tokens": 8, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 6}}
    ends = chunks(token(), FINISH, event({"choices": [], "usage": usage}), DONE)
    answer, _ = parse_exchange(raw(HEAD, *ends, LAST_CHUNK), True)
    plain, _ = parse_exchange(raw(HEAD, *chunks(token(), FINISH, USAGE, DONE), LAST_CHUNK), True)
    assert (answer.cached_tokens, plain.cached_tokens) == (6, None)
    assert engine_metrics.hit_rate({"a": {"prompt_tokens": 1.0}}, [answer, plain]) == 0.75
    assert engine_metrics.hit_rate({"a": {"prefix_queries": 10.0, "prefix_hits": 1.0}}, [answer]) == 0.1
    assert engine_metrics.hit_rate({}, [plain]) is None
