"""All problems before `up`, and the machines of a cluster."""

from __future__ import annotations

from penstock.errors import Problem
from penstock.hardware import Machine
from penstock.spec.deployment import Deployment
from penstock.targets import machines_of_file
from penstock.targets.kubernetes.api import Api


def problems(api: Api, deployment: Deployment) -> list[Problem]:  # noqa: ARG001 - what the cluster lacks follows
    return []


def file_problems(deployment: Deployment) -> list[Problem]:  # noqa: ARG001 - follows
    return []


def machines(api: Api, deployment: Deployment) -> list[Machine]:
    names = [f"node-{rank + 1}" for rank in range(deployment.hardware.nodes)]
    return machines_of_file(deployment, names, f"context {api.context} was not asked")
