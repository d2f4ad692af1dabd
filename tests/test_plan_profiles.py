"""Engine versions as data: each change applies from its version on, and what is unknown is refused."""

from __future__ import annotations

import pytest

from penstock.errors import NotModelled
from penstock.planner.engine_versions import (
    CHANGES,
    NEWEST,
    EngineProfile,
    batch_defaults,
    graph_sizes,
    on_card,
    parse_version,
    profile,
)
from penstock.text import GIB

H100, H200, B200, A100, L4 = (int(gib * GIB) for gib in (79.18, 139.8, 178.35, 79.25, 22.03))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.33", (0, 33, 0)),
        ("v0.6.4.post1", (0, 6, 4)),
        ("0.8.5", (0, 8, 5)),
        ("0.32.0", (0, 32, 0)),
        ("0.9.0rc1", (0, 9, 0)),
    ],
)
def test_versions_are_read(text: str, expected: tuple[int, int, int]) -> None:
    assert parse_version(text) == expected


@pytest.mark.parametrize("text", ["latest", "", "0", "0.x", "0.1.7", "0.34", "1.0", "0.6-nightly of mine"])
def test_unknown_versions_are_refused_with_exit_code_4(text: str) -> None:
    with pytest.raises(NotModelled, match="cannot plan engine version") as caught:
        profile(text if text else " ")
    assert caught.value.exit_code == 4


def test_newest_is_the_default() -> None:
    assert profile() == profile(NEWEST)
    assert profile().default_utilization == 0.92
    assert profile().graphs_in_budget
    assert not profile().nccl_in_budget


def test_changes_are_in_order_and_name_real_fields() -> None:
    versions = [version for version, _ in CHANGES]
    assert versions == sorted(set(versions))
    assert {name for _, fields in CHANGES for name in fields} <= set(EngineProfile.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "before", "old", "since", "new"),
    [
        ("default_utilization", "0.21.9", 0.90, "0.22", 0.92),
        ("graphs_in_budget", "0.20", False, "0.21", True),
        ("nccl_in_budget", "0.11.2", True, "0.12", False),
        ("nccl_in_budget", "0.2.4", False, "0.2.5", True),
        ("has_expert_group", "0.8.4", False, "0.8.5", True),
        ("non_torch_gib", "0.6.5", (0.2, 0.3, 0.45), "0.6.6", (0.01, 0.07, 0.3)),
        ("size_print", "0.20.0", "blocks-by-group", "0.21.0", "concurrency"),
        ("size_print", "0.8.5", "blocks", "0.9.1", "blocks-by-group"),
        ("generation", "0.7.3", "V0", "0.8.0", "V1"),
        ("counts_batches_in_flight", "0.25.1", False, "0.26.0", True),
        ("caches_states", "0.27.1", False, "0.28.0", True),
    ],
)
def test_a_rule_changes_at_its_version(field: str, before: str, old: object, since: str, new: object) -> None:
    assert getattr(profile(before), field) == old
    assert getattr(profile(since), field) == new


@pytest.mark.parametrize(
    ("version", "memory", "name", "max_model_len", "expected"),
    [
        ("0.33", H200, "NVIDIA H200", 8192, (8192, 1024)),
        ("0.33", H100, "NVIDIA H100 80GB HBM3", 131072, (8192, 1024)),
        ("0.33", A100, "NVIDIA A100-SXM4-80GB", 131072, (2048, 256)),
        ("0.33", B200, "NVIDIA B200", 131072, (16384, 1024)),
        ("0.27", B200, "NVIDIA B200", 131072, (8192, 1024)),
        ("0.33", L4, "NVIDIA L4", 131072, (2048, 256)),
        ("0.33", 119 * GIB, "NVIDIA GB10", 131072, (2048, 256)),
        ("0.32", 119 * GIB, "NVIDIA GB10", 131072, (8192, 1024)),
        ("0.33", L4, "NVIDIA L4", 4, (1024, 256)),
        ("0.8.4", A100, "NVIDIA A100-SXM4-80GB", 131072, (2048, 256)),
        ("0.8.4", H100, "NVIDIA H100 80GB HBM3", 131072, (8192, 1024)),
        ("0.8.5", A100, "NVIDIA A100-SXM4-80GB", 131072, (8192, 1024)),
        ("0.9.0", A100, "NVIDIA A100-SXM4-80GB", 131072, (2048, 256)),
        ("0.6.3", L4, "NVIDIA L4", 20000, (20000, 256)),
        ("0.6.3", L4, "NVIDIA L4", 35000, (512, 256)),
        ("0.7.2", L4, "NVIDIA L4", 131072, (2048, 256)),
        ("0.4.0", L4, "NVIDIA L4", 1024, (2048, 256)),
    ],
)
def test_batch_defaults(version: str, memory: int, name: str, max_model_len: int, expected: tuple[int, int]) -> None:
    assert batch_defaults(profile(version), memory, name, max_model_len) == expected


def test_cards_before_ampere_stay_on_v0_until_it_is_gone() -> None:
    for version in ("0.8.0", "0.10.2"):
        old, new = (on_card(profile(version), capability) for capability in ((7, 5), (8, 0)))
        assert (old.generation, new.generation) == ("V0", "V1")
        assert batch_defaults(old, 14 * GIB, "Tesla T4", 8192) == (8192, 256)
        assert len(graph_sizes(old, 256)) == 35
    for version in ("0.7.3", "0.11.0", "0.33"):
        assert on_card(profile(version), (7, 5)) == profile(version)
    assert on_card(profile("0.10.2"), None).generation == "V1"


def test_number_of_graph_sizes_is_what_logs_show() -> None:
    assert len(graph_sizes(profile("0.33"), 1024)) == 51  # tests/golden/vllm-0.33.0/h200-start.log
    assert len(graph_sizes(profile("0.10"), 1024)) == 67
    assert len(graph_sizes(profile("0.7"), 256)) == 35
    assert graph_sizes(profile("0.33"), 8) == (1, 2, 4, 8, 16)
    assert graph_sizes(profile("0.33"), 1024)[-1] == 512
    assert graph_sizes(profile("0.33"), 1024, is_blackwell=True)[-1] == 1024


def test_second_runner_came_to_dense_models_first() -> None:
    assert profile("0.33").uses_runner_v2(is_moe_or_hybrid=True)
    assert profile("0.26").uses_runner_v2(is_moe_or_hybrid=False)
    assert not profile("0.26").uses_runner_v2(is_moe_or_hybrid=True)
    assert not profile("0.20").uses_runner_v2(is_moe_or_hybrid=False)
