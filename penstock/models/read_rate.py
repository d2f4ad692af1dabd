"""How fast this machine reads a model's files: `python -m penstock.models.read_rate FOLDER` prints it as JSON.

In three ways, as engines read: one reader that maps the files, eight that read them into the page cache, eight that
read past it (O_DIRECT, where the file system can). What is measured is not in the page cache: pages are dropped first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from penstock.models.files import wanted_shards
from penstock.text import GIB, MIB, show_bytes, show_seconds

# Enough to leave a disk's own cache behind, little enough for a network file system that gives 100 MB/s.
_READ_BYTES, _READ_S = GIB, 2.0
_BLOCK_BYTES = 8 * MIB
_HANG_S = 1.0  # NFS without its server hangs: so much longer is waited
_N_SAMPLES = 64
CACHED_SHARE = 0.9  # from it on files count as in memory

# File systems of other machines, as /proc/mounts names them. vLLM knows nfs, nfs4 and lustre alone.
_OF_NETWORK = ("nfs", "lustre", "ceph", "beegfs", "gpfs", "wekafs", "cifs", "smb3", "9p", "glusterfs", "fuse.")
_IN_MEMORY = ("tmpfs", "ramfs")

Way = Literal["mapped", "buffered", "direct"]
_READERS: dict[Way, int] = {"mapped": 1, "buffered": 8, "direct": 8}  # threads of each way
Blocks = Iterator[tuple[Path, int]]


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a model's files, read by eight: past the page cache (`is_direct`), or into it where the file system
    cannot do that. `path`: the first of the files, of which `cached_share` was in memory before. `mapped_bytes_per_s`:
    the rate of one reader that maps the files; `buffered_bytes_per_s`: of eight by way of the page cache."""

    path: str
    n_bytes: int
    took_s: float
    is_direct: bool
    cached_share: float | None
    file_system: str = ""
    mapped_bytes_per_s: float | None = None
    buffered_bytes_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        return self.n_bytes / max(self.took_s, 1e-9)

    def rate(self, way: Way) -> float:
        """Bytes per second of a way; the least of what was measured where that is not known."""
        known = {"mapped": self.mapped_bytes_per_s, "buffered": self.buffered_bytes_per_s, "direct": self.bytes_per_s}
        return known[way] or min(filter(None, known.values()))

    @property
    def is_of_network(self) -> bool:
        return is_of_network(self.file_system)


def is_of_network(file_system: str) -> bool:
    """Whether its files lie on other machines: "nfs4" and what FUSE serves of them ("fuse.gcsfuse") do, "ext4" not."""
    return file_system.startswith(_OF_NETWORK)


def is_in_memory(file_system: str) -> bool:
    return file_system in _IN_MEMORY


