"""The fake VESSL's calls for services. Answers have every field that the SDK's own classes require."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.testing.fake_vessl import forms
from penstock.testing.fake_vessl.account import CLUSTER, PATH_OF_ORGANIZATION, Call, Refused, form_of, variables_of
from penstock.testing.fake_vessl.services import Revision, Service, Worker

_AT = "2026-09-21T12:00:00Z"
_USER = {"id": 1, "username": "ada", "email": "ada@example.org", "display_name": "Ada"}
_CLUSTER = {"id": 11, "name": CLUSTER, "is_vessl_managed": True, "provider": "gcp", "region": "oregon"}
_ROLLOUT = [("ensure_revisions_up_and_running", "revisions"), ("update_endpoint", "targets"),
            ("terminate_revisions", "excluded_revisions")]  # fmt: skip


def _keys(body: Any, required: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    given = {key for key, value in (body or {}).items() if value is not None}
    wrong = (given - required - optional) | (required - given)
    if wrong:
        raise Refused(400, "InvalidArgument", f"unknown or missing fields {sorted(wrong)}")


def _service(call: Call) -> Service:
    service = call.world.services.get(call.name)
    if service is None:
        raise Refused(404, "NotFound", f'no service "{call.name}"')
    service.settle()
    return service


def _revision(call: Call) -> Revision:
    revision = _service(call).revisions.get(int(call.number))
    if revision is None:
        raise Refused(404, "NotFound", f"no revision {call.number}")
    return revision


def _of_service(service: Service) -> dict[str, Any]:
    active = service.revisions.get(service.active)
    is_live = active is not None and bool(active.ready)
    alive = [row for row in service.revisions.values() if row.living]
    rules = [{"revision_number": service.active, "traffic_weight": 100}] if service.active else []
    rollout = {"current_step": 1, "current_step_description": "starts workers", "expected_final_revisions": [],
               "is_rollback": False, "message": "", "total_steps": 3}  # fmt: skip
    return {
        "id": 5,
        "name": service.name,
        "description": service.description,
        "status": "running" if is_live else "ready",
        "type": "provisioned",
        "active_rollout": None if service.rollout is None else rollout,
        "alive_revision_numbers": [row.number for row in alive],
        "assume_subject": {"subject_type": "user", "user_id": 1, "user_name": "ada"},
        "created_by": _USER,
        "last_updated_by": _USER,
        "created_dt": _AT,
        "updated_dt": _AT,
        "docs_enabled": False,
        "gateway_config": {
            "enabled": bool(service.active),
            "endpoint": service.balancer.url if service.active else "",
            "status": "success",
            "rules": rules,
            "model_service_id": 5,
        },
        "kernel_cluster": _CLUSTER,
        "kernel_cluster_id": 11,
        "kernel_cluster_name": CLUSTER,
        "running_replicas": sum(len(row.ready) for row in alive),
        "total_replicas": sum(len(row.living) for row in alive),
        "total_revisions": len(service.revisions),
    }


def _of_revision(service: Service, revision: Revision) -> dict[str, Any]:
    spec = {
        "autoscaling": revision.form["service"]["autoscaling"],
        "expose": int(revision.form["service"]["expose"]),
        "ports": [{"name": row["name"], "protocol": row["type"], "source_port": row["port"], "target_port": 0}
                  for row in revision.form["ports"]],
    }  # fmt: skip
    return {
        "id": 100 + revision.number,
        "number": revision.number,
        "message": revision.form["message"],
        "status": revision.status,
        "model_service_name": service.name,
        "available_replicas": len(revision.ready),
        "total_replicas": len(revision.living),
        "created_by": _USER,
        "created_dt": _AT,
        "kernel_image": {"id": 1, "image_url": revision.form["image"], "name": revision.form["image"]},
        "resource_spec_name": revision.form["resources"]["preset"],
        "revision_spec": spec,
        "traffic_weight": 100 if service.active == revision.number else 0,
        "volume_operations": [],
        "yaml_spec": revision.yaml_spec,
    }


def _list(call: Call) -> Any:
    rows = [_of_service(service) for service in call.world.services.values()]
    return {"results": rows, "count_by_status": {}, "page_info": {"total_count": len(rows)}}


def _create(call: Call) -> Any:
    optional = {"description", "service_type", "node_port", "subdomain"}
    _keys(call.body, {"name", "kernel_cluster_id"}, optional)
    if call.body["name"] in call.world.services:
        raise Refused(409, "AlreadyExists", "a service of that name exists")
    if call.body["kernel_cluster_id"] != 11:
        raise Refused(400, "InvalidArgument", "no such cluster")
    service = call.world.services[call.body["name"]] = Service(call.body["name"], call.body.get("description") or "")
    return _of_service(service)


def _read(call: Call) -> Any:
    return _of_service(_service(call))


def _delete(call: Call) -> Any:
    service = _service(call)
    if any(row.living for row in service.revisions.values()):
        raise Refused(400, "InvalidState", "a revision of it is alive: terminate it first")
    service.close()
    call.world.deleted.append(call.world.services.pop(call.name))
    return {}


def _sync(call: Call) -> Any:
    _keys(call.body, {"yaml_spec", "model_service_name"}, {"serverless", "arguments"})
    body = {"yaml_spec": call.body["yaml_spec"]}
    _, form, problems = form_of(body, forms.service_problems)
    rows = [{"attribute": path, "message": message} for path, message in problems]
    return {"validated": not rows, "form": form, "form_errors": {"validation_errors": rows}}


def _create_revision(call: Call) -> Any:
    _keys(call.body, {"yaml_spec", "serverless"}, {"arguments", "node_port", "subdomain"})
    service = _service(call)
    text, form, problems = form_of(call.body, forms.service_problems)
    if problems:
        raise Refused(400, "InvalidArgument", "; ".join(" ".join(row) for row in problems))
    variables = variables_of(call.world, form)
    number = max(service.revisions, default=0) + 1
    folder = call.world.folder / f"service-{service.name}-{len(call.world.deleted)}"
    revision = Revision(number, text, form, variables, folder, call.world.pace)
    service.revisions[number] = revision
    return _of_revision(service, revision)


def _revisions(call: Call) -> Any:
    service = _service(call)
    rows = [_of_revision(service, row) for row in service.revisions.values()]
    return {"results": rows, "page_info": {"total_count": len(rows)}}


def _read_revision(call: Call) -> Any:
    return _of_revision(_service(call), _revision(call))


def _update(call: Call) -> Any:
    _keys(call.body, {"autoscaling"}, {"auto_scaler_config"})
    revision = _revision(call)
    problems = list(forms.problems(call.body["autoscaling"], "V1Autoscaling"))
    if problems:
        raise Refused(400, "InvalidArgument", str(problems))
    revision.form["service"]["autoscaling"] = call.body["autoscaling"]
    return _read_revision(call)


def _terminate(call: Call) -> Any:
    _revision(call).end()
    return _read_revision(call)


def _launch(call: Call) -> Any:
    _revision(call).is_wanted = True
    return _read_revision(call)


def _rollout(call: Call) -> Any:
    """Only such as the CLI makes for --set-current-active."""
    _keys(call.body, {"rollout_spec"}, {"message"})
    service, steps = _service(call), call.body["rollout_spec"]["steps"]
    if service.rollout is not None:
        raise Refused(409, "Conflict", "the service is rolling out")
    if [(step["step_type"], *step[step["step_type"]]) for step in steps] not in (
        [(kind, field) for kind, field in _ROLLOUT],
        [("update_endpoint", "annotations", "targets") if kind == "update_endpoint" else (kind, field)
         for kind, field in _ROLLOUT],
    ):  # fmt: skip
        raise Refused(400, "InvalidArgument", "unknown steps")
    (wanted,) = steps[0]["ensure_revisions_up_and_running"]["revisions"]
    (target,) = steps[1]["update_endpoint"]["targets"]
    if wanted["type"] != "number" or target != {"revision": wanted, "traffic_weight": 100}:
        raise Refused(400, "InvalidArgument", "traffic goes elsewhere")
    revision = service.revisions.get(wanted["number"])
    if revision is None:
        raise Refused(404, "NotFound", "no such revision")
    revision.is_wanted, service.rollout = True, revision.number
    return {"number": 1, "message": call.body.get("message") or "", "status": "rolling_out", "created_by": _USER,
            "created_dt": _AT, "current_step": 0, "model_service_name": service.name, "step_statuses": {},
            "rollout_spec": call.body["rollout_spec"]}  # fmt: skip


def _rollouts(call: Call) -> Any:
    service = _service(call)
    row = {"number": 1, "message": "", "status": "rolling_out", "created_by": _USER, "created_dt": _AT,
           "current_step": 0}  # fmt: skip
    return {"rollouts": [row] if service.rollout is not None else []}


def _abort(call: Call) -> Any:
    service = _service(call)
    service.rollout = None
    return {"rollback_requested": False, "target_rollout_number": 1}


def _workloads(call: Call) -> Any:
    def row(revision: Revision, worker: Worker) -> dict[str, Any]:
        facts = {"pod_name": worker.name, "ready": worker.is_ready, "status": worker.status}
        return {**facts, "revision_number": revision.number, "model_service_id": 5, "updated_dt": _AT}

    return {"results": [row(*pair) for pair in _service(call).workers]}


def _logs(call: Call) -> Any:
    wrong = call.query.keys() - {"limit", "revision_number", "pod_name"}
    if wrong:
        raise Refused(400, "InvalidArgument", f"unknown parameters {sorted(wrong)}")
    pod, most = call.query.get("pod_name"), int(call.query["limit"][0])
    containers = [
        worker.container
        for revision, worker in _service(call).workers
        if str(revision.number) in call.query["revision_number"] and (pod is None or worker.name in pod)
    ]
    rows = sorted(row for container in containers for row in container.lines(0.0, None))[-most:]
    fields = {"stream": "stdout", "source": "run", "entity": "", "type": "", "metadata": {}}
    return {"logs": [{"timestamp": at, "message": text, **fields} for at, text in reversed(rows)]}


_ALL = f"{PATH_OF_ORGANIZATION}/model_services"
_ONE = rf"{_ALL}/(?P<name>[a-z][a-z0-9-]*)"
_REVISION = rf"{_ONE}/revisions/(?P<number>\d+)"
TABLE: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("GET", _ALL, _list),
    ("POST", _ALL, _create),
    ("POST", f"{_ALL}/revisions/sync_yaml", _sync),
    ("GET", _ONE, _read),
    ("DELETE", _ONE, _delete),
    ("POST", f"{_ONE}/revisions/create_with_yaml", _create_revision),
    ("GET", f"{_ONE}/revisions", _revisions),
    ("GET", _REVISION, _read_revision),
    ("PATCH", _REVISION, _update),
    ("POST", f"{_REVISION}/terminate", _terminate),
    ("POST", f"{_REVISION}/launch", _launch),
    ("POST", f"{_ONE}/rollouts", _rollout),
    ("GET", f"{_ONE}/rollouts", _rollouts),
    ("POST", f"{_ONE}/rollouts/abort", _abort),
    ("GET", f"{_ONE}/workloads", _workloads),
    ("GET", f"{_ONE}/logs", _logs),
)
