"""`penstock up` of a hub id from an empty cache: the hub is on loopback, the engine the fake one."""

from __future__ import annotations

import pytest
from hub_server import COMMIT, asked_hub
from launching import Place, ask, call, interrupt

from penstock import paths, run_folder
from penstock.models import manifest
from penstock.models.files import BUNDLED
from penstock.run_folder import Run

pytestmark = pytest.mark.processes
FILES = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.suffix in (".json", ".safetensors")}


def test_up_fetches_the_model_pins_its_commit_and_continues_after_ctrl_c(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked_hub(monkeypatch, "org/tiny", FILES) as hub:
        cache = place.folder / "cache"
        file = place.write("one", model="org/tiny@main", cache={"weights": str(cache)})
        hub.is_open.clear()  # the weights hang
        small = {name for name in FILES if not name.endswith(".safetensors")}

        def waits_for_weights() -> bool:
            return len(hub.downloads) == len(FILES) and small <= {path.name for path in cache.rglob("*")}

        done = interrupt("up", file, when=waits_for_weights)
        assert done.code == 130 and not Run(paths.home() / "runs" / "one").exists(), done
        hub.is_open.set()
        hub.asked.clear()
        done = call("up", file, "--json")
        assert done.code == 0, done
        run = place.note(run_folder.find("one"))
        events = [event["event"] for event in done.events]
        assert events[0] == "fetch" and {"submitted", "ready"} <= set(events)
        assert all(name.endswith(".safetensors") for name in hub.downloads), "small files were there"
        folder = cache / "models--org--tiny" / "snapshots" / COMMIT
        assert run.plan().model.path == str(folder) and manifest.verify(folder) == []
        assert ask(run).replica == "0"
        hub.asked.clear()
        assert call("up", file, "--json").code == 0 and hub.downloads == [], "it runs already"
        assert call("down").code == 0
