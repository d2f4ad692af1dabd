"""The batch scripts of a deployment's jobs, and which words may stand in them. Pure.

One step of a replica's job runs `penstock.node` on every node. TERM to `srun` would kill its tasks at once, so the
shell never signals it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import PurePosixPath

import msgspec

from penstock.errors import Problem
from penstock.planner import Plan
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment
from penstock.targets.slurm import container
from penstock.targets.slurm.queue import mib_of, seconds_of
from penstock.text import MIB

FILE = "job.sh"
GATEWAY_FILE = "gateway.sh"
CONTROLLER_FILE = "controller.sh"
CODE = "code"  # the folder with penstock's code that a container gets
_PLAIN = re.compile(r"[\w@%+=:,./\[\]|&*-]+\Z")
# Paths stand in #SBATCH lines, where % is a pattern of Slurm's, and between quotes of the shell.
_PATH = re.compile(r"[\w@+=:,./ ~-]+\Z")
_MODULE = re.compile(r"[\w@%+=:,./${}~-]+( +[\w@%+=:,./${}~-]+)*\Z")
# Entries of `slurm.modules` that are more than a module to load: https://lmod.readthedocs.io/en/latest/010_user.html,
# https://modules.readthedocs.io/en/latest/module.html
_COMMAND_OF_MODULE = re.compile(
    r"-|(add|del|load|purge|refresh|reload|reset|restore|rm|sw|swap|switch|try-add|try-load|unload|unuse|update|use)(?=\s|\Z)"
)
_OURS = (
    *("job-name", "J", "output", "o", "error", "e", "open-mode", "chdir", "D", "nodes", "N", "ntasks", "n"),
    *("ntasks-per-node", "array", "a", "signal", "wrap", "parsable", "wait", "W", "gpus-per-node", "kill-on-bad-exit"),
)
# Slurm's own words for the same thing as a field of the file, where they differ.
_FIELDS = {"p": "partition", "A": "account", "q": "qos", "C": "constraint", "t": "time", "w": "nodelist"}
_FIELDS |= {"mem": "memory", "cpus-per-task": "cpus_per_node", "c": "cpus_per_node"}
_SAME = ("partition", "account", "qos", "constraint", "time", "nodelist", "gres", "exclusive")
# sbatch's -M, by all its names: squeue and scancel here would never see such a job.
_ELSEWHERE = ("clusters", "cluster", "M")
# The only variables of sbatch that it may see, where the file leaves their option open. Variables override a script's
# lines: one in .bashrc could change the plan (SBATCH_PARTITION) or the cluster (SBATCH_CLUSTERS), or block.
# https://slurm.schedmd.com/sbatch.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
_FILLS_IN = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_WCKEY": "wckey",
}
_CPUS_PER_RANK = 4
_GATEWAY_CPUS = 2
_GATEWAY_MIB = 2048
_SPARE_MIB = 1024
# Host memory of a vLLM rank (libraries, CUDA's context, pinned buffers: 5 to 10 GiB) and of what a node has once. What
# is loaded from disk goes through the page cache, which a limit only shrinks.
_RANK_MIB, _NODE_MIB = 16 * 1024, 8 * 1024
_GOODBYE_S = 20


class Needs(msgspec.Struct, frozen=True):
    """What a job requests on each node. None: the site's default."""

    gpus: int
    cpus: int | None
    memory_mib: int | None
    gpu_type: str | None = None


