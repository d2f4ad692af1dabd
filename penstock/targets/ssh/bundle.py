"""Penstock as one archive for another machine's Python: its own package and what a node needs, pinned.

The host needs nothing but Python. Versions are those installed here. Where the host's Python is like ours the installed
files are copied; else pip, or uv, fetches its wheels.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

import penstock
from penstock.errors import PenstockError

# What a node imports, with the least version that will do (pyproject.toml). The host's copy is kept where it is new
# enough, since ours would come before it.
NEEDED = {"msgspec": "0.19", "psutil": "6", "PyYAML": "6"}
_PACKAGE = Path(penstock.__file__).resolve().parent
_FETCH_S = 300.0
# https://peps.python.org/pep-0600/: a wheel that runs on glibc 2.17 runs on every later one.
_MANYLINUX = ("manylinux_2_5", "manylinux_2_12", "manylinux_2_17", "manylinux1", "manylinux2010", "manylinux2014")

# Its name in site-packages, and where it is here.
Member = tuple[str, Path]


class HostPython(msgspec.Struct, frozen=True):
    """The Python of a host. `platform`: sysconfig's ("linux-x86_64"); `libc`: "glibc 2.36", empty for others.

    `has`: versions of the packages in `NEEDED` that it sees already.
    """

    version: str
    implementation: str
    platform: str
    libc: str
    has: dict[str, str] = {}

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def contents(host: HostPython, cache: Path) -> list[Member]:
    """The files that host's site-packages needs. Fetches what is not here, into `cache`."""
    members = [
        (f"penstock/{path.relative_to(_PACKAGE).as_posix()}", path)
        for path in sorted(_PACKAGE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
    ]
    for name in lacking(host.has):
        members += _installed(name) if is_like_ours(host) else _fetched(name, host, cache)
    return members


def lacking(has: Mapping[str, str]) -> list[str]:
    """What must be brought to a Python that has these versions; pure."""
    return [name for name, least in NEEDED.items() if name not in has or _numbers(has[name]) < _numbers(least)]


def is_like_ours(host: HostPython) -> bool:
    """Whether compiled files of our Python run on that one."""
    if host.platform != sysconfig.get_platform() or host.implementation != sys.implementation.name:
        return False
    # Wheels name the oldest glibc they run on, which is older than any we may meet; musl has none.
    return host.minor == f"{sys.version_info[0]}.{sys.version_info[1]}" and host.libc.startswith("glibc")


def key_of(members: Sequence[Member]) -> str:
    """The name of this version: a hash of all names and bytes."""
    digest = hashlib.sha256()
    for name, path in members:
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"{penstock.__version__}-{digest.hexdigest()[:16]}"


def tarball(members: Sequence[Member]) -> bytes:
    """The files as one .tar.gz, with the metadata that makes penstock an installed package."""
    version = penstock.__version__
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: penstock\nVersion: {version}\n".encode(),
        "INSTALLER": b"penstock\n",
    }
    files = [(name, path.read_bytes()) for name, path in members]
    files += [(f"penstock-{version}.dist-info/{name}", data) for name, data in about.items()]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
        for name, data in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version)[:3])


def _installed(name: str) -> list[Member]:
    """The files of a package that is installed here, without its programs and compiled Python."""
    files = [(file, Path(str(file.locate()))) for file in metadata.distribution(name).files or ()]
    return [
        (file.as_posix(), path)
        for file, path in files
        if ".." not in file.parts and file.suffix != ".pyc" and path.is_file()
    ]


def _fetched(name: str, host: HostPython, cache: Path) -> list[Member]:
    """The files of the same version of a package for another Python."""
    pinned = f"{name}=={metadata.version(name)}"
    folder = cache / f"{host.implementation}-{host.minor}-{host.platform}" / pinned
    if not folder.is_dir():
        new = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            new.mkdir(parents=True)
            _fetch(pinned, host, new)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _fetch(pinned: str, host: HostPython, folder: Path) -> None:
    """Unpack a wheel for that Python into a folder, by the first of pip and uv that can."""
    complaints = []
    for argv in _fetchers(pinned, host, folder):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_FETCH_S)
        except (OSError, subprocess.TimeoutExpired) as exc:
            complaints.append(f"{argv[0]}: {exc}")
            continue
        if done.returncode == 0:
            for wheel in list(folder.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder)
                wheel.unlink()
            return
        complaints.append(f"{' '.join(argv[:4])}: {(done.stderr.strip().splitlines() or ['it failed'])[-1][:300]}")
    raise PenstockError(
        f"could not fetch {pinned} for Python {host.minor} on {host.platform}",
        detail="\n".join(complaints),
        hint=f"Install it there by hand (pip install {pinned.replace('==', '>=')}), or use the Python that is here "
        f"({sys.version_info[0]}.{sys.version_info[1]}) on the hosts too.",
        is_retryable=True,
    )


def _fetchers(pinned: str, host: HostPython, folder: Path) -> list[list[str]]:
    machine, word = host.platform.rpartition("-")[2], host.minor.replace(".", "")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    pip += ["--python-version", host.minor, "--implementation", "cp", "--abi", f"cp{word}", "--abi", "abi3"]
    pip += ["--abi", "none", *(option for tag in _MANYLINUX for option in ("--platform", f"{tag}_{machine}"))]
    uv = ["uv", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    uv += ["--python-version", host.minor, "--python-platform", f"{machine}-unknown-linux-gnu"]
    return [[*pip, pinned], [*uv, pinned]]
