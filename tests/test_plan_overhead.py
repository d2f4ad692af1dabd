"""Memory other than weights and KV cache, against start-up logs (each row names its log); the rules of each version."""

from __future__ import annotations

import msgspec
import plan_shapes as shapes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import NotModelled
from penstock.planner.architecture import Architecture
from penstock.planner.engine_versions import NEWEST, batch_defaults, graph_sizes, parse_version, profile
from penstock.planner.memory.overhead import Overhead, RunSettings, overhead
from penstock.planner.ranges import ZERO, total
from penstock.spec.deployment import Parallel
from penstock.text import GIB

ONE = Parallel()


def estimated(
    arch: Architecture, version: str, tokens: int, rows: int, layout: Parallel = ONE, **fields: bool
) -> Overhead:
    return overhead(arch, layout, profile(version), RunSettings(tokens, rows, **fields), layout.pipeline - 1)


# Model, version, tokens and rows of a batch, layout -> a part (or the sum of two) in GiB, of a log or worked out.
# Other starts are in benchmarks/data/startup_logs.yaml, whose parts test_plan_accuracy checks.
PARTS: list[tuple[Architecture, str, int, int, Parallel, dict[str, bool], str, float, float]] = [
    # A sort in the sampler, as llm-d's planner measured it on an H100.
    (shapes.QWEN3_32B, "0.11", 8192, 1024, ONE, {}, "activation", 5.65, 0.45),
    # Counts for penalties, on our H200s: rows x vocabulary x 4.125 bytes are most of it, since the second runner.
    (shapes.QWEN3_32B, "0.33", 8192, 1024, ONE, {}, "non_torch", 0.79, 0.1),
    (shapes.QWEN3_0_6B, "0.33", 8192, 1024, ONE, {}, "non_torch", 0.86, 0.1),
    # Communicators: on L40S and on H200, both mixtures; files 21130996930 and 3706561278 of a dense model.
    (shapes.QWEN3_NEXT, "0.11", 2048, 256, Parallel(8), {"has_nvlink": False}, "non_torch nccl", 0.21, 0.05),
    (shapes.QWEN3_NEXT, "0.11", 8192, 1024, Parallel(2), {}, "non_torch nccl", 1.38, 0.27),
    (shapes.QWEN2_5_32B, "0.11", 2048, 256, Parallel(2), {}, "non_torch nccl", 0.74, 0.14),
    (shapes.QWEN2_5_32B, "0.11", 2048, 256, Parallel(8), {}, "non_torch nccl", 2.10, 0.42),
    (shapes.LLAMA_8B, "0.11", 2048, 256, ONE, {}, "nccl", 0.0, 0.0),
    # 8192 tokens x 10 experts x 2048 numbers x 2 bytes x 2 buffers; 32,768 tokens of eight ranks at once.
    (shapes.QWEN3_NEXT, "0.33", 8192, 1024, ONE, {}, "workspace", 0.625, 0.0),
    (shapes.QWEN3_NEXT, "0.33", 8192, 1024, Parallel(1, 1, 8, expert=True), {}, "workspace", 4 * 0.625, 0.0),
    (shapes.QWEN3_NEXT, "0.11", 8192, 1, ONE, {}, "workspace", 0.0, 0.0),  # transient before 0.15
    (shapes.LLAMA_8B, "0.33", 8192, 1024, ONE, {}, "workspace", 0.0, 0.0),
    (shapes.LLAMA_8B, "0.33", 8192, 1024, ONE, {"enforce_eager": True}, "graphs", 0.0, 0.0),
]


def test_parts_are_what_logs_and_worked_numbers_say() -> None:
    for arch, version, tokens, rows, layout, fields, names, expected, tolerance in PARTS:
        found = estimated(arch, version, tokens, rows, layout, **fields)
        part = total(getattr(found, name) for name in names.split())
        assert part.likely / GIB == pytest.approx(expected, abs=tolerance), (arch.name, version, names)
        assert part.low <= expected * GIB <= part.high or "has_nvlink" in fields, (arch.name, version, names)
    old = estimated(shapes.QWEN3_NEXT, "0.11", 8192, 1)
    assert old.activation.likely > 0.625 * GIB
    of_dense = estimated(shapes.QWEN2_5_32B, "0.11", 8192, 1024, Parallel(2))
    assert estimated(shapes.QWEN3_NEXT, "0.11", 8192, 1024, Parallel(2)).nccl == of_dense.nccl * 2
    assert of_dense.nccl_in_budget
    new = estimated(shapes.QWEN2_5_32B, "0.33", 8192, 1024, Parallel(2))
    assert new.outside_budget == new.nccl


def test_graphs_are_beside_the_budget_before_0_21() -> None:
    old, new = (estimated(shapes.LLAMA_8B, version, 8192, 1024) for version in ("0.20", "0.21"))
    assert (old.graphs_in_budget, new.graphs_in_budget) == (False, True)
    assert old.outside_budget == old.graphs
    assert old.in_budget == old.activation + old.workspace + old.non_torch
    assert new.outside_budget == ZERO
    assert new.in_budget == new.activation + new.workspace + new.non_torch + new.graphs
    assert old.graphs.low / GIB <= 0.67 <= old.graphs.high / GIB  # V1 log of 2025-09, 67 sizes
    # Without peer-to-peer they are large, on several GPUs.
    four = estimated(shapes.QWEN2_5_32B, "0.20", 4096, 256, Parallel(4), has_peer_to_peer=False).graphs
    assert four.likely > 2.4 * GIB and four.high > 6.6 * GIB
    assert estimated(shapes.QWEN2_5_32B, "0.20", 4096, 256, ONE, has_peer_to_peer=False).graphs.likely < 1 * GIB


