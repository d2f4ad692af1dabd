"""A deployment as a service of VESSL, from `up` to `down`, on the fake of its API: workers are executed for real."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ask, call, now, wait_ready
from store_rig import postgres as postgres
from vessl_rig import Rented, up
from vessl_rig import place as place
from waiting import until

from penstock import targets
from penstock.run_folder import find
from penstock.testing.fake_vessl.services import Service

pytestmark = pytest.mark.processes
SERVICE = {"kind": "service"}


def test_a_file_becomes_a_service_that_answers_and_ends_without_a_trace(
    place: Rented, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place.write(vessl=SERVICE)
    run, key = up(file)
    service = place.world.services["one"]
    assert service.revisions[1].yaml_spec == call("render", file).out, "what `up` sends is what `render` prints"
    ask(run, key=key)
    assert run.url == service.balancer.url
    status = call("status", "one")
    assert status.code == 0 and "one is ready" in status.out and run.url in status.out, status
    again = call("up", file, "--json")
    assert again.code == 0 and again.events[0]["was_running"] and len(service.revisions) == 1

    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert call("chat", "one", "--message", "hello").out
    monkeypatch.delenv("OPENAI_API_KEY")
    for words in (["chat", "one", "--message", "hello"], ["keys", "list", "--deployment", "one"]):
        done = call(*words)
        assert done.code != 0 and 'cannot reach the keys of "one"' in done.err and "OPENAI_API_KEY" in done.err, done
    until(lambda: bool(call("logs", "one").out), "its log has lines")
    assert "replica 0: " in call("logs", "one", "--part", "gateway").out
    scaled = call("scale", "one", "2")
    assert scaled.code == 2 and "would not share their keys" in scaled.err, scaled
    asleep = [row.container.yaml_spec for _, row in service.workers]
    for secret in (run.admin_token(), key):
        assert not [text for text in asleep if secret in text], "no secret is in what is sent"

    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "other"))
    status = call("status", "one")
    assert status.code == 0 and "one is ready" in status.out and "service one" in status.err, status
    other = find("one")
    assert other.path != run.path and other.deployment() == run.deployment()
    down = call("down", "one")
    assert down.code == 0 and place.leftovers() == [], down
    monkeypatch.setenv("PENSTOCK_HOME", str(place.place.folder / "home"))
    until(lambda: now(run).phase == "down", "the first machine sees that it has ended")
    assert 'has no service "one" any more' in (now(run).reason or "")


@pytest.mark.postgres
def test_workers_share_keys_and_vessl_has_as_many_as_were_asked_for(place: Rented, postgres: str) -> None:
    run, key = up(place.write(vessl=SERVICE, gateway={"store": postgres}, replicas={"min": 1, "max": 3}))
    service = place.world.services["one"]
    assert call("scale", "one", "2").code == 0
    assert service.revisions[1].form["service"]["autoscaling"] == {
        "min": 2, "max": 2, "metric": "nvidia.com/gpu", "target": 60,
    }  # fmt: skip
    wait_ready(run, 2)
    made = targets.load("vessl").inside(run, ["keys", "create", "anna", "--json"], False)
    assert made[-2:] == ["--store", postgres]
    create = call("keys", "create", "anna", "--deployment", "one", "--json")
    assert create.code == 0, create
    for _ in range(4):  # each worker answers to each key
        ask(run, key=key)
    assert all(row.container.status == "running" for _, row in service.workers)
    first = service.revisions[1].workers[0]
    first.container.terminate("failed", "the node was lost", without_grace=True)
    until(lambda: now(run).phase == "ready" and service.revisions[1].n_started == 3, "VESSL replaced it")
    ask(run, key=key)
    assert call("scale", "one", "auto").code == 0
    assert service.revisions[1].form["service"]["autoscaling"]["max"] == 3
    assert call("down", "one").code == 0 and place.leftovers() == []


@pytest.mark.nightly
def test_a_revision_that_somebody_stops_is_down_here_and_a_service_of_another_is_not_touched(place: Rented) -> None:
    file = place.write(vessl=SERVICE)
    run, _ = up(file)
    place.world.services["one"].revisions[1].end()
    until(lambda: now(run).phase == "down", "the end is seen")
    assert "VESSL calls revision 1 stopped" in call("status", "one").out
    assert call("down", "one").code == 0
    place.world.services["one"] = theirs = Service("one", "made by hand")
    done = call("up", file)
    assert done.code == 2 and 'VESSL has a service "one" that penstock did not make' in done.err, done
    assert theirs.revisions == {}
    place.world.services.pop("one").close()
