"""A strict stand-in for VESSL's API on loopback: `with FakeVessl(folder) as vessl: ...`.

It knows the calls of docs/how-to/vessl.md and no others, wants `Authorization: Token TOKEN`, judges YAML by the forms
of VESSL's SDK and executes a run's command. VESSL's own CLI drives it too (VESSL_API_HOST), which is how it is judged.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.testing.fake_vessl import forms, service_requests
from penstock.testing.fake_vessl.account import (
    CLUSTER,
    ORGANIZATION,
    PATH_OF_ORGANIZATION,
    PROJECT,
    TOKEN,
    Call,
    Refused,
    World,
    form_of,
    variables_of,
)
from penstock.testing.fake_vessl.containers import Container


class FakeVessl:
    """`world` may be changed while it serves; leaving the block ends all runs. With `listens=False` nothing listens:
    `ask` takes a request."""

    def __init__(self, folder: Path, listens: bool = True) -> None:
        self.world = World(folder)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self.world)) if listens else None
        self.url = f"http://127.0.0.1:{self._server.server_port if self._server is not None else 1}"

    def __enter__(self) -> FakeVessl:
        if self._server is not None:
            self._server.daemon_threads = True
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def ask(self, method: str, path: str, data: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The status and body of an answer, as a client of the URL gets them; names of `headers` are lower case."""
        status, value = _asked(self.world, method, path, data, headers.get("authorization"))
        return status, json.dumps(value).encode()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for run in self.world.living:
            run.terminate(without_grace=True)
            run.wait(10.0)
        for service in self.world.services.values():
            service.close()

    @property
    def variables(self) -> dict[str, str]:
        """What leads penstock and VESSL's CLI here."""
        return {
            "VESSL_API_HOST": self.url,
            "VESSL_WEB_HOST": self.url,
            "VESSL_ACCESS_TOKEN": TOKEN,
            "VESSL_DEFAULT_ORGANIZATION": ORGANIZATION,
            "VESSL_DEFAULT_PROJECT": PROJECT,
            "VESSL_CONFIG_PATH": str(self.world.folder / "no-config"),
        }


# ---- the calls -------------------------------------------------------------------------------------------------------


def _always(answer: Any) -> Callable[[Call], Any]:
    return lambda _: answer


def _me(call: Call) -> Any:
    return {
        "id": 1,
        "username": "ada",
        "email": "ada@example.org",
        "organizations": [_organization(call)],
    }


def _organization(call: Call) -> Any:
    return {"id": 7, "name": ORGANIZATION, "credit_balance": call.world.credit_balance}


def _resource_specs(call: Call) -> Any:
    return {"results": call.world.presets}


def _clusters(call: Call) -> Any:
    return {"clusters": [call.world.cluster]}


def _secrets(call: Call) -> Any:
    rows = [
        {"credentials_name": name, "credentials_id": number, "credentials_kind": "generic-secret"}
        for name, (number, _) in call.world.secrets.items()
    ]
    return {"secrets": rows}


def _write_secret(call: Call) -> Any:
    if call.body.keys() != {"secret_name", "value"}:
        raise Refused(400, "InvalidArgument", f"unknown fields {sorted(call.body)}")
    number = call.world.secrets.get(call.body["secret_name"], (len(call.world.secrets) + 100, ""))[0]
    call.world.secrets[call.body["secret_name"]] = (number, call.body["value"])
    return {"credentials_name": call.body["secret_name"], "credentials_id": number}


def _delete_secret(call: Call) -> Any:
    name = next((name for name, row in call.world.secrets.items() if row[0] == int(call.number)), None)
    if name is None:
        raise Refused(404, "NotFound", "no such secret")
    del call.world.secrets[name]
    return {}


def _sync(call: Call) -> Any:
    _, form, problems = form_of(call.body, forms.run_problems)
    rows = [{"attribute": path, "message": message} for path, message in problems]
    return {"validated": not rows, "form": form, "form_errors": {"validation_errors": rows}}


def _create(call: Call) -> Any:
    text, form, problems = form_of(call.body, forms.run_problems)
    if problems:
        raise Refused(400, "InvalidArgument", "; ".join(" ".join(row) for row in problems))
    variables = variables_of(call.world, form)
    number = max(call.world.runs, default=1000) + 1
    folder = call.world.folder / f"run-{number}"
    folder.mkdir(parents=True)
    call.world.runs[number] = Container(number, text, form, folder, variables, call.world.pace)
    return {"run_execution": _execution(call.world.runs[number])}


