"""VESSL's REST API, as its SDK 0.1.199 calls it. https://pypi.org/project/vessl/

The SDK itself is not used: it needs Python below 3.13, brings 30 packages, reports to Sentry and Datadog and does not
verify TLS certificates.
"""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.spec.blocks import Vessl
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

HOST, WEB = "https://api.vessl.ai", "https://app.vessl.ai"
_TIMEOUT_S = 10.0
_TRIES, _AGAIN_S = 3, 0.5
_PAGE, _MOST_PAGES = 50, 20
# https://docs.vessl.ai "Manage runs": from these nothing comes back.
ENDED = ("completed", "failed", "terminated")
T = TypeVar("T")
_sleep = time.sleep  # tests replace it
_LOGIN = "Run `vessl configure`, or set VESSL_ACCESS_TOKEN to a token of https://app.vessl.ai/account/settings."


class Endpoint(msgspec.Struct, frozen=True):
    """A port of a run, and its public address once there is one."""

    name: str = ""
    port: int = 0
    type: str = ""
    endpoint: str | None = None
    is_port_opened: bool | None = None


class Endpoints(msgspec.Struct, frozen=True):
    manually_defined_endpoints: tuple[Endpoint, ...] | None = None


class RunSpec(msgspec.Struct, frozen=True):
    yaml_spec: str = ""


class Tag(msgspec.Struct, frozen=True):
    name: str = ""


class Execution(msgspec.Struct, frozen=True):
    """A run as the API has it; of its fields those that are read here."""

    id: int
    status: str = ""
    status_reason: str | None = None
    endpoints: Endpoints | None = None
    run_spec: RunSpec | None = None
    tags: tuple[Tag, ...] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def address(self, name: str) -> str | None:
        """The public URL of the port of that name; None while there is none."""
        several = (self.endpoints.manually_defined_endpoints if self.endpoints else None) or ()
        found = next((row for row in several if row.name == name and row.endpoint), None)
        if found is None or found.endpoint is None or found.is_port_opened is False:
            return None
        url = found.endpoint if "://" in found.endpoint else f"https://{found.endpoint}"
        return url.rstrip("/")


class Preset(msgspec.Struct, frozen=True):
    """A kernel resource spec of a cluster: the machine that a run gets."""

    name: str = ""
    cpu_limit: float | None = None
    memory_limit: str | None = None
    gpu_type: str | None = None
    gpu_limit: int | None = None
    spot: bool | None = None
    default_hourly_credit: float | None = None


class Cluster(msgspec.Struct, frozen=True):
    """`vessl_service_enabled`: None where VESSL does not say."""

    id: int
    name: str
    vessl_service_enabled: bool | None = None


class LogLine(msgspec.Struct, frozen=True):
    message: str = ""
    timestamp: float = 0.0


class Account(NamedTuple):
    """Whose runs: as `vessl configure` keeps it."""

    host: str
    token: str
    organization: str
    project: str


def _configured() -> Mapping[str, str]:
    path = Path(os.environ.get("VESSL_CONFIG_PATH") or "~/.vessl/config").expanduser()
    try:
        user = tomllib.loads(path.read_text("utf-8")).get("user", {})
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in user.items() if isinstance(value, str)} if isinstance(user, dict) else {}


def account(block: Vessl) -> Account:
    """From the block, the environment and VESSL's own configuration, in this order.  Raises UserError with all that is
    missing."""
    known, environ = _configured(), os.environ
    token = environ.get("VESSL_ACCESS_TOKEN") or known.get("access_token")
    organization = block.organization or environ.get("VESSL_DEFAULT_ORGANIZATION") or known.get("default_organization")
    project = block.project or environ.get("VESSL_DEFAULT_PROJECT") or known.get("default_project")
    parts = {"an access token": token, "an organization": organization, "a project": project}
    missing = [what for what, value in parts.items() if not value]
    if missing or not (token and organization and project):
        hint = _LOGIN if not token else "Set vessl.organization and vessl.project, or run `vessl configure`."
        raise UserError(f"cannot call VESSL without {' and '.join(missing)}", hint=hint)
    host = (environ.get("VESSL_API_HOST") or HOST).rstrip("/")
    _refuse_clear_text(host)
    return Account(host, token, organization, project)


