"""A node that lacks the model's files: it fetches them before the engine starts, and says how far it is."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from hub_server import COMMIT, serving
from nodes_rig import Rig
from samples import demo_plan

from penstock import processes
from penstock.models import manifest

FILES = {"config.json": b"{}", "m.safetensors": b"x" * 5_000_000}
PLAN = demo_plan("fake", args={"load-s": 0.1})


@pytest.mark.processes
def test_a_node_fetches_the_planned_revision_and_announces_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/elsewhere/models--org--name/snapshots/{COMMIT}"
    facts = msgspec.structs.replace(PLAN.model, reference="org/name", path=path)
    with serving("org/name", FILES) as hub:
        for name, value in (
            ("HF_ENDPOINT", hub.url),
            ("HF_HUB_CACHE", str(tmp_path / "hub")),
            ("NO_PROXY", "127.0.0.1"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
        hub.is_open.clear()  # the weights hang
        rig = Rig(tmp_path, msgspec.structs.replace(PLAN, model=facts))
        try:
            stopped = rig.node()

            def words() -> str:
                row = rig.row()
                progress = row.announcement.progress if row is not None else None
                return progress.stage if progress is not None else ""

            rig.until(lambda: words().startswith("fetching 1/2 files, 2 B of 4.8 MiB"), "its progress")
            stopped.send_signal(signal.SIGTERM)
            assert stopped.wait(60) == 0, "a fetch does not hold a node that is stopped"
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
