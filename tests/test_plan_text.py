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
from hypothesis import given
from hypothesis import strategies as st
from plan_shapes import planned

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


FITS = planned("llama-3.1-70b", "h100-sxm", gpus_per_node=8, ttft_ms=500, tpot_ms=40, context_per_user=8000)
ON_THREE: dict[str, Any] = {"gpus_per_node": 4, "nodes": 3, "network": "eth-25g", "tensor": 4, "pipeline": 2}
ON_128: dict[str, Any] = {"gpus_per_node": 8, "nodes": 128, "network": "ib-ndr-400", "tensor": 8, "pipeline": 4}
CASES: dict[str, tuple[SizingRequest, Sizing]] = {
    "fits": FITS,
    "pipeline": planned("llama-3.1-70b", "a100-sxm4-40", **ON_THREE),
    "does-not-fit": planned("llama-3.1-70b", "h100-sxm"),
    "illegal": planned("llama-3.1-70b", "h100-sxm", gpus_per_node=8, tensor=3),
    "1024-gpus": planned("deepseek-v3", "h100-sxm", data=16, expert=True, **ON_128),
    "rack": planned("llama-3.1-70b", "gb200", gpus_per_node=72, tensor=8, pipeline=2, data=4),
    "too-slow": planned("llama-3.1-8b", "h100-sxm", ttft_ms=1, tpot_ms=3),
    "kv-alone": planned("llama-3.1-70b", "h100-sxm", gpus_per_node=4, tensor=4, available_kv_gib=(20.0,)),
    "does-not-start": planned("qwen3-0.6b", "t4", kv_cache_dtype="fp8"),
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


@pytest.mark.parametrize("width", [60, 71, 72, 80, plan_text.WIDTH])
def test_no_line_is_wider_than_the_terminal_and_none_ends_in_blanks(width: int) -> None:
    for name, case in CASES.items():
        lines = plan_text.text(*case, width).splitlines()
        assert [line for line in lines if len(line) > width or line != line.rstrip()] == [], name
    assert "--kv-cache-dtype" in plan_text.text(*planned("llama-3.1-8b", "h100-sxm"), width), "no flag is broken"


def test_a_bar_adds_up_to_the_card_or_says_by_how_much_not() -> None:
    assert plan_text.cells((50, 30, 20), 100, 7) == [4, 2, 1]
    assert plan_text.cells((98, 1, 1), 100, 10) == [8, 1, 1]
    for name in ("fits", "pipeline", "1024-gpus", "rack"):
        for bar in plan_text.bars(CASES[name][1]):
            assert sum(bar.parts) == pytest.approx(bar.total_gib, abs=0.001)
            assert sum(plan_text.cells(bar.parts, bar.total_gib, 76)) == 76
            assert bar.over_gib == 0
    (bar,) = plan_text.bars(CASES["does-not-fit"][1])
    assert 58 < bar.over_gib < 66  # the budget lacks it, though the card would have more


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
    request, illegal = CASES["illegal"]
    shown = plan_text.text(request, replace(illegal, rejected=many))
    assert "... and 26 more reasons: --json has all 38 layouts" in shown


def test_what_joins_this_machines_gpus_is_shown_and_a_long_path_is_whole() -> None:
    request, fits = FITS
    here = replace(request, links=Links(8, 2, 56.0, "SYS", False))
    words = "this machine: NVLink joins groups of 2, PCIe (SYS) the rest, no peer-to-peer"
    assert words in plan_text.text(here, fits) and "this machine" not in plan_text.text(*FITS)
    assert [stage_letter(n) for n in (0, 25, 26, 701)] == ["A", "Z", "AA", "ZZ"]
    path = "/models/" + "deep/" * 30 + "llama"  # a long path is not torn apart in a command
    there = replace(request, facts=replace(request.facts, reference=path, hub_id=None))
    assert f"vllm serve {path} \\\n" in plan_text.text(there, fits).replace("serve \\\n    ", "serve ")


def shape(value: Any) -> Any:
    """The fields of JSON, with the type of each; of a list its first item."""
    if isinstance(value, dict):
        return {name: shape(field) for name, field in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def test_json_has_exactly_the_contract() -> None:
    plain = json.loads(json.dumps(contract(FITS[1])))
    compare("contract", json.dumps(shape(plain), indent=1) + "\n")
    drawn = plan_text.svg(*FITS)  # the picture is the view, and fetches nothing
    assert drawn.startswith("<svg") and "475,648" in drawn and "█" in drawn and "url(http" not in drawn
