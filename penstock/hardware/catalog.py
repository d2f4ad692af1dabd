"""Known GPUs and links: data rows, each with its source. GB/s and TFLOPS are decimal, `*_gib` and `*_mib` binary."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import msgspec

from penstock.errors import UserError

Transport = Literal["nvlink", "pcie", "rdma", "efa", "tcp"]


class GpuMemory(msgspec.Struct, frozen=True):
    """`torch_total_gib`: as the CUDA runtime reports it; vLLM multiplies it by gpu_memory_utilization."""

    torch_total_gib: float
    nvidia_smi_mib: int | None = None


class Tflops(msgspec.Struct, frozen=True):
    """Dense matrix rates by operand, fp32 accumulate. None: the card has no such unit."""

    fp16: float
    bf16: float | None
    fp8: float | None
    int8: float | None
    fp4: float | None = None


class Native(msgspec.Struct, frozen=True):
    fp8: bool
    fp4: bool


class Nvlink(msgspec.Struct, frozen=True):
    """`domain_gpus`: GPUs of one NVLink fabric, when it joins more than one host (`gpus_per_host`)."""

    gen: int
    gbs_per_dir: float
    domain_gpus: int | None = None
    gpus_per_host: int | None = None


class Xgmi(msgspec.Struct, frozen=True):
    gbs_per_dir_total: float


class Pcie(msgspec.Struct, frozen=True):
    gen: int
    gbs_per_dir: float


class AllReduce(msgspec.Struct, frozen=True):
    """Measured all-reduce times inside one host by number of GPUs: microseconds for 16 KiB and 1 MiB of bf16, bus GB/s
    at 1 GiB (algorithm bandwidth x 2(n-1)/n). `borrowed_from`: the GPU with the same link that it was measured on."""

    us_16KiB: dict[int, float]
    us_1MiB: dict[int, float]
    bus_gbs_large: dict[int, float]
    source: str
    note: str | None = None
    borrowed_from: str | None = None


class GpuFacts(msgspec.Struct, frozen=True):
    """One card. `names` are the driver's, `aliases` those of people and sites, which several cards may share.
    `allreduce` is measured on it, or borrowed. `stands_in`: the id of the card whose facts these are, where the
    catalogue does not have the card itself."""

    id: str
    vendor: str
    names: tuple[str, ...]
    memory: GpuMemory
    mem_bw_gbs: float
    dense_tflops: Tflops
    native: Native
    pcie: Pcie
    sources: dict[str, str]
    aliases: tuple[str, ...] = ()
    compute_capability: str | None = None
    gfx: str | None = None
    nvlink: Nvlink | None = None
    xgmi: Xgmi | None = None
    allreduce: AllReduce | None = None
    stands_in: str | None = None

    @property
    def generation(self) -> str:
        """ "7.0" -> "volta" ... "10.3" -> "blackwell"; AMD cards by their gfx name."""
        return _GENERATIONS.get(self.compute_capability or "", self.gfx or "unknown")

    @property
    def peer_gbs(self) -> float:
        """GB/s in one direction from this GPU to the others of its host: NVLink, xGMI or PCIe, nominal."""
        if self.nvlink:
            return self.nvlink.gbs_per_dir
        return self.xgmi.gbs_per_dir_total if self.xgmi else self.pcie.gbs_per_dir


class LinkFacts(msgspec.Struct, frozen=True):
    """One kind of interconnect; sources differ in the rate they give. `transport`: how NCCL drives one that joins
    machines. `step_latency_us`: (fastest, slowest) of one hop."""

    id: str
    source: str
    transport: Transport = "tcp"
    gbs_per_dir: float | None = None
    gbs_per_dir_per_gpu: float | None = None
    gbs_per_dir_per_node: float | None = None
    gbs_per_gpu: float | None = None
    gbs_measured_nccl: float | None = None
    plan_gbs: float | None = None
    step_latency_us: tuple[float, float] | None = None
    note: str | None = None


# https://developer.nvidia.com/cuda-gpus
_GENERATIONS = {"7.0": "volta", "7.5": "turing", "8.0": "ampere", "8.6": "ampere", "8.9": "ada", "9.0": "hopper"}
_GENERATIONS |= dict.fromkeys(("10.0", "10.3", "12.0"), "blackwell")

# The driver's total and the catalogue's differ by firmware reserves; by more, it is another card, or a part of one.
_SAME_MEMORY = 0.01
# Whose measured all-reduce stands in for a card without its own: the one with the same kind of link. The L40S host is
# the only measured PCIe 4 one, and a bad one (its own note); the RTX PRO 6000 host stands for PCIe 5 and later.
_NVLINK_LIKE = {2: "a100-sxm4-80", 3: "a100-sxm4-80", 4: "h100-sxm", 5: "b200-sxm"}
_NVLINK_GENERATION = {"volta": 2, "turing": 2, "ampere": 3, "ada": 3, "hopper": 4, "blackwell": 5}
_PCIE_LIKE = {3: "l40s", 4: "l40s", 5: "rtx-pro-6000-blackwell", 6: "rtx-pro-6000-blackwell"}


def gpu_ids() -> tuple[str, ...]:
    return tuple(_gpus())


def link_ids() -> tuple[str, ...]:
    return tuple(_links())


def gpus_named(name: str) -> tuple[GpuFacts, ...]:
    """The cards with exactly this id, driver's name, label or alias: several for "h100" (PCIe, SXM), none for "h20"."""
    return _by_name().get(_plain(name), ())


