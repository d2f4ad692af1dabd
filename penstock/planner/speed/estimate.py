"""How fast: time to first token, time per token, throughput, each low / likely / high. From bytes, FLOPs and messages.

One step:
    step = max(bytes / (me x bandwidth), flops / (fe x peak)) + collectives + layers x overhead + a fixed part
Closed loop at concurrency C over dp data ranks: B = C / dp requests run. Most steps only decode; in `output` steps
B - 1 prompts of others are read, and everyone waits for them; of p a step on average, 1 - exp(-p) steps have one:
    TPOT = (1 - share) x step(B) + share x step(B and prompts)
    TTFT = c + steps waited for + prefill(input) x (1 + queue), and with all others at once + half of their prefills
Equally long requests (`rounds`) begin as a wave, are read in groups that share a step, and end a step apart: then
arrivals follow departures, and a group waits for the one before it and no longer for all.
docs/measurements/plan-speed.md has the source of each constant, and compares with every published point we know.
Without calibration all ranges are wide on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from penstock.hardware.catalog import GpuFacts
from penstock.planner.engine_versions import NEWEST, profile
from penstock.planner.ranges import ZERO, Range, highest, total
from penstock.planner.speed import work as work_
from penstock.planner.speed.collectives import Fabric, all_to_all_us, allreduce_us, n_boundaries_between_nodes, send_us
from penstock.planner.speed.work import Step, StepCosts
from penstock.spec.deployment import Parallel, Workload

WIDE_SPREAD = (0.75, 1.3)


class Constants(msgspec.Struct, frozen=True):
    """What a GPU generation and an engine version add to bytes and FLOPs. Calibration replaces them.

    memory_efficiency, compute_efficiency: shares of nominal bandwidth and dense peak. dense_layer_us, moe_layer_us:
    kernel starts and tails of one layer at `full_width` hidden and over; below it shrinks, to `narrow_share` at least.
    mla_layer_us comes on top where attention is MLA. expert_compute: experts' rate against dense matrices'.
    long_*_us: the same in a step of more tokens than CUDA graphs are captured for (512): the CPU starts each kernel.
    step_us: scheduler and sampler, once a step. ttft_fixed_ms: c; ttft_prefill: a factor of prefill; wait_steps: steps
    waited for; wave_share: how much of a benchmark comes at once (the first of ten prompts a client, and what stays
    together after it). is_captured: decode runs in CUDA graphs. spread: low and high as factors of the likely time.
    """

    memory_efficiency: float = 0.86
    compute_efficiency: float = 0.58
    dense_layer_us: float = 54.0
    moe_layer_us: float = 62.0
    full_width: int = 8192
    narrow_share: float = 0.63
    long_dense_layer_us: float = 100.0
    long_moe_layer_us: float = 180.0
    long_state_us: float = 600.0
    mla_layer_us: float = 0.0
    step_us: float = 300.0
    expert_compute: float = 0.4
    quantised_compute: float = 1.0
    ttft_fixed_ms: float = 37.0
    ttft_prefill: float = 1.0
    wave_share: float = 0.14
    wait_steps: float = 2.5
    is_captured: bool = True
    spread: tuple[float, float] = WIDE_SPREAD


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a benchmark of this very deployment measured; None where it did not. `bench.calibrate.fit` makes it."""

    memory_efficiency: float | None = None
    compute_efficiency: float | None = None
    dense_layer_us: float | None = None
    moe_layer_us: float | None = None
    step_us: float | None = None
    ttft_fixed_ms: float | None = None
    ttft_prefill: float | None = None
    wave_share: float | None = None
    spread: tuple[float, float] | None = None
    source: str = "penstock bench"


class Engine(msgspec.Struct, frozen=True):
    """How the engine runs, as far as speed knows. `max_running`: what KV cache and max_num_seqs let run at once on one
    data rank (None: the workload's concurrency fits)."""

    version: str = NEWEST
    is_eager: bool = False
    cache_dtype_bytes: float = 2.0
    max_num_batched_tokens: int = 8192
    max_running: int | None = None


class Speed(msgspec.Struct, frozen=True):
    """Means at the asked prompt, output and concurrency, over all data ranks. `comm_ms`: likely, of a decode step.
    `ttft_steady_ms`: of a request that comes by itself, a benchmark's median where lengths vary."""

    ttft_ms: Range
    tpot_ms: Range
    output_tokens_per_s: Range
    requests_per_s: Range
    comm_ms: float = 0.0
    ttft_steady_ms: Range = ZERO


