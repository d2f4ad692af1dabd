"""The life of a deployment with real processes and the fake engine: up, talk, look, scale, down; nothing is left."""

from __future__ import annotations

import re
import signal
import time

import pytest
from hub_server import COMMIT, asked_hub
from launching import (
    PROMPT,
    Asking,
    Place,
    ask,
    call,
    engine_pid,
    interrupt,
    now,
    pid_of,
    pids,
    port_is_free,
    replica_of,
    started,
    wait_ready,
)
from waiting import left_s, until

from penstock import paths, processes, run_folder
from penstock.hardware.network import free_port
from penstock.models import manifest
from penstock.models.files import BUNDLED
from penstock.run_folder import Run
from penstock.wire.client import Client

pytestmark = pytest.mark.processes

SLOW = {"tokens-per-s": 20}  # 40 tokens take 2 s: time to scale under them


def test_up_talks_is_seen_and_leaves_nothing_after_down(place: Place) -> None:
    run = place.up(place.write("one"))
    assert ask(run).replica == "0"
    assert [card.name for card in Client(run.url).models()] == ["one"]
    until(lambda: now(run).requests_total == 1, "the request is counted")
    facts = call("status", "one", "--json").json
    assert (facts["name"], facts["phase"], facts["requests_total"]) == ("one", "ready", 1)
    assert facts["replicas"][0]["state"] == "ready"
    assert facts["controller"]["process"]["pid"] == pid_of(run, "controller")
    assert facts["gateway"]["process"]["pid"] == pid_of(run, "gateway")
    text = call("status").out
    assert text.startswith("one is ready") and run.url in text
    (watched,) = call("top", "--once", "--json").json["deployments"]
    assert (watched["name"], watched["note"], watched["snapshot"]["now"]["n_ready"]) == ("one", None, 1)
    assert call("down").code == 0
    noted = [(event["event"], "who" in event) for event in call("events", "one", "--json").events]
    started = [("up", True), ("phase", False), ("replica ready", False)]
    assert noted == [*started, ("stopping", True), ("down", False)]
    place.assert_nothing_left()
    assert call("status", "one", "--json").json["phase"] == "down"
    assert call("down", "one").code == 0, "a second down finds nothing to do"


def test_up_again_starts_nothing_and_refuses_changes(place: Place) -> None:
    gateway = {"port": free_port("127.0.0.1")}
    file = place.write("one", gateway=gateway)
    run = place.up(file)
    before = {role: pid_of(run, role) for role in ("controller", "watchdog", "gateway", "node", "engine")}
    assert call("up", file, "--json").events[0]["was_running"] is True
    changed = place.write("one", args={"reply-tokens": 5}, gateway=gateway)
    refused = call("up", changed)
    assert refused.code == 2
    assert "engine.args.reply-tokens: (not set) -> 5" in refused.err and "--replace" in refused.err
    refused = call("up", place.write("one", gateway={"host": "192.0.2.1", "auth": "keys"}), "--replace")
    assert refused.code == 2 and "Set gateway.host" in refused.err
    assert {role: pid_of(run, role) for role in before} == before, "nothing was changed"


def on_both(run: Run) -> list[Asking]:
    """Streams that run on two replicas."""
    streams = [Asking(run.url, 40) for _ in range(4)]
    until(lambda: [row.in_flight > 0 for row in now(run).replicas] == [True, True], "streams run on both")
    return streams


def test_scale_lets_every_stream_end_whole(place: Place) -> None:
    run = place.up(place.write("one", args=SLOW, replicas=2))
    streams = on_both(run)
    assert call("scale", "1").code == 0
    assert [replica.replica for replica in now(run).replicas] == ["0"]
    assert pids(run, "engine", "1") == []
    for stream in streams:
        stream.check_is_whole()
    assert {stream.reply.replica for stream in streams if stream.reply} == {"0", "1"}
    ask(run)

    assert call("scale", "one", "2", "--json").events[-1]["replicas"] == 2
    place.note(run)
    assert {ask(run, 1).replica for _ in range(4)} == {"0", "1"}

    streams = on_both(run)
    before = engine_pid(run, "1")
    assert call("scale", "1", "--no-wait").code == 0
    until(lambda: replica_of(run, "1").is_draining, "replica 1 drains")
    assert call("scale", "2").code == 0
    assert engine_pid(run, "1") == before, "a replica that was only draining is kept"
    for stream in streams:
        stream.check_is_whole()
    assert {ask(run, 1).replica for _ in range(4)} == {"0", "1"}


