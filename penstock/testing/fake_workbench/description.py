"""The calls and fields that the fake knows, in two vintages: as its swagger.json, and to judge requests with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Vintage = Literal["cloud", "on-prem"]

# Field -> kind. "id64" is a number of 64 bits, which JSON has as text; "map" is text by text.
_WORKLOAD = {
    "project_id": "text", "name": "text", "description": "text", "script": "text", "cpu": "double", "memory": "double",
    "nvidia_gpu": "int32", "environment": "map", "kernel": "text", "runtime_identifier": "text",
    "runtime_addon_identifiers": "texts", "run_as": "int32", "accelerator_label_id": "id64",
}  # fmt: skip
_OF_CLOUD = {"resource_group_id": "int32", "resource_profile_id": "int32"}
_RETRIES = {
    "retry_enabled": "bool", "max_retry": "int32", "retry_delay": "int32", "retry_for_script_failure": "bool",
    "retry_for_system_failure": "bool",
}  # fmt: skip
_TYPES: dict[str, dict[str, str]] = {
    "CreateApplicationRequest": {**_WORKLOAD, "subdomain": "text", "bypass_authentication": "bool", "cdv_app": "bool"},
    "CreateJobRequest": {
        **_WORKLOAD,
        "arguments": "text",
        "timeout": "id64",
        "kill_on_timeout": "bool",
        "schedule": "text",
        "timezone": "text",
        "paused": "bool",
        "parent_id": "text",
    },
    "CreateJobRunRequest": {"project_id": "text", "job_id": "text", "environment": "map", "arguments": "text"},
    "UpdateProjectRequest": {"name": "text", "description": "text", "shared_memory_limit": "int32"},
    "Nothing": {},
}
_CALLS: dict[str, str | None] = {
    "GET /projects": None,
    "GET /projects/{id}": None,
    "PATCH /projects/{project.id}": "UpdateProjectRequest",
    "GET /runtimes": None,
    "GET /nodelabels": None,
    "GET /userslabels/quota": None,
    "GET /workloads/executions": None,
    "GET /projects/{id}/applications": None,
    "POST /projects/{id}/applications": "CreateApplicationRequest",
    "GET /projects/{id}/applications/{id}": None,
    "DELETE /projects/{id}/applications/{id}": None,
    "POST /projects/{id}/applications/{id}:restart": "Nothing",
    "POST /projects/{id}/applications/{id}:stop": "Nothing",
    "GET /projects/{id}/jobs": None,
    "POST /projects/{id}/jobs": "CreateJobRequest",
    "GET /projects/{id}/jobs/{id}": None,
    "DELETE /projects/{id}/jobs/{id}": None,
    "GET /projects/{id}/jobs/{id}/runs": None,
    "POST /projects/{id}/jobs/{id}/runs": "CreateJobRunRequest",
    "GET /projects/{id}/jobs/{id}/runs/{id}": None,
    "POST /projects/{id}/jobs/{id}/runs/{id}:stop": "Nothing",
}
_NOT_ON_PREM = {"GET /workloads/executions", "GET /userslabels/quota"}
_OPENAPI: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "double": {"type": "number", "format": "double"},
    "int32": {"type": "integer", "format": "int32"},
    "id64": {"type": "string", "format": "int64"},
    "bool": {"type": "boolean", "format": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "map": {"type": "object", "additionalProperties": {"type": "string"}},
}


def types(vintage: Vintage) -> dict[str, dict[str, str]]:
    """The fields of each body that this vintage takes."""
    if vintage == "on-prem":
        return _TYPES
    jobs = {**_TYPES["CreateJobRequest"], **_OF_CLOUD, **_RETRIES}
    return {
        **_TYPES,
        "CreateJobRequest": jobs,
        "CreateApplicationRequest": {**_TYPES["CreateApplicationRequest"], **_OF_CLOUD},
    }


def calls(vintage: Vintage) -> dict[str, str | None]:
    return {call: body for call, body in _CALLS.items() if vintage == "cloud" or call not in _NOT_ON_PREM}


def swagger(vintage: Vintage) -> dict[str, Any]:
    """The document that the workbench serves."""
    paths: dict[str, dict[str, Any]] = {}
    for call, body in calls(vintage).items():
        method, _, path = call.partition(" ")
        schema = {"$ref": f"#/definitions/{body}"}
        parameters = [{"name": "body", "in": "body", "required": True, "schema": schema}] if body else []
        paths.setdefault(f"/api/v2{path}", {})[method.lower()] = {"parameters": parameters}
    definitions = {
        name: {"type": "object", "properties": {field: _OPENAPI[kind] for field, kind in fields.items()}}
        for name, fields in types(vintage).items()
    }
    return {
        "swagger": "2.0",
        "info": {"title": "API v2", "version": vintage},
        "paths": paths,
        "definitions": definitions,
    }


def problems(vintage: Vintage, body: str, value: object) -> Iterator[str]:
    """Why a body is refused, one line for each field."""
    if not isinstance(value, Mapping):
        yield "the body is no object"
        return
    fields = types(vintage)[body]
    for name, inner in value.items():
        if name not in fields:
            yield f'unknown field "{name}" in {body}'
        elif not _is_of(inner, fields[name]):
            yield f"{name}: {inner!r} is no {fields[name]}"


def _is_of(value: object, kind: str) -> bool:
    if kind == "map":
        return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
    if kind == "texts":
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    if kind == "id64":
        return isinstance(value, str) and value.isdigit()
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    numbers = {"double": (int, float), "int32": (int,), "text": (str,)}
    return isinstance(value, numbers[kind])
