"""What a real API server answered to the contract of targets: golden/kubernetes-api.json, one answer of each kind.

    PENSTOCK_WRITE_GOLDEN=1 pytest tests/test_kubernetes_target.py -m "" -k recorded    # needs `make kubernetes`

The stub of the API (`KubernetesStub` in place_stubs.py) is judged by these at each request, and these by the API
server in test_kubernetes_target.py. Kept is what is the same in each run, and of pods what penstock reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.targets.kubernetes.api import Api

FILE = Path(__file__).with_name("golden") / "kubernetes-api.json"
# Names of pods of a Deployment, digests, moments, identities, addresses.
_NEW_EACH_TIME = re.compile(
    r"(?<=-gateway-)[0-9a-z]{6,10}-[0-9a-z]{5}\b|(?<=[a-z]-)[0-9a-f]{10}\b|\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.0-9]*Z"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?:\d+\.){3}\d+\b"
)
_LEFT_OUT = {
    *("managedFields", "annotations", "finalizers", "generation", "observedGeneration", "resourceVersion", "secrets"),
    *("containers", "initContainers", "volumes", "containerID", "image", "imageID", "images", "volumeName"),
    *("securityContext", "tolerations", "topologySpreadConstraints", "data", "binaryData", "tokens", "nodePort"),
    *("penstock.dev/revision", "controller-revision-hash", "pod-template-hash"),
}
_EVENTS = "/events"  # as many as there were, and nobody's promise


class Exchange(NamedTuple):
    """A request, in words, and the answer to it."""

    request: str
    status: int
    answer: Any

    @property
    def key(self) -> str:
        return f"{self.request} {self.status}"


def objects_in(answer: Any) -> list[Any] | None:
    """The items of a list, or the object itself, without its kind as in a list; None of what is no object."""
    if not isinstance(answer, dict) or answer.get("kind") in (None, "Status"):
        return None
    rows = answer.get("items", [answer])
    return [{key: value for key, value in row.items() if key not in ("kind", "apiVersion")} for row in rows]


def exchange(
    method: str, target: str, headers: Mapping[str, str], namespace: str, status: int, data: bytes
) -> Exchange:
    """Without what differs between two runs of one deployment."""
    answer: Any = data.decode()
    if answer.startswith("{"):
        answer = _kept(json.loads(answer), namespace)
        if urlsplit(target).path.endswith(_EVENTS):
            answer["items"] = []
    return Exchange(request_of(method, target, headers, namespace), status, answer)


def request_of(method: str, target: str, headers: Mapping[str, str], namespace: str) -> str:
    """Method, path, labels other than those of all that is of the deployment, and of a patch its kind."""
    parts = urlsplit(target)
    words = [method, _steady(parts.path, namespace)]
    words += [text.partition("instance=")[2] for text in parse_qs(parts.query).get("labelSelector", ())]
    words += [headers["content-type"].partition("/")[2]] if method == "PATCH" else []
    return " ".join(words)


def _steady(text: str, namespace: str) -> str:
    return _NEW_EACH_TIME.sub("*", re.sub(rf"\b{namespace}\b", "NS", text))


def _kept(value: Any, namespace: str) -> Any:
    if isinstance(value, dict):
        default = {key: text for key, text in (value.get("annotations") or {}).items() if "is-default-class" in key}
        kept = {key: _kept(each, namespace) for key, each in sorted(value.items()) if key not in _LEFT_OUT}
        return kept | ({"annotations": default} if default else {})
    if isinstance(value, list):
        return [_kept(each, namespace) for each in value]
    return _steady(value, namespace) if isinstance(value, str) else value


def recorded() -> dict[str, Any]:
    """The answers by `Exchange.key`; in a list one item for each name and state."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def listen(patch: pytest.MonkeyPatch, namespace: str) -> list[Exchange]:
    """What goes to the API from here on, until the patch ends."""
    rows, ask = list[Exchange](), Api._exchange

    def listened(self: Api, method: str, target: str, data: Any, headers: Any, timeout_s: float) -> tuple[int, bytes]:
        status, answer = ask(self, method, target, data, headers, timeout_s)
        rows.append(exchange(method, target, headers, namespace, status, answer))
        return status, answer

    patch.setattr(Api, "_exchange", listened)
    return rows


def record(rows: Sequence[Exchange]) -> None:
    kept: dict[str, Any] = {}
    for row in rows:
        if "items" in row.answer:
            items = {_state(item): item for item in [*kept.get(row.key, row.answer)["items"], *row.answer["items"]]}
            row.answer["items"] = list(items.values())
        kept[row.key] = row.answer
    rows_of_text = [f" {json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept)]
    FILE.write_text("{\n" + ",\n".join(rows_of_text) + "\n}\n", "utf-8")


def _state(item: Any) -> tuple[str, str, bool]:
    meta = item["metadata"]
    return meta["name"], item.get("status", {}).get("phase", ""), "deletionTimestamp" in meta


def is_write(request: str) -> bool:
    """Of an object that is written or deleted in each run; pods end by themselves, or not yet."""
    return request.startswith(("PATCH", "POST", "DELETE")) and "/pods/" not in request


def strays(rows: Sequence[Exchange]) -> list[str]:
    """In which rows the API server differs from the file. States change with time and are not compared."""
    known, found = recorded(), []
    for row in rows:
        is_said = row.key in known
        if is_write(row.request) and not (is_said and _shape(known[row.key]) == _shape(row.answer)):
            found.append(f"{row.key}: {_shape(row.answer)}, recorded is {_shape(known.get(row.key))}")
    unheard = {key for key in known if is_write(key)} - {row.key for row in rows}
    return found + [f"{key}: no longer asked" for key in sorted(unheard)]


def _shape(answer: Any) -> Any:
    return {key: value for key, value in answer.items() if key != "status"} if isinstance(answer, dict) else answer


def is_within(part: Any, whole: Any) -> bool:
    """Whether all that `part` has is so in `whole`, which may have more fields."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(is_within, part, whole))
    return bool(part == whole)
