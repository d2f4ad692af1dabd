"""Killing the controller or the gateway at each phase of scaling loses no replica and starts none twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import launching
import psutil
import pytest
import scaling_faults
from hosts import Hosts
from hosts_ray import RayCluster
from launching import Place, a_place, call, kill, pids
from scaling_faults import FIELDS, World
from slurm_cluster import Desk
from ssh_rig import left_on, until, write

from penstock import targets
from penstock.deployment import observe
from penstock.run_folder import Run
from penstock.targets.ray.jobs_api import Dashboard


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(launching, "DEADLINE_S", 120.0)
    targets.load.cache_clear()
    with a_place(tmp_path, deadline_s=900.0) as ours:
        yield ours


def world_of(place: Place, file: Path, where: str) -> World:
    run = place.up(file)
    submitted = scaling_faults.nodes_of(run.record().id)
    return World(where, run, run.url, lambda number: verb(run.name, number), submitted)


def verb(name: str, number: object) -> None:
    assert call("scale", name, number, "--no-wait").code == 0


def live(place: Place, world: World) -> None:
    scaling_faults.live(world)
    scaling_faults.wake(world)
    scaling_faults.gateway(world)
    place.note(world.run)
    scaling_faults.check(world)


@pytest.mark.processes
def test_what_a_killed_controller_started_and_did_not_note_is_taken_over_or_ended(place: Place) -> None:
    world = world_of(place, place.write("one", **FIELDS), "local")
    world.scale(1)
    world.kill_unnoted("1", lambda: world.scale(2))
    with world.fault("controller", "placed, not noted", 2):
        pass
    assert (world.starts.of("0"), world.starts.of("1")) == (1, 1)
    place.note(world.run)
    scaling_faults.end_unnoted(world)
    assert len(pids(world.run, "node")) == 1, "it is not forgotten"
    scaling_faults.check(world)


@pytest.mark.processes
@pytest.mark.nightly
def test_a_controller_and_a_gateway_killed_at_each_phase_on_this_machine(place: Place) -> None:
    live(place, world_of(place, place.write("one", **FIELDS), "local"))


@pytest.mark.processes
@pytest.mark.nightly
def test_a_gateways_worker_killed_while_one_wakes_takes_only_its_own_requests(place: Place) -> None:
    fields = {**FIELDS, "replicas": {"min": 0, "max": 1, "idle_s": 1}}
    fields["gateway"] = {"workers": 2, "hold_s": 100}
    world = world_of(place, place.write("one", **fields), "local, 2 workers")
    world.wait(lambda: world.number() == 0 and not world.run.handle().units, "nobody asks: it ends")
    n_before, streams = world.starts.of("0"), world.asks(8, 8)
    world.wait(lambda: world.starts.of("0") == n_before + 1, "it wakes one")
    view = observe.admin_view(world.run)
    assert view is not None and view.waiting == 8, "all are held"
    parent = world.pid("gateway")
    held = {pid: n_clients(pid, world.url) for pid in pids(world.run, "gateway") if pid != parent}
    victim = min(held, key=lambda pid: held[pid])
    with world.fault("gateway's worker", "woken, one loads", 1, *streams, lost=held[victim]):
        kill(victim)
    assert sum(held.values()) == 8 and held[victim] < 8
    assert world.starts.of("0") == n_before + 1
    place.note(world.run)
    scaling_faults.check(world)


def n_clients(pid: int, url: str) -> int:
    """Connections of clients that this process serves."""
    port, rows = int(url.rpartition(":")[2]), psutil.Process(pid).net_connections("tcp")
    return sum(row.status == psutil.CONN_ESTABLISHED and row.laddr[1] == port for row in rows)


@pytest.mark.hosts
@pytest.mark.nightly
def test_on_hosts_over_ssh(place: Place, hosts: Hosts) -> None:
    live(place, world_of(place, write(place, hosts, **FIELDS), "ssh"))
    assert call("down", "one").code == 0
    until(lambda: left_on(hosts) == [], "nothing is left", 3)


@pytest.mark.hosts
@pytest.mark.nightly
def test_on_a_ray_cluster(place: Place, ray_cluster: RayCluster) -> None:
    world = world_of(place, place.write("one", target="ray", ray={"address": ray_cluster.url}, **FIELDS), "ray")
    dashboard, known = Dashboard(ray_cluster.url), dict[str, str]()

    def submitted(replica: str) -> int:
        known.update({job.id: job.metadata.get("penstock_replica", "") for job in dashboard.jobs().values()})
        return list(known.values()).count(replica)

    world.submitted = submitted
    live(place, world)
    done = call("down", "one")
    assert done.code == 0, done


@pytest.mark.hosts
@pytest.mark.nightly
def test_on_slurm(desk: Desk) -> None:
    """The controller and the gateway are on the login node, whose processes this machine can see and end."""
    gateway = {**FIELDS["gateway"], "host": "0.0.0.0", "auth": "keys"}
    desk.names.append("one")
    told = json.loads(desk.call("up", desk.write(**{**FIELDS, "gateway": gateway}), "--json").splitlines()[0])
    run = Run(desk.run_path())
    port = run.url.rpartition(":")[2]

    def submitted(replica: str) -> int:
        words = ["squeue", "-h", "-t", "all", "-o", "%j", "-n", f"penstock-one-{replica}"]
        return len(desk.slurm.run(words).splitlines())

    world = World(
        "slurm", run, f"http://10.78.{desk.slurm.hosts.slot}.2:{port}",
        lambda number: desk.call("scale", "one", number, "--no-wait"), submitted, told["key"],
    )  # fmt: skip
    scaling_faults.live(world)
    scaling_faults.wake(world)
    scaling_faults.gateway(world)
    scaling_faults.check(world)
    desk.down()
