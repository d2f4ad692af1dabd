"""The bare engine without HTTP: vLLM's offline shapes, many prompts at once, and one batch again and again.

The engine gets the plan and the flags that `penstock up` would give it, in a process of its own; one run for each
tensor size, so that a published table comes from one command.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

import penstock
from penstock import engines, processes
from penstock.bench.load.arrivals import Ask
from penstock.bench.results import bootstrap
from penstock.deployment import prepare
from penstock.engines import Place, telling_lines
from penstock.engines.offline import PROGRAMS, Done, Job
from penstock.errors import EngineError, PlanError, UserError
from penstock.hardware import detect
from penstock.planner import Plan
from penstock.spec.deployment import Deployment, Parallel
from penstock.text import show_seconds

_TAIL_LINES = 400
_SHOWN_LINES = 25
_RUNNING_AT_ONCE = 32  # of many prompts on the CPU, where the plan sets how many run
# vLLM's own latency benchmark draws token ids below this (`benchmarks/latency.py`).
_MOST_TOKEN_ID = 10_000


class Task(msgspec.Struct, frozen=True):
    """What the engine is given, all at once; `asks` with text, or `token_ids` of equal length."""

    prompts: tuple[str | tuple[int, ...], ...]
    output_tokens: tuple[int, ...]
    n_warmup: int = 0
    n_times: int = 1
    n_at_once: int = _RUNNING_AT_ONCE


class Row(msgspec.Struct, frozen=True):
    """One tensor size: what was measured, or why it could not be. `engine` is its name and version.

    `refusal`: the planner's words, or (`is_broken`) those of an engine that died.
    """

    tensor: int
    engine: str = ""
    seconds: tuple[float, ...] = ()
    n_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    refusal: str | None = None
    is_broken: bool = False

    @property
    def elapsed_s(self) -> float:
        """Of the last round."""
        return self.seconds[-1]

    @property
    def requests_per_s(self) -> float:
        """Requests of a round / its seconds."""
        return self.n_requests / self.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """(prompt + answer tokens of a round) / its seconds, as vLLM's throughput benchmark counts."""
        return (self.input_tokens + self.output_tokens) / self.elapsed_s

    @property
    def latency_s(self) -> float:
        """The mean over all timed rounds of a batch, from its prompts to its last token."""
        return statistics.fmean(self.seconds)


def throughput_task(asks: Sequence[Ask], n_warmup: int = 0) -> Task:
    """Many prompts at once.  Raises UserError for conversations, which a bare engine does not take."""
    texts = [ask.prompt for ask in asks if isinstance(ask.prompt, str)]
    if len(texts) != len(asks):
        raise UserError("cannot give chat messages to a bare engine", hint="A data set of plain prompts.")
    return Task(tuple(texts), tuple(ask.output_tokens for ask in asks), n_warmup, 1, min(len(texts), _RUNNING_AT_ONCE))


def latency_task(n_vocabulary: int, shape: tuple[int, int, int], rounds: tuple[int, int], seed: int = 0) -> Task:
    """One batch of random token ids. `shape`: prompts, tokens of each, of each answer; `rounds`: warm-up, timed."""
    batch, input_tokens, output_tokens = shape
    rng, top = random.Random(seed), max(1, min(n_vocabulary or _MOST_TOKEN_ID, _MOST_TOKEN_ID))
    prompts = tuple(tuple(rng.randrange(top) for _ in range(input_tokens)) for _ in range(batch))
    return Task(prompts, (output_tokens,) * batch, *rounds, batch)


def run(
    deployment: Deployment, tensors: Sequence[int], task_of: Callable[[Plan], Task], on_step: Callable[[str], None]
) -> Iterator[Row]:
    """A row for each tensor size, as soon as it is measured; each takes minutes.

    One that cannot be placed has the planner's words instead, one whose engine dies the engine's: the others are
    measured all the same. `task_of` may depend on the plan (its vocabulary). Raises UserError; EngineError where only
    one size is asked for.
    """
    for tensor in tensors:
        try:
            plan = _plan(deployment, tensor, _RUNNING_AT_ONCE)
            task = task_of(plan)
            plan = _plan(deployment, tensor, task.n_at_once)
        except PlanError as error:
            yield Row(tensor, refusal=error.message)
            continue
        engine = f"{plan.engine} {plan.engine_version}"
        on_step(f"TP {tensor}: {engine}, {len(task.prompts)} prompts")
        try:
            done = carry_out(plan, task)
        except EngineError as error:
            if len(tensors) == 1:
                raise
            on_step("\n".join(word for word in (error.message, error.detail, error.hint) if word))
            yield Row(tensor, engine, refusal=error.message, is_broken=True)
        else:
            yield Row(tensor, engine, done.seconds, len(task.prompts), done.input_tokens, done.output_tokens)


