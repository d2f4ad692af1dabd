"""The catalogue: every row reads, every name answers, unknown names are refused with the nearest one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.hardware import catalog
from penstock.models import catalog as models_catalog

DATA = Path(models_catalog.__file__).parent / "data"


def test_every_gpu_row_has_what_planning_needs_and_an_unknown_card_a_rule() -> None:
    rows = [catalog.gpu(name) for name in catalog.gpu_ids()]
    assert len(rows) == 25
    for row in rows:
        assert row.sources and row.mem_bw_gbs > 100 and row.memory.torch_total_gib > 10
        assert row.allreduce is not None and row.generation != "unknown"
    # The total of an unknown card follows the rule.
    for mib, gib in {24576: 23.55, 46068: 44.44, 81559: 79.10, 143771: 139.80}.items():
        assert catalog.default_total_gib(mib) == pytest.approx(gib, abs=0.01)


# As nvidia-smi and NVML print products, and labels of GPU feature discovery, GKE and EC2, types of Slurm and of Ray.
CARDS = {
    "t4": ("Tesla T4", "NVIDIA T4", "Tesla-T4", "nvidia-tesla-t4", "t4", "tesla_t4"),
    "v100-sxm2-16": ("Tesla V100-SXM2-16GB", "Tesla-V100-SXM2-16GB", "tesla_v100-sxm2-16gb"),
    "v100-sxm2-32": ("Tesla V100-SXM2-32GB",),
    "a10g": ("NVIDIA A10G", "NVIDIA-A10G", "A10G", "a10g"),
    "l4": ("NVIDIA L4", "NVIDIA-L4", "nvidia-l4", "L4"),
    "l40s": ("NVIDIA L40S", "NVIDIA-L40S", "nvidia_l40s", "l40s"),
    "a30": ("NVIDIA A30", "A30"),
    "a40": ("NVIDIA A40", "NVIDIA-A40", "a40"),
    "a100-sxm4-40": ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB", "a100-40gb", "a100_40"),
    "a100-sxm4-80": ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", "nvidia_a100-sxm4-80gb", "a100-80gb-sxm"),
    "a100-pcie-80": ("NVIDIA A100 80GB PCIe", "NVIDIA-A100-80GB-PCIe", "nvidia_a100_80gb_pcie"),
    "h100-pcie": ("NVIDIA H100 PCIe", "NVIDIA-H100-PCIe", "nvidia_h100_pcie"),
    "h100-sxm": ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3", "nvidia_h100_80gb_hbm3", "H100-SXM5"),
    "h200-sxm": ("NVIDIA H200", "NVIDIA-H200", "nvidia_h200", "h200", "nvidia-h200-141gb"),
    "b200-sxm": ("NVIDIA B200", "NVIDIA-B200", "B200", "nvidia-b200"),
    "gb200": ("NVIDIA GB200", "NVIDIA-GB200", "nvidia-gb200"),
    "b300-sxm": ("NVIDIA B300", "NVIDIA B300 SXM6 AC", "NVIDIA-B300-SXM6-AC", "b300"),
    "gb300": ("NVIDIA GB300", "nvidia-gb300"),
    "mi300x": ("AMD Instinct MI300X", "MI300X"),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090", "rtx_3090", "rtx3090"),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", "NVIDIA-GeForce-RTX-4090", "nvidia_geforce_rtx_4090", "4090"),
    "rtx-5090": ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
    "rtx-pro-6000-blackwell": (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000", "nvidia-rtx-pro-6000",
    ),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada Generation", "NVIDIA-RTX-6000-Ada-Generation", "rtx_6000_ada"),
    "rtx-a6000": ("NVIDIA RTX A6000", "NVIDIA-RTX-A6000", "RTX-A6000", "a6000"),
}  # fmt: skip
# Real products that the catalogue does not have: none is a card with a like name.
OTHERS = (
    "NVIDIA H20", "H20", "h20", "NVIDIA-H20", "nvidia_h20", "NVIDIA H20-3e", "NVIDIA H800", "NVIDIA A800-SXM4-80GB",
    "NVIDIA L40", "NVIDIA-L40", "L40", "l40", "NVIDIA L20", "NVIDIA L2", "NVIDIA A10", "NVIDIA-A10", "A10", "a10",
    "NVIDIA A2", "NVIDIA A16", "NVIDIA A100X", "NVIDIA A30X", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM-64GB",
    "NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "NVIDIA-GH200-480GB", "GH200", "gh200", "NVIDIA H100 NVL", "h100_nvl",
    "NVIDIA H200 NVL", "NVIDIA-H200-NVL", "NVIDIA H100 SXM5 64GB", "NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)",
    "Tesla V100-PCIE-16GB", "Tesla V100S-PCIE-32GB", "Tesla V100-SXM3-32GB", "Tesla P100-PCIE-16GB", "Tesla T40",
    "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX-6000",
    "NVIDIA GeForce RTX 5090 D", "Quadro RTX 6000", "rtx_6000", "NVIDIA RTX 5000 Ada Generation", "NVIDIA RTX A5000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "AMD Instinct MI300A", "AMD Instinct MI325X", "NVIDIA A40-48Q", "GRID A100-40C", "GRID T4-16Q", "NVIDIA L40S-48C",
    "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "a100_3g.20gb", "h10", "h2", "b20", "",
)  # fmt: skip


def test_a_gpu_has_the_names_of_drivers_labels_and_people_and_no_other_card_has_them() -> None:
    assert tuple(sorted(CARDS)) == tuple(sorted(catalog.gpu_ids()))
    names = {name: card for card, known in CARDS.items() for name in (card, card.upper(), *known)}
    assert {name: catalog.gpu(name).id for name in names} == names
    assert {name: catalog.gpus_named(name) for name in OTHERS} == dict.fromkeys(OTHERS, ())
    for name, mib, like in (("NVIDIA H20", 97871, "rtx-pro-6000-blackwell"), ("NVIDIA L40", 46068, "l40s")):
        card = catalog.gpu_of_machine(name, mib * 2**20)
        assert (card.id, card.stands_in) == (name, like)  # an L40S only for its memory


@pytest.mark.parametrize(
    ("name", "near"),
    [("h100-smx", "h100-sxm"), ("h20", "h200-sxm"), ("l40", "l40s, l4, a40"), ("gh200", "h200-sxm, gb200")],
)
def test_an_unknown_gpu_is_refused_with_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f'no GPU "{name}" in the catalogue') as refused:
        catalog.gpu(name)
    assert refused.value.exit_code == 2
    assert str(refused.value.hint).startswith(f"The nearest names are {near}")


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("h100", "h100-pcie, h100-sxm"),
        ("V100", "v100-sxm2-16, v100-sxm2-32"),
        ("a100_80", "a100-sxm4-80, a100-pcie-80"),
    ],
)
def test_a_name_of_several_cards_is_refused_with_them(name: str, ids: str) -> None:
    with pytest.raises(UserError, match=f'cannot identify GPU "{name}"') as unclear:
        catalog.gpu(name)
    assert unclear.value.hint == f"It is one of {ids}."


LINKS = dict.fromkeys(("ib-ndr-400", "roce-100g", "gcp-a3-ultra-roce"), "rdma")
LINKS |= dict.fromkeys(("pod-network-tcp", "gcp-tcp-fallback", "eth-25g"), "tcp")
LINKS |= dict.fromkeys(("aws-efa-3200", "gcp-tcpxo-a3-mega"), "efa")


def test_links_know_their_transport() -> None:
    assert {name: catalog.link(name).transport for name in LINKS} == LINKS
    assert all(catalog.link(name).source for name in LINKS)
    assert catalog.link("ib-ndr").id == "ib-ndr-400"
    assert catalog.link("pod-network-tcp").step_latency_us == (370, 580)
    with pytest.raises(UserError, match='no network "ib-ndr400"') as refused:
        catalog.link("ib-ndr400")
    assert "nearest names are ib-ndr-400" in str(refused.value.hint)


def test_a_card_without_a_measured_all_reduce_borrows_from_its_like() -> None:
    small = catalog.gpu("a100-sxm4-40").allreduce
    assert small is not None and small.borrowed_from == "a100-sxm4-80" and small.bus_gbs_large[8] == 228
    volta, ampere = catalog.gpu("v100-sxm2-32").allreduce, catalog.gpu("a100-sxm4-80").allreduce
    assert volta is not None and ampere is not None and ampere.borrowed_from is None
    assert volta.bus_gbs_large[8] == pytest.approx(ampere.bus_gbs_large[8] / 2)
    pro = catalog.gpu("h100-pcie").allreduce
    assert pro is not None and pro.borrowed_from == "rtx-pro-6000-blackwell"


def test_every_model_has_a_config_and_every_config_a_row() -> None:
    folders = {path.parent.name for path in (DATA / "models").glob("*/config.json")}
    assert folders == set(models_catalog.model_names()) and len(folders) == 77
    for name in folders:
        assert json.loads((DATA / "models" / name / "config.json").read_text("utf-8"))["architectures"]
        assert models_catalog.model(name).source
    # It answers to its hub id too, and a config is the caller's own copy.
    row = models_catalog.model("llama-3.1-405b")
    assert models_catalog.find(row.hf_id.upper()) == "llama-3.1-405b"
    assert models_catalog.find("vicuna-13b-v1.3") == "vicuna-13b-v1.3" and not models_catalog.find("nobody/nothing")
    every = models_catalog.model_names()
    assert [models_catalog.find(models_catalog.model(name).hf_id) for name in every] == list(every)
    models_catalog.model_config("qwen3-32b")["hidden_size"] = 1
    assert models_catalog.model_config("qwen3-32b")["hidden_size"] == 5120
