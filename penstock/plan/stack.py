"""What most readers of `families_*` share: attention from its usual fields, and the model around a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.plan.architecture import Architecture, Attention, Layer, RopeTable
from penstock.plan.config_fields import Fields

Reader = Callable[[Fields], Architecture]


def attention_of(f: Fields, window: int | None = None, **extra: Any) -> Attention:
    """Grouped-query attention of one layer; `extra` are further fields of `Attention`."""
    n_heads, head_dim = f.n("num_attention_heads"), f.head_dim
    return Attention(
        "full" if window is None else "sliding",
        n_heads=n_heads,
        n_kv_heads=f.n("num_key_value_heads", default=n_heads),
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        window=window,
        **extra,
    )


def stack(
    f: Fields, family: str, layers: Sequence[Layer], tables: tuple[RopeTable, ...], *, ties: bool = False
) -> Architecture:
    """The whole model around its layers: one final norm of `hidden` weights."""
    hidden = f.n("hidden_size")
    return Architecture(
        name=f.architecture,
        family=family,
        hidden=hidden,
        vocab=f.n("vocab_size"),
        layers=tuple(layers),
        max_position=f.n("max_position_embeddings"),
        dtype=f.dtype,
        ties_embeddings=f.flag("tie_word_embeddings", ties),
        ropes=tables,
        norm_params=hidden,
    )
