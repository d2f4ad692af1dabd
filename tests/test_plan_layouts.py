"""Layouts: what is legal, with the number that refuses the rest; which one is taken."""

from __future__ import annotations

from collections.abc import Callable

import plan_shapes as shapes
from plan_shapes import fabric

from penstock.planner import layouts
from penstock.planner.architecture import Architecture, Attention, Layer, Mlp, State
from penstock.planner.engine_versions import profile
from penstock.planner.speed import estimate, work
from penstock.planner.speed.collectives import Fabric
from penstock.spec.deployment import Parallel, Workload


def model(layer: Layer, n_layers: int = 32, hidden: int = 8192, vocab: int = 128256, **more: object) -> Architecture:
    return shapes.model("a model", hidden, vocab, [layer] * n_layers, **more)


LLAMA_70B, LLAMA_405B, LLAMA_8B, VICUNA_13B = shapes.LLAMA_70B, shapes.LLAMA_405B, shapes.LLAMA_8B, shapes.VICUNA_13B
QWEN_235B_FP8 = shapes.arch("qwen3-235b-a22b-fp8")
QWEN_72B_AWQ = shapes.arch("qwen2.5-72b", quantization_config={"quant_method": "awq", "group_size": 128})


def refusal(arch: Architecture, layout: Parallel, n_gpus: int | None = None, version: str = "0.33") -> str | None:
    return layouts.refusal(layouts.divisibility_of(arch, profile(version)), layout, n_gpus)


# ---- legality --------------------------------------------------------------------------------------------------------


ODD_KV = model(Layer(Attention("full", 48, 6, 128, 128), mlp=Mlp(12288)))
FALCON = model(Layer(Attention("full", 71, 1, 64, 64), mlp=Mlp(18176)))
MLA = model(Layer(Attention("mla", 128, 1, 192, 128, kv_lora_rank=512, rope_dim=64), mlp=Mlp(18432)))
ODD_WIDTH = model(Layer(Attention("full", 64, 8, 128, 128), mlp=Mlp(28673)))
ODD_VOCAB = model(Layer(Attention("full", 36, 36, 128, 128), mlp=Mlp(9216)), vocab=50277)
GDN = model(Layer(state=State("gdn", 8192, 4, 32, 128, 128), mlp=Mlp(5120)))
MOE = model(Layer(Attention("full", 64, 8, 128, 128), mlp=Mlp(1536, n_experts=8, top_k=2)))
FP8_EXPERTS = "expert width 1536 / (tensor x data = 8) = 192 is not a multiple of the weights' block of 128"
INT4_GROUPS = "MLP width 29568 / tensor 2 = 14784 is not a multiple of the weights' group of 128"  # vllm#13640


DIVISIONS: list[tuple[Architecture, Parallel, str | None]] = [
    *((LLAMA_70B, Parallel(n), f"64 attention heads do not divide by tensor {n}") for n in (3, 11, 12)),
    *((LLAMA_405B, Parallel(n), f"128 attention heads do not divide by tensor {n}") for n in (3, 11, 12)),
    (ODD_KV, Parallel(4), "6 KV heads neither divide by tensor 4 nor divide it"),
    (ODD_KV, Parallel(12), None),
    (LLAMA_70B, Parallel(16), None),  # 16 % 8: each KV head twice
    (FALCON, Parallel(2), "71 attention heads do not divide by tensor 2"),
    (MLA, Parallel(16), None),  # no KV heads to divide
    (ODD_WIDTH, Parallel(2), "MLP width 28673 does not divide by tensor 2"),
    (ODD_VOCAB, Parallel(9), "vocabulary of 50304 (padded) does not divide by tensor 9"),
    (GDN, Parallel(16), None),
    (GDN, Parallel(32), "16 state heads do not divide by tensor 32"),  # its key heads
    (LLAMA_8B, Parallel(1, 33), "32 layers are fewer than pipeline 33"),
    (MOE, Parallel(8, expert=True), None),
    (MOE, Parallel(8, data=2, expert=True), "8 experts are fewer than tensor x data = 16"),
    (MOE, Parallel(1, data=5), "expert width 1536 does not divide by tensor x data = 5"),
    (LLAMA_70B, Parallel(2, expert=True), "expert parallelism needs experts, this model has 0"),
    (QWEN_72B_AWQ, Parallel(2), INT4_GROUPS),
    (QWEN_72B_AWQ, Parallel(1), None),
]