# By GPU generation: Hopper and Blackwell are fitted (plan-speed.md), the others are estimates from Hopper.
_GENERATION: Mapping[str, Constants] = {
    "hopper": Constants(compute_efficiency=0.67, expert_compute=0.35, quantised_compute=0.87),
    "blackwell": Constants(memory_efficiency=0.75, compute_efficiency=0.6, dense_layer_us=42.0),
    "ampere": Constants(memory_efficiency=0.82, compute_efficiency=0.55),
    "ada": Constants(memory_efficiency=0.85, compute_efficiency=0.5),
    "volta": Constants(memory_efficiency=0.8, compute_efficiency=0.5),
    "turing": Constants(memory_efficiency=0.8, compute_efficiency=0.45),
}
_UNKNOWN = Constants(memory_efficiency=0.7, compute_efficiency=0.4, spread=(0.65, 1.6))
_CALIBRATED_SPREAD = (0.9, 1.12)
_EAGER_LAYER_US = 350.0  # without CUDA graphs the CPU starts every kernel
_CAPTURED_TOKENS = 512  # the largest batch that has a CUDA graph: config/vllm.py, min(2 x max_num_seqs, 512)
_WIDTHLESS_SHARE = 0.2  # of a dense layer's overhead, by the slope between 8192 and 5120
_MOST_CHUNKS = 256
# What kernels that unpack four bits reach of the others' bandwidth, reading the few experts that a step chose.
_EXPERT_MEMORY: Mapping[str, float] = {"int4": 0.6, "awq": 0.6, "gptq": 0.6}
_ALONE = 0.78  # of c, what a lone request does not pay
# A prompt beside running requests shares its steps with their decodes, and is cut where another has filled the budget.
_BESIDE = 0.4
# The longest queue of prompts that is believed, in prompts: beyond it requests wait for each other and not at random.
_MOST_QUEUE = 1.0
_PEAK_BY_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("fp8", "bf16", "fp16"),
    "fp8-block": ("fp8", "bf16", "fp16"),
    "int8": ("int8", "bf16", "fp16"),
    "nvfp4": ("fp4", "bf16", "fp16"),
}


def constants(gpu: GpuFacts, engine: Engine, calibration: Calibration | None = None) -> Constants:
    """The constants for this card and engine; measured ones win, and make the ranges narrow."""
    known, rules = _GENERATION.get(gpu.generation, _UNKNOWN), profile(engine.version)
    known = msgspec.structs.replace(
        known,
        step_us=rules.step_us,
        wait_steps=rules.wait_steps,
        moe_layer_us=max(known.moe_layer_us, rules.least_moe_layer_us),
        mla_layer_us=rules.mla_layer_us,
    )
    if engine.is_eager:
        known = msgspec.structs.replace(
            known,
            dense_layer_us=_EAGER_LAYER_US,
            moe_layer_us=_EAGER_LAYER_US * 1.5,
            long_dense_layer_us=_EAGER_LAYER_US,
            long_moe_layer_us=_EAGER_LAYER_US * 1.5,
            narrow_share=1.0,
            is_captured=False,
        )
    if calibration is None:
        return known
    measured = {
        name: value
        for name in calibration.__struct_fields__
        if name != "source" and (value := getattr(calibration, name)) is not None
    }
    narrow = {"spread": _CALIBRATED_SPREAD} if measured else {}
    return msgspec.structs.replace(known, **{**narrow, **measured})


def layer_us(known: Constants, hidden: int, *, is_moe: bool) -> float:
    """Overhead of one layer; narrow dense models finish the same kernels sooner.
    Hopper, dense: 54 us at 8192 hidden, 38 at 5120, 34 at 4096 and below."""
    if is_moe:
        return known.moe_layer_us
    share = _WIDTHLESS_SHARE + (1 - _WIDTHLESS_SHARE) * hidden / known.full_width
    return known.dense_layer_us * min(1.0, max(known.narrow_share, share))


