"""The cos/sin tables that vLLM keeps on every GPU (layers/rotary_embedding): they count as weights in its log.

n_positions x rotary_dim numbers, whatever `--max-model-len` says: Llama-3.1 131,072 x 128 x 2 B = 32 MiB.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.errors import not_modelled
from penstock.planner.architecture import RopeTable
from penstock.planner.architecture.config import Fields

# Tables of max_position_embeddings rows.
_PLAIN = {"default", "llama3", "linear", "dynamic", "proportional"}
# Multimodal rope keeps four times the positions (rotary_embedding/mrope.py).
_MROPE_FACTOR = 4


def ropes(
    f: Fields, head_dim: int, *, default_positions: int | None = None, is_partial: bool = True
) -> tuple[RopeTable, ...]:
    """The one table of a model whose attention layers all turn alike. `head_dim`: channels of one head."""
    rope = f.table("rope_parameters") or f.table("rope_scaling")
    rotary_dim = _rotary_dim(f, rope, head_dim) if is_partial else head_dim
    return (_table(f, rope, rotary_dim, default_positions),)


def ropes_by_layer_kind(f: Fields, kinds: Collection[str]) -> tuple[RopeTable, ...]:
    """Gemma 3: one table for the full layers and one for the sliding ones (another base, never scaled)."""
    positions = f.n("max_position_embeddings")
    return tuple(RopeTable(positions, f.head_dim) for _ in kinds)


def _rotary_dim(f: Fields, rope: Mapping[str, Any], head_dim: int) -> int:
    """Partial rotary: rotary_dim, or a factor under one of its three names."""
    fixed = f.maybe_n("rotary_dim")
    if fixed is not None:
        return fixed
    factor = rope.get("partial_rotary_factor")
    if factor is None:
        factor = next((f.number(name, 1.0) for name in ("partial_rotary_factor", "rotary_pct") if f.get(name)), 1.0)
    return int(head_dim * float(factor))


def _table(f: Fields, rope: Mapping[str, Any], rotary_dim: int, default_positions: int | None) -> RopeTable:
    positions = f.n("max_position_embeddings", default=default_positions)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind in ("longrope", "su"):
        # Both tables, the short and the long one, stand behind each other.
        original = rope.get("original_max_position_embeddings") or f.n(
            "original_max_position_embeddings", default=positions
        )
        return RopeTable(positions + int(original), rotary_dim)
    if kind in ("yarn", "deepseek_yarn"):
        factor, original = float(rope.get("factor", 1.0)), rope.get("original_max_position_embeddings", positions)
        positions = int(int(original) * factor)
    elif kind not in _PLAIN and kind != "mrope":
        raise not_modelled("rope type", kind, "the size of its table is not known")
    if "mrope_section" in rope:
        positions *= _MROPE_FACTOR
    return RopeTable(positions, rotary_dim)


def ropes_gemma4(f: Fields) -> tuple[RopeTable, ...]:
    """Gemma 4: full layers have heads of global_head_dim ("proportional": the whole head), sliding ones of head_dim."""
    positions = f.n("max_position_embeddings")
    return RopeTable(positions, f.n("global_head_dim", default=f.head_dim)), RopeTable(positions, f.head_dim)
