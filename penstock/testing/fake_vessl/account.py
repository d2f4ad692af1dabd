"""What the calls of the fake VESSL share: its account, errors, and the YAML that they are given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.testing.fake_vessl.containers import Container, Pace
from penstock.testing.fake_vessl.services import Service

TOKEN, ORGANIZATION, PROJECT, CLUSTER = "token-of-the-fake", "acme", "serving", "vessl-gcp-oregon"
PATH_OF_ORGANIZATION = f"/api/v1/organizations/{ORGANIZATION}"
_PRESETS = (
    {"id": 1, "name": "gpu-l4-small", "processor_type": "GPU", "cpu_limit": 6.0, "memory_limit": "42Gi",
     "gpu_type": "NVIDIA-L4", "gpu_limit": 1, "spot": False, "default_hourly_credit": 1},
    {"id": 2, "name": "gpu-l4-small-spot", "processor_type": "GPU", "cpu_limit": 6.0, "memory_limit": "42Gi",
     "gpu_type": "NVIDIA-L4", "gpu_limit": 1, "spot": True, "default_hourly_credit": 1},
    {"id": 3, "name": "cpu-medium", "processor_type": "CPU", "cpu_limit": 4.0, "memory_limit": "16Gi",
     "gpu_type": None, "gpu_limit": 0, "spot": False, "default_hourly_credit": 0.5},
    {"id": 4, "name": "gpu-new", "processor_type": "GPU", "cpu_limit": 8.0, "memory_limit": "64Gi",
     "gpu_type": "X9000", "gpu_limit": 1, "spot": False, "default_hourly_credit": 9},
)  # fmt: skip


_CLUSTER = {
    "id": 11, "name": CLUSTER, "status": "connected", "is_vessl_managed": True, "available_gpus": ["NVIDIA-L4"],
    "vessl_service_enabled": True,
}  # fmt: skip


class Refused(Exception):
    """An error status with VESSL's code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Fault:
    """The next `n_times` calls whose method and path match answer this, after they were done with `is_after`."""

    pattern: str
    status: int
    code: str
    message: str
    n_times: int = 1
    is_after: bool = False


@dataclass
class World:
    """What an account of the fake has."""

    folder: Path
    pace: Pace = field(default_factory=Pace)
    credit_balance: float = 100.0
    cluster: dict[str, Any] = field(default_factory=lambda: dict(_CLUSTER))
    presets: list[dict[str, Any]] = field(default_factory=lambda: [dict(row) for row in _PRESETS])
    secrets: dict[str, tuple[int, str]] = field(default_factory=dict)
    runs: dict[int, Container] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)
    deleted: list[Service] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def workers(self) -> list[Container]:
        """Of services, those that have ended too."""
        return [
            worker.container for service in [*self.services.values(), *self.deleted] for _, worker in service.workers
        ]

    @property
    def living(self) -> list[Container]:
        return [run for run in self.runs.values() if not run.has_ended]


class Call(NamedTuple):
    """A request. `number`, or a service's `name` and perhaps a revision's number: those in its path."""

    world: World
    body: Any
    query: dict[str, list[str]]
    number: str = ""
    name: str = ""


def form_of(
    body: Any, judge: Callable[[Any], list[tuple[str, str]]]
) -> tuple[str, dict[str, Any], list[tuple[str, str]]]:
    """The text, the form, and what is wrong with that."""
    import yaml

    if not isinstance(body, dict) or "yaml_spec" not in body:
        raise Refused(400, "InvalidArgument", "yaml_spec is missing")
    try:
        form = yaml.safe_load(body["yaml_spec"])
    except yaml.YAMLError as exc:
        raise Refused(400, "InvalidYAML", str(exc)) from exc
    return body["yaml_spec"], form, judge(form)


def variables_of(world: World, form: dict[str, Any]) -> dict[str, str]:
    """What a container gets: the values of secrets too. The account must be able to pay for it."""
    if world.credit_balance <= 0:
        raise Refused(403, "InsufficientCredit", "the organization has no credit")
    if form["resources"].get("preset") not in {row["name"] for row in world.presets}:
        raise Refused(400, "InvalidArgument", "no such preset")
    variables = {}
    for name, row in form.get("env", {}).items():
        value = row if isinstance(row, str) else row.get("value")
        secret = None if isinstance(row, str) else row.get("secret")
        if secret is not None and secret not in world.secrets:
            raise Refused(400, "InvalidArgument", f'no such secret "{secret}"')
        variables[name] = value if secret is None else world.secrets[secret][1]
    return variables
