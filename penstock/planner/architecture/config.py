"""Reads a model's config.json with types: numbers, flags and lists, each under the names it has in the wild."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from penstock.errors import UserError, not_modelled
from penstock.planner.architecture import Architecture, Attention, Layer, Mlp, RopeTable

# Where multimodal configs keep the language model (transformers' `get_text_config`, and what older files call it).
TEXT_KEYS = ("text_config", "llm_config", "language_config")
# No model is near these; a file that says so is broken, and would take minutes to count.
_MOST, _MOST_LAYERS = 2**31, 4096
_LAYERS = {"num_hidden_layers", "n_layer", "depth"}


class Fields(msgspec.Struct, frozen=True):
    """One config.json: `text` is the language model's part, `outer` the whole file (the same if nothing is nested)."""

    outer: Mapping[str, Any]
    text: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """The value, from the text part first; None when it is absent or null."""
        value = self.text.get(name)
        return value if value is not None else self.outer.get(name)

    def maybe_n(self, *names: str) -> int | None:
        """The first of `names` that is there, as a count; None when none is."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UserError(f"cannot read config.json: {name} is {_short(value)}, not a count")
            if value > (_MOST_LAYERS if name in _LAYERS else _MOST):
                raise UserError(f"cannot read config.json: {name} is {value}, more than any model has")
            return value
        return None

    def n(self, *names: str, default: int | None = None) -> int:
        """As `maybe_n`, but required unless there is a default."""
        count = self.maybe_n(*names)
        if count is None and default is None:
            raise UserError(
                f"cannot read config.json: it has no {names[0]}", detail=f"architecture: {self.architecture}"
            )
        return cast(int, default if count is None else count)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def words(self, name: str) -> tuple[str, ...] | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"cannot read config.json: {name} is not a list")
        return tuple(str(word) for word in value)

    def table(self, name: str) -> Mapping[str, Any]:
        value = self.get(name)
        return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}

    @property
    def architecture(self) -> str:
        names = self.outer.get("architectures") or self.text.get("architectures") or ()
        if not isinstance(names, list | tuple):
            raise UserError(f"cannot read config.json: architectures is {_short(names)}, not a list")
        return str(names[0]) if names else ""

    @property
    def head_dim(self) -> int:
        """hidden / heads unless the config says otherwise."""
        size = self.maybe_n("head_dim", "attention_head_dim")
        return size or self.n("hidden_size") // max(1, self.n("num_attention_heads"))

    @property
    def dtype(self) -> str:
        """What vLLM's `--dtype auto` loads: the config's, float32 as bfloat16 (config/model.py)."""
        names = (part.get("dtype") or part.get("torch_dtype") for part in (self.text, self.outer))
        name = str(next(filter(None, names), "bfloat16")).removeprefix("torch.")
        return "bfloat16" if name in ("float32", "auto") else name

    def refuse_unless(self, holds: bool, why: str) -> None:
        if not holds:
            raise not_modelled("architecture", self.architecture, why)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def fields(config: Mapping[str, Any]) -> Fields:
    for key in TEXT_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return Fields(config, nested)
    return Fields(config, config)


Reader = Callable[[Fields], Architecture]


def attention_of(f: Fields, window: int | None = None, **extra: Any) -> Attention:
    """Grouped-query attention of one layer; `extra`: further fields of `Attention`."""
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


def biased_attention(f: Fields, **extra: Any) -> Attention:
    bias = f.flag("attention_bias")
    return attention_of(f, has_qkv_bias=bias, has_output_bias=bias, **extra)


def mixture(f: Fields, width: int, n_experts: int, **extra: Any) -> Mlp:
    """A mixture with num_experts_per_tok experts a token; `extra`: further fields of `Mlp`."""
    return Mlp(width, n_experts=n_experts, **{"top_k": f.n("num_experts_per_tok"), **extra})


def sparse_steps(f: Fields, n_experts: int) -> tuple[bool, ...]:
    """Whether each layer has experts, by Qwen's keys (decoder_sparse_step, mlp_only_layers)."""
    only, step = f.get("mlp_only_layers") or (), f.n("decoder_sparse_step", default=1)
    return tuple(n_experts > 0 and at not in only and (at + 1) % step == 0 for at in range(f.n("num_hidden_layers")))


