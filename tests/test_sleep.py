"""Sleep with real processes and the fake engine: by a verb, by itself, and what wakes it; nothing is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launching import (
    PROMPT,
    SOON_S,
    Asking,
    Place,
    ask,
    call,
    engine_pid,
    kill,
    now,
    pid_of,
    pids,
    port_is_free,
    replica_of,
    started,
    wait_ready,
    wait_until,
)

import penstock
from penstock.deployment.sleep import is_asleep
from penstock.node.engine_client import IdleWatch
from penstock.node.sleep import choose_level
from penstock.run_folder import Run
from penstock.testing.fake_engine.requests import expected_text
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

BY_VERB: dict[str, Any] = {"sleep": {"level": 1}}


@pytest.mark.parametrize(
    ("wanted", "possible", "weights", "free", "level"),
    [
        ("auto", (1, 2), 90, 100, 1),
        ("auto", (1, 2), 91, 100, 2),
        ("auto", (1,), 90, 100, 1),
        ("auto", (1,), 91, 100, None),
        (1, (1, 2), 91, 100, None),
        (2, (1, 2), 1, 100, 2),
        (2, (1,), 1, 100, None),
    ],
)
def test_level_1_is_taken_where_the_weights_fit_in_memory(
    wanted: Any, possible: tuple[int, ...], weights: int, free: int, level: int | None
) -> None:
    choice = choose_level(wanted, possible, weights, free)
    assert (choice if isinstance(choice, int) else None) == level, choice


def test_idleness_is_that_of_the_looks_and_a_step_between_two_ends_it() -> None:
    watch = IdleWatch()
    looks = [(0, 5.0, 10.0), (0, 5.0, 12.0), (0, 7.0, 14.0), (0, 7.0, 16.0), (1, 7.0, 18.0), (0, 7.0, 20.0)]
    idle_s = []
    for n_requests, iterations, now_s in looks:
        watch.observe(n_requests, iterations, now_s)
        idle_s.append(watch.idle_s)
    assert idle_s == [0, 2, 0, 2, 0, 2]
    watch.forget()
    assert watch.idle_s == 0


def sleeping(run: Run, name: str = "0") -> bool:
    return any(is_asleep(row) for row in now(run).replicas if row.replica == name)


def events(run: Run) -> list[str]:
    return [event.event for event in run.events()]


@pytest.mark.processes
def test_a_verb_puts_it_to_sleep_a_request_wakes_it_and_a_verb_wakes_it(place: Place) -> None:
    run = place.up(place.write("one", args={"sleep-s": 0.3, "wake-s": 0.5}, engine=BY_VERB))
    engine = engine_pid(run)
    slept = call("sleep", "one", "--json")
    assert (slept.code, slept.events[-1]) == (0, {"event": "asleep", "name": "one"}), slept
    assert (now(run).phase, replica_of(run).state) == ("ready", "sleeping")
    status = call("status")
    assert status.out.startswith("one sleeps; a request wakes it")
    assert "asleep at level 1" in status.out
    (card,) = Client(run.url).models()
    assert card.state == "sleeping"
    announcement = replica_of(run).announcement
    assert announcement is not None
    assert announcement.measured["sleep_s"] > 0.2
    gauge = 'penstock_replicas{state="sleeping"} 1'
    wait_until(lambda: gauge in Client(run.url).get_text("/metrics"), "the gauge of sleeping replicas")
    assert ask(run).replica == "0"
    assert engine_pid(run) == engine, "the same process"
    wait_until(lambda: "replica awake" in events(run), "the event of waking")
    assert call("sleep").out.endswith("one is asleep; a request wakes it\n")
    assert call("wake", "one").out.endswith("one is awake\n")
    assert now(run).replicas[0].state == "ready"
    ask(run)
    kinds = events(run)
    assert [kinds.count(kind) for kind in ("sleep", "wake", "replica asleep", "replica awake")] == [2, 1, 2, 2]
    assert kinds.count("replica ready") == 1
    assert [row.state for row in penstock.sleep("one").replicas] == ["sleeping"]
    assert call("down").code == 0
    place.assert_nothing_left()


@pytest.mark.nightly
@pytest.mark.processes
def test_an_engine_that_dies_as_it_falls_asleep_ends_the_wait_of_the_verb(place: Place) -> None:
    run = place.up(place.write("one", args={"sleep-s": 20}, engine=BY_VERB))
    with started("sleep", "one") as verb:
        wait_until(lambda: replica_of(run).state == "sleeping", "it falls asleep")
        kill(*pids(run, "engine")[:1])
        out, err = verb.communicate(timeout=SOON_S)
    assert verb.returncode == 1, out
    assert 'replica 0 of "one" is ' in err
    wait_ready(run)


@pytest.mark.nightly
@pytest.mark.processes
def test_it_sleeps_by_itself_and_at_level_2_loads_its_weights_again(place: Place) -> None:
    run = place.up(place.write("one", engine={"sleep": {"after_s": 1, "level": 2}}))
    for _ in range(2):
        wait_until(lambda: sleeping(run), "asleep after a second without a request")
        assert "asleep at level 2" in call("status").out
        ask(run)


@pytest.mark.processes
def test_a_stream_hears_that_its_replica_wakes(place: Place) -> None:
    run = place.up(place.write("one", args={"wake-s": 2}, engine=BY_VERB))
    assert call("sleep").code == 0
    stages: list[str] = []
    text = ""
    for piece in Client(run.url).stream_chat(
        [{"role": "user", "content": PROMPT}], on_wait=lambda waiting: stages.append(waiting.stage), max_tokens=5
    ):
        text += getattr(piece, "text", "") if type(piece).__name__ == "Chunk" else ""
    assert text == expected_text(PROMPT, 5)
    assert "waking" in stages
    assert stages[-1] == "prompt"


@pytest.mark.nightly
@pytest.mark.processes
def test_requests_in_the_moment_of_falling_asleep_are_all_answered(place: Place) -> None:
    """One client asks every 0.3 s, and the engine wants to sleep whenever it is idle for a second or is told to."""
    run = place.up(place.write("one", args={"sleep-s": 0.2, "wake-s": 0.2}, engine={"sleep": {"after_s": 1}}))
    errors: list[Exception] = []
    is_over = threading.Event()

    def ask_on() -> None:
        while not is_over.is_set():
            try:
                ask(run, 3)
            except Exception as error:  # noqa: BLE001 - any is one too many
                errors.append(error)
            is_over.wait(0.05)

    threads = [threading.Thread(target=ask_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        assert call("sleep", "--no-wait").code == 0
        time.sleep(0.7)
    is_over.set()
    for thread in threads:
        thread.join(SOON_S)
    assert errors == []


@pytest.mark.nightly
@pytest.mark.processes
def test_it_never_sleeps_while_a_request_runs(place: Place) -> None:
    run = place.up(place.write("one", args={"tokens-per-s": 20}, engine={"sleep": {"after_s": 1}}))
    stream = Asking(run.url, 80)
    wait_until(lambda: bool(stream.text), "the stream runs")
    assert call("sleep", "--no-wait").code == 0
    states = set()
    while stream.reply is None and stream.error is None:
        states.add(replica_of(run).state)
        time.sleep(0.1)
    stream.check_is_whole()
    assert states == {"ready"}
    wait_until(lambda: sleeping(run), "asleep after the stream")


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("part", ["engine", "node", "gateway", "controller"])
def test_a_killed_part_of_a_sleeping_deployment_comes_back_and_a_request_is_answered(place: Place, part: str) -> None:
    run = place.up(place.write("one", args={"child": True}, engine=BY_VERB))
    assert call("sleep").code == 0
    kill(*(pids(run, "engine")[:1] if part == "engine" else [pid_of(run, part)]))
    if part in ("engine", "node"):
        wait_ready(run)
    held = Asking(run.url, 5) if part != "gateway" else None
    if held is not None:
        held.check_is_whole()
    wait_until(lambda: len(pids(run, "gateway")) == 1 and not port_is_free(run.url), "a gateway that answers")
    ask(run)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("part", ["engine", "node"])
def test_what_is_killed_while_it_wakes_is_started_again_and_the_held_request_is_answered(
    place: Place, part: str
) -> None:
    run = place.up(place.write("one", args={"wake-s": 3, "child": True}, engine=BY_VERB))
    assert call("sleep").code == 0
    held = Asking(run.url, 5)
    wait_until(lambda: replica_of(run).state == "waking", "it wakes")
    kill(*(pids(run, "engine")[:1] if part == "engine" else [pid_of(run, part)]))
    held.check_is_whole()
    assert call("down").code == 0
    place.assert_nothing_left()


@pytest.mark.nightly
@pytest.mark.processes
def test_an_engine_that_cannot_be_woken_is_started_again(place: Place) -> None:
    run = place.up(place.write("one", args={"refuse-wake": True}, engine=BY_VERB))
    assert call("sleep").code == 0
    ask(run)
    assert "could not be woken: " in call("status").out
    wait_ready(run)
    again = call("sleep")
    assert again.code == 1
    assert "does not sleep: its engine was lost in the last attempt (it could not be woken" in again.err


@pytest.mark.nightly
@pytest.mark.processes
def test_an_engine_that_refuses_to_sleep_stays_ready_and_says_so(place: Place) -> None:
    closed = {"env": {"VLLM_SERVER_DEV_MODE": "0"}}
    run = place.up(place.write("one", engine=BY_VERB | closed))
    engine = engine_pid(run)
    refused = call("sleep")
    assert refused.code == 1
    assert "does not sleep: the engine answered" in refused.err
    ask(run)
    assert engine_pid(run) == engine


@pytest.mark.nightly
@pytest.mark.processes
def test_down_ends_one_that_wakes(place: Place) -> None:
    run = place.up(place.write("one", args={"wake-s": 30}, engine=BY_VERB))
    assert call("sleep").code == 0
    assert call("wake", "--no-wait").code == 0
    wait_until(lambda: replica_of(run).state == "waking", "it wakes")
    assert call("down", "--now").code == 0
    place.assert_nothing_left()


@pytest.mark.nightly
@pytest.mark.processes
def test_one_of_two_wakes_for_a_request_and_workers_tell_each_other(place: Place) -> None:
    run = place.up(place.write("one", replicas=2, engine=BY_VERB, gateway={"workers": 2}))
    assert call("sleep").code == 0
    for _ in range(3):
        ask(run)
    wait_until(lambda: {row.state for row in now(run).replicas} == {"ready", "sleeping"}, "one is awake")


@pytest.mark.nightly
@pytest.mark.processes
def test_the_routes_of_the_development_mode_need_the_key_and_no_client_reaches_them(place: Place) -> None:
    run = place.up(place.write("one", engine=BY_VERB))
    announcement = replica_of(run).announcement
    assert announcement is not None
    assert announcement.url is not None
    for url, path, status in (
        (announcement.url, "/sleep", 401),
        (announcement.url, "/collective_rpc", 401),
        (run.url, "/sleep", 404),
        (run.url, "/collective_rpc", 404),
        (run.url, "/wake_up", 404),
    ):
        with pytest.raises(HttpError) as refused:
            Client(url).post_json(path, {})
        assert refused.value.status == status


@pytest.mark.nightly
@pytest.mark.processes
def test_without_the_block_nothing_sleeps(place: Place, tmp_path: Path) -> None:
    place.up(place.write("one"))
    refused = call("sleep")
    assert refused.code == 2
    assert "it was started without engine.sleep" in refused.err
    opened = call("up", place.write("two", engine=BY_VERB, gateway={"engine_routes": ["/sleep"]}))
    assert opened.code == 2
    assert 'opens "/sleep" next to engine.sleep' in opened.err
    llamacpp = tmp_path / "three.yaml"
    llamacpp.write_text("model: penstock-demo\nname: three\nengine: {kind: llamacpp, sleep: {after_s: 60}}\n", "utf-8")
    refused = call("up", llamacpp, "--dry-run")
    assert refused.code == 2
    assert "engine llamacpp cannot give its memory back" in refused.err
