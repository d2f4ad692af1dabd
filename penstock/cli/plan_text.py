"""What `penstock plan` shows: a `Sizing` as plain text of at most 100 columns. Formats only; `cli_plan` prints.

Top to bottom: the verdict, a bar per rank class whose parts add up to the card, the layout over the nodes, the KV
cache, speed, users, levers, refused layouts, warnings, and the command. `bars` and `placement` serve the picture too.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from penstock.planner.explain import Formula
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
)
from penstock.planner.users import Users
from penstock.spec.deployment import Parallel
from penstock.text import show_bytes, show_seconds

WIDTH = 100
_MIN_WIDTH = 72
_BAR_CELLS = 76
_MAX_NODES = 8
_MAX_BARS = 8
_MAX_REJECTED = 12
_MAX_LEVERS = 5


class Kind(NamedTuple):
    """One use of a GPU's memory: its name, its block in the bar, its colour on a terminal (SGR) and in the picture."""

    name: str
    block: str
    sgr: str
    rgb: str


# Blocks differ by shape as well as colour; the picture's colours are Okabe and Ito's, told apart by colour-blind eyes:
# https://jfly.uni-koeln.de/color/
KINDS = (
    Kind("weights", "█", "34", "#0072B2"),
    Kind("KV cache", "▓", "32", "#009E73"),
    Kind("activations", "▒", "33", "#E69F00"),
    Kind("graphs", "░", "35", "#CC79A7"),
    Kind("other", "=", "36", "#56B4E9"),
    Kind("unused", "-", "2", "#DDDDDD"),
    Kind("reserve", "·", "2", "#F2F2F2"),
)
_MEANINGS = {
    "other": "other: context, NCCL, workspaces",
    "unused": "unused: another stage has less",
    "reserve": "reserve: not given to the engine",
}


class Bar(NamedTuple):
    """A rank class: GiB by kind, in the order of KINDS. `over_gib` is what goes beyond the budget, or the card.

    The parts add up to `total_gib`, unless they go beyond the card.
    """

    name: str
    parts: tuple[float, ...]
    total_gib: float
    budget_gib: float
    over_gib: float = 0.0


class Page:
    """Puts SGR colours around text, or nothing; `width` columns wide."""

    def __init__(self, has_colour: bool, width: int = WIDTH) -> None:
        self.has_colour = has_colour
        self.width = max(_MIN_WIDTH, min(WIDTH, width))

    def __call__(self, text: str, sgr: str) -> str:
        return f"\033[{sgr}m{text}\033[0m" if self.has_colour and text else text


def text(request: SizingRequest, sizing: Sizing, has_colour: bool = False, width: int = WIDTH) -> str:
    """The whole view, without a newline at the end. No line is over `width` columns (72 to 100) but for long words."""
    page = Page(has_colour, width)
    parts: list[list[str]] = [_verdict(request, sizing, page), _bars(sizing, page)]
    if sizing.layout is not None:
        parts.append(_nodes(sizing.layout, request, page))
    if sizing.kv is not None:
        parts.append(_kv(sizing.kv, sizing.settings, page))
    if sizing.speed is not None:
        parts.append(_speed(sizing.speed, request, page))
    if sizing.users is not None:
        parts.append(_users(sizing.users, page))
    parts.append(_levers(sizing.levers, sizing, page))
    parts.append(_rejected(sizing.rejected, page))
    parts.append(
        [line for warning in sizing.warnings for line in _wrapped(f"warning: {warning}", "", "  ", page, has_bold=True)]
    )
    if sizing.fits:
        parts.append(_command(request, sizing, page))
    return "\n\n".join("\n".join(part) for part in parts if part)


def explained(formulas: Sequence[Formula], has_colour: bool = False, width: int = WIDTH) -> str:
    """The formulas of `--explain`, a paragraph each."""
    page = Page(has_colour, width)
    shown = [
        "\n".join(
            [page(formula.name, "1"), *(row for line in formula.lines for row in _wrapped(line, "  ", "    ", page))]
        )
        for formula in formulas
    ]
    return "\n".join(["how it was counted", *shown]) if shown else "nothing was counted: no layout can be"


def layout_text(layout: Parallel | RejectedLayout) -> str:
    """ "TP8 x PP2", "TP1", "TP1 x DP8 + EP"."""
    sizes = [f"TP{layout.tensor}"]
    sizes += [f"PP{layout.pipeline}"] if layout.pipeline > 1 else []
    sizes += [f"DP{layout.data}"] if layout.data > 1 else []
    return " x ".join(sizes) + (" + EP" if layout.expert else "")