def overhead_us(known: Constants, work: StepCosts, n_tokens: float) -> float:
    """All layers' overhead and the fixed part of a step. Beyond the captured sizes it pays the CPU's kernel starts."""
    n_moe = work.n_moe_layers
    n_dense = work.n_layers - n_moe
    if n_tokens <= _CAPTURED_TOKENS:
        dense, moe, state = layer_us(known, work.hidden, is_moe=False), layer_us(known, work.hidden, is_moe=True), 0.0
    else:
        dense, moe, state = known.long_dense_layer_us, known.long_moe_layer_us, known.long_state_us
    every = work.n_state_layers * state + work.n_mla_layers * known.mla_layer_us
    return n_dense * dense + n_moe * moe + every + known.step_us


def peak_tflops(gpu: GpuFacts, weight_kind: str | None) -> float:
    """Dense TFLOPS at which the weight matrices are multiplied. Weight-only formats (AWQ, GPTQ, MXFP4) use bf16."""
    rates = gpu.dense_tflops
    for name in _PEAK_BY_WEIGHTS.get(weight_kind or "", ("bf16", "fp16")):
        rate: float | None = getattr(rates, name)
        if rate:
            return rate
    return rates.fp16


class StepTime(msgspec.Struct, frozen=True):
    """Milliseconds of one pass through all layers (all pipeline stages one after the other)."""

    memory_ms: float
    compute_ms: float
    comm_ms: Range
    overhead_ms: float

    @property
    def likely_ms(self) -> float:
        return max(self.memory_ms, self.compute_ms) + self.comm_ms.likely + self.overhead_ms

    def spread(self, factors: tuple[float, float]) -> Range:
        own = max(self.memory_ms, self.compute_ms) + self.overhead_ms
        return Range(own * factors[0] + self.comm_ms.low, self.likely_ms, own * factors[1] + self.comm_ms.high)


def step_time(
    work: StepCosts, layout: Parallel, fabric: Fabric, step: Step, engine: Engine, known: Constants
) -> StepTime:
    """One step on one data rank through every stage. With pp stages `step` is one of the pp batches in flight."""
    gpu = fabric.gpu
    experts = work_.expert_bytes_read(work, layout, step.n_tokens)
    read = work_.weight_bytes_read(work, layout, step.n_tokens) - experts
    read += work_.cache_bytes_read(work, layout, step, engine.cache_dtype_bytes)
    read += experts / _EXPERT_MEMORY.get(work.weight_kind or "", 1.0)
    plain, quantised = peak_tflops(gpu, None), peak_tflops(gpu, work.weight_kind)
    flops = work_.linear_flops(work, layout, step)
    formatted = flops.quantised / known.quantised_compute + flops.experts / known.expert_compute
    linear = flops.plain / plain + formatted / quantised
    attention = work_.attention_flops(work, layout, step) / plain
    # Uneven stages: all wait for the fullest one.
    uneven = math.ceil(work.n_layers / layout.pipeline) * layout.pipeline / work.n_layers
    return StepTime(
        memory_ms=uneven * read / (known.memory_efficiency * gpu.mem_bw_gbs * 1e9) * 1e3,
        compute_ms=uneven * (linear + attention) / (known.compute_efficiency * 1e12) * 1e3,
        comm_ms=comm_ms(
            work, layout, fabric, step.n_tokens, is_captured=known.is_captured and step.n_tokens <= _CAPTURED_TOKENS
        ),
        overhead_ms=overhead_us(known, work, step.n_tokens) / 1e3,
    )


def comm_ms(work: StepCosts, layout: Parallel, fabric: Fabric, n_tokens: float, *, is_captured: bool = True) -> Range:
    """Collectives of one step, in milliseconds: TP all-reduces, expert dispatch and combine, pipeline sends."""
    message = n_tokens * work.hidden * work.dtype_bytes
    waits = []
    if layout.tensor > 1:
        n_groups = layout.pipeline * layout.data
        each = allreduce_us(fabric, layout.tensor, message, n_groups, is_captured=is_captured)
        waits.append(each * work.n_allreduces)
    group = layout.tensor * layout.data
    if work.n_moe_layers and group > 1 and layout.data > 1:
        # Dispatch and combine: every token goes to the ranks of its experts, at most one copy a rank.
        copies = min(max(layer.top_k for layer, _ in work.layers), group)
        each = all_to_all_us(fabric, group, message * copies / layout.tensor, is_captured=is_captured)
        waits.append(each * (2 * work.n_moe_layers))
    between = n_boundaries_between_nodes(fabric, layout.tensor, layout.pipeline)
    for count, crosses in ((between, True), (layout.pipeline - 1 - between, False)):
        if count:
            waits.append(send_us(fabric, message / layout.tensor, is_between_nodes=crosses) * count)
    return total(waits) * 1e-3


