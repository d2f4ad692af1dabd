"""The judge of rendered documents: schemas of the oldest and the newest Kubernetes, of custom resources, and our rules.

Built-in kinds are judged strictly by the schemas of the package
kubernetes-validate, custom ones by their definitions in golden/crds.json.xz (crds.txt names their projects) with the
CEL rules, as an API server would.
"""

from __future__ import annotations

import copy
import functools
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kubernetes_rules import rule_problems

pytest.importorskip("kubernetes_validate")
pytest.importorskip("celpy")

import celpy
import jsonschema
import referencing
from celpy import celtypes
from kubernetes_validate import utils as builtin

VERSIONS = ("1.29.0", "1.37.0")  # the oldest supported, and the newest
_PACKED = Path(__file__).parent / "golden" / "crds.json.xz"
Object = dict[str, Any]


def problems_of(documents: Sequence[Object]) -> list[str]:
    """What an API server or we would refuse in these objects, which are all of a deployment."""
    found = [
        f"{document['kind']}/{document['metadata']['name']}: {problem}"
        for document in documents
        for problem in _schema_problems(document)
    ]
    return [*found, *rule_problems(documents)]


def _schema_problems(document: Object) -> Iterator[str]:
    crd = _definition(document["apiVersion"], document["kind"])
    if crd is not None:
        yield from _custom_problems(document, crd)
        return
    for version in VERSIONS:
        validator = _validator(version, document["apiVersion"], document["kind"])
        if validator is None:
            yield f"Kubernetes {version} has no {document['kind']} of {document['apiVersion']}"
        else:
            yield from (f"{_told(error)} ({version})" for error in validator.iter_errors(document))


def _told(error: jsonschema.ValidationError) -> str:
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"


# ---- built-in kinds --------------------------------------------------------------------------------------------------


@functools.cache
def _definitions(version: str) -> referencing.Resource[Any]:
    contents = builtin.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)
    return referencing.Resource.from_contents(contents)


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    """The same files as `kubernetes-validate --strict` reads, loaded once."""
    group, _, number = api_version.rpartition("/")
    head = f"{group.partition('.')[0]}-{number}" if group else number
    path = f"kubernetes-json-schema/v{version}-local-strict/{kind.lower()}-{head}.json"
    try:
        schema = builtin.schema_contents(path, version)
    except FileNotFoundError:
        return None
    registry = _definitions(version) @ referencing.Registry()
    return jsonschema.Draft202012Validator(schema, registry=registry)


# ---- custom resources ------------------------------------------------------------------------------------------------


@functools.cache
def _packed() -> Object:
    schemas: Object = json.loads(lzma.decompress(_PACKED.read_bytes()))
    return schemas


@functools.cache
def _definition(api_version: str, kind: str) -> Object | None:
    """The schema of a custom kind; None for a built-in one."""
    group = api_version.rpartition("/")[0]
    if "." not in group or (group.endswith(".k8s.io") and not group.startswith(_CUSTOM_OF_K8S)):
        return None
    if (api_version, kind) in _WITHOUT_DEFINITION:
        return {"x-kubernetes-preserve-unknown-fields": True}
    unknown = {"x-unknown": f"{_PACKED.name} has no {kind} of {api_version}"}
    return _packed().get(f"{api_version} {kind}", unknown)  # type: ignore[no-any-return]


# Kinds whose project publishes no definition: only our rules judge them.
_WITHOUT_DEFINITION = {("networking.gke.io/v1", kind) for kind in ("GCPBackendPolicy", "HealthCheckPolicy")}
_CUSTOM_OF_K8S = ("gateway.networking", "inference.networking", "leaderworkerset.x-k8s", "kueue.x-k8s", "jobset.x-k8s")


def _custom_problems(document: Object, schema: Object) -> Iterator[str]:
    if "x-unknown" in schema:
        yield schema["x-unknown"]
        return
    whole = _with_defaults(document, schema)
    errors = [*_custom_validator(document["apiVersion"], document["kind"]).iter_errors(whole)]
    yield from map(_told, errors)
    if not errors:
        yield from _broken_rules(whole, schema, "")


@functools.cache
def _custom_validator(api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    definition = _definition(api_version, kind)
    assert definition is not None
    schema = _closed(definition)
    schema["properties"] = schema.get("properties", {}) | {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {},
    }
    return jsonschema.Draft202012Validator(schema)


def _closed(schema: Object) -> Object:
    """A structural schema as JSON schema: unknown fields are refused, as with fieldValidation=Strict."""
    keywords = ("type", "enum", "pattern", "required", "oneOf", "anyOf", "allOf", "not", "uniqueItems")
    bounds = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    closed: Object = {key: schema[key] for key in (*keywords, *bounds) if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        closed |= {"type": ["integer", "string"]}
        closed.pop("anyOf", None)
    if schema.get("nullable") and "type" in closed:
        closed["type"] = [closed["type"], "null"]
    for key, value in schema.get("properties", {}).items():
        closed.setdefault("properties", {})[key] = _closed(value)
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        closed["additionalProperties"] = _closed(more)
    elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed["additionalProperties"] = False
    return closed


def _with_defaults(value: Any, schema: Object) -> Any:
    """A value as an API server stores it: null of what cannot be null is absent, then defaults are filled in."""
    if isinstance(value, list):
        return [_with_defaults(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    rows = {key: properties.get(key, more if isinstance(more, dict) else {}) for key in value}
    kept = {key: item for key, item in value.items() if item is not None or rows[key].get("nullable")}
    for key, row in properties.items():
        if key not in kept and "default" in row:
            kept[key], rows[key] = copy.deepcopy(row["default"]), row
    return {key: _with_defaults(item, rows[key]) for key, item in kept.items()}


def _broken_rules(value: Any, schema: Object, path: str) -> Iterator[str]:
    """The CEL rules that a value breaks, here and below. Rules about a change (oldSelf) do not hold for a new object.

    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules
    """
    for row in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in row["rule"] and not _program(row["rule"])(_as_cel(value, schema)):
            yield f"{path or '.'}: {row.get('message') or row['rule']}"
    if isinstance(value, dict):
        more = schema.get("additionalProperties")
        for key, item in value.items():
            row = schema.get("properties", {}).get(key, more if isinstance(more, dict) else {})
            yield from _broken_rules(item, row, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(item, schema.get("items", {}), f"{path}[{index}]")


@functools.cache
def _environment() -> Any:
    return celpy.Environment()  # compiles a grammar


@functools.cache
def _program(rule: str) -> Callable[[Any], bool]:
    environment = _environment()
    functions: dict[str, Any] = {"isURL": lambda text: celtypes.BoolType("://" in text)}
    program = environment.program(environment.compile(rule), functions=functions)
    return lambda value: bool(program.evaluate({"self": value}))


class _Port(celtypes.StringType):  # type: ignore[misc]
    """Text of a field that may also be a number: Kubernetes compares the two, as unequal, and celpy refuses."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and bool(super().__eq__(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = celtypes.StringType.__hash__


def _as_cel(value: Any, schema: Object) -> Any:
    if isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        rest = more if isinstance(more, dict) else {}
        pairs = {celtypes.StringType(key): _as_cel(item, properties.get(key, rest)) for key, item in value.items()}
        return celtypes.MapType(pairs)
    if isinstance(value, list):
        return celtypes.ListType([_as_cel(item, schema.get("items", {})) for item in value])
    if schema.get("format") == "duration" and isinstance(value, str):
        return celtypes.DurationType(value)
    if schema.get("x-kubernetes-int-or-string") and isinstance(value, str):
        return _Port(value)
    return celpy.json_to_cel(value)
