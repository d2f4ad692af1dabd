"""How fast: time to first token, time per token, throughput, each low / likely / high. From bytes, FLOPs and messages.

One step:
    step = max(bytes / (me x bandwidth), flops / (fe x peak)) + collectives + layers x overhead + a fixed part
Closed loop at concurrency C over dp data ranks: B = C / dp requests run. Most steps only decode; in `output` steps
B - 1 prompts of others are read in, and everyone waits for them; of p a step on average, 1 - exp(-p) steps have one:
    TPOT = (1 - share) x step(B) + share x step(B and prompts)
    TTFT = c + steps waited for + prefill(input) x (1 + queue), and with all others at once + half of their prefills
The form and its constants were fitted on 1,328 measured vLLM points (sizing.md section 5: TPOT median error 17%, TTFT
30%, with TTFT = 37 ms + prefill x (2 + 0.07 C), of which 0.07 C is the benchmark's first wave: all C prompts at once, a
tenth of all). Constants moved where measured steps said so; each carries where it is from.
docs/measurements/plan-speed.md compares with every published point we have. Without calibration all
ranges are wide on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from penstock.hardware.catalog import GpuFacts
from penstock.planner.engine_versions import parse_version
from penstock.planner.ranges import ZERO, Range
from penstock.planner.speed import work as work_
from penstock.planner.speed.collectives import (
    COMM_EFFICIENCY as COMM_EFFICIENCY,  # one place to import every constant from
)
from penstock.planner.speed.collectives import Fabric, all_to_all_us, allreduce_us, n_boundaries_between_nodes, send_us
from penstock.planner.speed.work import Step, Work
from penstock.spec.deployment import Parallel, Workload


class Constants(msgspec.Struct, frozen=True):
    """What a GPU generation and an engine version add to bytes and FLOPs. Replaced whole or in part by calibration.

    memory_efficiency, compute_efficiency: shares of nominal bandwidth and dense peak. dense_layer_us, moe_layer_us:
    kernel starts and tails of one layer at `full_width` hidden and over; below it shrinks, to `narrow_share` at least.
    mla_layer_us comes on top where attention is MLA. expert_compute: experts' rate against dense matrices'.
    long_*_us: the same in a step of more tokens than CUDA graphs are captured for (512): the CPU starts each kernel.
    step_us: scheduler and sampler, once a step. ttft_fixed_ms: c; ttft_prefill: a factor of prefill; wait_steps: steps
    waited for; wave_share: how much of a benchmark comes at once (the first of ten prompts a client, and what stays
    together after it). is_captured: decode runs in CUDA graphs. spread: low and high as factors of the likely time.
    `source` says where they come from.
    """

    source: str
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
    ttft_fixed_ms: float = 37.0
    ttft_prefill: float = 1.0
    wave_share: float = 0.14
    wait_steps: float = 2.5
    is_captured: bool = True
    spread: tuple[float, float] = (0.75, 1.3)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a benchmark of this very deployment measured; None where it did not. `calibration.fit` makes it."""

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

    version: str = "0.33"
    is_eager: bool = False
    cache_dtype_bytes: float = 2.0
    max_num_batched_tokens: int = 8192
    max_running: int | None = None


class Speed(msgspec.Struct, frozen=True):
    """At the asked prompt, output and concurrency, over all data ranks. `n_running` on one data rank.

    `step_parts_ms` is the likely decode step by where the time goes: memory, compute, communication, overhead (of
    memory and compute only the larger counts), and "prompts": what others' prompts add to the mean step. `ttft_ms` is
    a benchmark's mean, `ttft_steady_ms` of a request that comes by itself (the median where lengths vary),
    `ttft_wave_ms` and `tpot_wave_ms` the means where all come together every time (equal lengths); none with waiting
    for a free place.
    """

    ttft_ms: Range
    tpot_ms: Range
    output_tokens_per_s: Range
    requests_per_s: Range
    n_running: float
    step_parts_ms: dict[str, float]
    ttft_steady_ms: Range = ZERO
    ttft_wave_ms: Range = ZERO
    tpot_wave_ms: Range = ZERO


