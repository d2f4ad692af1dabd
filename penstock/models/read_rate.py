"""How fast this machine reads a model's files: `python -m penstock.models.read_rate FOLDER` prints it as JSON.

A page cache hides the disk, so the files are read past it (O_DIRECT), or where the file system cannot do that, after
their pages were dropped. First by one reader, as an engine that maps its files reads, then by eight.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec
import psutil

from penstock.models.files import wanted_shards
from penstock.text import GIB, MIB, show_bytes, show_seconds

# Enough to leave a disk's own cache behind, little enough for a network file system that gives 100 MB/s.
_READ_BYTES, _READ_S = GIB, 2.0
_BLOCK_BYTES, _N_READERS = 8 * MIB, 8
_ALONE_SHARE = 0.4  # of the time, for one reader
_HANG_S = 1.0  # NFS without its server hangs: so much longer is waited
_N_SAMPLES = 64
CACHED_SHARE = 0.9  # from it on files count as in memory

# File systems of other machines, as /proc/mounts names them. vLLM knows nfs, nfs4 and lustre alone.
_OF_NETWORK = ("nfs", "lustre", "ceph", "beegfs", "gpfs", "wekafs", "cifs", "smb3", "9p", "glusterfs", "fuse.")
_IN_MEMORY = ("tmpfs", "ramfs")

Blocks = Iterator[tuple[Path, int]]


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a model's files, read by eight without the page cache (`is_direct`), or with `cached_share` of the
    files in there. `path`: the first of the files; `alone_bytes_per_s`: the rate of one reader."""

    path: str
    n_bytes: int
    took_s: float
    is_direct: bool
    cached_share: float | None
    file_system: str = ""
    alone_bytes_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        return self.n_bytes / max(self.took_s, 1e-9)

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
    """What a load will take at best, in words: "131.0 GiB at 2.10 GB/s on ext4: about 1 min 7 s". Pure."""
    where = f" on {file_system}" if file_system else ""
    rate = f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{show_bytes(n_bytes)} at {rate}{where}: about {show_seconds(n_bytes / max(bytes_per_s, 1.0))}"


def spread(sizes: Sequence[tuple[Path, int]], n_bytes_max: int) -> list[tuple[Path, int]]:
    """Blocks to read: from each file in turn, from its beginning, `n_bytes_max` at most. Pure.
    Ranks read several files at the same time, and a striped file system has them on several disks."""
    each = [[(path, at) for at in range(0, min(size, n_bytes_max), _BLOCK_BYTES)] for path, size in sizes]
    blocks = [block for row in zip_longest(*each) for block in row if block is not None]
    return blocks[: max(1, n_bytes_max // _BLOCK_BYTES)]


def measure(files: Sequence[Path], n_bytes_max: int = _READ_BYTES, seconds: float = _READ_S) -> Reading | None:
    """The rate at which files are read from their disk; None when they cannot be. Blocks `seconds`, and one more
    where the file system hangs."""
    try:
        sizes = [(path, path.stat().st_size) for path in files]
        cached = cached_share(sizes)
        kind = file_system_of(os.path.realpath(files[0]), mounts()) if files else ""
    except OSError:
        return None
    blocks = spread([row for row in sizes if row[1]], n_bytes_max)
    n_alone, began = len(blocks) // 3, time.monotonic()
    for is_direct in (True, False) if blocks else ():
        # Of other blocks than those of the eight: a disk has a cache too.
        alone = _read(iter(blocks[:n_alone]), 1, seconds * _ALONE_SHARE, is_direct) if n_alone else None
        if n_alone and alone is None and time.monotonic() - began > seconds * _ALONE_SHARE:
            return None  # it hangs
        together = _read(iter(blocks[n_alone:]), _N_READERS, seconds * (1 - _ALONE_SHARE), is_direct)
        if together is not None:
            rate = None if alone is None else round(alone[0] / max(alone[1], 1e-9))
            return Reading(str(files[0]), *together, is_direct, cached, kind, rate)
        if time.monotonic() - began > seconds * (1 - _ALONE_SHARE):
            return None
    return None


def mounts() -> list[tuple[str, str]]:
    """(mount point, type) of every file system of this machine, in the order of the kernel."""
    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def _read(blocks: Blocks, n_readers: int, seconds: float, is_direct: bool) -> tuple[int, float] | None:
    """(bytes, seconds); None where the file system cannot read this way, or hangs."""
    lock = threading.Lock()
    counts: list[int] = []
    errors: list[OSError] = []
    began = time.monotonic()

    def next_block() -> tuple[Path, int] | None:
        with lock:
            return next(blocks, None) if time.monotonic() - began < seconds else None

    def reader() -> None:
        try:
            _read_blocks(next_block, counts, is_direct)
        except OSError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(n_readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + seconds + _HANG_S - time.monotonic()))
    took_s, n_bytes = time.monotonic() - began, sum(counts)
    return None if errors or not n_bytes else (n_bytes, took_s)


def _read_blocks(next_block: Callable[[], tuple[Path, int] | None], counts: list[int], is_direct: bool) -> None:
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
    # O_DIRECT needs memory that begins on a page, as anonymous memory does.
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
        while (block := next_block()) is not None:
            path, at = block
            fd = os.open(path, flags)
            try:
                if not is_direct:
                    os.posix_fadvise(fd, at, _BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
                counts.append(os.preadv(fd, [buffer], at))
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
