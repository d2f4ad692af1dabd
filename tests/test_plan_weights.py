"""Bytes of weights a GPU, formats and families, against published sizes; test_plan_accuracy has vLLM's logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plan_shapes as shapes
import pytest
import yaml
from golden_files import table
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import NotModelled
from penstock.models import catalog
from penstock.planner.architecture import Architecture, Tensor, quantization
from penstock.planner.architecture.dense import read
from penstock.planner.memory.tensors import inventory, n_params, split_layers, tensor_bytes
from penstock.planner.memory.weights import RankWeights, bytes_on_disk, rank_weights, rope_bytes
from penstock.spec.deployment import Parallel

GIB = 2**30


def first_rank(name: str, layout: Parallel, **changes: Any) -> RankWeights:
    return rank_weights(shapes.arch(name, **changes), layout)[0]


def test_llama_405b_fp8_leaves_57_75_gib_on_each_of_eight() -> None:
    """Meta's FP8 checkpoint: attention and the first and last layer in bf16; the first release had 16 KV heads."""
    kept = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(126) for p in "qkvo"]
    kept += [f"model.layers.{i}.mlp.{p}_proj" for i in (0, 125) for p in ("gate", "up", "down")]
    quantized = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [*kept, "lm_head"]}
    one = first_rank("llama-3.1-405b", Parallel(8), quantization_config=quantized, num_key_value_heads=16)
    assert one.total_bytes / GIB == pytest.approx(57.75, rel=0.002)


def test_layers_over_stages_as_vllm_puts_them() -> None:
    stages = {61: (15, 15, 16, 15), 10: (2, 3, 3, 2), 80: (40, 40), 7: (4, 3), 11: (3, 3, 3, 2)}
    assert {n: tuple(map(len, split_layers(n, len(sizes)))) for n, sizes in stages.items()} == stages


def test_a_tied_embedding_stands_on_both_ends_and_the_vocabulary_is_padded_to_64() -> None:
    """InternLM's 92,544 is a multiple of 64; 92,550 is not and becomes 92,608."""
    (whole,), stages = (rank_weights(shapes.QWEN3_0_6B, Parallel(1, n)) for n in (1, 2))
    assert {rank.embedding_bytes for rank in (whole, *stages)} == {151_936 * 1024 * 2}
    plain, padded = (first_rank("internlm2.5-7b", Parallel(), vocab_size=n).embedding_bytes for n in (92_544, 92_550))
    assert (plain, padded) == (2 * 92_544 * 4096 * 2, 2 * 92_608 * 4096 * 2)


def test_experts_are_cut_by_expert_and_by_data_parallelism() -> None:
    """Whole experts with expert parallelism, early ranks one more; data ranks have slices, and copies of attention."""
    arch = shapes.arch("qwen3-30b-a3b")
    classes = rank_weights(arch, Parallel(tensor=1, data=48, expert=True))
    assert [(one.n_experts, one.n_ranks) for one in classes] == [(3, 32), (2, 16)]
    (whole,) = rank_weights(arch, Parallel())
    assert sum(one.expert_bytes * one.n_ranks for one in classes) == whole.expert_bytes
    one, eight = (first_rank("mixtral-8x7b", layout) for layout in (Parallel(), Parallel(2, 1, 4)))
    assert eight.expert_bytes * 8 == one.expert_bytes
    assert (eight.weight_bytes - eight.expert_bytes) * 2 == pytest.approx(one.weight_bytes - one.expert_bytes, rel=0.01)


ALL_NAMES = [
    *("llama-3.1-8b", "qwen2.5-72b", "gemma-2-9b", "olmo-2-7b", "starcoder2-7b", "falcon-40b", "mixtral-8x7b"),
    *("deepseek-v3", "qwen3-next-80b-a3b", "nemotron-h-56b", "gpt-oss-20b", "qwen3-vl-8b", "qwen3-235b-a22b-fp8"),
]


def bytes_of_copies(arch: Architecture, one: Tensor, tensor: int, pipeline: int) -> int:
    """Bytes that a tensor costs beyond its own, over all ranks: copies, KV heads' copies, towers on each stage."""
    copies = {"replicated": tensor, "kv": max(tensor, one.n_groups) // max(one.n_groups, 1)}.get(one.cut, 1)
    if one.layer == "vision":
        copies *= pipeline
    if one.layer == "embed" and arch.ties_embeddings and pipeline > 1:
        copies += 1
    return (copies - 1) * one.count * tensor_bytes(one, one.shape, arch.dtype)


@settings(max_examples=15)
@given(st.sampled_from(ALL_NAMES), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 4]), st.booleans())
def test_shards_sum_to_the_whole_plus_what_is_replicated(name: str, tensor: int, pipeline: int, expert: bool) -> None:
    arch = shapes.arch(name)
    assume(all(one.attention is None or one.attention.n_heads % tensor == 0 for one in arch.layers))
    whole = rank_weights(arch, Parallel())[0].weight_bytes
    total = sum(one.weight_bytes * one.n_ranks for one in rank_weights(arch, Parallel(tensor, pipeline, 1, expert)))
    copied = sum(bytes_of_copies(arch, one, tensor, pipeline) for one in inventory(arch))
    # What is left over is rounding: block scales that round up, and MXFP4 experts of gpt-oss at TP8, whose width of 360
    # becomes 384, and 512 in the packed values of the down projection.
    slack = {"mxfp4": 1.15, "fp8-block": 1.01}.get(arch.quantization.kind if arch.quantization else "", 1.0001)
    assert whole + copied <= total <= (whole + copied) * slack


