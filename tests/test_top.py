"""`penstock top`: its lines at several widths and with bad values, its keys, and the verb in a real terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from samples import told

from penstock.cli import top_text, top_view
from penstock.cli.terminal import keys_of
from penstock.cli.top_text import Watched
from penstock.cli.top_view import Size, View
from penstock.run_folder import ReplicaStatus, State
from penstock.wire.announcement import GpuReading, MachineReading, Progress, Restart
from penstock.wire.live import Attainment, Cost, Event, Rates, ReplicaLive, SlowRequest, Snapshot

GOLDEN = Path(__file__).parent / "golden" / "top.txt"
AT = 1_800_000_000.0
GIB = 2**30
GPU = GpuReading(
    0, "GPU-1", "NVIDIA H100", 0.97, 61 * GIB, 80 * GIB, 512.4, 700.0, 1e6, 63.0, 1755.0, 2619.0, ("sw_power_cap",),
    (31,),
)  # fmt: skip
MACHINE = MachineReading("node1", 0.21, 64, 100 * GIB, 512 * GIB, 900 * GIB, 1800 * GIB, gpus=(GPU, GPU))
BUSY = ReplicaLive(
    "0", "qwen", "ready", "node1", "vllm 0.32.0", in_flight=12, running=11.0, waiting=1.0, kv_use=0.62,
    prompt_tokens_per_s=5210.4, output_tokens_per_s=893.2, ttft_s_p50=0.084, ttft_s_p99=0.412, itl_s_p50=0.0081,
    itl_s_p99=0.031, cache_hits=0.417, n_restarts=1, up_s=7500.0, machines=(MACHINE,),
)  # fmt: skip
IDLE = ReplicaLive("1", "qwen", "ready", "a-machine-with-a-long-name.example.org", running=0.0, kv_use=0.0, up_s=75.0)
LOADING = ReplicaLive("2", "qwen", "loading", "node3", progress=Progress("weights", 17, 30, 2.1 * GIB, 40.0, 0.57))
FAILED = ReplicaLive("10", "qwen", "failed", reason="out of GPU memory: needs 81 GiB")
EVENTS = (
    Event(AT - 600, "up", "Qwen/Qwen3-8B on target local", who="kim@node1"),
    Event(
        AT - 560, "replica ready", "ready after 41.2 s: imports 6.0 s, weights 20.4 s", "0", seconds={"weights": 20.4}
    ),
    Event(AT - 9, "engine restarted", "was killed by signal 9", "0"),
)
SLOW = SlowRequest(AT - 30, "r-1", "alice", "qwen", "0", "done", 200, 12.31, 0.2, 0.001, 1.9, 10.2, 812, 1024)
NOW = Rates(AT, 12.3, 0.02, 15_320.0, 1_204.0, 0.084, 0.412, 0.0081, 0.031, 12, 3, 1.0, 0.62, 2, 4, 0.97, 1024.8)
SNAPSHOT = Snapshot(
    "qwen", AT, "0.1.0", NOW, "degraded", None, (BUSY, IDLE, LOADING, FAILED), Attainment(1000.0, 50.0, 0.992, 0.88),
    Cost(4.8, 0.42, 0.31, 0.52), (), (SLOW,), EVENTS,
)  # fmt: skip
QWEN = Watched("qwen", SNAPSHOT, "http://127.0.0.1:8000", None, {"0": (Restart(AT - 9, "was killed by signal 9"),)})
BARE = Watched("bare", Snapshot("bare", AT, "0.1.0", Rates(AT)))
SILENT = Watched("silent", msgspec.structs.replace(SNAPSHOT, events=()), "http://h:1", "its gateway does not answer")


def clock(at: float) -> str:
    return f"{int(at) % 86400 // 3600:02d}:{int(at) % 3600 // 60:02d}:{int(at) % 60:02d}"


def shown(view: View, width: int = 80, height: int = 24, everything: tuple[Watched, ...] = (QWEN,)) -> str:
    log = tuple(f"INFO line {number}" for number in range(30))
    lines = top_view.screen(view, everything, Size(width, height), clock, log)
    assert len(lines) == height
    assert all(sum(cell_len(text) for text, _ in line) <= width for line in lines)
    return top_text.plain(lines)


PAGES: dict[str, Callable[[], str]] = {
    "list at 80": lambda: shown(View()),
    "list at 120": lambda: shown(View(sort="OUT/S"), 120),
    "list at 200": lambda: shown(View(is_paused=True, filter="no"), 200),
    "list of several": lambda: shown(View("bare"), 100, 14, (QWEN, BARE, SILENT)),
    "gateway silent": lambda: shown(View("silent", is_typing=True, filter="loa"), 80, 10, (SILENT,)),
    "replica": lambda: shown(View(replica="0", page="replica"), 110, 24),
    "loading replica": lambda: shown(View(replica="2", page="replica"), 80, 12),
    "help": lambda: shown(View(page="help"), 100, 24),
    "once": lambda: top_text.once((QWEN, BARE, SILENT), 10_000, clock),
}


def test_every_page_is_the_golden_one() -> None:
    """PENSTOCK_WRITE_GOLDEN=1 writes the file; read the difference before committing it."""
    pages = "".join(f"== {name}\n{page()}\n\n" for name, page in PAGES.items())
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        GOLDEN.write_text(pages, "utf-8")
    assert pages == GOLDEN.read_text("utf-8")


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 120, 200, 10_000])
@pytest.mark.parametrize("height", [1, 2, 5, 24])
def test_a_screen_of_any_size_holds(width: int, height: int) -> None:
    for page in ("list", "replica", "help"):
        shown(View(replica="0", page=page), width, height, (QWEN, BARE, SILENT))
    shown(View(), width, height, ())


def test_a_rate_has_five_characters_and_seconds_have_six() -> None:
    rates: list[tuple[float | None, str]] = [
        (None, "-"), (math.nan, "-"), (math.inf, "-"), (0, "0"), (0.04, "0.04"), (3.21, "3.2"), (9.96, "10"),
        (57.4, "57"), (999.4, "999"), (999.9, "1.0k"), (1234, "1.2k"), (56_789, "57k"), (999_960, "1.0M"),
        (1.23e7, "12M"), (5e12, "5.0T"), (-3.0, "-3.0"),
    ]  # fmt: skip
    seconds: list[tuple[float | None, str]] = [
        (None, "-"), (math.nan, "-"), (0.0, "0.0ms"), (0.0052, "5.2ms"), (0.12, "120ms"), (1.24, "1.2s"), (75, "1m15s")
    ]  # fmt: skip
    assert [top_text.rate(value) for value, _ in rates] == [text for _, text in rates]
    assert [top_text.seconds(value) for value, _ in seconds] == [text for _, text in seconds]


def test_bad_values_and_hostile_texts_break_no_line() -> None:
    hostile = "\033[2J\nx\t\u202e\x9b31m" + "名" * 40
    nan = math.nan
    gpu = GpuReading(0, "u", hostile, nan, 5, 0, nan)
    bad = ReplicaLive(
        hostile, hostile, "ready", hostile, hostile, hostile, None, -5, nan, math.inf, nan, -1.0, 1e300, nan, nan,
        nan, nan, nan, 10**9, nan, machines=(MachineReading(hostile, nan, gpus=(gpu,)),),
    )  # fmt: skip
    loading = msgspec.structs.replace(
        bad, replica="2", state=hostile, progress=Progress(hostile, eta_s=nan, fraction=nan)
    )
    rates = Rates(nan, nan, nan, nan, nan, nan, nan, nan, nan, -1, -1, nan, nan, 0, None, nan, nan)
    snapshot = Snapshot(
        hostile, 0.0, hostile, rates, hostile, hostile, (bad, loading), Attainment(nan, nan, nan, nan),
        Cost(nan, nan, nan, nan), (), (msgspec.structs.replace(SLOW, replica=hostile, key=hostile),),
        (Event(0.0, hostile, hostile, hostile, hostile),),
    )  # fmt: skip
    watched = Watched(hostile, snapshot, hostile, None, {hostile: (Restart(nan, hostile),)})
    for view in (View(), View(replica=hostile, page="replica"), View(replica="2", page="replica"), View(hostile)):
        for width in (10, 79, 80, 200):
            text = shown(view, width, 30, (watched, SILENT)) if view.page == "list" else ""
            lines = top_view.screen(view, (watched, SILENT), Size(width, 30), lambda _: "00:00:00", (hostile,))
            text += top_text.plain(lines)
            assert not set(text) & {"\033", "\t", "\u202e", "\x9b", "\r"}
            assert all("\n" not in part for line in lines for part, _ in line)
    assert "\033" not in top_text.once((watched,), 200, lambda _: "")


def test_rows_are_sorted_by_any_column_and_those_without_a_value_stay_last() -> None:
    rows = [BUSY, IDLE, LOADING, FAILED, msgspec.structs.replace(BUSY, replica="3", output_tokens_per_s=math.nan)]

    def order(head: str, is_reversed: bool = False) -> str:
        return " ".join(row.replica for row in top_text.sorted_rows(rows, head, is_reversed))

    assert order("REPLICA") == "0 1 2 3 10"
    assert order("REPLICA", True) == "10 3 2 1 0"
    assert order("FLIGHT") == "0 3 1 2 10"
    assert order("OUT/S") == order("OUT/S", True) == "0 1 2 3 10"
    assert order("RUN") == "0 3 1 2 10" and order("RUN", True) == "1 0 3 2 10"
    assert order("NODE") == "1 0 3 2 10"
    for column in top_text.COLUMNS:
        assert len(order(column.head).split()) == 5


def pressed(*keys: str, view: View | None = None, everything: tuple[Watched, ...] = (QWEN, BARE)) -> View | None:
    current: View | None = view or View()
    for key in keys:
        assert current is not None
        current = top_view.press(current, key, everything, 80)
    return current


def test_keys_change_the_view() -> None:
    assert pressed("q") is None
    assert pressed("down", "j", "j", "j", "j") == View(replica="10")
    assert pressed("j", "up", "k") == View(replica="0")
    assert pressed("enter") == View(replica="0", page="replica")
    assert pressed("enter", "j") == View(replica="1", page="replica")
    assert pressed("enter", "esc") == View(replica="0")
    assert pressed("tab") == View("bare") and pressed("tab", "tab") == View("qwen")
    assert pressed("tab", "enter", "j") == View("bare"), "it has no replica"
    assert pressed("s") == View(sort="STATE") and pressed("s", "S", "s") == View(sort="FLIGHT")
    assert pressed(*["s"] * 11) == View(), "the last column is followed by the first"
    assert pressed("p") == View(is_paused=True) and pressed("p", "p") == View()
    assert pressed("?") == View(page="help") and pressed("?", "?") == pressed("?", "esc") == View()
    assert pressed("home", "é", "x") == View()


def test_the_filter_is_typed_and_given_up() -> None:
    assert pressed("/", "q", "j", "x", "backspace") == View(filter="qj", is_typing=True)
    assert pressed("/", "N", "o", "enter") == View(filter="No") and pressed("/", "n", "esc") == View()
    view = pressed("/", "L", "o", "a", "d", "enter")
    assert view is not None and [row.replica for row in top_view.rows_of(view, QWEN)] == ["2"]
    assert pressed("enter", view=view) == View(replica="2", page="replica", filter="Load")
    assert pressed("esc", view=view) == View()
    assert pressed("enter", view=View(filter="nothing has this")) == View(filter="nothing has this")
    assert "no replica has that text" in shown(View(filter="nothing has this"))


def test_the_list_scrolls_to_the_chosen_replica() -> None:
    rows = tuple(msgspec.structs.replace(IDLE, replica=str(n)) for n in range(500))
    many = msgspec.structs.replace(SNAPSHOT, replicas=rows)
    text = shown(View(replica="250"), everything=(msgspec.structs.replace(QWEN, snapshot=many),))
    assert "\n250 " in text and "\n0 " not in text and "was killed" in text
    assert "replica 77 of qwen is gone" in shown(View(replica="77", page="replica"))


def test_the_state_adds_what_the_gateway_does_not_know() -> None:
    queued = ReplicaStatus("3", "queued", "queued", reason="waits for 2 GPUs")
    lost = ReplicaStatus("0", "silent", "placed", told("0"), reason="node1 has not reported for 20 s")
    state = State(AT, "degraded", 4, (lost, queued), reason="one is lost")
    watched = top_text.join("qwen", SNAPSHOT, state, EVENTS, None, None)
    assert [(row.replica, row.state) for row in watched.snapshot.replicas] == [
        ("0", "silent"), ("1", "ready"), ("2", "loading"), ("3", "queued"), ("10", "failed"),
    ]  # fmt: skip
    assert watched.snapshot.reason == "one is lost"
    alone = top_text.join("qwen", None, state, EVENTS, "http://h", "no answer")
    assert (alone.snapshot.phase, alone.snapshot.now.n_desired, alone.snapshot.now.n_ready) == ("degraded", 4, 0)
    page = shown(View(), everything=(alone,))
    assert "waits for 2 GPUs" in page and "no answer" in page
    nothing = top_text.join("qwen", None, None, (), None, "no answer")
    assert "no replica yet" in shown(View(), everything=(nothing,))


@pytest.mark.parametrize(
    ("text", "keys", "rest"),
    [
        ("jq/", ["j", "q", "/"], ""),
        ("\033[A\033OB\r\t\x7f", ["up", "down", "enter", "tab", "backspace"], ""),
        ("\033", [], "\033"), ("\033[", [], "\033["), ("a\033[1;5", ["a"], "\033[1;5"),
        ("\033j", ["esc", "j"], ""), ("\033\033[A", ["esc", "up"], ""), ("\033[99~\033[1;5Aé", ["é"], ""),
        ("\x01\x00\u202e", [], ""), ("\033[" + "1" * 99, [], ("\033[" + "1" * 99)[:16]),
    ],
)  # fmt: skip
def test_what_a_terminal_sends_is_read_as_keys(text: str, keys: list[str], rest: str) -> None:
    assert keys_of(text) == (keys, rest)
    joined: list[str] = []
    left = ""
    for char in text[:60]:  # one byte at a time, as over ssh
        more, left = keys_of(left + char)
        joined += more
    if not rest:
        assert joined == keys or "\033" in text
