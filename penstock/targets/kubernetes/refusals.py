"""What the API and the way to it answer in place of what was asked, in words. Pure.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.errors import PenstockError

UNREACHABLE = "Unreachable"
_LOG_IN = "Log in to the cluster again, as its provider tells; `kubectl get pods` shows whether it worked."
_NO_KIND = "Objects of this kind need a newer Kubernetes, or an operator that is not installed."
_FORBIDDEN = re.compile(r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"(?: in API group "(?P<group>[^"]*)")?')
_NAMESPACE = re.compile(r"/namespaces/([^/]+)/")
_MANAGER = re.compile(r'conflict with "(?P<manager>[^"]+)"')
_NO_PLUGIN = re.compile(r"getting credentials: exec: executable (\S+) not found")
_CREDENTIALS = ("getting credentials", "refresh token", "oauth2:", "unauthorized")


class ApiError(PenstockError):
    """The API refused, or could not be reached.

    `status`: of HTTP; 503 where nothing answered. `reason`: the API's word ("Conflict", "AlreadyExists", "Forbidden",
    "NotFound", "Expired", "Invalid"), or "Unreachable". Retryable: 5xx, 429 and what could not be reached.
    """

    def __init__(
        self, message: str, status: int, reason: str, *, detail: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, detail=detail, hint=hint, is_retryable=status >= 500 or status == 429)
        self.status, self.reason = status, reason


def unreachable(where: str, why: str, detail: str | None = None) -> ApiError:
    """Nothing answered. `why` is as Go's or Python's libraries say it: the last part is the cause."""
    cause = why.strip().splitlines()[0].rpartition(": ")[2] if why.strip() else "it closed the connection"
    detail = "\n".join(part for part in (why.strip() if why.strip() != cause else "", detail) if part) or None
    hint = "Is the cluster running, and the VPN on?" if where.startswith("context") else None
    return ApiError(f"could not reach the API server of {where}: {cause}", 503, UNREACHABLE, detail=detail, hint=hint)


def refusal(status: int, answer: Any, where: str, path: str, complaint: str | None = None) -> ApiError:
    """The error of an answer of 400 and more: a Status object, or text of what stands between us and the API.

    `path`: of the request. `complaint`: what kubectl and its plugins printed.
    """
    if not isinstance(answer, dict):
        return _of_text(status, str(answer), where, complaint)
    reason, message = str(answer.get("reason") or "Unknown"), str(answer.get("message") or "no reason given")
    details: Mapping[str, Any] = answer.get("details") or {}
    if status == 401:
        return _no_login(where, complaint)
    if status == 403:
        return _forbidden(message, where, path)
    if status == 404 and details.get("kind") == "namespaces":
        name = details.get("name")
        hint = f"kubectl create namespace {name}"
        return ApiError(f'namespace "{name}" does not exist in {where}', status, reason, hint=hint)
    if status == 404 and not details.get("name"):
        return ApiError(f"{where} has no {path}", status, reason, detail=message, hint=_NO_KIND)
    causes = [cause for cause in details.get("causes") or [] if isinstance(cause, dict)]
    subject = f'{details.get("kind") or "object"} "{details.get("name") or ""}"'
    if status == 409 and any(cause.get("reason") == "FieldManagerConflict" for cause in causes):
        return _conflict(subject, causes, reason)
    lines = [f"{cause['field']}: {cause.get('message')}" for cause in causes if cause.get("field")]
    if lines:
        what = lines[0][:300] if len(lines) == 1 else f"{len(lines)} problems"
        return ApiError(f"the API refuses {subject}: {what}", status, reason, detail="\n".join(lines))
    return ApiError(f"the API of {where} answered {status}: {message}", status, reason, detail=complaint)


def _of_text(status: int, text: str, where: str, complaint: str | None) -> ApiError:
    """kubectl's proxy answers 500 with the error of its own client."""
    words = text.strip()
    absent = _NO_PLUGIN.search(words)
    if absent is not None:
        message = f"kubectl needs {absent[1]} for {where}, and it is not installed here"
        return ApiError(message, 401, "Unauthorized", detail=words, hint="Install the login program of this cluster.")
    if status == 401 or any(sign in words.lower() for sign in _CREDENTIALS):
        return _no_login(where, "\n".join(dict.fromkeys(part for part in (words, complaint) if part)))
    if status >= 500:
        return unreachable(where, words or f"it answered {status}", complaint)
    return ApiError(f"the API of {where} answered {status}", status, "Unknown", detail=words[:500] or None)


def _no_login(where: str, detail: str | None) -> ApiError:
    message = f"the credentials of {where} are not accepted (expired?)"
    return ApiError(message, 401, "Unauthorized", detail=detail or None, hint=_LOG_IN)


def _forbidden(message: str, where: str, path: str) -> ApiError:
    match = _FORBIDDEN.search(message)
    if match is None:  # a quota, a webhook, Pod Security
        words = message.partition(" is forbidden: ")[2] or message
        return ApiError(f"the cluster does not allow it: {words}", 403, "Forbidden", detail=message)
    resource = match["resource"] + (f".{match['group']}" if match["group"] else "")
    inside = _NAMESPACE.search(path)
    place = f' in namespace "{inside[1]}"' if inside else ""
    flag = f" -n {inside[1]}" if inside else ""
    hint = f"Ask the cluster's administrator for this right: kubectl auth can-i {match['verb']} {resource}{flag}"
    text = f"{where} has no right to {match['verb']} {resource}{place}"
    return ApiError(text, 403, "Forbidden", detail=message, hint=hint)


def _conflict(subject: str, causes: list[Any], reason: str) -> ApiError:
    fields = []
    for cause in causes:
        match = _MANAGER.search(str(cause.get("message")))
        fields.append(f"field {cause.get('field')} is managed by {match['manager'] if match else 'another'}")
    more = f" (and {len(fields) - 1} more)" if len(fields) > 1 else ""
    hint = "Take the field out of what the other program applies, or delete the object first."
    return ApiError(f"cannot apply {subject}: {fields[0]}{more}", 409, reason, detail="\n".join(fields), hint=hint)


def decoded(data: bytes) -> Any:
    """An answer's body: JSON, or its text."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data.decode("utf-8", "replace")
