"""`doctor` measures a workbench: what its readings mean, and the measurement in pods of the fake one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cloudera_rig import file_for
from launching import Place, call
from samples import deployment

from penstock import targets
from penstock.errors import Finding, PenstockError
from penstock.spec.deployment import Deployment
from penstock.targets.cloudera import ending, findings, measuring, names
from penstock.targets.cloudera.findings import Grace, Note, Reading, Stream
from penstock.testing.fake_workbench.server import PROJECT, Workbench
from penstock.text import GIB, MIB

PARTS = ("application", "job-0", "job-1")
PASSED = Stream(200, 0.1, 40.2, is_whole=True)


# ---- what readings mean ----------------------------------------------------------------------------------------------


def file(block: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    whole = {"workbench": "https://ml.example", "project": PROJECT, **(block or {})}
    return deployment(target="cloudera", cloudera=whole, **{"name": "one", **fields})


def note(part: str, blocked: dict[str, str] | None = None, **fields: Any) -> Note:
    answers: dict[str, float | str] = {"8001": 0.0004, "25000": 0.0004, "40000": 0.0006, **(blocked or {})}
    reached = {other: answers for other in PARTS if other != part}
    facts = {"shared_memory_bytes": 64 * MIB, "free_bytes": 100 * GIB, "local_free_bytes": 9 * GIB, **fields}
    return Note("10.0.0.1", (8001, 25000, 40000), weights_bytes=0, python="3.11.9", reached=reached, **facts)


def found(wanted: Deployment, download_bytes: int | None = None, **fields: Any) -> dict[str, Finding]:
    whole: dict[str, Any] = {
        "notes": {part: note(part) for part in PARTS}, "lives": dict.fromkeys(PARTS, "placed"),
        "talking": PASSED, "silent": PASSED, "stream_s": 40.0, "grace": Grace(0.52, False), **fields,
    }  # fmt: skip
    return {each.check: each for each in findings.of_reading(Reading(**whole), wanted, download_bytes)}


def test_a_workbench_that_lets_all_through_is_fine() -> None:
    rows = found(file())
    assert {row.state for row in rows.values()} == {"ok"}
    assert rows["network"].found == "pods reach each other on ports 8001, 25000, 40000: connected within 1 ms"
    assert rows["/dev/shm"].found == "64.0 MiB in a pod"
    assert rows["proxy"].found == "streams pass as they are written, for 40.0 s, also when silent"
    assert rows["stop"].found.startswith("a stop sends no SIGTERM, and ends it 0.5 s later")
    assert "does not end a process in a minute" in found(file(), grace=Grace(None, True))["stop"].found


NO_ANSWER = dict.fromkeys(("8001", "25000", "40000"), "no answer")


def test_pods_that_do_not_reach_each_other_have_workers_as_their_cure() -> None:
    silent = {part: note(part, NO_ANSWER) for part in PARTS}
    row = found(file(), notes=silent)["network"]
    assert (row.state, row.found) == ("bad", "no pod reaches another (ports 8001, 25000, 40000)")
    assert "cloudera.nodes: workers" in (row.cure or "")
    row = found(file({"nodes": "workers"}), notes=silent)["network"]
    assert row.state == "bad" and (row.cure or "").startswith("Ask an administrator")
    row = found(file(), notes={part: note(part, {"40000": "no answer"}) for part in PARTS})["network"]
    assert row.state == "bad" and "the application to the first job on 40000" in row.found
    assert "and 3 more" in row.found and "network policy" in (row.cure or "")
    notes = {part: note(part) for part in PARTS}
    notes["job-0"].reached["job-1"] = {"8001": "no answer"}
    assert found(file(), notes=notes)["network"].state == "warning", "only a replica of several nodes needs it"
    assert found(file(hardware={"nodes": 2}, parallel={"pipeline": 2}), notes=notes)["network"].state == "bad"


def test_shared_memory_room_for_the_weights_and_the_speed_of_the_projects_files_are_judged() -> None:
    two = {"hardware": {"gpus_per_node": 2}}
    row = found(file(**two))["/dev/shm"]
    assert row.state == "bad" and "cloudera.shared_memory_mb: 2048" in (row.cure or "")
    row = found(file({"shared_memory_mb": 4096}, **two))["/dev/shm"]
    assert (row.state, row.found) == ("ok", "64.0 MiB in a pod; `up` raises the project's limit to 4096 MB")
    rows = found(file(), download_bytes=131 * GIB)
    assert rows["disk"].state == "bad" and "the weights need 131 GiB more" in rows["disk"].found
    assert "read rate" not in rows
    present = {part: note(part, read_bytes_per_s=23e6) for part in PARTS}
    rows = found(file(), download_bytes=60 * GIB, notes=present)
    assert rows["disk"].state == "ok" and rows["read rate"].state == "warning"
    assert rows["read rate"].found == (
        "0.023 GB/s of the project's files, by one reader: 60.0 GiB of weights load in 46m41s or more"
    )


@pytest.mark.parametrize(
    ("talking", "silent", "state", "words"),
    [
        (Stream(200, 39.9, 40.1, True), PASSED, "warning", "held back: its first event came after 39.9 s"),
        (Stream(200, 0.1, 30.0), Stream(200, 0.1, 30.0), "warning", "a stream is cut after 30.0 s"),
        (PASSED, Stream(200, 0.1, 30.0), "warning", "what is silent is cut after 30.0 s"),
        (Stream(302), Stream(302), "bad", "asks for a login where the API key was sent"),
        (Stream(error="Name or service not known"), PASSED, "warning", "was not reached: Name or service"),
    ],
)
def test_what_the_proxy_does_to_streams(talking: Stream, silent: Stream, state: str, words: str) -> None:
    row = found(file(), talking=talking, silent=silent)["proxy"]
    assert row.state == state and words in row.found and row.cure


def test_answers_are_kept_and_warn_a_start_that_they_concern(podless: Workbench, tmp_path: Path) -> None:
    targets.load.cache_clear()
    connected = targets.load("cloudera")._connected(names.block_of(file({"workbench": podless.url})))  # type: ignore[attr-defined]
    notes, cut = {part: note(part, NO_ANSWER) for part in PARTS}, Stream(200, 0.1, 30.0)
    reading = Reading(notes, dict.fromkeys(PARTS, "placed"), cut, cut, 40.0, Grace(0.5, False))
    assert measuring.warnings(connected, file()) == ()
    measuring.keep(connected, file(), reading, 0.0)
    network, proxy = measuring.warnings(connected, file())
    assert network.startswith("`doctor` found on 19") and "Set cloudera.nodes: workers" in network
    assert ": a stream is cut after 30.0 s. Ask an administrator" in proxy
    assert measuring.warnings(connected, file({"nodes": "workers"})) == (proxy,), "workers were not measured"
    assert measuring.warnings(connected, file({"public": True})) == (network,), "nor an address without a login"
    partial = msgspec.structs.replace(reading, notes={})
    measuring.keep(connected, file(), partial, 0.0)
    assert len(measuring.warnings(connected, file())) == 2, "pods that got no machine answer nothing"
    fine = msgspec.structs.replace(reading, notes={part: note(part) for part in PARTS}, talking=PASSED, silent=PASSED)
    measuring.keep(connected, file(), fine, 0.0)
    assert measuring.warnings(connected, file()) == ()


# ---- without pods ----------------------------------------------------------------------------------------------------


def measured(there: Workbench, block: dict[str, Any] | None = None) -> list[Finding]:
    targets.load.cache_clear()
    own = {"workbench": there.url, **(block or {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "START_S", 5.0)
        return targets.load("cloudera").measure(file(own), None, lambda _: None)


def left(there: Workbench) -> list[str]:
    doctor = there.pods.folder / ".penstock" / "doctor"
    return [*there.left(), *(str(path) for path in (doctor.rglob("*") if doctor.exists() else ()))]


def test_a_measurement_that_cannot_be_made_says_why_and_leaves_nothing(
    podless: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [row.found for row in measured(podless)[1:]] == [
        "not measured: the first job waits for a machine",
        "not measured: the second job waits for a machine",
    ]
    assert left(podless) == []
    seen = list[str]()

    def interrupted(probe: measuring.Probe) -> Reading:
        seen.extend(podless.left())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(measuring.Probe, "read", interrupted)
        measured(podless)
    assert len(seen) == 3 and left(podless) == []
    podless.refuses_creation = (403, "quota exceeded")
    with pytest.raises(PenstockError, match="quota exceeded"):
        measured(podless)
    assert left(podless) == [], "also when the workbench refuses a part of it"
    podless.refuses_creation, podless.allows_public = None, False
    row = measured(podless, {"public": True})[0]
    assert (row.check, row.state) == ("public", "bad") and "Site Administration > Security" in (row.cure or "")
    assert left(podless) == []


def test_what_a_killed_doctor_left_is_removed_by_the_next_and_by_clean(
    podless: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = podless
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "remove", lambda *_: None)
        measured(there)
    assert len(there.left()) == 3
    own = names.probe_in(there.left()[0]) or ""
    targets.load.cache_clear()
    target: Any = targets.load("cloudera")
    block = names.block_of(file({"workbench": there.url}))
    assert ending.without_folder(*target._place(block)) == [], "it may run still"
    monkeypatch.setattr(measuring, "_LIFE_S", 0.0)
    [lost] = ending.without_folder(*target._place(block))
    assert (lost.run_id, lost.what) == (f"doctor/{own}", "3 workloads of a measurement of `doctor`")
    targets.finish(lost)
    assert left(there) == []


# ---- in pods ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(workbench_place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(measuring, "STREAM_S", 3.0)
    return workbench_place


def rows_of(place: Place, workbench: Workbench, **fields: Any) -> dict[str, dict[str, Any]]:
    done = call("doctor", file_for(place, workbench, **fields), "--json")
    assert left(workbench) == [], done
    rows: list[dict[str, Any]] = done.events[0]["findings"]
    return {row["check"]: row for row in rows}


@pytest.mark.nightly
@pytest.mark.hosts
@pytest.mark.parametrize("nodes", ["jobs", "workers"])
def test_doctor_measures_a_workbench_and_leaves_nothing(place: Place, workbench: Workbench, nodes: str) -> None:
    block = {"nodes": nodes}
    rows = rows_of(place, workbench, cloudera=block)
    assert rows["network"]["found"].startswith("pods reach each other on ports 8001, "), rows
    assert rows["proxy"]["found"] == "streams pass as they are written, for 3.0 s, also when silent"
    assert rows["stop"]["found"].startswith("a stop sends no SIGTERM, and ends it ")
    assert "in a pod" in rows["/dev/shm"]["found"] and "free in the project" in rows["disk"]["found"]
    assert "GB/s of the project's files" in rows["read rate"]["found"]
    assert "measured" not in rows and rows["deployment"]["state"] == "ok"
    workers = list(workbench.workloads.workers.values())
    assert [row.body["environment"]["PENSTOCK_PROBE"] for row in workers] == ["job-0", "job-1"] * (nodes == "workers")
    assert all(row.is_over for row in workers)
    if nodes == "workers":
        workbench.refuses_workers = "quota exceeded: 2 CPU of 2 in use"
        rows = rows_of(place, workbench, cloudera=block)
        assert rows["workers"]["state"] == "bad" and "was not launched: " in rows["workers"]["found"], rows
        assert rows["deployment"]["state"] == "bad"
    else:
        workbench.buffers_streams = True
        row = rows_of(place, workbench)["proxy"]
        assert "a stream is held back" in row["found"] and "proxy_buffering" in row["cure"]


@pytest.mark.hosts
@pytest.mark.nightly
def test_doctor_finds_blocked_ports_and_a_proxy_that_cuts(place: Place, workbench: Workbench) -> None:
    workbench.pods.blocked_ports = "20000-31999"  # type: ignore[attr-defined]
    workbench.cut_streams_after_s = 1.0
    rows = rows_of(place, workbench)
    assert rows["network"]["state"] == "bad"
    assert re.search(r"the application to the first job on (2|3[01])\d{3}", rows["network"]["found"]), rows["network"]
    assert rows["proxy"]["found"].startswith("a stream is cut after "), rows["proxy"]
    assert rows["deployment"]["state"] == "bad", "`up` would fail"
    warned = call("up", file_for(place, workbench), "--json", "--no-wait").events[0]["warnings"]
    assert any("`doctor` found on " in text and ": a stream is cut after " in text for text in warned), warned
