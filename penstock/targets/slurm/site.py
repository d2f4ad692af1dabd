"""What a Slurm cluster has, as `scontrol show` prints it, and whether that is what a deployment requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from penstock.errors import Problem, nearest
from penstock.hardware import Machine, catalog
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment
from penstock.targets import assumed
from penstock.targets.slurm.queue import mib_of, seconds_of
from penstock.text import MIB, show_seconds

_SHOWN = 8
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
    most, max_time_s = row.get("MaxNodes", ""), seconds_of(row.get("MaxTime", ""))
    max_nodes = int(most) if most.isdigit() else None
    is_default, is_up = row.get("Default") == "YES", row.get("State", "UP") == "UP"
    return Partition(row["PartitionName"], is_default, is_up, max_time_s, max_nodes)


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
    """What `slurm.gres` requests, as `parse_gres` returns it. Without a number it is one, as for Slurm: "gpu:h100"."""
    words = (block.gres or "").split(",")
    return parse_gres(",".join(word if re.search(r":\d+\Z", word) else f"{word}:1" for word in words))


def expand(text: str) -> list[str]:
    """Names of a node list: "a[1-2,07],b" is a1, a2, a07, b."""
    names = []
    for word in re.split(r",(?![^\[]*\])", text):
        match = _BRACKET.match(word)
        if match is None:
            names += [word] if word else []
            continue
        before, ranges, after = match.groups()
        for part in ranges.split(","):
            low, _, high = part.partition("-")
            if not low.isdigit() or (high and not high.isdigit()):
                return []
            numbers = range(int(low), int(high or low) + 1)
            names += [f"{before}{number:0{len(low)}d}{rest}" for number in numbers for rest in expand(after) or [""]]
    return names


def candidates(site: Site, block: Slurm, gpu_type: str | None = None) -> list[SiteNode]:
    """The nodes that a job may get, by its partition, constraint, types of GPU and node list."""
    partition = site.partition(block.partition)
    if partition is None:
        return []
    wanted_types = {kind for name, kind, _ in requested(block) if name == "gpu" and kind}
    wanted_types |= {gpu_type} if gpu_type else set()
    listed = set(expand(block.nodelist or ""))
    return [
        node
        for node in site.nodes
        if partition.name in node.partitions
        and wanted_types <= node.gpus.keys()
        and _has_features(node, block.constraint)
        and (not listed or node.name in listed or block.nodelist is None)
    ]


def gpu_type(site: Site | None, deployment: Deployment) -> str | None:
    """The site's type of GPU that `hardware.gpu` names; None where no type does, or where the file has a `gres`."""
    block, card = deployment.slurm or Slurm(), deployment.hardware.gpu
    if site is None or card is None or block.gres is not None or deployment.hardware.gpus_per_node == 0:
        return None
    kinds = {kind for node in candidates(site, block) for kind in node.gpus if _is_card(kind, card)}
    # "a100_80" names fewer cards than "a100" does.
    return min(kinds, key=lambda kind: (len(catalog.gpus_named(kind)), kind), default=None)


def _is_card(kind: str, card: str) -> bool:
    """Whether a site's type ("h100", "nvidia_h100_80gb_hbm3") may be this card of the catalogue ("h100-sxm")."""
    return any(one in catalog.gpus_named(kind) for one in catalog.gpus_named(card))


def _has_features(node: SiteNode, constraint: str | None) -> bool:
    """Judges plain words with & or |; sbatch judges the others."""
    if not constraint or re.search(r"[\[\]()*]", constraint):
        return True
    return any(set(either.split("&")) <= node.features for either in re.split(r"[|,]", constraint))


