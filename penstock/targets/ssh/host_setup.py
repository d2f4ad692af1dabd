"""Runs on a host before penstock is there, with whatever Python it has: says what the host is, and installs.

    (echo BYTES; cat host_setup.py ARCHIVE) | ssh HOST python3 -c BOOT look|install JSON

Standard library only, in one file: its text is what travels. It prints one JSON.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

# Reads this file, of which the input's first line tells the length. Python 2 runs it too, and says how old it is.
BOOT = (
    "import sys; i = getattr(sys.stdin, 'buffer', sys.stdin); t = i.read(int(i.readline())); "
    "eval(compile(t, 'host_setup', 'exec')) if sys.version_info >= (3, 11) "
    "else sys.stdout.write('{\"too_old\": \"' + sys.version.split()[0] + '\"}')"
)
_KEPT_VERSIONS = 4
_OLD_S = 30 * 86400.0
_BROKEN_S = 86400.0


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """What this host and its Python are. `asked`: folder, packages, paths (that should exist here)."""
    folder = Path(asked["folder"]).expanduser().absolute()
    has = {}
    for name in asked["packages"]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            has[name] = importlib.metadata.version(name)
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = ""
    versions = folder / "versions"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "python": {
            "version": sys.version.split()[0],
            "implementation": sys.implementation.name,
            "platform": sysconfig.get_platform(),
            "libc": libc,
            "has": has,
        },
        "name": os.uname().nodename,
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(existing).free,
        "versions": sorted(path.name for path in versions.iterdir()) if versions.is_dir() else [],
        "absent": [path for path in asked["paths"] if not Path(path).expanduser().exists()],
    }


def install(asked: dict[str, Any]) -> dict[str, Any]:
    """Make a private environment of the archive that follows on the input. Two installs at once give the same one."""
    versions = Path(asked["folder"]) / "versions"
    versions.mkdir(parents=True, exist_ok=True, mode=0o700)
    final = versions / asked["key"]
    # Hosts may share this folder, and have the same process ids.
    new = Path(tempfile.mkdtemp(prefix=f".new-{asked['key']}-", dir=versions))
    try:
        # Without pip: Debian's Python has no ensurepip, and nothing is left to install.
        venv.EnvBuilder(system_site_packages=True, with_pip=False, symlinks=True).create(str(new / "venv"))
        python = new / "venv" / "bin" / "python"
        site = next((new / "venv" / "lib").glob("python*/site-packages"))
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
            archive.extractall(site)  # our own archive, over our own connection
        if sys.prefix != sys.base_prefix:
            # An environment made by the Python of another sees the packages of neither: name their folders.
            paths = sorted({sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")})
            lines = [f"import site; site.addsitedir({path!r})" for path in paths]
            (site / "zz-penstock-base.pth").write_text("\n".join(lines) + "\n")
        tried = subprocess.run([str(python), "-c", "import penstock.targets.ssh.agent"], capture_output=True, text=True)
        if tried.returncode:
            return {"problem": (tried.stderr.strip().splitlines() or ["it printed nothing"])[-1]}
        with contextlib.suppress(OSError):  # another was first
            new.rename(final)
    finally:
        shutil.rmtree(str(new), ignore_errors=True)
    if not final.is_dir():
        return {"problem": f"could not make {final}"}
    forget_old(versions, asked["key"])
    return {}


def forget_old(versions: Path, key: str) -> None:
    """Remove versions of a month ago that nobody runs here, but not the last few; and what broken installs left.

    A month, since hosts may share this folder and we do not see what runs on the others.
    """
    now = time.time()
    in_use = " ".join(_command_lines())
    whole = [path for path in versions.iterdir() if not path.name.startswith(".") and path.is_dir()]
    whole.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in whole[_KEPT_VERSIONS:]:
        if path.name != key and str(path) not in in_use and now - path.stat().st_mtime > _OLD_S:
            shutil.rmtree(str(path), ignore_errors=True)
    for path in versions.glob(".new-*"):
        if now - path.stat().st_mtime > _BROKEN_S:
            shutil.rmtree(str(path), ignore_errors=True)


def _command_lines() -> list[str]:
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return commands


def main(argv: list[str]) -> int:
    """Do what the first word says, with the JSON of the second; print one JSON."""
    try:
        answer = {"look": look, "install": install}[argv[0]](json.loads(argv[1]))
    except (OSError, tarfile.TarError) as exc:
        answer = {"problem": f"{getattr(exc, 'strerror', None) or exc}: {getattr(exc, 'filename', None) or ''}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
