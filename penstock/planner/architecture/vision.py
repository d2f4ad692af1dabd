"""Vision encoders and their projectors, as tensors of layer "vision" in the model's dtype, on every pipeline stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.errors import UserError
from penstock.hardware.catalog import read_yaml
from penstock.planner.architecture import Cut, Tensor
from penstock.planner.architecture.config import Fields

_Sizes = Callable[[str], int]
_Builder = Callable[[Fields, _Sizes], Iterator[Tensor]]


def _size(config: Mapping[str, Any], defaults: Mapping[str, int], name: str) -> int:
    """A count of a vision config; what it lacks is transformers' default, as in vLLM."""
    value = config.get(name)
    if value is None:
        return defaults[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise UserError(f"cannot read config.json: {name} of vision_config is {value!r:.40}, not a count")
    return value


def _one(name: str, shape: tuple[int, ...], cut: Cut = "replicated", count: int = 1) -> Tensor:
    return Tensor(f"vision.{name}", shape, cut, "vision", count)


def _encoder(
    n_layers: int, hidden: int, width: int, norm_params: int, is_gated: bool = False, has_bias: bool = True
) -> Iterator[Tensor]:
    """A stack of plain attention and MLP, cut by heads and by width."""
    yield _one("qkv.weight", (3 * hidden, hidden), "column", n_layers)
    yield _one("o_proj.weight", (hidden, hidden), "row", n_layers)
    yield _one("up.weight", (width, hidden), "column", n_layers * (2 if is_gated else 1))
    yield _one("down.weight", (hidden, width), "row", n_layers)
    yield _one("norms", (norm_params,), "replicated", n_layers)
    if has_bias:
        yield _one("qkv.bias", (3 * hidden,), "column", n_layers)
        yield _one("up.bias", (width,), "column", n_layers)
        yield _one("o_down.bias", (2 * hidden,), "replicated", n_layers)


def _siglip(f: Fields, v: _Sizes) -> Iterator[Tensor]:
    """Gemma 3 (models/siglip.py, gemma3_mm.py). The pooling head of transformers' class is not loaded."""
    hidden, patch = v("hidden_size"), v("patch_size")
    yield from _encoder(v("num_hidden_layers"), hidden, v("intermediate_size"), 4 * hidden)
    yield _one("patch_embedding", (hidden, 3 * patch * patch + 1))
    yield _one("position_embedding", ((v("image_size") // patch) ** 2, hidden))
    yield _one("post_layernorm", (2 * hidden,))
    yield _one("projector", (hidden, f.n("hidden_size") + 1))


def _pixtral(f: Fields, v: _Sizes) -> Iterator[Tensor]:
    """Mistral 3 (models/pixtral.py, mistral3.py): gated, no biases; a patch merger and a two-layer projector."""
    hidden, patch, text = v("hidden_size"), v("patch_size"), f.n("hidden_size")
    merge, n = f.n("spatial_merge_size", default=2), v("num_hidden_layers")
    yield from _encoder(n, hidden, v("intermediate_size"), 2 * hidden, is_gated=True, has_bias=False)
    yield _one("patch_conv", (hidden, 3 * patch * patch))
    yield _one("norms_outside", (2 * hidden,))
    yield _one("merging_layer", (hidden, hidden * merge * merge))
    yield _one("linear_1", (text, hidden), "column")
    yield _one("linear_2", (text, text), "row")


def _qwen3_vl(f: Fields, v: _Sizes) -> Iterator[Tensor]:
    """Qwen3-VL and Qwen3.5 (models/qwen3_vl.py): biases everywhere, a merger and one for each deep-stack layer."""
    hidden, merged, text = v("hidden_size"), v("hidden_size") * v("spatial_merge_size") ** 2, v("out_hidden_size")
    yield from _encoder(v("depth"), hidden, v("intermediate_size"), 4 * hidden)
    pixels = v("in_channels") * v("temporal_patch_size") * v("patch_size") ** 2
    yield _one("patch_embed", (hidden, pixels + 1))
    yield _one("pos_embed", (v("num_position_embeddings"), hidden))
    deep = f.table("vision_config").get("deepstack_visual_indexes") or ()
    n_mergers = 1 + len(deep)
    yield _one("merger.linear_fc1", (merged, merged), "column", n_mergers)
    yield _one("merger.linear_fc1.bias", (merged,), "column", n_mergers)
    yield _one("merger.linear_fc2", (text, merged), "row", n_mergers)
    yield _one("merger.linear_fc2.bias", (text,), "replicated", n_mergers)
    yield _one("merger.norm", (2 * hidden + 2 * merged * len(deep),))


def _qwen2_5_vl(_: Fields, v: _Sizes) -> Iterator[Tensor]:
    """Qwen2.5-VL (models/qwen2_5_vl.py): gated with biases, RMS norms, one merger over 2 x 2 patches."""
    hidden, width, n = v("hidden_size"), v("intermediate_size"), v("depth")
    merged = hidden * v("spatial_merge_size") ** 2
    yield from _encoder(n, hidden, width, 2 * hidden, is_gated=True)
    # `_encoder` counts one bias of the width; a gated MLP has two.
    yield _one("gate.bias", (width,), "column", n)
    yield _one("patch_embed", (hidden, v("in_channels") * v("temporal_patch_size") * v("patch_size") ** 2))
    yield _one("merger.mlp.0", (merged, merged + 1), "column")
    yield _one("merger.mlp.2", (v("out_hidden_size"), merged), "row")
    yield _one("merger.outside", (hidden + v("out_hidden_size"),))


def _gemma4(f: Fields, v: _Sizes) -> Iterator[Tensor]:
    """Gemma 4 (models/gemma4_mm.py): gated, four norms and q/k norms of a head, two position tables."""
    f.refuse_unless(not f.table("audio_config"), "the audio encoder is not modelled")
    hidden, width, n = v("hidden_size"), v("intermediate_size"), v("num_hidden_layers")
    yield _one("attention", (4 * hidden, hidden), "replicated", n)
    yield _one("mlp", (3 * width, hidden), "replicated", n)
    yield _one("norms", (4 * hidden + 2 * v("head_dim"),), "replicated", n)
    yield _one("position_embedding_table", (2, v("position_embedding_size"), hidden))
    yield _one("input_proj", (hidden, 3 * v("patch_size") ** 2))
    yield _one("projection", (f.n("hidden_size"), hidden))


def _llama4(f: Fields, v: _Sizes) -> Iterator[Tensor]:
    """Llama 4 (models/mllama4.py): biases, class embedding, positions, an adapter after pixel shuffle."""
    hidden, width, patch = v("hidden_size"), v("intermediate_size"), v("patch_size")
    yield from _encoder(v("num_hidden_layers"), hidden, width, 4 * hidden)
    yield _one("patch_embedding", (hidden, 3 * patch * patch), "column")
    yield _one("positions", ((v("image_size") // patch) ** 2 + 2, hidden))
    yield _one("layernorms", (4 * hidden,))
    yield _one("adapter.fc1", (v("projector_input_dim"), width), "column")
    yield _one("adapter.fc2", (v("projector_output_dim"), v("projector_input_dim")), "row")
    yield _one("projector", (f.n("hidden_size"), v("vision_output_dim")), "column")


TOWERS: Mapping[str, _Builder] = {
    "Gemma3ForConditionalGeneration": _siglip,
    "Mistral3ForConditionalGeneration": _pixtral,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_vl,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Llama4ForConditionalGeneration": _llama4,
}


def towers(f: Fields) -> tuple[Tensor, ...]:
    build = TOWERS.get(f.architecture)
    if build is None:
        return ()
    defaults = _defaults()[build.__name__.removeprefix("_")]
    return tuple(build(f, functools.partial(_size, f.table("vision_config"), defaults)))


@functools.cache
def _defaults() -> dict[str, dict[str, int]]:
    defaults: dict[str, dict[str, int]] = read_yaml("penstock.planner", "vision_defaults.yaml")
    return defaults
