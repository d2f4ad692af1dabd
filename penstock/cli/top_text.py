"""What `penstock top` shows, as lines of styled text: figures, the header of a deployment, its table of replicas. Pure.

A line is a list of (text, style); `plain` makes text of lines. What was not measured (None, or NaN) is "-".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.cli.status_text import progress_text, progress_words
from penstock.run_folder import ReplicaStatus, State
from penstock.text import GIB, printable, show_seconds, show_usd
from penstock.wire.announcement import ACTIVE, Restart
from penstock.wire.live import Event, Rates, ReplicaLive, Snapshot

Line: TypeAlias = list[tuple[str, str]]

_GAP = 1
_BAR = 7
_FACTS_WIDTH = 120  # of lines in a file
_SERVING = (*ACTIVE, "stalled", "draining", "ejected")
_LOST = ("failed", "gone", "broken", "silent", "queued")  # what a target or the controller knows better
_BAD = ("failed", "gone", "broken", "silent", "ejected", "stalled")


class Watched(msgspec.Struct, frozen=True):
    """A deployment as it was last seen. `note`: why the gateway's own figures are missing."""

    name: str
    snapshot: Snapshot
    address: str | None = None
    note: str | None = None
    restarts: dict[str, tuple[Restart, ...]] = {}


def join(
    name: str, snapshot: Snapshot | None, state: State | None, events: Sequence[Event], address: str | None,
    note: str | None,
) -> Watched:  # fmt: skip
    """A deployment from its gateway's snapshot and the controller's state, of which either may be missing.

    The state alone knows replicas that have not announced yet, and those that a target has lost.
    """
    rows = {row.replica: row for row in (snapshot.replicas if snapshot is not None else ())}
    for row in state.replicas if state is not None else ():
        known = rows.get(row.replica)
        if known is None or row.state in _LOST:
            rows[row.replica] = _row_of(row)
        elif row.n_restarts > known.n_restarts:  # its node's count too
            rows[row.replica] = msgspec.structs.replace(known, n_restarts=row.n_restarts)
    if snapshot is None:
        at, n_desired = (state.observed_at, state.desired_replicas) if state is not None else (0.0, None)
        n_ready = sum(row.state in ACTIVE for row in rows.values())
        in_flight = sum(row.in_flight for row in rows.values())
        snapshot = Snapshot(name, at, "", Rates(at, in_flight=in_flight, n_ready=n_ready, n_desired=n_desired))
    if snapshot.now.n_desired is None and state is not None:
        now = msgspec.structs.replace(snapshot.now, n_desired=state.desired_replicas)
        snapshot = msgspec.structs.replace(snapshot, now=now)
    snapshot = msgspec.structs.replace(
        snapshot,
        phase=snapshot.phase or (state.phase if state is not None else None),
        reason=snapshot.reason or (state.reason if state is not None else None),
        replicas=tuple(sorted(rows.values(), key=_name_key)),
        events=tuple(events),
    )
    restarts = {row.replica: row.restarts for row in state.replicas} if state is not None else {}
    return Watched(name, snapshot, address, note, restarts)


def _row_of(row: ReplicaStatus) -> ReplicaLive:
    announcement = row.announcement
    return ReplicaLive(
        row.replica,
        announcement.model if announcement is not None else "",
        row.state,
        announcement.host if announcement is not None else "",
        announcement.engine if announcement is not None else "",
        (progress_text(row) if row.state == "queued" else row.reason) or None,
        announcement.progress if announcement is not None else None,
        row.in_flight,
        n_restarts=row.n_restarts,
        is_draining=row.is_draining,
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def rate(value: float | None) -> str:
    """At most five characters: 0.04, 3.2, 57, 1.2k, 57k, 1.2M."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.1f}{unit}" if abs(value) < 9.95 * size else f"{value / size:.0f}{unit}"
    if not value or abs(value) >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 0.095 else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """At most six characters: 5.2ms, 120ms, 1.2s, 12.3s, 2m05s."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 0.00995:
        return f"{value * 1000:.1f}ms"
    return show_seconds(value).replace(" ", "")


def share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}%}"


def bar(value: float | None, width: int = _BAR) -> str:
    """ "||||    62%"."""
    if value is None or not math.isfinite(value):
        return "-".rjust(width + 5)
    n_marks = round(max(0.0, min(1.0, value)) * width)
    return f"{'|' * n_marks:{width}} {share(value):>4}"


def count(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.0f}"


