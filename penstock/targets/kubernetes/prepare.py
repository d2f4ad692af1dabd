"""The program of the init container: `python3 prepare.py ARCHIVE CODE RUN [CONFIG [SECRETS]]`. Standard library only.

Unpacks penstock (ARCHIVE) into CODE, copies the files of the mounted folders CONFIG and SECRETS into the run folder
RUN, and imports what penstock needs, so that an image which lacks it is reported within seconds.
"""

from __future__ import annotations

import bz2
import importlib
import io
import sys
import zipfile
from pathlib import Path

NEEDED, FASTER = ("msgspec", "psutil", "yaml"), ("uvloop", "rich")
OLDEST = (3, 11)
ARTIFACT = {"launch.json"}


def fill(run: Path, config: Path, secrets: Path | None = None) -> None:
    """A run folder from mounted files; of secrets nobody else may read the copies."""
    for name, mode in ((".", 0o755), ("artifact", 0o755), ("logs", 0o755), ("gateway", 0o755), ("secrets", 0o700)):
        (run / name).mkdir(parents=True, exist_ok=True)
        (run / name).chmod(mode)
    for path in files_in(config):
        copy(path, run / ("artifact" if path.name in ARTIFACT else ".") / path.name, 0o644)
    for path in files_in(secrets) if secrets is not None else ():
        copy(path, run / "secrets" / path.name, 0o600)


def files_in(folder: Path) -> list[Path]:
    """Names with two dots in front are the kubelet's own: it replaces all files at once by swapping a link."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("..")]


def copy(path: Path, to: Path, mode: int) -> None:
    to.unlink(missing_ok=True)
    to.touch(mode)
    to.chmod(mode)
    to.write_bytes(path.read_bytes())


def problems() -> list[str]:
    """What this image lacks, each with its cure."""
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < OLDEST:
        return [f"its Python is {version}, and penstock needs {'.'.join(map(str, OLDEST))}"]
    absent = [name for name in NEEDED if not is_there(name)]
    slower = [name for name in FASTER if not is_there(name)]
    if slower:
        print(f"penstock: this image has no {', '.join(slower)}: works, with less comfort or speed", flush=True)
    return [f"it has no {name} (pip install {'pyyaml' if name == 'yaml' else name})" for name in absent]


def is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def main(words: list[str]) -> int:
    archive, code, run, *mounted = (Path(word) for word in words)
    lacking = problems()
    if lacking:
        print(f"penstock: cannot use this image: {'; '.join(lacking)}", flush=True)
        return 1
    with zipfile.ZipFile(io.BytesIO(bz2.decompress(archive.read_bytes()))) as whole:
        whole.extractall(code)
        n_files = len(whole.namelist())
    if mounted:
        fill(run, *mounted)
    print(f"penstock: {n_files} files in {code}, run folder {run}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
