"""The JSON that a request's way reads and writes, as structs; mypyc would drop their options. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.routing.replicas import ModelState


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class UsageReport(msgspec.Struct):
    """The fields in which engines report usage: chat and completions, responses, embeddings and rerank."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens_details: Details | None = None


class UsageEvent(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: UsageReport | None = None


class UsageBody(msgspec.Struct):
    usage: UsageReport | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; `cached_tokens` are among `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class RequestBody(msgspec.Struct, frozen=True):
    """The fields of a body that matter here. Only the model's type is checked: the engine judges the rest."""

    model: str | None = None
    stream: Any = None
    stream_options: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    user: msgspec.Raw = msgspec.Raw()
    priority: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()


class LongRequestBody(RequestBody, frozen=True):
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class ModelFacts(msgspec.Struct, frozen=True):
    id: str
    created: int
    aliases: tuple[str, ...]
    state: ModelState
    object: str = "model"
    owned_by: str = "penstock"
