"""The view of a plan: golden text, what must hold of every bar and placement, and the picture when matplotlib is here.

PENSTOCK_WRITE_GOLDEN=1 writes the golden files anew; read the difference before committing it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import msgspec
import pytest
import sizing_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import plan_picture, plan_text
from penstock.errors import UserError
from penstock.hardware import Links
from penstock.planner.request import RejectedLayout, Sizing, SizingRequest, WeightsAnswer, contract
from penstock.spec.deployment import Parallel

GOLDEN = Path(__file__).parent / "golden" / "plan"
replace = msgspec.structs.replace

WIDE_REQUEST = replace(samples.REQUEST, gpus_per_node=8, nodes=128, network="ib-ndr-400")
WIDE = replace(samples.FITS, layout=Parallel(8, 4, 16, True), levers=(), rejected=(), users=None)
RACK_REQUEST = replace(samples.REQUEST, gpu="gb200", gpus_per_node=72, nodes=1)
RACK = replace(WIDE, layout=Parallel(8, 2, 4))
CASES: dict[str, tuple[SizingRequest, Sizing]] = {
    "fits": (samples.REQUEST, samples.FITS),
    "pipeline": (samples.PIPELINE_REQUEST, samples.PIPELINE),
    "does-not-fit": (samples.REQUEST, samples.SHORT),
    "illegal": (samples.REQUEST, samples.ILLEGAL),
    "1024-gpus": (WIDE_REQUEST, WIDE),
    "rack": (RACK_REQUEST, RACK),
    "kv-alone": (samples.REQUEST, replace(samples.FITS, memory=None, speed=None, users=None, levers=(), rejected=())),
}


@pytest.mark.parametrize("name", CASES)
def test_the_view_is_the_golden_text(name: str) -> None:
    path, shown = GOLDEN / f"{name}.txt", plan_text.text(*CASES[name]) + "\n"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        path.write_text(shown, "utf-8")
    assert shown == path.read_text("utf-8")


@pytest.mark.parametrize("name", CASES)
def test_no_line_is_over_100_columns_and_none_ends_in_blanks(name: str) -> None:
    lines = plan_text.text(*CASES[name]).splitlines()
    assert [line for line in lines if len(line) > plan_text.WIDTH or line != line.rstrip()] == []


@pytest.mark.parametrize("name", CASES)
def test_colours_change_nothing_else(name: str) -> None:
    request, sizing = CASES[name]
    coloured = plan_text.text(request, sizing, True)
    assert "\033[" in coloured and "\033[" not in plan_text.text(request, sizing)
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plan_text.text(request, sizing)


def test_a_bar_adds_up_to_the_card() -> None:
    for sizing in (samples.FITS, samples.PIPELINE):
        for bar in plan_text.bars(sizing):
            assert sum(bar.parts) == pytest.approx(bar.total_gib, abs=0.001)
            assert sum(plan_text.cells(bar.parts, bar.total_gib, 76)) == 76
            assert bar.over_gib == 0


def test_a_bar_of_what_does_not_fit_says_by_how_much() -> None:
    (bar,) = plan_text.bars(samples.SHORT)
    assert bar.over_gib == pytest.approx(61.79)  # the budget lacks it, though the card would have more
    small = replace(samples.SHORT, weights=WeightsAnswer(1, 1, (70.0,)))
    assert plan_text.bars(small)[0].parts[-1] > 0


def test_stages_that_wait_for_the_tightest_have_unused_room() -> None:
    sizing = replace(samples.PIPELINE, ranks=(), weights=WeightsAnswer(1, 1, (14.0, 16.92)))
    first, second = plan_text.bars(sizing)
    unused = [kind.name for kind in plan_text.KINDS].index("unused")
    assert (first.name, second.name) == ("stage A (4)", "stage B (4)")
    assert first.parts[unused] - second.parts[unused] == pytest.approx(2.92)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=7), st.integers(20, 90))
def test_cells_of_a_whole_fill_the_bar_and_hide_nothing(parts: list[float], n_cells: int) -> None:
    counts = plan_text.cells(parts, sum(parts), n_cells)
    assert sum(counts) == (n_cells if sum(parts) else 0)
    assert all(count > 0 for count, part in zip(counts, parts, strict=True) if part > 0)


def test_cells_follow_the_worked_numbers() -> None:
    assert plan_text.cells((50, 30, 20), 100, 7) == [4, 2, 1]
    assert plan_text.cells((98, 1, 1), 100, 10) == [8, 1, 1]


@given(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 4, 8]))
def test_every_rank_is_placed_once_when_there_are_nodes_enough(t: int, p: int, d: int, gpus_per_node: int) -> None:
    layout = Parallel(t, p, d)
    rows = plan_text.placement(layout, gpus_per_node, layout.n_ranks)
    placed = [place for row in rows for place in row if place is not None]
    assert len(placed) == layout.n_ranks
    assert all(placed.count((stage, rank)) == t for stage in range(p) for rank in range(d))


def test_a_replica_stays_on_a_node_where_it_fits() -> None:
    rows = plan_text.placement(Parallel(3, 1, 4), 8, 2)
    assert [[place and place[1] for place in row] for row in rows] == [
        [0, 0, 0, 1, 1, 1, None, None],
        [2, 2, 2, 3, 3, 3, None, None],
    ]


def test_many_refused_layouts_are_cut_short() -> None:
    many = tuple(RejectedLayout(1, 1, n, False, f"needs {n} GPUs") for n in range(2, 40))
    shown = plan_text.text(samples.REQUEST, replace(samples.ILLEGAL, rejected=many))
    assert "... and 26 more reasons: --json has all 38 layouts" in shown


def test_refused_layouts_with_one_reason_stand_on_one_line() -> None:
    heads = tuple(RejectedLayout(n, 1, 1, False, f"64 attention heads do not divide by tensor {n}") for n in (3, 5, 6))
    wide = tuple(RejectedLayout(1, 1, n, False, "weights take 131 GiB") for n in (1, 2))
    assert plan_text.by_reason((*heads, *wide)) == [
        ["TP3 and 2 more", "64 attention heads do not divide by tensor 3, 5, 6"],
        ["TP1 and 1 more", "weights take 131 GiB"],
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [72, 80])
def test_a_narrow_terminal_gets_narrow_lines(name: str, width: int) -> None:
    lines = plan_text.text(*CASES[name], False, width).splitlines()
    assert [line for line in lines if len(line) > width or line != line.rstrip()] == []


def test_what_joins_this_machines_gpus_is_told() -> None:
    here = replace(samples.REQUEST, links=Links(8, 2, 56.0, "SYS", False))
    words = "this machine: NVLink joins groups of 2, PCIe (SYS) the rest, no peer-to-peer"
    assert words in plan_text.text(here, samples.FITS) and "this machine" not in plan_text.text(*CASES["fits"])


def test_an_engine_that_does_not_start_is_said_so() -> None:
    refused = replace(samples.SHORT, is_refused=True)
    assert "DOES NOT START" in plan_text.text(samples.REQUEST, refused)


def test_stages_beyond_z_go_on_in_two_letters() -> None:
    assert [plan_text.stage_letter(n) for n in (0, 25, 26, 701)] == ["A", "Z", "AA", "ZZ"]


def test_json_has_exactly_the_contract() -> None:
    plain = contract(samples.FITS)
    assert list(plain) == [
        *("fits", "reason", "layout", "weights", "kv", "memory", "speed", "rejected", "warnings", "engine_args"),
        "measured_on",
    ]
    assert list(plain["layout"]) == ["tensor", "pipeline", "data", "expert"]
    assert list(plain["weights"]) == ["total_bytes", "params", "per_gpu_gib"]
    assert list(plain["kv"]) == [
        *("bytes_per_token", "block_size", "num_blocks", "tokens", "max_concurrency", "largest_max_model_len"),
        "per_gpu_gib_one_request",
    ]
    assert list(plain["memory"]) == [
        *("total_gib", "budget_gib", "activation_gib", "cuda_graph_gib", "non_torch_gib", "kv_cache_gib"),
    ]
    assert list(plain["speed"]) == ["ttft_ms", "tpot_ms", "output_tokens_per_s", "requests_per_s"]
    assert all(
        list(spread) == ["low", "likely", "high"] for part in ("memory", "speed") for spread in plain[part].values()
    )
    assert all(list(row) == ["tensor", "pipeline", "data", "expert", "reason"] for row in plain["rejected"])


def test_a_picture_without_matplotlib_names_the_line_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UserError) as caught:
        plan_picture.save(samples.REQUEST, samples.FITS, tmp_path / "plan.png")
    assert caught.value.hint == "pip install 'penstock[plot]'"


def test_a_picture_is_a_png_or_an_svg(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a kind of picture"):
        plan_picture.check(tmp_path / "plan.jpg")
    with pytest.raises(UserError, match="no such folder"):
        plan_picture.check(tmp_path / "none" / "plan.png")


def test_what_the_picture_says_below_the_bars() -> None:
    notes = plan_picture.notes(samples.FITS)
    assert "481,680 tokens" in notes and "fp8 KV cache: 963,360 tokens" in notes and "TP3: 64 attention heads" in notes
    assert plan_picture.notes(samples.ILLEGAL).startswith("not chosen TP3: ")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_drawn(name: str, tmp_path: Path) -> None:
    plan_picture.save(*CASES[name], tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text("utf-8").count("<path") > 0
