"""An image for real pods, made of files of this machine: the Python that runs the tests, what penstock needs, busybox.

A docker-archive of one layer (60 MB), which `ctr images import` reads:
https://github.com/moby/docker-image-spec/blob/v1.3.1/spec.md#combined-image-json--filesystem-changeset-format
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

IMAGE = "penstock-test:1"
BUSYBOX = Path("/bin/busybox")
# What vLLM's image has of what penstock needs; rich and uvloop are absent there too.
PACKAGES = ("msgspec", "psutil", "pyyaml")
COMMANDS = ("sh", "env", "test", "sleep", "cat", "ls", "id", "stat", "touch", "df")
LEFT_OUT = re.compile(
    r"test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|__pycache__|_tkinter.*|site-packages|config-.*"
)


def write_image(path: Path) -> None:
    """The image as a file. Its command only sleeps, so that it serves for the sandboxes of pods too."""
    layer = path.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        _fill(tar)
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["sleep", "2147483647"], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [f"docker.io/library/{IMAGE}"], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        tar.add(layer, "layer.tar")
        _add(tar, "config.json", json.dumps(config).encode())
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    layer.unlink()


def _fill(tar: tarfile.TarFile) -> None:
    for name in ("tmp", "etc", "proc", "sys", "dev"):
        _add(tar, name, mode=0o1777 if name == "tmp" else 0o755, kind=tarfile.DIRTYPE)
    _add(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
    tar.add(BUSYBOX, "bin/busybox", filter=_owned)
    for name in COMMANDS:
        _add_link(tar, f"bin/{name}", "busybox")
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    program, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    tar.add(program, f"usr/local/bin/{version}", filter=_owned)
    _add_link(tar, "usr/local/bin/python3", version)
    tar.add(library, f"usr/local/lib/{version}", filter=_owned)
    packages = [path for name in PACKAGES for path in files_of(name)]
    for path, name in packages:
        tar.add(path, f"usr/local/lib/{version}/site-packages/{name}", filter=_owned)
    libraries = [path for path, _ in packages if path.suffix == ".so"]
    objects = [BUSYBOX, program, *(library / "lib-dynload").glob("*.so"), *libraries]
    for shared in sorted(_needed(objects)):
        # Libraries of this Python itself are found next to it, all others in the loader's default folders.
        own = Path(shared).is_relative_to(base)
        tar.add(Path(shared).resolve(), f"usr/lib/{Path(shared).name}" if own else shared[1:], filter=_owned)


def files_of(package: str) -> list[tuple[Path, str]]:
    """Files of an installed package, with their names in site-packages."""
    files = importlib.metadata.files(package) or []
    return [(Path(str(file.locate())), str(file)) for file in files if not str(file).startswith("..")]


def _needed(objects: Iterable[Path]) -> set[str]:
    """Shared libraries, the loader among them, by the paths at which the loader finds them."""
    done = subprocess.run(["ldd", *map(str, objects)], capture_output=True, text=True)
    return set(re.findall(r"(/\S+) \(0x", done.stdout))


def _owned(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if LEFT_OUT.fullmatch(Path(info.name).name):
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def _add(
    tar: tarfile.TarFile, name: str, content: bytes = b"", mode: int = 0o644, kind: bytes = tarfile.REGTYPE
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, mode, len(content)
    tar.addfile(info, io.BytesIO(content))


def _add_link(tar: tarfile.TarFile, name: str, to: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = tarfile.SYMTYPE, to, 0o777
    tar.addfile(info)
