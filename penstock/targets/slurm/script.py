"""The batch scripts of a deployment's jobs, and which words may stand in them. Pure.

One step of a replica's job runs `penstock.node` on every node. TERM to `srun` would kill its tasks at once, so the
shell never signals it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence

import msgspec

from penstock.errors import Problem
from penstock.planner import Plan
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment, store_file
from penstock.targets.slurm.queue import mib_of, seconds_of
from penstock.text import MIB

FILE = "job.sh"
GATEWAY_FILE = "gateway.sh"
CONTROLLER_FILE = "controller.sh"
_PLAIN = re.compile(r"[\w@%+=:,./\[\]|&*-]+\Z")
# Paths stand in #SBATCH lines, where % is a pattern of Slurm's, and between quotes of the shell.
_PATH = re.compile(r"[\w@+=:,./ ~-]+\Z")
_OURS = (
    *("job-name", "J", "output", "o", "error", "e", "open-mode", "chdir", "D", "nodes", "N", "ntasks", "n"),
    *("ntasks-per-node", "array", "a", "signal", "wrap", "parsable", "wait", "W", "gpus-per-node", "kill-on-bad-exit"),
)
# Slurm's own words for the same thing as a field of the file.
_FIELDS = {
    **dict.fromkeys(("partition", "p"), "partition"),
    **dict.fromkeys(("account", "A"), "account"),
    **dict.fromkeys(("qos", "q"), "qos"),
    **dict.fromkeys(("constraint", "C"), "constraint"),
    **dict.fromkeys(("time", "t"), "time"),
    **dict.fromkeys(("cpus-per-task", "c"), "cpus_per_node"),
    **dict.fromkeys(("nodelist", "w"), "nodelist"),
    "gres": "gres",
    "mem": "memory",
    "exclusive": "exclusive",
}
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
_STRAGGLERS_S = 10


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
    words: list[tuple[str, object]] = [
        ("chdir", run_path),
        ("output", f"{run_path}/logs/%x_%j.log"),
        ("open-mode", "append"),
        ("nodes", deployment.hardware.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", needs.cpus),
        ("mem", block.memory if needs.memory_mib is None else needs.memory_mib and f"{needs.memory_mib}M"),
        ("gpus-per-node", f"{needs.gpu_type}:{needs.gpus}" if needs.gpu_type and needs.gpus else needs.gpus or None),
        ("gres", block.gres),
        ("time", block.time),
        ("partition", block.partition),
        ("account", block.account),
        ("qos", block.qos),
        ("constraint", block.constraint),
        ("nodelist", block.nodelist),
    ]
    lines = [*_options(words), *(["exclusive"] if block.exclusive else [])]
    lines += [f"signal=INT@{_signal_s(deployment, deployment.engine.drain_s)}", "requeue"]
    return lines + [line.removeprefix("--") for line in block.directives]


def _options(words: Sequence[tuple[str, object]]) -> list[str]:
    texts = [(name, str(value)) for name, value in words if value is not None]
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


def render(deployment: Deployment, plan: Plan, run_path: str, python: str, needs: Needs) -> str:
    """The script. Its arguments are the replica and the id of the launch."""
    block = deployment.slurm or Slurm()
    lines = [_shell(block), *(f"#SBATCH --{line}" for line in directives(deployment, needs, run_path))]
    model = deployment.model if deployment.model.startswith("/") else None
    shared = ",".join(path for path in (run_path, deployment.cache.weights, model) if path)
    each = [_GIVE_UP, *block.prologue] if block.prologue else []
    return "\n".join(lines) + "\n" + _BODY.format(
        name=deployment.name,
        run=shlex.quote(run_path),
        prologue="".join(f"{line}\n" for line in _environment(block)),
        on_node=shlex.quote("".join(f"{line}\n" for line in each)),
        label=" --label" if plan.n_nodes > 1 else "",
        stragglers_s=_STRAGGLERS_S,
        python=shlex.join(_python(block, python, shared, ["--nv"] if plan.device == "cuda" else [])),
    )  # fmt: skip


_BODY = r"""
# One replica of {name}: $1 is its number, $2 the id of the launch.
replica=$1 launch=$2 run={run}

# What became of this job, for when Slurm has forgotten it.
note() {{
  printf '%s\n' "$*" >"$run/jobs/.$SLURM_JOB_ID" && mv "$run/jobs/.$SLURM_JOB_ID" "$run/jobs/$SLURM_JOB_ID"
}}
give_up() {{
  echo "penstock: $*"
  note "failed $*"
  exit 1
}}
note "started $SLURM_JOB_NODELIST"
{prologue}
# Slurm sends TERM to everything and, KillWait later, KILL. The nodes end by themselves in that time; this shell waits.
trap : TERM
kill_wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9][0-9]*\).*/\1/p')
hosts=$(scontrol show hostnames | paste -sd, -)
step=(srun --overlap --mem=0 --ntasks-per-node=1 --cpu-bind=none)
on_node={on_node}  # the lines of slurm.prologue: each node runs them

