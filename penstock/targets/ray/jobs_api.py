"""Ray's dashboard over plain HTTP: its Jobs API, its packages, its nodes. Ray itself is not needed here.

https://docs.ray.io/en/latest/cluster/running-applications/job-submission/api.html
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import re
import secrets
import socket
import struct
import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock.errors import PenstockError, UserError
from penstock.wire.client import Client, HttpError

_TIMEOUT_S = 10.0
_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
_SILENCE_S = 15  # of a connection, then three probes in as long again
_MAX_PACKAGE_BYTES = 500 * 1024 * 1024  # Ray refuses larger ones
_USED = re.compile(r"^([0-9.]+)/([0-9.]+) (\S+)", re.MULTILINE)
_LEFT_OUT = {"__pycache__"}


class Broken(PenstockError):
    """A log was not read to its end."""


class Job(msgspec.Struct, frozen=True):
    """A submitted job as the dashboard tells it."""

    id: str
    state: str
    message: str = ""
    metadata: dict[str, str] = {}

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


class RayNode(msgspec.Struct, frozen=True):
    """A living node and what Ray gives out on it."""

    id: str
    address: str
    resources: dict[str, float]


class Dashboard:
    """One Ray cluster by the address of its dashboard. Calls block for a few seconds at most."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        # https://docs.ray.io/en/latest/ray-security/token-auth.html
        self._token = os.environ.get("RAY_AUTH_TOKEN") or _token_of_file()
        self._client = Client(self.address, self._token, _TIMEOUT_S)

    def ray_version(self) -> str:
        """Ray's version there.  Raises UserError that says what answers in its place."""
        try:
            told = self._client.get_json("/api/version")
        except HttpError as exc:
            if exc.status in (401, 403):
                hint = "Set RAY_AUTH_TOKEN to the cluster's token."
                raise UserError(f"{self.address} does not let us in: {exc.status}", hint=hint) from exc
            raise UserError(f"{self.address} is no dashboard of Ray: it answered {exc.status}", hint=_WHERE) from exc
        except PenstockError as exc:
            raise UserError(exc.message, hint=_WHERE) from exc
        if not isinstance(told, dict) or "ray_version" not in told:
            raise UserError(f"{self.address} is no dashboard of Ray: its /api/version is another's", hint=_WHERE)
        return str(told["ray_version"])

    def jobs(self) -> dict[str, Job]:
        """All jobs that were submitted and not deleted, by submission id."""
        return {row["submission_id"]: _job(row) for row in self._client.get_json("/api/jobs/") if _is_submitted(row)}

    def job(self, job: str) -> Job | None:
        try:
            return _job(self._client.get_json(f"/api/jobs/{job}"))
        except HttpError as exc:
            if exc.status == 404:
                return None
            raise

    def submit(self, body: Mapping[str, Any]) -> str:
        """Submit a job; its id. One that is there already under that id is an HttpError."""
        return str(self._client.post_json("/api/jobs/", body)["submission_id"])

    def stop(self, job: str) -> None:
        """Ask a job to end; nothing when it is gone."""
        self._quietly("POST", f"/api/jobs/{job}/stop")

    def delete(self, job: str) -> None:
        """Forget a job that has ended; nothing when it is gone."""
        self._quietly("DELETE", f"/api/jobs/{job}")

    def _quietly(self, method: str, path: str) -> None:
        try:
            self._client.send(method, path)
        except HttpError as exc:
            if exc.status != 404:
                raise

    def log(self, job: str) -> list[str]:
        """All that a job has printed; nothing when it is gone or has not begun."""
        try:
            told = self._client.get_json(f"/api/jobs/{job}/logs")
        except HttpError as exc:
            if exc.status in (401, 403):
                raise
            return []
        *lines, begun = str(told.get("logs") or "").split("\n")  # as `follow` counts: a progress bar's \r ends no line
        return [*lines, begun] if begun else lines

    def follow(self, job: str) -> Iterator[str]:
        """Lines of a job from its first, until it ends; nothing when it is gone. Blocks as long as it prints nothing.

        Raises Broken when the connection breaks before.
        """
        begun = ""
        for text in _messages(self.address, f"/api/jobs/{job}/logs/tail", self._token):
            *lines, begun = (begun + text).split("\n")
            yield from lines
        if begun:
            yield begun

    def nodes(self) -> list[RayNode]:
        """Nodes that Ray thinks alive; a node without power is among them for a minute and more."""
        told = self._client.get_json("/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        rows = [row for row in told if row["state"] == "ALIVE"]
        nodes = [RayNode(row["node_id"], row["node_ip"], row["resources_total"]) for row in rows]
        return sorted(nodes, key=lambda node: node.address)

    def groups(self) -> dict[str, str]:
        """States of the placement groups that have a name, by name."""
        told = self._client.get_json("/api/v0/placement_groups?limit=10000")["data"]["result"]["result"]
        return {row["name"]: row["state"] for row in told if row.get("name")}

    def free(self) -> dict[str, dict[str, float]]:
        """What is reserved by nobody, by id of a node and resource. Some seconds old."""
        told = self._client.get_json("/nodes?view=summary")["data"].get("nodeLogicalResources") or {}
        return {node: _free(text) for node, text in told.items()}

    def upload(self, name: str, data: bytes) -> str:
        """Keep a package of that name, unless it is there; its URI. Ray deletes one that no job uses, after minutes."""
        path = f"/api/packages/gcs/{name}"
        if not self._has(path):
            if len(data) > _MAX_PACKAGE_BYTES:
                raise UserError(f"cannot send {len(data)} bytes to {self.address}: Ray takes {_MAX_PACKAGE_BYTES}")
            self._client.send("PUT", path, data)
            self._has(path)  # asking keeps it for ten minutes, and lets Ray delete it afterwards
        return f"gcs://{name}"

    def _has(self, path: str) -> bool:
        try:
            self._client.send("GET", path)
        except HttpError as exc:
            if exc.status == 404:
                return False
            raise
        return True


_WHERE = "ray.address is the dashboard's: http://HOST:8265 of the cluster's head."


def _token_of_file() -> str | None:
    place = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if place is None:
        return None
    try:
        return Path(place).expanduser().read_text("utf-8").strip()
    except OSError as exc:
        raise UserError(f"cannot read the token of Ray: {exc}", hint="Check RAY_AUTH_TOKEN_PATH.") from exc


def _is_submitted(row: Mapping[str, Any]) -> bool:
    return row.get("type") == "SUBMISSION" and bool(row.get("submission_id"))


def _job(row: Mapping[str, Any]) -> Job:
    return Job(row["submission_id"], row["status"], row.get("message") or "", row.get("metadata") or {})


def _free(text: str) -> dict[str, float]:
    """ "1.0/2.0 CPU (1.0 used of ...)", one line a resource; the first number has what is reserved in it."""
    return {name: float(total) - float(used) for used, total, name in _USED.findall(text)}


def package(with_model: bool) -> tuple[str, bytes]:
    """penstock itself as a package of Ray's: its name, which its content decides, and its bytes."""
    root = Path(penstock.__file__).parent
    left_out = _LEFT_OUT | (set() if with_model else {"demo_model"})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if path.is_file() and path.suffix != ".so" and not left_out & set(inside.parts):
                # A fixed date, so that the same files are the same package.
                archive.writestr(zipfile.ZipInfo(f"penstock/{inside.as_posix()}"), path.read_bytes())
    data = stream.getvalue()
    return f"_ray_pkg_penstock_{hashlib.sha256(data).hexdigest()[:24]}.zip", data


def _messages(address: str, path: str, token: str | None) -> Iterator[str]:
    """Texts that a server sends over a WebSocket (RFC 6455), until it closes. We send nothing but the first request.

    Raises Broken when the connection ends otherwise.
    """
    parts = urllib.parse.urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(secrets.token_bytes(16)).decode(),
    }
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        link = connection.sock
        response = connection.getresponse()
        if response.status == 404:
            return
        if response.status != 101:
            raise PenstockError(f"could not follow a log: {address}{path} answered {response.status}")
        _watch_link(link)
        yield from _frames(response.fp)
    except (OSError, http.client.HTTPException) as exc:
        raise Broken(f"lost the connection to {address}: {str(exc) or repr(exc)}", is_retryable=True) from exc
    finally:
        connection.close()


def _watch_link(link: socket.socket) -> None:
    """Let the kernel find out that a link is dead, and wait for a quiet engine without end.

    A ping would not do: Ray's dashboard does not read from this connection, so that it answers none.
    """
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _SILENCE_S), ("TCP_KEEPINTVL", _SILENCE_S // 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS lacks the first
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _frames(stream: io.BufferedIOBase) -> Iterator[str]:
    text = b""
    while True:
        head = _exactly(stream, 2)
        length = head[1] & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", _exactly(stream, 2))
        elif length == 127:
            (length,) = struct.unpack(">Q", _exactly(stream, 8))
        content, code = _exactly(stream, length), head[0] & 0x0F
        if code == 8:
            return
        if code in (0, 1):
            text += content
            if head[0] & 0x80:
                yield text.decode("utf-8", "replace")
                text = b""


def _exactly(stream: io.BufferedIOBase, n_bytes: int) -> bytes:
    got = stream.read(n_bytes)
    if len(got) < n_bytes:
        raise ConnectionError("it was closed without a reason")
    return got


def dumped(value: object) -> str:
    """JSON as people read it."""
    return json.dumps(value, indent=2)
