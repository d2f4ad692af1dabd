"""The workbench's HTTP: the API v2 below /api/v2, and applications by their host names.

with Workbench(pods) as workbench:
    workbench.url, workbench.key

With `listens=False` nothing listens and nothing moves by itself: `ask` takes a request, `workloads.move` a step.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from penstock.testing.fake_workbench import description
from penstock.testing.fake_workbench.description import Vintage
from penstock.testing.fake_workbench.workloads import APP_PORT, Pods, Workload, Workloads

PROJECT, PROJECT_ID = "llm", "proj-1111-2222-3333"
RUNTIME = "registry.example/ml-runtime-pbj-workbench-python3.11-standard:2026.04.2-b16"
_PAGE, _V1_KEY = 2, "v1-key-of-ada"
_PIECE = 65536


def runtime(
    image: str, kernel: str, edition: str, status: str = "ENABLED", version: str = "2026.04.2-b16"
) -> dict[str, Any]:
    facts = {"image_identifier": image, "editor": "PBJ Workbench", "kernel": kernel, "edition": edition}
    return {**facts, "full_version": version, "status": status}


class Request(NamedTuple):
    command: str
    path: str
    headers: Any


class Workbench:
    """A workbench with one project. Its attributes may be changed by tests at any time."""

    def __init__(
        self, pods: Pods, domain: str = "cml.test", vintage: Vintage = "cloud", tls: ssl.SSLContext | None = None,
        upload: str = "PUT", host: str = "0.0.0.0", listens: bool = True,
    ) -> None:  # fmt: skip
        self.key, self.vintage, self.pods, self.upload = "key-of-ada", vintage, pods, upload
        self.project: dict[str, Any] = {"id": PROJECT_ID, "name": PROJECT, "shared_memory_limit": 64}
        self.labels: list[dict[str, Any]] = []
        self.quotas: list[dict[str, Any]] = []
        self.runtimes = [
            runtime(RUNTIME.replace("3.11", "3.10"), "Python 3.10", "Standard"),
            runtime(RUNTIME, "Python 3.11", "Standard"),
            runtime(RUNTIME.replace("standard", "cuda"), "Python 3.11", "Nvidia GPU", "DISABLED"),
        ]
        self.allows_public = True
        self.refusals: list[tuple[int, str]] = []  # the next calls get these, in this order
        self.refuses_workers: str | None = None  # why a worker is not launched
        self.refuses_creation: tuple[int, str] | None = None  # every POST of a job, as over a quota
        self.calls: list[str] = []
        self.cut_streams_after_s: float | None = None
        self.cut_silence_after_s = 60.0
        self.buffers_streams = False  # as a proxy that passes an answer on when it is whole
        self._server = self._listening(host, tls) if listens else None
        self.domain = f"{domain}:{self._server.server_address[1]}" if self._server is not None else domain
        self.url = f"http{'s' if tls else ''}://{self.domain}"
        env = {
            "CDSW_PROJECT_ID": PROJECT_ID, "CDSW_PROJECT": PROJECT, "CDSW_DOMAIN": self.domain,
            "CDSW_APIV2_KEY": self.key, "CDSW_API_KEY": _V1_KEY, "HOME": "/home/cdsw", "FAKE_VINTAGE": vintage,
        }  # fmt: skip
        self.workloads = Workloads(pods, env, moves=listens)
        if self._server is not None:
            serve = self._server.serve_forever
            threading.Thread(target=serve, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _listening(self, host: str, tls: ssl.SSLContext | None) -> ThreadingHTTPServer:
        workbench = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                workbench._serve(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _serve

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer((host, 0), Handler)
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        return server

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self.workloads.close()

    def left(self) -> list[str]:
        """Applications and jobs that were not deleted, by name."""
        with self.workloads.lock:
            jobs = [job["record"]["name"] for job in self.workloads.jobs.values()]
            return sorted([*jobs, *(row.record["name"] for row in self.workloads.applications.values())])

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        host = handler.headers.get("host", "")
        if host != self.domain and host.endswith(f".{self.domain}"):
            self._forward(handler, host.removesuffix(f".{self.domain}"))
            return
        n_bytes = int(handler.headers.get("content-length") or 0)
        data = handler.rfile.read(n_bytes)
        status, answer = self._answer(Request(handler.command, handler.path, handler.headers), data)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header(
            "content-type", "application/octet-stream" if isinstance(answer, bytes) else "application/json"
        )
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def ask(self, method: str, path: str, data: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The status and body of an answer, as a client of the URL gets them; names of `headers` are lower case."""
        status, answer = self._answer(Request(method, path, headers), data)
        return status, answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def _answer(self, handler: Request, data: bytes) -> tuple[int, Any]:
        parts = urllib.parse.urlsplit(handler.path)
        self.calls.append(f"{handler.command} {parts.path}")
        engine = re.fullmatch(r"/api/v1/engines/([^/]+)/workers(?:/([^/]+)/stop)?", parts.path)
        if engine is not None:
            return self._workers(handler, engine[1], engine[2], data)
        if handler.headers.get("authorization") != f"Bearer {self.key}":
            return _refusal(401, "Unauthorized")
        if self.refusals:
            return _refusal(*self.refusals.pop(0))
        if not parts.path.startswith("/api/v2/"):
            return 200, b"<html>the web page of the workbench</html>"
        path, query = parts.path.removeprefix("/api/v2"), dict(urllib.parse.parse_qsl(parts.query))
        if path == "/swagger.json":
            return 200, description.swagger(self.vintage)
        files = re.fullmatch(rf"/projects/{PROJECT_ID}/files(?:/(.*))?", path)
        if files is not None:
            return self._file(handler, urllib.parse.unquote(files[1] or ""), data)
        call, words = self._call(handler.command, path)
        if call is None:
            return _refusal(404, f"Not Found: {handler.command} {path}")
        body_type = description.calls(self.vintage)[call]
        body: dict[str, Any] = {}
        if body_type is not None:
            try:
                body = json.loads(data or b"{}")
            except ValueError:
                return _refusal(400, "invalid character in the body")
            problems = list(description.problems(self.vintage, body_type, body))
            if problems:
                return _refusal(400, "; ".join(problems))
        if "/projects/{" in call and words[0] != PROJECT_ID:
            return _refusal(404, "project not found")
        return self._do(call, words, body, query)

    def _call(self, method: str, path: str) -> tuple[str | None, list[str]]:
        for call in description.calls(self.vintage):
            known_method, _, known = call.partition(" ")
            pattern = re.sub(r"\\\{[^}]*\\\}", "([^/:]+)", re.escape(known))
            match = re.fullmatch(pattern, path)
            if match is not None and known_method == method:
                return call, list(match.groups())
        return None, []

    def _do(self, call: str, words: list[str], body: dict[str, Any], query: Mapping[str, str]) -> tuple[int, Any]:
        loads = self.workloads
        lists: dict[str, tuple[str, Iterable[dict[str, Any]]]] = {
            "GET /projects": ("projects", [self.project]),
            "GET /runtimes": ("runtimes", self.runtimes),
            "GET /nodelabels": ("accelerator_node_label", self.labels),
            "GET /userslabels/quota": ("user_quota", self.quotas),
            "GET /workloads/executions": ("executions", self._executions()),
            "GET /projects/{id}/applications": ("applications", [row.row() for row in loads.applications.values()]),
            "GET /projects/{id}/jobs": ("jobs", [job["record"] for job in loads.jobs.values()]),
        }
        if call in lists:
            return self._page(*lists[call], query)
        if call.startswith("GET /projects/{id}/jobs/{id}/runs") and words[1] not in loads.jobs:
            return _refusal(404, "job not found")
        if call == "GET /projects/{id}/jobs/{id}/runs":
            rows = [run.row() for run in loads.runs.values() if run.record["job_id"] == words[1]]
            return self._page("job_runs", rows, query)
        if call == "GET /projects/{id}":
            return 200, self.project
        if call == "PATCH /projects/{project.id}":
            self.project |= body
            return 200, self.project
        if "/applications" in call:
            return self._application(call, words, body)
        return self._job(call, words, body)

    def _executions(self) -> list[dict[str, Any]]:
        rows = self.workloads.runs.values()
        return [{"id": r.record["id"], "status": r.status, "failure_reason": r.failure_reason or ""} for r in rows]

    def _page(self, field: str, rows: Iterable[dict[str, Any]], query: Mapping[str, str]) -> tuple[int, Any]:
        """At most two rows, whatever size is asked for; a page must be asked with the size of the first."""
        unknown = query.keys() - {"page_size", "page_token", "search_filter", "sort"}
        if unknown:
            return _refusal(400, f"unknown query {sorted(unknown)}")
        wanted = json.loads(query.get("search_filter", "{}"))
        kept = [row for row in rows if all(value in str(row.get(name)) for name, value in wanted.items())]
        size, _, start = query.get("page_token", f"{query.get('page_size', '10')}-0").partition("-")
        if size != query.get("page_size", "10"):
            return _refusal(400, "page_size differs from that of the first page")
        at = int(start)
        token = f"{size}-{at + _PAGE}" if at + _PAGE < len(kept) else ""
        return 200, {field: kept[at : at + _PAGE], **({"next_page_token": token} if token else {})}

    # ---- applications and jobs ---------------------------------------------------------------------------------------

    def _application(self, call: str, words: list[str], body: dict[str, Any]) -> tuple[int, Any]:
        loads = self.workloads
        if call == "POST /projects/{id}/applications":
            if any(row.record["subdomain"] == body.get("subdomain") for row in loads.applications.values()):
                return _refusal(409, f"subdomain {body.get('subdomain')} is taken")
            if body.get("bypass_authentication") and not self.allows_public:
                return _refusal(403, "unauthenticated access to applications is disabled by the site administrator")
            problem = self._workload_problem(body, "subdomain")
            return _refusal(400, problem) if problem else (200, loads.create_application(body))
        found = loads.applications.get(words[1])
        if found is None:
            return _refusal(404, "application not found")
        if call.endswith(":restart"):
            loads.restart_application(words[1])
        elif call.endswith(":stop"):
            loads.stop(found)
        elif call.startswith("DELETE"):
            if not found.is_over:
                return _refusal(400, "the application is running")
            with loads.lock:
                del loads.applications[words[1]]
        else:
            return 200, found.row()
        return 200, {}

    def _job(self, call: str, words: list[str], body: dict[str, Any]) -> tuple[int, Any]:
        loads = self.workloads
        if call == "POST /projects/{id}/jobs":
            if self.refuses_creation is not None:
                return _refusal(*self.refuses_creation)
            problem = self._workload_problem(body)
            return _refusal(400, problem) if problem else (200, loads.create_job(body))
        if words[1] not in loads.jobs:
            return _refusal(404, "job not found")
        if call == "POST /projects/{id}/jobs/{id}/runs":
            if loads.is_active(words[1]):
                return _refusal(400, "the job has an active run")
            return 200, loads.run_job(words[1], body)
        if len(words) > 2:
            run = loads.runs.get(words[2])
            if run is None or run.record["job_id"] != words[1]:
                return _refusal(404, "job run not found")
            if call.endswith(":stop"):
                loads.stop(run)
                return 200, {}
            return 200, run.row()
        if call.startswith("DELETE"):
            if loads.is_active(words[1]):
                return _refusal(400, "the job has an active run")
            with loads.lock:
                del loads.jobs[words[1]]
            return 200, {}
        return 200, loads.jobs[words[1]]["record"]

    def _workload_problem(self, body: Mapping[str, Any], *more: str) -> str | None:
        for field in ("name", "script", "runtime_identifier", *more):
            if not body.get(field):
                return f"{field} is required"
        if not (self.pods.folder / body["script"]).is_file():
            return f"script {body['script']} does not exist"
        images = {row["image_identifier"]: row for row in self.runtimes}
        if body["runtime_identifier"] not in images:
            return f"runtime {body['runtime_identifier']} does not exist"
        if body.get("nvidia_gpu"):
            label = next((row for row in self.labels if row["id"] == body.get("accelerator_label_id")), None)
            if label is None:
                return "accelerator_label_id is required with GPUs"
            if body["nvidia_gpu"] > int(label["max_gpu_per_workload"]):
                return "too many GPUs for a workload"
        return None

    def _workers(self, handler: Request, engine: str, own: str | None, data: bytes) -> tuple[int, Any]:
        """What the module cml.workers_v1 of a kernel asks."""
        if handler.headers.get("authorization") != f"Basic {base64.b64encode(f'{_V1_KEY}:'.encode()).decode()}":
            return _refusal(401, "Unauthorized")
        loads = self.workloads
        if own is not None:
            worker = next((row for row in loads.workers_of(engine) if row.record["id"] == own), None)
            if worker is None:
                return _refusal(404, "worker not found")
            loads.stop(worker)
            return 200, {}
        if handler.command == "GET":
            return 200, [{"id": row.record["id"], "status": row.status.lower()} for row in loads.workers_of(engine)]
        body = json.loads(data)
        label = body.get("accelerator_label_id")
        problem = self.refuses_workers
        if not (self.pods.folder / body["script"]).is_file():
            problem = f"script {body['script']} does not exist"
        elif label is not None and label not in [int(row["id"]) for row in self.labels]:
            problem = f"no accelerator label {label}"
        if problem is not None:
            return 200, {"engineId": engine, "message": problem}
        row = loads.launch_worker(engine, body)
        return (200, row) if row is not None else _refusal(404, "engine not found")

    # ---- files -------------------------------------------------------------------------------------------------------

    def _file(self, handler: Request, path: str, data: bytes) -> tuple[int, Any]:
        folder = self.pods.folder.resolve()
        if path.endswith(":download") and handler.command == "POST":
            file = (folder / path.removesuffix(":download")).resolve()
            if not file.is_relative_to(folder) or not file.is_file():
                return _refusal(404, "file not found")
            return 200, file.read_bytes()
        if not path:
            return (
                self._upload(handler, folder, data)
                if handler.command == self.upload
                else _refusal(405, "no such method")
            )
        place = (folder / path).resolve()
        if not place.is_relative_to(folder) or not place.exists():
            return _refusal(404, "file not found")
        if handler.command == "DELETE":
            if place.is_dir() and any(place.iterdir()):
                return _refusal(400, "the folder is not empty")
            place.rmdir() if place.is_dir() else place.unlink()
            return 200, {}
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(handler.path).query))
        rows = [_file_row(folder, entry) for entry in (sorted(place.iterdir()) if place.is_dir() else [place])]
        return self._page("files", rows, query)

    def _upload(self, handler: Request, folder: Path, data: bytes) -> tuple[int, Any]:
        """One part, whose name is the path."""
        border = re.fullmatch(r"multipart/form-data; boundary=(\S+)", handler.headers.get("content-type", ""))
        if border is None:
            return _refusal(400, "no multipart/form-data")
        head, _, rest = data.partition(b"\r\n\r\n")
        content, end, _ = rest.rpartition(f"\r\n--{border[1]}--".encode())
        name = re.search(rb'; name="([^"]+)"', head)
        if not head.startswith(f"--{border[1]}\r\n".encode()) or not end or name is None or b"filename=" not in head:
            return _refusal(400, "a malformed part")
        place = (folder / name[1].decode()).resolve()
        if not place.is_relative_to(folder):
            return _refusal(400, "a path outside of the project")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        place.chmod(0o644)
        return 200, {}

    # ---- the proxy in front of applications --------------------------------------------------------------------------

    def _forward(self, handler: BaseHTTPRequestHandler, subdomain: str) -> None:
        found = next((r for r in self.workloads.applications.values() if r.record["subdomain"] == subdomain), None)
        handler.close_connection = True
        if found is None or found.pod is None:
            handler.send_error(404, "no such application")
            return
        has_key = handler.headers.get("authorization") == f"Bearer {self.key}"
        if not has_key and not found.body.get("bypass_authentication"):
            handler.send_response(302)
            handler.send_header("location", f"{self.url}/login")
            handler.send_header("content-length", "0")
            handler.end_headers()
            return
        self._pass_on(handler, found)

    def _pass_on(self, handler: BaseHTTPRequestHandler, found: Workload) -> None:
        assert found.pod is not None
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        lines = [f"{handler.command} {handler.path} HTTP/1.1"]
        lines += [f"{k}: {v}" for k, v in handler.headers.items() if k.lower() not in ("connection", "keep-alive")]
        head = "\r\n".join([*lines, "connection: close", "", ""]).encode()
        began = time.monotonic()
        try:
            with socket.create_connection((found.pod.address, APP_PORT), 5.0) as sock:
                sock.settimeout(self.cut_streams_after_s or self.cut_silence_after_s)
                sock.sendall(head + body)
                whole = b""
                while piece := sock.recv(_PIECE):
                    whole += piece
                    if self.buffers_streams:
                        continue
                    handler.wfile.write(piece)
                    handler.wfile.flush()
                    if self.cut_streams_after_s is not None and time.monotonic() - began > self.cut_streams_after_s:
                        return
                if self.buffers_streams:
                    handler.wfile.write(whole)
        except OSError:
            return


def _file_row(folder: Path, entry: Path) -> dict[str, Any]:
    path = entry.relative_to(folder).as_posix()
    return {"path": path, "is_dir": entry.is_dir(), "file_size": str(entry.stat().st_size)}


def _refusal(status: int, message: str) -> tuple[int, Any]:
    return status, {"code": 3 if status == 400 else 5, "message": message, "details": []}
