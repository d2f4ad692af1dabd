"""Speed: published latencies and measured forward passes against the prediction, and what must hold for any model."""

from __future__ import annotations

import plan_shapes as shapes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_shapes import GPT_OSS_120B, LLAMA_8B, LLAMA_70B, VICUNA_13B, fabric
from plan_shapes import QWEN3_32B as QWEN_32B

from penstock.hardware import catalog
from penstock.planner.architecture import Architecture
from penstock.planner.ranges import Range
from penstock.planner.speed import collectives, estimate, work
from penstock.spec.deployment import Parallel, Workload

H100, ENGINE, ONE = fabric("h100-sxm"), estimate.Engine(), Parallel()
COSTS_8B, COSTS_70B, COSTS_GPT_OSS = (work.step_costs(arch) for arch in (LLAMA_8B, LLAMA_70B, GPT_OSS_120B))


def decode(context: float) -> work.Step:
    """One request that makes a token after `context` others."""
    return work.Step(1, 0, context, 0)


# ---- what a step reads -----------------------------------------------------------------------------------------------


def test_what_a_step_reads_of_llama_70b_follows_the_published_parameters() -> None:
    assert len(COSTS_70B.layers) == 1 and COSTS_70B.layers[0][1] == 80
    assert work.weight_bytes_read(COSTS_70B, ONE, 1) == pytest.approx(139.0e9, rel=0.001)
    assert work.weight_bytes_read(COSTS_70B, Parallel(tensor=2), 1) == pytest.approx(69.5e9, rel=0.001)
    # Keys and values are copied once tensor exceeds their heads.
    one, eight, sixteen = (work.cache_bytes_read(COSTS_70B, Parallel(tensor), decode(1000)) for tensor in (1, 8, 16))
    assert one == 327_680_000 and eight == one / 8 and sixteen == eight
    # A window bounds what is read.
    far, near = (work.cache_bytes_read(COSTS_GPT_OSS, ONE, decode(n)) for n in (100_000, 100))
    assert far == 18 * 2 * 8 * 64 * 2 * (100_000 + 128) and near == 36 * 2 * 8 * 64 * 2 * 100


def test_bandwidth_of_a_machine_follows_how_its_rate_is_given() -> None:
    networks = {"gcp-tcpxo-a3-mega": 340, "eth-100g": 4, "ib-ndr-400": 50 * 8 * 0.61, "aws-efa-3200": 400 * 0.61}
    assert {name: collectives.node_gbs(fabric("h100-sxm", 8, 2, name)) for name in networks} == pytest.approx(networks)
    assert collectives.node_gbs(fabric("l40s", 8, 2, "ib-ndr-400")) == pytest.approx(50 * 0.61)
    assert collectives.allreduce_us(H100, 1, 1e6) == Range(0, 0, 0)
    assert collectives.allreduce_us(H100, 8, 2**20).low == pytest.approx(17.3)
    with pytest.raises(ValueError, match="must rise"):
        Range(2, 1, 3)


# ---- published and measured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("network", ["pod-network-tcp", "eth-10g", "eth-25g", "eth-100g", "gcp-tcp-fallback"])
def test_13b_over_one_gpu_pods_slows_as_published(network: str, is_eager: bool) -> None:
    """s2-20: 4.545, 14.087, 23.705 s at TP 1, 2, 4, without CUDA graphs: 1 : 3.1 : 5.2. Any TCP is slower than none."""
    pods, engine = fabric("a100-sxm4-40", 1, 4, network), estimate.Engine(is_eager=is_eager)
    costs, load = work.step_costs(VICUNA_13B), Workload(32, 128, 8)
    speeds = [estimate.estimate(costs, Parallel(tensor), pods, load, engine) for tensor in (1, 2, 4)]
    seconds = [(speed.ttft_ms.likely + 127 * speed.tpot_ms.likely) / 1e3 for speed in speeds]
    if network == "pod-network-tcp":
        assert [one / seconds[0] for one in seconds] == pytest.approx([1, 3.1, 5.2], rel=0.12)
        assert not is_eager or seconds == pytest.approx([4.545, 14.087, 23.705], rel=0.12)
    elif not is_eager:
        assert 2 * seconds[0] < seconds[1] and 1.4 * seconds[1] < seconds[2]


def test_70b_over_two_pods_is_a_few_tokens_a_second() -> None:
    """s1-18: 2.6 and 4.4 tokens a second in the log; the published one lies in the range."""
    pods = fabric("a100-sxm4-80", 1, 2, "pod-network-tcp")
    tpot = estimate.estimate(COSTS_70B, Parallel(2), pods, Workload(5, 102, 1)).tpot_ms
    assert 1e3 / tpot.high < 4.4 < 1e3 / tpot.likely < 7


