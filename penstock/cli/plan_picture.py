"""The view of `penstock plan` as a picture, PNG or SVG: bars, nodes, KV cache and speed, levers, refused layouts.

Needs matplotlib, the extra "plot"; nothing else imports it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from penstock.cli.plan_text import (
    KINDS,
    Bar,
    bars,
    by_reason,
    cell_text,
    layout_text,
    placement,
    stage_letter,
    subject_text,
    verdict_text,
)
from penstock.errors import UserError
from penstock.planner import request as types

SUFFIXES = (".png", ".svg")
_WIDTH_IN, _DPI = 11.0, 150
_MAX_BARS, _MAX_NODES, _MAX_ROWS = 8, 8, 8
_GREY, _GREEN, _RED = "#555555", "#007A55", "#B3261E"
# A stage's colour in the drawing of the nodes: ColorBrewer's Set2, repeated beyond eight. https://colorbrewer2.org
_STAGES = ("#66C2A5", "#FC8D62", "#8DA0CB", "#E78AC3", "#A6D854", "#FFD92F", "#E5C494", "#B3B3B3")


def check(path: Path) -> None:
    """Nothing when a picture can be drawn there: its suffix is known, matplotlib is installed.  Raises UserError."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f'cannot draw "{path}": not a kind of picture we write', hint="Name a file that ends in .png or .svg."
        )
    if not path.absolute().parent.is_dir():
        raise UserError(f'cannot write "{path}": no such folder')
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise UserError(
            f'cannot draw "{path}": the package matplotlib is not installed', hint="pip install 'penstock[plot]'"
        ) from exc


def save(request: types.SizingRequest, sizing: types.Sizing, path: Path) -> None:
    """Draw the answer into a file.  Raises UserError as `check` does, or when the file cannot be written."""
    check(path)
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    made = bars(sizing)
    shown = made if len(made) <= _MAX_BARS else made[: _MAX_BARS - 1] + made[-1:]
    texts = notes(sizing)
    n_nodes = min(request.nodes, _MAX_NODES) if sizing.layout is not None else 0
    heights = [
        0.9,
        0.9 + 0.5 * len(shown) if shown else 0.1,
        0.5 + 0.36 * n_nodes if n_nodes else 0.1,
        0.3 + 0.17 * texts.count("\n"),
    ]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights)), dpi=_DPI, layout="constrained")
    grid = figure.add_gridspec(4, 1, height_ratios=heights)
    _draw_title(figure.add_subplot(grid[0]), request, sizing)
    _draw_bars(figure.add_subplot(grid[1]), shown)
    _draw_nodes(figure.add_subplot(grid[2]), request, sizing)
    axes = _blank(figure.add_subplot(grid[3]))
    axes.text(0, 1, texts, va="top", ha="left", fontsize=8, family="monospace", transform=axes.transAxes)
    try:
        figure.savefig(path)
    except OSError as exc:
        raise UserError(f'could not write "{path}": {exc.strerror}') from exc


def _blank(axes: Any) -> Any:
    axes.set_axis_off()
    return axes


def _draw_title(axes: Any, request: types.SizingRequest, sizing: types.Sizing) -> None:
    _blank(axes)
    word, colour = verdict_text(sizing).lower(), _GREEN if sizing.fits else _RED
    if sizing.layout is not None:
        word += f" as {layout_text(sizing.layout)}" if sizing.fits else f": {layout_text(sizing.layout)}"
    axes.text(0, 1, subject_text(request, sizing), va="top", fontsize=12, weight="bold", transform=axes.transAxes)
    axes.text(0, 0.66, word, va="top", fontsize=12, weight="bold", color=colour, transform=axes.transAxes)
    reason = "\n".join(textwrap.wrap(sizing.reason, 140)[:2])
    axes.text(0, 0.34, reason, va="top", fontsize=9, color=_GREY, transform=axes.transAxes)


