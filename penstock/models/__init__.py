from __future__ import annotations

from typing import Any, Literal

import msgspec


class ModelFacts(msgspec.Struct, frozen=True):
    """What planning needs to know of a model; read from its own files. Sizes in bytes, dtype included."""

    reference: str
    path: str
    form: Literal["safetensors", "gguf", "none"]
    architecture: str
    weights_bytes: int
    n_shards: int
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    max_position: int


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a safetensors header. `dtype` is the header's own word ("BF16", "F8_E4M3", "U8", "I32")."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True):
    """The beginning of one safetensors file: its tensors, and the bytes they take."""

    tensors: tuple[StoredTensor, ...]
    n_bytes: int


class Facts(msgspec.Struct, frozen=True):
    """What a model's own files say. `config` is config.json as it is; `hub_id` is the model's name on the hub, if any.

    `tensors` is every tensor of every safetensors header, when there were any; `index_bytes` the bytes of all tensors
    as the headers add up to, or else the index says (metadata.total_size), or a published count. `source` says where
    all this was read, for people; `notes` are what the reader must know (a copy from the catalogue was used, headers
    could not be read): they become warnings.
    """

    reference: str
    config: dict[str, Any]
    source: str
    tensors: tuple[StoredTensor, ...] | None = None
    index_bytes: int | None = None
    hub_id: str | None = None
    notes: tuple[str, ...] = ()