def problems(site: Site, deployment: Deployment) -> list[Problem]:
    """All that this site does not have, with what it has. sbatch judges accounts and QOS."""
    block = deployment.slurm or Slurm()
    partition = site.partition(block.partition)
    names = [row.name for row in site.partitions]
    if partition is None and block.partition is None:
        return [Problem("slurm.partition", "is missing: no partition is the default", f"one of {', '.join(names)}")]
    if partition is None:
        hint = _alternatives(block.partition or "", names)
        return [Problem("slurm.partition", f'there is no partition "{block.partition}"', hint)]
    problems = []
    if not partition.is_up:
        problems.append(Problem("slurm.partition", f'partition "{partition.name}" is not up', "see sinfo"))
    limit_s, wanted_s = partition.max_time_s, seconds_of(block.time or "") or 0.0
    if limit_s is not None and wanted_s > limit_s:
        words = f'"{block.time}" is above the {show_seconds(limit_s)} of partition "{partition.name}"'
        longer = [p.name for p in site.partitions if p.is_up and (p.max_time_s is None or p.max_time_s >= wanted_s)]
        hint = f"partitions that allow it: {', '.join(longer)}" if longer else "no partition allows it"
        problems.append(Problem("slurm.time", words, hint))
    here = [node for node in site.nodes if partition.name in node.partitions]
    gres_problems = list(_gres_problems(block, here))
    return [*problems, *gres_problems, *_node_problems(site, deployment, partition, here, not gres_problems)]


def _alternatives(word: str, legal: Sequence[str], otherwise: str = "") -> str:
    close = nearest(word, legal)
    return f'did you mean "{close}"?' if close else f"there are: {', '.join(legal) or otherwise}"


def _gres_problems(block: Slurm, here: Sequence[SiteNode]) -> Iterator[Problem]:
    requests = requested(block) if block.gres is not None else []
    if block.gres is not None and not requests:
        yield Problem("slurm.gres", f'"{block.gres}" is no request for generic resources', "example: gpu:h100:4")
    types = sorted({kind for node in here for kind in node.gpus if kind})
    for name, kind, _ in requests:
        if name == "gpu" and kind and kind not in types:
            hint = _alternatives(kind, types, "GPUs without a type")
            yield Problem("slurm.gres", f'no node of this partition has GPUs of type "{kind}"', hint)


def _node_problems(
    site: Site, deployment: Deployment, partition: Partition, here: Sequence[SiteNode], is_good_gres: bool
) -> Iterator[Problem]:
    block, n_nodes = deployment.slurm or Slurm(), deployment.hardware.nodes
    unknown = [name for name in expand(block.nodelist or "") if name not in {node.name for node in here}]
    if unknown:
        names = [node.name for node in here]
        words = f'no node "{unknown[0]}" in partition "{partition.name}"'
        yield Problem("slurm.nodelist", words, _alternatives(unknown[0], names[:_SHOWN]))
        return
    nodes = candidates(site, block, gpu_type(site, deployment))
    if not nodes:
        words = f'no node of partition "{partition.name}" matches constraint and nodelist'
        features = sorted(frozenset[str]().union(*(node.features for node in here)))
        if is_good_gres:
            yield Problem("slurm.constraint", words, f"features there: {', '.join(features) or 'none'}")
        return
    n_gpus, host = max((node.n_gpus, node.name) for node in nodes)
    wanted = gpus_wanted(deployment) or 0
    if wanted > n_gpus:
        field = "slurm.gres" if block.gres else "hardware.gpus_per_node"
        has = f"the most is {n_gpus} on {host}" if n_gpus else "they have none"
        yield Problem(field, f'{wanted} GPUs a node, but of the nodes of partition "{partition.name}" {has}')
    allowed = min(len(nodes), partition.max_nodes or len(nodes))
    if n_nodes > allowed:
        words = f'{n_nodes} nodes a replica, but partition "{partition.name}" gives {allowed} of that kind'
        yield Problem("hardware.nodes", words)
    cpus, memory_mib = max(node.cpus for node in nodes), max(node.memory_mib for node in nodes)
    if (block.cpus_per_node or 0) > cpus:
        yield Problem("slurm.cpus_per_node", f"{block.cpus_per_node}, but no node has more than {cpus}")
    if (mib_of(block.memory or "") or 0) > memory_mib:
        yield Problem("slurm.memory", f'"{block.memory}", but no node has more than {memory_mib}M')
    yield from _card_problems(deployment, nodes)