def test_forward_passes_of_qwen3_32b() -> None:
    """aiconfigurator fpm_golden_runs, vLLM 0.20.1, context 4096, bf16: (TP, decodes or tokens read in) -> ms."""
    b200, costs = fabric("b200-sxm"), work.step_costs(QWEN_32B)
    known = estimate.constants(b200.gpu, ENGINE)
    one, more = {(1, 1): 13.45, (1, 4): 13.95, (1, 14): 16.38}, {(2, 1): 8.95, (2, 14): 10.16}
    for (tensor, decodes), measured_ms in (one | more | {(8, 1): 4.5, (8, 14): 5.02}).items():
        step = estimate.step_time(costs, Parallel(tensor), b200, work.Step(decodes, 0, 4096, 0), ENGINE, known)
        assert step.likely_ms == pytest.approx(measured_ms, rel=0.13), (tensor, decodes)
    for tensor, tokens, measured_ms in ((1, 1024, 53), (1, 4096, 205), (2, 4096, 114), (8, 1024, 17.6)):
        time = estimate.prefill_time(costs, Parallel(tensor), b200, tokens, ENGINE, known)
        assert time.likely == pytest.approx(measured_ms, rel=0.08), (tensor, tokens)


# ---- what must hold --------------------------------------------------------------------------------------------------


def test_matrix_rate_follows_the_weights_format_and_the_card() -> None:
    kinds = (("h100-sxm", "fp8"), ("h100-sxm", "awq"), ("h100-sxm", "nvfp4"), ("b200-sxm", "nvfp4"))
    rates = [
        estimate.peak_tflops(catalog.gpu(gpu), kind) for gpu, kind in (*kinds, ("a100-sxm4-80", "fp8"), ("t4", None))
    ]
    assert rates == [1978, 989, 989, 9000, 312, 65.1]


def test_requests_that_wait_delay_the_first_token_only() -> None:
    load = Workload(1000, 200, 64)
    free, held = (
        estimate.estimate(COSTS_8B, ONE, H100, load, estimate.Engine(max_running=running)) for running in (None, 16)
    )
    assert held.ttft_ms.likely > 2 * free.ttft_ms.likely and held.tpot_ms.likely < free.tpot_ms.likely
    assert held.requests_per_s.likely < free.requests_per_s.likely
    # A long prompt is read in chunks.
    known = estimate.constants(H100.gpu, ENGINE)
    engines = (estimate.Engine(max_num_batched_tokens=most) for most in (8192, 512))
    whole, pieces = (estimate.prefill_time(COSTS_8B, ONE, H100, 8192, one, known).likely for one in engines)
    assert whole < pieces < 3 * whole


def test_alone_nobody_elses_prompt_is_waited_for() -> None:
    alone, two = (estimate.estimate(COSTS_8B, ONE, H100, Workload(8000, 100, n)) for n in (1, 2))
    known, step = estimate.constants(H100.gpu, ENGINE), work.Step(1, 0, 8050, 0)
    decode = estimate.step_time(COSTS_8B, ONE, H100, step, ENGINE, known)
    assert alone.tpot_ms.likely == decode.likely_ms < two.tpot_ms.likely - 1
    equal = estimate.estimate(COSTS_8B, ONE, H100, Workload(8000, 100, 1), rounds=3)
    assert alone.ttft_ms.likely == alone.ttft_steady_ms.likely == pytest.approx(equal.ttft_ms.likely)


def test_a_benchmark_lies_between_requests_that_come_alone_and_together() -> None:
    load = Workload(2000, 200, 32)
    varied, *equal = (estimate.estimate(COSTS_8B, ONE, H100, load, rounds=n) for n in (None, 1, 3, 8, 1000))
    assert varied.ttft_steady_ms.likely < varied.ttft_ms.likely < equal[0].ttft_ms.likely
    assert varied.ttft_ms.low == varied.ttft_steady_ms.low
    # Equally long requests begin as a wave, which every later round leaves behind; more of them meet others' prompts.
    times = [speed.ttft_ms.likely for speed in equal]
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1]
    assert [speed.tpot_ms.likely for speed in equal] == sorted(speed.tpot_ms.likely for speed in equal)


