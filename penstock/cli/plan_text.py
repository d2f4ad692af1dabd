"""What `penstock plan` shows: a `Sizing` as text of at most 100 columns."""

from __future__ import annotations

import io
import itertools
import re
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.cli import output
from penstock.deployment import measured, planning
from penstock.planner import engine_limits
from penstock.planner.ranges import Range
from penstock.planner.request import (
    KvAnswer,
    Lever,
    RankMemory,
    RejectedLayout,
    Settings,
    Sizing,
    SizingRequest,
    SpeedAnswer,
    stage_letter,
)
from penstock.planner.users import Users
from penstock.spec.deployment import Parallel
from penstock.text import show_bytes, show_seconds

WIDTH = 100
_MIN_WIDTH = 60
_NARROW = 72  # below it, levers are without their tokens
_BAR_CELLS = 76
_MAX_NODES = 8
_MAX_BARS = 8
_MAX_REJECTED = 12
_MAX_LEVERS = 5
_FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)

Span = tuple[str, str]  # words and their style
Cell = str | tuple[Span, ...]


class Grid(NamedTuple):
    """Rows of aligned columns, the last of them wrapped under itself. `right`: columns of numbers."""

    rows: Sequence[Sequence[Cell]]
    right: Collection[int] = ()
    indent: int = 2


class Kind(NamedTuple):
    name: str
    block: str
    style: str
    meaning: str = ""


# Blocks differ by shape as well as colour.
KINDS = (
    Kind("weights", "█", "blue"),
    Kind("KV cache", "▓", "green"),
    Kind("activations", "▒", "yellow"),
    Kind("graphs", "░", "magenta"),
    Kind("other", "=", "cyan", "context, NCCL, workspaces"),
    Kind("unused", "-", "dim", "another stage has less"),
    Kind("reserve", "·", "dim", "not given to the engine"),
)
_MEANING_WIDTH = 45  # of a row of figures, without the numbers


class Bar(NamedTuple):
    """A rank class: GiB in the order of KINDS, which add up to `total_gib` unless they go beyond the card.
    `over_gib` is what goes beyond the budget, or the card."""

    name: str
    parts: tuple[float, ...]
    total_gib: float
    budget_gib: float
    over_gib: float = 0.0


def text(
    request: SizingRequest,
    sizing: Sizing,
    width: int = WIDTH,
    has_colour: bool = False,
    up: Sequence[str] | None = None,
) -> str:
    """The whole view, without a newline at the end. No line is over `width` columns (60 to 100) but for long words."""
    width = max(_MIN_WIDTH, min(WIDTH, width))
    shown = output.render(page(sections(request, sizing, width)), width, has_colour)
    if not sizing.fits or engine_limits.checkpoint_to_make(request):  # the warnings say what to serve
        return shown
    ours, engine = planning.up_words(request, sizing) if up is None else up, planning.serve_words(request, sizing)
    commands = [("start it", ours), ("or the engine alone", engine)] if ours else [("start the engine", engine)]
    return "\n\n".join([shown, *(_command(*command, width, has_colour) for command in commands)])


def svg(request: SizingRequest, sizing: Sizing) -> str:
    """The view without the commands as an SVG picture, which must not fetch its fonts when it is opened."""
    from rich.console import Console

    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, markup=False)
    console.print(page(sections(request, sizing)))
    return _FONTS.sub("", console.export_svg(title="penstock plan"))


def explained(formulas: Mapping[str, Sequence[str]], width: int = WIDTH, has_colour: bool = False) -> str:
    if not formulas:
        return "nothing was counted: no layout is legal"
    grids = [_title("how it was counted")]
    for name, lines in formulas.items():
        grids += [_title(name), Grid([[line] for line in lines])]
    return output.render(page([grids]), max(_MIN_WIDTH, min(WIDTH, width)), has_colour)


