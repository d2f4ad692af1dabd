"""Engine versions as data: each change applies from its version on, and what is unknown is refused."""

from __future__ import annotations

import pytest

from penstock.errors import NotModelled
from penstock.planner.engine_versions import NEWEST, batch_defaults, graph_sizes, parse_version, profile
from penstock.text import GIB

GIB_OF = {"NVIDIA H200": 139.8, "NVIDIA H100 80GB HBM3": 79.18, "NVIDIA B200": 178.35, "NVIDIA GB10": 119}
GIB_OF |= {"NVIDIA A100-SXM4-80GB": 79.25, "NVIDIA L4": 22.03}


def test_versions_are_read() -> None:
    texts = {"0.33": (0, 33, 0), "v0.11.4.post1": (0, 11, 4), "0.32.0": (0, 32, 0), "0.19.0rc1": (0, 19, 0)}
    assert {text: parse_version(text) for text in texts} == texts


def test_unknown_versions_are_refused_with_exit_code_4_and_the_oldest_known() -> None:
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


def test_batch_defaults() -> None:
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


def test_number_of_graph_sizes_is_what_logs_show() -> None:
    assert len(graph_sizes(1024, 512)) == 51  # tests/golden/vllm-0.33.0/h200-start.log
    assert graph_sizes(8, 512) == (1, 2, 4, 8, 16)
    assert (graph_sizes(1024, 512)[-1], graph_sizes(1024, 1024)[-1]) == (512, 1024)
