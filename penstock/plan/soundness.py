"""Whether an `Architecture` read from a config.json can be a model at all: no zero widths, heads that divide. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import UserError
from penstock.plan.architecture import Architecture, Attention, Mlp, State


def check(arch: Architecture) -> None:
    """Nothing when every number can be.  Raises UserError with the first that cannot."""
    wrong = next(_wrong(arch), None)
    if wrong:
        raise UserError(
            f"cannot use config.json: {wrong}",
            detail=f"architecture: {arch.name}",
            hint="Is the file whole? Compare it with the one on the model's page.",
        )


def _wrong(arch: Architecture) -> Iterator[str]:
    for name, value in (("hidden_size", arch.hidden), ("vocab_size", arch.vocab), ("num_hidden_layers", arch.n_layers)):
        if value < 1:
            yield f"{name} is {value}"
    for layer in dict.fromkeys(arch.layers):
        if layer.attention is not None:
            yield from _wrong_attention(layer.attention)
        if layer.state is not None:
            yield from _wrong_state(layer.state)
        if layer.mlp is not None:
            yield from _wrong_mlp(layer.mlp)


def _wrong_attention(attention: Attention) -> Iterator[str]:
    for name, value in (
        ("the number of attention heads", attention.n_heads),
        ("the number of KV heads", attention.n_kv_heads),
        ("the size of a head", min(attention.head_dim_k, attention.head_dim_v)),
    ):
        if value < 1:
            yield f"{name} is {value}"
    if attention.n_kv_heads > 0 and attention.n_heads % attention.n_kv_heads:
        yield f"{attention.n_heads} attention heads do not divide by {attention.n_kv_heads} KV heads"
    if attention.kind == "mla" and not attention.kv_lora_rank:
        yield "kv_lora_rank is 0"
    if attention.kind in ("sliding", "chunked") and not attention.window:
        yield "a layer has a window of 0 tokens"


def _wrong_state(state: State) -> Iterator[str]:
    sizes = (state.conv_channels, state.n_heads, state.head_dim_v, state.head_dim_k, state.conv_kernel)
    if min(sizes) < 1:
        yield f"a recurrent layer has a size of {min(sizes)}"


def _wrong_mlp(mlp: Mlp) -> Iterator[str]:
    if mlp.intermediate < 1:
        yield f"the width of an MLP is {mlp.intermediate}"
    if mlp.n_experts and not 1 <= mlp.top_k <= mlp.n_experts:
        yield f"{mlp.top_k} of {mlp.n_experts} experts are chosen for a token"