def _execution(run: Container) -> dict[str, Any]:
    return {
        "id": run.id,
        "immutable_slug": f"run-{run.id}",
        "message": run.form.get("description", ""),
        "status": run.status,
        "status_reason": run.reason,
        "tags": [{"id": index, "name": name} for index, name in enumerate(run.form.get("tags", []))],
        "create_dt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.created_at)),
        "created_by": {"username": "ada"},
        "endpoints": {"manually_defined_endpoints": run.endpoints()},
        "run_spec": {
            "title": run.form["name"],
            "yaml_spec": run.yaml_spec,
            "type": "batch",
            "cluster": {"name": CLUSTER},
            "spec": {"command": [{"command": run.command}]},
        },
    }


def _list(call: Call) -> Any:
    statuses = {word for text in call.query.get("statuses", []) for word in text.split(",")}
    rows = sorted(call.world.runs.values(), key=lambda run: -run.id)
    rows = [run for run in rows if not statuses or run.status in statuses]
    first = int(call.query.get("offset", ["0"])[0])
    page = rows[first : first + int(call.query.get("limit", ["50"])[0])]
    return {"results": [_execution(run) for run in page], "page_info": {"total_count": len(rows)}}


def _run(call: Call) -> Container:
    run = call.world.runs.get(int(call.number))
    if run is None:
        raise Refused(404, "NotFound", f"no run {call.number}")
    return run


def _read(call: Call) -> Any:
    return _execution(_run(call))


def _logs(call: Call) -> Any:
    since, most = float(call.query.get("log_start", ["0"])[0]), call.query.get("log_limit")
    rows = _run(call).lines(since, int(most[0]) if most else None)
    logs = [{"timestamp": at, "message": text, "stream": "stdout", "source": "run"} for at, text in rows]
    return {"logs": list(reversed(logs))}  # the order is not promised


def _terminate(call: Call) -> Any:
    run = _run(call)
    run.terminate()
    return _execution(run)


def _delete(call: Call) -> Any:
    if not _run(call).has_ended:
        raise Refused(400, "InvalidState", "terminate it first")
    del call.world.runs[int(call.number)]
    return {}


_ORG = PATH_OF_ORGANIZATION
_PRO = f"{_ORG}/projects/{PROJECT}"
_CALLS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("GET", "/api/v1/accounts/me", _me),
    ("GET", _ORG, _organization),
    ("GET", f"{_ORG}/projects", _always({"results": [{"id": 3, "name": PROJECT}], "total": 1})),
    ("GET", f"{_ORG}/clusters", _clusters),
    ("GET", f"{_ORG}/clusters/11/resource_specs", _resource_specs),
    ("GET", f"{_ORG}/secrets", _secrets),
    ("POST", f"{_ORG}/secrets/generic_secret", _write_secret),
    ("DELETE", rf"{_ORG}/secrets/by_id/(?P<number>\d+)", _delete_secret),
    ("POST", f"{_ORG}/run/spec/sync_yaml", _sync),
    ("POST", f"{_PRO}/run/spec/create_from_yaml", _create),
    ("GET", f"{_PRO}/run_executions", _list),
    ("GET", rf"{_PRO}/run_executions/(?P<number>\d+)", _read),
    ("GET", rf"{_PRO}/run_executions/(?P<number>\d+)/logs", _logs),
    ("POST", rf"{_PRO}/run_executions/(?P<number>\d+)/terminate", _terminate),
    ("DELETE", rf"{_PRO}/run_executions/(?P<number>\d+)", _delete),
    *service_requests.TABLE,
)


def _answer(world: World, method: str, path: str, body: Any) -> Any:
    parts = urlsplit(path)
    query = parse_qs(parts.query)
    for known, pattern, do in _CALLS:
        match = re.fullmatch(pattern, parts.path)
        if known == method and match is not None:
            with world.lock:
                return do(Call(world, body, query, **match.groupdict()))
    raise Refused(404, "NotFound", f"there is no {method} {parts.path}")


def _asked(world: World, method: str, path: str, data: bytes, authorization: str | None) -> tuple[int, Any]:
    """The status and value of an answer."""
    line = f"{method} {path}"
    world.calls.append(line)
    fault = next((row for row in world.faults if row.n_times and re.search(row.pattern, line)), None)
    try:
        if authorization != f"Token {TOKEN}":
            raise Refused(401, "InvalidToken", "invalid access token")
        if fault is not None and not fault.is_after:
            fault.n_times -= 1
            raise Refused(fault.status, fault.code, fault.message)
        answer = _answer(world, method, path, json.loads(data) if data else None)
        if fault is not None:
            fault.n_times -= 1
            raise Refused(fault.status, fault.code, fault.message)
        return 200, answer
    except Refused as exc:
        return exc.status, {"code": exc.code, "message": str(exc)}


def _handler(world: World) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            self._send(*_asked(world, self.command, self.path, data, self.headers.get("authorization")))

        def _send(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = do_PATCH = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Its `calls` are its log."""

    return Handler