def gpus_wanted(deployment: Deployment) -> int | None:
    """GPUs a node; None, which is all that a node has, where the file does not say."""
    block = deployment.slurm or Slurm()
    if block.gres is not None:
        return sum(n for name, _, n in requested(block) if name == "gpu")
    return deployment.hardware.gpus_per_node


def _card_problems(deployment: Deployment, nodes: Sequence[SiteNode]) -> Iterator[Problem]:
    """Slurm knows at most a type of GPU, never its memory, which a plan needs."""
    hardware, kinds = deployment.hardware, sorted({kind for node in nodes for kind in node.gpus})
    names, has_gres = ", ".join(kind or "(no type)" for kind in kinds), (deployment.slurm or Slurm()).gres is not None
    if not kinds or hardware.gpus_per_node == 0 or deployment.engine.kind not in ("auto", "vllm"):
        return
    cards = ", ".join(dict.fromkeys(card.id for kind in kinds for card in catalog.gpus_named(kind)))
    if hardware.gpu is None:
        hint = f"one of {cards}" if cards else "`penstock plan --list` shows the names"
        yield Problem("hardware.gpu", f"is missing: Slurm reports only the GPU type {names}", hint)
    elif not has_gres and "" not in kinds and not any(_is_card(kind, hardware.gpu) for kind in kinds):
        opaque = next((kind for kind in kinds if not catalog.gpus_named(kind)), None)
        hint = f"if {opaque} is that card, set slurm.gres: gpu:{opaque}:{hardware.gpus_per_node or 1}"
        hint = f"one of {cards}, or another slurm.partition" if opaque is None else hint
        yield Problem("hardware.gpu", f'"{hardware.gpu}", but the nodes have GPUs of type {names}', hint)
        return
    if len({frozenset(node.gpus) for node in nodes}) > 1 and not has_gres:
        words = f"nodes have GPUs of several kinds: {names}"
        yield Problem("slurm.gres", words, f"example: gres: gpu:{next(filter(None, kinds), 'h100')}:4")


def least_memory_mib(site: Site | None, deployment: Deployment) -> int | None:
    """The memory of the smallest node that a job may get."""
    nodes = candidates(site, deployment.slurm or Slurm(), gpu_type(site, deployment)) if site is not None else []
    return min((node.memory_mib for node in nodes if node.memory_mib), default=None)


def machines(site: Site, deployment: Deployment, versions: dict[str, str]) -> list[Machine]:
    """What a job gets on each node that it may land on."""
    block, kind = deployment.slurm or Slurm(), gpu_type(site, deployment)
    nodes, wanted = candidates(site, block, kind), gpus_wanted(deployment)
    up = [node for node in nodes if node.is_up] or nodes
    counts = [node.n_gpus if kind is None else node.gpus[kind] for node in up]
    return [
        _machine(node, block, count if wanted is None else wanted, deployment.hardware.gpu, versions)
        for node, count in zip(up, counts, strict=True)
        if count >= (wanted or 0)
    ]


def machines_of_file(deployment: Deployment, reason: str) -> list[Machine]:
    """The same for a site that for this reason could not be asked, by the file alone."""
    block = deployment.slurm or Slurm()
    n_bytes = (mib_of(block.memory or "") or 0) * MIB or None
    return assumed.machines_of_file(
        deployment, reason, n_gpus=gpus_wanted(deployment), n_cpus=block.cpus_per_node, memory_bytes=n_bytes
    )


def _machine(node: SiteNode, block: Slurm, n_gpus: int, card: str | None, versions: dict[str, str]) -> Machine:
    memory = mib_of(block.memory or "") or node.memory_mib
    return Machine(
        host=node.name,
        n_cpus=min(block.cpus_per_node or node.cpus, node.cpus),
        memory_bytes=node.memory_mib * MIB,
        memory_free_bytes=min(memory, node.memory_mib) * MIB,
        gpus=assumed.gpus_of(card, n_gpus),  # Slurm allocates whole GPUs, so all memory counts as free
        versions=versions,
    )
