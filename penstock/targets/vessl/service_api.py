"""VESSL's calls for services, as its SDK 0.1.199 and its CLI make them. https://docs.vessl.ai "Serve YAML" """

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from penstock.targets.vessl.api import Api, LogLine, converted, form_errors, unless_absent

# Of a revision: the CLI takes these for terminated.
ENDED = ("failed", "stopped")
_MOST_LINES = 1000


class Gateway(msgspec.Struct, frozen=True):
    """VESSL's own, before all workers of a service."""

    enabled: bool | None = None
    endpoint: str | None = None
    status: str | None = None
    last_error: str | None = None


class Service(msgspec.Struct, frozen=True):
    """As the API has it; of its fields those that are read here."""

    name: str
    description: str = ""
    status: str = ""
    gateway_config: Gateway | None = None
    active_rollout: dict[str, Any] | None = None

    @property
    def address(self) -> str | None:
        """Its public URL, once VESSL's gateway leads somewhere."""
        gateway = self.gateway_config
        if gateway is None or not gateway.enabled or not gateway.endpoint or gateway.status != "success":
            return None
        url = gateway.endpoint if "://" in gateway.endpoint else f"https://{gateway.endpoint}"
        return url.rstrip("/")


class Revision(msgspec.Struct, frozen=True):
    number: int
    status: str = ""
    yaml_spec: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class Worker(msgspec.Struct, frozen=True):
    """A pod of a revision."""

    pod_name: str
    revision_number: int
    status: str
    ready: bool | None = None
    pod_deleted: bool | None = None


class Autoscaling(msgspec.Struct, frozen=True):
    min: int
    max: int
    metric: str
    target: int


class ServiceApi:
    """The services of an organization. Blocks and raises as `Api` does."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._all = f"{api.in_organization}/model_services"

    def _one(self, name: str) -> str:
        return f"{self._all}/{quote(name, safe='')}"

    def read(self, name: str) -> Service | None:
        """None where there is none."""
        found: Service | None = None
        with unless_absent():
            found = converted(self._api.get(self._one(name)), Service)
        return found

    def create(self, name: str, cluster_id: int, description: str) -> None:
        body = {"name": name, "kernel_cluster_id": cluster_id, "description": description}
        self._api.call("POST", self._all, {**body, "service_type": "provisioned"})

    def delete(self, name: str) -> None:
        """Nothing where there is none."""
        with unless_absent():
            self._api.call("DELETE", self._one(name), None)

    def judged(self, name: str, yaml_spec: str) -> list[tuple[str, str]]:
        """What the server's dry check says against a revision: attributes with its words."""
        body = {"model_service_name": name, "serverless": False, "yaml_spec": yaml_spec}
        return form_errors(self._api.post(f"{self._all}/revisions/sync_yaml", body))

    def create_revision(self, name: str, yaml_spec: str) -> int:
        """Its number. Not tried twice: who calls looks whether it was made."""
        body = {"yaml_spec": yaml_spec, "serverless": False}
        return int(self._api.call("POST", f"{self._one(name)}/revisions/create_with_yaml", body)["number"])

    def activate(self, name: str, number: int) -> None:
        """Start its workers, lead all traffic there, and end every other revision."""
        revision = {"type": "number", "number": number}
        target = {"revision": revision, "traffic_weight": 100}
        steps = {
            "ensure_revisions_up_and_running": {"revisions": [revision]},
            "update_endpoint": {"annotations": {}, "targets": [target]},
            "terminate_revisions": {"excluded_revisions": [revision]},
        }
        rows = [{"step_type": kind, kind: content} for kind, content in steps.items()]
        self._api.call(
            "POST", f"{self._one(name)}/rollouts", {"message": "penstock up", "rollout_spec": {"steps": rows}}
        )

    def abort_rollout(self, name: str) -> None:
        self._api.post(f"{self._one(name)}/rollouts/abort", {})

    def revisions(self, name: str) -> list[Revision]:
        """The newest first."""
        answer = self._api.get(f"{self._one(name)}/revisions")
        return sorted(converted(answer.get("results") or [], list[Revision]), key=lambda row: -row.number)

    def terminate(self, name: str, number: int) -> None:
        self._api.post(f"{self._one(name)}/revisions/{number}/terminate", {})

    def scale(self, name: str, number: int, autoscaling: Autoscaling) -> None:
        self._api.call("PATCH", f"{self._one(name)}/revisions/{number}", {"autoscaling": autoscaling})

    def workers(self, name: str, number: int) -> list[Worker]:
        """Those that live, by their names."""
        rows = converted(self._api.get(f"{self._one(name)}/workloads").get("results") or [], list[Worker])
        rows = [
            row for row in rows if row.revision_number == number and row.status != "deleted" and not row.pod_deleted
        ]
        return sorted(rows, key=lambda row: row.pod_name)

    def logs(self, name: str, number: int, pod_name: str | None, since: float) -> list[LogLine]:
        """The last lines from that time on (Unix seconds), the oldest first. VESSL's `after` is not used: nothing says
        in which unit it is."""
        query = f"limit={_MOST_LINES}&revision_number={number}"
        query += "" if pod_name is None else f"&pod_name={quote(pod_name, safe='')}"
        rows = converted(self._api.get(f"{self._one(name)}/logs?{query}").get("logs") or [], list[LogLine])
        return sorted((row for row in rows if row.timestamp >= since), key=lambda row: row.timestamp)

    def page_of(self, name: str) -> str:
        return self._api.page("services", name)
