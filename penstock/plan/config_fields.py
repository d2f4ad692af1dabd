"""Reading a model's config.json with types: numbers, flags and lists, each with the names it has in the wild."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from penstock.errors import UserError
from penstock.plan.refusals import not_modelled

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
        """As `maybe_n`, but there must be one, or a default."""
        found = self.maybe_n(*names)
        if found is None:
            found = default
        if found is None:
            raise UserError(
                f"cannot read config.json: it has no {names[0]}", detail=f"architecture: {self.architecture}"
            )
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        return float(value) if isinstance(value, int | float) else default

    def words(self, name: str) -> tuple[str, ...] | None:
        """A list of words, one a layer; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"cannot read config.json: {name} is not a list")
        return tuple(str(word) for word in value)

    def table(self, name: str) -> Mapping[str, Any]:
        """A nested object; empty when absent."""
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
        found = self.maybe_n("head_dim", "attention_head_dim")
        return found or self.n("hidden_size") // max(1, self.n("num_attention_heads"))

    @property
    def dtype(self) -> str:
        """What vLLM's `--dtype auto` loads: the config's, float32 as bfloat16 (config/model.py)."""
        for source in (self.text, self.outer):
            found = source.get("dtype") or source.get("torch_dtype")
            if found:
                name = str(found).removeprefix("torch.")
                return "bfloat16" if name in ("float32", "auto") else name
        return "bfloat16"

    def refuse_unless(self, holds: bool, why: str) -> None:
        """NotModelled when a field has a value whose memory we do not know."""
        if not holds:
            raise not_modelled("architecture", self.architecture, why)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def fields(config: Mapping[str, Any]) -> Fields:
    """The config with its text part found."""
    for key in TEXT_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return Fields(config, nested)
    return Fields(config, config)
