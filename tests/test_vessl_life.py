"""A deployment on VESSL from `up` to `down`, on the fake of its API: the run's command is executed for real."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import Asking, ask, call, now, wait_ready
from vessl_rig import Rented, up
from vessl_rig import place as place
from waiting import left_s, until

from penstock import targets
from penstock.deployment import live
from penstock.run_folder import Launch, find
from penstock.targets.vessl import run_yaml
from penstock.testing.conformance import check_target
from penstock.testing.fake_vessl.account import Fault
from penstock.wire.client import Client

pytestmark = pytest.mark.processes


def test_a_file_becomes_a_run_that_answers_is_changed_and_ends_without_a_trace(place: Rented, tmp_path: Path) -> None:
    file = place.write(vessl={"secrets": {"HF_TOKEN": "hub"}})
    place.world.secrets["hub"] = (1, "hf_of_the_hub")
    run, key = up(file)
    (rented_run,) = place.world.living
    sent = rented_run.yaml_spec
    assert sent == call("render", file).out, "what `up` sends is what `render` prints"
    ask(run, key=key)
    assert Client(run.url).base_url.startswith("http://127.0.0.1:")
    status = call("status", "one")
    assert status.code == 0 and "one is ready" in status.out and run.url in status.out, status
    assert "one" in call("ls").out
    again = call("up", file, "--json")
    assert again.code == 0 and again.events[0]["was_running"] and len(place.world.runs) == 1

    assert "no port of VESSL leads to it" in call("dashboard", "one", "--ray", "0").err
    words = targets.load("vessl").inside(run, ["keys", "create", "anna", "--json"], False)
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    ask(run, key=json.loads(made.stdout)["key"])
    refused = subprocess.run([*words[:5], "down", "one"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "only keys, usage, dashboard run next to" in refused.stderr, (
        "the control port runs nothing else"
    )
    assert call("chat", "one", "--message", "hello").out, "the chat makes a key of its own"
    assert live.snapshot(run).replicas[0].state == "ready"
    assert "penstock_requests_total" in call("metrics", "--deployment", "one").out
    kept = tmp_path / "prometheus"
    assert call("metrics", "--deployment", "one", "--export", kept).code == 0
    (group,) = json.loads((kept / "targets.json").read_text("utf-8"))
    scraped = Client(f"http://{group['targets'][0]}", (kept / "scrape-key").read_text("utf-8").strip())
    for page in ("/metrics", "/metrics/engines"):
        assert b"\n" in scraped.send("GET", page), "a Prometheus of the user's reads the run by its public address"
    assert call("scale", "one", "2").code == 0
    wait_ready(run, 2)
    ask(run, key=key)
    until(lambda: "answered" in call("logs", "one").out or bool(call("logs", "one").out), "its log has lines")
    assert all(line.startswith(("[0] ", "[1] ")) for line in call("logs", "one").out.splitlines())
    assert "replica 1: warming -> ready" in call("logs", "one", "--part", "gateway").out
    assert "ready" in call("events", "one").out

    texts = [sent, *(line for _, line in rented_run.logs), (run.path / "spec.yaml").read_text("utf-8")]
    for secret in (run.admin_token(), key, "hf_of_the_hub"):
        assert not [text for text in texts if secret in text], "no secret is in what is sent, printed or kept"
    assert yaml.safe_load(sent)["env"]["HF_TOKEN"] == {"source": "secret", "secret": "hub"}

    asking = Asking(run.url, 30, key=key)
    until(lambda: asking.text, "its stream runs")
    down = call("down", "one")
    assert down.code == 0, down
    asking.check_is_whole()
    assert place.leftovers() == [] and rented_run.status == "completed", "the container drained and left by itself"
    assert "hub" in place.world.secrets, "only the secret that `up` made is removed"
    assert call("status", "one").out.startswith("one is down")


@pytest.mark.nightly
@pytest.mark.llamacpp
def test_a_real_engine_answers_through_the_runs_address(place: Rented) -> None:
    """The bundled model on the embedded engine: what the container starts is what `up` starts on one machine."""
    run, key = up(place.write(engine={"kind": "llamacpp"}))
    question = [{"role": "user", "content": "What does penstock stand on?"}]
    reply = Client(run.url, key, left_s()).chat(question, temperature=0)
    assert "It stands on vLLM and Ray." in reply.text
    row = now(run).replicas[0].announcement
    assert row is not None and row.measured is not None
    assert call("down", "one").code == 0


@pytest.mark.nightly
def test_another_machine_finds_the_run_shows_it_and_ends_it(
    place: Rented, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, key = up(place.write())
    token = run.admin_token_file.read_text("utf-8")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "other"))
    status = call("status", "one")
    assert status.code == 0, status
    other = find("one")
    assert other.path != run.path and other.deployment() == run.deployment()
    ask(other, key=key)
    row = now(other).replicas[0]
    assert "admin token is on the machine that started it" in (row.reason or "")
    # With the token, which a user copies, all verbs work there.
    other.admin_token_file.write_text(token, "utf-8")
    other.admin_token_file.chmod(0o600)
    wait_ready(other)
    other.admin_token_file.unlink()
    assert call("down", "one").code == 0
    assert place.leftovers() == []
    monkeypatch.setenv("PENSTOCK_HOME", str(place.place.folder / "home"))
    until(lambda: now(run).phase == "down", "the first machine sees that it has ended")
    assert "VESSL ended run" in (now(run).reason or "")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "calls"),
    [("run", ["create_from_yaml"]), ("service", ["model_services$", "create_with_yaml", "rollouts$"])],
)
def test_what_was_made_without_an_answer_is_found_and_not_made_twice(
    place: Rented, kind: str, calls: list[str]
) -> None:
    for lost in calls:
        place.world.faults.append(Fault(f"POST .*/{lost}", 503, "Unavailable", "timeout", is_after=True))
    run, key = up(place.write(vessl={"kind": kind}))
    ask(run, key=key)
    made = [len(service.revisions) for service in place.world.services.values()]
    assert (len(place.world.runs), made) == ((1, []) if kind == "run" else (0, [1]))
    assert not [fault for fault in place.world.faults if fault.n_times], "each was met"
    if kind == "run":
        (run.path / "vessl.json").unlink()  # killed between the call and the note of it
        targets.load.cache_clear()
        assert call("up", place.place.folder / "one.yaml").code == 0
        assert len(place.world.runs) == 1
    assert call("down", "one", "--now").code == 0


def test_a_spot_reclaim_is_reported_and_up_starts_it_again(place: Rented) -> None:
    place.world.presets[2]["spot"] = True
    file = place.write(vessl={"spot": True})
    run, _ = up(file)
    (first,) = place.world.living
    first.terminate("failed", "the node was preempted", without_grace=True)
    until(lambda: now(run).phase == "failed", "the reclaim is seen")
    status = call("status", "one")
    assert "the node was preempted" in status.out and "most likely a reclaim" in status.out, status
    assert call("ls").code == 0
    run, key = up(file)
    ask(run, key=key)
    assert len(place.world.runs) == 2


@pytest.mark.nightly
def test_a_start_that_fails_in_the_container_ends_with_its_reason_and_what_it_replaced_is_back(place: Rented) -> None:
    run, key = up(place.write())
    done = call("up", place.write(args={"oom": "kv-cache"}), "--replace")
    words = ("could not start replica 0", "its last lines:", "KV cache", "What it was to replace is started again.")
    assert done.code == 1 and [word for word in words if word not in done.err] == [], done
    wait_ready(run)
    ask(run, key=key)
    assert call("down", "one").code == 0 and place.leftovers() == []
    # VESSL calls the preset's machine one with an L4, and the container has none.
    done = call("up", place.write(vessl={"preset": "gpu-l4-small"}, hardware={"gpu": "l4"}))
    assert done.code != 0 and '"l4", but' in done.err and "has no GPU" in done.err, done
    until(lambda: not place.leftovers(), "nothing is left")


@pytest.mark.nightly
def test_a_start_that_vessl_cannot_make_ends_with_its_words_and_leaves_nothing(place: Rented) -> None:
    place.world.faults.append(Fault("POST .*/create_from_yaml", 403, "InsufficientCredit", "no credit"))
    file = place.write()
    done = call("up", file)
    assert done.code == 1 and "this is not allowed (no credit)" in done.err, done
    assert place.leftovers() == []
    port = int(yaml.safe_load(file.read_text("utf-8"))["gateway"]["port"]) + 1
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        done = call("up", file)
    assert done.code == 1 and f"cannot listen on control port 0.0.0.0:{port}" in done.err, done
    assert place.leftovers() == []
    place.world.pace.pull_error = "cannot pull penstock/fake:1: not found"
    done = call("up", file)
    assert done.code == 1 and "cannot pull penstock/fake:1: not found" in done.err, done
    place.place.note(find("one"))


@pytest.mark.nightly
def test_a_failed_start_that_no_machine_ends_ends_itself(place: Rented, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laptop went away: what serves nothing shall not be charged for ever."""
    real = run_yaml.command
    monkeypatch.setattr(run_yaml, "command", lambda *words: real(*words) + " --failed-s 0.5")
    assert call("up", place.write(args={"oom": "kv-cache"}), "--no-wait").code == 0
    (rented_run,) = place.world.living
    until(lambda: rented_run.status == "failed", "it has ended itself")
    until(lambda: now(find("one")).phase == "failed", "its end is seen")