"${{step[@]}}"{label} --wait={stragglers_s} bash -c "$on_node"'exec "$@" --rank "$SLURM_PROCID"' node \
  {python} -m penstock.node.detached "$run" "$launch" "$replica" --hosts "$hosts" --kill-after "${{kill_wait:-30}}"
code=$?

# Whatever a killed node left behind: without cgroups it would outlive the job.
note "sweeping after $code"
"${{step[@]}}" bash -c "$on_node"'exec "$@"' leftovers \
  {python} -m penstock.node.leftovers "$run" "$launch" "$replica"
note "ended $code"
exit $code
"""


def gateway_directives(deployment: Deployment, run_path: str) -> list[str]:
    """As `directives`, for the gateway's job; without `qos` and `directives` where it has another partition.

    It is not requeued: a new job starts two minutes earlier.
    """
    block = deployment.slurm or Slurm()
    has_own = block.gateway_partition is not None
    words: list[tuple[str, object]] = [
        ("chdir", f"{run_path}/gateway"),
        ("output", f"{run_path}/logs/%x_%j.log"),
        ("open-mode", "append"),
        ("nodes", 1),
        ("ntasks", 1),
        ("cpus-per-task", _GATEWAY_CPUS),
        ("mem", f"{_GATEWAY_MIB}M"),
        ("time", block.time),
        ("partition", block.gateway_partition or block.partition),
        ("account", block.account),
        ("qos", None if has_own else block.qos),
    ]
    lines = [*_options(words), f"signal=B:TERM@{_signal_s(deployment, deployment.gateway.drain_s)}", "no-requeue"]
    more = [line.removeprefix("--") for line in block.directives if not has_own]
    return lines + [line for line in more if not line.startswith(("gpu", "gres", "requeue"))]


def gateway(deployment: Deployment, run_path: str, python: str, seen_from: Sequence[str]) -> str:
    """The script of a gateway's job. Its arguments are the id of the launch and the name of the unit."""
    words = _service_python(deployment, run_path, python)
    address = f"{run_path}/gateway/address.json"
    return _service(
        deployment, run_path, "gateway", gateway_directives(deployment, run_path),
        f"hosts=$({words} -m penstock.hardware.network {shlex.join(seen_from)})",
        # In place of the shell, so that a signal to the batch step reaches the gateway.
        f"exec {words} -m penstock.gateway {shlex.quote(f'{run_path}/gateway.json')}"
        f' --address {shlex.quote(address)} --unit "$2" --hosts $hosts',
    )  # fmt: skip


def controller(deployment: Deployment, run_path: str, python: str) -> str:
    """The script of a controller's job, with the gateway's arguments and options. It restarts the controller."""
    words = _service_python(deployment, run_path, python)
    lines = [line for line in gateway_directives(deployment, run_path) if not line.startswith(("signal", "no-requeue"))]
    return _service(
        deployment, run_path, "controller", [*lines, "requeue"],
        f'until {words} -m penstock.deployment.controller {shlex.quote(run_path)} --unit "$2"; do sleep 5; done',
    )  # fmt: skip


def _service_python(deployment: Deployment, run_path: str, python: str) -> str:
    store = store_file(deployment.gateway.store) if deployment.gateway.store else None
    shared = run_path if store is None else f"{run_path},{store.parent}"
    return shlex.join(_python(deployment.slurm or Slurm(), python, shared))


def _python(block: Slurm, python: str, shared: str, flags: Sequence[str] = ()) -> list[str]:
    """Runs Python on the nodes: the file's, that of the environment which the file names, or `python`.

    `shared`: what a container must see of the shared file system besides the home.
    """
    inside = ["apptainer", "exec", *flags, "--bind", shared, block.container] if block.container else []
    has_own = block.modules or block.conda or block.venv or block.container
    return [*inside, block.python or ("python3" if has_own else python)]


def _shell(block: Slurm) -> str:
    return "#!/bin/bash -l" if block.modules or block.conda else "#!/bin/bash"


def _service(deployment: Deployment, run_path: str, role: str, lines: Sequence[str], *commands: str) -> str:
    block = deployment.slurm or Slurm()
    return "\n".join(
        [
            _shell(block),
            *(f"#SBATCH --{line}" for line in lines),
            _GIVE_UP,
            *_prologue(block),
            f'export PENSTOCK_RUN={shlex.quote(run_path)} PENSTOCK_RUN_ID="$1" PENSTOCK_ROLE={role}',
            *commands,
            "",
        ]
    )


