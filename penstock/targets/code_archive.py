"""penstock's own code as one zip, for places that have the engine but no penstock.

Not for zipimport: data files are read by path, so whoever gets it unpacks it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tempfile
import zipfile
from pathlib import Path

import msgspec

import penstock

_PACKAGE = Path(penstock.__file__).resolve().parent
_MODEL = "demo_model"
# No machine of a deployment simulates the autoscaler, or pretends to be a place.
_LEFT_OUT = {"__pycache__", _MODEL, "scaling", "fake_workbench", "fake_vessl"}
_SUFFIXES_LEFT_OUT = (".pyc", ".so")
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a zip can hold


class CodeArchive(msgspec.Struct, frozen=True):
    """`hash`: of all names and bytes inside, so it does not depend on the zip. `data`: a zip, not compressed."""

    hash: str
    data: bytes


@functools.cache
def code_archive(with_model: bool = False) -> CodeArchive:
    """The package as it is installed here, without compiled files; the same bytes each time. `with_model`: with the
    bundled model's weights, 6 MB."""
    left_out = _LEFT_OUT - ({_MODEL} if with_model else set())
    paths = [path for path in sorted(_PACKAGE.rglob("*")) if path.is_file() and not left_out & {*path.parts}]
    files = [
        (path.relative_to(_PACKAGE.parent).as_posix(), path.read_bytes())
        for path in paths
        if path.suffix not in _SUFFIXES_LEFT_OUT
    ]
    digest = hashlib.sha256()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as whole:
        for name, data in files:
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.external_attr = 0o644 << 16
            whole.writestr(entry, data)
    return CodeArchive(digest.hexdigest()[:10], stream.getvalue())


def unpack(path: Path) -> None:
    """Make a folder with the code, whole or not at all, unless it exists. It is for PYTHONPATH."""
    if not path.exists():
        fresh = Path(tempfile.mkdtemp(dir=path.parent))
        zipfile.ZipFile(io.BytesIO(code_archive().data)).extractall(fresh)
        fresh.rename(path)
