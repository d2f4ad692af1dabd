"""Parts that live and do not answer, and parts that die before they can say why: real processes, the fake engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Place, a_place, ask, call, now, pid_of, wait_until

from penstock import run_folder

pytestmark = pytest.mark.processes


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with a_place(tmp_path) as found:
        yield found


def test_hung_gateway_is_ended_and_another_started(place: Place) -> None:
    run = place.up(place.write("one"))
    hung = pid_of(run, "gateway")
    os.kill(hung, signal.SIGSTOP)
    wait_until(lambda: now(run).phase == "degraded", "status says that something is wrong")
    wait_until(lambda: now(run).gateway.n_restarts == 1 and now(run).phase == "ready", "another gateway serves", 25)
    assert pid_of(run, "gateway") != hung
    assert any(event["event"] == "gateway hung" for event in run.events())
    ask(run)


def test_node_that_dies_before_it_says_anything_fails_the_start(place: Place) -> None:
    file = place.write("one")
    done = call("up", file, "--no-wait")
    assert done.code == 0
    run = run_folder.find("one")
    (run.artifact_path / "launch.json").write_text("{}")
    for replica in run.handle().replicas.values():
        os.kill(replica["pid"], signal.SIGKILL)
    told = call("up", file)
    assert told.code == 1
    assert "its node died 3 times before it said anything" in told.err
    assert "ValidationError" in told.err, "the node's own last lines are shown"
    call("down", "one")
