"""What nvidia-smi says, read. Rows as nvidia-smi 580 prints them."""

from __future__ import annotations

import pytest

from penstock.hardware import detect
from penstock.text import MIB

TWO = """0, GPU-4f1c9a52-0000-0000-0000-000000000000, NVIDIA H200, 143771, 143000
1, GPU-77aa0000-0000-0000-0000-000000000000, NVIDIA H200, 143771, 12000
"""


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("1", [1]), ("0,1", [0, 1]), ("GPU-77aa", [1]), ("", []), ("3", []), (" 0 , GPU-77", [0, 1])],
)
def test_only_visible_gpus_count(visible: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in detect.parse_gpus(TWO, visible)] == indices


def test_memory_is_read_in_mib() -> None:
    first = detect.parse_gpus(TWO, None)[0]
    assert (first.memory_bytes, first.memory_free_bytes) == (143771 * MIB, 143000 * MIB)


def test_a_gpu_without_memory_figures_is_left_out() -> None:
    assert detect.parse_gpus("0, GPU-1, GB10, [N/A], [N/A]\n", None) == []
