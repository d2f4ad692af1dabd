"""Why a question has no answer, as sentences that say what to do next."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

import msgspec

from penstock.errors import PenstockError
from penstock.text import printable, show_seconds
from penstock.wire.answers import BrokenAnswer, HttpError, NoAnswer, ServerWords

Kind = Literal[
    "overload", "quota", "too_long", "key", "lost", "offline", "model", "system", "images", "refused", "failed"
]
_WORDS_CHARS = 500
_SHORTER: Final = "Leave out the oldest messages, lower max tokens, or begin a new conversation."


class Failure(msgspec.Struct, frozen=True):
    """`text`: sentences for people; it may hold the server's words, which are no Markdown.

    `kind`: "overload" (try again after `retry_after_s`, where the server said it), "quota" (the key's budget is used),
    "too_long" (by `over_tokens`, where the server counted), "key" (not accepted), "lost" (the answer broke off or never
    began), "offline" (no server), "model" (there is none of that name, or the key may not use it), "system" and
    "images" (the model takes none), "refused" (the request is wrong), "failed" (the server's own fault).
    """

    text: str
    kind: Kind
    retry_after_s: float | None = None
    over_tokens: int | None = None
    request_id: str | None = None


# What vLLM and llama.cpp write, in several of their versions:
# https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/entrypoints/openai/serving_engine.py
# https://github.com/ggml-org/llama.cpp/blob/master/tools/server/server-context.cpp
_CONTEXT = re.compile(
    r"context length is(?: only)? (\d+)|max_model_len=(\d+)|context size \((\d+)|model length of (\d+)"
)
_INPUT = re.compile(
    r"(\d+) input tokens|resulted in (\d+) tokens|request \((\d+) tokens|\((\d+) in the |prompt \(length (\d+)"
)
_OUTPUT = re.compile(r"requested (\d+) output tokens|(\d+) in the completion|max(?:_completion)?_tokens=(\d+)")
_TOO_LONG = re.compile(r"context.?(length|size)|max_model_len|model length of|prompt is too long", re.IGNORECASE)
_NO_SYSTEM = re.compile(
    r"system role not supported|conversation roles must alternate|only user(,| and) ", re.IGNORECASE
)
_NO_IMAGES = re.compile(r"not a multimodal model|at most 0 image|image input is not supported", re.IGNORECASE)


class _Rule(NamedTuple):
    kind: Kind
    advice: str


# By the code of a penstock gateway, else by the status.
_LATER: Final = _Rule("overload", "Try again {later}.")
_RULES: Final = {
    **dict.fromkeys(("queue_full", "no_replica", "deadline_exceeded", "overloaded"), _LATER),
    "insufficient_quota": _Rule("quota", "Ask the owner of the server for more."),
    "body_too_large": _Rule("refused", "Send fewer or smaller images, or begin a new conversation."),
    "model_not_found": _Rule("model", "Choose another model."),
    "model_not_allowed": _Rule("model", "Choose another model."),
    "400": _Rule("refused", "Change the message or the settings."),
    "403": _Rule("refused", "Ask the owner of the server."),
    "404": _Rule("model", "Choose another model."),
    "422": _Rule("refused", "Change the message or the settings."),
    "429": _LATER,
    "502": _Rule("lost", "Try again."),
    "503": _LATER,
    "504": _LATER,
}
_OTHER: Final = _Rule("failed", "Try again.")


def failure_of(error: PenstockError, has_text: bool = False) -> Failure:
    """What to tell about an error of a request; `has_text`: part of the answer came before it."""
    if isinstance(error, HttpError):
        return _of_status(error)
    if isinstance(error, BrokenAnswer) or (has_text and error.is_retryable):
        words = error.words if isinstance(error, BrokenAnswer) else None
        if words is not None and not has_text and (refusal := _of_event(words)):
            return refusal
        reason = f" ({_shown(words.message)})" if words is not None and words.message else ""
        if has_text:
            return Failure(f"The answer broke off{reason}. What was said stays: continue it, or ask again.", "lost")
        return Failure(f"The engine was lost before it answered{reason}. Ask again.", "lost")
    if isinstance(error, NoAnswer):
        return Failure(f"{_sentence(error.message)} Try again.", "lost")
    if error.is_retryable:
        return Failure(f"{_sentence(error.message)} Nothing that you typed is lost. Try again in a moment.", "offline")
    return Failure(f"{_sentence(error.message)} {error.hint or ''}".strip(), "refused")


def _of_status(error: HttpError) -> Failure:
    words, after = error.words, error.retry_after_s
    if error.status == 401:
        text = "The server does not accept the key: it may be wrong, expired or revoked. Use another key."
        return Failure(text, "key", request_id=error.request_id)
    if error.status in (400, 413, 422, 500) and (special := _too_long(words) or _not_taken(words)):
        return msgspec.structs.replace(special, request_id=error.request_id)
    rule = _RULES.get(words.code or "") or _RULES.get(str(error.status)) or _OTHER
    failure = _by_rule(rule, _shown(words.message) or f"the server answered {error.status}", after)
    return msgspec.structs.replace(failure, request_id=error.request_id)


def _of_event(words: ServerWords) -> Failure | None:
    """The refusal of a request whose stream had begun, since it waited; None where something was lost."""
    rule = _RULES.get(words.code or "")
    return _too_long(words) or _not_taken(words) or (_by_rule(rule, _shown(words.message)) if rule else None)


def _by_rule(rule: _Rule, said: str, after: float | None = None) -> Failure:
    later = f"in {show_seconds(after)}" if after and after >= 60 else f"in {after:.0f} s" if after else "in a moment"
    return Failure(f"{_sentence(said)} {rule.advice.format(later=later)}", rule.kind, retry_after_s=after)


def too_long(prompt_tokens: int, max_tokens: int, context_tokens: int) -> Failure:
    """A prompt, and the tokens that its answer may have, that do not fit into the context together."""
    over = max(1, prompt_tokens + max_tokens - context_tokens)
    answer = f" and up to {max_tokens:,} of the answer" if max_tokens else ""
    text = (
        f"This is {over:,} token{'' if over == 1 else 's'} too long for the model: {prompt_tokens:,} tokens{answer}, "
        f"and it takes {context_tokens:,} together. {_SHORTER}"
    )
    return Failure(text, "too_long", over_tokens=over)


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int


def counted(failure: Failure, tokenized: object, max_tokens: int | None) -> Failure:
    """A "too_long" without a figure gets one from what POST /tokenize answered for the same messages: vLLM says only
    that a prompt has "at least" as many tokens as fit.

    https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html#tokenizer-api
    """
    try:
        answer = msgspec.convert(tokenized, _Tokenized)
    except msgspec.ValidationError:
        return failure
    if answer.count + (max_tokens or 1) <= answer.max_model_len:
        return failure
    figures = too_long(answer.count, max_tokens or 0, answer.max_model_len)
    return msgspec.structs.replace(figures, request_id=failure.request_id)


def needs_count(failure: Failure) -> bool:
    return failure.kind == "too_long" and failure.over_tokens is None


def _too_long(words: ServerWords) -> Failure | None:
    if not (_TOO_LONG.search(words.message) or words.kind == "exceed_context_size_error"):
        return None
    context = words.context_tokens or _number(_CONTEXT, words.message)
    prompt = words.prompt_tokens or _number(_INPUT, words.message)
    output = _number(_OUTPUT, words.message) or 0
    if context and output > context:
        text = (
            f"Max tokens is {output:,}, but the model takes {context:,} tokens, question and answer together. Lower it."
        )
        return Failure(text, "refused")
    if context and prompt and "at least" not in words.message:  # vLLM stops to count where the context ends
        return too_long(prompt, output, context)
    limit = f", which takes {context:,} tokens together with its answer" if context else ""
    return Failure(f"This is too long for the model{limit}. {_SHORTER}", "too_long")


def _not_taken(words: ServerWords) -> Failure | None:
    if _NO_SYSTEM.search(words.message):
        return Failure("This model takes no system message. Turn it off, or write it into your question.", "system")
    if _NO_IMAGES.search(words.message):
        return Failure("This model takes no images. Remove them, or choose another model.", "images")
    return None


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(group for group in found.groups() if group)[:18]) if found else None


def _shown(text: str) -> str:
    return printable(text)[:_WORDS_CHARS].strip()


def _sentence(text: str) -> str:
    """ "too many requests" -> "Too many requests." """
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
