"""The JSON that a request's way reads and writes, as structs; mypyc would drop their options. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal

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


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class RequestBody(msgspec.Struct, frozen=True):
    """The fields of a body that the gateway decides by. Engines take 1 or "true" for true, and "5" for 5."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    priority: int | None = None


class _Replaceable(msgspec.Struct, frozen=True):
    model: msgspec.Raw = msgspec.Raw()
    stream_options: msgspec.Raw = msgspec.Raw()


class Key:
    """Stands for any key of an object, for a decoder's `dec_hook`."""


_COLON: Final = re.compile(rb"\s*:\s*")
_MAX_PLACES: Final = 256
_MAX_TRIES: Final = 4  # of 0.1 s for 30 MiB of tiny values
_read_replaceable = msgspec.json.Decoder(_Replaceable).decode


def replace_field(body: bytes, name: Literal["model", "stream_options"], change: Callable[[bytes], bytes]) -> bytes:
    """The body, an object, with a changed value of the field, or with the field; all other bytes stay.

    Raises msgspec.DecodeError, also where the field is hidden by escapes or among too many of its name.
    """
    old, key, at, n_tries = bytes(getattr(_read_replaceable(body), name)), b'"%s"' % name.encode(), len(body), 0
    value = change(old)
    if not old:
        begin = body.index(b"{") + 1
        gap = b"" if body[begin:].lstrip()[:1] == b"}" else b","
        return body[:begin] + key + b":" + value + gap + body[begin:]
    for _ in range(_MAX_PLACES):
        at = body.rfind(key, 0, at)
        colon = _COLON.match(body, at + len(key)) if at >= 0 else None
        if colon is not None and body.startswith(old, colon.end()):
            changed = body[: colon.end()] + value + body[colon.end() + len(old) :]
            if _has_value(changed, name, value):  # else it stands inside another field
                return changed
            n_tries += 1
        if at < 0 or n_tries == _MAX_TRIES:
            break
    raise msgspec.DecodeError(f"its {name} is written in a way that cannot be replaced")


def _has_value(body: bytes, name: str, value: bytes) -> bool:
    try:
        return bytes(getattr(_read_replaceable(body), name)) == value
    except msgspec.DecodeError:
        return False


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