def file_system_of(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """The type of the file system that holds a path; `mounts` are (mount point, type), later ones hide earlier ones.
    "/data/m" in [("/", "ext4"), ("/data", "nfs4")] -> "nfs4". Empty where none is known. Pure."""
    best, kind = "", ""
    for point, of_mount in mounts:
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, of_mount
    return kind


def expected(n_bytes: int, bytes_per_s: float, file_system: str) -> str:
    """What reading takes, in words: "131 GiB at 2.10 GB/s on ext4: about 1m06s to read". Pure."""
    where = f" on {file_system}" if file_system else ""
    rate = f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{show_bytes(n_bytes)} at {rate}{where}: about {show_seconds(n_bytes / max(bytes_per_s, 1.0))} to read"


def spread(sizes: Sequence[tuple[Path, int]], n_bytes_max: int) -> list[tuple[Path, int]]:
    """Blocks to read: from each file in turn, from its beginning, `n_bytes_max` at most. Pure.
    Ranks read several files at the same time, and a striped file system has them on several disks."""
    each = [[(path, at) for at in range(0, min(size, n_bytes_max), _BLOCK_BYTES)] for path, size in sizes]
    blocks = [block for row in zip_longest(*each) for block in row if block is not None]
    return blocks[: max(1, n_bytes_max // _BLOCK_BYTES)]


def measure(files: Sequence[Path], n_bytes_max: int = _READ_BYTES, seconds: float = _READ_S) -> Reading | None:
    """The rates at which files are read from their disk; None when they cannot be. Blocks `seconds`, and one more
    where the file system hangs."""
    try:
        sizes = [(path, path.stat().st_size) for path in files]
        cached = cached_share(sizes)
        kind = file_system_of(os.path.realpath(files[0]), mounts()) if files else ""
    except OSError:
        return None
    blocks = spread([row for row in sizes if row[1]], n_bytes_max)
    rates: dict[Way, tuple[int, float]] = {}
    for number, way in enumerate(_READERS):  # each reads other blocks: a disk has a cache too
        began = time.monotonic()
        amount = _read(iter(blocks[number :: len(_READERS)]), way, seconds / len(_READERS))
        if amount is not None:
            rates[way] = amount
        elif time.monotonic() - began > seconds / len(_READERS):
            break  # it hangs
    best = rates.get("direct") or rates.get("buffered") or rates.get("mapped")
    if best is None:
        return None
    mapped, buffered = (_per_s(rates.get(way)) for way in ("mapped", "buffered"))
    return Reading(str(files[0]), *best, "direct" in rates, cached, kind, mapped, buffered)


def _per_s(amount: tuple[int, float] | None) -> float | None:
    return None if amount is None else round(amount[0] / max(amount[1], 1e-9))


def mounts() -> list[tuple[str, str]]:
    """(mount point, type) of every file system of this machine, in the order of the kernel."""
    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def _read(blocks: Blocks, way: Way, seconds: float) -> tuple[int, float] | None:
    """(bytes, seconds); None where the file system cannot read this way, or hangs."""
    lock = threading.Lock()
    counts: list[int] = []
    errors: list[OSError] = []
    began = time.monotonic()

    def reader() -> None:
        try:
            # O_DIRECT needs memory that begins on a page, as anonymous memory does.
            with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
                while time.monotonic() - began < seconds:
                    with lock:
                        block = next(blocks, None)
                    if block is None:
                        return
                    counts.append(_read_block(*block, way, buffer))
        except OSError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(_READERS[way])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + seconds + _HANG_S - time.monotonic()))
    took_s, n_bytes = time.monotonic() - began, sum(counts)
    return None if errors or not n_bytes else (n_bytes, took_s)


def _read_block(path: Path, at: int, way: Way, buffer: mmap.mmap) -> int:
    """Bytes of one block, read into the buffer. Every way lets other threads of this process run."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
    try:
        if way != "direct":
            os.posix_fadvise(fd, at, _BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
        if way != "mapped":
            return os.preadv(fd, [buffer], at)
        n_bytes = min(_BLOCK_BYTES, os.fstat(fd).st_size - at)
        with mmap.mmap(fd, n_bytes, access=mmap.ACCESS_COPY, offset=at) as block:
            array = ctypes.c_char * n_bytes
            ctypes.memmove(array.from_buffer(buffer), array.from_buffer(block), n_bytes)
        return n_bytes
    finally:
        os.close(fd)


def cached_share(sizes: Sequence[tuple[Path, int]]) -> float | None:
    """The share of files' bytes in the page cache, by samples; None where the kernel does not report it.

    At random places: a kernel may read ahead after a look, so that the next one would find its own traces.
    """
    if not any(size for _, size in sizes):
        return None
    paths = random.choices([path for path, _ in sizes], [size for _, size in sizes], k=_N_SAMPLES)
    of_path = dict(sizes)
    try:
        n_cached = sum(_is_cached(path, random.randrange(of_path[path])) for path in paths)
    except OSError:
        return None
    return n_cached / _N_SAMPLES


def _is_cached(path: Path, at: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def main(folder: str) -> int:
    """Print the reading of a model's folder; 1 where nothing could be read."""
    files = [path for name in wanted_shards(Path(folder)) if (path := Path(folder) / name).is_file()]
    reading = measure(files)
    sys.stdout.write(msgspec.json.encode(reading).decode() + "\n")
    return 0 if reading is not None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
