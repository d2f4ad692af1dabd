"""A stand-in for the module of that name in the kernels of a workbench: workers, over the fake's API v1.

Standard library only. With FAKE_VINTAGE=on-prem it is an older one, whose launch_workers takes no labels.
"""

from __future__ import annotations

import base64
import http.client
import inspect
import json
import os
from inspect import Parameter
from typing import Any

_TIMEOUT_S = 20.0


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


# Parameter -> its default; the first three have none.
_PARAMETERS: dict[str, Any] = {
    "n": None, "cpu": None, "memory": None, "nvidia_gpu": 0, "kernel": "python3", "script": "", "code": "",
    "accelerator_label_id": None, "resource_profile_id": None, "resource_group_id": None, "env": {},
}  # fmt: skip
_LATER = ("accelerator_label_id", "resource_profile_id", "resource_group_id")
_IS_OLD = os.environ.get("FAKE_VINTAGE") == "on-prem"
_SIGNATURE = inspect.Signature(
    [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if number < 3 else default)
        for number, (name, default) in enumerate(_PARAMETERS.items())
        if not (_IS_OLD and name in _LATER)
    ]
)


def launch_workers(*words: Any, **fields: Any) -> list[dict[str, Any]]:
    """Each is launched by itself; one that is refused has a message and no id."""
    bound = _SIGNATURE.bind(*words, **fields)
    bound.apply_defaults()
    body = {name: value for name, value in bound.arguments.items() if value is not None}
    body["environment"] = body.pop("env")
    return [_ask("POST", "", body)[1] for _ in range(body.pop("n"))]


launch_workers.__signature__ = _SIGNATURE  # type: ignore[attr-defined]


def list_workers() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _ask("GET", "")[1]
    return rows


def stop_workers(*worker_id: str) -> list[Response]:
    """Without an id: all of this engine."""
    ids = worker_id or tuple(row["id"] for row in list_workers())
    return [Response(_ask("PUT", f"/{own}/stop")[0]) for own in ids]


def _ask(method: str, path: str, body: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(os.environ["CDSW_DOMAIN"], timeout=_TIMEOUT_S)
    key = base64.b64encode(f"{os.environ['CDSW_API_KEY']}:".encode()).decode()
    where = f"/api/v1/engines/{os.environ['CDSW_ENGINE_ID']}/workers{path}"
    connection.request(method, where, None if body is None else json.dumps(body), {"authorization": f"Basic {key}"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content or b"{}")
