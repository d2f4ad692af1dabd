"""How this node's engine shall load the weights: before the first start their disk is measured and the engine chooses.

It never fails a start and never holds one for long: what cannot be measured is left to the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock import engines
from penstock.engines import Disk, LoadChoice
from penstock.hardware.detect import memory_bytes
from penstock.models import files, read_rate
from penstock.planner import Plan
from penstock.text import GIB, bare_flag, show_bytes

_TOO_SMALL_BYTES = 2 * GIB  # every disk gives that within seconds
_MOST_S = 3.0
_FORMAT = "load-format"


class Chosen(msgspec.Struct, frozen=True):
    """The plan with the chosen flags. `text`: what was measured and chosen, for people; `expected_s`: the load."""

    plan: Plan
    text: str = ""
    expected_s: float | None = None
    has_format: bool = False


def choose(plan: Plan) -> Chosen:
    """Blocks 3 s at most; the plan as it is where there is nothing to choose or to measure."""
    answers: list[Chosen] = []
    thread = threading.Thread(target=lambda: answers.append(_choose(plan)), daemon=True)
    thread.start()
    thread.join(_MOST_S)  # a file system that hangs
    return answers[0] if answers else Chosen(plan)


def _choose(plan: Plan) -> Chosen:
    engine, folder = engines.load(plan.engine), Path(plan.model.path)
    if "://" in plan.model.path or not engine.can_choose_load(plan):
        return Chosen(plan)
    try:
        sizes = [(folder / name, (folder / name).stat().st_size) for name in files.wanted_shards(folder)]
    except OSError:  # the engine says what is missing
        return Chosen(plan)
    n_bytes = sum(size for _, size in sizes)
    if n_bytes < _TOO_SMALL_BYTES:
        return Chosen(plan)
    if (read_rate.cached_share(sizes) or 0.0) >= read_rate.CACHED_SHARE:
        return Chosen(plan, f"{show_bytes(n_bytes)}, in memory already")
    reading = read_rate.measure([path for path, _ in sizes])
    if reading is None:
        return Chosen(plan)
    return with_choice(plan, Disk(n_bytes, reading, memory_bytes()[1]), engine.choose_load)


def with_choice(plan: Plan, disk: Disk, choose_load: Callable[[Plan, Disk], LoadChoice]) -> Chosen:
    """The plan with the flags that the engine chooses for this disk, and the words about it. Pure."""
    choice, reading = choose_load(plan, disk), disk.reading
    bytes_per_s = reading.rate(choice.way)
    # Ranks map the files and copy what they keep: a node reads its share at least.
    n_bytes = -(-disk.n_bytes // plan.n_nodes)
    return Chosen(
        msgspec.structs.replace(plan, args={**plan.args, **choice.args}),
        f"{read_rate.expected(n_bytes, bytes_per_s, reading.file_system)}; {choice.why}",
        round(n_bytes / max(bytes_per_s, 1.0), 1),
        any(bare_flag(key) == _FORMAT for key in choice.args),
    )
