"""Reads the header of a GGUF file, in the terms of config.json."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from penstock.errors import UserError
from penstock.text import MIB

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: value types of the key-value header.
_GGUF_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_MAX_GGUF_TEXT_BYTES = 16 * MIB  # chat templates are the longest, some 10 KB; a damaged length must not fill the memory

# config.json's word -> the key of a GGUF header, after its architecture.
_WORDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
}


def read_config(path: Path) -> dict[str, object]:
    """The numbers of a GGUF file under the keys of config.json.  Raises UserError when it is no GGUF file."""
    try:
        with path.open("rb") as stream:
            keys = _read_keys(stream)
    except (OSError, ValueError, struct.error) as exc:
        raise UserError(f'cannot read "{path}": it is not a GGUF file', detail=str(exc)) from exc
    architecture = str(keys.get("general.architecture", "unknown"))
    numbers = {word: keys.get(f"{architecture}.{key}") for word, key in _WORDS.items()}
    return {"architectures": [architecture], **numbers}


def _read_keys(stream: BinaryIO) -> dict[str, object]:
    if stream.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, _, n_keys = struct.unpack("<IQQ", stream.read(20))
    if version < 2:
        raise ValueError(f"GGUF version {version} is too old")
    keys: dict[str, object] = {}
    for _ in range(n_keys):
        name = _gguf_text(stream)
        (kind,) = struct.unpack("<I", stream.read(4))
        keys[name] = _gguf_value(stream, kind)
    return keys


def _gguf_text(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > _MAX_GGUF_TEXT_BYTES:
        raise ValueError(f"a text of {length} bytes in its header")
    return stream.read(length).decode("utf-8", "replace")


def _gguf_value(stream: BinaryIO, kind: int) -> object:
    if kind == _GGUF_STRING:
        return _gguf_text(stream)
    if kind == _GGUF_ARRAY:
        item, length = struct.unpack("<IQ", stream.read(12))
        if item in _GGUF_SCALARS:
            stream.seek(struct.calcsize(_GGUF_SCALARS[item]) * length, 1)
        else:
            for _ in range(length):
                _gguf_value(stream, item)
        return None
    if kind not in _GGUF_SCALARS:
        raise ValueError(f"unknown GGUF value type {kind}")
    shape = _GGUF_SCALARS[kind]
    value = struct.unpack(shape, stream.read(struct.calcsize(shape)))[0]
    return None if isinstance(value, float) and math.isnan(value) else value
