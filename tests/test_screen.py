"""What the commands show: texts, tables, and the display of a start."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from samples import DEMO, NOW, cpu_machine, demo_plan, deployment, draft, gpu_machine, gpu_plan, run_folder, told

from penstock import run_folder as runs
from penstock.cli import progress, status_text
from penstock.deployment.prepare import Prepared
from penstock.deployment.start import Started
from penstock.errors import Finding
from penstock.planner import launch
from penstock.planner.launch import Sized
from penstock.run_folder import Artifact, Part, ReplicaStatus, Run, State
from penstock.wire.announcement import Progress, Restart

GOLDEN = Path(__file__).parent / "golden" / "screen.txt"


def test_the_end_of_machines_is_a_weekday_of_this_week_or_a_date() -> None:
    soon, later = (status_text._end_words(time.time() + days * 86400, "LIMIT=7") for days in (1, 20))
    assert re.fullmatch(r"its machines until \w{3} \d\d:\d\d \(LIMIT=7\)", soon)
    assert re.fullmatch(r"its machines until \w{3} \d\d \w{3} \d\d:\d\d \(LIMIT=7\)", later)


@pytest.fixture(autouse=True)
def name_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_text, "command_name", lambda: "penstock")


def replica(name: str = "0", state: str = "ready", **facts: object) -> ReplicaStatus:
    announcement = told(name, state if state != "draining" else "ready", **facts)
    return ReplicaStatus(name, state, "placed", announcement)


def state(*replicas: ReplicaStatus, phase: str = "ready", **facts: object) -> State:
    parts = {"controller": Part("running", told("0").processes[0]), "gateway": Part("running", told("1").processes[0])}
    return State(NOW, phase, replicas=replicas, **({"desired_replicas": 1} | parts | facts))  # type: ignore[arg-type]


LOADING = Progress("weights", 17, 30, 2.1 * 2**30, 40.0, 0.6)


def kv_differs(factor: float) -> str:
    """The status of a replica whose engine reports another KV cache than was planned; the plan has 57.02 GiB."""
    plan = gpu_plan()
    assert plan.forecast is not None
    run = runs.create(msgspec.structs.replace(draft(deployment(name="d")), plan=plan), NOW)
    ready = replica(measured={"kv_cache_gib": plan.forecast.kv_cache_gib * factor}, ready_after_s=2.0)
    shown = state(ready, replica("1"))
    return f"{status(run, shown)}\n{status_text.ready_text(run, shown, Started('d', 'http://127.0.0.1:8000'))}"


def status(run: Run, shown: State, now: float = NOW) -> str:
    return status_text.status_text(run, shown, now).replace(str(run.path), "FOLDER")


def restarted() -> str:
    gateway = Part("gone", n_restarts=1, restarts=(Restart(NOW - 20, "its process 5 was gone"),))
    loading = ReplicaStatus(
        "0", "loading", "placed", told("0", "loading", progress=LOADING), in_flight=2, n_restarts=2,
        restarts=(Restart(NOW - 60, "stalled"), Restart(NOW - 5, "was killed by signal 9")),
    )  # fmt: skip
    return status(run_folder(), state(loading, phase="degraded", gateway=gateway, controller=Part("gone"), reason="x"))


def listed() -> str:
    loading = state(replica(state="loading"), phase="starting")
    rows = [(deployment(name="a"), state(replica())), (deployment(name="longer-name"), loading)]
    return status_text.list_text([(run_folder(wanted), shown) for wanted, shown in rows])


def without_replicas() -> str:
    run, none = run_folder(deployment(name="d", replicas=0)), state(desired_replicas=0)
    return f"{status_text.ready_text(run, none, Started('d', run.url))}\n\n{status(run, none).splitlines()[0]}"


def after_up() -> str:
    run, ready = run_folder(), state(replica(ready_after_s=1.26))
    first = status_text.ready_text(run, ready, Started(run.name, run.url, "sk-secret"))
    again = Started("d", run.url, was_running=True)
    return f"{first}\n\n{status_text.ready_text(run_folder(deployment(name='d')), ready, again)}"


def rendered() -> str:
    artifact = Artifact(("python", "-m", "penstock.node", "a b"), {"launch.json": '{"x": 1}\n'})
    shown = status_text.prepared_text(Prepared(deployment(), cpu_machine(), demo_plan("vllm"), artifact))
    assert "\nmodel: penstock-demo\n" in shown  # the whole file, which is test_spec's
    return shown[shown.index("# the plan") :]


def not_planned() -> str:
    plan = launch.make_on_gpus(deployment(), DEMO, gpu_machine(2), "0.33.0", 1, Sized(not_modelled="no"))
    shown = status_text.prepared_text(Prepared(deployment(), gpu_machine(2), plan, Artifact(("true",), {})))
    return "\n".join(line for line in shown.splitlines() if "memory a replica" in line or "warning" in line)


def examined() -> str:
    well = [Finding("python", "ok", "3.11", "unused"), Finding("disk", "warning", "1 GiB", "free space")]
    bad = [Finding("memory", "bad", "none", "end it")]
    return f"{status_text.doctor_text(well)}\n\n{status_text.doctor_text(bad)}"


READY = replica(url="http://127.0.0.1:41000", ready_after_s=2.0)
SHOWN: dict[str, Callable[[], str]] = {
    "loading": lambda: status_text.progress_text(replica(state="loading", progress=LOADING)),
    "loading without shards": lambda: status_text.progress_text(
        replica(state="loading", progress=Progress("kv cache", fraction=0.8))
    ),
    "ready": lambda: status_text.progress_text(replica(state="ready", progress=LOADING)),
    "starting": lambda: status_text.progress_text(ReplicaStatus("0", "starting", "placed")),
    "failed": lambda: status_text.progress_text(ReplicaStatus("0", "failed", "gone", reason="out of memory")),
    "status": lambda: status(run_folder(deployment(name="d")), state(READY, requests_total=7), NOW + 75),
    "status with 4% more KV cache than planned": lambda: kv_differs(1.04),
    "status with 10% less KV cache than planned": lambda: kv_differs(0.9),
    "status after restarts": restarted,
    "status of an ended deployment": lambda: status(run_folder(), State(NOW, "down", 0)),
    "list": listed,
    "without replicas": without_replicas,
    "after up": after_up,
    "rendered": rendered,
    "not planned": not_planned,
    "doctor": examined,
}


def test_every_text_is_the_golden_one(home: Path) -> None:
    """PENSTOCK_WRITE_GOLDEN=1 writes the file; read the difference before committing it."""
    shown = "".join(f"== {name}\n{text()}\n\n" for name, text in SHOWN.items())
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        GOLDEN.write_text(shown, "utf-8")
    assert shown == GOLDEN.read_text("utf-8")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal], ids=["no terminal", "a dumb one"])
def test_a_start_without_a_terminal_is_one_line_a_change(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = kind()
    with progress.StartDisplay(stream, as_json=False) as display:
        for name in ("loading", "loading", "ready"):
            display.show(state(replica(state=name, progress=LOADING if name == "loading" else None)))
    lines = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    loading = "replica 0: loading weights, shard 17/30, 2.1 GiB/s, about 40.0 s left"
    assert lines == [loading, "replica 0: ready"] and "\033" not in stream.getvalue()


def test_a_start_as_json_is_one_event_a_change_and_names_parts_while_they_wait() -> None:
    waits = Part("queued", note="Pending: 0/8 nodes have 4 cpu free")
    lines, events = io.StringIO(), io.StringIO()
    with progress.StartDisplay(lines, as_json=False) as display, progress.StartDisplay(events, as_json=True) as other:
        for part in (waits, waits, Part("starting"), Part("running")):
            seen = msgspec.structs.replace(state(), gateway=part)
            display.show(seen)
            other.show(seen)
        for _ in range(2):
            other.show(state(replica("0", "loading", progress=LOADING), replica("1", "queued")))
    words = [line.partition("] ")[2] for line in lines.getvalue().splitlines()]
    assert words == ["gateway: queued Pending: 0/8 nodes have 4 cpu free", "gateway: starting", "gateway: running"]
    first, *_, loading, queued = (json.loads(line) for line in events.getvalue().splitlines())
    assert first == {"event": "progress", "part": "gateway", "state": "queued", "reason": waits.note}
    told = {"event": "progress", "replica": "0", "state": "loading", "reason": None}
    assert loading == told | {"progress": msgspec.to_builtins(LOADING)}
    assert (queued["replica"], queued["progress"]) == ("1", None)


def test_a_start_on_a_terminal_is_a_bar_for_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress.StartDisplay(stream, as_json=False) as display:
        display.show(state(replica("0", "loading", progress=LOADING), replica("1", "queued")))
        display.show(state(replica("0"), replica("1", "queued")))
    assert "replica 0" in stream.getvalue() and "replica 1" in stream.getvalue()


def test_the_command_is_named_as_the_user_can_type_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    penstock = tmp_path / "bin" / "penstock"
    penstock.parent.mkdir()
    penstock.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(penstock.parent))
    assert status_text.command_name() == "penstock"
    monkeypatch.setenv("PATH", "/nowhere")
    assert status_text.command_name() == str(penstock)
    monkeypatch.chdir(tmp_path)
    assert status_text.command_name() == "bin/penstock"