def test_scale_to_zero_holds_requests_until_there_is_a_replica_again(place: Place) -> None:
    run = place.up(place.write("one"))
    assert call("scale", "0").code == 0
    idle = call("chat", "one", "--message", PROMPT)
    assert (idle.code, "it has no replica" in idle.err, "penstock scale one 1" in idle.err) == (2, True, True)
    assert pids(run, "node") == []
    held = Asking(run.url, 8)
    assert call("scale", "1").code == 0
    held.check_is_whole()


@pytest.mark.nightly
def test_up_without_waiting_returns_while_the_engine_loads_and_shows_the_key(place: Place) -> None:
    done = call("up", place.write("one", args={"load-s": 1}, gateway={"auth": "keys"}), "--no-wait")
    assert done.code == 0
    assert "penstock status one" in done.out and "sk-" in done.out
    assert now(place.run()).phase == "starting"
    assert not port_is_free(place.run().url), "the gateway listens already"
    late = call("up", place.write("two", args={"load-s": 1.5}, gateway={"auth": "keys"}), "--timeout", "0.5")
    assert late.code == 1
    assert "penstock status two" in late.err and "sk-" in late.out
    key = re.findall(r"sk-\S+", late.out)[0]
    wait_ready(place.run("one"))
    wait_ready(place.run("two"))
    ask(place.run("two"), key=key)


@pytest.mark.nightly
def test_up_tells_its_events_as_json(place: Place) -> None:
    done = call("up", place.write("one", args={"load-s": 3, "shards": 4}), "--json")
    first, *progress, last = done.events
    run = place.run()
    facts = {"name": "one", "url": run.url, "was_running": False, "key": None, "warnings": []}
    assert first == {"event": "submitted", **facts}
    assert last == {"event": "ready", "name": "one", "url": run.url, "login": None, "key": None}
    assert {event["event"] for event in progress} == {"progress"}
    stages = [event["progress"]["stage"] for event in progress if event["progress"]]
    assert "weights" in stages and stages[-1] == "ready"


def test_logs_show_each_part_and_go_on_until_ctrl_c(place: Place) -> None:
    run = place.up(place.write("one", replicas=2))
    whole = call("logs").out.splitlines()
    assert [line for line in whole if re.fullmatch(r"\[1\] [0-9T:-]+Z INFO:     Application startup complete\.", line)]
    assert call("logs", "--since", "1h").out.splitlines() == whole
    assert "Starting to load model" in call("logs", "one", "--replica", "0").out
    assert f"serving on {run.url.removeprefix('http://')}" in call("logs", "--part", "gateway").out
    assert "up: penstock up one" in call("logs", "--part", "events").out
    unknown = call("logs", "--replica", "7")
    assert unknown.code == 2 and "0, 1" in unknown.err
    with started("logs", "-f") as following:
        assert following.stdout is not None
        lines = iter(following.stdout.readline, "")
        assert any("Application startup complete" in line for line in lines), "what is there already"
        ask(run)
        assert any("POST /v1/chat/completions" in line for line in lines), "what came later"
        following.send_signal(signal.SIGINT)
        assert following.wait(left_s()) == 130


def is_loading(place: Place) -> bool:
    run = Run(paths.home() / "runs" / "one")
    return run.exists() and any(replica.state == "loading" for replica in now(place.note(run)).replicas)


# Seconds (None: the engine loads), and how often.
OFTEN = [(0.15, 3), (0.4, 3), (0.8, 3), (0.6, 5)]
MOMENTS = [*((at, 1) for at in (0.03, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, None)), *OFTEN]


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_ctrl_c_at_any_moment_of_a_start_leaves_nothing(place: Place, moment: tuple[float | None, int]) -> None:
    after_s, n_times = moment
    loading = {"load-s": 20, "ignore-sigterm-while-loading": True}
    with started("up", place.write("one", args=loading)) as child:
        if after_s is None:
            until(lambda: is_loading(place), "the engine loads")
        else:
            time.sleep(after_s)
        for _ in range(n_times):
            child.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = child.communicate(timeout=left_s())
    # Of Python itself, which was interrupted.
    has_begun = not any(words in err for words in ("Fatal Python error: init_import_site", "Could not import runpy"))
    assert child.returncode in (130, -signal.SIGINT) or not has_begun, (out, err)
    for run in run_folder.every():
        place.note(run)
        assert run.is_ended()
        assert "ending one ..." in err
    place.assert_nothing_left()
    assert [path for path in (paths.home() / "runs").glob(".*") if path.is_dir()] == [], "half-made folders"


