"""Nodes as real processes beside a real gateway, with the fake engine: how they leave, and how a probe sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hub_server import COMMIT, serving
from nodes_rig import Rig
from samples import demo_plan
from waiting import end

from penstock import processes
from penstock.models import manifest
from penstock.spec.deployment import Parallel, Sleep
from penstock.wire.answers import HttpError, Reply
from penstock.wire.client import Client

pytestmark = pytest.mark.processes

ONE = demo_plan("fake", drain_s=10.0, args={"load-s": 0.2, "tokens-per-s": 30})
TWO = msgspec.structs.replace(ONE, n_nodes=2, layout=Parallel(tensor=2), executor="mp")


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, getattr(request, "param", ONE))
    yield made
    made.stop()
    made.close()
    assert processes.sweep(str(made.run)) == [], "nothing is left of the nodes"


def leave(rig: Rig) -> int:
    """Orders replica 0 to leave; the requests in flight."""
    return int(rig.admin.post_json("/admin/leave", {"replica": "0"})["in_flight"])


def test_a_node_that_is_ordered_to_leave_drains_and_exits_as_on_sigterm(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "ready"
    file.write_text("left by an earlier process")
    node = rig.node(0, "--ready-file", str(file))
    rig.until(lambda: not file.exists(), "a stale ready file is removed")
    rig.wait_state("ready")
    rig.until(file.exists, "the ready file")
    row = rig.row()
    assert row is not None and row.announcement.url is not None
    with pytest.raises(HttpError, match="Unauthorized"):  # other users of the machine reach it too
        Client(row.announcement.url).get_json("/v1/models")
    stream = rig.client.stream_chat([{"role": "user", "content": "hi"}], max_tokens=60)
    next(stream)
    assert leave(rig) == 1
    rig.wait_state("stopping")
    assert not file.exists()
    assert leave(rig) == 1, "a second order does not cut the drain short"
    *_, reply = stream
    assert isinstance(reply, Reply) and reply.finish_reason == "length"
    assert end(node) == 0


@pytest.mark.parametrize("rig", [msgspec.structs.replace(ONE, sleep=Sleep(level=1))], indirect=True)
@pytest.mark.nightly
def test_a_probe_does_not_see_that_a_node_sleeps(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "ready"
    rig.node(0, "--ready-file", str(file))
    rig.wait_state("ready")
    rig.admin.post_json("/admin/sleep", {"replica": "0"})
    rig.wait_state("sleeping")
    rig.until(file.exists, "the ready file")
    rig.admin.post_json("/admin/wake", {"replica": "0"})

    def is_awake() -> bool:
        assert file.exists()
        row = rig.row()
        assert row is not None and row.announcement.state in ("sleeping", "waking", "ready"), row
        return row.announcement.state == "ready"

    rig.until(is_awake, "it wakes")


@pytest.mark.nightly
@pytest.mark.parametrize("rig", [TWO], indirect=True)
def test_all_nodes_of_a_replica_leave_on_one_order_and_their_successors_stay(rig: Rig, tmp_path: Path) -> None:
    files = [tmp_path / "ready-0", tmp_path / "ready-1"]
    nodes = [rig.node(rank, "--ready-file", str(file)) for rank, file in enumerate(files)]
    rig.wait_state("ready")
    rig.until(lambda: all(file.exists() for file in files), "both ready files")
    rig.until(lambda: (row := rig.row()) and len(row.announcement.machines) == 2, "readings of both nodes")
    text = rig.admin.get_text("/metrics")
    assert text.count("\npenstock_node_memory_total_bytes{") == 1, "both are this machine"
    assert 'penstock_replica_start_seconds{replica="0",stage="nodes"}' in text
    leave(rig)
    assert [end(node) for node in nodes] == [0, 0]
    assert not any(file.exists() for file in files)
    for rank in (0, 1):
        rig.node(rank)
    rig.wait_state("ready")


HOOK = """
import os, sys, threading, time
def work():
    time.sleep(0.7)
    os.open("/dev/shm/TAG", os.O_CREAT | os.O_RDWR)
    time.sleep(1.5)
if "penstock.testing.fake_engine" in sys.orig_argv:
    threading.Thread(target=work).start()
"""


@pytest.mark.nightly
def test_an_engine_that_fails_to_start_leaves_no_shared_memory(tmp_path: Path) -> None:
    """vLLM's ranks make psm_* seconds before they run out of memory."""
    segment = Path("/dev/shm") / f"penstock-test-{tmp_path.name}"
    (tmp_path / "sitecustomize.py").write_text(HOOK.replace("TAG", segment.name))
    rig = Rig(tmp_path, demo_plan("fake", args={"crash-at-start": "boom"}, env={"PYTHONPATH": str(tmp_path)}))
    try:
        node = rig.node(0)
        rig.until(segment.exists, "the engine makes its segment")
        assert end(node) == 1 and not segment.exists()
    finally:
        rig.close()
        segment.unlink(missing_ok=True)


FILES = {"config.json": b"{}", "m.safetensors": b"x" * 5_000_000}


def test_a_node_fetches_the_planned_revision_and_announces_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/elsewhere/models--org--name/snapshots/{COMMIT}"
    facts = msgspec.structs.replace(ONE.model, reference="org/name", path=path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving("org/name", FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.is_open.clear()  # the weights hang
        rig = Rig(tmp_path, msgspec.structs.replace(ONE, model=facts))
        try:
            stopped = rig.node()

            def is_fetching() -> bool:
                shown = (row := rig.row()) and row.announcement.progress
                return bool(shown and shown.stage.startswith("fetching 1/2 files, 2 B of 4.8 MiB"))

            rig.until(is_fetching, "its progress")
            stopped.terminate()
            assert end(stopped) == 0, "a fetch does not hold a node that is stopped"
            hub.is_open.set()
            hub.asked.clear()
            rig.node()
            ready = rig.wait_state("ready")
            assert {"files", "fetch", "imports"} <= set(ready.start_s)
            assert hub.downloads == ["m.safetensors"], "what came before is not fetched again"
            assert manifest.verify(tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT) == []
        finally:
            rig.stop()
            rig.close()
    assert processes.sweep(str(rig.run)) == [], "nothing is left of the nodes"