def _draw_bars(axes: Any, shown: list[Bar]) -> None:
    if not shown:
        _blank(axes)
        return
    longest = max(max(bar.total_gib, sum(bar.parts)) for bar in shown)
    for row, bar in enumerate(shown):
        left = 0.0
        for kind, part in zip(KINDS, bar.parts, strict=True):
            if not part:
                continue
            axes.barh(row, part, left=left, height=0.62, color=kind.rgb, edgecolor="white", linewidth=0.6)
            if part / longest > 0.045:
                tint = "white" if kind.name in ("weights", "KV cache") else "black"
                axes.text(left + part / 2, row, f"{part:.1f}", ha="center", va="center", fontsize=8, color=tint)
            left += part
        axes.plot([bar.budget_gib] * 2, [row - 0.42, row + 0.42], color="black", linewidth=1.2)
        if bar.over_gib:
            axes.plot([bar.total_gib] * 2, [row - 0.42, row + 0.42], color=_RED, linewidth=2)
            words = f"{bar.over_gib:.1f} GiB too much"
            axes.text(longest * 1.005, row, words, va="center", fontsize=8, color=_RED)
    axes.set_yticks(range(len(shown)), [bar.name for bar in shown], fontsize=9)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, longest * (1.12 if any(bar.over_gib for bar in shown) else 1.0))
    ends = "; the black line is where the engine's budget ends"
    ends += ", the red one the card" if any(bar.over_gib for bar in shown) else ""
    is_beside = any(not bar.over_gib and sum(bar.parts[:-1]) > bar.budget_gib + 0.05 for bar in shown)
    ends += "; the NCCL buffers are outside the budget" if is_beside else ""
    axes.set_xlabel(f"GiB of one GPU{ends}", fontsize=8, color=_GREY)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = [kind for at, kind in enumerate(KINDS) if any(bar.parts[at] for bar in shown)]
    handles = [axes.barh(0, 0, color=kind.rgb) for kind in used]
    names = [kind.name for kind in used]
    axes.legend(handles, names, ncols=len(used), fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))


def _draw_nodes(axes: Any, request: types.SizingRequest, sizing: types.Sizing) -> None:
    _blank(axes)
    layout = sizing.layout
    if layout is None:
        return
    from matplotlib.patches import Rectangle

    n_columns = max(request.gpus_per_node, 8)
    rows = placement(layout, request.gpus_per_node, request.nodes)[:_MAX_NODES]
    for row, places in enumerate(rows):
        axes.text(-0.15, row + 0.4, f"node {row + 1}", ha="right", va="center", fontsize=8)
        for column, place in enumerate(places):
            colour = "white" if place is None else _STAGES[place[0] % len(_STAGES)]
            axes.add_patch(Rectangle((column, row), 0.94, 0.8, facecolor=colour, edgecolor=_GREY, linewidth=0.6))
            if place is not None and n_columns <= 24:
                word = cell_text(place, layout)
                axes.text(column + 0.47, row + 0.4, word, ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.1 * n_columns, n_columns)
    axes.set_ylim(len(rows), -0.7)
    words = ["each square a GPU"]
    if layout.pipeline > 1:
        words.append(f"A to {stage_letter(layout.pipeline - 1)} pipeline stages")
    words += ["numbers data ranks"] if layout.data > 1 else []
    words += [f"{request.nodes - len(rows)} more nodes not drawn"] if request.nodes > len(rows) else []
    axes.text(0, -0.2, ", ".join(words), va="bottom", fontsize=8, color=_GREY)


def notes(sizing: types.Sizing) -> str:
    """KV cache, speed, users, levers and refused layouts as lines of fixed width."""
    lines: list[str] = []
    if sizing.kv is not None and sizing.kv.num_blocks:
        kv = sizing.kv
        lines += [
            f"KV cache   {kv.tokens:,} tokens, {kv.max_concurrency:.2f} full requests at once, "
            f"longest request {kv.largest_max_model_len:,} tokens"
        ]
    if sizing.speed is not None:
        ttft, tpot, rate = sizing.speed.ttft_ms, sizing.speed.tpot_ms, sizing.speed.output_tokens_per_s
        lines += [
            f"speed      first token {ttft.likely:.0f} ms ({ttft.low:.0f} to {ttft.high:.0f}), each next "
            f"{tpot.likely:.1f} ms ({tpot.low:.1f} to {tpot.high:.1f}), {rate.likely:,.0f} tokens/s (estimates)"
        ]
    if sizing.users is not None:
        lines += [f"users      about {sizing.users.n_users.likely:,.0f}; the first limit: {sizing.users.first_limit}"]
    for at, lever in enumerate(sizing.levers[:_MAX_ROWS]):
        gain = f"{lever.tokens:,} tokens, {lever.max_concurrency:.2f} at once" if lever.fits else "does not fit"
        lines.append(f"{'levers' if not at else '':11}{lever.name}: {gain}")
    groups = by_reason(sizing.rejected)
    for at, (names, reason) in enumerate(groups[:_MAX_ROWS]):
        words = textwrap.shorten(f"{names}: {reason}", 118, placeholder=" ...")
        lines.append(f"{'not chosen' if not at else '':11}{words}")
    if len(groups) > _MAX_ROWS:
        lines.append(f"{'':11}... and {len(groups) - _MAX_ROWS} more reasons")
    return "\n".join(lines) + "\n"
