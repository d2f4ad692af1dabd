"""The models that penstock knows, with the source of each row; rows and configs stand in `data/`."""

from __future__ import annotations

import functools
import json
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from penstock.hardware.catalog import read_yaml, refuse


class ModelRow(msgspec.Struct, frozen=True):
    """Where a config came from, and what is known exactly of the model. `weight_bytes_kind`: "exact" or "computed"."""

    hf_id: str
    config_kind: str
    source: str
    dtype: str
    params: int | None = None
    weight_bytes: int | None = None
    weight_bytes_kind: str | None = None
    quant_method: str | None = None
    note: str | None = None
    layers: dict[str, int] | None = None


def model_names() -> tuple[str, ...]:
    return tuple(_model_rows())


def model(name: str) -> ModelRow:
    """What is known of a model, by catalogue name or hub id.  Raises UserError with the nearest name."""
    return _model_rows()[_model_name(name)]


def model_config(name: str) -> dict[str, Any]:
    """config.json of a model, by catalogue name or hub id; the caller's own copy.  Raises UserError."""
    config: dict[str, Any] = json.loads(_file(name, "config.json").read_text("utf-8"))
    return config


def model_quantization(name: str) -> dict[str, Any] | None:
    """hf_quant_config.json of a model, where modelopt wrote its format there and not in config.json; else None."""
    path = _file(name, "hf_quant_config.json")
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _file(name: str, file: str) -> Traversable:
    return resources.files("penstock.models") / "data" / "models" / _model_name(name) / file


def has_model(name: str) -> bool:
    rows = _model_rows()
    return name in rows or name.lower() in {row.hf_id.lower() for row in rows.values()}


def _model_name(name: str) -> str:
    rows = _model_rows()
    if name in rows:
        return name
    matches = [own for own, row in rows.items() if row.hf_id.lower() == name.lower() or own == name.lower()]
    return matches[0] if matches else refuse("model", name, [*rows, *(row.hf_id for row in rows.values())])


@functools.cache
def _model_rows() -> dict[str, ModelRow]:
    return msgspec.convert(read_yaml("penstock.models", "models.yaml"), dict[str, ModelRow])
