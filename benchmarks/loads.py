"""How long vLLM takes to load a model's files in each way, against how fast the same files can be read.

    python benchmarks/loads.py llama-3.1-70b --layers 12 --folder /scratch/model [--places memory disk network]
    python benchmarks/loads.py FOLDER --ways default prefetch --mbytes 800

Needs vLLM, and a GPU for some ways; a way whose package is missing is left out. A model of the catalogue gets random
weights of a dense Llama's shapes in that folder, once. The files come out of the page cache (`memory`), from their disk
with nothing of them in the page cache (`disk`), and through a file system that gives so many bytes per second in all
with a wait for each request (`network`: tests/network_disk.py, needs root). Each load is a process of its own,
and its seconds are those of the loader: no import, no compilation. `read` is what `engine.load: auto` measures before a
start: one reader that maps the files, eight by way of the page cache, eight past it; of files in memory one and eight
that map them. The share is the load's rate against what was measured of its way of reading.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import network_disk
from sleep import write_folder, write_weights

from penstock.models import files, read_rate
from penstock.models.read_rate import Way
from penstock.text import MIB

# Name -> arguments of the engine, the package it needs beside vLLM, and how it reads.
WAYS: dict[str, tuple[dict[str, Any], str | None, Way]] = {
    "default": ({}, None, "mapped"),
    "prefetch": ({"safetensors_load_strategy": "prefetch"}, None, "buffered"),
    "threads": ({"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 8}}, None, "buffered"),
    "instanttensor": ({"load_format": "instanttensor"}, "instanttensor", "direct"),
    "fastsafetensors": ({"load_format": "fastsafetensors"}, "fastsafetensors", "buffered"),
    "streamer": ({"load_format": "runai_streamer"}, "runai_model_streamer", "buffered"),
}
_MOST_S = 100.0
_BLOCK_BYTES = 8 * MIB


def load(folder: Path, more: dict[str, Any], answer: Connection) -> None:
    """Load the model once, in this process; sends the seconds of the loader's own work."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.platforms import current_platform

    config = EngineArgs(model=str(folder), enforce_eager=True, max_model_len=512, **more).create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as meeting:
        backend = current_platform.dist_backend
        init_distributed_environment(1, 0, f"file://{meeting.name}", 0, backend)
        initialize_model_parallel(1, 1)
        loader = get_model_loader(config.load_config)
        load_weights = loader.load_weights

        def timed(*words: Any) -> None:
            began = time.monotonic()
            load_weights(*words)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            answer.send(time.monotonic() - began)
            os._exit(0)  # what follows is measured elsewhere, and fails without an accelerator

        loader.load_weights = timed
        loader.load_model(config, config.model_config)


def load_s(folder: Path, more: dict[str, Any]) -> float | None:
    """Seconds of a load, in a process of its own; None when it fails, with its output on standard error."""
    receiver, sender = multiprocessing.Pipe(False)
    process = multiprocessing.get_context("fork").Process(target=load, args=(folder, more, sender))
    process.start()
    sender.close()
    try:
        return float(receiver.recv()) if receiver.poll(_MOST_S) else None
    except EOFError:
        return None
    finally:
        process.join(5.0)
        process.kill()


def drop(paths: Sequence[Path]) -> None:
    """Nothing of these files stays in the page cache."""
    os.sync()
    for path in paths:
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def take(path: Path) -> None:
    """Copy a file's pages, as an engine that maps it does."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        target, size = ctypes.create_string_buffer(_BLOCK_BYTES), len(pages)
        first = ctypes.addressof(whole := (ctypes.c_char * size).from_buffer(pages))
        for at in range(0, size, _BLOCK_BYTES):
            ctypes.memmove(target, first + at, min(_BLOCK_BYTES, size - at))
        del whole


def memory_rates(paths: Sequence[Path]) -> dict[Way, float]:
    """Bytes per second of files that are in memory, by one and by eight that map them."""
    n_bytes, rates = sum(path.stat().st_size for path in paths), list[float]()
    for n_readers in (8, 1, 8):  # the first brings them into memory
        began = time.monotonic()
        with ThreadPoolExecutor(n_readers) as pool:
            list(pool.map(take, paths))
        rates.append(n_bytes / (time.monotonic() - began))
    return {"mapped": rates[1], "buffered": rates[2], "direct": rates[2]}


def disk_rates(paths: Sequence[Path]) -> dict[Way, float]:
    drop(paths)
    reading = read_rate.measure(paths)
    if reading is None:
        return {}
    return {way: reading.rate(way) for way in ("mapped", "buffered", "direct")}


@contextlib.contextmanager
def network(folder: Path, mbytes: float, latency_ms: float) -> Iterator[Path]:
    """The same folder, as a file system of another machine shows it."""
    program = [sys.executable, network_disk.__file__, str(folder)]
    with tempfile.TemporaryDirectory() as target:
        words = [target, "--mbytes", str(mbytes), "--latency-ms", str(latency_ms)]
        server = subprocess.Popen([*program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            if server.stdout.readline().strip() != "ready":
                raise RuntimeError("it could not be mounted")
            yield Path(target)
        finally:
            server.communicate()


def measure(place: str, folder: Path, ways: Sequence[str]) -> None:
    """One line for each way, as it is measured."""
    paths = [folder / name for name in files.wanted_shards(folder)]
    n_bytes = sum(path.stat().st_size for path in paths)
    rates = memory_rates(paths) if place == "memory" else disk_rates(paths)
    shown = ", ".join(f"{way} {rate / 1e9:.2f}" for way, rate in rates.items())
    print(f"{place}: {n_bytes / 1e9:.1f} GB in {len(paths)} files; read, GB/s: {shown}", flush=True)
    for way in ways:
        more, _, reads = WAYS[way]
        if place != "memory":
            drop(paths)
        seconds = load_s(folder, more)
        row: dict[str, Any] = {"place": place, "way": way, "load_s": seconds and round(seconds, 2)}
        if seconds:
            row["gb_per_s"] = round(n_bytes / 1e9 / seconds, 2)
            row["share"] = round(n_bytes / seconds / rates[reads], 2) if reads in rates else None
        print(json.dumps(row), flush=True)


def make(model: str, folder: Path, n_layers: int | None) -> None:
    """The model's folder with random weights; nothing where it is."""
    if (folder / files.INDEX).exists():
        return
    write_folder(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({"num_hidden_layers": n_layers} if n_layers else {})))
    writer = multiprocessing.get_context("spawn").Process(target=write_weights, args=(folder,))
    writer.start()  # its CUDA context ends with it
    writer.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of penstock's catalogue, or a folder with files")
    parser.add_argument("--folder", type=Path, help="where the weights are written")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--places", nargs="+", choices=("memory", "disk", "network"), default=["disk", "memory"])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--mbytes", type=float, default=800.0, help="of the network, a second")
    parser.add_argument("--latency-ms", type=float, default=1.0)
    options = parser.parse_args()
    folder = Path(options.model)
    if not (folder / "config.json").exists():
        folder = options.folder
        make(options.model, folder, options.layers)
    # Once, before the processes of the loads.
    importlib.import_module("vllm.engine.arg_utils")
    importlib.import_module("vllm.model_executor.model_loader")

    packages = {way: WAYS[way][1] for way in options.ways}
    ways = [way for way, package in packages.items() if package is None or importlib.util.find_spec(package)]
    for place in options.places:
        with contextlib.ExitStack() as stack:
            is_far = place == "network"
            seen = stack.enter_context(network(folder, options.mbytes, options.latency_ms)) if is_far else folder
            measure(place, seen, ways)


if __name__ == "__main__":
    main()