def layer_types(f: Fields, interval: int, other: str) -> tuple[str, ...]:
    """The config's kind of each layer; without any, every `interval`-th has full attention and the rest `other`."""
    indices = range(f.n("num_hidden_layers"))
    rule = tuple("full_attention" if (index + 1) % interval == 0 else other for index in indices)
    return f.words("layer_types") or rule


def stack(
    f: Fields,
    family: str,
    layers: Sequence[Layer],
    tables: tuple[RopeTable, ...],
    *,
    ties: bool = False,
    positions: int | None = None,
    norm_params: int | None = None,
) -> Architecture:
    """The whole model around its layers. Defaults: one final norm of `hidden` weights, `positions` when the config has
    none."""
    hidden = f.n("hidden_size")
    return Architecture(
        name=f.architecture,
        family=family,
        hidden=hidden,
        vocab=f.n("vocab_size"),
        layers=tuple(layers),
        max_position=f.n("max_position_embeddings", default=positions),
        dtype=f.dtype,
        ties_embeddings=f.flag("tie_word_embeddings", ties),
        ropes=tables,
        norm_params=hidden if norm_params is None else norm_params,
    )


def layer_windows(f: Fields, rule: str | None) -> tuple[int | None, ...]:
    """One window (tokens) a layer; `layer_types` of the config wins over `rule` (transformers writes it since 4.53).
    "alternate" is Gemma 2 (even layers slide), "pattern" Gemma 3 (every `sliding_window_pattern`-th is full); else one
    window for every layer, unless `use_sliding_window` is false, or from `max_window_layers` on (Qwen)."""
    n_layers, window = f.n("num_hidden_layers"), f.maybe_n("sliding_window")
    types = f.words("layer_types")
    if not window or rule is None or f.get("use_sliding_window") is False:
        return (None,) * n_layers
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if rule == "alternate":
        return tuple(None if index % 2 else window for index in range(n_layers))
    if rule == "pattern":
        pattern = f.n("sliding_window_pattern", default=6)
        return tuple(None if (index + 1) % pattern == 0 else window for index in range(n_layers))
    first = f.n("max_window_layers", default=0) if f.get("use_sliding_window") else 0
    return tuple(window if index >= first else None for index in range(n_layers))


def check(arch: Architecture) -> None:
    """Raises UserError with the first number that cannot be."""
    wrong = next(_wrong(arch), None)
    if wrong:
        raise UserError(
            f"cannot use config.json: {wrong}",
            detail=f"architecture: {arch.name}",
            hint="Compare the file with the one on the model's page: it may be incomplete.",
        )


def _wrong(arch: Architecture) -> Iterator[str]:
    yield from _under_one(hidden_size=arch.hidden, vocab_size=arch.vocab, num_hidden_layers=arch.n_layers)
    for layer in dict.fromkeys(arch.layers):
        attention, state, mlp = layer.attention, layer.state, layer.mlp
        if attention is not None:
            heads, kv_heads = attention.n_heads, attention.n_kv_heads
            counts = {"the number of attention heads": heads, "the number of KV heads": kv_heads}
            yield from _under_one(**counts, **{"the size of a head": min(attention.head_dim_k, attention.head_dim_v)})
            if kv_heads > 0 and heads % kv_heads:
                yield f"{heads} attention heads do not divide by {kv_heads} KV heads"
            if attention.kind == "mla" and not attention.kv_lora_rank:
                yield "kv_lora_rank is 0"
            if attention.kind in ("sliding", "chunked") and not attention.window:
                yield "a layer has a window of 0 tokens"
        if state is not None:
            sizes = (state.conv_channels, state.n_heads, state.head_dim_v, state.head_dim_k, state.conv_kernel)
            yield from _under_one(**{"a size of a recurrent layer": min(sizes)})
        if mlp is not None:
            yield from _under_one(**{"the width of an MLP": mlp.intermediate})
            if mlp.n_experts and not 1 <= mlp.top_k <= mlp.n_experts:
                yield f"{mlp.top_k} of {mlp.n_experts} experts are chosen for a token"


def _under_one(**counts: int) -> Iterator[str]:
    return (f"{name} is {count}" for name, count in counts.items() if count < 1)