@pytest.mark.nightly
def test_a_deployment_ends_itself_when_its_time_is_over(place: Rented) -> None:
    run, _ = up(place.write(vessl={"max_hours": 0.002}))
    until(lambda: now(run).phase == "down", "its time is over")
    assert "vessl.max_hours" in call("status", "one").out
    assert call("down", "one").code == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "calls"), [("run", "run_executions"), ("service", "model_services")])
def test_an_outage_of_vessl_changes_nothing(
    place: Rented, kind: str, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.targets.vessl.api._sleep", lambda _: None)
    run, key = up(place.write(vessl={"kind": kind}))
    place.world.faults.append(Fault(f"GET .*/{calls}/", 502, "BadGateway", "bad gateway", n_times=10_000))
    until(lambda: "bad gateway" in call("status", "one").out, "it is said")
    assert "this is what was seen at" in call("status", "one").out
    ask(run, key=key)
    place.world.faults.clear()
    wait_ready(run)
    assert call("down", "one").code == 0


@pytest.mark.nightly
def test_a_late_address_is_waited_for_and_an_idle_run_is_charged_until_down_ends_it(place: Rented) -> None:
    place.world.pace.endpoint_s = 2.0
    done = call("up", place.write(), "--no-wait", "--json")
    assert done.code == 0 and done.events[0]["url"] is None, done
    run = find("one")
    chat = call("chat", "one", "--message", "hello")
    assert chat.code != 0 and "has no address yet" in chat.err, chat
    wait_ready(run)
    assert run.known_url is not None
    (rented_run,) = place.world.living
    rented_run.form["termination_protection"] = True  # somebody set it by hand
    assert {row.state for row in targets.load("vessl").status(run).values()} == {"placed"}
    rented_run.kill()
    until(lambda: rented_run.status == "idle", "its command has ended")
    until(lambda: "still charged" in call("status", "one").out, "the charge is named")
    assert call("down", "one").code == 0
    assert place.leftovers() == []


@pytest.mark.nightly  # in `make check` on containers in memory
def test_vessl_keeps_the_contract_of_targets(place: Rented) -> None:
    run, launch = place.place.written(place.write())
    launch = Launch("one", launch.plan, launch.announce_urls, launch.token_file)
    check_target(targets.load("vessl"), run, launch, sys.executable, place.leftovers)