# ---- quantisation ----------------------------------------------------------------------------------------------------


def test_bytes_a_parameter_of_each_format_and_scheme() -> None:
    rows: list[tuple[dict[str, Any], float]] = [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "fbgemm_fp8"}, 1 + 4 / 4096),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.51953125),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 0.515625),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, 1.0625),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, 1.0),
    ]
    for config, expected in rows:
        n_bytes = quantization.matrix_bytes(4096, 4096, quantization.from_config(config))
        assert n_bytes / 4096**2 == pytest.approx(expected, abs=2e-6), config
    for scheme, storage, kind in (
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", "fp8"),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized", "int8"),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, "pack-quantized", "int4"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}, "nvfp4-pack-quantized", "nvfp4"),
    ):
        groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
        config = {"quant_method": "compressed-tensors", "format": storage, "config_groups": groups}
        quant = quantization.from_config({**config, "ignore": ["lm_head"]})
        assert quant.kind == kind and quant.excluded == ("lm_head",)


def test_int4_experts_alone_are_as_large_as_published() -> None:
    """moonshotai/Kimi-K2-Thinking: 594 GB on the hub; routed experts in int4, all else in bf16."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config: dict[str, Any] = {"format": "pack-quantized", "config_groups": groups, "ignore": ignore}
    arch = shapes.arch("kimi-k2-instruct", quantization_config={"quant_method": "compressed-tensors", **config})
    assert bytes_on_disk(arch) == pytest.approx(594e9, rel=0.001)
    # AutoRound's W4A16, packed as GPTQ, with the same modules left out by name and by expression.
    left_out = {".*self_attn.*": {"bits": 16}, ".*shared_experts.*": {"bits": 16}, "model.layers.0.mlp": {"bits": 16}}
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "extra_config": left_out}
    gptq = shapes.arch("kimi-k2-instruct", quantization_config=config)
    assert first_bytes(gptq) == first_bytes(arch)
    assert quantization.with_choice(gptq, "moe_wna16") == gptq


def first_bytes(arch: Architecture) -> tuple[int, int]:
    rank = rank_weights(arch, Parallel(8))[0]
    return rank.expert_bytes, rank.weight_bytes


def test_a_plan_of_another_format_than_the_checkpoints_changes_the_linears_only() -> None:
    """Llama-3.1-70B: 68.4e9 numbers in linears, embedding and head in bf16; fp8 is made while loading."""
    made = quantization.with_choice(shapes.LLAMA_8B, "fp8")
    n_bytes = 6_979_321_856 + 2 * 1_050_673_152 + 2 * 266_240
    assert rank_weights(made, Parallel())[0].weight_bytes == pytest.approx(n_bytes, rel=1e-6)
    assert bytes_on_disk(made) == 16_060_522_496
    linears, others = 80 * 855_638_016, 2 * 128_256 * 8192
    for choice, each in (("nvfp4", 0.5625), ("int4", 0.515625)):
        arch = quantization.with_choice(shapes.LLAMA_70B, choice)
        assert rank_weights(arch, Parallel())[0].weight_bytes == pytest.approx(linears * each + others * 2, rel=1e-3)
        assert quantization.with_choice(arch, choice) == arch
    own = shapes.arch("qwen3-235b-a22b", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    for choice in ("nvfp4", "modelopt", "modelopt_fp4"):
        assert quantization.with_choice(own, choice) == own
    sizing = shapes.solved("llama-3.1-8b", "b200-sxm", quantization="nvfp4")
    assert sizing.engine_args == () and "plan of a checkpoint in nvfp4" in sizing.warnings[0]


def test_exclusions_name_modules() -> None:
    for pattern, module, is_named in table("plan/exclusions.yaml"):
        assert quantization.matches(module, (pattern,)) is is_named, (pattern, module)


def test_an_unknown_format_or_one_that_is_not_the_checkpoints_is_refused() -> None:
    fp8 = shapes.arch("qwen3-32b-fp8")
    assert quantization.with_choice(fp8, "fp8") == fp8
    for arch, reason in ((fp8, "stored as fp8-block"), (shapes.LLAMA_8B, "16-bit weights")):
        with pytest.raises(NotModelled, match=reason):
            quantization.with_choice(arch, "awq")
    modelopt = {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}
    for config, reason in (({"quant_method": "aqlm"}, 'quantization "aqlm"'), (modelopt, "W4A8")):
        with pytest.raises(NotModelled, match=reason):
            quantization.from_config(config)


def test_the_text_part_of_a_config_has_its_format_too() -> None:
    """A format in `text_config` counts for weights and cache; nonsense in it is no traceback."""
    own = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    nested = {"text_config": {**catalog.model_config("llama-3.1-8b"), "quantization_config": own}}
    sizing = shapes.solved("m", "b200-sxm", {"architectures": ["LlamaForCausalLM"], **nested})
    assert sizing.settings is not None
    assert (sizing.settings.quantization, sizing.settings.kv_cache_dtype) == ("nvfp4", "fp8")
    broken = {**catalog.model_config("llama-3.1-8b"), "quantization_config": {"quant_method": "awq", "quantization": 4}}
    assert shapes.solved("m", "b200-sxm", broken).fits


def test_a_rope_table_is_as_long_as_the_model_whatever_is_served() -> None:
    """Llama 4 Scout: 10,485,760 positions x 128 x 2 B = 2.5 GiB."""
    n_bytes = {"llama-4-scout-17b-16e": 10_485_760 * 128 * 2, "phi-4-mini": (131_072 + 4096) * 96 * 2}
    n_bytes |= {"gpt-oss-20b": 131_072 * 64 * 4, "jamba-v0.1": 0, "llama-3.1-8b": 32 * 2**20}
    assert {name: rope_bytes(shapes.arch(name)) for name in n_bytes} == n_bytes


# ---- families --------------------------------------------------------------------------------------------------------


KNOWN: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "golden" / "plan" / "families.yaml").read_text("utf-8"))
NAMES = sorted(set(catalog.model_names()) - set(KNOWN["not modelled"]))


def test_parameters_and_bytes_on_disk_are_the_published_ones() -> None:
    for name in NAMES:
        arch, row = shapes.arch(name), catalog.model(name)
        is_text_only = name in KNOWN["text only"]
        # Counted without buffers: the router's correction bias (under 1e-7), Gemma 3's unused pooling head (0.03%).
        tolerance = 3e-4 if name == "gemma-3-27b" else 1e-7
        wanted = KNOWN["published"].get(name) or row.params
        assert n_params(arch, has_towers=not is_text_only) == pytest.approx(wanted, rel=tolerance), name
        if not row.weight_bytes:
            continue
        ratio = bytes_on_disk(arch) / row.weight_bytes
        if name in KNOWN["with prediction layers"]:
            assert ratio == pytest.approx(0.978, abs=0.002), name
        elif is_text_only:
            assert 1 < ratio < 1.02, name
        else:  # published index sizes to the byte; the catalogue's own counts take routers for fp8 (under 0.1%)
            tolerance = 0 if row.weight_bytes_kind == "exact" else 1e-3
            assert ratio == pytest.approx(1, rel=tolerance), name


def test_layers_are_of_the_right_kinds() -> None:
    for name, counts in KNOWN["layers"].items():
        kinds = [
            layer.attention.kind if layer.attention else layer.state.kind if layer.state else "none"
            for layer in shapes.arch(name).layers
        ]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == counts, name
    for row in KNOWN["families outside the catalogue"]:
        config = {"max_position_embeddings": 2048, **row["config"]}
        assert n_params(read(config)) == row["params"], row


def test_kv_heads_and_sizes_reach_the_cache() -> None:
    gemma = [layer.attention for layer in shapes.arch("gemma-4-26b-a4b").layers]
    full = next(attention for attention in gemma if attention and attention.kind == "full")
    assert (full.n_kv_heads, full.head_dim_k, full.has_v_weight) == (2, 512, False)
    mla = shapes.DEEPSEEK_V3.layers[0].attention
    assert mla is not None and (mla.kv_lora_rank, mla.rope_dim) == (512, 64)
    state = shapes.arch("qwen3.5-27b").layers[0].state
    assert state is not None
    assert (state.conv_channels, state.n_heads, state.state_dtype) == (2 * 16 * 128 + 48 * 128, 48, "float32")


def test_what_is_not_modelled_is_refused_with_the_nearest_known() -> None:
    assert len(NAMES) == 76
    for name in KNOWN["not modelled"]:
        with pytest.raises(NotModelled) as refused:
            shapes.arch(name)
        assert refused.value.exit_code == 4
    with pytest.raises(NotModelled) as refused:
        read({"architectures": ["LlamaForCausalLn"]})
    assert refused.value.hint == "did you mean LlamaForCausalLM?"
    config = catalog.model_config("gemma-4-26b-a4b")
    config["text_config"]["hidden_size_per_layer_input"] = 256
    with pytest.raises(NotModelled, match="per-layer input embeddings"):
        read(config)
