"""The cos/sin tables that vLLM keeps on every GPU (layers/rotary_embedding): they count as weights in its log.

n_positions x rotary_dim numbers, whatever `--max-model-len` says: Llama-3.1 131,072 x 128 x 2 B = 32 MiB.
"""

from __future__ import annotations

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
    """The one table of a model whose attention layers are alike; `head_dim`: channels of one head."""
    rope = f.table("rope_parameters") or f.table("rope_scaling")
    rotary_dim = head_dim
    if is_partial:
        factor = rope.get("partial_rotary_factor") or f.get("partial_rotary_factor") or f.get("rotary_pct") or 1.0
        rotary_dim = f.n("rotary_dim", default=int(head_dim * float(factor)))
    positions = f.n("max_position_embeddings", default=default_positions)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind in ("longrope", "su"):
        # Both tables, the short and the long one, stand behind each other.
        own = rope.get("original_max_position_embeddings")
        original = own or f.n("original_max_position_embeddings", default=positions)
        return (RopeTable(positions + int(original), rotary_dim),)
    if kind in ("yarn", "deepseek_yarn"):
        factor, original = float(rope.get("factor", 1.0)), rope.get("original_max_position_embeddings", positions)
        positions = int(int(original) * factor)
    elif kind not in _PLAIN and kind != "mrope":
        raise not_modelled("rope type", kind, "the size of its table is not known")
    return (RopeTable(positions * (_MROPE_FACTOR if "mrope_section" in rope else 1), rotary_dim),)