def _refuse_clear_text(url: str) -> None:
    """No secret goes over the network in clear text.  Raises UserError."""
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise UserError(f"cannot send a secret to {url}: it would go in clear text", hint="Give an https:// address.")


class Api:
    """The calls that the target makes. Blocks for at most three tries of 10 s. Raises HttpError and PenstockError."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._client = Client(account.host, None, _TIMEOUT_S)
        self.in_organization = f"/api/v1/organizations/{quote(account.organization, safe='')}"
        self._project = f"{self.in_organization}/projects/{quote(account.project, safe='')}"

    # ---- what there is -----------------------------------------------------------------------------------------------

    def me(self) -> Any:
        return self.get("/api/v1/accounts/me")

    def organization(self) -> Any:
        return self.get(self.in_organization)

    def projects(self) -> list[str]:
        rows = self.get(f"{self.in_organization}/projects")
        rows = (rows.get("results") or rows.get("projects") or []) if isinstance(rows, dict) else rows
        return [str(row.get("name", "")) for row in rows]

    def clusters(self) -> dict[str, Cluster]:
        """By their names."""
        rows = converted(self.get(f"{self.in_organization}/clusters")["clusters"], list[Cluster])
        return {row.name: row for row in rows}

    def presets(self, cluster_id: int) -> tuple[Preset, ...]:
        answer = self.get(f"{self.in_organization}/clusters/{cluster_id}/resource_specs")
        return tuple(converted(answer.get("results") or [], list[Preset]))

    # ---- secrets -----------------------------------------------------------------------------------------------------

    def secrets(self) -> dict[str, int]:
        """The ids of generic secrets by their names; nobody can read their values."""
        answer = self.get(f"{self.in_organization}/secrets?kind=generic-secret")
        rows = answer.get("secrets") or []
        return {str(row["credentials_name"]): int(row["credentials_id"]) for row in rows}

    def write_secret(self, name: str, value: str) -> None:
        body = {"secret_name": name, "value": value}
        self.post(f"{self.in_organization}/secrets/generic_secret", body)

    def delete_secret(self, name: str) -> None:
        """Nothing where there is none."""
        found = self.secrets().get(name)
        if found is not None:
            self.call("DELETE", f"{self.in_organization}/secrets/by_id/{found}", None)

    # ---- runs --------------------------------------------------------------------------------------------------------

    def judged(self, yaml_spec: str) -> list[tuple[str, str]]:
        """What the server's dry check says against a run: attributes with its words."""
        answer = self.post(f"{self.in_organization}/run/spec/sync_yaml", {"yaml_spec": yaml_spec})
        return form_errors(answer)

    def create(self, yaml_spec: str) -> int:
        """The id of a new run. Not tried twice: who calls looks whether it was made."""
        answer = self.call("POST", f"{self._project}/run/spec/create_from_yaml", {"yaml_spec": yaml_spec})
        return int(answer["run_execution"]["id"])

    def read(self, execution_id: int) -> Execution | None:
        """None when it was deleted."""
        found: Execution | None = None
        with unless_absent():
            found = converted(self.get(f"{self._project}/run_executions/{execution_id}"), Execution)
        return found

    def living(self) -> list[Execution]:
        """All that have not ended, the newest first."""
        statuses = "queued,pending,initializing,running,idle,stopping,waitToBeKilled"
        unique: dict[int, Execution] = {}
        for number in range(_MOST_PAGES):
            query = urlencode({"statuses": statuses, "limit": _PAGE, "offset": number * _PAGE})
            answer = self.get(f"{self._project}/run_executions?{query}")
            page = converted(answer.get("results") or [], list[Execution])
            n_before = len(unique)
            unique |= {row.id: row for row in page}
            if len(page) < _PAGE or len(unique) == n_before:
                break
        return sorted((row for row in unique.values() if not row.has_ended), key=lambda row: -row.id)

    def logs(self, execution_id: int, since: float) -> list[LogLine]:
        """All lines from that time on (Unix seconds), the oldest first. Without `log_limit`, which keeps the last."""
        query = urlencode({"log_start": since})
        answer = self.get(f"{self._project}/run_executions/{execution_id}/logs?{query}")
        return sorted(converted(answer.get("logs") or [], list[LogLine]), key=lambda line: line.timestamp)

    def terminate(self, execution_id: int) -> None:
        with unless_absent():
            self.post(f"{self._project}/run_executions/{execution_id}/terminate", {})

    def page_of(self, execution_id: int) -> str:
        return self.page("runs", self.account.project, str(execution_id))

    def page(self, *words: str) -> str:
        """An address for people."""
        web = (os.environ.get("VESSL_WEB_HOST") or WEB).rstrip("/")
        return "/".join([web, self.account.organization, *words])

    # ---- a call ------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        return self._tried("GET", path, None)

    def post(self, path: str, body: object) -> Any:
        return self._tried("POST", path, body)

    def _tried(self, method: str, path: str, body: object) -> Any:
        for _ in range(_TRIES - 1):
            try:
                return self.call(method, path, body)
            except PenstockError as exc:
                if not exc.is_retryable:
                    raise
                after = exc.retry_after_s if isinstance(exc, HttpError) else None
            _sleep(min(after or _AGAIN_S, 5.0))
        return self.call(method, path, body)

    def call(self, method: str, path: str, body: object) -> Any:
        headers = {"authorization": f"Token {self.account.token}", "content-type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        try:
            answer = self._client.send(method, path, data, headers)
            return msgspec.json.decode(answer) if answer.strip() else {}
        except HttpError as exc:
            raise explained(exc, self.account) from exc
        except msgspec.DecodeError as exc:
            raise PenstockError(f"cannot read the answer of {self.account.host}{path}: not JSON") from exc


@contextlib.contextmanager
def unless_absent() -> Iterator[None]:
    """Nothing, where VESSL has not what a call names."""
    try:
        yield
    except HttpError as exc:
        if exc.status != 404:
            raise


def form_errors(answer: Any) -> list[tuple[str, str]]:
    """What a dry check says against a form: attributes with its words."""
    errors = answer.get("form_errors") or {}
    # The SDK has both spellings: of the wire and of its own attributes.
    kinds = ("decode_errors", "DecodeErrors", "validation_errors", "ValidationErrors")
    rows = [row for kind in kinds for row in errors.get(kind) or []]
    return [(str(row.get("attribute") or ""), str(row.get("message") or "")) for row in rows]


def converted(value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise PenstockError(f"cannot read an answer of VESSL: {exc}", hint="Its API may have changed.") from exc


def explained(exc: HttpError, account: Account) -> HttpError:
    """An error status in our words, with the server's own."""
    said = exc.words.message or f"status {exc.status}"
    hints = {
        401: _LOGIN,
        402: "Add credit to the organization, or choose a cheaper preset.",
        403: f'Ask an admin of organization "{account.organization}" for the right, or check its credit and quota.',
        404: f'Check vessl.organization ("{account.organization}") and vessl.project ("{account.project}").',
    }
    what = {401: "the access token is refused", 403: "this is not allowed", 404: "there is no such thing"}
    words = what.get(exc.status, f"it answered {exc.status}")
    message = f"could not ask VESSL: {words} ({said})"
    return HttpError(message, exc.status, hint=hints.get(exc.status), retry_after_s=exc.retry_after_s, words=exc.words)


def control(url: str, token: str, timeout_s: float) -> Client:
    """A client of a run's control port.  Raises UserError for one in clear text."""
    _refuse_clear_text(url)
    return Client(url, token, timeout_s)
