"""Argument types refuse with one sentence; tables fit their width and lose nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.cli import arguments, main, output
from penstock.errors import UserError

READ: list[tuple[Callable[[str], Any], str, Any]] = [
    (arguments.whole(0, 65535), "65535", 65535),
    (arguments.whole(-9), "-3", -3),
    (arguments.count_or_zero, "0", 0),
    (arguments.token_count, "128K", 131072),
    (arguments.token_count, "128k", 128000),
    (arguments.share, "1", 1.0),
    (arguments.seconds, "0.5", 0.5),
    (arguments.counts, "1,2,4", (1, 2, 4)),
    (arguments.numbers, "0.5,1", (0.5, 1.0)),
    (arguments.names, "a, b", ("a", "b")),
    (arguments.day, "1970-01-02", 86400.0),
    (arguments.json_object, '{"a": 1}', {"a": 1}),
    *((arguments.period_s, text, value) for text, value in (("90s", 90), ("2m", 120), ("1h", 3600), ("2w", 1209600))),
]

REFUSED: list[tuple[Callable[[str], Any], str, str]] = [
    *((arguments.count, text, "a whole number from 1 to 999,999,999") for text in ("0", "x", "", "1.5", "²")),
    (arguments.count, "9" * 5000, "is not a whole number"),
    (arguments.whole(1, 64), "65", "is not a whole number from 1 to 64"),
    (arguments.token_count, "8X", "such as 8192 or 128K"),
    *((arguments.positive, text, "is not a number above 0") for text in ("0", "-1", "nan", "inf", "x", "")),
    (arguments.not_negative, "-1", "is not a number from 0 to"),
    (arguments.share, "1.1", "is not a number from 0 to 1"),
    (arguments.seconds, "soon", '"soon" is not a number of seconds above 0'),
    (arguments.counts, "1,,2", "is not a whole number"),
    (arguments.period_s, "1y", "is not a time such as"),
    (arguments.day, "2026-13-01", "is not a day such as 2026-11-20"),
    *((arguments.json_object, text, "is not a JSON object") for text in ("[]", "{", '{"a": NaN}', '{"a": 1e999}')),
]


@pytest.mark.parametrize(("read", "text", "words"), REFUSED)
def test_a_value_is_refused_in_one_sentence(read: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not") as caught:
        read(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_value_is_read() -> None:
    assert [read(text) for read, text, _ in READ] == [value for _, _, value in READ]


@pytest.mark.parametrize(
    "words",
    [
        *("up --replicas 2 --replicas 3", "up m --port 1 --port=1", "up m -tp 2 --tensor-parallel-size 4"),
        *("up m --served-model-name a --served-model-name b", "render d.yaml -f k.yaml", "render -f d.yaml k.yaml"),
        *("logs -n 5 --tail 7", "bench serve --rate 5 --request-rate 6", "keys create --name a --name b"),
        "gateway --upstream a=b --policy sticky --policy prefix",
    ],
)
def test_a_second_value_is_refused_and_does_not_win(words: str) -> None:
    with pytest.raises(UserError, match="given twice"):
        main.parser().parse_args(words.split())


def test_what_may_be_repeated_is_kept_whole() -> None:
    assert main.parser(["up"]).parse_args(["up", "--set", "a=1", "--set", "b=2", "-d", "-d"]).set == ["a=1", "b=2"]


def test_a_prompt_may_stand_before_and_after_options() -> None:
    for words in (
        ("model", "Say hi", "--name", "r1", "--port", "0"),
        ("model", "--name", "r1", "--port", "0", "Say hi"),
        ("--name", "r1", "--port=0", "model", "Say hi"),
        ("model", "--name", "r1", "Say", "--port", "0", "-tp", "2", "hi"),
    ):
        options = main.parser(["run"]).parse_args(["run", *words])
        assert (options.source, options.name, options.port, " ".join(options.prompt)) == ("model", "r1", 0, "Say hi")


def test_words_for_a_chat_are_told_the_option_that_sends_them() -> None:
    with pytest.raises(UserError, match="unrecognized arguments: hi there") as caught:
        main.parser(["chat"]).parse_args(["chat", "qwen", "hi", "there"])
    assert caught.value.hint == 'To send it: --message "hi there".'


HEAD = ("NAME", "STATE", "ADDRESS", "MODEL")
ROWS = [("penstock-demo", "running", "http://127.0.0.1:8000", "a model with a long name"), ("b", "-", "", "m")]


def test_a_table_fits_its_width_and_keeps_every_letter() -> None:
    shown = output.table(ROWS, HEAD, 71)
    assert all(len(line) <= 71 and line == line.rstrip() for line in shown.splitlines())
    cells = "".join(cell for row in [HEAD, *ROWS] for cell in row)
    assert sorted(shown.replace(" ", "").replace("\n", "")) == sorted(cells.replace(" ", ""))
    assert "penstock-demo  running  http://127.0.0.1:8000  a model" in shown


def test_a_table_that_is_too_wide_becomes_blocks_without_a_broken_word() -> None:
    assert output.table(ROWS, HEAD, 60).splitlines() == [
        *(
            "penstock-demo",
            "  STATE    running",
            "  ADDRESS  http://127.0.0.1:8000",
            "  MODEL    a model with a long name",
        ),
        *("b", "  STATE  -", "  MODEL  m"),
    ]


def test_a_table_in_a_pipe_has_one_line_a_row_and_is_the_same_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a" * 300, "1"), ("b", "22")]
    expected = ["X" + " " * 300 + "  N", "a" * 300 + "   1", "b" + " " * 300 + " 22"]
    shown = output.table(ROWS, HEAD, right=(1,), indent=2)
    assert output.table(rows, ("X", "N"), right=(1,)).splitlines() == expected
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert output.table(ROWS, HEAD, right=(1,), indent=2) == shown
