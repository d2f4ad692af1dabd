from __future__ import annotations

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int


class Machine(msgspec.Struct, frozen=True):
    """One node as its target sees it. `memory_free_bytes` is what a new process could get without swapping.

    `versions`: of "python", "penstock", and of what is installed of "vllm", "ray", "torch"; empty when not asked.
    """

    host: str
    n_cpus: int
    memory_bytes: int
    memory_free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    links: Links | None = None
    versions: dict[str, str] = {}


class Interface(msgspec.Struct, frozen=True):
    """A network interface with one IPv4 address. `speed_mbps` is None where the driver does not tell."""

    name: str
    address: str
    prefix_length: int
    speed_mbps: int | None = None
    is_infiniband: bool = False
    is_virtual: bool = False

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
    """What joins the GPUs of one machine.

    `joined`: GPUs that NVLink joins, in the smallest such group (1: none); `n_gpus`: how many there are. `gbs` is one
    GPU's NVLink in one direction, GB/s, when told. `farthest` is the longest PCIe way ("SYS"), None when NVLink joins
    all. `has_peer_to_peer` None: not told.
    """

    n_gpus: int
    joined: int
    gbs: float | None = None
    farthest: str | None = None
    has_peer_to_peer: bool | None = None

    @property
    def words(self) -> str:
        """ "NVLink joins all 8 GPUs, peer-to-peer works"."""
        if self.n_gpus == 1:
            return "one GPU"
        if self.joined == self.n_gpus:
            found = f"NVLink joins all {self.n_gpus} GPUs"
        elif self.joined > 1:
            found = f"NVLink joins groups of {self.joined}, PCIe ({self.farthest}) the rest"
        else:
            found = f"PCIe ({self.farthest}) joins {self.n_gpus} GPUs"
        told = {True: ", peer-to-peer works", False: ", no peer-to-peer", None: ""}
        return found + told[self.has_peer_to_peer]
