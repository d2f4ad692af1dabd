"""A deployment on VESSL from `up` to `down`, on the fake of its API: the run's command is executed for real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ask, call
from vessl_rig import Rented, rented

from penstock.run_folder import find

pytestmark = pytest.mark.processes


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Rented]:
    with rented(tmp_path) as ours:
        yield ours


def test_a_file_becomes_a_run_that_answers_and_ends_without_a_trace(place: Rented) -> None:
    done = call("up", place.write(), "--json")
    assert done.code == 0, done
    run = find("one")
    key = next(event["key"] for event in done.events if event.get("key"))
    ask(run, key=key)
    status = call("status", "one")
    assert status.code == 0 and "ready" in status.out, status
    down = call("down", "one")
    assert down.code == 0, down
    assert place.leftovers() == []
