"""The autoscaler's bars, asked and measured: start times by traces, next to HPA, KEDA and Knative.

    python benchmarks/autoscaling.py [--starts 20,100,300,900] [--hours 3] [--seeds 0] [--jobs 2] [--others]
                                     [--hold-out] [--trace FILE --scale-load X] [--rates 0.7] [--pictures FOLDER]

A replica reads 12,000 prompt tokens/s, writes 1,500, runs 64 requests, gives a stream at most 60 tokens/s; the first
token is promised in 2 s. --hold-out takes other kinds of traces. --rates: the
policy believes so many times the rates that replicas have. Only arithmetic: a trace of three hours takes a few seconds,
its references (the constant number, the plan that knows the future) half a minute of one core.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.bench.report.svg import standalone
from penstock.deployment.autoscale import Policy
from penstock.spec.deployment import Replicas
from penstock.testing.scaling import pictures, traces
from penstock.testing.scaling.comparison import OURS, Follower, Row, first_replicas, others
from penstock.testing.scaling.scores import Scores, constant_peak, reference, scores
from penstock.testing.scaling.simulator import Capacity, Outcome, Scaler, simulate
from penstock.testing.scaling.traces import HOUR_S, Trace

FIVE = ("code", "conversations", "day", "ramp", "step")
SHOCKS = ("spike", "square")
STEADY = ("constant", "noise")
MOST = 24


class Bar(NamedTuple):
    """What is asked at one start time: shares of requests in time, replica-hours over those of a constant number and of
    who knows the future."""

    mean: float
    worst: float
    per_peak: float
    per_oracle: float
    shocks: float


BARS = {
    20.0: Bar(0.97, 0.95, 0.72, 1.50, 0.88),
    100.0: Bar(0.95, 0.92, 0.75, 1.45, 0.77),
    300.0: Bar(0.90, 0.85, 0.75, 1.35, 0.55),
    900.0: Bar(0.70, 0.50, 0.87, 1.35, 0.65),
}


class Task(NamedTuple):
    """One trace at one start time. `file`: a trace's file, and how many times its requests; else `name` is known."""

    name: str
    start_s: float
    seed: int
    hours: float
    rates: float
    with_others: bool
    file: str | None
    scale_load: float
    pictures: str | None


class Done(NamedTuple):
    task: Task
    scores: dict[str, Scores]


# ---- other kinds of traces -------------------------------------------------------------------------------------------


def _levels(duration_s: float, seed: int, step: Callable[[random.Random, float], tuple[float, float]]) -> list[float]:
    """The load of each second; `step` maps the load before to (seconds, load)."""
    draw, levels, level = random.Random(f"levels {seed}"), list[float](), 1.0
    while len(levels) <= duration_s:
        seconds, level = step(draw, level)
        levels += [level] * max(1, round(seconds))
    return levels


def _bursts(draw: random.Random, before: float) -> tuple[float, float]:
    """Minutes of much load at random moments: each as long as chance has it."""
    return (draw.expovariate(1 / 480), 1.2) if before > 2 else (draw.expovariate(1 / 150), draw.uniform(4, 9))


def _agents(draw: random.Random, before: float) -> tuple[float, float]:
    """Half a minute of work and a pause of minutes, never the same."""
    return (draw.uniform(20, 240), 0.1) if before > 1 else (draw.uniform(20, 70), draw.uniform(1.5, 6))


def _wander(draw: random.Random, before: float) -> tuple[float, float]:
    """Every minute a tenth up or down, sometimes half as much or twice."""
    factor = draw.choice((0.5, 2.0)) if draw.random() < 0.02 else math.exp(draw.gauss(0, 0.1))
    return 60.0, min(10.0, max(0.7, before * factor * (4 / before) ** 0.01))


