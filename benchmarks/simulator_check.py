"""The autoscaler's simulator against real replicas: the same load through both, and how far they are apart.

    python benchmarks/simulator_check.py                          # simulate what was recorded, compare
    python benchmarks/simulator_check.py --record FOLDER --name "..." --out FILE.yaml [--dummy] [--max-running 64]

Two kinds of recorded points. benchmarks/data/speed_points.yaml has closed loops on GPUs: what one request at a time and
the widest loop tell of a replica gives the requests/s of the loops between. benchmarks/data/replica_points.yaml has
arrivals below, near and over a replica's capacity and a step to twice of it, which --record adds: vLLM itself, in this
process, a step after another, without HTTP. First what it can (prompts alone, answers after all prompts, one stream),
then the loads. Its clock is the processor's time where there is no GPU, so that other programs on the machine change
little, and skips the time without requests. Arrivals follow from their seed, so that the file needs none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from penstock.deployment.autoscale import Sample
from penstock.engines.vllm import cpu_amx
from penstock.testing.scaling.simulator import Capacity, simulate
from penstock.testing.scaling.traces import Arrival, Trace

POINTS = Path(__file__).parent / "data" / "replica_points.yaml"
LOOPS = Path(__file__).parent / "data" / "speed_points.yaml"
TTFT_S = 2.0
# Share of the capacity from second to second; each ends without requests, so that queues drain.
SHAPES: dict[str, tuple[tuple[float, float], ...]] = {
    "half": ((25.0, 0.5),),
    "near": ((30.0, 0.85),),
    "over": ((25.0, 1.4),),
    "step": ((10.0, 0.4), (22.0, 2.0), (32.0, 0.4)),
}
_MOST_OF_MEAN = 4.0
_N_PROMPTS = 32
_ROUNDS = 20


class Lengths(msgspec.Struct, frozen=True):
    """Mean tokens of a request; each is log-normal with a spread of 0.8, and at most four times as long."""

    prompt: int = 1155
    output: int = 211


class Measured(msgspec.Struct, frozen=True):
    """What decides about scaling. Until the load's end: output tokens/s, mean requests in flight, requests that had no
    first token then; after it: seconds to the last first token. Of all: the share of first tokens in time."""

    requests: int
    attainment: float
    ttft_p50_s: float
    output_tokens_s: float
    in_flight: float
    waiting_at_end: int
    drain_s: float


class Point(msgspec.Struct, frozen=True):
    """`levels`: (until second, requests/s)."""

    name: str
    levels: tuple[tuple[float, float], ...]
    measured: Measured


class Replica(msgspec.Struct, frozen=True):
    """A real replica: what it can, as measured when it did only that, and its loads."""

    name: str
    capacity: Capacity
    lengths: Lengths
    ttft_s: float
    points: tuple[Point, ...]


class Row(NamedTuple):
    """One request: seconds from the start."""

    arrived: float
    first: float
    end: float


def arrivals(levels: Sequence[tuple[float, float]], lengths: Lengths, seed: str) -> Trace:
    """Poisson arrivals at these rates. The same each time."""
    draw, rows, begin = random.Random(seed), list[Arrival](), 0.0
    for until, rate in levels:
        at = begin + draw.expovariate(rate)
        while at < until:
            rows.append(Arrival(at, _length(draw, lengths.prompt), _length(draw, lengths.output)))
            at += draw.expovariate(rate)
        begin = until
    return Trace(seed, tuple(rows), begin)


def _length(draw: random.Random, mean: int) -> int:
    return max(1, min(round(_MOST_OF_MEAN * mean), round(mean * draw.lognormvariate(-(0.8**2) / 2, 0.8))))


def points(path: Path = POINTS) -> list[Replica]:
    return msgspec.convert(yaml.safe_load(path.read_text()), list[Replica])


def simulated(replica: Replica, point: Point) -> Measured:
    trace = arrivals(point.levels, replica.lengths, point.name)
    samples: list[Sample] = []

    def watch(sample: Sample) -> int:
        samples.append(sample)
        return 1

    outcome = simulate(trace, watch, replica.capacity, 1, replica.ttft_s)
    within = [sample for sample in samples if sample.t <= trace.duration_s]
    rows = [(arrived, arrived + wait) for arrived, wait in zip(outcome.arrived_s, outcome.ttft_s, strict=True)]
    return figures(
        rows,
        trace.duration_s,
        replica.ttft_s,
        sum([sample.output_tokens for sample in within]),
        sum([sample.in_flight for sample in within]) / len(within),
    )


def figures(
    rows: Sequence[tuple[float, float]], load_s: float, ttft_s: float, output_tokens: float, in_flight: float
) -> Measured:
    waits = sorted(first - arrived for arrived, first in rows)
    return Measured(
        requests=len(rows),
        attainment=round(sum(wait <= ttft_s for wait in waits) / len(waits), 4),
        ttft_p50_s=round(waits[len(waits) // 2], 3),
        output_tokens_s=round(output_tokens / load_s, 1),
        in_flight=round(in_flight, 2),
        waiting_at_end=sum(first > load_s for _, first in rows),
        drain_s=round(max(0.0, max(first for _, first in rows) - load_s), 2),
    )


# ---- closed loops ----------------------------------------------------------------------------------------------------


class Loop(NamedTuple):
    """`at_once` requests of equal lengths, always; how many are answered a second."""

    name: str
    capacity: Capacity
    lengths: Lengths
    requests_s: float


def loops(path: Path = LOOPS) -> list[Loop]:
    """Of our own runs on one pipeline stage; without the points that say what the replica can."""
    found = []
    for source in yaml.safe_load(path.read_text())["sources"]:
        rows = [{**source["shared"], **point} for point in source["points"]]
        rows = [row for row in rows if "ttft" in row and "tpot" in row]
        alone = [row for row in rows if row["concurrency"] == 1 and "model" in source["shared"]]
        if source["url"] != "own" or not alone or "pipeline" in source["shared"]:
            continue
        widest = max(rows, key=_width)
        prefill, stream = max(row["input"] / row["ttft"] for row in alone), max(1 / row["tpot"] for row in alone)
        rate = _rate(widest)
        decode = rate * widest["output"] / (1 - rate * widest["input"] / (1e3 * prefill))
        for row in rows:
            if row is not widest and row["concurrency"] > 1:
                capacity = Capacity(0.0, 1e3 * prefill, decode, row["concurrency"], 1e3 * stream)
                name = f"{source['name']}, {row['concurrency']} x {row['input']}/{row['output']}"
                found.append(Loop(name, capacity, Lengths(row["input"], row["output"]), _rate(row)))
    return found


def _width(row: dict[str, Any]) -> tuple[int, int]:
    return row["concurrency"], -row["input"]


def _rate(row: dict[str, Any]) -> float:
    return float(row["concurrency"] / (row["ttft"] + row["tpot"] * (row["output"] - 1)) * 1e3)


def looped(loop: Loop) -> float:
    """Requests/s of the simulator: so many wait from the beginning that all places are always taken."""
    at_once, count = loop.capacity.max_running, _ROUNDS * loop.capacity.max_running
    requests = tuple(Arrival(n * 1e-6, loop.lengths.prompt, loop.lengths.output) for n in range(count))
    outcome = simulate(Trace(loop.name, requests, 1.0), lambda _: 1, loop.capacity, 1)
    moments = [arrived + wait for arrived, wait in zip(outcome.arrived_s, outcome.ttft_s, strict=True)]
    return (count - at_once) / (moments[-1] - moments[at_once - 1])


# ---- recording -------------------------------------------------------------------------------------------------------


class Engine:
    """vLLM in this process. Its clock runs while it works."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        _name_vllm()
        import torch
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if not torch.cuda.is_available():
            cpu_amx.allow()
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        self.clock = time.perf_counter if torch.cuda.is_available() else time.process_time
        facts = {"load_format": "dummy"} if options.dummy else {}
        self.engine = LLM(
            options.record,
            max_num_seqs=options.max_running,
            max_model_len=options.max_model_len,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **facts,
            **json.loads(options.engine),
        ).llm_engine
        self._params: Callable[[int], Any] = lambda n: SamplingParams(
            max_tokens=n, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self._draw, self._count = random.Random(0), 0

    def serve(self, trace: Trace) -> tuple[list[Row], list[tuple[float, int]]]:
        """Each request's times, and the tokens of each step."""
        firsts, ends, steps, index, now = dict[str, float](), dict[str, float](), list[tuple[float, int]](), 0, 0.0
        names = dict[str, Arrival]()
        while index < len(trace.arrivals) or self.engine.has_unfinished_requests():
            if not self.engine.has_unfinished_requests():
                now = max(now, trace.arrivals[index].t)
            begun, count = self.clock(), 0
            while index < len(trace.arrivals) and trace.arrivals[index].t <= now:
                names[self._add(trace.arrivals[index])] = trace.arrivals[index]
                index += 1
            outputs = self.engine.step()
            now += self.clock() - begun
            for output in outputs:
                count += len(output.outputs[0].token_ids)
                firsts.setdefault(output.request_id, now)
                if output.finished:
                    ends[output.request_id] = now
            steps.append((now, count))
        return [Row(arrival.t, firsts[name], ends[name]) for name, arrival in names.items()], steps

    def _add(self, arrival: Arrival) -> str:
        self._count += 1
        prompt = {"prompt_token_ids": [self._draw.randrange(10, 1000) for _ in range(arrival.prompt_tokens)]}
        self.engine.add_request(str(self._count), prompt, self._params(arrival.output_tokens))
        return str(self._count)

    def can(self, lengths: Lengths, wide: int) -> Capacity:
        """What it does when it does only that."""

        def at_once(count: int, output: int) -> tuple[float, float]:
            """When all had been read, and tokens/s after that."""
            rows, steps = self.serve(Trace("alone", (Arrival(0.0, lengths.prompt, output),) * count, 1.0))
            read_s, end = max(row.first for row in rows), max(row.end for row in rows)
            return read_s, sum(tokens for moment, tokens in steps if moment > read_s) / max(end - read_s, 1e-9)

        return Capacity(
            prefill_tokens_s=round(_N_PROMPTS * lengths.prompt / at_once(_N_PROMPTS, 1)[0], 1),
            decode_tokens_s=round(at_once(wide, lengths.output)[1], 1),
            max_running=wide,
            stream_tokens_s=round(at_once(1, lengths.output)[1], 1),
        )


def _name_vllm() -> None:
    """vLLM asks for its own version, and vllm-cpu has another name."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        folder = Path(tempfile.mkdtemp()) / "vllm.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {metadata.version('vllm-cpu')}+cpu\n"
        (folder / "METADATA").write_text(text)
        sys.path.append(str(folder.parent))


def recorded(options: argparse.Namespace) -> Replica:
    lengths, engine = Lengths(options.prompt, options.output), Engine(options)
    engine.can(lengths, options.max_running)  # first steps compile and allocate
    before = engine.can(lengths, options.max_running)
    print(before, file=sys.stderr, flush=True)
    work_s = lengths.prompt / before.prefill_tokens_s + lengths.output / before.decode_tokens_s
    replica = Replica(options.name, before, lengths, options.ttft_s, ())
    for name, shape in SHAPES.items():
        levels = tuple((until * options.slow, round(share / work_s, 3)) for until, share in shape)
        trace = arrivals(levels, lengths, name)
        rows, steps = engine.serve(trace)
        point = Point(name, levels, measured(rows, steps, trace.duration_s, options.ttft_s))
        replica = msgspec.structs.replace(replica, points=(*replica.points, point))
        options.out.write_text(yaml.safe_dump([msgspec.to_builtins(replica)], sort_keys=False))
    print(engine.can(lengths, options.max_running), file=sys.stderr, flush=True)
    return replica


def measured(rows: Sequence[Row], steps: Sequence[tuple[float, int]], load_s: float, ttft_s: float) -> Measured:
    busy_s = sum(max(0.0, min(load_s, row.end) - row.arrived) for row in rows)
    tokens = sum(count for moment, count in steps if moment <= load_s)
    return figures([(row.arrived, row.first) for row in rows], load_s, ttft_s, tokens, busy_s / load_s)


# ---- the comparison --------------------------------------------------------------------------------------------------


def compared(replicas: Sequence[Replica]) -> str:
    lines = ["| replica | load | | measured | simulated | ratio |", "|---|---|---|---|---|---|"]
    for replica in replicas:
        for point in replica.points:
            found = simulated(replica, point)
            for name in Measured.__struct_fields__[1:]:
                real, ours = getattr(point.measured, name), getattr(found, name)
                ratio = f"{ours / real:.2f}" if real else "-"
                lines.append(f"| {replica.name} | {point.name} | {name} | {real} | {ours} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    options = _options()
    if options.record is not None:
        print(compared([recorded(options)]))
        return
    print("| closed loop | requests/s | simulated | ratio |\n|---|---|---|---|")
    for loop in loops():
        ours = looped(loop)
        print(f"| {loop.name} | {loop.requests_s:.2f} | {ours:.2f} | {ours / loop.requests_s:.2f} |")
    print(f"\n{compared(points())}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", metavar="FOLDER", help="of a model")
    parser.add_argument("--name", default="replica")
    parser.add_argument("--dummy", action="store_true", help="weights of chance; the folder needs config.json alone")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=Lengths().prompt)
    parser.add_argument("--output", type=int, default=Lengths().output)
    parser.add_argument("--ttft-s", type=float, default=TTFT_S)
    parser.add_argument("--slow", type=float, default=1.0, help="so many times as long")
    parser.add_argument("--engine", default="{}", metavar="JSON", help="more arguments of vllm.LLM")
    parser.add_argument("--out", type=Path, default=Path("replica_points.yaml"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