def prefill_time(
    work: StepCosts, layout: Parallel, fabric: Fabric, n_tokens: int, engine: Engine, known: Constants
) -> Range:
    """One prompt alone, in ms, in chunks of max_num_batched_tokens. Of very many chunks some stand for all."""
    chunks = _chunks(n_tokens, engine.max_num_batched_tokens)
    every = math.ceil(len(chunks) / _MOST_CHUNKS)
    times = []
    for at in range(0, len(chunks), every):
        among = chunks[at : at + every]
        done, chunk = among[len(among) // 2]
        time = step_time(work, layout, fabric, Step(0, chunk, 0, done + chunk / 2), engine, known)
        times.append(time.spread(known.spread) * len(among))
    return total(times)


def estimate(
    work: StepCosts,
    layout: Parallel,
    fabric: Fabric,
    workload: Workload,
    engine: Engine | None = None,
    calibration: Calibration | None = None,
    rounds: float | None = None,
) -> Speed:
    """TTFT, TPOT and throughput of a closed loop with `workload.concurrency` requests always asked for.
    When fewer can run at once, the rest waits: TTFT grows by the wait, TPOT does not.
    `rounds`: requests are equally long, so many for each of `concurrency`; None: lengths vary."""
    engine = engine or Engine()
    known = constants(fabric.gpu, engine, calibration)
    asked = max(1.0, workload.concurrency / layout.data)
    running = asked if engine.max_running is None else max(1.0, min(asked, float(engine.max_running)))
    loop = _Loop(work, layout, fabric, workload, engine, known, running)
    decode, tpot = _tpot(loop)
    busy = 1 - decode.likely_ms / tpot.likely
    ttft, steady, wave = _ttft(loop, decode.likely_ms, busy)
    if rounds is not None:
        ttft, tpot = _in_rounds(loop, max(1.0, rounds), decode, wave)
    served = ttft + tpot * max(0, workload.output_tokens - 1)
    waiting = asked / running - 1
    if waiting > 0:
        ttft = ttft + served * waiting
    n_all = 1e3 * running * layout.data
    per_s = Range(n_all / served.high, n_all / served.likely, n_all / served.low)
    return Speed(
        ttft_ms=ttft,
        tpot_ms=tpot,
        output_tokens_per_s=per_s * workload.output_tokens,
        requests_per_s=per_s,
        comm_ms=decode.comm_ms.likely,
        ttft_steady_ms=steady,
    )


class _Loop(msgspec.Struct, frozen=True):
    work: StepCosts
    layout: Parallel
    fabric: Fabric
    workload: Workload
    engine: Engine
    known: Constants
    running: float

    def step(self, step: Step) -> StepTime:
        return step_time(self.work, self.layout, self.fabric, step, self.engine, self.known)

    def prefill(self, n_tokens: int) -> Range:
        return prefill_time(self.work, self.layout, self.fabric, n_tokens, self.engine, self.known)

    def fixed(self, decode_ms: float) -> Range:
        """What a first token takes besides prompts: c, and the steps under way."""
        known, crowd = self.known, 1 - 1 / self.running**2
        fixed_ms = known.ttft_fixed_ms * (1 - _ALONE / math.sqrt(self.running)) + known.wait_steps * decode_ms * crowd
        return Range(fixed_ms * known.spread[0], fixed_ms, fixed_ms * known.spread[1])


def _tpot(loop: _Loop) -> tuple[StepTime, Range]:
    """(a step that only decodes, the mean step); with pp stages pp batches share the requests."""
    workload, pipeline, spread = loop.workload, loop.layout.pipeline, loop.known.spread
    n_decodes = max(1.0, loop.running / pipeline)
    context = workload.input_tokens + workload.output_tokens / 2
    decode = loop.step(Step(n_decodes, 0, context, 0))
    others = (loop.running - 1) / pipeline
    share, tokens = _mixing(others, workload, loop.engine.max_num_batched_tokens)
    mixed = loop.step(Step(n_decodes, tokens, context, workload.input_tokens / 2)).spread(spread)
    return decode, decode.spread(spread) * max(0.0, 1 - share) + mixed * share


def _mixing(n_others: float, workload: Workload, most: int) -> tuple[float, float]:
    """(share of the steps that read others' prompts too, prompt tokens in each of them).
    p = others / output prompts a step, at random: 1 - exp(-p) of the steps have one. 17 at once, 1000 in, 200 out:
    0.077 of the steps, 1,040 tokens each. Over 1: more steps than tokens are needed."""
    prompts = n_others / max(1, workload.output_tokens)
    tokens = prompts * workload.input_tokens
    if not tokens:
        return 0.0, 0.0
    share = max(1 - math.exp(-prompts * len(_chunks(workload.input_tokens, most))), tokens / most)
    return share, tokens / share


def _chunks(n_tokens: int, most: int) -> list[tuple[int, int]]:
    """(tokens before it, tokens in it) of each chunk of a prompt: 10_000 by 8192 -> (0, 8192), (8192, 1808)."""
    return [(done, min(most, n_tokens - done)) for done in range(0, n_tokens, most)]


def _ttft(loop: _Loop, decode_ms: float, busy: float) -> tuple[Range, Range, Range]:
    """(mean of a benchmark, median when requests come by themselves, mean when all come at once).
    By itself: c, the prompt, a queue of other prompts that is busy a share p of the time (p / 2(1 - p) of a prompt),
    the steps under way. All at once: half of the others' prompts are read first, as many in a step as fit."""
    running, known, n_tokens = loop.running, loop.known, loop.workload.input_tokens
    crowd = 1 - 1 / running**2
    fixed = loop.fixed(decode_ms)
    queue = known.ttft_prefill * (1 + _BESIDE * crowd + min(_MOST_QUEUE, busy / (2 * (1 - min(busy, 0.99)))))
    # Prompts that share a step share its fixed part.
    n_each = max(1.0, min(running, loop.engine.max_num_batched_tokens / n_tokens))
    n_before = max(0.0, (running / loop.layout.pipeline - 1) / 2 / n_each)
    alone, shared = loop.prefill(n_tokens), loop.prefill(round(n_each * n_tokens))
    steady = fixed + alone * queue
    wave = highest([steady, fixed + (alone + shared * n_before) * known.ttft_prefill])
    mean = wave * known.wave_share + steady * (1 - known.wave_share)
    # The low end: nobody comes at the same time as another.
    return Range(steady.low, mean.likely, mean.high), steady, wave


def _in_rounds(loop: _Loop, rounds: float, decode: StepTime, wave: Range) -> tuple[Range, Range]:
    """(mean TTFT, mean TPOT) of equally long requests: the first round is a wave, later ones follow departures.
    A round's prompts are read in B x input / room steps, in n groups that share one (a long prompt has its own steps).
    Later a group waits for the one before it, with its own 2 - 1 / n groups, or for what is left when a round's prompts
    take more steps than replies have tokens. It decodes while the groups after it are read, (n - 1) / 2 on average, and
    the first of the next round, (n - 2)(n - 3) / 2n, which the last round does not have.
    70B on 4 H200, 64 at once, 1024 in, 128 out: 8 groups, 2.3 s in the first round, 1.1 s in later ones."""
    workload, spread = loop.workload, loop.known.spread
    n_decodes = max(1.0, loop.running / loop.layout.pipeline)
    room = max(1.0, loop.engine.max_num_batched_tokens - n_decodes)
    n_steps, n_own = n_decodes * workload.input_tokens / room, max(1.0, workload.input_tokens / room)
    n_groups = max(1.0, n_steps / n_own)
    tokens, context = min(room, n_decodes * workload.input_tokens), workload.input_tokens + workload.output_tokens / 2
    mixed = loop.step(Step(n_decodes, tokens, context, workload.input_tokens / 2)).spread(spread)
    n_waited = max(n_own * (2 - 1 / n_groups), n_steps - workload.output_tokens)
    follower = loop.fixed(decode.likely_ms) + mixed * n_waited
    later = wave if n_groups == 1 else follower
    others = 1 - 1 / rounds  # of the rounds: later than the first, or before the last
    n_of_next = max(0.0, n_groups - 2) * max(0.0, n_groups - 3) / (2 * n_groups)
    n_met = (n_groups - 1) / 2 + n_of_next * others
    share = min(1.0, n_met * n_own / workload.output_tokens)
    return wave * (1 - others) + later * others, decode.spread(spread) * (1 - share) + mixed * share
