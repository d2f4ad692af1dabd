"""Runs in the SDK's own Python: `python vessl_judge_forms.py FILE ...` prints as JSON its forms, {name: {field: type}},
and for each file why one of its classes refuses a part of that, or null."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from vessl.openapi_client import models  # type: ignore[import-not-found, unused-ignore]
from vessl.openapi_client.configuration import Configuration  # type: ignore[import-not-found, unused-ignore]

ROOTS = ("V1RunSpecFormBodyInput", "V1ServeRevisionWorkerForm", "V1ServeRevisionServiceForm")
OF_SERVICE_TOP = ("name", "message", "service")


def forms() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    left = [*ROOTS]
    while left:
        name = left.pop()
        if name in found:
            continue
        kind = getattr(models, name)
        rows = found[name] = dict[str, Any]()
        for attribute, of in kind.openapi_types.items():
            setter = inspect.getsource(getattr(kind, attribute).fset)
            values = re.search(r"allowed_values = (\[.*?\])", setter)
            row: dict[str, Any] = {"type": of}
            if values is not None:
                row["values"] = json.loads(values[1].replace("'", '"'))
            if "must not be `None`" in setter:
                row["required"] = True
            rows[kind.attribute_map[attribute]] = row if len(row) > 1 else of
            left += re.findall(r"[A-Z]\w+", of)
    return found


def built(value: Any, kind_name: str, path: str) -> Any:
    """The SDK's own object of a part of the YAML, whose setters check values. Raises ValueError."""
    inner = re.fullmatch(r"(list|dict)\[(?:str, ?)?(\w+)\]", kind_name)
    if inner is not None and inner[1] == "list":
        return [built(item, inner[2], f"{path}[]") for item in value]
    if inner is not None:
        return {key: built(item, inner[2], f"{path}.{key}") for key, item in value.items()}
    kind = getattr(models, kind_name, None)
    if kind is None or isinstance(value, str):
        return value
    attributes = {wire: attribute for attribute, wire in kind.attribute_map.items()}
    unknown = value.keys() - attributes.keys()
    if unknown:
        raise ValueError(f"{path}: {kind_name} has no {sorted(unknown)}")
    config = Configuration()
    config.client_side_validation = True
    fields = {
        attributes[wire]: built(item, kind.openapi_types[attributes[wire]], f"{path}.{wire}")
        for wire, item in value.items()
    }
    return kind(local_vars_configuration=config, **fields)


def refusal(file: Path) -> str | None:
    form = yaml.safe_load(file.read_text("utf-8"))
    try:
        if "service" in form:
            built({key: value for key, value in form.items() if key not in OF_SERVICE_TOP}, ROOTS[1], "")
            built(form["service"], ROOTS[2], "service")
        else:
            built(form, ROOTS[0], "")
    except ValueError as exc:
        return str(exc)
    return None


if __name__ == "__main__":
    refusals = {Path(word).name: refusal(Path(word)) for word in sys.argv[1:]}
    print(json.dumps({"forms": forms(), "refusals": refusals}))
