"""This machine's GPUs and how they are joined, from nvidia-smi's output; how that moves the plan.

RECORDED is what one host of four H200s printed; GEFORCE stands in a public issue (noonghunna/club-3090#1124), where it
was pasted with blanks for tabs. Others are put together in the same form, as NVIDIA/nccl#1617 and
aikitoria/open-gpu-kernel-modules#13 show it.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from golden_files import GOLDEN
from plan_shapes import solved

from penstock.deployment import planning
from penstock.errors import UserError
from penstock.hardware import Links, catalog, detect
from penstock.hardware.topology import links_of, parse_matrix, parse_rate, rewired
from penstock.planner.speed.collectives import Fabric, allreduce_us
from penstock.text import MIB

LEGEND, RECORDED, RECORDED_PEERS, GEFORCE = (
    (GOLDEN / "nvidia-smi" / f"{name}.txt").read_text("utf-8")
    for name in ("legend", "h200x4-topo", "h200x4-p2p", "rtx-5090x2-topo")
)


def table(*ways: str, nics: int = 0) -> str:
    """`nvidia-smi topo -m`: underlined header, network cards and affinities beside."""
    names = [f"GPU{n}" for n in range(len(ways))]
    cards = [f"NIC{n}" for n in range(nics)]
    lines = ["\x1b[4m\t" + "\t".join([*names, *cards, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for name, row in zip(names, ways, strict=True):
        lines.append(
            "\t".join([name, *(f" {word} " for word in row.split()), *["SYS"] * nics, "0-47,96-143", "0", "N/A"])
        )
    lines += ["\t".join([card, *["SYS"] * len(names), *[" X "] * nics]) for card in cards]
    return "\n".join(lines) + "\n" + LEGEND


def peers(n_gpus: int, word: str) -> str:
    """`nvidia-smi topo -p2p r`."""
    gpus = range(n_gpus)
    rows = (f" GPU{row}\t" + "".join(("X" if row == n else word) + "\t" for n in gpus) for row in gpus)
    return "\n".join((" \t" + "".join(f"GPU{n}\t" for n in gpus), *rows)) + "\n" + LEGEND


def status(n_gpus: int, links: int, rate: str) -> str:
    rows = "".join(f"\t Link {link}: {rate} GB/s\n" for link in range(links))
    return "".join(f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-0000000{gpu}-0000)\n{rows}" for gpu in range(n_gpus))


PCIE_X4 = table("X PHB NODE SYS", "PHB X NODE SYS", "NODE NODE X SYS", "SYS SYS SYS X", nics=4)
BRIDGED = table("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
# DGX-1: a cube of V100s, where some pairs are two hops apart.
CUBE = table("X NV1 NV2 SYS", "NV1 X SYS NV2", "NV2 SYS X NV1", "SYS NV2 NV1 X")


def links_in(topology: str, p2p: str, rates: str = "", indices: tuple[int, ...] = ()) -> Links | None:
    matrix = parse_matrix(topology)
    every = indices or tuple(sorted({gpu for gpu, _ in matrix}))
    return links_of(matrix, parse_matrix(p2p), parse_rate(rates), every)


NVLINK_H200 = Links(4, 4, 18 * 26.562, None, True)
OK = peers(4, "OK")
GROUPS_OF_2 = "NVLink joins groups of 2, PCIe (SYS) the rest, peer-to-peer works"


def test_what_joins_the_gpus_is_read_from_the_tables() -> None:
    for links, expected, words in (
        (links_in(RECORDED, RECORDED_PEERS, status(4, 18, "26.562")), NVLINK_H200, "NVLink joins all 4 GPUs"),
        (links_in(PCIE_X4, OK), Links(4, 1, None, "SYS", True), "PCIe (SYS) joins 4 GPUs, peer-to-peer works"),
        (links_in(PCIE_X4, ""), Links(4, 1, None, "SYS", None), "PCIe (SYS) joins 4 GPUs"),
        (links_in(BRIDGED, OK, status(4, 4, "14.062")), Links(4, 2, 4 * 14.062, "SYS", True), GROUPS_OF_2),
        (links_in(BRIDGED, OK, indices=(2, 3)), Links(2, 2, None, None, True), "NVLink joins all 2"),
        (links_in(BRIDGED, OK, indices=(1, 2)), Links(2, 1, None, "SYS", True), "PCIe (SYS) joins 2"),
        (links_in(CUBE, OK), Links(4, 4, None, None, True), "NVLink joins all 4"),
        (links_in(table("X"), peers(1, "OK"), indices=(0,)), Links(1, 1), "one GPU"),
    ):
        assert links == expected and links.words.startswith(words)
    for word in ("NS", "CNS", "GNS", "U", "DR"):
        links = links_in(GEFORCE, peers(2, word))
        assert links == Links(2, 1, None, "PHB", False) and links.words.startswith("PCIe (PHB) joins 2 GPUs, no peer")


def test_text_without_a_table_or_an_active_link_gives_nothing() -> None:
    for text in ("", "No devices were found\n", "Failed to initialize NVML: Driver/library\n", LEGEND):
        assert links_in(text, text, text, (0, 1)) is None
    text = "GPU 0: NVIDIA RTX A6000 (UUID: GPU-1)\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n"
    assert parse_rate(text) is None
    assert parse_rate(text + "GPU 1: NVIDIA RTX A6000 (UUID: GPU-2)\n\t Link 0: 14.062 GB/s\n") == 14.062


# ---- what the machine asks -------------------------------------------------------------------------------------------


def fake_smi(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str | Exception]) -> None:
    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        answer = answers[argv[-1]]
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(argv, 0, answer, "")

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)


def test_the_machine_asks_three_times_and_a_failure_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(monkeypatch, {"-m": RECORDED, "r": RECORDED_PEERS, "--status": status(4, 18, "26.562")})
    assert detect.links(range(4)) == NVLINK_H200
    assert detect.links([0]) == Links(1, 1)  # asks nothing
    for error in (OSError("no such file"), subprocess.TimeoutExpired("nvidia-smi", 30)):
        fake_smi(monkeypatch, dict.fromkeys(("-m", "r", "--status", "--format=csv,noheader,nounits"), error))
        assert detect.links([0, 1]) is None and detect.gpus() == []


# ---- what it changes -------------------------------------------------------------------------------------------------


def us(gpu: str, links: Links, n_ranks: int) -> float:
    return allreduce_us(Fabric(rewired(catalog.gpu(gpu), links), links.n_gpus), n_ranks, 2**20).likely


def test_the_card_of_the_catalogue_is_as_the_machine_joins_it() -> None:
    card = catalog.gpu("h100-sxm")
    assert rewired(card, Links(8, 8, 478.0)) is card and rewired(card, Links(1, 1)) is card
    card = rewired(catalog.gpu("a100-sxm4-80"), Links(4, 1, None, "SYS", True))
    assert card.nvlink is None and card.allreduce is not None and card.allreduce.borrowed_from == "l40s"
    # A bridge speeds up pairs and nothing wider.
    plain, bridge = Links(4, 1, None, "SYS", True), Links(4, 2, 56.25, "SYS", True)
    assert us("rtx-a6000", bridge, 2) < us("rtx-a6000", plain, 2) * 0.6
    assert us("rtx-a6000", bridge, 4) == us("rtx-a6000", plain, 4)


def test_without_peer_to_peer_graphs_cost_memory_and_it_is_said() -> None:
    """Graphs without peer-to-peer were seen to be large before 0.21 (vllm#7553)."""
    asked: dict[str, Any] = {"gpus_per_node": 4, "tensor": 4, "max_model_len": 8192, "engine_version": "0.20"}
    with_peers, without = (
        solved("qwen3-32b", "l40s", links=Links(4, 1, None, "SYS", can), **asked) for can in (True, False)
    )
    assert with_peers.memory is not None and without.memory is not None
    assert without.memory.cuda_graph_gib.likely > with_peers.memory.cuda_graph_gib.likely
    assert any("no peer-to-peer" in warning for warning in without.warnings)
    assert not any("no peer-to-peer" in warning for warning in with_peers.warnings)


# ---- its GPUs --------------------------------------------------------------------------------------------------------


TWO = """0, GPU-4f1c9a52-0000-0000-0000-000000000000, NVIDIA H200, 143771, 143000
1, GPU-77aa0000-0000-0000-0000-000000000000, NVIDIA H200, 143771, 12000
"""


def test_only_visible_gpus_with_memory_figures_count() -> None:
    wanted = {None: [0, 1], "1": [1], "0,1": [0, 1], "GPU-77aa": [1], "": [], "3": [], " 0 , GPU-77": [0, 1]}
    assert {visible: [gpu.index for gpu in detect.parse_gpus(TWO, visible)[0]] for visible in wanted} == wanted
    (first, _), unread = detect.parse_gpus(TWO, None)
    assert (first.memory_bytes, first.memory_free_bytes) == (143771 * MIB, 143000 * MIB)
    assert unread == []


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Insufficient Permissions]", "[Unknown Error]"])
def test_a_gpu_whose_memory_is_not_known_is_named(word: str) -> None:
    text = f"{TWO}2, GPU-3c, NVIDIA GB10, {word}, {word}\n"
    named = f"GPU 2 (NVIDIA GB10): nvidia-smi prints {word} for its memory, {word} for what is free"
    for visible, indices, unread in (
        (None, [0, 1], [named]),
        ("2", [], [named]),
        ("GPU-3", [], [named]),
        ("1", [1], []),
    ):
        gpus, others = detect.parse_gpus(text, visible)
        assert ([gpu.index for gpu in gpus], others) == (indices, unread)


