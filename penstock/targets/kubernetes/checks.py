from penstock.hardware import Machine
from penstock.spec.deployment import Deployment
from penstock.errors import Problem
from penstock.targets.kubernetes.api import Api
from penstock.targets import machines_of_file


def problems(api: Api, deployment: Deployment) -> list[Problem]:
    return []


def file_problems(deployment: Deployment) -> list[Problem]:
    return []


def machines(api: Api, deployment: Deployment) -> list[Machine]:
    return machines_of_file(deployment, ["node-1"], "stub")
