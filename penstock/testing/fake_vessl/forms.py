"""Judges a run's or a revision's YAML by the names, types and values of the forms in VESSL's SDK (forms.json).

The SDK's generated classes drop unknown names without a word; this walk refuses them. A test compares the table with
the SDK's own classes (0.1.199).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RUN, WORKER, SERVICE = "V1RunSpecFormBodyInput", "V1ServeRevisionWorkerForm", "V1ServeRevisionServiceForm"
# https://docs.vessl.ai "Run YAML": these may be a plain text.
_SHORT = ("V1ImageForm", "V1EnvForm", "V1ImportForm", "V1ExportForm", "V1MountForm", "V1Command")
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
_OF_SERVICE_TOP = ("name", "message", "service")


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """form -> attribute -> its type, or {type, values, required}."""
    rows = json.loads(Path(__file__).with_name("forms.json").read_text("utf-8"))
    assert isinstance(rows, dict)
    return rows


def run_problems(form: Any) -> list[tuple[str, str]]:
    """(path, what is wrong) of a run's YAML; empty when it fits."""
    if not isinstance(form, dict):
        return [("", "is no mapping")]
    missing = [(key, "is required") for key in ("name", "image", "resources") if not form.get(key)]
    return missing + list(problems(form, RUN, ""))


def service_problems(form: Any) -> list[tuple[str, str]]:
    """As `run_problems`, of a revision: the worker's fields at the top, next to `service`."""
    if not isinstance(form, dict):
        return [("", "is no mapping")]
    required = ("name", "message", "image", "resources", "service")
    missing = [(key, "is required") for key in required if not form.get(key)]
    worker = {key: value for key, value in form.items() if key not in _OF_SERVICE_TOP}
    return missing + list(problems(worker, WORKER, "")) + list(problems(form.get("service"), SERVICE, "service"))


def problems(value: Any, kind: str, path: str = "") -> Iterator[tuple[str, str]]:
    inner = re.fullmatch(r"(list|dict)\[(?:str, ?)?(\w+)\]", kind)
    if inner is not None:
        yield from _several(value, inner[1], inner[2], path)
    elif kind in _PLAIN:
        is_bool = isinstance(value, bool) and kind != "bool"
        if not isinstance(value, _PLAIN[kind]) or is_bool:
            yield path, f"is no {kind}: {value!r}"
    elif kind in table():
        if isinstance(value, str) and kind in _SHORT:
            return
        if not isinstance(value, dict):
            yield path, f"is no {kind}: {value!r}"
            return
        for name, row in table()[kind].items():
            if isinstance(row, dict) and row.get("required") and value.get(name) is None:
                yield f"{path}.{name}" if path else name, "is required"
        for name, item in value.items():
            yield from _field(item, table()[kind].get(name), f"{path}.{name}" if path else str(name))


def _field(value: Any, row: Any, path: str) -> Iterator[tuple[str, str]]:
    if row is None:
        yield path, "is no field of it"
        return
    values = row.get("values") if isinstance(row, dict) else None
    if values is not None and value not in values:
        yield path, f"{value!r} is none of {', '.join(values)}"
        return
    yield from problems(value, row["type"] if isinstance(row, dict) else row, path)


def _several(value: Any, shape: str, kind: str, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, list if shape == "list" else dict):
        yield path, f"is no {shape}: {value!r}"
        return
    items = enumerate(value) if isinstance(value, list) else value.items()
    for key, item in items:
        yield from problems(item, kind, f"{path}.{key}")
