"""The error family: what is printed, what --json gives, which exit code."""

from __future__ import annotations

import pytest

from penstock import errors
from penstock.errors import EngineError, PenstockError, PlanError, Problem, SpecError, UserError, nearest


def test_a_problem_reads_as_one_line() -> None:
    assert str(Problem("engine.kind", "unknown", 'did you mean "vllm"?')) == (
        'engine.kind: unknown (did you mean "vllm"?)'
    )
    assert str(Problem("", "it is not YAML")) == "it is not YAML"


@pytest.mark.parametrize(("kind", "code"), [(PenstockError, 1), (EngineError, 1), (UserError, 2), (PlanError, 2)])
def test_the_exit_code_says_whose_fault_it_is(kind: type[PenstockError], code: int) -> None:
    error = kind("cannot do it", detail="d", hint="h", is_retryable=True)
    assert error.exit_code == code
    assert error.facts() == {
        "error": {"message": "cannot do it", "detail": "d", "hint": "h", "is_retryable": True, "exit_code": code}
    }


def test_problems_of_a_file_are_also_given_one_by_one() -> None:
    error = SpecError('file "a.yaml"', [Problem("x", "is bad", "mend it"), Problem("y", "is bad")])
    assert error.message == 'cannot use file "a.yaml": 2 problems'
    assert error.detail == "x: is bad (mend it)\ny: is bad"
    assert error.facts()["problems"] == [
        {"path": "x", "message": "is bad", "hint": "mend it"},
        {"path": "y", "message": "is bad", "hint": None},
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("max-model-len", "max_model_len"), ("kidn", "kind"), ("nothing-like-it", None), ("", None)],
)
def test_the_nearest_name_is_found_with_dashes_or_underscores(word: str, expected: str | None) -> None:
    legal = ["kind", "max_model_len", "executor"]
    assert nearest(word, legal) == expected
    assert nearest(word, iter(legal)) == expected


def test_a_problem_of_several_lines_is_one_in_the_list() -> None:
    error = errors.SpecError(
        "it", [errors.Problem("", "runs with other settings: a\nb"), errors.Problem("x", "is bad")]
    )
    assert error.detail == "runs with other settings: a\n  b\nx: is bad"