def _plan(deployment: Deployment, tensor: int, n_at_once: int) -> Plan:
    """As `up` would plan it, with room for so many at once."""
    workload = msgspec.structs.replace(deployment.workload, concurrency=n_at_once)
    # A file's own layout stays where one alone is asked for.
    cut = deployment.parallel if tensor == 1 and isinstance(deployment.parallel, Parallel) else Parallel(tensor=tensor)
    cut = msgspec.structs.replace(cut, tensor=tensor)
    return prepare.make_plan(
        msgspec.structs.replace(deployment, workload=workload, parallel=cut), detect.this_machine(), 1
    )


def carry_out(plan: Plan, task: Task) -> Done:
    """Run a task on an engine of this plan, in a process of its own; nothing of it is left.  Raises EngineError."""
    program = PROGRAMS.get(plan.engine)
    if program is None:
        raise UserError(f"cannot run engine {plan.engine} without its server", hint=f"Engines: {', '.join(PROGRAMS)}.")
    engine = engines.load(plan.engine)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        command = engine.command(plan, Place("127.0.0.1", 0, folder, sys.executable))
        for name, text in command.files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_text(text, "utf-8")
        answer = Path(folder) / "answer.json"
        job = Job(_own_words(command.argv), task.prompts, task.output_tokens, str(answer), task.n_warmup, task.n_times)
        (Path(folder) / "job.json").write_bytes(msgspec.json.encode(job))
        argv = [sys.executable, "-m", program, str(Path(folder) / "job.json")]
        log = Path(folder) / "engine.log"
        code = _wait(argv, _environment(command.env, folder), log)
        if code != 0 or not answer.is_file():
            tail = log.read_text("utf-8", "replace").splitlines()[-_TAIL_LINES:]
            diagnosis = engine.diagnose(code, tail)
            raise EngineError(
                f"could not run {plan.engine} offline: {diagnosis.reason}",
                detail="\n".join(telling_lines(tail, diagnosis.line, _SHOWN_LINES)),
                hint=diagnosis.hint,
            )
        return msgspec.json.decode(answer.read_bytes(), type=Done)


def _own_words(argv: Sequence[str]) -> tuple[str, ...]:
    """What stands after the engine's program: `python -m module [serve] WORDS`."""
    at = 3
    return tuple(argv[at + 1 :] if argv[at] == "serve" else argv[at:])


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
    env |= extra
    package = str(Path(penstock.__file__).parent.parent)
    paths = [extra.get("PYTHONPATH"), package, os.environ.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if extra.get("LD_LIBRARY_PATH") and os.environ.get("LD_LIBRARY_PATH"):
        env["LD_LIBRARY_PATH"] = f"{extra['LD_LIBRARY_PATH']}:{os.environ['LD_LIBRARY_PATH']}"
    return env


class Table(NamedTuple):
    """How rows are printed, as such tables are published."""

    head: str
    numbers: Callable[[Row], str]

    def line(self, row: Row) -> str:
        return f"TP {row.tensor:<3}{f' {row.refusal}' if row.refusal else self.numbers(row)}"


def _throughput(row: Row) -> str:
    out = row.output_tokens / row.elapsed_s
    return f"{row.requests_per_s:12.2f}{row.tokens_per_s:12.2f}{out:17.2f}{show_seconds(row.elapsed_s):>10}"


def _latency(row: Row) -> str:
    ordered = sorted(row.seconds)
    percentiles = "".join(f"{bootstrap.quantile(ordered, share):8.3f} s" for share in (0.5, 0.9, 0.99))
    return f"{row.latency_s:10.3f} s{percentiles}{len(row.seconds):8}"


# Requests/s, tokens/s (both ways), time of a round; the mean time of a batch, and percentiles over its rounds.
THROUGHPUT = Table(f"{'':6}{'requests/s':>12}{'tokens/s':>12}{'output tokens/s':>17}{'elapsed':>10}", _throughput)
LATENCY = Table(f"{'':6}{'latency':>12}{'p50':>10}{'p90':>10}{'p99':>10}{'rounds':>8}", _latency)


def facts(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as JSON has them, by vLLM's names where it has such."""
    found = []
    for row in rows:
        told: dict[str, object] = {"tensor_parallel_size": row.tensor, "refusal": row.refusal}
        if row.refusal is None:
            told |= {
                "engine": row.engine,
                "num_requests": row.n_requests,
                "elapsed_time": row.elapsed_s,
                "requests_per_second": row.requests_per_s,
                "tokens_per_second": row.tokens_per_s,
                "total_num_tokens": row.input_tokens + row.output_tokens,
                "output_tokens": row.output_tokens,
                "avg_latency": row.latency_s,
                "latencies": list(row.seconds),
            }
        found.append(told)
    return found
