"""The autoscaler with real processes and the fake engine: load starts replicas, silence ends them, a request wakes."""

from __future__ import annotations

import json
import urllib.request

import msgspec
import pytest
from launching import PROMPT, Asking, Place, ask, call, now, pids
from waiting import left_s, until

from penstock.deployment.autoscale import Sample
from penstock.log_lines import LogReader
from penstock.run_folder import Run
from penstock.wire.client import Client
from penstock.wire.waiting import PROGRESS_HEADER, read_comment

pytestmark = pytest.mark.processes

SLOW = {"load-s": 1.0, "tokens-per-s": 20}


def decided(run: Run) -> list[tuple[int, int | None]]:
    told = call("autoscale", "explain", run.name, "--json")
    assert told.code == 0, told
    return [(row["from"], row["to"]) for row in told.events if row["from"] != row["to"]]


def samples(run: Run) -> list[Sample]:
    return [msgspec.json.decode(line, type=Sample) for line in LogReader(run.samples_file).lines()]


@pytest.mark.nightly
def test_a_number_is_pinned_and_given_back(place: Place) -> None:
    run = place.up(place.write("one", replicas={"min": 1, "max": 3}))
    ask(run)
    until(lambda: sum(sample.arrivals for sample in samples(run)) == 1, "the request is in a sample")
    assert call("scale", "one", "2").code == 0
    place.note(run)
    assert "2 (pinned)" in call("status", "one").out
    n_before = len(samples(run))
    until(lambda: len(samples(run)) > n_before + 2, "some samples")
    assert len(pids(run, "node")) == 2, "nobody uses it, and it stays"
    assert call("scale", "one", "auto", "--json").json == {
        "event": "scaled", "name": "one", "replicas": "auto", "min": 1, "max": 3
    }  # fmt: skip
    until(lambda: len(pids(run, "node")) == 1, "the second is not needed")
    assert "1 of 1..3" in call("status", "one").out
    assert decided(run) == [(1, 2), (2, None), (2, 1)]


def is_asleep(run: Run) -> bool:
    state = now(run)
    return not pids(run, "node") and (state.desired_replicas, state.replicas) == (0, ())


def test_requests_that_wait_start_another_replica(place: Place) -> None:
    replicas = {"min": 1, "max": 2, "metric": "waiting", "target": 1}
    run = place.up(place.write("one", args=SLOW, replicas=replicas, gateway={"max_in_flight": 1}))
    streams = [Asking(run.url, 100) for _ in range(4)]
    until(lambda: len(pids(run, "node")) == 2, "requests wait: another replica starts")
    assert now(run).phase == "ready", "the first serves while the second loads"
    for stream in streams:
        stream.check_is_whole()
    place.note(run)
    assert any(sample.held for sample in samples(run))
    rows = [row for sample in samples(run) for row in sample.replicas if row.id == "1"]
    assert {row.state for row in rows} >= {"starting", "ready"}
    assert max(row.running for row in rows) == 1
    assert (1, 2) in decided(run)


def comments(url: str) -> list[str]:
    """What a client of a stream hears before the first event, when it asked for its progress."""
    body = {"model": "one", "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": PROMPT}]}
    headers = {"content-type": "application/json", PROGRESS_HEADER: "1"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=left_s()) as answer:
        return [line.decode().strip() for line in answer if line.startswith(b":")]


def test_the_last_ends_when_nobody_asks_and_a_request_wakes_one_and_hears_the_seconds_that_are_left(
    place: Place,
) -> None:
    run = place.up(place.write("one", args=SLOW, replicas={"min": 0, "max": 1, "idle_s": 1}, gateway={"hold_s": 25}))
    until(lambda: is_asleep(run), "nobody asks: the last replica ends")
    assert now(run).phase == "ready"
    assert "the next request starts one" in call("status", "one").out
    assert [card.name for card in Client(run.url).models()] == ["one"]
    metrics = call("metrics", "--deployment", "one")
    assert 'penstock_desired_replicas{deployment="one",model="one"} 0' in metrics.out
    told = [waiting for text in comments(run.url) if (waiting := read_comment(text[1:])) is not None]
    assert "prompt" in {waiting.stage for waiting in told}
    assert any(waiting.eta_s is not None for waiting in told), told
    ask(run)
    place.note(run)
    assert (0, 1) in decided(run)
    reasons = [row["reason"] for row in call("autoscale", "explain", "one", "--json").events]
    assert any("held" in reason for reason in reasons), reasons
