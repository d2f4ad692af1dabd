"""Names, labels and paths that all objects of a deployment share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.run_folder import Kind
from penstock.spec.blocks import Kubernetes
from penstock.spec.deployment import Deployment

# An object of the API, as its JSON.
Object = dict[str, Any]

MANAGER = "penstock"  # of server-side apply: https://kubernetes.io/docs/reference/using-api/server-side-apply/
# https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/
MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"  # the deployment's name
COMPONENT = "app.kubernetes.io/component"  # replica, gateway, controller, ui, weights
REPLICA = "penstock.dev/replica"
REVISION = "penstock.dev/revision"  # of what a replica's pods run: another one is replaced
CONFIG = "penstock.dev/config"  # annotation of the gateway's and the controller's pods: the hash of what they read

# In the containers.
HOME = "/penstock"  # an emptyDir, and PENSTOCK_HOME
CODE = f"{HOME}/code"
READY_FILE = f"{HOME}/ready"
ARCHIVE, CONFIG_FOLDER, SECRET_FOLDER = "/etc/penstock/code", "/etc/penstock/config", "/etc/penstock/secret"
STORE_FOLDER = "/var/lib/penstock"  # the gateway's keys and usage
MODELS_FOLDER = "/models"

CONFIG_FILE = "config"  # of the artifact: the hash of all that `up` sent

ENGINE_PORT, GATEWAY_PORT, ADMIN_PORT, UI_PORT = 8000, 8000, 8001, 7860


def block_of(deployment: Deployment) -> Kubernetes:
    return deployment.kubernetes or Kubernetes()


def placed(deployment: Deployment) -> tuple[Kind, ...]:
    """The kinds of its units."""
    return ("replica", "gateway", "controller", *(("ui",) if deployment.chat_page is not None else ()))


def run_path(deployment: Deployment) -> str:
    """The run folder in the pods."""
    return f"{HOME}/runs/{deployment.name}"


# ---- names of objects: a deployment's has at most 40 characters, so all of these have at most 63 ---------------------


def anchor(name: str) -> str:
    """The ConfigMap that owns everything else; it holds what the controller reads."""
    return f"{name}-run"


def secrets(name: str) -> str:
    return f"{name}-secrets"


def gateway(name: str) -> str:
    """Of the gateway's Deployment and of its Service for clients."""
    return f"{name}-gateway"


def gateway_pods(name: str) -> str:
    """The headless Service by which nodes and controller reach the admin port of every gateway pod."""
    return f"{name}-gateway-pods"


def public(name: str) -> str:
    """Of what clients outside use: the Service of type LoadBalancer, the Ingress or the HTTPRoute."""
    return f"{name}-public"


def store(name: str) -> str:
    """The claim of the gateway's keys and usage."""
    return f"{name}-store"


def scrape(name: str) -> str:
    """The Secret whose key "token" opens the /metrics pages, and nothing else, to Prometheus."""
    return f"{name}-scrape"


def controller(name: str) -> str:
    return f"{name}-controller"


def ui(name: str) -> str:
    """Of the chat page's Deployment and Service."""
    return f"{name}-ui"


def dial(name: str) -> str:
    """What counts replicas where HPA or KEDA sets their number: a Deployment without pods, and its autoscaler."""
    return f"{name}-scale"


def nodes(name: str) -> str:
    """The headless Service of the replicas' pods."""
    return f"{name}-nodes"


def replica_set(name: str, replica: str) -> str:
    """The StatefulSet or LeaderWorkerSet of a replica; the pod of rank 1 is this and "-1"."""
    return f"{name}-r{replica}"


def state(name: str) -> str:
    """The ConfigMap of what the controller last saw: state.json, handle.json, events.jsonl."""
    return f"{name}-state"


def desired(name: str) -> str:
    """The ConfigMap of what the user last asked for: desired.json."""
    return f"{name}-desired"


def labels(name: str, component: str | None = None, **more: str) -> dict[str, str]:
    """The labels of an object, or with `component` of its pods; the first two select all of a deployment."""
    common = {"app.kubernetes.io/name": "penstock", MANAGED_BY: MANAGER, INSTANCE: name}
    return common | ({COMPONENT: component} if component else {}) | more


def selector(values: Mapping[str, str]) -> str:
    """A label selector of the API's query: "a=b,c=d"."""
    return ",".join(f"{key}={value}" for key, value in values.items())


def build(kind: str, name: str, deployment: Deployment, component: str | None = None, **parts: Any) -> Object:
    """An object with the labels of its deployment; `kind` is "v1/Service", "apps/v1/Deployment"."""
    api, _, word = kind.rpartition("/")
    metadata: Object = {"name": name, "labels": labels(deployment.name, component)}
    return {"apiVersion": api, "kind": word, "metadata": metadata, **parts}


def owned(child: Object, owner: Object | None) -> Object:
    """That object, deleted together with its owner: https://kubernetes.io/docs/concepts/architecture/garbage-collection/"""
    if owner is None:
        return child
    reference = {
        "apiVersion": "v1",
        "kind": owner.get("kind", "ConfigMap"),
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return {**child, "metadata": {**child["metadata"], "ownerReferences": [reference]}}
