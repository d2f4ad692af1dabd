"""What the commands show: texts, tables, and the display of a start."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import msgspec
import pytest
from samples import DEMO, NOW, cpu_machine, demo_plan, deployment, draft, gpu_machine, gpu_plan, run_folder, told

from penstock import run_folder as runs
from penstock.cli import progress, status_text
from penstock.deployment.preflight import Finding
from penstock.deployment.prepare import Prepared
from penstock.deployment.start import Started
from penstock.planner import launch
from penstock.planner.launch import Sized
from penstock.run_folder import Artifact, Part, ReplicaStatus, State
from penstock.wire.announcement import Progress, Restart


@pytest.fixture(autouse=True)
def name_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_text, "command_name", lambda: "penstock")


def replica(name: str = "0", state: str = "ready", **facts: object) -> ReplicaStatus:
    announcement = told(name, state if state != "draining" else "ready", **facts)
    return ReplicaStatus(name, state, "placed", announcement)


def state(*replicas: ReplicaStatus, phase: str = "ready", **facts: object) -> State:
    parts = {"controller": Part("running", told("0").processes[0]), "gateway": Part("running", told("1").processes[0])}
    return State(NOW, phase, 1, replicas, **(parts | facts))  # type: ignore[arg-type]


LOADING = Progress("weights", 17, 30, 2.1 * 2**30, 40.0, 0.6)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (replica(state="loading", progress=LOADING), "weights, shard 17/30, 2.1 GiB/s, about 40.0 s left"),
        (replica(state="loading", progress=Progress("kv cache", fraction=0.8)), "kv cache"),
        (replica(state="ready", progress=LOADING), ""),
        (replica(state="draining"), ""),
        (ReplicaStatus("0", "starting", "placed"), ""),
        (ReplicaStatus("0", "failed", "gone", reason="out of memory"), "out of memory"),
        (ReplicaStatus("0", "gone", "gone", reason="its node is gone"), "its node is gone"),
    ],
)
def test_progress_is_said_in_words(shown: ReplicaStatus, expected: str) -> None:
    assert status_text.progress_text(shown) == expected


def test_a_status_shows_every_part_at_a_glance() -> None:
    run = run_folder(deployment(name="d"))
    ready = replica(url="http://127.0.0.1:41000", ready_after_s=2.0)
    shown = status_text.status_text(run, state(ready, requests_total=7), NOW + 75)
    assert shown == "\n".join(
        [
            "d is ready",
            "  model    penstock-demo on llamacpp 1.0 (cpu)",
            "  address  http://127.0.0.1:8000/v1   7 requests since its gateway started",
            f"  folder   {run.path}   started 1m15s ago",
            "",
            "PART        STATE    PID  RESTARTS",
            "controller  running  100  0",
            "gateway     running  101  0",
            "replica 0   ready    100  0         http://127.0.0.1:41000, ready in 2.0 s",
        ]
    )


@pytest.mark.parametrize(("factor", "words"), [(0.96, None), (1.04, None), (0.9, "-10.0%"), (1.2, "+20.0%")])
def test_a_status_tells_when_the_engine_has_another_kv_cache_than_planned(factor: float, words: str | None) -> None:
    made = gpu_plan()
    assert made.forecast is not None
    planned = made.forecast.kv_cache_gib
    run = runs.create(msgspec.structs.replace(draft(deployment(name="d")), plan=made), NOW)
    shown = state(replica(measured={"kv_cache_gib": planned * factor}, ready_after_s=2.0), replica("1"))
    for text in (
        status_text.status_text(run, shown, NOW),
        status_text.ready_text(run, shown, Started("d", "http://127.0.0.1:8000")),
    ):
        lines = [line for line in text.splitlines() if line.startswith("  memory ")]
        if words is None:
            assert lines == []
        else:
            said = f"{planned * factor:.2f} GiB of KV cache a GPU, planned {planned:.2f} ({words})"
            assert lines == [f"  memory   {said}"]


def test_what_is_not_planned_is_not_shown_as_a_number() -> None:
    unknown = Sized(not_modelled="no")
    made = launch.make_on_gpus(deployment(), DEMO, gpu_machine(2), "0.33.0", 1, unknown)
    prepared = Prepared(deployment(), gpu_machine(2), made, Artifact(("true",), {}))
    shown = status_text.prepared_text(prepared)
    assert "# memory a replica: weights 6.0 MiB, the rest is not planned; 2 x NVIDIA H100 80GB HBM3 in box" in shown
    assert "# warning: not planned: no;" in shown


def test_a_status_says_what_is_wrong_and_the_reasons_of_restarts_newest_first() -> None:
    run = run_folder()
    restarted = ReplicaStatus(
        "0", "loading", "placed", told("0", "loading", progress=LOADING), in_flight=2, n_restarts=2,
        restarts=(Restart(NOW - 60, "stalled"), Restart(NOW - 5, "was killed by signal 9")),
    )  # fmt: skip
    gateway = Part("gone", n_restarts=1, restarts=(Restart(NOW - 20, "its process 5 was gone"),))
    shown = status_text.status_text(
        run, state(restarted, phase="degraded", gateway=gateway, controller=Part("gone"), reason="x"), NOW
    )
    assert shown.startswith("penstock-demo is degraded: x\n")
    assert "gateway     gone     -    1\n" in shown
    assert (
        "replica 0   loading  100  2         weights, shard 17/30, 2.1 GiB/s, about 40.0 s left, 2 in flight" in shown
    )
    assert shown.endswith(
        "\n\nrestarts, newest first:\n"
        "  5.0 s ago  replica 0: was killed by signal 9\n"
        "  20.0 s ago  gateway: its process 5 was gone\n"
        "  1m00s ago  replica 0: stalled\n"
        "\nthe controller is gone: nothing is restarted until `penstock up` starts it again"
    )


def test_an_ended_deployment_needs_no_controller() -> None:
    shown = status_text.status_text(run_folder(), State(NOW, "down", 0), NOW)
    assert shown.startswith("penstock-demo is down\n")
    assert "the controller is gone" not in shown


def test_a_list_is_a_table() -> None:
    rows = [
        (run_folder(deployment(name="a")), state(replica())),
        (run_folder(deployment(name="longer-name")), state(replica(state="loading"), phase="starting")),
    ]
    assert status_text.list_text(rows).splitlines() == [
        "NAME         STATE     REPLICAS  ENGINE    ADDRESS                MODEL",
        "a            ready     1/1       llamacpp  http://127.0.0.1:8000  penstock-demo",
        "longer-name  starting  0/1       llamacpp  http://127.0.0.1:8000  penstock-demo",
    ]


def test_a_successful_up_ends_with_what_to_type_next() -> None:
    run = run_folder()
    ready = state(replica(ready_after_s=1.26))
    shown = status_text.ready_text(run, ready, Started(run.name, run.url, "sk-secret"))
    assert shown.splitlines() == [
        "penstock-demo is ready (its engine took 1.3 s): penstock-demo on llamacpp 1.0, 1 replica",
        "  address  http://127.0.0.1:8000/v1   model penstock-demo",
        "  key      sk-secret   (shown this once: export OPENAI_API_KEY=sk-secret)",
        "  next     penstock chat   penstock status   penstock down",
    ]
    again = status_text.ready_text(run_folder(deployment(name="d")), ready, Started("d", run.url, was_running=True))
    assert again.splitlines()[0] == "d runs already: penstock-demo on llamacpp 1.0, 1 replica"
    assert again.splitlines()[-1] == "  next     penstock chat d   penstock status d   penstock down d"


def test_a_rendered_deployment_shows_the_file_the_sum_the_files_and_the_command() -> None:
    artifact = Artifact(("python", "-m", "penstock.node", "a b"), {"launch.json": '{"x": 1}\n'})
    shown = status_text.prepared_text(Prepared(deployment(), cpu_machine(), demo_plan("vllm"), artifact))
    assert "\nmodel: penstock-demo\n" in shown
    assert "# the plan: vllm 1.0 on cpu, 1 rank(s) a replica, 1024 tokens a request" in shown
    assert (
        "# memory a replica: 1.2 GiB = weights 6.0 MiB + KV cache 64.0 MiB + engine 1.2 GiB (estimate); "
        "desk has 16.0 GiB free" in shown
    )
    assert '# file artifact/launch.json\n{"x": 1}\n' in shown
    assert shown.endswith("# started for each replica\npython -m penstock.node 'a b'")


def test_doctor_puts_the_cure_below_what_is_wrong() -> None:
    findings = [Finding("python", "ok", "3.11", "unused"), Finding("disk", "warning", "1 GiB", "free space")]
    assert status_text.doctor_text(findings).splitlines() == [
        "ok  python  3.11",
        "!!  disk    1 GiB",
        "            fix: free space",
        "no problem found",
    ]
    bad = status_text.doctor_text([Finding("memory", "bad", "none", "end it")])
    assert bad.splitlines()[0].startswith("XX  memory")
    assert bad.splitlines()[-1] == "1 problem to fix before `up`"


def test_a_start_without_a_terminal_is_one_line_a_change() -> None:
    stream = io.StringIO()
    with progress.StartDisplay(stream, as_json=False) as display:
        display.show(state(replica(state="loading", progress=LOADING)))
        display.show(state(replica(state="loading", progress=LOADING)))
        display.show(state(replica(state="ready")))
    lines = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert lines == [
        "replica 0: loading weights, shard 17/30, 2.1 GiB/s, about 40.0 s left",
        "replica 0: ready",
    ]
    assert "\033" not in stream.getvalue()


def test_a_start_as_json_is_one_event_a_change() -> None:
    stream = io.StringIO()
    with progress.StartDisplay(stream, as_json=True) as display:
        for _ in range(2):
            display.show(state(replica("0", "loading", progress=LOADING), replica("1", "queued")))
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first == {
        "event": "progress",
        "replica": "0",
        "state": "loading",
        "progress": {
            "stage": "weights",
            "shards_done": 17,
            "shards_total": 30,
            "bytes_per_s": 2.1 * 2**30,
            "eta_s": 40.0,
            "fraction": 0.6,
        },
        "reason": None,
    }
    assert (second["replica"], second["progress"]) == ("1", None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_start_on_a_terminal_is_a_bar_for_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress.StartDisplay(stream, as_json=False) as display:
        display.show(state(replica("0", "loading", progress=LOADING), replica("1", "queued")))
        display.show(state(replica("0"), replica("1", "queued")))
    assert "replica 0" in stream.getvalue()
    assert "replica 1" in stream.getvalue()


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with progress.StartDisplay(stream, as_json=False) as display:
        display.show(state(replica()))
    assert stream.getvalue().endswith("replica 0: ready\n")


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
