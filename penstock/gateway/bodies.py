"""What is read from and written into JSON on a request's way: structs that mypyc would not compile. Pure."""

from __future__ import annotations

import msgspec

from penstock.gateway.fleet import ModelState
from penstock.gateway.usage import Ask as Fields


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