def scheduled(costs: work.StepCosts, layout: Parallel, load: Workload, rounds: int) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) in ms by vLLM's own rules, step by step: what runs comes first, then prompts in order."""
    machine = fabric("h200-sxm", layout.n_ranks)
    known = estimate.constants(machine.gpu, ENGINE)
    now, n_asked = 0.0, load.concurrency
    ttft: list[float] = []
    tpot: list[float] = []
    waiting = [(0.0, load.input_tokens)] * load.concurrency  # asked at, tokens to read
    running: list[tuple[float, int]] = []  # first token at, tokens left
    while len(tpot) < rounds * load.concurrency:
        room, n_decodes, began, first = ENGINE.max_num_batched_tokens - len(running), len(running), now, []
        while waiting and room and waiting[0][0] <= began:
            asked_at, tokens = waiting.pop(0)
            read = min(room, tokens)
            room -= read
            if read < tokens:
                waiting.insert(0, (asked_at, tokens - read))
            else:
                first.append(asked_at)
        prefill = ENGINE.max_num_batched_tokens - n_decodes - room
        step = work.Step(n_decodes, prefill, load.input_tokens + load.output_tokens / 2, load.input_tokens / 2)
        now += estimate.step_time(costs, layout, machine, step, ENGINE, known).likely_ms
        running = [(first_at, left - 1) for first_at, left in running]
        for first_at in [first_at for first_at, left in running if not left]:
            tpot.append((now - first_at) / (load.output_tokens - 1))
            if n_asked < rounds * load.concurrency:
                waiting.append((now + 3, load.input_tokens))  # the client's turn
                n_asked += 1
        running = [request for request in running if request[1]] + [(now, load.output_tokens - 1) for _ in first]
        ttft += [now - asked_at for asked_at in first]
        if not running and waiting and waiting[0][0] > now:
            now = waiting[0][0]
    return sum(ttft) / len(ttft), sum(tpot) / len(tpot)


@pytest.mark.parametrize(("tokens", "at_once"), [(1024, 16), (1024, 64), (4096, 8), (4096, 32), (512, 128)])
@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_rounds_of_equal_requests_are_near_what_the_scheduler_does(tokens: int, at_once: int, rounds: int) -> None:
    load, layout = Workload(tokens, 128, at_once), Parallel(4)
    speed = estimate.estimate(COSTS_70B, layout, fabric("h200-sxm", 4), load, rounds=rounds)
    ttft, tpot = scheduled(COSTS_70B, layout, load, rounds)
    assert speed.ttft_ms.likely == pytest.approx(ttft, rel=0.3)
    assert speed.tpot_ms.likely == pytest.approx(tpot, rel=0.15)


EVERY = (VICUNA_13B, LLAMA_8B, LLAMA_70B, QWEN_32B, GPT_OSS_120B, shapes.DEEPSEEK_V3, shapes.QWEN3_NEXT)
MODELS = st.sampled_from(EVERY)
GPUS = st.sampled_from(["t4", "l4", "a100-sxm4-80", "l40s", "h100-sxm", "b200-sxm", "gb200", "mi300x", "rtx-4090"])
LAYOUTS = st.builds(Parallel, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
LOADS = st.builds(Workload, st.integers(1, 20_000), st.integers(1, 2_000), st.integers(1, 512))


@settings(max_examples=60)
@given(MODELS, GPUS, LAYOUTS, LOADS, st.sampled_from([None, "ib-ndr-400", "pod-network-tcp"]))
def test_every_estimate_is_a_rising_range_that_adds_up(
    model: Architecture, gpu: str, layout: Parallel, load: Workload, network: str | None
) -> None:
    speed = estimate.estimate(work.step_costs(model), layout, fabric(gpu, 4, 8, network), load)
    for value in (speed.ttft_ms, speed.tpot_ms, speed.output_tokens_per_s, speed.requests_per_s):
        assert 0 < value.low <= value.likely <= value.high
    assert 0 <= speed.comm_ms < speed.tpot_ms.likely
    assert speed.output_tokens_per_s.likely == pytest.approx(speed.requests_per_s.likely * load.output_tokens)


@settings(max_examples=40)
@given(MODELS, GPUS, LOADS)
def test_more_requests_never_make_a_token_faster(model: Architecture, gpu: str, load: Workload) -> None:
    counted, one = work.step_costs(model), fabric(gpu, 1)
    more = Workload(load.input_tokens, load.output_tokens, load.concurrency + 8)
    slow, fast = estimate.estimate(counted, Parallel(), one, more), estimate.estimate(counted, Parallel(), one, load)
    assert slow.tpot_ms.likely >= fast.tpot_ms.likely and slow.ttft_ms.likely >= fast.ttft_ms.likely


# ---- published points (benchmarks/data/speed_points.yaml): the medians must not get worse ---------------------------

plan_speed = shapes.benchmark("plan_speed")


def test_the_medians_over_published_points_stay_small_and_every_point_has_its_source() -> None:
    points, formats = plan_speed.load()
    rows = plan_speed.rows_of(points, formats)
    for what, most in (("TPOT", 0.1), ("TTFT", 0.2)):
        for split in ("tuned", "held_out"):
            some = [row for row in rows if row.what == what and row.point.split == split]
            assert len(some) > 10 and plan_speed.median(some) <= most, (what, split)
    assert len({(point.source, point.split) for point in points}) == len({point.source for point in points})
    assert all(point.url.startswith("https://") or point.url == "own" for point in points)
    assert all(point.split in ("tuned", "held_out") and (point.ttft or point.tpot) for point in points)
    assert plan_speed.DOCS.read_text("utf-8") == plan_speed.page(rows), "python benchmarks/plan_speed.py --write-docs"
