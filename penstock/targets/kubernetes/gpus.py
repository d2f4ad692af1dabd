"""Which label of a node tells its GPUs, place by place: one table for selecting nodes and for reading them. Pure.

A manifest does not know its cluster, so it selects by the labels of all places at once: terms of a node affinity are
alternatives. The rows of clouds are from their documentation and were not tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from penstock.hardware import catalog
from penstock.targets.kubernetes.objects import Object
from penstock.text import MIB

RESOURCE = "nvidia.com/gpu"  # https://github.com/NVIDIA/k8s-device-plugin
# https://cloud.google.com/kubernetes-engine/docs/how-to/gpus
GKE = "cloud.google.com/gke-accelerator"
# GPU feature discovery, on any cluster: https://github.com/NVIDIA/k8s-device-plugin/tree/main/docs/gpu-feature-discovery
PRODUCT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
_SHARED = "-SHARED"  # time slicing: several pods have one GPU, so such nodes are not selected
# https://karpenter.sh/docs/concepts/scheduling/ and https://docs.aws.amazon.com/eks/latest/userguide/auto-learn-iam.html
_EC2_NAMES = ("karpenter.k8s.aws/instance-gpu-name", "eks.amazonaws.com/instance-gpu-name")
# https://kubernetes.io/docs/reference/labels-annotations-taints/#nodekubernetesioinstance-type
INSTANCE_TYPE = "node.kubernetes.io/instance-type"


class _Places(msgspec.Struct, frozen=True):
    """Names of one GPU. `ec2`: AWS's name, where no other memory size has the same. `sizes`: per family of EC2
    instances its sizes. `azure`: VM sizes. GPU feature discovery uses the driver's names, which the catalogue has."""

    gke: tuple[str, ...] = ()
    ec2: str | None = None
    sizes: dict[str, str] = {}
    azure: tuple[str, ...] = ()

    @property
    def instance_types(self) -> list[str]:
        types = [f"{family}.{size}" for family, sizes in self.sizes.items() for size in sizes.split()]
        return [*types, *self.azure]


# GKE: https://cloud.google.com/kubernetes-engine/docs/concepts/gpus, https://cloud.google.com/compute/docs/gpus
# EC2: https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html
# Azure: https://learn.microsoft.com/azure/virtual-machines/sizes/overview#gpu-accelerated
_XLARGE = "xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge"
_TABLE = {
    "t4": _Places(
        gke=("nvidia-tesla-t4",),
        ec2="t4",
        sizes={"g4dn": f"{_XLARGE} metal"},
        azure=tuple(f"Standard_NC{n}as_T4_v3" for n in (4, 8, 16, 64)),
    ),
    "v100-sxm2-16": _Places(gke=("nvidia-tesla-v100",), sizes={"p3": "2xlarge 8xlarge 16xlarge"}),
    "v100-sxm2-32": _Places(sizes={"p3dn": "24xlarge"}, azure=("Standard_ND40rs_v2",)),
    "a10g": _Places(ec2="a10g", sizes={"g5": f"{_XLARGE} 24xlarge 48xlarge"}),
    "l4": _Places(gke=("nvidia-l4",), ec2="l4", sizes={"g6": f"{_XLARGE} 24xlarge 48xlarge", "gr6": "4xlarge 8xlarge"}),
    "l40s": _Places(ec2="l40s", sizes={"g6e": f"{_XLARGE} 24xlarge 48xlarge"}),
    "a100-sxm4-40": _Places(gke=("nvidia-tesla-a100",), sizes={"p4d": "24xlarge"}, azure=("Standard_ND96asr_v4",)),
    "a100-sxm4-80": _Places(
        gke=("nvidia-a100-80gb",), sizes={"p4de": "24xlarge"}, azure=("Standard_ND96amsr_A100_v4",)
    ),
    "a100-pcie-80": _Places(azure=tuple(f"Standard_NC{n}ads_A100_v4" for n in (24, 48, 96))),
    "h100-sxm": _Places(
        gke=("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
        ec2="h100",
        sizes={"p5": "4xlarge 48xlarge"},
        azure=("Standard_ND96isr_H100_v5",),
    ),
    "h200-sxm": _Places(
        gke=("nvidia-h200-141gb",),
        ec2="h200",
        sizes={"p5e": "48xlarge", "p5en": "48xlarge"},
        azure=("Standard_ND96isr_H200_v5",),
    ),
    "b200-sxm": _Places(gke=("nvidia-b200",), ec2="b200", sizes={"p6-b200": "48xlarge"}),
    "gb200": _Places(gke=("nvidia-gb200",), sizes={"p6e-gb200": "36xlarge"}, azure=("Standard_ND128isr_NDR_GB200_v6",)),
    "b300-sxm": _Places(sizes={"p6-b300": "48xlarge"}),
    "gb300": _Places(gke=("nvidia-gb300",), azure=("Standard_ND128isr_GB300_v6",)),
    "rtx-pro-6000-blackwell": _Places(
        gke=("nvidia-rtx-pro-6000",), sizes={"g7e": "2xlarge 4xlarge 8xlarge 12xlarge 24xlarge 48xlarge"}
    ),
}


class NodeGpu(msgspec.Struct, frozen=True):
    """A card as a driver names it, and its memory in bytes."""

    name: str
    memory_bytes: int


def node_terms(gpu: str) -> list[Object]:
    """Alternatives for a required node affinity: one for each label that a node with this card may have.

    `gpu`: any name of the catalogue, as in `hardware.gpu`.  Raises UserError for an unknown one.
    """
    card = catalog.gpu(gpu)
    return [
        {"matchExpressions": [{"key": key, "operator": "In", "values": values}]} for key, values in _labels(card.id)
    ]


def node_affinity(gpu: str) -> Object:
    """The `nodeAffinity` of a pod that needs this card, on whatever cloud."""
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": node_terms(gpu)}}


def gpu_of(labels: Mapping[str, str]) -> NodeGpu | None:
    """The card of a node with these labels; None where no label that we know tells it."""
    product = labels.get(PRODUCT, "").removesuffix(_SHARED)
    mib = int(labels[MEMORY]) if labels.get(MEMORY, "").isdigit() else None
    for gpu_id in catalog.gpu_ids():
        if any(labels.get(key, "").removesuffix(_SHARED) in values for key, values in _labels(gpu_id)):
            card = catalog.gpu(gpu_id)
            known_mib = card.memory.nvidia_smi_mib or int(card.memory.torch_total_gib * 1024)
            return NodeGpu(card.names[0], (mib or known_mib) * MIB)
    return NodeGpu(product, mib * MIB) if product and mib else None


def _labels(gpu_id: str) -> Iterator[tuple[str, list[str]]]:
    """Each label that tells this card, with the values that do, the surest first."""
    places = _TABLE.get(gpu_id, _Places())
    if places.gke:
        yield GKE, list(places.gke)
    yield PRODUCT, [name.replace(" ", "-") for name in catalog.gpu(gpu_id).names]
    if places.ec2:
        yield from ((key, [places.ec2]) for key in _EC2_NAMES)
    if places.instance_types:
        yield INSTANCE_TYPE, places.instance_types
