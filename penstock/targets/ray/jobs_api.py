"""Ray's dashboard over plain HTTP: its Jobs API, its packages, its nodes. Ray itself is not needed here.

https://docs.ray.io/en/latest/cluster/running-applications/job-submission/api.html
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock.errors import PenstockError, UserError
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

_TIMEOUT_S = 10.0
_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
_MAX_PACKAGE_BYTES = 500 * 1024 * 1024  # Ray refuses larger ones
_USED = re.compile(r"^([0-9.]+)/([0-9.]+) (\S+)", re.MULTILINE)
_WHERE = "ray.address is the dashboard's: http://HOST:8265 of the cluster's head."


class Job(msgspec.Struct, frozen=True):
    """A submitted job as the dashboard reports it."""

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
    """One Ray cluster by the address of its dashboard. Calls block for at most `timeout_s`."""

    def __init__(self, address: str, timeout_s: float = _TIMEOUT_S) -> None:
        self.address = address.rstrip("/")
        # https://docs.ray.io/en/latest/ray-security/token-auth.html
        self._client = Client(self.address, os.environ.get("RAY_AUTH_TOKEN") or _token_of_file(), timeout_s)

    def ray_version(self) -> str:
        """Ray's version there.  Raises UserError that says what answers in its place."""
        try:
            answer = self._client.get_json("/api/version")
        except HttpError as exc:
            if exc.status in (401, 403):
                hint = "Set RAY_AUTH_TOKEN to the cluster's token."
                raise UserError(f"{self.address} does not let us in: {exc.status}", hint=hint) from exc
            raise UserError(f"{self.address} is no dashboard of Ray: it answered {exc.status}", hint=_WHERE) from exc
        except PenstockError as exc:
            raise UserError(exc.message, hint=_WHERE) from exc
        if not isinstance(answer, dict) or "ray_version" not in answer:
            raise UserError(f"{self.address} is no dashboard of Ray: its /api/version is another's", hint=_WHERE)
        return str(answer["ray_version"])

    def jobs(self) -> dict[str, Job]:
        """All jobs that were submitted and not deleted, by submission id."""
        rows = self._client.get_json("/api/jobs/")
        submitted = [row for row in rows if row.get("type") == "SUBMISSION" and row.get("submission_id")]
        return {row["submission_id"]: _job(row) for row in submitted}

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
        self._send("POST", f"/api/jobs/{job}/stop")

    def delete(self, job: str) -> None:
        """Forget a job that has ended; nothing when it is gone."""
        self._send("DELETE", f"/api/jobs/{job}")

    def log(self, job: str) -> str:
        """All that a job has printed; nothing when it is gone or has not begun, or while its agent does not answer."""
        try:
            return str(self._client.get_json(f"/api/jobs/{job}/logs").get("logs") or "")
        except HttpError as exc:
            if exc.status in (401, 403):
                raise
            return ""

    def nodes(self) -> list[RayNode]:
        """Nodes that Ray thinks alive; a node without power is among them for a minute and more."""
        rows = self._client.get_json("/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        alive = [row for row in rows if row["state"] == "ALIVE"]
        nodes = [RayNode(row["node_id"], row["node_ip"], row["resources_total"]) for row in alive]
        return sorted(nodes, key=lambda node: node.address)

    def groups(self) -> dict[str, str]:
        """States of the placement groups that have a name, by name."""
        rows = self._client.get_json("/api/v0/placement_groups?limit=10000")["data"]["result"]["result"]
        return {row["name"]: row["state"] for row in rows if row.get("name")}

    def free(self) -> dict[str, dict[str, float]]:
        """What is not reserved, by id of a node and resource. Some seconds old."""
        texts = self._client.get_json("/nodes?view=summary")["data"].get("nodeLogicalResources") or {}
        return {node: _free(text) for node, text in texts.items()}

    def upload(self, name: str, data: bytes) -> str:
        """Keep a package of that name, unless it is there; its URI. Ray deletes one that no job uses, after minutes."""
        path = f"/api/packages/gcs/{name}"
        if not self._send("GET", path):
            if len(data) > _MAX_PACKAGE_BYTES:
                raise UserError(f"cannot send {len(data)} bytes to {self.address}: Ray takes {_MAX_PACKAGE_BYTES}")
            self._client.send("PUT", path, data)
            self._send("GET", path)  # asking keeps it for ten minutes, and lets Ray delete it afterwards
        return f"gcs://{name}"

    def _send(self, method: str, path: str) -> bool:
        """Whether what it names is there."""
        try:
            self._client.send(method, path)
        except HttpError as exc:
            if exc.status == 404:
                return False
            raise
        return True


def _token_of_file() -> str | None:
    place = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if place is None:
        return None
    try:
        return Path(place).expanduser().read_text("utf-8").strip()
    except OSError as exc:
        raise UserError(f"cannot read the token of Ray: {exc}", hint="Check RAY_AUTH_TOKEN_PATH.") from exc


def _job(row: Mapping[str, Any]) -> Job:
    return Job(row["submission_id"], row["status"], row.get("message") or "", row.get("metadata") or {})


def _free(text: str) -> dict[str, float]:
    """ "1.0/2.0 CPU (1.0 used of ...)", one line a resource; the first number has what is reserved in it."""
    return {name: float(total) - float(used) for used, total, name in _USED.findall(text)}


def package(with_model: bool) -> tuple[str, bytes]:
    """penstock itself as a package of Ray's: its name, which its content decides, and its bytes."""
    root = Path(penstock.__file__).parent
    left_out = {"__pycache__"} | (set() if with_model else {"demo_model"})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if path.is_file() and path.suffix != ".so" and not left_out & set(inside.parts):
                # A fixed date, so that the same files are the same package.
                archive.writestr(zipfile.ZipInfo(f"penstock/{inside.as_posix()}"), path.read_bytes())
    data = stream.getvalue()
    return f"_ray_pkg_penstock_{hashlib.sha256(data).hexdigest()[:24]}.zip", data
