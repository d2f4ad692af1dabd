"""The models that penstock knows, each row with its source; rows and configs stand in `data/`."""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from typing import Any

import msgspec

from penstock.errors import nearest
from penstock.hardware.catalog import read_yaml

# What repositories of one architecture differ in: the training, its date, and Meta's own name.
_TRAINING = re.compile(r"^meta-|-(instruct|chat|base|hf|it|pt|\d{4})(?=-|$)")


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
    """What is known of a model, by the catalogue's name.  Raises KeyError."""
    return _model_rows()[name]


def model_config(name: str, file: str = "config.json") -> dict[str, Any]:
    """A JSON file of a model, by the catalogue's name; the caller's own copy. Empty when the model does not have it."""
    path = resources.files("penstock.models") / "data" / "models" / name / file
    config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return config


def find(name: str) -> str | None:
    """The catalogue's name of a model that is given by that name or by its hub id; None when it is not there.
    Repositories of one owner that differ in training alone ("-Instruct", "-0324") have the same layers."""
    names = [(own, own, row.hf_id.lower()) for own, row in _model_rows().items()]
    names += [(own, _plain(own), _plain(row.hf_id)) for own, row in _model_rows().items()]
    return next((own for own, *known in names if name.lower() in known or _plain(name) in known), None)


def suggestions(name: str) -> list[str]:
    """Names of the catalogue that a wrong one may mean, shortest first: those that it begins, else the nearest."""
    wanted, rows = _plain(name.rpartition("/")[2]), {own: _plain(own) for own in _model_rows()}
    matches = [own for own, plain in rows.items() if wanted and (plain.startswith(wanted) or wanted.startswith(plain))]
    close = nearest(_TRAINING.sub("", name.rpartition("/")[2].lower()), rows)
    return sorted(matches, key=len) or ([close] if close else [])


def _plain(name: str) -> str:
    """ "meta-llama/Llama-3.1-70B-Instruct" -> "meta-llama/llama3170b"."""
    owner, slash, own = name.lower().rpartition("/")
    return owner + slash + re.sub(r"[^a-z0-9]", "", _TRAINING.sub("", own))


@functools.cache
def _model_rows() -> dict[str, ModelRow]:
    return msgspec.convert(read_yaml("penstock.models", "models.yaml"), dict[str, ModelRow])