def test_what_does_not_divide_is_refused() -> None:
    for arch, layout, reason in DIVISIONS:
        assert refusal(arch, layout) == reason, (arch.name, layout)
    assert refusal(LLAMA_70B, Parallel(8, 2), 8) == "tensor 8 x pipeline 2 x data 1 needs 16 GPUs, there are 8"
    assert refusal(LLAMA_70B, Parallel(8, 2), 16) is refusal(LLAMA_405B, Parallel(8, 2), 16) is None


def test_block_fp8_experts_were_refused_until_scales_were_refined() -> None:
    assert refusal(QWEN_235B_FP8, Parallel(8), version="0.31") == FP8_EXPERTS
    assert refusal(QWEN_235B_FP8, Parallel(8), version="0.33.0") is None
    assert refusal(QWEN_235B_FP8, Parallel(8, expert=True), version="0.31") is None
    assert refusal(QWEN_235B_FP8, Parallel(4), version="0.31") is None
    assert refusal(QWEN_72B_AWQ, Parallel(2), version="0.31") == INT4_GROUPS


# ---- choice ----------------------------------------------------------------------------------------------------------


def choose(
    arch: Architecture, machines: Fabric, fits: Callable[[Parallel], str | None], load: Workload | None = None
) -> layouts.Choice:
    load, costs = load or Workload(1000, 200, 8), work.step_costs(arch)
    every = layouts.enumerate_layouts(layouts.divisibility_of(arch, profile()), machines)
    return layouts.choose(every, machines, load, fits, lambda cut: estimate.estimate(costs, cut, machines, load))


def at_least(n_gpus: int) -> Callable[[Parallel], str | None]:
    """What fits when one copy of the model must be cut over at least `n_gpus`."""
    return lambda one: None if one.tensor * one.pipeline >= n_gpus else f"weights over {one.tensor * one.pipeline} GPUs"


def test_one_gpu_pods_get_tensor_1() -> None:
    pods = fabric("a100-sxm4-40", 1, 4, "pod-network-tcp")
    choice = choose(VICUNA_13B, pods, at_least(1))
    assert choice.chosen is not None and choice.chosen.layout == Parallel() and choice.price is None
    two = next(row for row in choice.refused if row.layout == Parallel(2))
    assert two.reason == (
        "tensor 2 leaves the fast links of 1 GPU(s): every layer waits for pod-network-tcp between 2 machines"
    )


def test_a_group_stays_inside_a_machine_that_it_does_not_fill() -> None:
    six = fabric("h100-sxm", 6, 2)
    assert layouts.crossing(Parallel(4), six) is None
    assert "between 2 machines" in str(layouts.crossing(Parallel(4, 2), six))
    assert layouts.crossing(Parallel(2, 3), six) is None


def test_slow_links_are_crossed_only_when_nothing_else_fits_and_the_price_is_told() -> None:
    pods = fabric("a100-sxm4-80", 1, 2, "pod-network-tcp")
    choice = choose(LLAMA_70B, pods, lambda cut: None if cut == Parallel(2) else "too large")
    assert choice.chosen is not None and choice.chosen.layout == Parallel(2) and choice.chosen.crosses
    assert choice.price is not None and "ms a token" in choice.price and "pod-network-tcp" in choice.price


def test_a_cluster_of_1024_gpus_has_few_layouts_and_a_fixed_pipeline_is_kept() -> None:
    every = layouts.enumerate_layouts(layouts.divisibility_of(QWEN_235B_FP8, profile()), fabric("h100-sxm", 8, 128))
    assert len(every.refused) < 1_000 and 100 < len(set(every.legal)) == len(every.legal) < 1_000
    rules = layouts.divisibility_of(LLAMA_70B, profile())
    assert {layout.pipeline for layout in layouts.enumerate_layouts(rules, fabric(), pipeline=2).legal} == {2}
    none = layouts.enumerate_layouts(rules, fabric(), pipeline=16)
    assert none.legal == () and "there are 8" in none.refused[-1].reason


def test_targets_come_before_the_number_of_gpus() -> None:
    plain = choose(LLAMA_70B, fabric(), at_least(2))
    fast = choose(LLAMA_70B, fabric(), at_least(2), Workload(1000, 200, 8, tpot_ms=20))
    assert plain.chosen is not None and fast.chosen is not None
    assert plain.chosen.layout.n_ranks == 2 < fast.chosen.layout.n_ranks
    assert fast.chosen.misses == 0 and fast.chosen.speed.tpot_ms.likely <= 20
    # Targets that nothing meets get the nearest.
    choice = choose(LLAMA_70B, fabric(), at_least(2), Workload(1000, 200, 8, tpot_ms=1))
    assert choice.chosen is not None and choice.chosen.misses > 0
    assert choice.chosen.misses == min(candidate.misses for candidate in choice.ranked)
