"""What a namespace's quotas and limits leave, against what a deployment requests before its plan is known."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import Problem
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import capacity, gpus
from penstock.targets.kubernetes.api import Api
from penstock.targets.kubernetes.capacity import quantity
from penstock.targets.kubernetes.objects import INSTANCE, block_of
from penstock.text import show_bytes


def problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """What a ResourceQuota leaves, against what the replicas request; what this deployment has counts as left."""
    needs = _needs(deployment)
    quotas = api.list("ResourceQuota")
    ours = api.list("Pod", {INSTANCE: deployment.name}) if quotas else []
    held = [
        capacity.pod_requests(pod) | {"pods": 1.0} for pod in ours if pod.get("status", {}).get("phase") != "Failed"
    ]
    for quota in quotas:
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue  # for certain pods only
        status = quota.get("status") or {}
        for key, limit in (status.get("hard") or quota["spec"].get("hard") or {}).items():
            resource = key.removeprefix("requests.").removeprefix("limits.")
            need, own = needs.get(resource, 0.0), sum(row.get(resource, 0.0) for row in held)
            left = quantity(limit) - quantity((status.get("used") or {}).get(key, "0")) + own
            if need > left:
                words = f'quota "{quota["metadata"]["name"]}" leaves {_amount(resource, left)} of {limit} {key}'
                hint = "fewer replicas, another namespace, or ask for more"
                yield Problem("kubernetes.namespace", f"{words}, and {_amount(resource, need)} are needed", hint)


def _needs(deployment: Deployment) -> dict[str, float]:
    """Of all replicas together, by resource; pods with those of gateway, controller and chat page."""
    hardware, block = deployment.hardware, block_of(deployment)
    n_pods = deployment.replicas.first * hardware.nodes
    n_cpus, n_bytes = capacity.pod_needs(deployment)
    each = {gpus.RESOURCE: float(hardware.gpus_per_node or 0), "cpu": n_cpus, "memory": n_bytes}
    n_pods_more = block.gateways + (1 if deployment.chat_page is None else 2)
    return {name: n_pods * value for name, value in each.items()} | {"pods": float(n_pods + n_pods_more)}


def _amount(resource: str, value: float) -> str:
    return show_bytes(value) if resource == "memory" else f"{value:g}"


def limit_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """https://kubernetes.io/docs/concepts/policy/limit-range/"""
    n_cpus, n_bytes = capacity.pod_needs(deployment)
    n_gpus = float(deployment.hardware.gpus_per_node or 0)
    fields = {"cpu": ("kubernetes.cpus_per_node", n_cpus), "memory": ("kubernetes.memory", n_bytes)}
    fields[gpus.RESOURCE] = ("hardware.gpus_per_node", n_gpus)
    for row in api.list("LimitRange"):
        for limit in row["spec"].get("limits", ()):
            for resource, most in (limit.get("max") or {}).items():
                path, need = fields.get(resource, ("", 0.0))
                if limit["type"] in ("Container", "Pod") and need > quantity(most):
                    words = f'{_amount(resource, need)} a pod, but LimitRange "{row["metadata"]["name"]}" allows {most}'
                    yield Problem(path, words)