_FIT = "fit on 1,328 vLLM points, sizing.md section 5"
# By GPU generation. The fit itself is Hopper and Blackwell together.
_GENERATION: Mapping[str, Constants] = {
    # Compute: the fit's 0.51 is dense layers and experts together. Qwen2.5-72B bf16 at TP 2 on H100 reads 1024 tokens
    # in 121 ms and a fixed part, 0.6 of the peak (tt-inference-server issue 143); experts are slower, 0.23 (Kimi-K2.5).
    "hopper": Constants(_FIT + "; dense compute from Qwen2.5-72B on H100, vLLM 0.8"),
    # Qwen3-32B bf16 at TP 1, 2 and 8 on one Blackwell host, vLLM 0.20.1 (aiconfigurator fpm_golden_runs; the card is
    # not named, but 4.8 TB/s at TP 1 and 1,330 TFLOPS leave only a B200's like): the slope over TP gives 0.75 of
    # 7.7 TB/s and 30 us a layer 5120 wide; prefill of 1024 and 4096 tokens 0.6 of the peak.
    "blackwell": Constants(
        _FIT + "; memory, compute and dense layers from forward passes of Qwen3-32B, vLLM 0.20.1",
        memory_efficiency=0.75,
        compute_efficiency=0.6,
        dense_layer_us=42.0,
    ),
    # Estimates: no measured points. Older memory systems reach less of their nominal rate, older tensor cores more of
    # theirs (A100: 0.8 of 2,039 GB/s in copies).
    "ampere": Constants("estimate from the Hopper fit", memory_efficiency=0.82, compute_efficiency=0.55),
    "ada": Constants("estimate from the Hopper fit", memory_efficiency=0.85, compute_efficiency=0.5),
    "volta": Constants("estimate from the Hopper fit", memory_efficiency=0.8, compute_efficiency=0.5),
    "turing": Constants("estimate from the Hopper fit", memory_efficiency=0.8, compute_efficiency=0.45),
}
_UNKNOWN = Constants(
    "estimate: an unknown generation", memory_efficiency=0.7, compute_efficiency=0.4, spread=(0.65, 1.6)
)

# Without CUDA graphs every kernel is started by the CPU. s2-20: 13B at TP 1 took 35.5 ms a step where bytes need 20.4:
# 15 ms / 40 layers = 375 us; with 350 the TP 2 and TP 4 rows of the same table come out too.
_EAGER_LAYER_US = 350.0
# The largest batch that has a CUDA graph: config/vllm.py, min(2 x max_num_seqs, 512).
_CAPTURED_TOKENS = 512
# Of a dense layer's overhead, what would be left without any width by the slope between 8192 and 5120.
_WIDTHLESS_SHARE = 0.2
_MOST_CHUNKS = 256
# vLLM had no CUDA graphs before 0.2.6 (release notes).
_FIRST_WITH_GRAPHS = (0, 2, 6)
# The fixed part by engine generation: V0's scheduler ran between the steps (to 0.7), V1 runs it in another process, and
# async scheduling (default since 0.14) overlaps it. Estimates; the fit is on versions with async scheduling.
_STEP_US: tuple[tuple[tuple[int, int], float], ...] = (((0, 8), 2500.0), ((0, 14), 900.0))

# Before mixtures' small kernels were fused: DeepSeek-R1 on eight H200 with vLLM 0.10 took 15.9 ms a step alone, where
# Kimi-K2.5, as deep, takes 11 with four times the tokens on 0.20. How it divides into experts and MLA is an estimate.
_FIRST_FUSED = (0, 12)
_UNFUSED_MOE_US, _UNFUSED_MLA_US = 105.0, 75.0

# What kernels that unpack four bits reach of the others' bandwidth, reading the few experts that a step chose.
# Kimi-K2.5 with int4 experts at TP 8 on B200 and H200, InferenceX, vLLM 0.17 to 0.20.
_EXPERT_MEMORY: Mapping[str, float] = {"int4": 0.6, "awq": 0.6, "gptq": 0.6}

# c of a lone request is 8 ms of 37: Llama-3.1-8B on H100 14.0 ms to the first of its 6.5 ms tokens (yobitelcomm/bench).
_ALONE = 0.78
# A prompt that is read in beside running requests shares its steps with their decodes and is cut where another prompt
# has filled the step's budget. The 1,328-point fit has 2 + 0.07 C prefills in all (2.3 at four requests), of which
# queue and wave explain 1.3: the rest, rounded down, since the fit's prefill had no kernel starts of long steps in it.
_BESIDE = 0.4
# The longest queue of prompts that is believed, in prompts: beyond it requests wait for each other and not at random.
_MOST_QUEUE = 1.0