def test_ctrl_c_in_a_second_up_does_not_end_what_runs(place: Place) -> None:
    file = place.write("one", args={"load-s": 20})
    assert call("up", file, "--no-wait").code == 0
    run = place.run()
    until(lambda: replica_of(run).state == "loading", "the engine loads")
    before, began = engine_pid(run), time.monotonic()
    done = interrupt("up", file, when=lambda: time.monotonic() - began > 0.3)
    assert done.code in (130, -signal.SIGINT), done
    assert run.desired().state == "up" and engine_pid(run) == before


def draining(place: Place, name: str = "one") -> tuple[Run, Asking]:
    """A deployment in the middle of a long answer: its `down` drains for as long."""
    run = place.up(place.write(name, args=SLOW))
    stream = Asking(run.url, 60)
    until(lambda: bool(stream.text), "the stream runs")
    return run, stream


@pytest.mark.nightly
def test_clean_leaves_a_deployment_alone_that_is_draining(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is written down first, so `clean --yes` took what still answered for a leftover, and killed it."""
    run, stream = draining(place)
    with started("down", "one") as ending:
        until(lambda: not pids(run, "controller") and run.desired().state == "down", "it drains")
        assert call("clean", "--yes", "--runs").code == 0
        with monkeypatch.context() as patch:
            patch.setenv("PENSTOCK_HOME", str(place.folder / "elsewhere"))
            assert call("clean", "--yes", "--runs").code == 0
        stream.check_is_whole()
        assert ending.wait(left_s()) == 0
    assert run.exists()
    place.assert_nothing_left()


@pytest.mark.nightly
@pytest.mark.parametrize("is_by_up", [False, True], ids=["by down", "by up"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_down_that_broke_off_stays_visible_and_is_finished_by_another_or_by_up(
    place: Place, number: signal.Signals, is_by_up: bool
) -> None:
    """It used to be hidden by `ls`, and a bare `down` ended another deployment."""
    run, _ = draining(place)
    before = run.record().id
    with started("down", "one") as ending:
        until(lambda: not pids(run, "controller") and run.desired().state == "down", "it drains")
        assert now(run).phase == "stopping"
        ending.send_signal(number)
        assert ending.wait(left_s()) != 0
    assert [(row["name"], row["phase"]) for row in call("ls", "--json").json] == [("one", "stopping")]
    assert call("clean", "--yes").code == 0
    assert pids(run, "engine"), "it is for `down` to end"
    if not is_by_up:
        assert call("down", "--now").code == 0
        place.assert_nothing_left()
        return
    assert call("up", place.folder / "one.yaml", "--json").events[0]["was_running"] is False
    again = place.run()
    assert again.record().id != before
    ask(again, 1)
    assert {process.run_id for process in processes.find_marked(str(again.path))} == {again.record().id}


def test_up_fetches_the_model_pins_its_commit_and_continues_after_ctrl_c(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an empty cache; the hub is on loopback."""
    files = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.suffix in (".json", ".safetensors")}
    small = {name for name in files if not name.endswith(".safetensors")}
    with asked_hub(monkeypatch, "org/tiny", files) as hub:
        cache = place.folder / "cache"
        file = place.write("one", model="org/tiny@main", cache={"weights": str(cache)})
        hub.is_open.clear()  # the weights hang

        def waits_for_weights() -> bool:
            return len(hub.downloads) == len(files) and small <= {path.name for path in cache.rglob("*")}

        done = interrupt("up", file, when=waits_for_weights)
        assert done.code == 130 and not Run(paths.home() / "runs" / "one").exists(), done
        hub.is_open.set()
        hub.asked.clear()
        done = call("up", file, "--json")
        events = [event["event"] for event in done.events]
        assert events[0] == "fetch" and {"submitted", "ready"} <= set(events)
        assert all(name.endswith(".safetensors") for name in hub.downloads), "small files were there"
        folder = cache / "models--org--tiny" / "snapshots" / COMMIT
        run = place.run()
        assert run.plan().model.path == str(folder) and manifest.verify(folder) == []
        ask(run)
        hub.asked.clear()
        assert call("up", file, "--json").code == 0 and hub.downloads == [], "it runs already"
