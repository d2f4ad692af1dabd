"""What the controller does for a gateway that its target places, against a target that only remembers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
from samples import deployment, run_folder, told, view

from penstock.deployment import observe
from penstock.deployment.controller import placed_gateway
from penstock.deployment.controller.placed_gateway import Keeper
from penstock.deployment.observe import Observation
from penstock.errors import PenstockError
from penstock.node.announcer import AdminClient
from penstock.paths import write_atomically
from penstock.run_folder import Part, Run
from penstock.spec.deployment import Deployment, GatewaySpec
from penstock.targets import Placement, Target
from penstock.wire.announcement import GatewayAddress, GatewayView

READY = view(told("0"))


class Cluster:
    """Jobs by number, as the target tells them."""

    def __init__(self, run: Run) -> None:
        self.run, self.jobs, self.ended, self.part = run, dict[str, Placement](), list[str](), Part("gone")
        self.n_silent = 0  # so many times it does not answer when it is to end one
        self.keeper = Keeper(run, cast(Target, self), drain_s=1.0)

    def start_gateway(self, run: Run) -> str:
        number = str(len(self.jobs) + 1)
        self.jobs[number] = Placement("queued", f"job {number} waits")
        return number

    def end_gateway(self, run: Run, jobs: Sequence[str], grace_s: float) -> None:
        if self.n_silent > 0:
            self.n_silent -= 1
            raise PenstockError("could not read Slurm's job queue: Socket timed out")
        self.ended += jobs

    def serve(self, job: str, ends_in_s: float | None = None) -> None:
        ends_at = None if ends_in_s is None else time.time() + ends_in_s
        self.jobs[job] = Placement("placed", f"job {job} on n", ends_at=ends_at)
        address = GatewayAddress(job, f"10.0.0.{job}:8000", (f"10.0.0.{job}:9000",))
        write_atomically(self.run.gateway_address_file, msgspec.json.encode(address))

    def tick(self, seen: GatewayView | None = None) -> Part:
        part = observe._placed(self.run, self.part, self.jobs)
        self.part = self.keeper.tend(Observation({}, seen, part.state == "running", part, dict(self.jobs)))
        time.sleep(0.05)  # its threads
        return self.part


@pytest.fixture
def cluster() -> Cluster:
    block = GatewaySpec(on="job", auth="keys")
    wanted: Deployment = msgspec.structs.replace(deployment(), target="slurm", gateway=block)
    return Cluster(run_folder(wanted))


def test_one_is_sent_and_only_one(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.tick()
    assert list(cluster.jobs) == ["1"]
    assert (cluster.tick().state, cluster.part.note) == ("queued", "job 1 waits")
    assert cluster.run.known_url is None
    with pytest.raises(PenstockError, match="has no address yet"):
        _ = cluster.run.url
    cluster.jobs["1"] = Placement("placed")
    assert cluster.tick().state == "starting"
    cluster.serve("1")
    assert (cluster.tick(READY).state, cluster.part.job) == ("running", "1")
    assert (cluster.run.url, cluster.run.admin_url) == ("http://10.0.0.1:8000", "http://10.0.0.1:9000")


def test_one_that_serves_is_not_said_to_wait(cluster: Cluster) -> None:
    """It told its address after the queue was asked."""
    cluster.tick()
    cluster.serve("1")
    cluster.jobs["1"] = Placement("queued", "job 1 waits")
    assert (cluster.tick(READY).state, cluster.part.note) == ("running", "job 1")
    cluster.jobs["1"] = Placement("placed", "job 1 on n")
    cluster.jobs["2"] = Placement("queued", "job 2 waits")
    assert cluster.tick(READY).note == "job 1 on n; job 2 waits"


def test_a_job_that_is_gone_is_counted_and_the_next_waits_a_moment(cluster: Cluster) -> None:
    cluster.tick()
    cluster.serve("1")
    cluster.tick(READY)
    cluster.jobs["1"] = Placement("gone", "its job 1 failed")
    cluster.tick()
    assert list(cluster.jobs) == ["1"], "the first was sent less than a second ago"
    cluster.keeper._starts = []
    part = cluster.tick()
    assert list(cluster.jobs) == ["1", "2"]
    assert [restart.reason for restart in part.restarts] == ["its job 1 failed"]
    assert cluster.tick().n_restarts == 1


def test_before_the_end_the_next_takes_over_when_it_knows_the_replicas(cluster: Cluster) -> None:
    cluster.tick()
    cluster.serve("1", ends_in_s=1000)
    cluster.tick(READY)
    cluster.keeper._starts = []
    cluster.serve("1", ends_in_s=100)
    for _ in range(3):
        cluster.tick(READY)
    assert list(cluster.jobs) == ["1", "2"]
    assert cluster.part.job == "1", "it serves until the next does"
    cluster.serve("2", ends_in_s=1000)
    cluster.tick(view())
    assert (cluster.part.job, cluster.ended) == ("2", []), "the next does not know the replica yet"
    cluster.tick(READY)
    assert cluster.ended == ["1"]
    assert cluster.tick(READY).n_restarts == 0


def test_one_that_could_not_be_told_to_end_is_told_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_gateway, "_RETRY_S", 0.01)
    cluster.jobs["1"] = Placement("placed")
    cluster.serve("2")
    cluster.n_silent = 1
    cluster.tick(READY)
    assert cluster.ended == []
    cluster.tick(READY)
    cluster.tick(READY)
    assert cluster.ended == ["1"], "again, and once"
    told = [event["text"] for event in cluster.run.events() if event["event"] == "gateway not ended"]
    assert told == ["could not read Slurm's job queue: Socket timed out"]


def test_a_short_limit_does_not_replace_for_ever(cluster: Cluster) -> None:
    cluster.tick()
    cluster.serve("1", ends_in_s=60)
    cluster.keeper._starts = []
    cluster.tick(READY)
    assert list(cluster.jobs) == ["1"], "half of its life is not over"


def test_the_next_that_took_over_and_died_is_replaced_at_once(cluster: Cluster) -> None:
    cluster.jobs["1"] = Placement("placed")
    cluster.serve("2")
    cluster.jobs["2"] = Placement("gone", "its job 2 failed")
    cluster.part = Part("running", job="2")
    cluster.tick()
    assert list(cluster.jobs) == ["1", "2", "3"], "job 1 cannot take the address back"


def test_a_target_that_cannot_say_changes_nothing(cluster: Cluster) -> None:
    part = Part("running", job="1")
    assert cluster.keeper.tend(Observation({}, None, True, part, None)) is part
    assert cluster.jobs == {}


def test_a_node_follows_the_file(tmp_path: Path) -> None:
    file = tmp_path / "address.json"
    admin = AdminClient(["http://127.0.0.1:1"], "token", file)
    with pytest.raises(PenstockError, match="has no address yet"):
        admin.post_json("/admin/announce", {})
    assert admin.own_address() is None
    for port in (1, 2):
        file.write_bytes(msgspec.json.encode(GatewayAddress("1", "127.0.0.1:3", (f"127.0.0.1:{port}",))))
        with pytest.raises(PenstockError):
            admin.post_json("/admin/announce", {})
        assert admin._urls == [f"http://127.0.0.1:{port}"]
    file.unlink()
    admin._read_file()
    assert admin._urls == ["http://127.0.0.1:2"], "the last word holds while the file system is away"
