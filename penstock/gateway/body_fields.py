"""The JSON that a request's way reads and writes, as structs; mypyc would drop their options. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.routing.replicas import ModelState
from penstock.wire.announcement import Progress
from penstock.wire.model_list import ReplicaCount


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


class ModelRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row of /v1/models; `wire/model_list.py` says what its fields are."""

    id: str
    object: str
    created: int
    owned_by: str
    aliases: tuple[str, ...]
    state: ModelState
    replicas: ReplicaCount
    max_model_len: int | None = None
    progress: Progress | None = None
    input_modalities: tuple[str, ...] = ()
