"""What the nodes of a cluster have, and whether that is what a deployment requests. Pure.

Pods wait in a queue, so a node counts with all it has: only what no node has is a problem. What other pods request is
left out where the file does not say how many GPUs a replica takes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.engines.vllm.images import versions_of
from penstock.errors import Problem
from penstock.hardware import Gpu, Machine
from penstock.spec.deployment import Deployment
from penstock.targets.assumed import gpus_of, machines_of_file
from penstock.targets.kubernetes import gpus, objects, replicas
from penstock.targets.kubernetes.objects import Object, block_of
from penstock.targets.kubernetes.pods import merged
from penstock.text import GIB, show_bytes

_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {f"{letter}i": 1024.0 ** (power + 1) for power, letter in enumerate("KMGTPE")}
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:([eE][+-]?\d+)|(n|u|m|k|[KMGTPE]i?)?)\Z")
_SHOWN = 8
# https://cloud.google.com/kubernetes-engine/docs/concepts/timesharing-gpus; elsewhere the product has a suffix
_GKE_SHARING = "cloud.google.com/gke-gpu-sharing-strategy"


class Node(msgspec.Struct, frozen=True):
    """A node as a replica's pods see it. `has`: allocatable, `used`: requests of other deployments' pods on it.

    `is_selected`: it has the labels that the pods ask for; `taints`: those that they do not tolerate. `is_sharing`:
    several pods get the same GPU.
    """

    name: str
    has: dict[str, float]
    used: dict[str, float]
    card: gpus.NodeGpu | None
    is_selected: bool
    is_up: bool
    taints: tuple[str, ...]
    is_sharing: bool

    @property
    def n_gpus(self) -> int:
        return int(self.has.get(gpus.RESOURCE, 0))

    @property
    def n_free_gpus(self) -> int:
        return max(0, self.n_gpus - int(self.used.get(gpus.RESOURCE, 0)))


def quantity(text: object) -> float:
    """ "500m" is 0.5, "64Gi" is 2**36.  Raises ValueError for what is no quantity."""
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"no quantity: {text}")
    number, exponent, unit = match.groups()
    return float(number + (exponent or "")) * _UNITS[unit or ""]


def is_quantity(text: str) -> bool:
    return _QUANTITY.match(text) is not None


# ---- reading ---------------------------------------------------------------------------------------------------------


def nodes_of(rows: Sequence[Object], pods: Sequence[Object], deployment: Deployment) -> list[Node]:
    """From objects of the API. `pods`: of all namespaces; those of this deployment count as free, since they leave."""
    used: dict[str, Counter[str]] = {}
    for pod in pods:
        host = pod.get("spec", {}).get("nodeName")
        is_over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        is_ours = pod["metadata"].get("labels", {}).get(objects.INSTANCE) == deployment.name
        if host and not is_over and not is_ours:
            used.setdefault(host, Counter()).update(pod_requests(pod))
    spec = _scheduling(deployment)
    return [_node(row, used.get(row["metadata"]["name"], Counter()), spec) for row in rows]


def pod_requests(pod: Object) -> dict[str, float]:
    """The requests of its containers; init containers run before them, and seldom need more."""
    total = Counter[str]()
    for container in pod["spec"].get("containers", ()):
        rows = container.get("resources", {})
        for name, value in {**rows.get("limits", {}), **rows.get("requests", {})}.items():
            total[name] += quantity(value)  # type: ignore[assignment]
    return dict(total)


def _scheduling(deployment: Deployment) -> Object:
    """Where pods of a replica may go, as far as the file says so: selector, terms of affinity, tolerations."""
    block, gpu = block_of(deployment), deployment.hardware.gpu
    takes_card = gpu is not None and not block.node_selector and deployment.hardware.gpus_per_node != 0
    spec = {
        "tolerations": [{"key": gpus.RESOURCE, "operator": "Exists"}, *block.tolerations],
        "nodeSelector": block.node_selector,
        "terms": gpus.node_terms(gpu) if takes_card and gpu is not None else [],
    }
    whole: Object = merged(spec, block.patch.get("spec") or {})
    return whole


def _node(row: Object, used: Mapping[str, float], spec: Object) -> Node:
    labels, status = row["metadata"].get("labels") or {}, row.get("status", {})
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    is_up = is_ready and not row.get("spec", {}).get("unschedulable")
    taints = [taint for taint in row.get("spec", {}).get("taints") or () if not _is_passing(taint, spec["tolerations"])]
    return Node(
        row["metadata"]["name"],
        {name: quantity(value) for name, value in status.get("allocatable", {}).items()},
        dict(used),
        gpus.gpu_of(labels),
        _is_selected(labels, spec),
        is_up,
        tuple(f"{taint['key']}={taint.get('value', '')}:{taint['effect']}".replace("=:", ":") for taint in taints),
        _GKE_SHARING in labels or labels.get(gpus.PRODUCT, "").endswith("-SHARED"),
    )


def _is_selected(labels: Mapping[str, str], spec: Object) -> bool:
    if any(labels.get(key) != value for key, value in spec["nodeSelector"].items()):
        return False
    terms = [term["matchExpressions"] for term in spec["terms"]]
    return not terms or any(all(labels.get(row["key"]) in row["values"] for row in rows) for rows in terms)


def _is_passing(taint: Object, tolerations: Sequence[Object]) -> bool:
    """Whether a taint does not keep our pods away. Those of lost and cordoned nodes are told as `is_up`."""
    if taint["effect"] == "PreferNoSchedule" or taint["key"].startswith("node.kubernetes.io/"):
        return True
    return any(
        row.get("key") in (None, taint["key"])
        and (row.get("operator") == "Exists" or row.get("value", "") == taint.get("value", ""))
        and row.get("effect") in (None, "", taint["effect"])
        for row in tolerations
    )


# ---- machines --------------------------------------------------------------------------------------------------------


def usable(nodes: Sequence[Node], deployment: Deployment) -> list[Node]:
    """The nodes that a pod of a replica may get, now or when other pods have left."""
    n_gpus = deployment.hardware.gpus_per_node
    open_ = [node for node in nodes if node.is_selected and node.is_up and not node.taints]
    if n_gpus is None:
        return [node for node in open_ if node.n_gpus] or ([] if deployment.hardware.gpu else open_)
    return [node for node in open_ if node.n_gpus >= n_gpus]


def machines(nodes: Sequence[Node], deployment: Deployment) -> list[Machine]:
    """What a pod may have on each usable node. Where the file does not say how many GPUs: as many as are free, or all
    where none is."""
    wanted = deployment.hardware.gpus_per_node
    rows = usable(nodes, deployment)
    if wanted is None:
        free = [node for node in rows if node.n_free_gpus]
        rows = free if len(free) >= deployment.hardware.nodes else rows
    return [_machine(node, deployment) for node in rows]


def of_file(deployment: Deployment, reason: str) -> list[Machine]:
    """The nodes of a replica as the file describes them, which for that reason are not known."""
    block = block_of(deployment)
    n_bytes = int(quantity(block.memory)) if block.memory else None
    return machines_of_file(deployment, reason, n_cpus=block.cpus_per_node, memory_bytes=n_bytes)


def _machine(node: Node, deployment: Deployment) -> Machine:
    block, wanted = block_of(deployment), deployment.hardware.gpus_per_node
    n_gpus = wanted if wanted is not None else node.n_free_gpus or node.n_gpus
    is_full = n_gpus > node.n_free_gpus  # its pod waits until others have left
    used = {} if is_full else node.used
    total = node.has.get("memory", 0.0)
    free = min(total - used.get("memory", 0.0), quantity(block.memory) if block.memory else total)
    n_cpus = min(node.has.get("cpu", 1.0) - used.get("cpu", 0.0), block.cpus_per_node or float("inf"))
    cards = gpus_of(deployment.hardware.gpu, n_gpus)
    if (card := node.card) is not None:
        cards = tuple(Gpu(index, card.name, card.memory_bytes, card.memory_bytes) for index in range(n_gpus))
    versions = versions_of(deployment)
    return Machine(node.name, max(1, int(n_cpus)), int(total), max(0, int(free)), cards, versions=versions)


# ---- problems --------------------------------------------------------------------------------------------------------


def problems(nodes: Sequence[Node], deployment: Deployment) -> Iterator[Problem]:
    """What no node has, with what they have."""
    hardware, block = deployment.hardware, block_of(deployment)
    rows = usable(nodes, deployment)
    wants_gpus = hardware.gpus_per_node != 0 and (hardware.gpu is not None or hardware.gpus_per_node is not None)
    if len(rows) < hardware.nodes:
        yield _too_few(nodes, rows, deployment, wants_gpus)
        return
    needs_name = hardware.gpu is None and hardware.gpus_per_node != 0 and deployment.engine.kind in ("auto", "vllm")
    cards = sorted({node.card.name if node.card else "" for node in rows if node.n_gpus})
    if needs_name and not block.node_selector and len(cards) > 1:
        names = [name or "one without a label" for name in cards]
        yield Problem("hardware.gpu", f"is missing: nodes have several kinds: {', '.join(names)}", "name one of them")
    elif needs_name and "" in cards:
        yield Problem("hardware.gpu", "is missing: no label of the nodes says which GPU they have", "example: gpu: l4")
    n_sharing = sum(node.is_sharing for node in rows)
    if n_sharing and not block.node_selector:
        words = f"{_share(n_sharing, len(rows))} GPUs that several pods share, and with them their memory"
        hint = "select others by a label; or these, with engine.gpu_memory_utilization for a part of one"
        yield Problem("kubernetes.node_selector", words, hint)
    if wants_gpus and hardware.gpus_per_node:
        n_room = sum(node.n_gpus // hardware.gpus_per_node for node in rows)
        n_pods = deployment.replicas.first * hardware.nodes
        if n_pods > n_room:
            words = f"{n_pods} pods of {hardware.gpus_per_node} GPUs, but all nodes together have room for {n_room}"
            yield Problem("replicas", words)
    yield from _host_problems(rows, deployment)


def _too_few(nodes: Sequence[Node], rows: Sequence[Node], deployment: Deployment, wants_gpus: bool) -> Problem:
    """Why not enough nodes are usable: the first condition that leaves too few."""
    n_wanted = deployment.hardware.nodes
    selected = [node for node in nodes if node.is_selected]
    if len(selected) < n_wanted:
        return _not_selected(nodes, selected, deployment)
    least = (deployment.hardware.gpus_per_node or 1) if wants_gpus else 0
    large = [node for node in selected if node.n_gpus >= least]
    if len(large) < n_wanted:
        return _too_small(selected, large, deployment)
    open_ = [node for node in large if not node.taints]
    if len(open_) < n_wanted:
        taint = next(node.taints[0] for node in large if node.taints)
        key, _, effect = taint.partition(":")
        words = f"{_share(len(large) - len(open_), len(large))} the taint {taint}"
        row = f"{{key: {key.partition('=')[0]}, operator: Exists, effect: {effect}}}"
        return Problem("kubernetes.tolerations", words, f"tolerations: [{row}]")
    n_down = len(open_) - len(rows)
    words = f"{n_down} of {len(open_)} such nodes {'is' if n_down == 1 else 'are'} cordoned or not ready"
    return Problem("hardware.nodes", words, "kubectl get nodes")


def _not_selected(nodes: Sequence[Node], selected: Sequence[Node], deployment: Deployment) -> Problem:
    hardware, block = deployment.hardware, block_of(deployment)
    if not (block.node_selector or hardware.gpu):
        has = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}" if nodes else "no node"
        return Problem("hardware.nodes", f"{hardware.nodes} needed, but the cluster has {has}")
    labels = ", ".join(f"{key}: {value}" for key, value in block.node_selector.items())
    path, what = ("kubernetes.node_selector", f'the label "{labels}"') if labels else ("hardware.gpu", hardware.gpu)
    unlabelled = "a GPU that no label names"
    cards = Counter(node.card.name if node.card else unlabelled for node in nodes if node.n_gpus)
    listed = ", ".join(f"{n} with {name}" for name, n in sorted(cards.items())[:_SHOWN]) or "none has a GPU"
    few = f"{hardware.nodes} nodes needed, but {_share(len(selected), len(nodes), 'nodes')}"
    words = f"{few if selected else 'no node has'} {what}: {listed}"
    hint = "GPU feature discovery labels nodes; or name a label of theirs in kubernetes.node_selector"
    return Problem(path, words, hint if unlabelled in cards and not labels else None)


def _too_small(selected: Sequence[Node], large: Sequence[Node], deployment: Deployment) -> Problem:
    hardware = deployment.hardware
    n_gpus, (most, host) = hardware.gpus_per_node or 1, max((node.n_gpus, node.name) for node in selected)
    wanted = f"{n_gpus} GPU{'s' if n_gpus > 1 else ''}"
    if not most:
        hint = "does the NVIDIA device plugin run there?"
        return Problem("hardware.gpus_per_node", f"{wanted}, but the nodes have none", hint)
    if hardware.nodes == 1:
        return Problem("hardware.gpus_per_node", f"{wanted}, but the most is {most} on {host}")
    words = f"{hardware.nodes} nodes of {wanted} each, but {_share(len(large), len(selected))} so many"
    return Problem("hardware.nodes", f"{words}: the most is {most} on {host}")


def _share(n: int, total: int, what: str = "such nodes") -> str:
    return f"{n} of {total} {what} {'has' if n == 1 else 'have'}"


def _host_problems(rows: Sequence[Node], deployment: Deployment) -> Iterator[Problem]:
    """CPUs and memory of one pod, against the largest usable node."""
    n_cpus, n_bytes = pod_needs(deployment)
    cpus, host = max((node.has.get("cpu", 0.0), node.name) for node in rows)
    memory, large = max((node.has.get("memory", 0.0), node.name) for node in rows)
    if n_cpus > cpus:
        words = f"a pod requests {n_cpus:g} CPUs, but the most is {cpus:g} on {host}"
        yield Problem("kubernetes.cpus_per_node", words, f"cpus_per_node: {max(1, int(cpus * 0.8))}")
    if n_bytes > memory:
        words = f"a pod requests {show_bytes(n_bytes)}, but the most is {show_bytes(memory)} on {large}"
        yield Problem("kubernetes.memory", words, f"memory: {max(1, int(memory * 0.8 / GIB))}Gi")


def pod_needs(deployment: Deployment) -> tuple[float, float]:
    """CPUs and bytes that a replica's pod will request, as far as that is known before the plan; else 0."""
    block = block_of(deployment)
    n_cpus, n_bytes = (
        replicas.gpu_needs(deployment.hardware.gpus_per_node) if deployment.hardware.gpus_per_node else (0, 0)
    )
    return float(block.cpus_per_node or n_cpus), quantity(block.memory) if block.memory else float(n_bytes)