def clean(text: str) -> str:
    """Untrusted text as a part of one line."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def n_columns(text: str) -> int:
    """Of a terminal: a Chinese letter takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fit(text: str, width: int, is_right: bool = False) -> str:
    """Exactly that many columns of a terminal; what is cut off ends with "~"."""
    missing = width - n_columns(text)
    if missing >= 0:
        return " " * missing + text if is_right else text + " " * missing
    if text.isascii() or width == 0:
        return f"{text[: width - 1]}~" if width else ""
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1) + "~"


def plain(lines: Sequence[Line]) -> str:
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def flow(facts: Sequence[Line], width: int, indent: int = 2) -> list[Line]:
    """Facts next to each other, three spaces between them, in as many lines as they need."""
    lines: list[Line] = []
    left = 0
    for fact in facts:
        n = sum(len(text) for text, _ in fact)
        if lines and n + 3 <= left:
            lines[-1] += [("   ", ""), *fact]
            left -= n + 3
        else:
            lines.append([(" " * indent, ""), *fact])
            left = width - indent - n
    return lines


# ---- a deployment ----------------------------------------------------------------------------------------------------


def phase_style(phase: str | None) -> str:
    return {"ready": "bold green", "failed": "bold red", "degraded": "bold yellow", "down": "dim"}.get(
        phase or "", "yellow"
    )


def title(watched: Watched) -> Line:
    """Its name, phase, replicas, address and what is wrong."""
    snapshot, now = watched.snapshot, watched.snapshot.now
    ready = f"{now.n_ready}/{'-' if now.n_desired is None else now.n_desired} ready"
    line: Line = [
        (clean(watched.name), "bold"),
        ("  ", ""),
        (clean(snapshot.phase or "-"), phase_style(snapshot.phase)),
    ]
    line += [(f"  {ready}", ""), (f"  {clean(watched.address or 'no address yet')}", "cyan")]
    return line if not snapshot.reason else [*line, (f"  {clean(snapshot.reason)}", "red")]


def brief(watched: Watched) -> Line:
    """One line for a deployment that is not the chosen one."""
    now = watched.snapshot.now
    facts = f"  {rate(now.requests_per_s)} req/s  {rate(now.output_tokens_per_s)} tok/s out"
    return [*title(watched)[:4], (f"{facts}  {now.in_flight} in flight  {now.waiting} waiting", "")]


def header(watched: Watched, width: int) -> list[Line]:
    """The deployment's title and its figures; without those of its gateway, why they are missing."""
    lines = [title(watched)]
    if watched.note is not None:
        return [*lines, [(f"  {clean(watched.note)}", "yellow")]]
    return lines + flow([*_traffic(watched.snapshot.now), *_times(watched.snapshot), *_cost(watched.snapshot)], width)


def _fact(label: str, value: str, style: str = "bold") -> Line:
    return [(f"{label} ", "dim"), (value, style)]


def _traffic(now: Rates) -> list[Line]:
    engines = f" +{now.engine_waiting:.0f} in engines" if is_number(now.engine_waiting) and now.engine_waiting else ""
    return [
        _fact("req/s", f"{rate(now.requests_per_s):>4}"),
        _fact("errors/s", rate(now.errors_per_s), "bold red" if now.errors_per_s > 0 else ""),
        [
            *_fact("tok/s in", f"{rate(now.prompt_tokens_per_s):>4}"),
            *_fact(" out", f"{rate(now.output_tokens_per_s):>4}"),
        ],
        _fact("in flight", str(now.in_flight)),
        _fact("waiting", f"{now.waiting}{engines}", "bold yellow" if now.waiting else ""),
    ]


def _times(snapshot: Snapshot) -> list[Line]:
    now, slo = snapshot.now, snapshot.slo
    facts = [
        _fact("TTFT p50/p99", f"{seconds(now.ttft_s_p50)}/{seconds(now.ttft_s_p99)}"),
        _fact("ITL p50/p99", f"{seconds(now.itl_s_p50)}/{seconds(now.itl_s_p99)}"),
    ]
    for name, bound_ms, kept in (("TTFT", slo.ttft_ms, slo.ttft_share), ("TPOT", slo.tpot_ms, slo.tpot_share)):
        if bound_ms is not None:
            facts.append(_fact(f"SLO {name}<={bound_ms:g}ms", share(kept, 1), slo_style(kept)))
    return facts


def slo_style(kept: float | None) -> str:
    """Red below 90 %, yellow below 99 %."""
    if kept is None or not math.isfinite(kept):
        return ""
    return "bold red" if kept < 0.9 else "bold yellow" if kept < 0.99 else "bold green"


