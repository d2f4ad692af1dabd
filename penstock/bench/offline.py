"""The bare engine without HTTP: `vllm bench throughput` and `vllm bench latency`, once for each tensor size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

import penstock
from penstock import engines, processes
from penstock.bench.datasets import files, synthetic
from penstock.deployment import planning, prepare
from penstock.engines import Place, telling_lines
from penstock.engines.vllm import offline
from penstock.engines.vllm.offline import Latency, Throughput, Verb
from penstock.errors import EngineError, PlanError, SpecError, UserError
from penstock.hardware import detect, visible
from penstock.planner import Plan
from penstock.spec.deployment import Deployment, Parallel
from penstock.text import show_seconds

_TAIL_LINES = 400
_SHOWN_LINES = 25
_LATENCY_TOKEN_IDS = 10_000  # vllm 0.32 `benchmarks/latency.py`
_MOST_AT_ONCE = 32  # of many prompts on the CPU, where the plan sets how many run


class Task(msgspec.Struct, frozen=True):
    """What vLLM's program is asked for: verb, arguments, prompts at once, tokens of each."""

    verb: Verb
    words: tuple[str, ...]
    n_at_once: int
    n_tokens: int = 0


class Row(msgspec.Struct, frozen=True):
    """One tensor size: what was measured, or why it could not be (`is_broken`: the engine died)."""

    tensor: int
    engine: str = ""
    measured: Throughput | Latency | None = None
    refusal: str | None = None
    is_broken: bool = False


def throughput_task(
    dataset: str, n_prompts: int, n_warmup: int, seed: int, n_input: int | None, n_output: int | None
) -> Task:
    """Many prompts at once, of a data set that vLLM's program knows by itself.  Raises UserError."""
    kind, _, rest = dataset.partition(":")
    output: Sequence[str] = ("--output-len", str(n_output)) if n_output else ()
    if kind == "random" and not rest:
        n_input, n_output = n_input or synthetic.INPUT_TOKENS, n_output or synthetic.OUTPUT_TOKENS
        words = ["--random-input-len", str(n_input), "--random-output-len", str(n_output)]
    elif kind == "sharegpt":
        words = ["--dataset-path", str(files.existing(rest, kind)), *output]
    elif kind == "prefix":
        sizes = synthetic.options_of(kind, rest, synthetic.PREFIX_SIZES)
        kind = "prefix_repetition"
        named = {**sizes, "output": n_output or synthetic.OUTPUT_TOKENS}
        flags = {"n": "num-prefixes", "prefix": "prefix-len", "suffix": "suffix-len", "output": "output-len"}
        words = [word for name, flag in flags.items() for word in (f"--prefix-repetition-{flag}", str(named[name]))]
    else:
        raise UserError(
            f'cannot give data set "{dataset[:80]}" to the bare engine',
            hint="random, sharegpt:FILE or prefix:n=8,prefix=1000,suffix=100. For others: penstock bench serve.",
        )
    words = ["--dataset-name", kind, *words, "--num-prompts", str(n_prompts), "--num-warmups", str(n_warmup)]
    return Task("throughput", (*words, "--seed", str(seed)), min(n_prompts, _MOST_AT_ONCE))


def latency_task(shape: tuple[int, int, int], n_rounds: tuple[int, int], seed: int) -> Task:
    """One batch of random tokens. `shape`: prompts, tokens of each, of each answer; `n_rounds`: warm-up, timed."""
    flags = ("--batch-size", "--input-len", "--output-len", "--num-iters-warmup", "--num-iters", "--seed")
    numbers = (*shape, *n_rounds, seed)
    words = tuple(word for flag, number in zip(flags, numbers, strict=True) for word in (flag, str(number)))
    return Task("latency", words, shape[0], shape[1] + shape[2])


def run(deployment: Deployment, tensors: Sequence[int], task: Task, on_step: Callable[[str], None]) -> Iterator[Row]:
    """A row for each tensor size, as soon as it is measured; each takes minutes.

    Raises UserError; EngineError where only one size is asked for.
    """
    for tensor in tensors:
        try:
            plan = _plan(deployment, tensor, task)
        except PlanError as error:
            yield Row(tensor, refusal=error.message)
            continue
        engine = f"{plan.engine} {plan.engine_version}"
        on_step(f"TP {tensor}: {engine}, vllm bench {task.verb}")
        try:
            yield Row(tensor, engine, carry_out(plan, task))
        except EngineError as error:
            if len(tensors) == 1:
                raise
            on_step("\n".join(line for line in (error.message, error.detail, error.hint) if line))
            yield Row(tensor, engine, refusal=error.message, is_broken=True)