# Steps that a first token waits for beside its own: half of the one under way and the one that is scheduled already;
# with async scheduling (default since 0.14) also the one during which its token is handed out.
_FIRST_ASYNC = (0, 14)
_WAIT_STEPS_BEFORE = 1.5

_PEAK_BY_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("fp8", "bf16", "fp16"),
    "fp8-block": ("fp8", "bf16", "fp16"),
    "int8": ("int8", "bf16", "fp16"),
    "nvfp4": ("fp4", "bf16", "fp16"),
}


def constants(gpu: GpuFacts, engine: Engine, calibration: Calibration | None = None) -> Constants:
    """The constants for this card and engine; measured ones win, and make the ranges narrow."""
    found = _GENERATION.get(gpu.generation, _UNKNOWN)
    version = parse_version(engine.version)
    step_us = next((us for before, us in _STEP_US if version < before), found.step_us)
    wait_steps = found.wait_steps if version >= _FIRST_ASYNC else _WAIT_STEPS_BEFORE
    found = msgspec.structs.replace(found, step_us=step_us, wait_steps=wait_steps)
    if version < _FIRST_FUSED:
        found = msgspec.structs.replace(
            found, moe_layer_us=max(found.moe_layer_us, _UNFUSED_MOE_US), mla_layer_us=_UNFUSED_MLA_US
        )
    if engine.is_eager or version < _FIRST_WITH_GRAPHS:
        found = msgspec.structs.replace(
            found,
            dense_layer_us=_EAGER_LAYER_US,
            moe_layer_us=_EAGER_LAYER_US * 1.5,
            long_dense_layer_us=_EAGER_LAYER_US,
            long_moe_layer_us=_EAGER_LAYER_US * 1.5,
            narrow_share=1.0,
            is_captured=False,
            source=found.source + "; without CUDA graphs",
        )
    if calibration is None:
        return found
    measured = {
        name: value
        for name in calibration.__struct_fields__
        if name != "source" and (value := getattr(calibration, name)) is not None
    }
    narrow = {"spread": (0.9, 1.12), "source": calibration.source} if measured else {}
    return msgspec.structs.replace(found, **{**narrow, **measured})


def layer_us(known: Constants, hidden: int, *, is_moe: bool) -> float:
    """Overhead of one layer: in full at 8192 hidden, narrower models start the same kernels but finish them sooner.

    Hopper, dense: 54 us at 8192, 38 at 5120, 34 at 4096 and below: starting kernels takes what it takes (Qwen3-0.6B, 28
    layers 1024 wide, 1.72 ms a token on our H200, of which its bytes are 0.3). A mixture's kernels are many and small
    at any width: 62 us (Qwen3.6-35B-A3B, 2048 wide, on one Blackwell: 65 measured).
    """
    if is_moe:
        return known.moe_layer_us
    share = _WIDTHLESS_SHARE + (1 - _WIDTHLESS_SHARE) * hidden / known.full_width
    return known.dense_layer_us * min(1.0, max(known.narrow_share, share))


def overhead_us(known: Constants, work: Work, n_tokens: float) -> float:
    """All layers' overhead and the fixed part of a step. Beyond the captured sizes it pays the CPU's kernel starts.

    Measured on Blackwell: Qwen3-32B 6 ms of 64 layers at 1024 tokens whatever TP, Qwen3.6-35B-A3B (30 of 40 layers with
    GDN states) 28 ms.
    """
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
        """The step as a range: the machine's own part times `factors`, communication by its own bounds."""
        own = max(self.memory_ms, self.compute_ms) + self.overhead_ms
        return Range(own * factors[0] + self.comm_ms.low, self.likely_ms, own * factors[1] + self.comm_ms.high)


def step_time(work: Work, layout: Parallel, fabric: Fabric, step: Step, engine: Engine, known: Constants) -> StepTime:
    """One step on one data rank through every stage. With pp stages `step` is one of the pp batches in flight."""
    gpu = fabric.gpu
    experts = work_.expert_bytes_read(work, layout, step.n_tokens)
    read = work_.weight_bytes_read(work, layout, step.n_tokens) - experts
    read += work_.cache_bytes_read(work, layout, step, engine.cache_dtype_bytes)
    read += experts / _EXPERT_MEMORY.get(work.weight_kind or "", 1.0)
    plain, quantised = peak_tflops(gpu, None), peak_tflops(gpu, work.weight_kind)
    flops = work_.linear_flops(work, layout, step)
    linear = flops.plain / plain + (flops.quantised + flops.experts / known.expert_compute) / quantised
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


