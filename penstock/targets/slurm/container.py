"""The container that the nodes of a job run in, by Apptainer, Pyxis or Podman-HPC. Pure.

The image has the engine and a Python, penstock's code lies in the run folder. Folders have the same paths inside.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from penstock.errors import Problem
from penstock.spec.blocks import Slurm

_FILE = re.compile(r"\.(sif|sqsh|squashfs|img)\Z")
# A registry before the first slash, as all runtimes but enroot write it: https://github.com/NVIDIA/enroot, "import".
_REGISTRY = re.compile(r"(?:docker://)?([^/#]+[.:][^/#]*)/([^#]+)\Z")
# Podman passes no variables by itself. https://docs.podman.io/en/latest/markdown/podman-run.1.html#env-e-env
_PASSED = ("CUDA_VISIBLE_DEVICES", *(f"{prefix}_*" for prefix in ("GLOO", "HF", "NCCL", "PENSTOCK", "SLURM", "VLLM")))
_EXPORTED = re.compile(r"\bexport (\w+)=")
_OURS = {
    "pyxis": re.compile(r"--(container-image|(no-)?container-entrypoint)\b"),
    "podman-hpc": re.compile(r"--(net|network|ipc|pid|entrypoint)\b"),
}


class Words(NamedTuple):
    """`step`: options of srun; `before`: the words in front of `-m MODULE`, the interpreter last."""

    step: list[str]
    before: list[str]


def words(block: Slurm, code: str, home: str, folders: Sequence[str], is_cuda: bool) -> Words:
    """`code`: the folder of penstock's package; `folders`: what must be seen inside besides the home."""
    image, flags = block.container or "", [word for flag in block.container_flags for word in shlex.split(flag)]
    # Variables and packages of the user's own Python come in with the environment and the home.
    inside = ["-u", "PYTHONHOME", "PYTHONNOUSERSITE=1", f"PYTHONPATH={code}", f"HOME={home}", block.python or "python3"]
    if block.container_runtime == "apptainer":
        gpus = ["--nv"] if is_cuda else []
        binds = ["--bind", ",".join(folders)]
        return Words([], ["apptainer", "exec", *gpus, *binds, *flags, image, "env", *inside])
    # Apptainer mounts these two by itself.
    mounts = [f"{path}:{path}" for path in _outermost([home, "/tmp", *folders])]
    if block.container_runtime == "pyxis":
        step = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        return Words([*step, "--no-container-entrypoint", *flags], ["env", *inside])
    passed = [*_PASSED, *(name for line in block.prologue for name in _EXPORTED.findall(line))]
    options = ["--rm", *(["--gpu"] if is_cuda else []), "--net=host", "--ipc=host", "--pid=host", "--entrypoint=env"]
    options += [f"--volume={mount}" for mount in mounts] + [f"--env={name}" for name in passed]
    return Words([], ["podman-hpc", "run", *options, *flags, image, *inside])


def _outermost(folders: Sequence[str]) -> list[str]:
    """These folders without those below another of them."""
    paths = [PurePosixPath(folder) for folder in dict.fromkeys(folders)]
    return [str(path) for path in paths if not any(other in path.parents for other in paths)]


def problems(block: Slurm) -> Iterator[Problem]:
    """An image in the words of another runtime, and flags that are none or that penstock sets."""
    image, runtime, path = block.container or "", block.container_runtime, "slurm.container"
    is_file = image.startswith(("/", "./")) or _FILE.search(image) is not None
    if runtime == "apptainer" and image and "://" not in image and not image.startswith("/"):
        hint = "the whole path of the file" if is_file else f"docker://{image}, or another container_runtime"
        yield Problem(path, f'"{image}" is no whole path and no URI for Apptainer', hint)
    elif runtime == "podman-hpc" and (is_file or re.match(r"(?!docker://)\w+://", image)):
        yield Problem(path, f'"{image}" is no name of an image for Podman', "docker.io/vllm/vllm-openai:v0.33.0")
    elif runtime == "pyxis" and image.endswith((".sif", ".img")):
        yield Problem(path, f'"{image}" is a file of Apptainer', "set container_runtime: apptainer")
    elif runtime == "pyxis" and not is_file and (match := _REGISTRY.match(image)):
        yield Problem(path, f'enroot takes "{match[1]}" for a part of the name', f"{match[1]}#{match[2]}")
    if not image and (block.container_flags or runtime != "apptainer"):
        yield Problem(path, "is missing, but its runtime or flags are given", "example: /images/vllm.sif")
    for index, flag in enumerate(block.container_flags):
        where = f"slurm.container_flags[{index}]"
        try:
            is_flag = flag.isprintable() and flag.startswith("-") and shlex.split(flag) != []
        except ValueError:
            is_flag = False
        if not is_flag:
            yield Problem(where, f"{flag!r} is no flag", "one each, as on the command line: --bind /data")
        elif runtime in _OURS and _OURS[runtime].match(flag):
            yield Problem(where, f'penstock sets "{re.split("[= ]", flag)[0]}"', "remove it")
