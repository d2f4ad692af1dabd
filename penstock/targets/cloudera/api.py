"""The API v2 of a Cloudera AI workbench, over plain HTTP: `cmlapi` is no package of PyPI, each workbench has its own.

JSON is that of proto3: a field of 64 bits is text, and one that is absent has its default.
https://docs.cloudera.com/machine-learning/cloud/api/topics/ml-api-v2.html
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.targets.cloudera.bodies import Judge
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

# An answer of the API, as its JSON.
Object = dict[str, Any]
T = TypeVar("T")

_TIMEOUT_S = 20.0
_PAGE_SIZE = 50
_TRIES, _PAUSE_S, _LONGEST_PAUSE_S = 4, 0.5, 10.0
_BUSY = (429, 503)  # not taken, so nothing is done twice
_KEY_CURE = "make a key under User Settings > API Keys of the workbench, and set CDSW_APIV2_KEY or cloudera.key_file"


class Workbench:
    """One workbench and, once `use` has found it, one of its projects. Threads may share it; calls block for seconds.

    Raises PenstockError: HttpError for an answer of the workbench, UserError where the key is refused.
    """

    def __init__(self, url: str, key: str, ca_file: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = Client(f"{self.url}/api/v2", key, _TIMEOUT_S, ca_file=ca_file)
        self._judge: Judge | None = None
        self.key, self.ca_file = key, ca_file
        self.project_id = ""
        self._upload_methods: tuple[str, ...] = ("PUT", "POST")

    @property
    def is_plain(self) -> bool:
        """Whether the key goes over a network without TLS."""
        return self.url.startswith("http://") and not self.url.startswith("http://127.0.0.1")

    # ---- what there is -----------------------------------------------------------------------------------------------

    def judge(self) -> Judge:
        """The workbench's own description of its API, which differs between versions; read once."""
        if self._judge is None:
            self._judge = Judge.read(self._ask("GET", "/swagger.json"))
        return self._judge

    def projects(self, name: str) -> list[Object]:
        """The projects that we may see of exactly that name."""
        rows = self._pages("/projects", "projects", {"search_filter": json.dumps({"name": name})})
        return [row for row in rows if row.get("name") == name]

    def project(self) -> Object:
        return self._get(f"/projects/{self.project_id}")

    def runtimes(self) -> list[Object]:
        return list(self._pages("/runtimes", "runtimes"))

    def gpu_labels(self) -> list[Object]:
        return list(self._pages("/nodelabels", "accelerator_node_label"))

    def gpu_quotas(self) -> list[Object]:
        """What the user may have of each label; none where the workbench does not say."""
        if not self.judge().knows("GET", "/userslabels/quota"):
            return []
        answer = self._get("/userslabels/quota")
        rows = next((value for value in answer.values() if isinstance(value, list)), [])
        return [row for row in rows if isinstance(row, dict)]

    def applications(self) -> list[Object]:
        return list(self._pages(f"{self._project}/applications", "applications"))

    def application(self, application: str) -> Object | None:
        return _if_there(lambda: self._get(f"{self._project}/applications/{application}"))

    def jobs(self) -> list[Object]:
        return list(self._pages(f"{self._project}/jobs", "jobs"))

    def runs(self, job: str) -> list[Object]:
        """The runs of a job, in the order of the workbench."""
        return list(self._pages(f"{self._project}/jobs/{job}/runs", "job_runs"))

    def job_run(self, job: str, run: str) -> Object | None:
        return _if_there(lambda: self._get(f"{self._project}/jobs/{job}/runs/{run}"))

    def failure(self, run: str) -> str | None:
        """Why a workload failed, in the workbench's words; None where it does not say, or is too old to know."""
        if not self.judge().knows("GET", "/workloads/executions"):
            return None
        rows = self._pages("/workloads/executions", "executions", {"search_filter": json.dumps({"id": run})})
        reasons = [row.get("failure_reason") for row in rows if row.get("id") == run]
        return next((str(reason) for reason in reasons if reason), None)

    # ---- workloads ---------------------------------------------------------------------------------------------------

    def create_application(self, body: Object) -> Object:
        """Create and start it: the API has no application that waits."""
        return self._create(f"{self._project}/applications", body)

    def restart_application(self, application: str) -> None:
        self._ask("POST", f"{self._project}/applications/{application}:restart", {})

    def stop_application(self, application: str) -> None:
        _if_there(lambda: self._ask("POST", f"{self._project}/applications/{application}:stop", {}))

    def delete_application(self, application: str) -> None:
        _if_there(lambda: self._ask("DELETE", f"{self._project}/applications/{application}"))

    def create_job(self, body: Object) -> Object:
        return self._create(f"{self._project}/jobs", body)

    def run_job(self, job: str) -> Object:
        return self._create(f"{self._project}/jobs/{job}/runs", {"job_id": job})

    def stop_run(self, job: str, run: str) -> None:
        _if_there(lambda: self._ask("POST", f"{self._project}/jobs/{job}/runs/{run}:stop", {}))

    def delete_job(self, job: str) -> None:
        _if_there(lambda: self._ask("DELETE", f"{self._project}/jobs/{job}"))

    def change_project(self, **fields: object) -> None:
        path = f"/projects/{self.project_id}"
        self._ask("PATCH", path, self.judge().sent("PATCH", path, dict(fields)))

    # ---- files -------------------------------------------------------------------------------------------------------

    def upload(self, path: str, data: bytes) -> None:
        """Write a file of the project. Documents say POST, clients of Cloudera's send PUT: what works is kept."""
        for method in self._upload_methods:
            try:
                self._upload(method, path, data)
            except HttpError as exc:
                if method == self._upload_methods[-1] or exc.status not in (404, 405):
                    raise
                continue
            self._upload_methods = (method,)
            return

    def _upload(self, method: str, path: str, data: bytes) -> None:
        border = f"penstock-{secrets.token_hex(12)}"
        head = (
            f'--{border}\r\ncontent-disposition: form-data; name="{path}"; filename="{path.rpartition("/")[2]}"\r\n'
            "content-type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + data + f"\r\n--{border}--\r\n".encode()
        headers = {"content-type": f"multipart/form-data; boundary={border}"}
        self._again(lambda: self._client.send(method, f"{self._project}/files", body, headers))

    def download(self, path: str) -> bytes | None:
        """The bytes of a file of the project; None when there is none."""
        where = f"{self._project}/files/{quote(path)}:download"
        return _if_there(lambda: self._again(lambda: self._client.send("POST", where, b"{}")))

    def files(self, folder: str) -> list[Object]:
        """The rows of a folder (`path`, `is_dir`, `file_size`); none when it is absent."""
        where = f"{self._project}/files/{quote(folder)}"
        return _if_there(lambda: list(self._pages(where, "files"))) or []

    def delete_file(self, path: str) -> None:
        _if_there(lambda: self._ask("DELETE", f"{self._project}/files/{quote(path)}"))

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def _project(self) -> str:
        assert self.project_id, "the project was found before"
        return f"/projects/{self.project_id}"

    def _get(self, path: str) -> Object:
        answer = self._ask("GET", path)
        if not isinstance(answer, dict):
            message = f"cannot read the answer of {self.url}{path}: it is no object"
            raise PenstockError(message, detail=str(answer)[:200])
        return answer

    def _create(self, path: str, body: Object) -> Object:
        whole = self.judge().sent("POST", path, {"project_id": self.project_id, **body})
        answer = self._ask("POST", path, whole)
        if not isinstance(answer, dict) or not answer.get("id"):
            raise PenstockError(f"cannot read the answer of {self.url}{path}: it has no id", detail=str(answer)[:200])
        return answer

    def _pages(self, path: str, rows: str, query: Mapping[str, str] | None = None) -> Iterator[Object]:
        """All rows of a list. Each page must be asked with the size of the first."""
        token: str | None = None
        while True:
            asked = {"page_size": str(_PAGE_SIZE), **(query or {}), **({"page_token": token} if token else {})}
            page = self._get(f"{path}?{urlencode(asked)}")
            yield from page.get(rows) or []
            token = page.get("next_page_token")
            if not token:
                return

    def _ask(self, method: str, path: str, body: Object | None = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        answer = self._again(lambda: self._client.send(method, path, data))
        return _decoded(answer, f"{method} {self.url}{path}")

    def _again(self, call: Callable[[], bytes]) -> bytes:
        """The answer of a call, tried again while the workbench is busy. A call that was not taken did nothing."""
        for n_left in range(_TRIES - 1, -1, -1):
            try:
                return call()
            except HttpError as exc:
                if exc.status == 401:
                    raise UserError(
                        f"the workbench {self.url} refuses the API key: it is wrong, has expired, or is of another one",
                        hint=_KEY_CURE,
                    ) from exc
                if exc.status not in _BUSY or not n_left:
                    raise
                pause_s = exc.retry_after_s or _PAUSE_S * 2 ** (_TRIES - 1 - n_left)
                time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        raise AssertionError("unreachable")


def application_url(workbench: str, subdomain: str) -> str:
    """Where an application answers: its subdomain in the workbench's domain."""
    parts = urlsplit(workbench)
    return f"{parts.scheme}://{subdomain}.{parts.netloc}"


def _decoded(answer: bytes, source: str) -> Any:
    if not answer.strip():
        return {}
    try:
        return msgspec.json.decode(answer)
    except msgspec.DecodeError as exc:
        shown = answer[:200].decode("utf-8", "replace")
        hint = "cloudera.workbench is the workbench's own URL: https://ml-1234abcd-5678.site.example."
        raise PenstockError(f"cannot read {source}: not JSON", detail=shown, hint=hint) from exc


def _if_there(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except HttpError as exc:
        if exc.status == 404:
            return None
        raise