def test_vision_adds_to_the_first_stage_and_the_sampler_to_the_last() -> None:
    seeing = msgspec.structs.replace(shapes.LLAMA_8B, is_multimodal=True)
    run = RunSettings(8192, 1024)
    first, last = (overhead(seeing, Parallel(1, 2), profile(), run, stage) for stage in (0, 1))
    plain = overhead(shapes.LLAMA_8B, Parallel(1, 2), profile(), run, 0)
    assert first.activation.likely - plain.activation.likely == 0.5 * GIB
    sampling = RunSettings(2048, 1024)
    start, end = (overhead(shapes.LLAMA_8B, Parallel(1, 2), profile("0.11"), sampling, stage) for stage in (0, 1))
    assert end.activation.likely > 10 * start.activation.likely
    assert last.activation == overhead(shapes.LLAMA_8B, Parallel(1, 2), profile(), run, 1).activation


@settings(max_examples=20)
@given(
    st.sampled_from(shapes.EVERY),
    st.sampled_from(["0.11", "0.20", "0.33"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 32_768),
    st.integers(1, 1024),
    st.integers(1, 4),
)
def test_more_tokens_or_rows_never_take_less(
    arch: Architecture, version: str, tensor: int, tokens: int, rows: int, factor: int
) -> None:
    few = estimated(arch, version, tokens, rows, Parallel(tensor))
    many = estimated(arch, version, tokens * factor, rows * factor, Parallel(tensor))
    assert few.in_budget.likely <= many.in_budget.likely
    assert few.outside_budget.likely <= many.outside_budget.likely


# ---- versions of the engine ------------------------------------------------------------------------------------------


GIB_OF = {"NVIDIA H200": 139.8, "NVIDIA H100 80GB HBM3": 79.18, "NVIDIA B200": 178.35, "NVIDIA GB10": 119}
GIB_OF |= {"NVIDIA A100-SXM4-80GB": 79.25, "NVIDIA L4": 22.03}


def test_versions_are_read_and_unknown_ones_refused_with_exit_code_4_and_the_oldest_known() -> None:
    texts = {"0.33": (0, 33, 0), "v0.11.4.post1": (0, 11, 4), "0.32.0": (0, 32, 0), "0.19.0rc1": (0, 19, 0)}
    assert {text: parse_version(text) for text in texts} == texts
    for text in ("latest", " ", "0", "0.x", "0.10.2", "0.6.3", "0.34", "1.0", "0.16-nightly of mine"):
        with pytest.raises(NotModelled, match="cannot plan engine version") as caught:
            profile(text)
        assert caught.value.exit_code == 4
        assert "0.11 to 0.33" in f"{caught.value.message} {caught.value.hint}"


def test_a_rule_changes_at_its_version() -> None:
    assert profile() == profile(NEWEST)
    for field, before, old, since, new in (
        ("default_utilization", "0.21.9", 0.90, "0.22", 0.92),
        ("graphs_in_budget", "0.20", False, "0.21", True),
        ("nccl_in_budget", "0.11.2", True, "0.12", False),
        ("prints_concurrency", "0.20.0", False, "0.21.0", True),
        ("counts_batches_in_flight", "0.25.1", False, "0.26.0", True),
        ("caches_states", "0.27.1", False, "0.28.0", True),
        ("step_us", "0.13", 900.0, "0.14", 300.0),
        ("wheels_cuda", "0.19", 12, "0.20", 13),
        ("largest_graph_blackwell", "0.24", 512, "0.25", 1024),
    ):
        assert (getattr(profile(before), field), getattr(profile(since), field)) == (old, new), field
    runners = {version: profile(version).uses_runner_v2 for version in ("0.20", "0.26", "0.33")}
    second = {version: (uses(False), uses(True)) for version, uses in runners.items()}  # dense, mixtures and hybrids
    assert second == {"0.20": (False, False), "0.26": (True, False), "0.33": (True, True)}


def test_batch_defaults_and_sizes_of_graphs() -> None:
    for version, name, max_model_len, expected in (
        ("0.33", "NVIDIA H200", 8192, (8192, 1024)),
        ("0.33", "NVIDIA H100 80GB HBM3", 131072, (8192, 1024)),
        ("0.33", "NVIDIA A100-SXM4-80GB", 131072, (2048, 256)),
        ("0.33", "NVIDIA B200", 131072, (16384, 1024)),
        ("0.27", "NVIDIA B200", 131072, (8192, 1024)),
        ("0.33", "NVIDIA L4", 131072, (2048, 256)),
        ("0.33", "NVIDIA GB10", 131072, (2048, 256)),
        ("0.32", "NVIDIA GB10", 131072, (8192, 1024)),
        ("0.33", "NVIDIA L4", 4, (1024, 256)),
        ("0.11", "NVIDIA A100-SXM4-80GB", 131072, (2048, 256)),
    ):
        sizes = batch_defaults(profile(version), int(GIB_OF[name] * GIB), name, max_model_len)
        assert sizes == expected, (version, name)
    # As many graphs as logs show.
    assert len(graph_sizes(1024, 512)) == 51  # tests/golden/vllm-0.33.0/h200-start.log
    assert graph_sizes(8, 512) == (1, 2, 4, 8, 16)
    assert (graph_sizes(1024, 512)[-1], graph_sizes(1024, 1024)[-1]) == (512, 1024)
