"""Shows a folder as a file system of another machine would: so many bytes per second in all, and a wait a request.

    python tests/network_disk.py FOLDER MOUNT_POINT [--mbytes 800] [--latency-ms 1]

The files at the top of the folder, to read only, by the kernel's FUSE and nothing else; type "fuse.network". It prints
"ready" and goes on until its standard input ends; then the mount point is empty again. Needs root and /dev/fuse.

The protocol is the kernel's: https://docs.kernel.org/filesystems/fuse/fuse.html, include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import stat
import struct
import sys
import threading
import time
from pathlib import Path

# Operations (`enum fuse_opcode`).
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET = 27, 28, 29, 34, 36, 38, 42
_SILENT = (FORGET, INTERRUPT, BATCH_FORGET)
_EMPTY = (RELEASE, FLUSH, RELEASEDIR, ACCESS, DESTROY)
_IN_HEADER, _OUT_HEADER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ROOT, _MINOR = 1, 31
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_REQUEST_BYTES, _PAGE_BYTES = 1 << 20, 4096
_CACHED_S = 3600
# Else each open drops what the page cache has of the file: what is read ahead would be read twice.
_KEEP_CACHE = 1 << 1
_N_THREADS = 16
_READ_ONLY, _NO_SUID, _NO_DEVICES, _DETACH = 1, 2, 4, 2


class Pace:
    """Bytes per second over all threads, and seconds a request takes at least."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._lock, self._next_at = threading.Lock(), 0.0

    def wait(self, n_bytes: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._next_at = max(self._next_at, now - 0.01) + n_bytes / self._bytes_per_s
            at = max(self._next_at, now + self._latency_s)
        time.sleep(max(0.0, at - now))


class NetworkDisk:
    """Answers the kernel's requests for the files of one folder. Inode 1 is the folder, 2 its first file."""

    def __init__(self, folder: Path, pace: Pace) -> None:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        self._names = {path.name.encode(): number for number, path in enumerate(paths, _ROOT + 1)}
        self._files = {number: os.open(path, os.O_RDONLY) for number, path in enumerate(paths, _ROOT + 1)}
        self._folder, self._pace = folder, pace

    def serve(self, device: int) -> None:
        """Until the file system is unmounted. Several threads may."""
        while True:
            try:
                request = os.read(device, _REQUEST_BYTES + _PAGE_BYTES)
            except OSError as exc:
                if exc.errno in (errno.EINTR, errno.ENOENT):  # the request was taken back
                    continue
                return
            _, operation, unique, node, *_ = _IN_HEADER.unpack_from(request)
            if operation in _SILENT:
                continue
            try:
                body, error = self._answer(operation, node, request[_IN_HEADER.size :]), 0
            except OSError as exc:
                body, error = b"", -(exc.errno or errno.EIO)
            try:
                os.writev(device, [_OUT_HEADER.pack(_OUT_HEADER.size + len(body), error, unique), body])
            except OSError:  # who asked is gone
                continue

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        if operation == INIT:
            _, minor, ahead, _ = struct.unpack_from("<4I", body)
            pages = _REQUEST_BYTES // _PAGE_BYTES
            sizes = (7, min(_MINOR, minor), ahead, _ASYNC_READ | _MAX_PAGES, 64, 48, _PAGE_BYTES, 1, pages, 0)
            return struct.pack("<4I2H2I2H8I", *sizes, *[0] * 8)
        if operation == LOOKUP:
            found = self._names.get(body.rstrip(b"\0"))
            if found is None:
                raise OSError(errno.ENOENT, "no such file")
            return struct.pack("<4Q2I", found, 0, _CACHED_S, _CACHED_S, 0, 0) + self._attributes(found)
        if operation == GETATTR:
            return struct.pack("<Q2I", _CACHED_S, 0, 0) + self._attributes(node)
        if operation in (OPEN, OPENDIR):
            return struct.pack("<Q2I", 0, _KEEP_CACHE, 0)
        if operation == READ:
            _, offset, size = struct.unpack_from("<2QI", body)
            data = os.pread(self._files[node], size, offset)
            self._pace.wait(len(data))
            return data
        if operation == READDIR:
            _, offset, size = struct.unpack_from("<2QI", body)
            return self._names_from(offset, size)
        if operation == STATFS:
            return struct.pack("<5Q10I", 0, 0, 0, len(self._names), 0, _PAGE_BYTES, 255, _PAGE_BYTES, *[0] * 7)
        if operation in _EMPTY:
            return b""
        raise OSError(errno.ENOSYS, "not here")

    def _attributes(self, node: int) -> bytes:
        facts = self._folder.stat() if node == _ROOT else os.fstat(self._files[node])
        times = [int(facts.st_mtime)] * 3
        mode = stat.S_IFDIR | 0o555 if node == _ROOT else stat.S_IFREG | 0o444
        return _ATTRIBUTES.pack(
            *(node, facts.st_size, -(-facts.st_size // 512), *times, 0, 0, 0),
            *(mode, 1, 0, 0, 0, _PAGE_BYTES, 0),
        )

    def _names_from(self, offset: int, size: int) -> bytes:
        rows = b""
        for place, (name, node) in enumerate(list(self._names.items())[offset:], offset + 1):
            row = struct.pack("<2Q2I", node, place, len(name), stat.S_IFREG >> 12) + name
            row += bytes(-len(row) % 8)
            if len(rows) + len(row) > size:
                break
            rows += row
        return rows


def mounted(folder: Path, target: Path, pace: Pace) -> int:
    """Mount and serve, in threads; the device.  Raises OSError."""
    disk = NetworkDisk(folder, pace)  # before: nobody answers for the mount point yet, which the folder may hold
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_REQUEST_BYTES}"
    flags = _READ_ONLY | _NO_SUID | _NO_DEVICES
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"network", os.fsencode(target), b"fuse.network", flags, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))
    for _ in range(_N_THREADS):
        threading.Thread(target=disk.serve, args=(device,), daemon=True).start()
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mount_point", type=Path)
    parser.add_argument("--mbytes", type=float, default=800.0, help="a second, 10^6")
    parser.add_argument("--latency-ms", type=float, default=1.0)
    options = parser.parse_args()
    mounted(options.folder, options.mount_point, Pace(options.mbytes * 1e6, options.latency_ms / 1e3))
    try:
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(options.mount_point), _DETACH)


if __name__ == "__main__":
    main()