def _cost(snapshot: Snapshot) -> list[Line]:
    now, cost = snapshot.now, snapshot.cost
    facts = []
    if is_number(now.gpu_use):
        facts.append(_fact("GPU", share(now.gpu_use)))
    if is_number(now.power_watts):
        facts.append(_fact("power", f"{count(now.power_watts)} W"))
    if cost.joules_per_token is not None:
        facts.append(_fact("J/token", f"{cost.joules_per_token:.3g}"))
    for label, usd in (("$/h", cost.usd_per_hour), ("$/M tokens", cost.usd_per_million_tokens)):
        if usd is not None and math.isfinite(usd):
            facts.append(_fact(label, show_usd(usd).removeprefix("$")))
    if cost.idle_share is not None:
        facts.append(_fact("idle", share(cost.idle_share)))
    return facts


def event_line(event: Event, clock: Callable[[float], str], width: int) -> Line:
    """`clock`: a time of day of Unix seconds."""
    where = f" [{event.replica}]" if event.replica is not None else ""
    who = f" (by {event.who})" if event.who else ""
    text = f" {event.event}{where}: {event.text}{who}"
    bad = ("failed", "restarted", "hung", "lost", "left behind")
    style = "yellow" if any(word in event.event for word in bad) else ""
    return [(clock(event.at), "dim"), (fit(clean(text), width - len(clock(event.at))).rstrip(), style)]


# ---- replicas --------------------------------------------------------------------------------------------------------


def state_of(row: ReplicaLive) -> str:
    if row.state not in ACTIVE:
        return row.state
    return "draining" if row.is_draining else "ejected" if row.is_ejected else row.state


def serves(row: ReplicaLive) -> bool:
    return state_of(row) in _SERVING


def gpu_use(row: ReplicaLive) -> float | None:
    """The mean of its GPUs."""
    uses = [gpu.utilization for machine in row.machines for gpu in machine.gpus if is_number(gpu.utilization)]
    return sum(filter(None, uses)) / len(uses) if uses else None


def gpu_memory(row: ReplicaLive) -> tuple[int, int] | None:
    """Bytes used and bytes there, of all its GPUs."""
    gpus = [gpu for machine in row.machines for gpu in machine.gpus if gpu.memory_total_bytes]
    if not gpus:
        return None
    return sum(gpu.memory_used_bytes or 0 for gpu in gpus), sum(gpu.memory_total_bytes or 0 for gpu in gpus)


def gpu_watts(row: ReplicaLive) -> float | None:
    powers = [gpu.power_watts for machine in row.machines for gpu in machine.gpus if gpu.power_watts is not None]
    return sum(powers) if powers else None


def _memory_text(row: ReplicaLive) -> str:
    memory = gpu_memory(row)
    return "-" if memory is None else f"{memory[0] / GIB:.0f}/{memory[1] / GIB:.0f}G"


def _memory_used(row: ReplicaLive) -> float | None:
    memory = gpu_memory(row)
    return None if memory is None else memory[0]


def _name_key(row: ReplicaLive) -> tuple[int, str]:
    return len(row.replica), row.replica


def _kv_style(row: ReplicaLive) -> str:
    use = row.kv_use or 0.0
    return "red" if use > 0.98 else "yellow" if use > 0.9 else "green"


def _state_style(row: ReplicaLive) -> str:
    state = state_of(row)
    return "green" if state == "ready" else "red" if state in _BAD else "yellow"


def _waiting_style(row: ReplicaLive) -> str:
    return "yellow" if row.waiting else ""


class Column(NamedTuple):
    """`rank`: the higher, the sooner it is left out. `key`: what rows are sorted by, None last; text rises, numbers
    fall."""

    head: str
    width: int
    rank: int
    show: Callable[[ReplicaLive], str]
    key: Callable[[ReplicaLive], object]
    style: Callable[[ReplicaLive], str] = lambda _: ""
    is_text: bool = False


COLUMNS = (
    Column("REPLICA", 7, 0, lambda row: row.replica, _name_key, is_text=True),
    Column("STATE", 10, 0, state_of, state_of, _state_style, is_text=True),
    Column("NODE", 14, 13, lambda row: row.host or "-", lambda row: row.host or None, is_text=True),
    Column("FLIGHT", 6, 1, lambda row: str(row.in_flight), lambda row: row.in_flight),
    Column("RUN", 4, 4, lambda row: count(row.running), lambda row: row.running),
    Column("WAIT", 4, 3, lambda row: count(row.waiting), lambda row: row.waiting, _waiting_style),
    Column("KV CACHE", _BAR + 5, 2, lambda row: bar(row.kv_use), lambda row: row.kv_use, _kv_style),
    Column("IN/S", 5, 9, lambda row: rate(row.prompt_tokens_per_s), lambda row: row.prompt_tokens_per_s),
    Column("OUT/S", 5, 2, lambda row: rate(row.output_tokens_per_s), lambda row: row.output_tokens_per_s),
    Column("TTFT", 6, 5, lambda row: seconds(row.ttft_s_p50), lambda row: row.ttft_s_p50),
    Column("TTFT99", 6, 10, lambda row: seconds(row.ttft_s_p99), lambda row: row.ttft_s_p99),
    Column("ITL", 6, 6, lambda row: seconds(row.itl_s_p50), lambda row: row.itl_s_p50),
    Column("HIT", 4, 12, lambda row: share(row.cache_hits), lambda row: row.cache_hits),
    Column("GPU", 4, 7, lambda row: share(gpu_use(row)), gpu_use),
    Column("GPU MEM", 9, 11, _memory_text, _memory_used),
    Column("W", 5, 14, lambda row: count(gpu_watts(row)), gpu_watts),
    Column("UP", 6, 15, lambda row: "-" if row.up_s is None else seconds(row.up_s), lambda row: row.up_s),
    Column("RST", 3, 8, lambda row: str(row.n_restarts), lambda row: row.n_restarts),
)
_OF_GPUS = ("GPU", "GPU MEM", "W")


