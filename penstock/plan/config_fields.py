"""Reading a model's config.json with types: numbers, flags and lists, each with the names it has in the wild."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from penstock.errors import UserError
from penstock.plan.refusals import not_modelled

# Where multimodal configs keep the language model (transformers' `get_text_config`, and what older files call it).
TEXT_KEYS = ("text_config", "llm_config", "language_config")


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
                raise UserError(f"cannot read config.json: {name} is {value!r}, not a count")
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
        return str(names[0]) if names else ""

    @property
    def head_dim(self) -> int:
        """hidden / heads unless the config says otherwise."""
        return self.maybe_n("head_dim", "attention_head_dim") or self.n("hidden_size") // self.n("num_attention_heads")

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


def fields(config: Mapping[str, Any]) -> Fields:
    """The config with its text part found."""
    for key in TEXT_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return Fields(config, nested)
    return Fields(config, config)
