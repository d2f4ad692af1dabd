"""Errors in words, and bytes, seconds and money as people read them."""

from __future__ import annotations

import pytest

from penstock import text
from penstock.errors import EngineError, PenstockError, PlanError, Problem, SpecError, UserError, nearest
from penstock.text import GIB, MIB


@pytest.mark.parametrize(("kind", "code"), [(PenstockError, 1), (EngineError, 1), (UserError, 2), (PlanError, 2)])
def test_the_exit_code_says_whose_fault_it_is(kind: type[PenstockError], code: int) -> None:
    error = kind("cannot do it", detail="d", hint="h", is_retryable=True)
    assert error.exit_code == code
    assert error.facts() == {
        "error": {"message": "cannot do it", "detail": "d", "hint": "h", "is_retryable": True, "exit_code": code}
    }


def test_problems_of_a_file_are_also_given_one_by_one() -> None:
    problems = [
        Problem("x", "is bad", "mend it"),
        Problem("", "runs with other settings: a\nb"),
        Problem("y", "is bad"),
    ]
    error = SpecError('file "a.yaml"', problems)
    assert error.message == 'cannot use file "a.yaml": 3 problems'
    assert error.detail == "x: is bad (mend it)\nruns with other settings: a\n  b\ny: is bad"
    assert error.facts()["problems"] == [
        {"path": "x", "message": "is bad", "hint": "mend it"},
        {"path": "", "message": "runs with other settings: a\nb", "hint": None},
        {"path": "y", "message": "is bad", "hint": None},
    ]


def test_the_nearest_name_is_found_with_dashes_or_underscores() -> None:
    legal = ["kind", "max_model_len", "executor"]
    words = {"max-model-len": "max_model_len", "kidn": "kind", "nothing-like-it": None, "": None}
    assert {word: nearest(word, iter(legal)) for word in words} == words


def test_bytes_are_written() -> None:
    shown = {0: "0 B", 7: "7 B", 1023: "1023 B", 1536: "1.5 KiB", 64 * MIB: "64.0 MiB", 100 * MIB: "100 MiB"}
    shown |= {int(171.4 * GIB): "171 GiB", 3 * 2**39: "1.5 TiB", -2 * GIB: "-2.0 GiB"}
    assert {n_bytes: text.show_bytes(n_bytes) for n_bytes in shown} == shown


def test_seconds_are_written() -> None:
    shown = {0: "0 ms", 0.0123: "12 ms", 0.9999: "1.0 s", 3.21: "3.2 s", 59.94: "59.9 s", 59.97: "1m00s", 75: "1m15s"}
    shown |= {3599.9: "59m59s", 7500: "2h05m", 200_000: "2d07h"}
    assert {seconds: text.show_seconds(seconds) for seconds in shown} == shown


def test_a_flag_has_one_name_however_it_is_written() -> None:
    assert text.bare_flag("--max_model_len") == text.bare_flag("max-model-len") == "max-model-len"


def test_money_is_dollars_and_cents() -> None:
    shown = {0: "$0.00", 1234.5: "$1,234.50", 0.5: "$0.50", 0.000012: "$0.000012", 0.0204: "$0.0204"}
    assert {value: text.show_usd(value) for value in shown} == shown