def comm_ms(work: Work, layout: Parallel, fabric: Fabric, n_tokens: float, *, is_captured: bool = True) -> Range:
    """Collectives of one step, in milliseconds: TP all-reduces, expert dispatch and combine, pipeline sends."""
    message = n_tokens * work.hidden * work.dtype_bytes
    low = likely = high = 0.0
    if layout.tensor > 1:
        one = allreduce_us(fabric, layout.tensor, message, layout.pipeline * layout.data, is_captured=is_captured)
        low, likely, high = (us * work.n_allreduces for us in (one.low, one.likely, one.high))
    group = layout.tensor * layout.data
    if work.n_moe_layers and group > 1 and layout.data > 1:
        # Dispatch and combine: every token goes to the ranks of its experts, at most one copy a rank.
        copies = min(max(layer.top_k for layer, _ in work.layers), group)
        one = all_to_all_us(fabric, group, message * copies / layout.tensor, is_captured=is_captured)
        count = 2 * work.n_moe_layers
        low, likely, high = low + one.low * count, likely + one.likely * count, high + one.high * count
    between = n_boundaries_between_nodes(fabric, layout.tensor, layout.pipeline)
    for count, crosses in ((between, True), (layout.pipeline - 1 - between, False)):
        if count:
            one = send_us(fabric, message / layout.tensor, is_between_nodes=crosses)
            low, likely, high = low + one.low * count, likely + one.likely * count, high + one.high * count
    return Range(low / 1e3, likely / 1e3, high / 1e3)


