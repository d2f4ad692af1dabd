"""The program of the init container: `python3 prepare.py ARCHIVE CODE RUN [FOLDER ...]`. Standard library only.

Unpacks penstock (ARCHIVE) into CODE, copies the files of each FOLDER (mounted ConfigMaps and Secrets) into the run
folder RUN, and imports what penstock needs, so that an image which lacks it is reported within seconds.
"""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

NEEDED, FASTER = ("msgspec", "psutil", "yaml"), ("uvloop", "rich")
OLDEST = (3, 11)
SECRETS = {"admin-token", "first-key", "first-key-hash"}
ARTIFACT = {"launch.json"}


def place_of(name: str) -> tuple[str, int]:
    """The folder of a file in the run folder, and its mode."""
    if name in SECRETS:
        return "secrets", 0o600
    return ("artifact" if name in ARTIFACT else "."), 0o644


def fill(run: Path, folders: list[Path]) -> None:
    """A run folder from mounted files. Names with two dots are the kubelet's own: it swaps a link to replace all."""
    for name, mode in ((".", 0o755), ("artifact", 0o755), ("logs", 0o755), ("gateway", 0o755), ("secrets", 0o700)):
        (run / name).mkdir(parents=True, exist_ok=True)
        (run / name).chmod(mode)
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    for path in files:
        if path.name.startswith("..") or not path.is_file():
            continue
        folder, mode = place_of(path.name)
        copy = run / folder / path.name
        copy.unlink(missing_ok=True)
        copy.touch(mode)
        copy.chmod(mode)
        copy.write_bytes(path.read_bytes())


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
    archive, code, run, *folders = (Path(word) for word in words)
    lacking = problems()
    if lacking:
        print(f"penstock: cannot use this image: {'; '.join(lacking)}", flush=True)
        return 1
    with zipfile.ZipFile(archive) as whole:
        whole.extractall(code)
        n_files = len(whole.namelist())
    fill(run, folders)
    print(f"penstock: {n_files} files in {code}, run folder {run}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
