"""What people read before an answer, and instead of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_files import table
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.failures import failure_of, too_long
from penstock.chat.waiting import show_waiting
from penstock.errors import PenstockError, UserError
from penstock.gateway.responses import error_body
from penstock.wire.answers import BrokenAnswer, HttpError, NoAnswer, ServerWords, http_error
from penstock.wire.waiting import Waiting

URL = "http://127.0.0.1:8000/v1/chat/completions"
VLLM = json.loads((Path(__file__).parent / "golden" / "vllm-0.32.0" / "errors.json").read_text("utf-8"))


@pytest.mark.parametrize(("waiting", "words"), table("chat/waits.yaml"))
def test_a_wait_says_how_far_it_is_and_who_goes_before(waiting: dict[str, Any], words: str) -> None:
    assert show_waiting(Waiting(**waiting)) == words


def answered(status: int, message: str, code: str, retry_after: str | None = None) -> HttpError:
    return http_error(URL, status, "Refused", error_body(status, message, code), retry_after, "req-1")


def check_refusal(error: HttpError, kind: str, text: str) -> None:
    failure = failure_of(error)
    assert failure.kind == kind and failure.text.startswith(text)
    assert failure.retry_after_s == error.retry_after_s and failure.request_id == error.request_id
    assert "sk-secret" not in failure.text, "a key that is refused is not repeated"


@pytest.mark.parametrize("case", table("chat/refusals.yaml"), ids=lambda case: case["code"])
def test_a_refusal_says_what_to_do_next(case: dict[str, Any]) -> None:
    error = answered(case["status"], case["message"], case["code"], case.get("retry_after"))
    check_refusal(error, case["kind"], case["text"])


def test_a_refusal_without_an_error_in_it_says_its_status_or_its_text() -> None:
    check_refusal(http_error(URL, 500, "", b""), "failed", "The server answered 500. Try again.")
    check_refusal(http_error(URL, 503, "Busy", b"<html>", None, None), "overload", "<html>. Try again in a moment.")


@pytest.mark.parametrize(("message", "start", "over_tokens"), table("chat/too_long.yaml"))
def test_a_prompt_that_is_too_long_says_how_much(message: str, start: str, over_tokens: int | None) -> None:
    failure = failure_of(answered(400, message, "400"))
    assert (failure.kind, failure.over_tokens) == ("too_long", over_tokens) and failure.text.startswith(start)
    assert "Leave out the oldest messages" in failure.text
    event = BrokenAnswer("the answer broke off", words=ServerWords(message))
    assert failure_of(event).kind == "too_long"


def test_figures_of_the_server_are_used() -> None:
    body = b'{"error":{"message":"too big","type":"exceed_context_size_error","n_prompt_tokens":4097,"n_ctx":4096}}'
    assert failure_of(http_error(URL, 400, "Bad Request", body)).over_tokens == 1
    figures = "4,000 tokens and up to 512 of the answer, and it takes 4,096 together."
    assert too_long(4000, 512, 4096).text.startswith(f"This is 416 tokens too long for the model: {figures}")


def test_what_vllm_says_is_understood() -> None:
    kinds = {
        name: failure_of(http_error(URL, row["status"], "", json.dumps(row["body"]).encode())).kind
        for name, row in VLLM.items()
        if row["status"] >= 400
    }
    assert {kinds.pop(name) for name in [*kinds] if "too long" in name} == {"too_long"}
    assert {kinds.pop(name) for name in ("unknown model", "embeddings", "no such route")} == {"model"}
    assert kinds.pop("wrong method") == "failed" and set(kinds.values()) == {"refused"}


ENGINE_LOST = BrokenAnswer("x", words=ServerWords("replica a-0 ended"))
STAYS = "The answer broke off (replica a-0 ended). What was said stays: continue it, or ask again."
CUT = PenstockError("lost the connection to X", is_retryable=True)
AWAY = PenstockError("could not connect to X: connection refused", is_retryable=True)
SILENT = NoAnswer("no answer from X within 5m", is_retryable=True)


@pytest.mark.parametrize(
    ("error", "has_text", "kind", "text"),
    [
        (ENGINE_LOST, True, "lost", STAYS),
        (BrokenAnswer("x"), False, "lost", "The engine was lost before it answered. Ask again."),
        (CUT, True, "lost", ""),
        (SILENT, False, "lost", ""),
        (AWAY, False, "offline", "Could not connect to X: connection refused. Nothing that"),
        (UserError("cannot use it", hint="Use another."), False, "refused", "Cannot use it. Use another."),
    ],
)
def test_a_loss_says_what_stays(error: PenstockError, has_text: bool, kind: str, text: str) -> None:
    failure = failure_of(error, has_text=has_text)
    assert failure.kind == kind and failure.text.startswith(text)


@given(st.integers(400, 599), st.binary() | st.text().map(str.encode), st.none() | st.text(max_size=4), st.booleans())
def test_no_server_breaks_the_sentence(status: int, body: bytes, after: str | None, has_text: bool) -> None:
    failure = failure_of(http_error(URL, status, "", body, after), has_text)
    assert failure.text.isprintable() or "\n" in failure.text or "\t" in failure.text
    assert 10 < len(failure.text) < 800