def subject_text(request: SizingRequest, sizing: Sizing) -> str:
    """What was asked: "llama-3.1-70b on 2 nodes x 8 H100 over ib-ndr, vLLM 0.33"."""
    gpu = sizing.settings.gpu_name if sizing.settings else request.gpu
    nodes = f"{request.nodes} nodes x {request.gpus_per_node}" if request.nodes > 1 else f"{request.gpus_per_node} x"
    network = f" over {request.network}" if request.network and request.nodes > 1 else ""
    version = sizing.settings.engine_version if sizing.settings else request.engine_version
    engine = f", vLLM {version}" if version else ""
    return f"{request.facts.reference} on {nodes} {gpu}{network}{engine}"


def bars(sizing: Sizing) -> list[Bar]:
    """A bar per rank class, from `ranks`, or from the tightest GPU's numbers where the solver gave no ranks."""
    if sizing.memory is None:
        return []
    total, budget = sizing.memory.total_gib.likely, sizing.memory.budget_gib.likely
    return [_bar(rank, total, budget) for rank in sizing.ranks or _ranks(sizing)]


def _ranks(sizing: Sizing) -> tuple[RankMemory, ...]:
    memory, weights, layout = sizing.memory, sizing.weights, sizing.layout
    if memory is None or weights is None or layout is None:
        return ()
    classes = weights.per_gpu_gib
    stages = len(classes) == layout.pipeline > 1
    kv = memory.kv_cache_gib.likely
    others = memory.activation_gib.likely, memory.cuda_graph_gib.likely, memory.non_torch_gib.likely
    made = []
    for number, own in enumerate(classes):
        name = (
            f"stage {stage_letter(number)}" if stages else "every GPU" if len(classes) == 1 else f"class {number + 1}"
        )
        unused = max(0.0, memory.budget_gib.likely - own - sum(others) - max(kv, 0.0))
        # A single class has nothing to wait for: what is left of its budget is KV cache that makes no whole block.
        if len(classes) == 1:
            unused = 0.0
        made.append(RankMemory(name, layout.n_ranks // len(classes), own, kv, *others, unused))
    return tuple(made)


def _bar(rank: RankMemory, total_gib: float, budget_gib: float) -> Bar:
    """Rounded to what is shown, so that the row adds up; the rest of the card is the reserve."""
    uses = (
        rank.weights_gib,
        max(0.0, rank.kv_cache_gib),
        rank.activation_gib,
        rank.cuda_graph_gib,
        rank.non_torch_gib,
        rank.unused_gib,
    )
    shown = tuple(round(use, 2) for use in uses)
    total = round(total_gib, 2)
    reserve = round(total - sum(shown), 2)
    # Less than nothing for the KV cache: the budget is overdrawn by it, though the card may have that much.
    over = max(0.0, -reserve, -round(rank.kv_cache_gib, 2))
    name = f"{rank.name} ({rank.n_gpus})" if rank.n_gpus > 1 else rank.name
    return Bar(name, (*shown, max(0.0, reserve)), total, budget_gib, over)


def cells(parts: Sequence[float], total: float, n_cells: int) -> list[int]:
    """`n_cells` shared out in proportion to `parts` of `total`, the largest remainders rounded up.

    Parts that add up to the total fill all cells, and none that is there is left without one (the largest gives it):
    (50, 30, 20) of 100 over 7 -> 4, 2, 1; (98, 1, 1) of 100 over 10 -> 8, 1, 1.
    """
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


def stage_letter(stage: int) -> str:
    """Pipeline stages as letters: 0 -> "A", 25 -> "Z", 26 -> "AA"."""
    high, low = divmod(stage, 26)
    return (stage_letter(high - 1) if high else "") + chr(ord("A") + low)


def placement(layout: Parallel, gpus_per_node: int, n_nodes: int) -> list[list[tuple[int, int] | None]]:
    """(stage, data rank) of each GPU of each node, None for an idle one; both from 0.

    vLLM numbers ranks with tensor innermost, then pipeline, then data (`distributed/parallel_state.py`). A replica's
    ranks, or else a stage's, stay on one node where they fit there. TP2 x PP2 on 8 GPUs: A A B B idle idle idle idle.
    """
    replica, stage_size = layout.tensor * layout.pipeline, layout.tensor
    unit = replica if replica <= gpus_per_node else stage_size if stage_size <= gpus_per_node else 1
    used = gpus_per_node // unit * unit
    nodes: list[list[tuple[int, int] | None]] = []
    rank = 0
    for _ in range(n_nodes):
        row: list[tuple[int, int] | None] = [None] * gpus_per_node
        for slot in range(used):
            if rank < layout.n_ranks:
                row[slot] = (rank // stage_size % layout.pipeline, rank // replica)
                rank += 1
        nodes.append(row)
    return nodes


def cell_text(place: tuple[int, int] | None, layout: Parallel) -> str:
    """A GPU in the drawing: its stage's letter, and its data rank from 1 where there are several; "." when idle."""
    if place is None:
        return "."
    return stage_letter(place[0]) + (str(place[1] + 1) if layout.data > 1 else "")


def verdict_text(sizing: Sizing) -> str:
    if sizing.fits:
        return "FITS"
    return "DOES NOT START" if sizing.is_refused else "DOES NOT FIT"


def _verdict(request: SizingRequest, sizing: Sizing, page: Page) -> list[str]:
    word = page("FITS", "1;32") if sizing.fits else page(verdict_text(sizing), "1;31")
    lines = _wrapped(subject_text(request, sizing), "", "  ", page)
    if sizing.layout is not None:
        n_all = request.nodes * request.gpus_per_node
        word += f"  {layout_text(sizing.layout)}: {sizing.layout.n_ranks} of {_count(n_all, 'GPU')}"
    return [*lines, word, *_wrapped(sizing.reason, "  ", "  ", page)]


def _bars(sizing: Sizing, page: Page) -> list[str]:
    made = bars(sizing)
    if not made:
        return []
    how = f"measured on {sizing.measured_on}" if sizing.measured_on else "estimates: the likely ones"
    title = "memory of one GPU, GiB"
    lines = _wrapped(f"{title} (activations, graphs and other are {how})", "", "  ", page)
    lines[0] = lines[0].replace(title, page(title, "1"))
    name_width = max(len(bar.name) for bar in made)
    shown = made if len(made) <= _MAX_BARS else made[: _MAX_BARS - 1] + made[-1:]
    n_cells = min(_BAR_CELLS, page.width - 4 - name_width)
    for bar in shown:
        lines.append(f"  {bar.name.ljust(name_width)}  {_drawn(bar, n_cells, page)}")
        if bar.over_gib:
            lines.append(" " * (4 + name_width) + _budget_mark(bar, n_cells, page))
    if len(shown) < len(made):
        lines.append(f"  ({len(made) - len(shown)} more classes between the last two)")
    used = [index for index in range(len(KINDS)) if any(bar.parts[index] for bar in made)]
    lines += _figures(shown, used, page)
    notes = [_MEANINGS[KINDS[index].name] for index in used if KINDS[index].name in _MEANINGS]
    lines += _wrapped("; ".join(notes), "  ", "  ", page)
    return lines


def _figures(shown: Sequence[Bar], used: Sequence[int], page: Page) -> list[str]:
    """The bars in numbers: a table, or lines of "name number" where the page is too narrow for one."""
    rows = [["", *(f"{KINDS[i].block} {KINDS[i].name}" for i in used), "total"]]
    rows += [[bar.name, *(f"{bar.parts[i]:.2f}" for i in used), f"{bar.total_gib:.2f}"] for bar in shown]
    table = [f"  {line}" for line in _aligned(rows)]
    if max(map(len, table)) <= page.width:
        return table
    lines = []
    for bar in shown:
        words = [f"{KINDS[i].block} {KINDS[i].name} {bar.parts[i]:.2f}".replace(" ", "\0") for i in used]
        told = _wrapped(f"{bar.name}: {' + '.join(words)} of {bar.total_gib:.2f}", "  ", "    ", page)
        lines += [line.replace("\0", " ") for line in told]
    return lines


def _drawn(bar: Bar, n_cells: int, page: Page) -> str:
    counts = cells(bar.parts, bar.total_gib, n_cells)
    return "".join(page(kind.block * count, kind.sgr) for kind, count in zip(KINDS, counts, strict=True))


def _budget_mark(bar: Bar, n_cells: int, page: Page) -> str:
    """A pointer under an overdrawn bar at the place where the budget ends."""
    at = round(bar.budget_gib / max(bar.total_gib, sum(bar.parts)) * n_cells)
    words = f"the budget ends here: {bar.budget_gib:.2f}, it is {bar.over_gib:.2f} too little"
    fits_right = at + 2 + len(words) <= n_cells
    return page(" " * at + f"^ {words}" if fits_right else f"{words} ^".rjust(at + 1), "31")


def _nodes(layout: Parallel, request: SizingRequest, page: Page) -> list[str]:
    rows = placement(layout, request.gpus_per_node, request.nodes)
    drawn = [_row_text([cell_text(place, layout) for place in row], page) for row in rows]
    meaning = ["letters are pipeline stages" if layout.pipeline > 1 else "A is a GPU in use"]
    meaning += ["numbers data-parallel ranks"] if layout.data > 1 else []
    meaning += ["a dot is an idle GPU"] if any(place is None for row in rows for place in row) else []
    lines = _wrapped(f"nodes  {', '.join(meaning)}", "", "  ", page, has_bold=True)
    if request.links is not None:
        lines += _wrapped(f"this machine: {request.links.words}", "  ", "  ", page)
    groups: list[tuple[int, int, str]] = []
    for number, row in enumerate(drawn, 1):
        if groups and groups[-1][2] == row:
            groups[-1] = (groups[-1][0], number, row)
        else:
            groups.append((number, number, row))
    names = [f"node {first}" if first == last else f"nodes {first}-{last}" for first, last, _ in groups]
    shown = groups if len(groups) <= _MAX_NODES else groups[: _MAX_NODES - 1]
    width = max(len(name) for name in names[: len(shown)])
    lines += [f"  {name.ljust(width)}  {row}" for name, (_, _, row) in zip(names, shown, strict=False)]
    if len(shown) < len(groups):
        rest = rows[shown[-1][1] :]
        n_idle = sum(all(place is None for place in row) for row in rest)
        lines.append(
            f"  ... and {_count(len(rest) - n_idle, 'more node')} in use" + (f", {n_idle} idle" if n_idle else "")
        )
    return lines


def _row_text(words: Sequence[str], page: Page) -> str:
    """The GPUs of a node side by side; a long row as runs ("A1 x36, B1 x36")."""
    width = max(len(word) for word in words)
    row = " ".join(word.ljust(width) for word in words).rstrip()
    if len(row) <= page.width - 20:
        return row
    runs: list[tuple[str, int]] = []
    for word in words:
        if runs and runs[-1][0] == word:
            runs[-1] = (word, runs[-1][1] + 1)
        else:
            runs.append((word, 1))
    return textwrap.shorten(", ".join(f"{word} x{count}" for word, count in runs), page.width - 20, placeholder=" ...")


def _kv(kv: KvAnswer, settings: Settings | None, page: Page) -> list[str]:
    length = f" of {settings.max_model_len:,} tokens" if settings else " of max_model_len"
    if not kv.num_blocks:
        first, told = "no room", [f"one request{length} takes {kv.per_gpu_gib_one_request:.2f} GiB a GPU; "]
    else:
        first = f"{kv.tokens:,} tokens in {kv.num_blocks:,} blocks of {kv.block_size}"
        one = f"one takes {kv.per_gpu_gib_one_request:.2f} GiB a GPU"
        told = [f"requests{length} at once: {kv.max_concurrency:.2f}; {one}"]
        told += [f"longest request that fits: {kv.largest_max_model_len:,} tokens; "]
    told[-1] += f"one token of the whole model: {show_bytes(kv.bytes_per_token)}"
    return [
        page("KV cache", "1") + f"  {first}",
        *(line for words in told for line in _wrapped(words, "  ", "    ", page)),
    ]


def _speed(speed: SpeedAnswer, request: SizingRequest, page: Page) -> list[str]:
    asked = f"{request.input_tokens:,} tokens in, {request.output_tokens:,} out, {request.concurrency:,} at once"
    rows = [
        ["", "low", "likely", "high", ""],
        _speed_row("time to first token, ms", speed.ttft_ms, request.ttft_ms),
        _speed_row("time per token after, ms", speed.tpot_ms, request.tpot_ms),
        _speed_row("output tokens a second", speed.output_tokens_per_s, None),
        _speed_row("requests a second", speed.requests_per_s, None),
    ]
    title = _wrapped(f"speed  {asked} (estimates)", "", "  ", page, has_bold=True)
    return [*title, *(f"  {line}" for line in _aligned(rows))]


def _speed_row(name: str, spread: Range, limit: float | None) -> list[str]:
    values = [_figure(value) for value in (spread.low, spread.likely, spread.high)]
    word = "" if limit is None else f"{'within' if spread.likely <= limit else 'OVER'} the {limit:g} asked"
    return [name, *values, word]


def _users(users: Users, page: Page) -> list[str]:
    people = users.n_users
    counts = f"about {people.likely:,.0f} people ({people.low:,.0f} to {people.high:,.0f})"
    wait = f"{users.n_at_once:,} of them wait for a reply at any time"
    whole = f"a whole reply takes {show_seconds(users.response_s.likely)}"
    return [
        *_wrapped(f"users  {counts}; the first limit: {users.first_limit}", "", "  ", page, has_bold=True),
        *_wrapped(f"{wait}, {whole}; assumed: {users.assumed}", "  ", "  ", page),
    ]


def _levers(levers: Sequence[Lever], sizing: Sizing, page: Page) -> list[str]:
    if not levers:
        return []
    now = sizing.kv.max_concurrency if sizing.kv is not None and sizing.fits else 0.0
    rows = [["", "KV tokens", "at once", "ask with"]]
    for lever in levers[:_MAX_LEVERS]:
        gain = f" (x{lever.max_concurrency / now:.1f})" if now else ""
        at_once = f"{lever.max_concurrency:.2f}{gain}" if lever.fits else ""
        rows.append([lever.name, f"{lever.tokens:,}" if lever.fits else "no fit", at_once, " ".join(lever.flags)])
        if lever.note:
            rows[-1][-1] += f"  ({lever.note})" if lever.flags else lever.note
    return [page("levers", "1"), *_last_wrapped(rows, page)]


def _rejected(rejected: Sequence[RejectedLayout], page: Page) -> list[str]:
    if not rejected:
        return []
    groups = by_reason(rejected)
    shown = groups[:_MAX_REJECTED]
    lines = [page("not chosen", "1"), *_last_wrapped(shown, page)]
    if len(shown) < len(groups):
        lines.append(f"  ... and {len(groups) - len(shown):,} more reasons: --json has all {len(rejected):,} layouts")
    return lines


def by_reason(rejected: Sequence[RejectedLayout]) -> list[list[str]]:
    """[layouts, reason] of the refused ones, those with the same reason on one line.

    ["TP1 and 3 more", "weights take ..."]; sizes that do not divide are listed: "... by tensor 3, 5, 6, 7".
    """
    groups: dict[str, list[RejectedLayout]] = {}
    for layout in rejected:
        groups.setdefault(layout.reason.removesuffix(f" by tensor {layout.tensor}"), []).append(layout)
    rows = []
    for reason, alike in groups.items():
        name = layout_text(alike[0]) + (f" and {len(alike) - 1} more" if len(alike) > 1 else "")
        if alike[0].reason != reason:
            reason += " by tensor " + ", ".join(str(layout.tensor) for layout in alike)
        rows.append([name, reason])
    # What fits and lost says most; the many sizes that memory refuses come last.
    return sorted(rows, key=lambda row: 0 if " by tensor " in row[1] else 1 if row[1].startswith("fits") else 2)


def _command(request: SizingRequest, sizing: Sizing, page: Page) -> list[str]:
    """The engine's command line, a flag with its value never torn apart."""
    model = request.facts.hub_id or request.facts.reference
    words: list[str] = []
    for arg in map(shlex.quote, sizing.engine_args):
        if words and not arg.startswith("-") and words[-1].startswith("-") and " " not in words[-1]:
            words[-1] += f" {arg}"
        else:
            words.append(arg)
    lines, line = [], f"  vllm serve {shlex.quote(model)}"
    for word in words:
        if len(line) + 1 + len(word) + 2 > page.width:
            lines.append(f"{line} \\")
            line = f"    {word}"
        else:
            line += f" {word}"
    return [page("start it", "1"), *lines, line]


def _figure(value: float) -> str:
    """Three digits that matter: 0.1234 -> "0.123", 12.34 -> "12.3", 1234.5 -> "1,234"."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart: the first to the left, numbers to the right, an unnamed last one to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    has_words = rows[0][-1] == ""
    lines = []
    for row in rows:
        made = [row[0].ljust(widths[0])]
        for column in range(1, len(row)):
            is_words = has_words and column == len(row) - 1
            made.append(row[column] if is_words else row[column].rjust(widths[column]))
        lines.append("  ".join(made).rstrip())
    return lines


def _last_wrapped(rows: Sequence[Sequence[str]], page: Page) -> list[str]:
    """Columns aligned to the left, the last one wrapped inside the width under itself."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        head = "  " + "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)) + "  "
        lines += _wrapped(row[-1], head, " " * len(head), page) if row[-1] else [head.rstrip()]
    return lines


def _wrapped(words: str, first: str, rest: str, page: Page, *, has_bold: bool = False) -> list[str]:
    """`words` in lines of the page's width; with `has_bold` the first word is bold."""
    lines: list[str] = textwrap.wrap(
        words, page.width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    if has_bold and lines:
        word, _, others = lines[0].partition(" ")
        lines[0] = f"{page(word, '1')} {others}"
    return lines