def needs_of(plan: Plan, block: Slurm, gpu_type: str | None = None, most_mib: int | None = None) -> Needs:
    """From the plan, where the file does not say. GPUs are 0 where the file has a `gres`.

    `gpu_type`: the site's type of the planned card. `most_mib`: the memory of its nodes.
    """
    gpus = plan.ranks_each if plan.device == "cuda" and block.gres is None else 0
    cpus: int | None = block.cpus_per_node or plan.n_threads
    if plan.device == "cuda":
        cpus = block.cpus_per_node or _CPUS_PER_RANK * plan.ranks_each
        memory_mib = min(_NODE_MIB + _RANK_MIB * plan.ranks_each, most_mib or sys.maxsize)
    else:
        memory_mib = -(-plan.need.total_bytes * 5 // 4 // plan.n_nodes // MIB) + _SPARE_MIB
    if block.exclusive:
        cpus, memory_mib = block.cpus_per_node, 0
    return Needs(gpus, cpus, memory_mib if block.memory is None else None, gpu_type if gpus else None)


def directives(deployment: Deployment, needs: Needs, run_path: str) -> list[str]:
    """The options of sbatch, as they follow `#SBATCH --`, without the job's name: that contains the replica."""
    block = deployment.slurm or Slurm()
    memory = block.memory if needs.memory_mib is None else needs.memory_mib and f"{needs.memory_mib}M"
    gpus = f"{needs.gpu_type}:{needs.gpus}" if needs.gpu_type and needs.gpus else needs.gpus or None
    words: dict[str, object] = {
        "nodes": deployment.hardware.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": needs.cpus,
        "mem": memory,
        "gpus-per-node": gpus,
        "gres": block.gres,
        "partition": block.partition,
        "qos": block.qos,
        "constraint": block.constraint,
        "nodelist": block.nodelist,
    }
    lines = [*_options(block, run_path, run_path, words), *(["exclusive"] if block.exclusive else [])]
    lines += [f"signal=INT@{_signal_s(deployment, deployment.engine.drain_s)}", "requeue"]
    return lines + [line.removeprefix("--") for line in block.directives]


def _options(block: Slurm, run_path: str, folder: str, own: Mapping[str, object]) -> list[str]:
    """The options that all jobs have, and those of one. `folder`: where it runs."""
    words = {"chdir": folder, "output": f"{run_path}/logs/%x_%j.log", "open-mode": "append", **own}
    words |= {"time": block.time, "account": block.account}
    texts = [(name, str(value)) for name, value in words.items() if value is not None]
    return [f"{name}={text}" if _is_word(text) else f'{name}="{text}"' for name, text in texts]


def variables(deployment: Deployment) -> frozenset[str]:
    """The variables of sbatch that it may read from the user's environment: those for options that the file omits."""
    options = {_option(line) for line in directives(deployment, Needs(0, None, None), "")}
    return frozenset(variable for variable, option in _FILLS_IN.items() if option not in options)


def _option(line: str) -> str:
    return re.split("[= ]", line.lstrip("-"), maxsplit=1)[0]


def excluded(deployment: Deployment) -> list[str]:
    """The nodes that the file's own directives exclude: an option of the command would replace them."""
    lines = (line.lstrip("-") for line in (deployment.slurm or Slurm()).directives)
    return [re.split("[= ]", line, maxsplit=1)[1] for line in lines if re.match(r"(exclude|x)[= ]", line)]


def _signal_s(deployment: Deployment, drain_s: float) -> int:
    """Seconds before the time limit at which a job drains: its time to drain, at most a quarter of the limit."""
    wanted = drain_s + _GOODBYE_S
    limit_s = seconds_of((deployment.slurm or Slurm()).time or "")
    return int(min(wanted, limit_s / 4 if limit_s else wanted, 65535))


def render(deployment: Deployment, plan: Plan, run_path: str, python: str, needs: Needs, home: str) -> str:
    """The script. Its arguments are the replica and the id of the launch. `home`: the user's, on all nodes."""
    block = deployment.slurm or Slurm()
    each = [_GIVE_UP, *block.prologue] if block.prologue else []
    folders = [str(PurePosixPath(run_path).parent.parent), _whole(plan.model.path)]
    inside = _inside(deployment, python, run_path, home, folders, plan.device == "cuda")
    label = ["--label"] if plan.n_nodes > 1 else []
    words = {
        "name": deployment.name,
        "prologue": _lines(_environment(block)),
        "on_node": shlex.quote(_lines(each)),
        "step": "".join(f"{shlex.quote(word)} " for word in (*inside.step, *label)),
        "inside": shlex.join(inside.before),
    }
    return _script(block, FILE, directives(deployment, needs, run_path), run_path, python, words)


def _script(block: Slurm, file: str, lines: Sequence[str], run_path: str, python: str, words: Mapping[str, str]) -> str:
    """The batch script of that name, with these options of sbatch and words."""
    shell = "#!/bin/bash -l" if block.modules or block.conda else "#!/bin/bash"
    own = {"run": shlex.quote(run_path), "python": shlex.quote(_python(block, python)), "prologue": _prologue(block)}
    return _lines([shell, *(f"#SBATCH --{line}" for line in lines)]) + _filled(file, {**own, **words})


def _filled(file: str, words: Mapping[str, str]) -> str:
    text = resources.files("penstock.targets.slurm").joinpath(file).read_text("utf-8")
    return re.sub(r"@(\w+)@", lambda match: words[match[1]], text)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _inside(
    deployment: Deployment, python: str, folder: str, home: str, folders: Sequence[str], is_cuda: bool
) -> container.Words:
    """What runs a module of penstock where the engine is. `folder`: of the run or the survey, with the code for a
    container in it; `folders`: those that it sees."""
    block = deployment.slurm or Slurm()
    if block.container is None:
        return container.Words([], [_python(block, python)])
    seen = [
        path.replace("~", home) for path in (*folders, deployment.cache.folder or "") if path.startswith(("/", "~/"))
    ]
    return container.words(block, f"{folder}/{CODE}", home, seen, is_cuda)


def _whole(path: str) -> str:
    """The folder of a model; of one in the hub's cache the one with its blobs, where the links of its files lead."""
    parts = PurePosixPath(path).parts
    return str(PurePosixPath(*parts[: parts.index("snapshots")])) if "snapshots" in parts else path


def gateway_directives(deployment: Deployment, run_path: str) -> list[str]:
    """As `directives`, for the gateway's job; without `qos` and `directives` where it has another partition.

    It is not requeued: a new job starts two minutes earlier.
    """
    block = deployment.slurm or Slurm()
    has_own = block.gateway_partition is not None
    words = {"nodes": 1, "ntasks": 1, "cpus-per-task": _GATEWAY_CPUS, "mem": f"{_GATEWAY_MIB}M"}
    words |= {"partition": block.gateway_partition or block.partition, "qos": None if has_own else block.qos}
    lines = _options(block, run_path, f"{run_path}/gateway", words)
    lines += [f"signal=B:TERM@{_signal_s(deployment, deployment.gateway.drain_s)}", "no-requeue"]
    more = [line.removeprefix("--") for line in block.directives if not has_own]
    return lines + [line for line in more if not line.startswith(("gpu", "gres", "requeue"))]


def gateway(deployment: Deployment, run_path: str, python: str, seen_from: Sequence[str]) -> str:
    """The script of a gateway's job. Its arguments are the id of the launch and the name of the unit."""
    lines, words = gateway_directives(deployment, run_path), {"seen_from": shlex.join(seen_from)}
    return _script(deployment.slurm or Slurm(), GATEWAY_FILE, lines, run_path, python, words)


def controller(deployment: Deployment, run_path: str, python: str) -> str:
    """The script of a controller's job, with the gateway's arguments and options. It restarts the controller."""
    lines = [line for line in gateway_directives(deployment, run_path) if not line.startswith(("signal", "no-requeue"))]
    return _script(deployment.slurm or Slurm(), CONTROLLER_FILE, [*lines, "requeue"], run_path, python, {})


def _python(block: Slurm, python: str) -> str:
    """The interpreter on the nodes: the file's, that of the environment which the file names, or `python`.

    Next to a container it is the login node's: `python` of the file is the image's, and modules bring Apptainer.
    """
    has_own = block.conda or block.venv or (block.modules and not block.container)
    own = None if block.container else block.python
    return own or ("python3" if has_own else python)


def probe(deployment: Deployment, python: str) -> str:
    """A script that prints a machine's facts with the nodes' Python, where that is shared. Not for containers."""
    block = deployment.slurm or Slurm()
    head = 'give_up() { echo "$*" >&2; exit 1; }'
    return f"{head}\n{_prologue(block)}{shlex.quote(_python(block, python))} -m penstock.hardware.detect\n"


def survey(deployment: Deployment, python: str, argv: Sequence[str], folder: str, home: str) -> list[str]:
    """Arguments of srun that run `python ARGV` once on each node of a replica and write the answers to `folder`."""
    block = deployment.slurm or Slurm()
    inside = _inside(deployment, python, folder, home, [folder], deployment.hardware.gpu is not None)
    lines = directives(deployment, Needs(0, None, None), folder)
    # In a container that srun starts there is no module command.
    prologue = _lines(block.prologue) if inside.step else _prologue(block)
    script = _filled("survey.sh", {"folder": shlex.quote(folder), "prologue": prologue})
    flags = [f"--{line}" for line in lines if not line.startswith(_NOT_IN_SURVEY)] + ["--time=2"]
    return [*flags, *inside.step, "bash", "-c", script, "survey", *inside.before, *argv]


_NOT_IN_SURVEY = ("chdir=", "output=", "open-mode=", "signal=", "requeue", "no-requeue", "time=", "mem=", "exclusive")


_GIVE_UP = 'give_up() { echo "penstock: $*"; exit 1; }'


def _prologue(block: Slurm) -> str:
    return _lines([*_environment(block), *block.prologue])


def _environment(block: Slurm) -> Iterator[str]:
    for line in block.modules:
        # Not quoted: a path may have variables.
        words = f"module {line}" if _COMMAND_OF_MODULE.match(line) else f"module load {line}"
        yield f"{words} || give_up {shlex.quote(f'failed: {words}')}"
    if block.conda:
        failed = shlex.quote(f"could not activate the conda environment {block.conda}")
        yield f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(block.conda)} || give_up {failed}'
    if block.venv:
        failed = shlex.quote(f"could not activate the virtual environment {block.venv}")
        yield f"source {shlex.quote(block.venv + '/bin/activate')} || give_up {failed}"


