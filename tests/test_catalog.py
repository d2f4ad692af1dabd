"""The catalogue: every row reads, every name answers, unknown names are refused with the nearest one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_files import table

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


CARDS, OTHERS = table("cards.yaml").values()


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
