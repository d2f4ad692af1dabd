"""What a Slurm cluster has, as `scontrol show` tells it, and whether it has what a deployment asks for. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from penstock.errors import Problem, nearest
from penstock.hardware import Gpu, Machine, catalog
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment
from penstock.targets.slurm.queue import mib_of, seconds_of
from penstock.text import GIB, MIB, show_seconds

_OUT = ("DOWN", "DRAIN", "FAIL", "UNKNOWN", "POWERED_DOWN", "NOT_RESPONDING", "*", "MAINT")
_GRES = re.compile(r"(\w+)(?::([^:(]+))?:(\d+)(?:\(.*)?\Z")
_BRACKET = re.compile(r"(.*?)\[([^\]]*)\](.*)\Z")


class Partition(msgspec.Struct, frozen=True):
    name: str
    is_default: bool
    is_up: bool
    max_time_s: float | None
    max_nodes: int | None


class SiteNode(msgspec.Struct, frozen=True):
    """A node. `gpus`: how many of which type, which is "" where the site names none."""

    name: str
    cpus: int
    memory_mib: int
    gpus: dict[str, int]
    features: frozenset[str]
    partitions: frozenset[str]
    is_up: bool

    @property
    def n_gpus(self) -> int:
        return sum(self.gpus.values())


class Site(msgspec.Struct, frozen=True):
    partitions: tuple[Partition, ...]
    nodes: tuple[SiteNode, ...]

    def partition(self, name: str | None) -> Partition | None:
        """The one of that name; the default one for None."""
        return next((p for p in self.partitions if (p.is_default if name is None else p.name == name)), None)


def parse(partitions: str, nodes: str) -> Site:
    """From `scontrol show partition -o` and `scontrol show node -o`."""
    return Site(
        tuple(_partition(row) for row in _rows(partitions, "PartitionName")),
        tuple(_node(row) for row in _rows(nodes, "NodeName")),
    )


def _rows(text: str, first: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        if line.startswith(f"{first}="):
            yield dict(word.split("=", 1) for word in line.split() if "=" in word)


def _partition(row: dict[str, str]) -> Partition:
    max_nodes = row.get("MaxNodes", "")
    return Partition(
        row["PartitionName"],
        row.get("Default") == "YES",
        row.get("State", "UP") == "UP",
        seconds_of(row.get("MaxTime", "")),
        int(max_nodes) if max_nodes.isdigit() else None,
    )


def _node(row: dict[str, str]) -> SiteNode:
    gpus = {kind: n for name, kind, n in parse_gres(row.get("Gres", "")) if name == "gpu"}
    features = row.get("ActiveFeatures") or row.get("AvailableFeatures") or ""
    return SiteNode(
        row["NodeName"],
        int(row.get("CPUEfctv") or row.get("CPUTot") or 1),
        int(row.get("RealMemory") or 0),
        gpus,
        frozenset(features.split(",")) - {"(null)", ""},
        frozenset(row.get("Partitions", "").split(",")) - {""},
        not any(word in row.get("State", "") for word in _OUT),
    )


def parse_gres(text: str) -> list[tuple[str, str, int]]:
    """Name, type and number of each: "gpu:h100:4(S:0-1),shard:8" is [("gpu", "h100", 4), ("shard", "", 8)]."""
    matches = (_GRES.match(word) for word in re.split(r",(?![^(]*\))", text))
    return [(match.group(1), match.group(2) or "", int(match.group(3))) for match in matches if match]


def requested(block: Slurm) -> list[tuple[str, str, int]]:
    """What `slurm.gres` asks for, as `parse_gres` has it. Without a number it is one, as for Slurm: "gpu:h100"."""
    words = (block.gres or "").split(",")
    return parse_gres(",".join(word if re.search(r":\d+\Z", word) else f"{word}:1" for word in words))


def expand(text: str) -> list[str]:
    """Names of a node list: "a[1-2,07],b" is a1, a2, a07, b."""
    found = []
    for word in re.split(r",(?![^\[]*\])", text):
        match = _BRACKET.match(word)
        if match is None:
            found += [word] if word else []
            continue
        before, ranges, after = match.groups()
        for part in ranges.split(","):
            low, _, high = part.partition("-")
            if not low.isdigit() or (high and not high.isdigit()):
                return []
            numbers = range(int(low), int(high or low) + 1)
            found += [f"{before}{number:0{len(low)}d}{rest}" for number in numbers for rest in expand(after) or [""]]
    return found


def candidates(site: Site, block: Slurm) -> list[SiteNode]:
    """The nodes that a job may get: of its partition, with its constraint, types of GPU and node list."""
    partition = site.partition(block.partition)
    if partition is None:
        return []
    wanted_types = {kind for name, kind, _ in requested(block) if name == "gpu" and kind}
    listed = set(expand(block.nodelist or ""))
    return [
        node
        for node in site.nodes
        if partition.name in node.partitions
        and wanted_types <= node.gpus.keys()
        and _has_features(node, block.constraint)
        and (not listed or node.name in listed or block.nodelist is None)
    ]


def _has_features(node: SiteNode, constraint: str | None) -> bool:
    """Of plain words with & or |; Slurm itself judges the richer ones."""
    if not constraint or re.search(r"[\[\]()*]", constraint):
        return True
    return any(set(either.split("&")) <= node.features for either in re.split(r"[|,]", constraint))


def problems(site: Site, deployment: Deployment) -> list[Problem]:
    """All that this site cannot give, with what it can. Accounts and QOS are for sbatch to judge."""
    block = deployment.slurm or Slurm()
    partition = site.partition(block.partition)
    names = [one.name for one in site.partitions]
    if partition is None and block.partition is None:
        return [Problem("slurm.partition", "is missing: no partition is the default", f"one of {', '.join(names)}")]
    if partition is None:
        close = nearest(block.partition or "", names)
        hint = f'did you mean "{close}"?' if close else f"there are: {', '.join(names)}"
        return [Problem("slurm.partition", f'there is no partition "{block.partition}"', hint)]
    found = []
    if not partition.is_up:
        found.append(Problem("slurm.partition", f'partition "{partition.name}" is not up', "see sinfo"))
    limit_s, asked_s = partition.max_time_s, seconds_of(block.time or "")
    if limit_s is not None and (asked_s or 0.0) > limit_s:
        words = f'"{block.time}" is above the {show_seconds(limit_s)} of partition "{partition.name}"'
        found.append(Problem("slurm.time", words, _longer(site, asked_s or 0.0)))
    here = [node for node in site.nodes if partition.name in node.partitions]
    return [*found, *_gres_problems(block, here), *_node_problems(site, deployment, partition, here)]


def _longer(site: Site, asked_s: float) -> str:
    """Partitions that allow such a time."""
    longer = (one for one in site.partitions if one.max_time_s is None or one.max_time_s >= asked_s)
    names = [one.name for one in longer if one.is_up]
    return f"partitions that allow it: {', '.join(names)}" if names else "no partition allows it"


def _gres_problems(block: Slurm, here: Sequence[SiteNode]) -> Iterator[Problem]:
    if block.gres is None:
        return
    asked = requested(block)
    if not asked:
        yield Problem("slurm.gres", f'"{block.gres}" is no request for generic resources', "example: gpu:h100:4")
    types = sorted({kind for node in here for kind in node.gpus if kind})
    for name, kind, _ in asked:
        if name == "gpu" and kind and kind not in types:
            close = nearest(kind, types)
            hint = f'did you mean "{close}"?' if close else f"there are: {', '.join(types) or 'GPUs without a type'}"
            yield Problem("slurm.gres", f'no node of this partition has GPUs of type "{kind}"', hint)


def _node_problems(
    site: Site, deployment: Deployment, partition: Partition, here: Sequence[SiteNode]
) -> Iterator[Problem]:
    block, n_nodes = deployment.slurm or Slurm(), deployment.hardware.nodes
    found = candidates(site, block)
    if not found and not any(_gres_problems(block, here)):
        words = f'no node of partition "{partition.name}" matches constraint and nodelist'
        features = sorted(set().union(*(node.features for node in here))) if here else []
        yield Problem("slurm.constraint", words, f"features there: {', '.join(features) or 'none'}")
    most = max(((node.n_gpus, node.name) for node in found), default=(0, ""))
    wanted = _gpus_asked(deployment) or 0
    if found and wanted > most[0]:
        field = "slurm.gres" if block.gres else "hardware.gpus_per_node"
        has = f"the most is {most[0]} on {most[1]}" if most[0] else "they have none"
        yield Problem(field, f'{wanted} GPUs a node, but of the nodes of partition "{partition.name}" {has}')
    allowed = min(len(found), partition.max_nodes or len(found))
    if found and n_nodes > allowed:
        words = f'{n_nodes} nodes a replica, but partition "{partition.name}" gives {allowed} of that kind'
        yield Problem("hardware.nodes", words)
    cpus = max((node.cpus for node in found), default=0)
    if found and (block.cpus_per_node or 0) > cpus:
        yield Problem("slurm.cpus_per_node", f"{block.cpus_per_node}, but no node has more than {cpus}")
    memory_mib = max((node.memory_mib for node in found), default=0)
    if found and (mib_of(block.memory or "") or 0) > memory_mib:
        yield Problem("slurm.memory", f'"{block.memory}", but no node has more than {memory_mib}M')
    yield from _card_problems(deployment, found)


def _gpus_asked(deployment: Deployment) -> int | None:
    """GPUs a node, None where nobody says: then all that a node has."""
    block = deployment.slurm or Slurm()
    if block.gres is not None:
        return sum(n for name, _, n in requested(block) if name == "gpu")
    return deployment.hardware.gpus_per_node


def _card_problems(deployment: Deployment, found: Sequence[SiteNode]) -> Iterator[Problem]:
    """Slurm tells a type of GPU at most, never its memory: without it nothing can be planned."""
    hardware, kinds = deployment.hardware, sorted({kind for node in found for kind in node.gpus})
    if not kinds or hardware.gpus_per_node == 0 or deployment.engine.kind not in ("auto", "vllm"):
        return
    if hardware.gpu is None:
        like = [card for card in catalog.gpu_ids() if any(kind and kind in card for kind in kinds)]
        hint = f"one of {', '.join(like)}" if like else "`penstock plan --help` shows where to find the names"
        told = ", ".join(kind or "(no type)" for kind in kinds)
        yield Problem("hardware.gpu", f"is missing: Slurm reports only the GPU type {told}", hint)
    if len({frozenset(node.gpus) for node in found}) > 1 and not (deployment.slurm or Slurm()).gres:
        words = f"nodes have GPUs of several kinds: {', '.join(kind or '(no type)' for kind in kinds)}"
        yield Problem("slurm.gres", words, f"example: gres: gpu:{next(filter(None, kinds), 'h100')}:4")


def machines(site: Site | None, deployment: Deployment, versions: dict[str, str]) -> list[Machine]:
    """What a job gets on each node that it may land on. Without a site: what the file names, on as many nodes."""
    block, hardware = deployment.slurm or Slurm(), deployment.hardware
    found = candidates(site, block) if site is not None else []
    up, wanted = [node for node in found if node.is_up] or found, _gpus_asked(deployment)
    if not up:
        names = [f"node-{number + 1}" for number in range(hardware.nodes)]
        up = [SiteNode(name, _UNKNOWN_CPUS, _UNKNOWN_MIB, {}, frozenset(), frozenset(), True) for name in names]
        return [_machine(node, block, wanted or 0, hardware.gpu, versions) for node in up]
    return [
        _machine(node, block, node.n_gpus if wanted is None else wanted, hardware.gpu, versions)
        for node in up
        if node.n_gpus >= (wanted or 0)
    ]


_UNKNOWN_CPUS, _UNKNOWN_MIB = 64, 1024 * 1024


def _machine(node: SiteNode, block: Slurm, n_gpus: int, card: str | None, versions: dict[str, str]) -> Machine:
    memory = mib_of(block.memory or "") or node.memory_mib
    return Machine(
        host=node.name,
        n_cpus=min(block.cpus_per_node or node.cpus, node.cpus),
        memory_bytes=node.memory_mib * MIB,
        memory_free_bytes=min(memory, node.memory_mib) * MIB,
        gpus=tuple(_gpus(n_gpus, card)),
        versions=versions,
    )


def _gpus(count: int, card: str | None) -> Iterable[Gpu]:
    """As the catalogue knows the card; Slurm gives them whole, so they count as free."""
    if card is None:
        return (Gpu(index, "GPU", 80 * GIB, 80 * GIB) for index in range(count))
    known = catalog.gpu(card)
    size = (known.memory.nvidia_smi_mib or math.ceil(known.memory.torch_total_gib * 1024)) * MIB
    name = known.names[0] if known.names else known.id
    return itertools.starmap(Gpu, ((index, name, size, size) for index in range(count)))
