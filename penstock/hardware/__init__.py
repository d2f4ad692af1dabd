from __future__ import annotations

import msgspec


def visible(indices: tuple[int, ...]) -> dict[str, str]:
    """The environment in which CUDA has these GPUs alone, by their numbers in nvidia-smi; empty for none."""
    names = ",".join(map(str, indices))
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names} if names else {}


class Gpu(msgspec.Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int


class Machine(msgspec.Struct, frozen=True):
    """One node as its target reports it; free memory is what a new process could get without swapping.
    `versions`: of "python", "penstock", and of installed "vllm", "ray", "torch"; empty when not asked. `assumed`: why
    it could not be asked; then all this is what the file says, and memory None where it says nothing. `unread`: GPUs
    that are there and not understood, each with what is not known of it."""

    host: str
    n_cpus: int
    memory_bytes: int | None
    memory_free_bytes: int | None
    gpus: tuple[Gpu, ...] = ()
    links: Links | None = None
    versions: dict[str, str] = {}
    assumed: str | None = None
    unread: tuple[str, ...] = ()


class Interface(msgspec.Struct, frozen=True):
    """A network interface with one IPv4 address. `speed_mbps` None: the driver does not report it."""

    name: str
    address: str
    prefix_length: int
    speed_mbps: int | None = None
    is_infiniband: bool = False
    is_virtual: bool = False
    mtu: int | None = None

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.")


class NodeFacts(msgspec.Struct, frozen=True):
    """A node as it sees itself. `shm_bytes`: free in /dev/shm. `environment`: variables of NCCL, Gloo and vLLM."""

    host: str
    machine: Machine
    interfaces: tuple[Interface, ...]
    shm_bytes: int
    environment: dict[str, str] = {}


class Links(msgspec.Struct, frozen=True):
    """What joins the GPUs of one machine. `joined`: GPUs in the smallest group that NVLink joins (1: none). `gbs`: one
    GPU's NVLink, GB/s in one direction. `farthest`: the longest PCIe way ("SYS"), None when NVLink joins all."""

    n_gpus: int
    joined: int
    gbs: float | None = None
    farthest: str | None = None
    has_peer_to_peer: bool | None = None

    @property
    def words(self) -> str:
        """ "NVLink joins all 8 GPUs, peer-to-peer works"."""
        peers = {True: ", peer-to-peer works", False: ", no peer-to-peer", None: ""}[self.has_peer_to_peer]
        if self.n_gpus == 1:
            return "one GPU"
        if self.joined == self.n_gpus:
            return f"NVLink joins all {self.n_gpus} GPUs{peers}"
        if self.joined > 1:
            return f"NVLink joins groups of {self.joined}, PCIe ({self.farthest}) the rest{peers}"
        return f"PCIe ({self.farthest}) joins {self.n_gpus} GPUs{peers}"