def columns_for(width: int, rows: Sequence[ReplicaLive]) -> tuple[Column, ...]:
    """Those that fit, the most important first; in the order of the table. Without a GPU none about GPUs."""
    left, kept = width + _GAP, set[str]()
    without = () if any(machine.gpus for row in rows for machine in row.machines) else _OF_GPUS
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if column.head in without:
            continue
        if column.width + _GAP > left:
            break
        left -= column.width + _GAP
        kept.add(column.head)
    return tuple(column for column in COLUMNS if column.head in kept)


def sorted_rows(rows: Sequence[ReplicaLive], head: str, is_reversed: bool = False) -> list[ReplicaLive]:
    """By the column of that head; rows without a value stay last."""
    column = next((column for column in COLUMNS if column.head == head), COLUMNS[0])
    keyed = [(column.key(row), row) for row in sorted(rows, key=_name_key)]
    known = [(key, row) for key, row in keyed if key is not None and not (isinstance(key, float) and math.isnan(key))]
    ordered = sorted(known, key=lambda pair: pair[0], reverse=is_reversed == column.is_text)  # type: ignore[arg-type,return-value]
    names = {id(row) for _, row in known}
    return [row for _, row in ordered] + [row for _, row in keyed if id(row) not in names]


def heads(columns: Sequence[Column], sort: str | None = None) -> Line:
    """The head of the table; the column that it is sorted by is underlined."""
    line: Line = []
    for column in columns:
        line.append(
            (fit(column.head, column.width, not column.is_text), "bold underline" if column.head == sort else "bold")
        )
        line.append((" " * _GAP, ""))
    return line[:-1]


def replica_line(row: ReplicaLive, columns: Sequence[Column], width: int) -> Line:
    """One replica. One that does not serve has words in place of figures: how far its start is, or why it failed."""
    if not serves(row):
        front = replica_front(row)
        return [*front, (fit(words(row), max(0, width - sum(len(text) for text, _ in front))).rstrip(), "")]
    line: Line = []
    for column in columns:
        line.append((fit(clean(column.show(row)), column.width, not column.is_text), column.style(row)))
        line.append((" " * _GAP, ""))
    return line[:-1]


def replica_front(row: ReplicaLive) -> Line:
    name, state = COLUMNS[:2]
    front = fit(clean(row.replica), name.width) + " " * _GAP
    return [(front, ""), (fit(clean(state_of(row)), state.width), _state_style(row)), (" " * _GAP, "")]


def words(row: ReplicaLive) -> str:
    """ "||||    57% weights, shard 17/30, 2.1 GiB/s, about 40.0 s left"."""
    progress = row.progress
    if progress is None or row.state in _BAD:
        return clean(row.reason or "")
    done = f"{bar(progress.fraction)} " if is_number(progress.fraction) else ""
    return f"{done}{clean(progress_words(progress))}"


def table(watched: Watched, width: int) -> list[Line]:
    """The table of replicas without a terminal's marks."""
    columns = columns_for(width, watched.snapshot.replicas)
    rows = sorted_rows(watched.snapshot.replicas, "REPLICA")
    return [heads(columns), *(replica_line(row, columns, width) for row in rows)]


def once(all_watched: Sequence[Watched], width: int, clock: Callable[[float], str]) -> str:
    """Everything once: for a file, a pipe, or a terminal that cannot move its cursor."""
    parts = []
    for watched in all_watched:
        lines = [*header(watched, min(width, _FACTS_WIDTH)), *table(watched, width)]
        lines += [event_line(event, clock, width) for event in watched.snapshot.events[-3:]]
        parts.append(plain(lines))
    return "\n\n".join(parts)
