"""penstock's own code as a ConfigMap: an image with the engine alone is enough for a replica.

Not for zipimport: data files are read by path, so the init container (`prepare.py`) unpacks it. Compressed as a whole:
each file alone would come to 820 kB, all together to 500 kB, of the 1 MiB that a ConfigMap may have.
"""

from __future__ import annotations

import base64
import bz2
import functools
import hashlib
import io
import zipfile
from pathlib import Path

import msgspec

import penstock
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes.objects import Object, build

FILE, SCRIPT = "penstock.zip.bz2", "prepare.py"
# A ConfigMap has at most 1 MiB in all: https://kubernetes.io/docs/concepts/configuration/configmap/
MOST_BYTES = 900_000
_PACKAGE = Path(penstock.__file__).resolve().parent
_LEFT_OUT = {"__pycache__", "demo_model"}  # the demo model's weights are 6 MB
_SUFFIXES_LEFT_OUT = (".pyc", ".so")
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a zip can hold


class Archive(msgspec.Struct, frozen=True):
    """`hash`: of all names and bytes inside, so it does not depend on the compressor. `data`: a zip in bzip2.
    `prepare`: the script's text."""

    hash: str
    data: bytes
    prepare: str


@functools.cache
def archive() -> Archive:
    """The package as it is installed here, without compiled files and the demo model; the same bytes each time."""
    files = [(path.relative_to(_PACKAGE.parent).as_posix(), path.read_bytes()) for path in _paths()]
    digest = hashlib.sha256()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as whole:
        for name, data in files:
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.external_attr = 0o644 << 16
            whole.writestr(entry, data)
    script = Path(__file__).with_name(SCRIPT).read_text("utf-8")
    return Archive(digest.hexdigest()[:10], bz2.compress(stream.getvalue()), script)


def _paths() -> list[Path]:
    return [
        path
        for path in sorted(_PACKAGE.rglob("*"))
        if path.is_file() and not _LEFT_OUT & {*path.parts} and path.suffix not in _SUFFIXES_LEFT_OUT
    ]


def config_map_name(name: str, code: Archive) -> str:
    """At most 56 characters: another version of penstock has another ConfigMap, so none is ever changed."""
    return f"{name}-code-{code.hash}"


def config_map(deployment: Deployment, code: Archive) -> Object:
    data = base64.b64encode(code.data).decode()
    parts: Object = {"immutable": True, "data": {SCRIPT: code.prepare}, "binaryData": {FILE: data}}
    return build("v1/ConfigMap", config_map_name(deployment.name, code), deployment, **parts)