def prefill_time(
    work: Work, layout: Parallel, fabric: Fabric, n_tokens: int, engine: Engine, known: Constants
) -> Range:
    """One prompt alone, in ms, in chunks of max_num_batched_tokens. Of very many chunks some stand for all."""
    total = [0.0, 0.0, 0.0]
    chunks = _chunks(n_tokens, engine.max_num_batched_tokens)
    every = math.ceil(len(chunks) / _MOST_CHUNKS)
    for at in range(0, len(chunks), every):
        among = chunks[at : at + every]
        done, chunk = among[len(among) // 2]
        one = step_time(work, layout, fabric, Step(0, chunk, 0, done + chunk / 2), engine, known)
        total = [have + len(among) * more for have, more in zip(total, _values(one.spread(known.spread)), strict=True)]
    return Range(*total)


def estimate(
    work: Work,
    layout: Parallel,
    fabric: Fabric,
    workload: Workload,
    engine: Engine | None = None,
    calibration: Calibration | None = None,
) -> Speed:
    """TTFT, TPOT and throughput of a closed loop with `workload.concurrency` requests always asked for.

    When fewer can run at once than are asked for, the rest waits: TTFT grows by the wait, TPOT does not.
    """
    engine = engine or Engine()
    known = constants(fabric.gpu, engine, calibration)
    asked = max(1.0, workload.concurrency / layout.data)
    running = asked if engine.max_running is None else max(1.0, min(asked, float(engine.max_running)))
    loop = _Loop(work, layout, fabric, workload, engine, known, running)
    decode, tpot = _tpot(loop)
    busy = 1 - decode.likely_ms / tpot.likely
    ttft, steady, wave = _ttft(loop, decode.likely_ms, busy)
    last = max(0, workload.output_tokens - 1)
    served = Range(*(t + last * p for t, p in zip(_values(ttft), _values(tpot), strict=True)))
    waiting = asked / running - 1
    if waiting > 0:
        ttft = Range(*(t + waiting * s for t, s in zip(_values(ttft), _values(served), strict=True)))
    per_s = Range(*(1e3 * running * layout.data / ms for ms in reversed(_values(served))))
    return Speed(
        ttft_ms=ttft,
        tpot_ms=tpot,
        output_tokens_per_s=Range(*(rate * workload.output_tokens for rate in _values(per_s))),
        requests_per_s=per_s,
        n_running=running,
        step_parts_ms={
            "memory": decode.memory_ms,
            "compute": decode.compute_ms,
            "communication": decode.comm_ms.likely,
            "overhead": decode.overhead_ms,
            "prompts": tpot.likely - decode.likely_ms,
        },
        ttft_steady_ms=steady,
        ttft_wave_ms=wave,
        # In a wave the prompts come one after the other before anybody's end: who had its first token early waits for
        # all the others', who had it last for none; half of them on average.
        tpot_wave_ms=(tpot + decode.spread(known.spread)) * 0.5,
    )


class _Loop(msgspec.Struct, frozen=True):
    """A closed loop with everything that times depend on; `running` requests at once on one data rank."""

    work: Work
    layout: Parallel
    fabric: Fabric
    workload: Workload
    engine: Engine
    known: Constants
    running: float

    def step(self, step: Step) -> StepTime:
        return step_time(self.work, self.layout, self.fabric, step, self.engine, self.known)

    def prefill(self, n_tokens: int) -> tuple[float, float, float]:
        return _values(prefill_time(self.work, self.layout, self.fabric, n_tokens, self.engine, self.known))


def _tpot(loop: _Loop) -> tuple[StepTime, Range]:
    """(a step that only decodes, the mean step). With pp stages pp batches are in flight, each with its share of the
    requests: a token passes all stages, and no stage idles when there are at least pp requests."""
    workload, pipeline, spread = loop.workload, loop.layout.pipeline, loop.known.spread
    n_decodes = max(1.0, loop.running / pipeline)
    context = workload.input_tokens + workload.output_tokens / 2
    decode = loop.step(Step(n_decodes, 0, context, 0))
    others = (loop.running - 1) / pipeline
    share, tokens = _mixing(others, workload, loop.engine.max_num_batched_tokens)
    mixed = loop.step(Step(n_decodes, tokens, context, workload.input_tokens / 2)).spread(spread)
    alone = decode.spread(spread)
    mean = (max(0.0, 1 - share) * a + share * m for a, m in zip(_values(alone), _values(mixed), strict=True))
    return decode, Range(*mean)


def _mixing(n_others: float, workload: Workload, most: int) -> tuple[float, float]:
    """(share of the steps that read others' prompts too, prompt tokens in each of them).

    Who ends is followed at once by a new prompt: p = others / output of them a step, at random, so 1 - exp(-p) of the
    steps have one or more. 17 at once, 1000 in, 200 out: p = 0.08, 0.077 of the steps, 1,040 tokens each. Alone nobody
    else's prompt is waited for. Over 1: more steps than tokens are needed.
    """
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

    By itself: c, the prompt, other prompts before it (a queue that is busy a share p of the time: p / 2(1 - p) of a
    prompt), and the steps under way: on the average half of one, and the one that is already scheduled. All at once: on
    the average half of the others' prompts are read first, as many in a step as fit. A benchmark has both, see
    `wave_share`.
    """
    running, known, n_tokens = loop.running, loop.known, loop.workload.input_tokens
    crowd = 1 - 1 / running**2
    fixed = known.ttft_fixed_ms * (1 - _ALONE / math.sqrt(running)) + known.wait_steps * decode_ms * crowd
    queue = known.ttft_prefill * (1 + _BESIDE * crowd + min(_MOST_QUEUE, busy / (2 * (1 - min(busy, 0.99)))))
    # Prompts that share a step share its fixed part.
    n_each = max(1.0, min(running, loop.engine.max_num_batched_tokens / n_tokens))
    n_before = (running / loop.layout.pipeline - 1) / 2 / n_each
    steady, wave = [], []
    both = zip(loop.prefill(n_tokens), loop.prefill(round(n_each * n_tokens)), strict=True)
    for (one, many), factor in zip(both, (known.spread[0], 1.0, known.spread[1]), strict=True):
        steady.append(fixed * factor + one * queue)
        wave.append(max(steady[-1], fixed * factor + known.ttft_prefill * (one + many * n_before)))
    mean = [known.wave_share * w + (1 - known.wave_share) * s for s, w in zip(steady, wave, strict=True)]
    # The low end: nobody comes at the same time as another.
    return Range(steady[0], mean[1], mean[2]), Range(*steady), Range(*wave)


def _values(value: Range) -> tuple[float, float, float]:
    return value.low, value.likely, value.high
