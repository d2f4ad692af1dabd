"""The error family: what is printed, what --json gives, which exit code."""

from __future__ import annotations

import pytest

from penstock.errors import EngineError, PenstockError, PlanError, Problem, SpecError, UserError, nearest


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
