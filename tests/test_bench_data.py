"""Data sets of load tests: exact counts, the public filters, the same for the same seed, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.datasets import synthetic, tokenizers
from penstock.bench.datasets.files import Wanted
from penstock.bench.datasets.tokenizers import ServerTokens, Tokens, tokens_of
from penstock.bench.load.arrivals import PlannedRequest
from penstock.errors import UserError
from penstock.models import files
from penstock.wire.client import Client

DEMO = tokens_of("penstock-demo")


def no_tokens() -> Tokens:
    raise AssertionError("nothing is to be counted here")


class Pairs(Tokens):
    """A tokenizer of two characters a token, where words join: the count of a sum is not the sum of counts."""

    source = "pairs"

    def count(self, text: str, special: bool = True) -> int:
        return -(-len(text) // 2) + special


def text_of(ask: PlannedRequest) -> str:
    assert isinstance(ask.prompt, str)
    return ask.prompt


@pytest.mark.parametrize("counter", [DEMO, Pairs()], ids=["demo", "pairs"])
@pytest.mark.parametrize("n_tokens", [2, 7, 128, 900])
@pytest.mark.parametrize("chat", [True, False])
def test_random_texts_have_exactly_the_tokens_asked_for(counter: Tokens, n_tokens: int, chat: bool) -> None:
    wanted = Wanted(n_requests=5, input_tokens=n_tokens, output_tokens=3, chat=chat)
    asks = synthetic.from_spec("random", wanted, lambda: counter)
    assert {counter.count(text_of(ask), special=not chat) for ask in asks} == {n_tokens}
    assert {(ask.input_tokens, ask.output_tokens) for ask in asks} == {(n_tokens, 3)}
    assert len({text_of(ask) for ask in asks}) == 5 or n_tokens < 7


def test_a_length_that_no_text_has_is_the_nearest() -> None:
    class Even(Pairs):
        def count(self, text: str, special: bool = True) -> int:
            return 2 * super().count(text, special)

    asks = synthetic.from_spec("random", Wanted(n_requests=3, input_tokens=17), Even)
    assert {(ask.input_tokens, abs(ask.n_off)) for ask in asks} <= {(16, 1), (18, 1)}
    assert all(Even().count(text_of(ask), special=False) == ask.input_tokens for ask in asks)


def test_random_texts_come_from_the_seed_vary_as_vllms_do_and_prefixes_are_shared() -> None:
    wanted = Wanted(60, input_tokens=20, output_tokens=10, range_ratio=0.5)
    asks = synthetic.from_spec("random", wanted, lambda: DEMO)
    lengths = {(ask.input_tokens, ask.output_tokens) for ask in asks}
    assert all(10 <= (n_in or 0) <= 30 and 5 <= n_out <= 15 for n_in, n_out in lengths) and len(lengths) > 20
    one, two = (synthetic.from_spec("random", Wanted(3, seed=7, input_tokens=20), lambda: DEMO) for _ in range(2))
    assert one == two != synthetic.from_spec("random", Wanted(3, seed=8, input_tokens=20), lambda: DEMO)
    asks = synthetic.from_spec("prefix:n=3,prefix=40,suffix=10", Wanted(12), lambda: DEMO)
    assert {DEMO.count(text_of(ask), special=False) for ask in asks} == {50}
    assert len({text_of(ask)[:60] for ask in asks}) == 3 and len({text_of(ask) for ask in asks}) == 12


def test_conversations_hold_what_was_said_and_wait_for_the_turn_before() -> None:
    asks = synthetic.from_spec(
        "turns:sessions=3,turns=4,first=30", Wanted(100, input_tokens=10, output_tokens=5), lambda: DEMO
    )
    assert len(asks) == 12
    for index, ask in enumerate(asks):
        assert isinstance(ask.prompt, list)
        roles = [message["role"] for message in ask.prompt]
        turn = index // 3
        assert roles == ["user", "assistant"] * turn + ["user"]
        assert ask.input_tokens == sum(DEMO.count(message["content"], special=False) for message in ask.prompt)
        assert ask.input_tokens == 30 + turn * 15
        assert ask.wait_for == (index - 3 if turn else None)
        if ask.wait_for is not None:
            assert asks[ask.wait_for].prompt == ask.prompt[:-2]


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "What is the capital of South Korea?"}] * 2},
    {"id": "short", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello there you"}]},
    {"id": "alone", "conversations": [{"from": "human", "value": "What is the capital of South Korea?"}]},
    {"id": "long", "conversations": [{"from": "human", "value": "word " * 1100}, {"from": "gpt", "value": "yes " * 9}]},
    {"id": "b", "conversations": [{"from": "human", "value": "Tell me about the sea. "}, {"value": "It is " * 20}]},
    {"id": "damaged", "conversations": [{"from": "human"}, None]},
    "not a row",
]


def test_sharegpt_keeps_what_vllm_keeps(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SHAREGPT))
    asks = synthetic.from_spec(f"sharegpt:{tmp_path}/s.json", Wanted(2, seed=1), lambda: DEMO)
    assert {text_of(ask) for ask in asks} == {"What is the capital of South Korea?", "Tell me about the sea. "}
    assert all(ask.input_tokens == DEMO.count(text_of(ask), special=False) for ask in asks)
    answers = {text_of(ask)[:4]: ask.output_tokens for ask in asks}
    again = synthetic.from_spec(f"sharegpt:{tmp_path}/s.json", Wanted(7, output_tokens=2), lambda: DEMO)
    assert len(again) == 7 and {ask.output_tokens for ask in again} == {2}
    assert answers == {"What": DEMO.count(SHAREGPT[0]["conversations"][0]["value"]), "Tell": DEMO.count("It is " * 20)}  # type: ignore[index]


def test_lines_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    messages = [{"role": "user", "content": "b"}]
    path.write_text(json.dumps({"prompt": "a", "max_tokens": 5}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    asks = synthetic.from_spec(f"jsonl:{path}", Wanted(3, output_tokens=None), no_tokens)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "a", "model": "lora-1", "headers": {"x-user": "7"}, "offset_s": 3}\n')
    (ask,) = synthetic.from_spec(f"jsonl:{mixed}", Wanted(1, speed=2.0), no_tokens)
    assert (ask.model, ask.headers, ask.offset_s) == ("lora-1", {"x-user": "7"}, 1.5)
    assert asks == [PlannedRequest("a", None, 5), PlannedRequest(messages, None, 200), PlannedRequest("a", None, 5)]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '"text"', "{}", '{"prompt": 5}', '{"prompt": "a", "max_tokens": "many"}'),
        *('{"prompt": "a", "model": 5}', '{"prompt": "a", "headers": {"a": "b\\n"}}', '{"prompt": "a", "headers": []}'),
        '{"prompt": "a", "headers": {"Content-Length": "5"}}',
        *('{"prompt": "a", "offset_s": 0.5}', '{"prompt": "a", "offset_s": 1e999}'),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a", "offset_s": 1.0}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        synthetic.from_spec(f"jsonl:{path}", Wanted(), no_tokens)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,40,12
2023-11-16 18:17:04.0319600,30,8
2023-11-16 18:17:05.0000000,20,0
"""
MOONCAKE = "\n".join(
    json.dumps({"timestamp": at, "input_length": 40 - i * 10, "output_length": (12, 8, 0)[i], "hash_ids": []})
    for i, at in enumerate((27000, 27052, 28020))
)
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,40,12,52,x
5.052,a,30,8,38,x
6.02004,a,20,0,20,x
"""


@pytest.mark.parametrize(("name", "text"), [("azure.csv", AZURE), ("moon.jsonl", MOONCAKE), ("burst.csv", BURST)])
def test_public_traces_are_replayed(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    asks = synthetic.from_spec(f"replay:{tmp_path / name}", Wanted(10), lambda: DEMO)
    first = synthetic.from_spec(f"replay:{tmp_path / name}", Wanted(10, until_s=1.0), lambda: DEMO)
    assert first == asks[:-1]
    assert [ask.offset_s for ask in asks] == pytest.approx([0, 0.052, 1.02004], abs=1e-3)
    assert [(ask.input_tokens, ask.output_tokens) for ask in asks] == [(40, 12), (30, 8), (20, 1)]
    assert [DEMO.count(text_of(ask), special=False) for ask in asks] == [40, 30, 20]


def test_a_trace_is_replayed_at_a_speed_and_shares_the_beginnings_of_its_hash_ids(tmp_path: Path) -> None:
    rows = [(0, 70, [1, 2, 3]), (40, 96, [1, 2, 4]), (90, 64, [5, 2])]
    lines = [{"timestamp": at, "input_length": n, "output_length": 1, "hash_ids": ids} for at, n, ids in rows]
    (tmp_path / "moon.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asks = synthetic.from_spec(f"replay:{tmp_path / 'moon.jsonl'}", Wanted(10, speed=2.0), lambda: DEMO)
    assert [ask.offset_s for ask in asks] == [0, 0.02, 0.045]
    words = [text_of(ask).split() for ask in asks]
    assert [len(each) for each in words] == [70, 96, 64]
    assert words[0][:64] == words[1][:64] and words[0][64:70] != words[1][64:70]
    assert words[2][32:] == words[0][32:64] and words[2][:32] != words[0][:32]
    assert [ask.n_off for ask in asks] == [0, 0, 0]


@pytest.mark.parametrize(
    ("times", "unit", "offsets"),
    [
        *(((17 * 10**n, 17 * 10**n + 2 * 10 ** (n - 8)), None, (0, 2)) for n in (8, 11, 14)),  # since 1970
        *(((0.5, 2.5), "s", (0, 2)), ((0.5, 2.5), "ms", (0, 0.002))),
        (("2023-11-16 18:17:03.5", "2023-11-16 18:17:05.5"), None, (0, 2)),
        ((0, 0.25), None, None),
        (tuple(range(25)), None, None),  # 25 requests in 24 ms: those were seconds
        (tuple(range(0, 16, 2)), None, None),
        (tuple(index * 300_000 for index in range(8)), None, None),  # one every 300 s: those were microseconds
        (tuple(index * 300_000 for index in range(8)), "us", tuple(index * 0.3 for index in range(8))),
        *(((0, 0, 0, 0, 0, 0), None, (0,) * 6), ((0, 300_000), "ms", (0, 300))),
    ],
)
def test_the_unit_of_a_traces_times_is_recognised_or_asked_for(
    tmp_path: Path, times: tuple[Any, ...], unit: str | None, offsets: tuple[float, ...] | None
) -> None:
    lines = [json.dumps({"timestamp": at, "input_length": 5, "output_length": 1}) for at in times]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    if offsets is None:
        with pytest.raises(UserError) as caught:
            synthetic.from_spec(f"replay:{tmp_path / 't.jsonl'}", Wanted(99), lambda: DEMO)
        assert "--trace-unit" in str(caught.value.hint) + str(caught.value.detail)
        return
    asks = synthetic.from_spec(f"replay:{tmp_path / 't.jsonl'}", Wanted(99, trace_unit=unit), lambda: DEMO)
    assert [ask.offset_s for ask in asks] == pytest.approx(offsets)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("sharegpt", "{}"), ("sharegpt", "[]"), ("sharegpt", json.dumps(SHAREGPT[1:4]))]
    + [("replay", text) for text in ("", "a,b\n1,2\n", AZURE + "2023-11-16 18:17:01.0,5,5\n", AZURE + "soon,5,5\n")],
)
def test_a_damaged_or_useless_file_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "file.csv").write_text(text)
    with pytest.raises(UserError, match="cannot use"):
        synthetic.from_spec(f"{kind}:{tmp_path / 'file.csv'}", Wanted(), lambda: DEMO)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "sharegtp:x", "random:n=2", "prefix:n=0", "prefix:n=x", "prefix:m=2", "turns:turns=-1", "prompt:"),
        *("sharegpt:", "sharegpt:/nowhere.json", "jsonl:/nowhere", "replay:/nowhere.csv", "jsonl:/"),
    ],
)
def test_what_cannot_be_understood_is_refused(spec: str) -> None:
    with pytest.raises(UserError) as caught:
        synthetic.from_spec(spec, Wanted(), lambda: DEMO)
    assert (caught.value.message.startswith("cannot") and caught.value.hint) or "read" in caught.value.message
    assert ("nowhere.json" not in spec) or "Nothing is downloaded" in str(caught.value.hint)
    for wanted in (Wanted(0), Wanted(1, input_tokens=0)):
        with pytest.raises(UserError):
            synthetic.from_spec("random", wanted, lambda: DEMO)


# ---- counting --------------------------------------------------------------------------------------------------------


def test_tokenizers_are_found_beside_the_model_and_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("penstock-demo", str(files.BUNDLED)):
        assert tokenizers.locate(name) == files.BUNDLED / "tokenizer.json"
    assert tokenizers.locate(str(tmp_path)) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert tokenizers.locate("org/name") is None
    folder = tmp_path / "models--org--name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    (folder / "tokenizer.json").write_bytes((files.BUNDLED / "tokenizer.json").read_bytes())
    assert tokenizers.locate("org/name") == folder / "tokenizer.json"


def test_nothing_to_count_with_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, words in (("org/nowhere", "cannot count tokens"), (str(tmp_path), "cannot read tokenizer")):
        with pytest.raises(UserError, match=words):
            tokens_of(name)


class Server(Client):
    """/tokenize of vLLM, answered by the demo's tokenizer; `knows` False: a server that has no such path."""

    def __init__(self, knows: bool = True) -> None:
        super().__init__("http://nowhere:1")
        self.knows = knows

    def post_json(self, path: str, body: Any, headers: Any = None) -> Any:
        assert path == "/tokenize" and body["model"] == "m"
        if not self.knows:
            return {"detail": "Not Found"}
        return {"tokens": [0] * DEMO.count(body["prompt"])}


def test_a_server_counts_where_there_is_no_file() -> None:
    counter = tokens_of("org/nowhere", Server(), "m")
    assert isinstance(counter, ServerTokens) and counter.count("Hello there") == DEMO.count("Hello there")
    asks = synthetic.from_spec("random", Wanted(2, input_tokens=33), lambda: counter)
    assert [DEMO.count(text_of(ask)) for ask in asks] == [33, 33]
    with pytest.raises(UserError, match="no list of tokens"):
        tokens_of(None, Server(knows=False), "m")
