"""What is chosen on the screen of `penstock top`, what a key changes of it, and the screen's pages as lines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.cli import top_text
from penstock.cli.top_text import Line, Watched, clean, count, fit, seconds, share
from penstock.text import GIB, show_bytes
from penstock.wire.announcement import GpuReading, MachineReading
from penstock.wire.live import ReplicaLive, SlowRequest

_LEAST_EVENTS, _MOST_EVENTS, _MOST_BRIEF = 3, 8, 6
_KEYS = "q quit  jk move  enter open  sS sort  / find  p pause  ? help"
_KEYS_SEVERAL = f"tab next  {_KEYS}"
_KEYS_OPEN = "esc back  jk other replica  p pause  q quit"
HELP = """
q, Ctrl-C        quit
down, j; up, k   select a replica
enter            its GPUs, restarts, slow requests and log; esc: back
tab              the next deployment
s, S             sort by the next column; reverse
/                replicas with this text in name, state, node, reason; esc: all
p                pause: the figures stay until the next p
?                this help

in flight        requests that the gateway has on a replica
waiting          requests that the gateway holds, since no replica is free
RUN, WAIT        requests that the engine runs, and lets wait
TTFT, ITL        time to the first token, between two: median of a minute
TTFT99           one request in a hundred was slower
HIT              prompt tokens that the engine's cache had
GPU              time in which a kernel ran: near 100% with one request already
RST              restarts. A narrow terminal shows fewer columns.
"""


class View(msgspec.Struct, frozen=True):
    """`page`: "list", "replica" or "help". `is_typing`: keys go into the filter."""

    deployment: str | None = None
    replica: str | None = None
    page: str = "list"
    sort: str = "REPLICA"
    is_reversed: bool = False
    filter: str = ""
    is_typing: bool = False
    is_paused: bool = False


def chosen(view: View, everything: Sequence[Watched]) -> Watched | None:
    named = (watched for watched in everything if watched.name == view.deployment)
    return next(named, everything[0] if everything else None)


def rows_of(view: View, watched: Watched) -> list[ReplicaLive]:
    """The replicas that pass the filter, sorted."""
    wanted = view.filter.casefold()
    rows = [
        row for row in watched.snapshot.replicas
        if any(wanted in word.casefold() for word in (
            row.replica, top_text.state_of(row), row.host, row.model, row.reason or ""
        ))
    ]  # fmt: skip
    return top_text.sorted_rows(rows, view.sort, view.is_reversed)


def selected(view: View, rows: Sequence[ReplicaLive]) -> int | None:
    names = [row.replica for row in rows]
    return None if not names else names.index(view.replica) if view.replica in names else 0


# ---- keys ------------------------------------------------------------------------------------------------------------


def press(view: View, key: str, everything: Sequence[Watched], width: int) -> View | None:
    """What a key changes; None: the end."""
    change = msgspec.structs.replace
    if view.is_typing:
        return _type(view, key)
    if key == "q":
        return None
    if key == "esc":
        return change(view, page="list") if view.page != "list" else change(view, filter="")
    if key == "?":
        return change(view, page="list" if view.page == "help" else "help")
    if key == "p":
        return change(view, is_paused=not view.is_paused)
    if key in ("down", "j", "up", "k", "enter"):
        return _select(view, key, everything)
    if key == "tab" and everything:
        names = [watched.name for watched in everything]
        current = chosen(view, everything)
        at = names.index(current.name) if current is not None else -1
        return change(view, deployment=names[(at + 1) % len(names)], replica=None, page="list")
    if view.page != "list":
        return view
    if key == "s":
        watched = chosen(view, everything)
        rows = watched.snapshot.replicas if watched is not None else ()
        heads = [column.head for column in top_text.columns_for(width, rows)]
        at = heads.index(view.sort) if view.sort in heads else -1
        return change(view, sort=heads[(at + 1) % len(heads)], is_reversed=False)
    if key == "S":
        return change(view, is_reversed=not view.is_reversed)
    return change(view, is_typing=True, filter="") if key == "/" else view


def _type(view: View, key: str) -> View:
    if key in ("enter", "esc"):
        kept = view.filter if key == "enter" else ""
        return msgspec.structs.replace(view, is_typing=False, filter=kept)
    if key == "backspace":
        return msgspec.structs.replace(view, filter=view.filter[:-1])
    return msgspec.structs.replace(view, filter=(view.filter + key)[:40]) if len(key) == 1 else view


def _select(view: View, key: str, everything: Sequence[Watched]) -> View:
    watched = chosen(view, everything)
    rows = rows_of(view, watched) if watched is not None else []
    at = selected(view, rows)
    if at is None:
        return view
    if key == "enter":
        return msgspec.structs.replace(view, replica=rows[at].replica, page="replica")
    at = max(0, min(len(rows) - 1, at + (1 if key in ("down", "j") else -1)))
    return msgspec.structs.replace(view, replica=rows[at].replica)


# ---- pages -----------------------------------------------------------------------------------------------------------


class Size(msgspec.Struct, frozen=True):
    width: int
    height: int


def screen(
    view: View, everything: Sequence[Watched], size: Size, clock: Callable[[float], str], log: Sequence[str] = ()
) -> list[Line]:
    """The whole screen, at most as large as the terminal. `log`: the last lines of the chosen replica."""
    watched = chosen(view, everything)
    if view.page == "help":
        lines: list[Line] = [[(line, "")] for line in HELP.strip("\n").splitlines()]
    elif watched is None:
        lines = [[("no deployment runs; start one: penstock up", "")]]
    elif view.page == "replica":
        lines = _replica_page(view, watched, size, clock, log)
    else:
        lines = _list_page(view, watched, everything, size, clock)
    room = max(0, size.height - 1)
    lines = [*lines[:room], *([[]] * (room - len(lines))), _bottom(view, everything, clock, size.width)]
    return [_cut(line, size.width) for line in lines]


def _cut(line: Line, width: int) -> Line:
    """A line that fits the terminal: one that is longer would break the screen."""
    parts: Line = []
    for text, style in line:
        n = top_text.n_columns(text)
        if n > width:
            return [*parts, (fit(text, width), style)]
        parts.append((text, style))
        width -= n
    return parts


def _bottom(view: View, everything: Sequence[Watched], clock: Callable[[float], str], width: int) -> Line:
    if view.is_typing:
        return [(f"/{view.filter}_", "bold")]
    state = "PAUSED  " if view.is_paused else ""
    state += f"/{view.filter}  " if view.filter else ""
    keys = _KEYS_OPEN if view.page == "replica" else _KEYS_SEVERAL if len(everything) > 1 else _KEYS
    watched = chosen(view, everything)
    at = clock(watched.snapshot.at) if watched is not None else ""
    front = fit(f"{state}{keys}", max(0, width - len(at) - 1))
    return [(f"{front} {at}", "reverse" if view.is_paused else "dim")]


def _list_page(
    view: View, watched: Watched, everything: Sequence[Watched], size: Size, clock: Callable[[float], str]
) -> list[Line]:
    lines = top_text.header(watched, size.width)
    others = [other for other in everything if other is not watched]
    lines += [top_text.brief(other) for other in others[:_MOST_BRIEF]]
    if len(others) > _MOST_BRIEF:
        lines.append([(f"and {len(others) - _MOST_BRIEF} more", "dim")])
    columns = top_text.columns_for(size.width, watched.snapshot.replicas)
    lines += [[], top_text.heads(columns, view.sort)]
    rows = rows_of(view, watched)
    n_events = min(_LEAST_EVENTS, len(watched.snapshot.events))
    room = max(1, size.height - 1 - len(lines) - n_events - 1)
    at = selected(view, rows)
    first = 0 if at is None else max(0, min(at - room // 2, len(rows) - room))
    for number, row in enumerate(rows[first : first + room], first):
        line = top_text.replica_line(row, columns, size.width)
        lines.append(_highlighted(line, size.width) if number == at else line)
    if not rows:
        lines.append([("no replica has that text" if view.filter else "no replica yet", "dim")])
    left = min(_MOST_EVENTS, size.height - 2 - len(lines))
    if left > 0:
        events = watched.snapshot.events[-left:]
        lines += [[], *(top_text.event_line(event, clock, size.width) for event in events)]
    return lines


def _highlighted(line: Line, width: int) -> Line:
    """The chosen row, in reverse over the whole width."""
    text = "".join(part for part, _ in line)
    return [(fit(text, width), "reverse")]


def _replica_page(
    view: View, watched: Watched, size: Size, clock: Callable[[float], str], log: Sequence[str]
) -> list[Line]:
    row = next((row for row in watched.snapshot.replicas if row.replica == view.replica), None)
    if row is None:
        return [[(f"replica {clean(view.replica or '')} of {clean(watched.name)} is gone", "yellow")]]
    lines: list[Line] = [
        [(f"replica {clean(row.replica)} of {clean(watched.name)}", "bold"), (f"  {clean(row.model)}", "cyan")],
        [*top_text.replica_front(row), ("" if top_text.serves(row) else top_text.words(row), "")],
    ]
    facts: list[Line] = [
        [(f"{column.head} ", "dim"), (clean(column.show(row)).strip(), column.style(row))]
        for column in top_text.COLUMNS[2:]
    ]
    lines += top_text.flow([*facts, [("ENGINE ", "dim"), (clean(row.engine or "-"), "")]], size.width)
    for machine in row.machines:
        lines += _machine_lines(machine)
    restarts = watched.restarts.get(row.replica, ())[-3:]
    lines += [[(f"  restarted {clock(each.at)}  ", "dim"), (clean(each.reason), "yellow")] for each in restarts]
    slow = [request for request in watched.snapshot.slow if request.replica == row.replica][:5]
    if slow:
        lines += [[], [("slow requests of the last hour", "bold")], *(_slow_line(request, clock) for request in slow)]
    room = size.height - 3 - len(lines)
    if room > 0:
        last = [[(clean(line), "dim")] for line in log[-room:]] if log else [[("no log yet", "dim")]]
        lines += [[], [("log", "bold")], *last]
    return lines


def _machine_lines(machine: MachineReading) -> list[Line]:
    memory = f"{_size(machine.memory_used_bytes)} of {_size(machine.memory_total_bytes)}"
    disk = f"{_size(machine.disk_free_bytes)} free of {_size(machine.disk_total_bytes)}"
    cpus = "" if machine.n_cpus is None else f" of {machine.n_cpus} CPUs"
    line: Line = [
        (f"  {clean(machine.host)}", "bold"),
        (f"  {share(machine.cpu_use)}{cpus}, memory {memory}, disk {disk}", ""),
    ]
    return [line, *map(_gpu_line, machine.gpus)]


def _gpu_line(gpu: GpuReading) -> Line:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    memory = "-" if used is None or not total else f"{used / GIB:.1f}/{total / GIB:.0f} GiB"
    limit = "" if gpu.power_limit_watts is None else f"/{count(gpu.power_limit_watts)}"
    warm = "-" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} C"
    clock = "-" if gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz:.0f} MHz"
    text = f"{top_text.bar(gpu.utilization)}  {memory}  {count(gpu.power_watts)}{limit} W  {warm}  {clock}"
    line: Line = [(f"  GPU {gpu.index} {clean(gpu.name)} ", "dim"), (text, "")]
    if gpu.throttle:
        line.append((f"  throttled: {clean(', '.join(gpu.throttle))}", "yellow"))
    return [*line, (f"  XID {', '.join(map(str, gpu.xids))}", "red")] if gpu.xids else line


def _size(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else show_bytes(n_bytes)


def _slow_line(request: SlowRequest, clock: Callable[[float], str]) -> Line:
    times = (("held", request.hold_s), ("first byte", request.first_byte_s), ("stream", request.stream_s))
    where = ", ".join(f"{name} {seconds(value)}" for name, value in times if value)
    tokens = f"{request.prompt_tokens} -> {request.output_tokens} tokens"
    rest = ", ".join(filter(None, (tokens, clean(request.key), f"{request.status} {clean(request.outcome)}")))
    return [
        (f"  {clock(request.at)} ", "dim"), (seconds(request.duration_s).rjust(6), "bold"),
        (f"  {where}; {rest}", ""),
    ]  # fmt: skip
