"""The rows of nvidia-smi 580, parsed."""

from __future__ import annotations

from penstock.hardware import detect
from penstock.text import MIB

TWO = """0, GPU-4f1c9a52-0000-0000-0000-000000000000, NVIDIA H200, 143771, 143000
1, GPU-77aa0000-0000-0000-0000-000000000000, NVIDIA H200, 143771, 12000
"""


def test_only_visible_gpus_with_memory_figures_count() -> None:
    wanted = {None: [0, 1], "1": [1], "0,1": [0, 1], "GPU-77aa": [1], "": [], "3": [], " 0 , GPU-77": [0, 1]}
    assert {visible: [gpu.index for gpu in detect.parse_gpus(TWO, visible)] for visible in wanted} == wanted
    first = detect.parse_gpus(TWO, None)[0]
    assert (first.memory_bytes, first.memory_free_bytes) == (143771 * MIB, 143000 * MIB)
    assert detect.parse_gpus("0, GPU-1, GB10, [N/A], [N/A]\n", None) == []