def probe(deployment: Deployment, python: str) -> str:
    """A script that prints a machine's facts with the nodes' Python, where that is shared. Not for containers."""
    block = deployment.slurm or Slurm()
    words = shlex.join(_python(block, python, ""))
    head = ['give_up() { echo "$*" >&2; exit 1; }', *_prologue(block)]
    return "\n".join([*head, f"{words} -m penstock.hardware.detect", ""])


def survey(deployment: Deployment, python: str, argv: Sequence[str], folder: str) -> list[str]:
    """Arguments of srun that run `python ARGV` once on each node of a replica and write the answers to `folder`."""
    block = deployment.slurm or Slurm()
    lines = directives(deployment, Needs(0, None, None), folder)
    script = "\n".join(
        [
            'give_up() { echo "$*" >&2; echo 1 >"$at.code"; exit 1; }',
            f"at={shlex.quote(folder)}/$SLURM_PROCID",
            'echo "${SLURMD_NODENAME:-$(hostname)}" >"$at.host"',
            *_prologue(block),
            '"${@//\\{rank\\}/$SLURM_PROCID}" >"$at.out" 2>"$at.err"',
            'echo $? >"$at.code.new" && mv "$at.code.new" "$at.code"',
        ]
    )
    flags = [f"--{line}" for line in lines if not line.startswith(_NOT_IN_SURVEY)] + ["--time=2"]
    return [*flags, "bash", "-c", script, "survey", *_python(block, python, folder), *argv]


_NOT_IN_SURVEY = ("chdir=", "output=", "open-mode=", "signal=", "requeue", "no-requeue", "time=", "mem=", "exclusive")


_GIVE_UP = 'give_up() { echo "penstock: $*"; exit 1; }'


def _prologue(block: Slurm) -> Iterator[str]:
    yield from _environment(block)
    yield from block.prologue


def _environment(block: Slurm) -> Iterator[str]:
    for module in block.modules:
        yield f"module load {shlex.quote(module)} || give_up {shlex.quote(f'could not load module {module}')}"
    if block.conda:
        failed = shlex.quote(f"could not activate the conda environment {block.conda}")
        yield f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(block.conda)} || give_up {failed}'
    if block.venv:
        failed = shlex.quote(f"could not activate the virtual environment {block.venv}")
        yield f"source {shlex.quote(block.venv + '/bin/activate')} || give_up {failed}"


def problems(deployment: Deployment, run_path: str) -> list[Problem]:
    """Values that may not stand in a script, or that penstock sets itself."""
    block = deployment.slurm or Slurm()
    return [*_text_problems(block), *_value_problems(deployment, block, run_path), *_directive_problems(block)]


def _text_problems(block: Slurm) -> Iterator[Problem]:
    words = ("partition", "gateway_partition", "account", "qos", "constraint", "gres", "time", "memory", "nodelist")
    lines = ("conda", "venv", "container", "python", "modules", "prologue")
    for field in words + lines:
        value = getattr(block, field)
        hint = "no quotes, no spaces" if field in words else "one line of text"
        for text in (value,) if isinstance(value, str) else value or ():
            is_good = _is_word(text) if field in words else text and text.replace("\t", " ").isprintable()
            if not is_good:
                yield Problem(f"slurm.{field}", f"{text!r} cannot be written in a batch script", hint)


def _value_problems(deployment: Deployment, block: Slurm, run_path: str) -> Iterator[Problem]:
    if block.time is not None and seconds_of(block.time) is None and block.time.upper() != "UNLIMITED":
        yield Problem("slurm.time", f'"{block.time}" is no time', 'minutes, or "days-hours:minutes:seconds"')
    if block.memory is not None and _is_word(block.memory) and mib_of(block.memory) is None:
        yield Problem("slurm.memory", f'"{block.memory}" is no size', "a number with K, M, G or T: 64G; 0: all")
    if block.cpus_per_node is not None and block.cpus_per_node < 1:
        yield Problem("slurm.cpus_per_node", f"{block.cpus_per_node} is below 1")
    if block.controller == "job" and deployment.gateway.on != "job":
        yield Problem("slurm.controller", '"job", but the gateway is not in a job', "set gateway.on: job")
    if block.controller == "job" and deployment.chat_page is not None and deployment.chat_page.login == "none":
        words = "everyone who reaches the controller's node could use the engines"
        yield Problem("ui.login", words, "remove it; people log in with a key: penstock keys create NAME")
    if block.successor_s is not None and block.successor_s < 0:
        yield Problem("slurm.successor_s", f"{block.successor_s:g} is below 0")
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
        elif name in _FIELDS:
            yield Problem("slurm.directives", f'"{name}" is set by another field', f"set slurm.{_FIELDS[name]}")


def _is_word(value: str) -> bool:
    return _PLAIN.match(value) is not None