def _crowds(t: float, begins: Sequence[float]) -> float:
    """A crowd comes within a minute and leaves over a quarter of an hour."""
    ages = [t - begin for begin in begins if t >= begin]
    return 1.5 + max((7 * min(1.0, age / 60) * math.exp(-age / 900) for age in ages), default=0.0)


def _timetable(t: float) -> float:
    """A job of ten minutes each hour, as cron starts it."""
    return 8.0 if 900 <= t % HOUR_S < 1500 else 1.2


def _saw(t: float) -> float:
    return 1.0 + 8.0 * (t % 1800) / 1800


def _from_levels(
    name: str, step: Callable[[random.Random, float], tuple[float, float]], prompt: float, output: float
) -> Callable[[float, int], Trace]:
    def make(duration_s: float, seed: int) -> Trace:
        levels = _levels(duration_s, seed, step)
        return traces.poisson(name, duration_s, lambda t: levels[int(t)], seed, prompt, output)

    return make


def _from_crowds(duration_s: float, seed: int) -> Trace:
    draw = random.Random(f"crowds {seed}")
    begins = [draw.uniform(0, duration_s) for _ in range(int(duration_s // 3000))]
    return traces.poisson("crowds", duration_s, lambda t: _crowds(t, begins), seed)


HOLD_OUT: dict[str, Callable[[float, int], Trace]] = {
    "agents": _from_levels("agents", _agents, 2500.0, 60.0),
    "bursts": _from_levels("bursts", _bursts, 1155.0, 211.0),
    "crowds": _from_crowds,
    "long prompts": _from_levels("long prompts", _wander, 6000.0, 100.0),
    "long answers": _from_levels("long answers", _wander, 200.0, 800.0),
    "saw": lambda duration_s, seed: traces.poisson("saw", duration_s, _saw, seed),
    "timetable": lambda duration_s, seed: traces.poisson("timetable", duration_s, _timetable, seed),
}


# ---- runs ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def trace_and_peak(name: str, seed: int, hours: float, file: str | None, scale_load: float) -> tuple[Trace, int]:
    """The trace, and the constant number for it: the same for all start times, which come one after another."""
    if file is not None:
        trace = traces.scaled(traces.repeated(traces.read(Path(file)), hours * HOUR_S), scale_load)
    else:
        trace = (HOLD_OUT.get(name) or traces.NAMED[name])(hours * HOUR_S, seed)
    return trace, constant_peak(trace, Capacity())


def run(task: Task) -> Done:
    trace, peak = trace_and_peak(task.name, task.seed, task.hours, task.file, task.scale_load)
    capacity = Capacity(task.start_s)
    replicas = Replicas(min=1, max=MOST)
    policy = Policy(replicas, task.start_s, 12_000 * task.rates, 1_500 * task.rates)
    known = reference(trace, capacity, peak=peak)
    first = first_replicas(trace, Policy(replicas, task.start_s))
    rows: list[Row] = []
    scalers: dict[str, Scaler] = {OURS: Follower(policy), **(others(policy) if task.with_others else {})}
    for name, scaler in scalers.items():
        outcome: Outcome = simulate(trace, scaler, capacity, first)
        rows.append(Row(name, scores(outcome, known), outcome))
    if task.pictures is not None:
        path = Path(task.pictures) / f"autoscale-{task.name.replace(' ', '-')}-{task.start_s:g}.svg"
        path.write_text(standalone(pictures.charts(trace, policy, rows)), "utf-8")
    return Done(task, {row.name: row.scores for row in rows})


def from_zero(start_s: float) -> float:
    """Seconds until the first token of one request after half an hour of silence, with no replica before."""
    trace, policy = traces.named("silence", HOUR_S), Policy(Replicas(min=0, max=MOST), start_s)
    return simulate(trace, Follower(policy), Capacity(start_s), 0).ttft_s[0]


# ---- tables ----------------------------------------------------------------------------------------------------------


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(list(values))


def bars_table(done: Sequence[Done], starts: Sequence[float], name: str = OURS) -> str:
    head = "| start | mean | worst trace | hours / peak | hours / oracle | spike, square: mean | from zero |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for start_s in starts:
        rows = [(each.task.name, each.scores[name]) for each in done if each.task.start_s == start_s]
        five = [row for row in rows if row[0] in FIVE]
        shocks = [row.attainment for trace, row in rows if trace in SHOCKS]
        if not five:
            continue
        bar, worst = BARS.get(start_s) if name == OURS else None, min(five, key=lambda row: row[1].attainment)
        cells = [
            _cell(mean(row.attainment for _, row in five), bar and bar.mean),
            f"{_cell(worst[1].attainment, bar and bar.worst)} {worst[0]}",
            _cell(mean(row.per_peak for _, row in five), bar and bar.per_peak, is_most=True),
            _cell(mean(row.per_oracle for _, row in five), bar and bar.per_oracle, is_most=True),
            f"{_cell(mean(shocks), bar and bar.shocks)} ({', '.join(f'{share:.1%}' for share in shocks)})",
            f"{from_zero(start_s):.1f} s (<= {1.2 * start_s + 15:.0f} s)" if name == OURS else "-",
        ]
        lines.append(f"| {start_s:g} s | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: float, asked: float | None, is_most: bool = False) -> str:
    shown = f"{value:.2f}" if is_most else f"{value:.1%}"
    if asked is None:
        return shown
    is_kept = value <= asked + 0.005 if is_most else value >= asked - 0.0005
    words = f"<= {asked}" if is_most else f">= {asked:.0%}"
    return f"{shown} ({words}{'' if is_kept else ', MISSED'})"


def traces_table(done: Sequence[Done]) -> str:
    """Attainment @ hours / peak, hours / oracle; changes an hour; one line for each trace and start time."""
    names = list(done[0].scores) if done else []
    lines = [f"| trace | start | {' | '.join(names)} | changes/h | lost |", "|---" * (len(names) + 4) + "|"]
    for each in done:
        cells = [f"{row.attainment:.1%} @ {row.per_peak:.2f}, {row.per_oracle:.2f}" for row in each.scores.values()]
        ours, task = each.scores[OURS], each.task
        seed = f" #{task.seed}" if task.seed else ""
        tail = f"{ours.changes_per_hour:.1f} | {sum(row.lost for row in each.scores.values())}"
        lines.append(f"| {task.name}{seed} | {task.start_s:g} s | {' | '.join(cells)} | {tail} |")
    return "\n".join(lines)


def main() -> int:
    options = _options()
    names = list(HOLD_OUT) if options.hold_out else [*FIVE, *SHOCKS, *STEADY]
    files: list[str | None] = [None]
    if options.trace is not None:
        names, files = [Path(options.trace).name.partition(".")[0]], [options.trace]
    tasks = [
        Task(name, start_s, seed, options.hours, options.rates, options.others, file, options.scale_load,
             options.pictures)
        for name in names for seed in options.seeds for file in files for start_s in options.starts
    ]  # fmt: skip
    with multiprocessing.Pool(options.jobs) as pool:
        done = pool.map(run, tasks, chunksize=len(options.starts))
    if not (options.hold_out or options.trace):
        for name in list(done[0].scores):
            print(f"{name}\n\n{bars_table(done, options.starts, name)}\n")
    print(traces_table(done))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = functools.partial(_numbers, kind=float)
    parser.add_argument("--starts", type=numbers, default=list(BARS))
    parser.add_argument("--seeds", type=functools.partial(_numbers, kind=int), default=[0])
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rates", type=float, default=1.0)
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--hold-out", action="store_true")
    parser.add_argument("--trace")
    parser.add_argument("--scale-load", type=float, default=1.0)
    parser.add_argument("--pictures")
    return parser.parse_args()


def _numbers(text: str, kind: Callable[[str], float]) -> list[float]:
    return [kind(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