@pytest.mark.parametrize(
    ("visible", "unread"),
    [
        ("MIG-77aa0000-0000-0000-0000-000000000000", 1),
        ("MIG-GPU-4f1c9a52-0000-0000-0000-000000000000/1/0", 1),
        ("0,MIG-1,7", 2),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("", 0),
    ],
)
def test_a_visible_device_that_the_driver_does_not_list_is_named(visible: str, unread: int) -> None:
    gpus, others = detect.parse_gpus(TWO, visible)
    assert ([gpu.index for gpu in gpus], len(others)) == ([0] if visible.startswith("0") else [], unread)
    assert all("nvidia-smi lists no such GPU" in text and text.split()[2].rstrip(",") in visible for text in others)
    assert detect.parse_gpus("No devices were found\n", visible) == ([], []), "a machine without GPUs"


def test_this_machine_and_a_plan_for_it_name_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(detect, "nvidia_smi", lambda *_: "0, GPU-1, NVIDIA GB10, [N/A], [N/A]\n")
    machine = detect.this_machine()
    assert machine.gpus == () and "NVIDIA GB10" in machine.unread[0]
    with pytest.raises(UserError, match="cannot plan for this machine") as refused:
        planning.request_for("llama-3.1-8b", {})
    assert refused.value.detail == machine.unread[0]