def _plan(deployment: Deployment, tensor: int, task: Task) -> Plan:
    """As `up` would plan it, with room for so many at once.  Raises PlanError, and UserError for another engine."""
    workload = msgspec.structs.replace(deployment.workload, concurrency=task.n_at_once)
    # The layout of the file stays where only one size is measured.
    layout = deployment.parallel if tensor == 1 and isinstance(deployment.parallel, Parallel) else Parallel()
    layout = msgspec.structs.replace(layout, tensor=tensor)
    ids, machine = deployment.hardware.gpu_ids, detect.this_machine(deployment.hardware.gpu_ids)
    if problems := planning.absent_gpus(deployment.hardware, machine.host, machine.gpus):
        raise SpecError(f'deployment "{deployment.name}"', problems)
    plan = prepare.make_plan(msgspec.structs.replace(deployment, workload=workload, parallel=layout), machine, 1)
    if plan.engine != "vllm":
        raise UserError(
            f"cannot time engine {plan.engine} without its server",
            detail="The numbers come from `vllm bench`, which is vLLM's own program.",
            hint="Time it through its server: penstock up, then penstock bench serve. Or --engine vllm.",
        )
    if task.n_tokens > plan.max_model_len:
        raise UserError(
            f"cannot request {task.n_tokens} tokens of prompt and answer: max_model_len is {plan.max_model_len}",
            hint="Lower --input-len or --output-len.",
        )
    if task.verb == "latency" and 0 < plan.model.vocab < _LATENCY_TOKEN_IDS:
        raise UserError(
            f"cannot time a batch of a model with {plan.model.vocab} tokens in its vocabulary",
            detail=f"`vllm bench latency` draws token ids up to {_LATENCY_TOKEN_IDS}.",
            hint="penstock bench throughput takes any model.",
        )
    return msgspec.structs.replace(plan, env=plan.env | visible(ids or ()))


def carry_out(plan: Plan, task: Task) -> Throughput | Latency:
    """Run vLLM's program with this plan; none of its processes or files is left.  Raises EngineError."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        command = offline.command(plan, Place("127.0.0.1", 0, folder, sys.executable), task.verb, task.words)
        for name, text in command.files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_text(text, "utf-8")
        log = Path(folder) / "engine.log"
        code = _wait(command.argv, _environment(command.env, folder), log)
        printed = log.read_text("utf-8", "replace")
        if code == 0:
            return offline.read(folder, task.verb, printed)
        tail = printed.splitlines()[-_TAIL_LINES:]
        diagnosis = engines.load(plan.engine).diagnose(code, tail)
        raise EngineError(
            f"could not run vllm bench {task.verb}: {diagnosis.reason}",
            detail="\n".join(telling_lines(tail, diagnosis.line, _SHOWN_LINES)),
            hint=diagnosis.hint,
        )


def _wait(argv: Sequence[str], env: dict[str, str], log: Path) -> int:
    """The exit code of a child whose whole family ends with it, also when we are interrupted."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            processes.sweep(env[processes.MARK_RUN])


def _environment(extra: dict[str, str], folder: str) -> dict[str, str]:
    env = {**os.environ, **processes.marks(folder, "bench", "engine"), "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}
    paths = [extra.get("PYTHONPATH"), str(Path(penstock.__file__).parent.parent), os.environ.get("PYTHONPATH")]
    return env | extra | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


HEADS: dict[Verb, str] = {
    "throughput": f"{'':6}{'requests/s':>12}{'tokens/s':>12}{'output tokens/s':>17}{'elapsed':>10}",
    "latency": f"{'':6}{'latency':>12}{'p50':>10}{'p90':>10}{'p99':>10}{'rounds':>8}",
}


def line(row: Row) -> str:
    """A row as such tables are published: tokens/s counts prompts and answers, latency is the mean of all rounds."""
    numbers = f" {row.refusal}"
    if isinstance(measured := row.measured, Throughput):
        output = measured.output_tokens / measured.elapsed_time
        numbers = f"{measured.requests_per_second:12.2f}{measured.tokens_per_second:12.2f}{output:17.2f}"
        numbers += f"{show_seconds(measured.elapsed_time):>10}"
    elif measured is not None:
        percentiles = "".join(f"{measured.percentiles[share]:8.3f} s" for share in ("50", "90", "99"))
        numbers = f"{measured.avg_latency:10.3f} s{percentiles}{len(measured.latencies):8}"
    return f"TP {row.tensor:<3}{numbers}"


def facts(rows: Sequence[Row]) -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for row in rows:
        out.append({"tensor_parallel_size": row.tensor, "refusal": row.refusal})
        if row.measured is not None:
            out[-1] |= {"engine": row.engine, **msgspec.to_builtins(row.measured)}
    return out
