"""The gateway's hot modules as machine code, where they were compiled: about half the CPU a request.

`python -m penstock.gateway.compiled` compiles them with mypyc (https://mypyc.readthedocs.io) into a folder of the cache
named by the sources' hash, so code of changed sources never runs. Only a gateway's process uses it (`activate`);
PENSTOCK_NATIVE=0 turns it off.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from penstock.errors import PenstockError, UserError

SWITCH = "PENSTOCK_NATIVE"
# What a request and a chunk pass through. Not those with msgspec structs whose options matter: mypyc drops them.
MODULES = (
    *("penstock.bench.load.kernel_timestamps", "penstock.bench.load.connections", "penstock.wire.http1"),
    *("penstock.gateway.context", "penstock.gateway.public", "penstock.gateway.requests.forwarded"),
    *("penstock.gateway.requests.sending", "penstock.gateway.requests.streaming"),
    *("penstock.gateway.request", "penstock.gateway.retries", "penstock.gateway.streams"),
    *("penstock.gateway.slow_requests", "penstock.gateway.trace_context", "penstock.gateway.metrics.counters"),
    *("penstock.gateway.accounting.keys", "penstock.gateway.accounting.entry", "penstock.gateway.accounting.quota"),
    *("penstock.gateway.accounting.record", "penstock.gateway.accounting.running_totals"),
    "penstock.gateway.accounting.token_usage",
    *("penstock.gateway.connections.client", "penstock.gateway.connections.engine"),
    *("penstock.gateway.routing.replicas", "penstock.gateway.routing.health", "penstock.gateway.routing.policies"),
)
_ROOT = Path(__file__).resolve().parent.parent.parent
_SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
_SETUP = """
from mypyc.build import mypycify
from setuptools import setup
setup(ext_modules=mypycify(["--ignore-missing-imports", *{files!r}]))
"""
_COMPILE_S = 600.0


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(_SUFFIX.encode())
    # All of the gateway counts: what a compiled module calls may have changed its shape.
    package = _ROOT / "penstock"
    patterns = ("gateway/**/*.py", "wire/*.py", "bench/load/*.py")
    for path in sorted(path for pattern in patterns for path in package.glob(pattern)):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return cache / "penstock" / "native" / digest.hexdigest()[:20]


def activate() -> bool:
    """Makes later imports of MODULES find their compiled form, if there is one. Call it before any of them."""
    if os.environ.get(SWITCH) == "0" or any(name in sys.modules for name in MODULES):
        return False
    files = _files(folder())
    if files:
        sys.meta_path.insert(0, _Finder(files))
    return bool(files)


def is_active() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def build() -> tuple[Path, float]:
    """(folder of the compiled modules, seconds it took; 0 when they were there). Raises UserError, PenstockError."""
    target = folder()
    if _files(target):
        return target, 0.0
    _check_tools()
    began = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as name:
        place = Path(name)
        shutil.copytree(_ROOT / "penstock", place / "penstock", ignore=shutil.ignore_patterns("__pycache__", "data"))
        # The library that it offers to type checkers leads mypyc to torch: ten minutes instead of ten seconds.
        (place / "penstock" / "__init__.py").write_text('__version__ = ""\n', "utf-8")
        files = [f"{module.replace('.', '/')}.py" for module in MODULES]
        (place / "setup.py").write_text(_SETUP.format(files=files), "utf-8")
        argv = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(argv, cwd=place, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        if done.returncode:
            raise PenstockError("cannot compile the gateway", detail=(done.stderr or done.stdout)[-2000:])
        made = place / "made"
        made.mkdir()
        for path in (*place.glob(f"*{_SUFFIX}"), *(place / "penstock").rglob(f"*{_SUFFIX}")):
            path.replace(made / ".".join(path.relative_to(place).parts))
        try:
            made.rename(target)
        except OSError as exc:
            if not _files(target):  # else another one was faster
                raise PenstockError(f"cannot keep the compiled gateway in {target}: {exc.strerror}") from exc
    return target, time.monotonic() - began


class _Finder:
    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self._files[name]) if name in self._files else None


def _files(place: Path) -> dict[str, Path]:
    files = {path.name.removesuffix(_SUFFIX): path for path in place.glob(f"*{_SUFFIX}")}
    return files if all(name in files for name in MODULES) else {}


def _check_tools() -> None:
    missing = [] if shutil.which(os.environ.get("CC", "cc")) else ["a C compiler (apt-get install gcc)"]
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python.h (apt-get install python3-dev)")
    for package in ("mypy", "setuptools"):
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(f"{package} (pip install {package})")
    if missing:
        raise UserError("cannot compile the gateway: " + " and ".join(missing) + " is not there")


def main() -> int:
    try:
        place, took_s = build()
    except PenstockError as error:
        print(f"{error.message}; it runs as Python, at about twice the CPU", file=sys.stderr)
        if error.detail:
            print(error.detail, file=sys.stderr)
        return error.exit_code
    print(f"compiled the gateway into {place} in {took_s:.0f} s" if took_s else f"the gateway is compiled: {place}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
