"""Which layers of a model see a window only, from a config.json: one entry a layer, None for full attention."""

from __future__ import annotations

from penstock.plan.config_fields import Fields


def layer_windows(f: Fields, rule: str | None) -> tuple[int | None, ...]:
    """One window (tokens) a layer.

    `layer_types` in the config wins (transformers writes it since 4.53). Without it: "alternate" is Gemma 2 (even
    layers slide), "pattern" Gemma 3 (every `sliding_window_pattern`-th layer is full). Otherwise one `sliding_window`
    holds for every layer (engine/arg_utils.py hands it to the cache config), and transformers drops it from models
    whose `use_sliding_window` is false (Qwen), or keeps it for the layers from `max_window_layers` on.
    """
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
