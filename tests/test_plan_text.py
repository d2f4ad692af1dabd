"""What `penstock plan` shows: golden text of the view and of --explain, and what must hold of every bar and placement.

PENSTOCK_WRITE_GOLDEN=1 writes the golden files anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import plan_shapes as shapes
import pytest
import sizing_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import plan_text
from penstock.hardware import Links, catalog
from penstock.models import catalog as models_catalog
from penstock.planner import layouts
from penstock.planner.engine_versions import profile
from penstock.planner.explain import explanation
from penstock.planner.request import RejectedLayout, Sizing, SizingRequest, contract, stage_letter
from penstock.planner.solve import sizing_of
from penstock.spec.deployment import Parallel

GOLDEN = Path(__file__).parent / "golden" / "plan"
replace = msgspec.structs.replace


def with_gpus(sizing: Sizing, n_gpus: int, **fields: Any) -> Sizing:
    return replace(sizing, ranks=tuple(replace(rank, n_gpus=n_gpus) for rank in sizing.ranks), **fields)


WIDE_REQUEST = replace(samples.REQUEST, gpus_per_node=8, nodes=128, network="ib-ndr-400")
WIDE = with_gpus(samples.FITS, 512, layout=Parallel(8, 4, 16, True), levers=(), rejected=(), users=None)
RACK_REQUEST = replace(samples.REQUEST, gpu="gb200", gpus_per_node=72, nodes=1)
CASES: dict[str, tuple[SizingRequest, Sizing]] = {
    "fits": (samples.REQUEST, samples.FITS),
    "pipeline": (samples.PIPELINE_REQUEST, samples.PIPELINE),
    "does-not-fit": (samples.REQUEST, samples.SHORT),
    "illegal": (samples.REQUEST, samples.ILLEGAL),
    "1024-gpus": (WIDE_REQUEST, WIDE),
    "rack": (RACK_REQUEST, with_gpus(WIDE, 64, layout=Parallel(8, 2, 4))),
    "too-slow": (
        samples.REQUEST,
        replace(samples.FITS, missed=("tpot_ms 12 is missed: likely 15.3 ms (an estimate)",)),
    ),
    "kv-alone": (samples.REQUEST, replace(samples.FITS, memory=None, speed=None, users=None, levers=(), rejected=())),
}


def compare(name: str, shown: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        path.write_text(shown, "utf-8")
    assert shown == path.read_text("utf-8")


@pytest.mark.parametrize("name", CASES)
def test_the_view_is_the_golden_text(name: str) -> None:
    shown = plan_text.text(*CASES[name])
    compare(name, shown + "\n")
    coloured = plan_text.text(*CASES[name], has_colour=True)
    assert "\033[" in coloured and "\033[" not in shown
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == shown


def explained(model: str, gpu: str = "h100-sxm", **asked: Any) -> str:
    request = shapes.asked(model, gpu, **asked)
    return plan_text.explained(explanation(request, sizing_of(request, catalog.gpu(gpu))))


def test_every_formula_is_explained_as_in_the_golden_text() -> None:
    """Published figures: 140 GB and 39.06 GiB for the 70B, 811.71 GB for the 405B; 56,821 blocks in a log of the 8B."""
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("llama-3.1-70b", "h100-sxm", {"gpus_per_node": 2, "tensor": 2, "gpu_memory_gib": 120}),
        ("llama-3.1-405b", "h100-sxm", {"gpus_per_node": 16, "max_model_len": 8192}),
        ("llama-3.1-8b", "h200-sxm", {"max_model_len": 8192, "available_kv_gib": (110.98,)}),
        ("deepseek-v3", "h200-sxm", {"gpus_per_node": 8}),
        ("qwen3-next-80b-a3b", "h200-sxm", {"gpus_per_node": 8}),
        ("gemma-3-27b", "h100-sxm", {"kv_cache_dtype": "fp8"}),
        *(
            ("llama-3.1-70b", "h100-sxm", {"gpus_per_node": 4, "tensor": 4, "max_model_len": 8192, "engine_version": v})
            for v in ("0.20", "0.33")
        ),
        ("llama-3.1-70b", "h100-sxm", {"gpus_per_node": 8, "tensor": 3}),
    ]
    compare("explain", "\n\n".join(f"# {m} {g} {a}\n{explained(m, g, **a)}" for m, g, a in asked) + "\n")


def test_every_model_of_the_catalogue_is_answered_and_explained() -> None:
    for model in set(models_catalog.model_names()) - {"deepseek-v4-flash"}:
        request = shapes.asked(model, "h200", gpus_per_node=4, max_model_len=4096)
        sizing = sizing_of(request, catalog.gpu("h200"))
        assert sizing.reason, model
        if sizing.fits:
            assert sizing.layout and sizing.kv and sizing.speed, model
            rules = layouts.divisibility_of(shapes.arch(model), profile())
            assert layouts.refusal(rules, sizing.layout, 4) is None, model
            assert sizing.kv.tokens > 0 and sizing.speed.tpot_ms.likely > 0, model
            assert {"weights", "one token"} <= set(explanation(request, sizing)), model


@pytest.mark.parametrize("width", [72, 80, plan_text.WIDTH])
def test_no_line_is_wider_than_the_terminal_and_none_ends_in_blanks(width: int) -> None:
    for name, case in CASES.items():
        lines = plan_text.text(*case, width).splitlines()
        assert [line for line in lines if len(line) > width or line != line.rstrip()] == [], name


def test_a_bar_adds_up_to_the_card_or_says_by_how_much_not() -> None:
    assert plan_text.cells((50, 30, 20), 100, 7) == [4, 2, 1]
    assert plan_text.cells((98, 1, 1), 100, 10) == [8, 1, 1]
    for sizing in (samples.FITS, samples.PIPELINE):
        for bar in plan_text.bars(sizing):
            assert sum(bar.parts) == pytest.approx(bar.total_gib, abs=0.001)
            assert sum(plan_text.cells(bar.parts, bar.total_gib, 76)) == 76
            assert bar.over_gib == 0
    (bar,) = plan_text.bars(samples.SHORT)
    assert bar.over_gib == pytest.approx(61.79)  # the budget lacks it, though the card would have more


@given(st.lists(st.floats(0, 100), min_size=1, max_size=7), st.integers(20, 90))
def test_cells_of_a_whole_fill_the_bar_and_hide_nothing(parts: list[float], n_cells: int) -> None:
    counts = plan_text.cells(parts, sum(parts), n_cells)
    assert sum(counts) == (n_cells if sum(parts) else 0)
    assert all(count > 0 for count, part in zip(counts, parts, strict=True) if part > 0)


@given(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 4, 8]))
def test_every_rank_is_placed_once_when_there_are_nodes_enough(t: int, p: int, d: int, gpus_per_node: int) -> None:
    layout = Parallel(t, p, d)
    rows = plan_text.placement(layout, gpus_per_node, layout.n_ranks)
    placed = [place for row in rows for place in row if place is not None]
    assert len(placed) == layout.n_ranks
    assert all(placed.count((stage, rank)) == t for stage in range(p) for rank in range(d))
    rows = plan_text.placement(Parallel(3, 1, 4), 8, 2)  # a replica stays on a node where it fits
    assert [[place and place[1] for place in row] for row in rows] == [
        [0, 0, 0, 1, 1, 1, None, None],
        [2, 2, 2, 3, 3, 3, None, None],
    ]


def test_refused_layouts_with_one_reason_stand_on_one_line_and_many_are_cut_short() -> None:
    heads = tuple(RejectedLayout(n, 1, 1, False, f"64 attention heads do not divide by tensor {n}") for n in (3, 5, 6))
    wide = tuple(RejectedLayout(1, 1, n, False, "weights take 131 GiB") for n in (1, 2))
    assert plan_text.by_reason((*heads, *wide)) == [
        ["TP3 and 2 more", "64 attention heads do not divide by tensor 3, 5, 6"],
        ["TP1 and 1 more", "weights take 131 GiB"],
    ]
    many = tuple(RejectedLayout(1, 1, n, False, f"needs {n} GPUs") for n in range(2, 40))
    shown = plan_text.text(samples.REQUEST, replace(samples.ILLEGAL, rejected=many))
    assert "... and 26 more reasons: --json has all 38 layouts" in shown


def test_what_joins_this_machines_gpus_and_a_refused_start_are_shown() -> None:
    here = replace(samples.REQUEST, links=Links(8, 2, 56.0, "SYS", False))
    words = "this machine: NVLink joins groups of 2, PCIe (SYS) the rest, no peer-to-peer"
    assert words in plan_text.text(here, samples.FITS) and "this machine" not in plan_text.text(*CASES["fits"])
    assert "DOES NOT START" in plan_text.text(samples.REQUEST, replace(samples.SHORT, is_refused=True))
    assert [stage_letter(n) for n in (0, 25, 26, 701)] == ["A", "Z", "AA", "ZZ"]
    path = "/models/" + "deep/" * 30 + "llama"  # a long path is not torn apart in a command
    request = replace(samples.REQUEST, facts=replace(samples.FACTS, reference=path, hub_id=None))
    assert f"vllm serve {path} \\\n" in plan_text.text(request, samples.FITS).replace("serve \\\n    ", "serve ")


def test_json_has_exactly_the_contract() -> None:
    compare("contract", json.dumps(contract(samples.FITS), indent=1) + "\n")


def test_the_picture_is_an_svg_of_the_view_that_fetches_nothing() -> None:
    drawn = {name: plan_text.svg(*case) for name, case in CASES.items()}["fits"]
    assert drawn.startswith("<svg") and "481,680" in drawn and "█" in drawn and "url(http" not in drawn