def page(parts: Sequence[Sequence[Grid]]) -> Any:
    """The sections as a rich renderable, with an empty line between them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    drawn: list[Any] = []
    for grids in filter(None, parts):
        drawn += [""] if drawn else []
        for grid in grids:
            table = Table.grid(padding=(0, 2, 0, 0))
            n_columns = len(grid.rows[0])
            for column in range(n_columns):
                justify: Any = "right" if column in grid.right else "left"
                table.add_column(justify=justify, no_wrap=column < n_columns - 1, overflow="fold")
            for row in grid.rows:
                table.add_row(*(Text(cell) if isinstance(cell, str) else Text.assemble(*cell) for cell in row))
            drawn.append(Padding(table, (0, 0, 0, grid.indent)))
    return Group(*drawn)


def sections(request: SizingRequest, sizing: Sizing, width: int = WIDTH) -> list[list[Grid]]:
    return [
        _verdict(request, sizing),
        _bars(sizing, width),
        _nodes(sizing.layout, request, width) if sizing.layout is not None else [],
        _kv(sizing.kv, sizing.settings) if sizing.kv is not None else [],
        _speed(sizing.speed, request) if sizing.speed is not None else [],
        _users(sizing.users) if sizing.users is not None else [],
        _levers(sizing.levers, sizing, width),
        _rejected(sizing.rejected),
        [_title("warning:", warning) for warning in sizing.warnings],
    ]


def _title(name: str, words: str = "") -> Grid:
    return Grid([[((name, "bold"),), words]] if words else [[((name, "bold"),)]], indent=0)


def layout_text(layout: Parallel | RejectedLayout) -> str:
    """ "TP8 x PP2", "TP1", "TP1 x DP8 + EP"."""
    sizes = [f"TP{layout.tensor}"]
    sizes += [f"PP{layout.pipeline}"] if layout.pipeline > 1 else []
    sizes += [f"DP{layout.data}"] if layout.data > 1 else []
    return " x ".join(sizes) + (" + EP" if layout.expert else "")


def subject_text(request: SizingRequest, sizing: Sizing) -> str:
    """What was asked: "llama-3.1-70b on 2 nodes x 8 H100 over ib-ndr, vLLM 0.33"."""
    settings = sizing.settings
    nodes = f"{request.nodes} nodes x {request.gpus_per_node}" if request.nodes > 1 else f"{request.gpus_per_node} x"
    network = f" over {request.network}" if request.network and request.nodes > 1 else ""
    return f"{request.facts.reference} on {nodes} {settings.gpu_name}{network}, vLLM {settings.engine_version}"


def _verdict(request: SizingRequest, sizing: Sizing) -> list[Grid]:
    word, style = ("FITS", "bold green") if sizing.fits and not sizing.missed else ("DOES NOT FIT", "bold red")
    spans = [("DOES NOT START" if sizing.is_refused else "TOO SLOW" if sizing.missed else word, style)]
    if sizing.layout is not None:
        n_all = request.nodes * request.gpus_per_node
        spans.append((f"  {layout_text(sizing.layout)}: {sizing.layout.n_ranks} of {_count(n_all, 'GPU')}", ""))
    start = (measured.show_start(sizing.start),) if sizing.start is not None else ()
    reasons = [[reason] for reason in (*sizing.missed, sizing.reason, *start)]
    return [Grid([[subject_text(request, sizing)], [tuple(spans)]], indent=0), Grid(reasons)]


# ---- memory ----------------------------------------------------------------------------------------------------------


def bars(sizing: Sizing) -> list[Bar]:
    if sizing.memory is None:
        return []
    total, budget = sizing.memory.total_gib.likely, sizing.memory.budget_gib.likely
    return [_bar(rank, total, budget) for rank in sizing.ranks]


def _bar(rank: RankMemory, total_gib: float, budget_gib: float) -> Bar:
    uses = (
        *(rank.weights_gib, max(0.0, rank.kv_cache_gib), rank.activation_gib, rank.cuda_graph_gib),
        *(rank.non_torch_gib, rank.unused_gib),
    )
    shown = tuple(round(use, 2) for use in uses)
    total = round(total_gib, 2)
    reserve = round(total - sum(shown), 2)
    # Less than nothing for the KV cache: the budget is overdrawn by it, though the card may have that much.
    over = max(0.0, -reserve, -round(rank.kv_cache_gib, 2))
    name = f"{rank.name} ({rank.n_gpus})" if rank.n_gpus > 1 else rank.name
    return Bar(name, (*shown, max(0.0, reserve)), total, budget_gib, over)


def cells(parts: Sequence[float], total: float, n_cells: int) -> list[int]:
    """`n_cells` in proportion to `parts` of `total`, the largest remainders rounded up, at least one for each part.
    (50, 30, 20) of 100 over 7 -> 4, 2, 1; (98, 1, 1) of 100 over 10 -> 8, 1, 1."""
    whole = max(total, sum(parts)) or 1.0
    exact = [part / whole * n_cells for part in parts]
    counts = [int(share) for share in exact]
    left = round(sum(exact)) - sum(counts)
    for index in sorted(range(len(parts)), key=lambda at: counts[at] - exact[at])[:left]:
        counts[index] += 1
    for index, part in enumerate(parts):
        largest = counts.index(max(counts))
        if part > 0 and not counts[index] and counts[largest] > 1:
            counts[index], counts[largest] = 1, counts[largest] - 1
    return counts


def _bars(sizing: Sizing, width: int) -> list[Grid]:
    every = bars(sizing)
    if not every:
        return []
    how = f"measured on {sizing.measured_on}" if sizing.measured_on else "estimates: the likely ones"
    shown = every if len(every) <= _MAX_BARS else every[: _MAX_BARS - 1] + every[-1:]
    name_width = max(len(bar.name) for bar in shown)
    n_cells = min(_BAR_CELLS, width - 4 - name_width)
    drawn: list[list[Cell]] = []
    for bar in shown:
        counts = cells(bar.parts, bar.total_gib, n_cells)
        blocks = ((kind.block * count, kind.style) for kind, count in zip(KINDS, counts, strict=True))
        drawn.append([bar.name, tuple(blocks)])
        if bar.over_gib:
            drawn.append(["", ((_budget_mark(bar, n_cells), "red"),)])
    grids = [_title("memory of one GPU, GiB", f"(activations, graphs and other are {how})"), Grid(drawn)]
    if len(shown) < len(every):
        grids.append(Grid([[f"({len(every) - len(shown)} more classes between the last two)"]]))
    n_beside = max(1, (width - _MEANING_WIDTH) // (name_width + 2))
    return [*grids, *(_figures(shown[at : at + n_beside]) for at in range(0, len(shown), n_beside))]


def _figures(shown: Sequence[Bar]) -> Grid:
    rows = [["", *(bar.name for bar in shown), ""]] if len(shown) > 1 else []
    for index, kind in enumerate(KINDS):
        if any(bar.parts[index] for bar in shown):
            rows.append([f"{kind.block} {kind.name}", *(f"{bar.parts[index]:.2f}" for bar in shown), kind.meaning])
    rows.append(["  total", *(f"{bar.total_gib:.2f}" for bar in shown), ""])
    return Grid(rows, right=range(1, len(shown) + 1))


def _budget_mark(bar: Bar, n_cells: int) -> str:
    at = round(bar.budget_gib / max(bar.total_gib, sum(bar.parts)) * n_cells)
    words = f"the budget ends here: {bar.budget_gib:.2f}, it is {bar.over_gib:.2f} too little"
    return " " * at + f"^ {words}" if at + 2 + len(words) <= n_cells else f"{words} ^".rjust(at + 1)


# ---- nodes -----------------------------------------------------------------------------------------------------------


def placement(layout: Parallel, gpus_per_node: int, n_nodes: int) -> list[list[tuple[int, int] | None]]:
    """(stage, data rank) of each GPU of each node, None for an idle one; both from 0.
    Tensor is innermost, then pipeline, then data (vLLM's `distributed/parallel_state.py`). A replica's ranks, or else a
    stage's, stay on one node where they fit. TP2 x PP2 on 8 GPUs: A A B B idle idle idle idle."""
    replica, stage_size = layout.tensor * layout.pipeline, layout.tensor
    unit = replica if replica <= gpus_per_node else stage_size if stage_size <= gpus_per_node else 1
    used = gpus_per_node // unit * unit
    ranks, nodes = iter(range(layout.n_ranks)), []
    for _ in range(n_nodes):
        row = [(rank // stage_size % layout.pipeline, rank // replica) for rank in itertools.islice(ranks, used)]
        nodes.append([*row, *[None] * (gpus_per_node - len(row))])
    return nodes


def _nodes(layout: Parallel, request: SizingRequest, width: int) -> list[Grid]:
    placed = placement(layout, request.gpus_per_node, request.nodes)
    drawn = [_row_text([_place_text(place, layout) for place in row], width) for row in placed]
    meaning = ["letters are pipeline stages" if layout.pipeline > 1 else "A is a GPU in use"]
    meaning += ["numbers data-parallel ranks"] if layout.data > 1 else []
    meaning += ["a dot is an idle GPU"] if any(place is None for row in placed for place in row) else []
    grids = [_title("nodes", ", ".join(meaning))]
    if request.links is not None:
        grids.append(Grid([[f"this machine: {request.links.words}"]]))
    rows, first = [], 1
    for row, alike in itertools.groupby(drawn):
        last = first + len(list(alike)) - 1
        rows.append([f"node {first}" if first == last else f"nodes {first}-{last}", row])
        first = last + 1
    if len(rows) <= _MAX_NODES:
        return [*grids, Grid(rows)]
    rows = rows[: _MAX_NODES - 1]
    rest = placed[int(rows[-1][0].split()[-1].split("-")[-1]) :]
    n_idle = sum(all(place is None for place in row) for row in rest)
    more = f"... and {_count(len(rest) - n_idle, 'more node')} in use" + (f", {n_idle} idle" if n_idle else "")
    return [*grids, Grid(rows), Grid([[more]])]


def _place_text(place: tuple[int, int] | None, layout: Parallel) -> str:
    if place is None:
        return "."
    return stage_letter(place[0]) + (str(place[1] + 1) if layout.data > 1 else "")


def _row_text(places: Sequence[str], width: int) -> str:
    """The GPUs of a node side by side; a long row as runs ("A1 x36, B1 x36")."""
    row = " ".join(place.ljust(max(map(len, places))) for place in places).rstrip()
    if len(row) <= width - 20:
        return row
    runs = ", ".join(f"{place} x{len(list(alike))}" for place, alike in itertools.groupby(places))
    return textwrap.shorten(runs, width - 20, placeholder=" ...")


# ---- KV cache, speed, users ------------------------------------------------------------------------------------------


def _kv(kv: KvAnswer, settings: Settings) -> list[Grid]:
    length = f" of {settings.max_model_len:,} tokens"
    token = f"one token of the whole model: {show_bytes(kv.bytes_per_token)}"
    if not kv.num_blocks:
        request = f"one request{length} takes {kv.per_gpu_gib_one_request:.2f} GiB a GPU"
        return [_title("KV cache", "no room"), Grid([[f"{request}; {token}"]])]
    one = f"one takes {kv.per_gpu_gib_one_request:.2f} GiB a GPU"
    lines = [
        f"requests{length} at once: {kv.max_concurrency:.2f}; {one}",
        f"longest request that fits: {kv.largest_max_model_len:,} tokens; {token}",
    ]
    first = f"{kv.tokens:,} tokens in {kv.num_blocks:,} blocks of {kv.block_size}"
    return [_title("KV cache", first), Grid([[line] for line in lines])]


def _speed(speed: SpeedAnswer, request: SizingRequest) -> list[Grid]:
    asked = f"{request.input_tokens:,} tokens in, {request.output_tokens:,} out, {request.concurrency:,} at once"
    rows = [
        ["", "low", "likely", "high", ""],
        _speed_row("time to first token, ms", speed.ttft_ms, request.ttft_ms),
        _speed_row("time per token after, ms", speed.tpot_ms, request.tpot_ms),
        _speed_row("output tokens a second", speed.output_tokens_per_s, None),
        _speed_row("requests a second", speed.requests_per_s, None),
    ]
    return [_title("speed", f"{asked} (estimates)"), Grid(rows, right=(1, 2, 3))]


def _speed_row(name: str, spread: Range, limit: float | None) -> list[str]:
    values = [_figure(value) for value in (spread.low, spread.likely, spread.high)]
    word = "" if limit is None else f"{'within' if spread.likely <= limit else 'OVER'} the {limit:g} asked"
    return [name, *values, word]


def _users(users: Users) -> list[Grid]:
    if not users.n_at_once:
        return [_title("users", f"none; the first limit: {users.first_limit}")]
    people = users.n_users
    counts = f"about {people.likely:,.0f} people ({people.low:,.0f} to {people.high:,.0f})"
    wait = f"{users.n_at_once:,} of them wait for a reply at any time"
    whole = f"a whole reply takes {show_seconds(users.response_s.likely)}"
    return [
        _title("users", f"{counts}; the first limit: {users.first_limit}"),
        Grid([[f"{wait}, {whole}; assumed: {users.assumed}"]]),
    ]


# ---- what else -------------------------------------------------------------------------------------------------------


def _levers(levers: Sequence[Lever], sizing: Sizing, width: int) -> list[Grid]:
    if not levers:
        return []
    now = sizing.kv.max_concurrency if sizing.kv is not None and sizing.fits else 0.0
    rows = [["", "KV tokens", "at once", "ask with"]]
    for lever in levers[:_MAX_LEVERS]:
        gain = f" (x{lever.max_concurrency / now:.1f})" if now else ""
        at_once = f"{lever.max_concurrency:.2f}{gain}" if lever.fits else ""
        note = f"({lever.note})" if lever.note and lever.flags else lever.note
        words = "  ".join(filter(None, (" ".join(lever.flags), note)))
        rows.append([lever.name, f"{lever.tokens:,}" if lever.fits else "no fit", at_once, words])
    if width < _NARROW:
        rows = [[name, at_once or tokens, words] for name, tokens, at_once, words in rows]
    return [_title("levers"), Grid(rows)]


def _rejected(rejected: Sequence[RejectedLayout]) -> list[Grid]:
    if not rejected:
        return []
    groups = by_reason(rejected)
    grids = [_title("not chosen"), Grid(groups[:_MAX_REJECTED])]
    n_more = len(groups) - _MAX_REJECTED
    if n_more > 0:
        grids.append(Grid([[f"... and {n_more:,} more reasons: --json has all {len(rejected):,} layouts"]]))
    return grids


def by_reason(rejected: Sequence[RejectedLayout]) -> list[list[str]]:
    """[layouts, reason] of the refused ones: ["TP1 and 3 more", "weights take ..."]; tensor sizes are listed."""
    groups: dict[str, list[RejectedLayout]] = {}
    for layout in rejected:
        groups.setdefault(layout.reason.removesuffix(f" by tensor {layout.tensor}"), []).append(layout)
    rows = []
    for reason, alike in groups.items():
        name = layout_text(alike[0]) + (f" and {len(alike) - 1} more" if len(alike) > 1 else "")
        if alike[0].reason != reason:
            reason += " by tensor " + ", ".join(str(layout.tensor) for layout in alike)
        rows.append([name, reason])
    # What fits and was not chosen first; the many sizes that memory refuses last.
    return sorted(rows, key=lambda row: 0 if " by tensor " in row[1] else 1 if row[1].startswith("fits") else 2)


def _command(title: str, words: Sequence[str], width: int, has_colour: bool) -> str:
    """A command line, a flag with its value never torn apart, nor a long word."""
    line = words[0]
    for word, before in zip(words[1:], words, strict=False):
        is_value = before.startswith("-") and not word.startswith("-")
        line += ("\0" if is_value else " ") + shlex.quote(word)
    wrapper = textwrap.TextWrapper(width - 2, "  ", "    ", break_long_words=False, break_on_hyphens=False)
    shown = f"\033[1m{title}\033[0m" if has_colour else title
    return f"{shown}\n" + " \\\n".join(wrapper.wrap(line)).replace("\0", " ")


def _figure(value: float) -> str:
    """Three digits that matter: 0.1234 -> "0.123", 12.34 -> "12.3", 1234.5 -> "1,234"."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
