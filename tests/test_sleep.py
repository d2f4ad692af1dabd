"""Sleep with real processes and the fake engine: by a verb, by itself, and what wakes it; nothing is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from launching import (
    PROMPT,
    Asking,
    Place,
    ask,
    call,
    engine_pid,
    kill,
    now,
    pids,
    port_is_free,
    replica_of,
    started,
    wait_ready,
)
from waiting import left_s, until

import penstock
from penstock.deployment.orders import is_asleep
from penstock.run_folder import Run
from penstock.testing.fake_engine.requests import expected_text
from penstock.wire.answers import Chunk, HttpError
from penstock.wire.client import Client

pytestmark = pytest.mark.processes

BY_VERB: dict[str, Any] = {"sleep": {"level": 1}}


def sleeping(run: Run, name: str = "0") -> bool:
    return any(is_asleep(row) for row in now(run).replicas if row.replica == name)


def events(run: Run) -> list[str]:
    return [event.event for event in run.events()]


def test_a_verb_puts_it_to_sleep_a_request_wakes_it_and_a_verb_wakes_it(place: Place) -> None:
    run = place.up(place.write("one", args={"sleep-s": 0.3, "wake-s": 0.5}, engine=BY_VERB))
    engine = engine_pid(run)
    slept = call("sleep", "one", "--json")
    assert (slept.code, slept.events[-1]) == (0, {"event": "asleep", "name": "one"}), slept
    assert (now(run).phase, replica_of(run).state) == ("ready", "sleeping")
    status = call("status").out
    assert status.startswith("one sleeps; a request wakes it") and "asleep at level 1" in status
    assert [card.state for card in Client(run.url).models()] == ["sleeping"]
    announcement = replica_of(run).announcement
    assert announcement is not None and announcement.measured["sleep_s"] > 0.2
    gauge = 'penstock_replicas{state="sleeping"} 1'
    until(lambda: gauge in Client(run.url).get_text("/metrics"), "the gauge of sleeping replicas")
    assert ask(run).replica == "0"
    assert engine_pid(run) == engine, "the same process"
    until(lambda: "replica awake" in events(run), "the event of waking")
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
def test_an_engine_that_dies_as_it_falls_asleep_ends_the_wait_of_the_verb(place: Place) -> None:
    run = place.up(place.write("one", args={"sleep-s": 20}, engine=BY_VERB))
    with started("sleep", "one") as verb:
        until(lambda: replica_of(run).state == "sleeping", "it falls asleep")
        kill(*pids(run, "engine")[:1])
        out, err = verb.communicate(timeout=left_s())
    assert verb.returncode == 1, out
    assert 'replica 0 of "one" is ' in err
    wait_ready(run)


@pytest.mark.nightly
def test_it_sleeps_by_itself_and_at_level_2_loads_its_weights_again(place: Place) -> None:
    run = place.up(place.write("one", engine={"sleep": {"after_s": 1, "level": 2}}))
    for _ in range(2):
        until(lambda: sleeping(run), "asleep after a second without a request")
        assert "asleep at level 2" in call("status").out
        ask(run)


def test_a_stream_hears_that_its_replica_wakes(place: Place) -> None:
    run = place.up(place.write("one", args={"wake-s": 2}, engine=BY_VERB))
    assert call("sleep").code == 0
    stages: list[str] = []
    messages = [{"role": "user", "content": PROMPT}]
    pieces = Client(run.url).stream_chat(messages, on_wait=lambda waiting: stages.append(waiting.stage), max_tokens=5)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Chunk)) == expected_text(PROMPT, 5)
    assert "waking" in stages and stages[-1] == "prompt"


@pytest.mark.nightly
def test_requests_in_the_moment_of_falling_asleep_are_all_answered(place: Place) -> None:
    """Two clients ask all the time, and the engine wants to sleep whenever it is idle for a second or is told to."""
    run = place.up(place.write("one", args={"sleep-s": 0.2, "wake-s": 0.2}, engine={"sleep": {"after_s": 1}}))
    is_over, n_answered = threading.Event(), [0, 0]

    def ask_on(client: int) -> None:
        while not is_over.wait(0.05):
            ask(run, 3)  # raises when the answer is an error, or wrong
            n_answered[client] += 1

    def is_answered(least: int) -> bool:
        return min(n_answered) >= least or any(client.done() for client in clients)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(ask_on, client) for client in range(2)]
        try:
            for n_orders in range(12):
                assert call("sleep", "--no-wait").code == 0
                until(partial(is_answered, 15 * n_orders), "both are answered")
        finally:
            is_over.set()
    for asking in clients:
        asking.result()
    told = replica_of(run).announcement
    assert told is not None and {"sleep_s", "wake_s"} <= told.measured.keys(), "it slept in between"


@pytest.mark.nightly
def test_it_never_sleeps_while_a_request_runs(place: Place) -> None:
    run = place.up(place.write("one", args={"tokens-per-s": 20}, engine={"sleep": {"after_s": 1}}))
    stream, states = Asking(run.url, 80), set[str]()
    until(lambda: bool(stream.text), "the stream runs")
    assert call("sleep", "--no-wait").code == 0

    def has_ended() -> bool:
        states.add(replica_of(run).state)
        return stream.reply is not None or stream.error is not None

    until(has_ended, "the stream ends")
    stream.check_is_whole()
    assert states == {"ready"}
    until(lambda: sleeping(run), "asleep after the stream")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "wakes"),
    [*((part, False) for part in ("engine", "node", "gateway", "controller")), ("engine", True), ("node", True)],
)
def test_a_part_that_is_killed_asleep_or_while_it_wakes_comes_back_and_a_request_is_answered(
    place: Place, part: str, wakes: bool
) -> None:
    run = place.up(place.write("one", args={"wake-s": 3 if wakes else 0, "child": True}, engine=BY_VERB))
    assert call("sleep").code == 0
    held = [Asking(run.url, 5)] if wakes else []
    if wakes:
        until(lambda: replica_of(run).state == "waking", "it wakes")
    kill(pids(run, part)[0])
    if part == "gateway":
        until(lambda: len(pids(run, part)) == 1 and not port_is_free(run.url), "a gateway that answers")
    for stream in held:
        stream.check_is_whole()
    ask(run)
    wait_ready(run)


@pytest.mark.nightly
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
def test_an_engine_that_refuses_to_sleep_stays_ready_and_says_so(place: Place) -> None:
    closed = {"env": {"VLLM_SERVER_DEV_MODE": "0"}}
    run = place.up(place.write("one", engine=BY_VERB | closed))
    engine = engine_pid(run)
    refused = call("sleep")
    assert refused.code == 1 and "does not sleep: the engine answered" in refused.err
    ask(run)
    assert engine_pid(run) == engine


@pytest.mark.nightly
def test_one_of_two_wakes_for_a_request_and_workers_tell_each_other(place: Place) -> None:
    run = place.up(place.write("one", replicas=2, engine=BY_VERB, gateway={"workers": 2}))
    assert call("sleep").code == 0
    for _ in range(3):
        ask(run)
    until(lambda: {row.state for row in now(run).replicas} == {"ready", "sleeping"}, "one is awake")


@pytest.mark.nightly
def test_the_routes_of_the_development_mode_need_the_key_and_no_client_reaches_them(place: Place) -> None:
    run = place.up(place.write("one", engine=BY_VERB))
    announcement = replica_of(run).announcement
    assert announcement is not None and announcement.url is not None
    for url, status in ((announcement.url, 401), (run.url, 404)):
        for path in ("/sleep", "/collective_rpc", "/wake_up"):
            with pytest.raises(HttpError) as refused:
                Client(url).post_json(path, {})
            assert refused.value.status == status


def test_what_cannot_sleep_is_refused(place: Place) -> None:
    place.written(place.write("zero"))
    one = place.write("one", engine=BY_VERB, gateway={"engine_routes": ["/sleep"]})
    llamacpp = place.write("two", engine={"kind": "llamacpp", "sleep": {"after_s": 60}, "args": {}})
    for words, why in (
        (("sleep", "zero"), "it was started without engine.sleep"),
        (("up", one), 'opens "/sleep" next to engine.sleep'),
        (("up", llamacpp, "--dry-run"), "engine llamacpp cannot give its memory back"),
    ):
        refused = call(*words)
        assert refused.code == 2 and why in refused.err, refused
