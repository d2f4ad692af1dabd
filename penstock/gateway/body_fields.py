"""What is read from and written into JSON on a request's way: structs that mypyc would not compile. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.routing.replicas import ModelState


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Told(msgspec.Struct):
    """The fields by which engines tell usage: chat and completions, responses, embeddings and rerank."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens_details: Details | None = None


class UsageEvent(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: Told | None = None


class UsageBody(msgspec.Struct):
    usage: Told | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; `cached_tokens` are among `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Fields(msgspec.Struct, frozen=True):
    """What the gateway reads of a request's body. Only the model's type is checked: the rest is for the engine."""

    model: str | None = None
    stream: Any = None
    stream_options: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None

    @property
    def wants_usage(self) -> bool:
        options = self.stream_options
        return isinstance(options, dict) and options.get("include_usage") is True

    @property
    def n_choices(self) -> int:
        return self.n if type(self.n) is int and 0 < self.n <= 1024 else 1

    @property
    def output_tokens_max(self) -> int | None:
        """The client's own limit, of one choice."""
        for limit in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if type(limit) is int and limit > 0:
                return limit
        return None


class Ask(msgspec.Struct, frozen=True):
    """A request as the gateway understands it. Lower `priority` goes first, as in vLLM; `timeout_s` None means none.

    `session`: what "sticky" goes by. `prefix`: what "prefix" goes by, only read when it is wanted. `response_id`: the
    earlier response that only its replica knows. `replica`: the one that the client names. `fields`: for the books.
    """

    model: str | None = None
    streams: bool = False
    priority: int = 0
    session: bytes = b""
    prefix: bytes = b""
    response_id: bytes = b""
    timeout_s: float | None = None
    replica: str | None = None
    fields: Fields = Fields()


class Body(Fields, frozen=True):
    """The fields of a body that matter here. All but the model are left as they are: judging them is the engine's."""

    user: msgspec.Raw = msgspec.Raw()
    priority: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()


class LongBody(Body, frozen=True):
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