def problems(deployment: Deployment, run_path: str) -> list[Problem]:
    """Values that may not stand in a script, or that penstock sets itself."""
    block = deployment.slurm or Slurm()
    more = (*_value_problems(deployment, block, run_path), *_directive_problems(block), *container.problems(block))
    return [*_text_problems(block), *more]


def _text_problems(block: Slurm) -> Iterator[Problem]:
    words = ("partition", "gateway_partition", "account", "qos", "constraint", "gres", "time", "memory", "nodelist")
    lines = ("conda", "venv", "container", "python", "modules", "prologue")
    for field in words + lines:
        value = getattr(block, field)
        hint = "no quotes, no spaces" if field in words else "one line of text"
        for text in (value,) if isinstance(value, str) else value or ():
            is_good = _is_word(text) if field in words else text and text.replace("\t", " ").isprintable()
            is_good = is_good and (field != "modules" or _MODULE.match(text))
            if not is_good:
                yield Problem(f"slurm.{field}", f"{text!r} cannot be written in a batch script", hint)


def _value_problems(deployment: Deployment, block: Slurm, run_path: str) -> Iterator[Problem]:
    if block.time is not None and seconds_of(block.time) is None and block.time.upper() != "UNLIMITED":
        yield Problem("slurm.time", f'"{block.time}" is no time', 'minutes, or "days-hours:minutes:seconds"')
    if block.memory is not None and _is_word(block.memory) and mib_of(block.memory) is None:
        yield Problem("slurm.memory", f'"{block.memory}" is no size', "a number with K, M, G or T: 64G; 0: all")
    if block.controller == "job" and deployment.gateway.on != "job":
        yield Problem("slurm.controller", '"job", but the gateway is not in a job', "set gateway.on: job")
    if block.controller == "job" and deployment.chat_page is not None and deployment.chat_page.login == "none":
        words = "everyone who reaches the controller's node could use the engines"
        yield Problem("ui.login", words, "remove it; people log in with a key: penstock keys create NAME")
    if not _PATH.match(run_path):
        words = f'the run folder "{run_path}" cannot be written in a batch script'
        yield Problem("", words, "set PENSTOCK_HOME to another")


def _directive_problems(block: Slurm) -> Iterator[Problem]:
    for line in block.directives:
        name = _option(line)
        if name in _ELSEWHERE:
            hint = "run penstock on a login node of that cluster, or name one as slurm.login"
            yield Problem("slurm.directives", f'"{name}" would send the jobs to another cluster', hint)
        elif not line.isprintable() or not re.match(r"(--)?[a-z][\w-]*([= ].*)?\Z", line):
            yield Problem("slurm.directives", f"{line!r} is no option of sbatch", "example: reservation=maintenance")
        elif any(word.startswith("-") for word in line.split()[1:]):
            yield Problem("slurm.directives", f"{line!r} is more than one option", "one each")
        elif name in _OURS:
            yield Problem("slurm.directives", f'"{name}" is set by penstock', "remove it")
        elif name in (*_FIELDS, *_SAME):
            yield Problem(
                "slurm.directives", f'"{name}" is set by another field', f"set slurm.{_FIELDS.get(name, name)}"
            )


def _is_word(value: str) -> bool:
    return _PLAIN.match(value) is not None
