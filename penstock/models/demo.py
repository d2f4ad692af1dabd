"""The bundled model as one GGUF file, for llama.cpp: the package has its header, and the tensors as safetensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

from penstock import paths
from penstock.errors import UserError
from penstock.models.files import BUNDLED, read_header, read_object, wanted_shards

# All before the tensors. `tools/write_gguf.py` writes it, with the tensors in the order of the safetensors files.
HEAD = BUNDLED / "penstock-demo.gguf.head"
_BFLOAT16_BYTES = 2


def gguf_file() -> Path:
    """The file, under the penstock home; written when it is absent.  Raises UserError when it cannot be written."""
    head, shards = HEAD.read_bytes(), [BUNDLED / name for name in wanted_shards(BUNDLED)]
    digest = hashlib.sha256(head + b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    path = paths.home() / "cache" / f"penstock-demo-{digest[:12]}.gguf"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        paths.write_atomically(path, head + b"".join(tensor for shard in shards for tensor in _tensors(shard)))
    except OSError as exc:
        raise UserError(
            f'cannot write "{path}": {exc.strerror}', hint="Set PENSTOCK_HOME to a folder you may write."
        ) from exc
    return path


def _tensors(shard: Path) -> Iterator[bytes]:
    """The tensors of a safetensors file as llama.cpp has them: norms in float32, queries and keys in pairs."""
    head_dim = read_object(BUNDLED / "config.json")["head_dim"]
    header, raw = read_header(shard), shard.read_bytes()
    end = len(raw) - header.n_bytes
    for tensor in header.tensors:
        begin, end = end, end + _BFLOAT16_BYTES * math.prod(tensor.shape)
        data = raw[begin:end]
        if len(tensor.shape) == 1:
            yield b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))  # bfloat16 is its upper half
        elif tensor.name.endswith(("q_proj.weight", "k_proj.weight")):
            yield _in_pairs(data, len(data) // tensor.shape[0], head_dim)
        else:
            yield data


def _in_pairs(data: bytes, row_bytes: int, head_dim: int) -> bytes:
    """The rows of each head from halves (a0 a1 .. b0 b1 ..) to pairs (a0 b0 a1 b1 ..).

    Hugging Face rotates the first half of a head against the second; llama.cpp rotates neighbours. See
    `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows = [data[at : at + row_bytes] for at in range(0, len(data), row_bytes)]
    half = head_dim // 2
    firsts = (at for head in range(0, len(rows), head_dim) for at in range(head, head + half))
    return b"".join(row for at in firsts for row in (rows[at], rows[at + half]))
