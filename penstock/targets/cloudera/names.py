"""Names and paths that all parts of this target share. Pure.

A project's file system is /home/cdsw in all of its pods; paths of the API are relative to it.
"""

from __future__ import annotations

import re

from penstock.run_folder import Kind
from penstock.spec.blocks import Cloudera
from penstock.spec.deployment import Deployment

PROJECT_FOLDER = "/home/cdsw"
HOME = f"{PROJECT_FOLDER}/.penstock"  # PENSTOCK_HOME of the pods
GATEWAY_ADMIN_PORT, GATEWAY_PAGE_PORT = 8001, 8002  # on the pod's address; the second is for the chat page's pod
# In the run folder: the gateway has drained, so that nodes may end; what a node says of its pod.
DRAINED, PODS = "gateway/drained", "pods"
# Of nodes that are workers: what the launcher has noted, and that it shall stop all.
WORKERS, WORKERS_END = "workers.json", "workers.end"
SCRIPT, APPLICATION, PAGE, NODE = "start.py", "application.json", "page.json", "node.json"
WEIGHTS, WEIGHTS_PART = "weights.json", "weights"  # the job that fetches the model: its body, its part of names
REPLICA, RANK = "{replica}", "{rank}"
# Subdomains are DNS labels, and unique in a workbench.
_FRONT = "penstock-"
_OURS = re.compile(
    r"penstock-(?P<name>[a-z0-9][a-z0-9-]*)-(?P<launch>[0-9a-f]{12})-(?P<part>gateway|ui|weights|r\d+-n\d+)\Z"
)


# Of `doctor`'s measurements: no part of a deployment, also not of one with the name "doctor".
_PROBE = re.compile(r"penstock-doctor-(?P<id>[0-9a-f]{12})-(application|job-[01])\Z")


def block_of(deployment: Deployment) -> Cloudera:
    return deployment.cloudera or Cloudera()


def placed(deployment: Deployment) -> tuple[Kind, ...]:
    """The kinds of its units."""
    return ("replica", "gateway", "controller", *(("ui",) if deployment.chat_page is not None else ()))


def run_path(name: str) -> str:
    """The run folder in the pods."""
    return f"{HOME}/runs/{name}"


def in_project(path: str) -> str:
    """A path of the pods as the API has it."""
    return path.removeprefix(f"{PROJECT_FOLDER}/")


def subdomain(name: str, part: str = "") -> str:
    """Of the application with the gateway, or of `part` ("ui")."""
    return f"{_FRONT}{name}{f'-{part}' if part else ''}"


def workload(name: str, launch: str, part: str) -> str:
    """The name of an application ("gateway", "ui") or of a node's job ("r0-n1")."""
    return f"{_FRONT}{name}-{launch}-{part}"


def node_part(replica: str, rank: int | str) -> str:
    return f"r{replica}-n{rank}"


def is_of(title: str, name: str) -> bool:
    """Whether a workload of that name belongs to a deployment, of any launch."""
    match = _OURS.match(title)
    return match is not None and match["name"] == name


def probe(own: str, part: str) -> str:
    """The name of a workload of a measurement."""
    return f"{_FRONT}doctor-{own}-{part}"


def probe_domain(own: str) -> str:
    return f"{_FRONT}doctor-{own}"


def probe_folder(own: str) -> str:
    """As the API has it."""
    return in_project(f"{HOME}/doctor/{own}")


def probe_in(title: str) -> str | None:
    """The measurement that a workload of that name belongs to."""
    match = _PROBE.match(title)
    return None if match is None else match["id"]


def deployment_in(title: str) -> str | None:
    """The deployment that a workload of that name belongs to; None for one of others."""
    match = _OURS.match(title)
    return None if match is None else match["name"]


def log_of(kind: Kind, name: str, rank: int = 0) -> str:
    """The part of the run folder's logs that a unit writes."""
    if kind != "replica":
        return kind
    return f"replica-{name}" if rank == 0 else f"replica-{name}-n{rank}"
