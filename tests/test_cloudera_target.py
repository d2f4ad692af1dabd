"""Target cloudera against the fake workbench, with applications and jobs as processes in namespaces of their own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cloudera_rig import SUBDOMAINS, file_for, fresh_targets, left, up
from launching import PROMPT, Place, call, now, wait_ready

from penstock import targets
from penstock.errors import PenstockError
from penstock.targets.cloudera.target import ClouderaAi
from penstock.testing.conformance import check_target
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import Workbench

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


@pytest.mark.nightly  # `make check` has it without pods
def test_cloudera_keeps_the_contract_of_targets(place: Place, workbench: Workbench) -> None:
    run, launch = place.written(file_for(place, workbench))
    check_target(targets.load("cloudera"), run, launch, sys.executable, lambda: left(workbench))


def shown(place: Place, workbench: Workbench) -> None:
    """What a user sees of a deployment that is ready."""
    done = call("chat", "one", "-m", PROMPT, "--max-tokens", 8)
    assert expected_text(PROMPT, 8) in done.out, done
    url = f"http://{SUBDOMAINS[0]}.{workbench.domain}"
    facts, words = call("status", "one", "--json").json, call("status", "one").out
    assert facts["url"] == url and facts["login"].startswith("the workbench's login (its API key as Authorization")
    assert f"{url}/v1 behind {facts['login']}; here: " in words and "8090" not in words, words
    assert f"{url} behind the workbench's login " in call("ls").out
    assert f"{url}/v1 behind " in call("up", file_for(place, workbench)).out


def silent(*_: object) -> None:
    raise PenstockError("the workbench does not answer", is_retryable=True)


def test_a_deployment_lives_in_the_project_and_verbs_work_from_another_machine(
    place: Place,
    workbench: Workbench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    shown(place, workbench)
    assert "penstock: ready after" in call("logs", "one", "--replica", "0").out
    file = file_for(place, workbench)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "other"))
    forget = fresh_targets()
    with monkeypatch.context() as patch:
        patch.setattr(ClouderaAi, "adopt", silent)
        refused = call("up", file)
    assert (refused.code, refused.err.splitlines()[0]) == (1, "error: the workbench does not answer")
    done = call("up", file, "--json")
    assert done.code == 0 and done.events[0]["was_running"], "it runs on, and was not started over"
    assert call("scale", "one", 2).code == 0
    wait_ready(place.run(), 2)
    assert call("scale", "one", 1).code == 0
    wait_ready(place.run(), 1)
    assert call("keys", "list", "--deployment", "one").code == 0
    assert "first" in capfd.readouterr().out
    done = call("status", "one")
    assert "one is ready" in done.out and re.search(r"its machines until .*\(JOB_MAXIMUM_MINUTES=35000\)", done.out), (
        done
    )
    assert "idle" not in done.out, "a job has no idle time-out"
    assert call("status", "one", "--json").json["replicas"][0]["ends_by"] == "JOB_MAXIMUM_MINUTES=35000"
    assert "replica 1 drained and ended" in call("events", "one").out
    runs = [r.status for r in workbench.workloads.runs.values()]
    assert sorted(runs) == ["RUNNING", "SUCCEEDED"], "the second replica left by word"
    assert call("down", "one").code == 0
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    forget()
    here = left(workbench)
    assert now(run).phase == "down", here