def gpu(name: str) -> GpuFacts:
    """The only card with this name.  Raises UserError with the nearest names."""
    cards = gpus_named(name)
    if len(cards) == 1:
        return cards[0]
    near = [card for key in difflib.get_close_matches(_plain(name), _by_name()) for card in _by_name()[key]]
    raise _unclear("GPU", name, [card.id for card in cards], [card.id for card in near])


def gpu_of_machine(name: str, memory_bytes: int) -> GpuFacts:
    """The card that a driver calls `name`, with the memory that the driver reports.
    A card outside the catalogue gets the facts of the one nearest in memory (`stands_in`)."""
    total_gib = default_total_gib(memory_bytes // 2**20)
    row = next(iter(gpus_named(name)), None)  # a driver's name is of one card
    if row is None:
        like = min(_gpus().values(), key=lambda row: abs(row.memory.torch_total_gib - total_gib))
        like = _with_memory(like, total_gib, memory_bytes)
        return msgspec.structs.replace(like, id=name, names=(name,), stands_in=like.id)
    known_mib = row.memory.nvidia_smi_mib or row.memory.torch_total_gib * 1024
    if abs(memory_bytes / 2**20 / known_mib - 1) <= _SAME_MEMORY:
        return row
    # Another size under the same name, or a part of the card (a MIG slice, a virtual GPU).
    return _with_memory(row, total_gib, memory_bytes)


def _with_memory(card: GpuFacts, total_gib: float, memory_bytes: int) -> GpuFacts:
    memory = msgspec.structs.replace(card.memory, torch_total_gib=total_gib, nvidia_smi_mib=memory_bytes // 2**20)
    return msgspec.structs.replace(card, memory=memory)


def link(name: str) -> LinkFacts:
    """The interconnect with this id or unique beginning of one ("ib-ndr").  Raises UserError with the nearest name."""
    rows, wanted = _links(), name.strip().lower()
    matches = [wanted] if wanted in rows else [own for own in rows if wanted and own.startswith(wanted)]
    if len(matches) == 1:
        return rows[matches[0]]
    raise _unclear("network", name, matches, difflib.get_close_matches(wanted, rows))


def _unclear(kind: str, name: str, matches: Sequence[str], near: Sequence[str]) -> UserError:
    if matches:
        return UserError(f'cannot identify {kind} "{name}"', hint=f"It is one of {', '.join(matches)}.")
    hint = f"The nearest names are {', '.join(dict.fromkeys(near))}. " if near else ""
    return UserError(f'no {kind} "{name}" in the catalogue', hint=f"{hint}`penstock plan --list` lists all.")


def over_pcie(card: GpuFacts) -> GpuFacts:
    """The card in a machine that joins it by PCIe alone."""
    if card.nvlink is None:
        return card
    return _with_borrowed(msgspec.structs.replace(card, nvlink=None, allreduce=None), _gpus())


def bridged(card: GpuFacts, n_joined: int, gbs_per_dir: float | None) -> GpuFacts:
    """A PCIe card of which NVLink joins groups of `n_joined`: up to so many, all-reduce times are NVLink's.
    `gbs_per_dir` None: the nominal rate of the card that has this NVLink generation, and whose times these are."""
    like = _gpus()[_NVLINK_LIKE[_NVLINK_GENERATION.get(card.generation, 3)]]
    own = card.allreduce
    assert own is not None, "every card of the catalogue has an all-reduce table"
    table = _scaled(like, (gbs_per_dir or like.peer_gbs) / like.peer_gbs)
    sizes = {n: n if n in table.us_16KiB else max(table.us_16KiB) for n in own.us_16KiB if n <= n_joined}
    names = ("us_16KiB", "us_1MiB", "bus_gbs_large")
    rows = {name: getattr(own, name) | {n: getattr(table, name)[at] for n, at in sizes.items()} for name in names}
    source = f"{like.id} to {n_joined} GPUs, {own.borrowed_from or card.id} beyond"
    return msgspec.structs.replace(card, allreduce=msgspec.structs.replace(own, **rows, borrowed_from=source))


def default_total_gib(nvidia_smi_mib: int) -> float:
    """What the CUDA runtime reports of an unknown card (`default_rule` in gpus.yaml): 24576 MiB, 23.55 GiB."""
    gib = nvidia_smi_mib / 1024
    return gib - (0.45 if gib <= 24.5 else 0.55 if gib <= 80.5 else 0.6)


def _plain(name: str) -> str:
    """ "NVIDIA-H100-80GB-HBM3", "nvidia-tesla-t4", "a100_80gb" -> "h100-80-hbm3", "t4", "a100-80"."""
    plain = re.sub(r"[\s_-]+", "-", name.strip().lower())
    return re.sub(r"^(?:(?:nvidia|amd|tesla|geforce|instinct)-)+|(?<=\d)gb(?=-|\Z)", "", plain)


def read_yaml(package: str, name: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((resources.files(package) / "data" / name).read_text("utf-8"), Loader=loader)


@functools.cache
def _hardware() -> Any:
    return read_yaml("penstock.hardware", "gpus.yaml")


@functools.cache
def _gpus() -> dict[str, GpuFacts]:
    rows = {row.id: row for row in msgspec.convert(_hardware()["gpus"], tuple[GpuFacts, ...])}
    return {own: row if row.allreduce else _with_borrowed(row, rows) for own, row in rows.items()}


@functools.cache
def _by_name() -> dict[str, tuple[GpuFacts, ...]]:
    cards: dict[str, tuple[GpuFacts, ...]] = {}
    for card in _gpus().values():
        for name in {_plain(name) for name in (card.id, *card.names, *card.aliases)}:
            cards[name] = (*cards.get(name, ()), card)
    return cards


def _with_borrowed(row: GpuFacts, rows: Mapping[str, GpuFacts]) -> GpuFacts:
    """The all-reduce table of a like card, bandwidth scaled by the nominal rates of the two links."""
    if row.nvlink:
        like = rows[_NVLINK_LIKE[row.nvlink.gen]]
    else:
        like = rows["h100-sxm" if row.xgmi else _PCIE_LIKE[row.pcie.gen]]
    return msgspec.structs.replace(row, allreduce=_scaled(like, row.peer_gbs / like.peer_gbs))


def _scaled(like: GpuFacts, scale: float) -> AllReduce:
    table = like.allreduce
    assert table is not None, f"{like.id} has no measured all-reduce"
    return msgspec.structs.replace(
        table,
        bus_gbs_large={n: rate * scale for n, rate in table.bus_gbs_large.items()},
        us_1MiB={n: table.us_16KiB[n] + (us - table.us_16KiB[n]) / scale for n, us in table.us_1MiB.items()},
        borrowed_from=like.id,
    )


@functools.cache
def _links() -> dict[str, LinkFacts]:
    return {row.id: row for row in msgspec.convert(_hardware()["interconnects"], tuple[LinkFacts, ...])}


@functools.cache
def known_variables() -> frozenset[str]:
    """Names of the environment variables that vLLM, NCCL and Gloo read."""
    text = resources.files("penstock.hardware").joinpath("data", "variables.txt").read_text("utf-8")
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())
