from __future__ import annotations

from typing import Any, Literal

import msgspec


class ModelFacts(msgspec.Struct, frozen=True):
    """What a plan keeps of a model; read from its own files. Sizes in bytes."""

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
    """One tensor of a safetensors header; `dtype` is the header's own word ("BF16", "F8_E4M3", "U8")."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True):
    """One safetensors file: its tensors, and the bytes they take."""

    tensors: tuple[StoredTensor, ...]
    n_bytes: int


class Facts(msgspec.Struct, frozen=True):
    """What a model's own files say. `config` is config.json as it is; `tensors` every safetensors header, if any was
    read. `index_bytes`: bytes of all tensors by the headers, else the index (metadata.total_size), else a published
    count. `source` says where this was read; `notes` become warnings."""

    reference: str
    config: dict[str, Any]
    source: str
    tensors: tuple[StoredTensor, ...] | None = None
    index_bytes: int | None = None
    hub_id: str | None = None
    notes: tuple[str, ...] = ()
