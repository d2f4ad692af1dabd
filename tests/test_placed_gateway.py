"""Gateways and controllers that their target places: when another is started, and when an older one ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from samples import NOW, deployment, draft, told, view

from penstock import run_folder
from penstock.deployment import observe
from penstock.deployment.controller.decide import Decision, Memory, decide
from penstock.deployment.observe import Observation
from penstock.errors import PenstockError
from penstock.node.announcer import AdminClient
from penstock.paths import write_atomically
from penstock.run_folder import Desired, Kind, Part, Run, Unit, replica
from penstock.targets import Placement
from penstock.wire.announcement import GatewayAddress, GatewayView

READY = view(told("0"))
KINDS: tuple[Kind, ...] = ("replica", "gateway")


class Cluster:
    """A run whose gateways are placed: `decide` is asked tick by tick, and what it wants is done at once."""

    def __init__(self, run: Run) -> None:
        self.run, self.part, self.now = run, Part("gone"), 1000.0
        self.gateways: dict[str, Placement] = {}
        self.memory = Memory(drain_s=1.0, gateway_drain_s=1.0)

    def serve(self, name: str, ends_in_s: float | None = None) -> None:
        ends_at = None if ends_in_s is None else NOW + ends_in_s
        self.gateways[name] = Placement("placed", f"job {name} on n", ends_at=ends_at)
        address = GatewayAddress(name, f"10.0.0.{name}:8000", (f"10.0.0.{name}:9000",))
        write_atomically(self.run.gateway_address_file, msgspec.json.encode(address))

    def tick(self, rows: GatewayView | None = None, seconds: float = 2.0) -> Decision:
        self.now += seconds
        placements = {Unit("gateway", name): place for name, place in self.gateways.items()}
        self.part = observe._placed(self.run, self.part, placements)
        seen = Observation({**placements, replica("0"): Placement("placed")}, rows, self.part)
        decision, self.memory = decide(Desired("up", 1), seen, self.memory, self.now, NOW)
        if decision.starts_gateway:
            self.memory = msgspec.structs.replace(self.memory, gateway_due_at=self.now + 1.0)
        if decision.place is not None:
            wanted = [unit.name for unit in decision.place if unit.kind == "gateway"]
            self.gateways = {name: self.gateways.get(name, Placement("queued", f"{name} waits")) for name in wanted}
        return decision

    def events(self, rows: GatewayView | None = None, seconds: float = 2.0) -> list[str]:
        return [event.kind for event in self.tick(rows, seconds).events]


@pytest.fixture
def cluster() -> Cluster:
    wanted = deployment(target="slurm", gateway={"on": "job", "auth": "keys"})
    return Cluster(run_folder.create(msgspec.structs.replace(draft(wanted), placed=KINDS), NOW))


def test_one_is_placed_and_only_one(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.tick()
    assert list(cluster.gateways) == ["0"]
    assert (cluster.part.state, cluster.part.note) == ("queued", "0 waits")
    assert cluster.run.known_url is None
    with pytest.raises(PenstockError, match="has no address yet"):
        _ = cluster.run.url
    cluster.gateways["0"] = Placement("placed")
    cluster.tick()
    assert cluster.part.state == "starting"
    cluster.serve("0")
    cluster.tick(READY)
    assert (cluster.part.state, cluster.part.unit) == ("running", "0")
    assert (cluster.run.url, cluster.run.admin_url) == ("http://10.0.0.0:8000", "http://10.0.0.0:9000")
    cluster.gateways["0"] = Placement("queued", "job 0 waits")  # it wrote its address after the queue was asked
    cluster.tick(READY)
    assert (cluster.part.state, cluster.part.note) == ("running", "gateway 0")
    cluster.gateways = {"0": Placement("placed", "job 0 on n"), "1": Placement("queued", "job 1 waits")}
    cluster.tick(READY)
    assert cluster.part.note == "job 0 on n; job 1 waits"


def test_one_that_is_gone_is_replaced_after_a_pause_or_at_once_if_its_successor_died(cluster: Cluster) -> None:
    cluster.tick()
    cluster.serve("0")
    cluster.tick(READY, seconds=0.1)
    cluster.gateways["0"] = Placement("gone", "its job 0 failed")
    assert cluster.tick(seconds=0.1).place is None, "the first was started less than a second ago"
    decision = cluster.tick()
    assert (decision.starts_gateway, decision.is_restart) == (True, True)
    assert list(cluster.gateways) == ["1"]
    cluster.serve("1")
    cluster.tick(READY)
    cluster.gateways = {"0": Placement("placed"), "1": Placement("gone", "its job 1 failed")}
    cluster.tick()
    assert list(cluster.gateways) == ["0", "2"], "gateway 0 cannot take the address back"


def test_before_the_end_the_next_takes_over_when_it_knows_the_replicas(cluster: Cluster) -> None:
    cluster.serve("0", ends_in_s=1000)
    cluster.tick(READY)
    cluster.serve("0", ends_in_s=100)
    assert cluster.events(READY) == ["gateway leaving"]
    for _ in range(3):
        assert cluster.tick(READY).place is None
    assert list(cluster.gateways) == ["0", "1"]
    assert cluster.part.unit == "0", "it serves until the next does"
    cluster.serve("1", ends_in_s=1000)
    assert cluster.tick(view()).place is None, "the next does not know the replica yet"
    assert cluster.events(READY) == ["gateway moved"]
    assert list(cluster.gateways) == ["1"]
    assert not cluster.tick(READY).is_restart
    cluster.serve("2")
    cluster.tick(view())
    assert list(cluster.gateways) == ["1", "2"]
    cluster.tick(view(), seconds=61)
    assert list(cluster.gateways) == ["2"], "one that never learns the replicas takes over after a minute"


def test_a_short_limit_does_not_replace_for_ever(cluster: Cluster) -> None:
    cluster.serve("0", ends_in_s=60)
    assert cluster.tick(READY).place is None, "half of its life is not over"


@pytest.mark.parametrize(("serves", "limit_s"), [(True, 20.0), (False, 180.0)])
def test_one_that_does_not_answer_is_ended(cluster: Cluster, serves: bool, limit_s: float) -> None:
    cluster.gateways["0"] = Placement("placed")
    if serves:
        cluster.serve("0")
    cluster.tick()
    assert cluster.tick(seconds=limit_s - 1).place is None
    assert cluster.events(seconds=2) == ["gateway hung"]
    assert cluster.gateways == {}


def test_a_process_next_to_up_has_eight_seconds() -> None:
    part = Part("running", process=told("0").processes[0], unit="0")
    seen = Observation({Unit("gateway", "0"): Placement("placed")}, None, part)
    memory = Memory(1.0, 1.0)
    for now, kinds in ((100.0, []), (107.0, []), (109.0, ["gateway hung"])):
        decision, memory = decide(Desired("up", 0), seen, memory, now, NOW)
        assert [event.kind for event in decision.events] == kinds
    assert decision.place == ()


def controllers(ends_in_s: float, **states: str) -> Observation:
    placements = {
        Unit("controller", name.removeprefix("c")): Placement(state, ends_at=NOW + ends_in_s)  # type: ignore[arg-type]
        for name, state in states.items()
    }
    placements[Unit("gateway", "0")] = Placement("placed")
    return Observation(placements, view(), Part("running", unit="0"))


def test_a_controller_whose_machine_is_taken_away_hands_over_to_the_next() -> None:
    memory = Memory(1.0, 1.0, own="0")
    decision, memory = decide(Desired("up", 0), controllers(1000, c0="placed"), memory, 0.0, NOW)
    assert decision.place is None
    decision, memory = decide(Desired("up", 0), controllers(100, c0="placed"), memory, 1.0, NOW)
    assert decision.place is not None and Unit("controller", "1") in decision.place
    for state, hands_over in (("queued", False), ("placed", True)):
        decision, memory = decide(Desired("up", 0), controllers(90, c0="placed", c1=state), memory, 2.0, NOW)
        assert (decision.place, decision.hands_over) == (None, hands_over)
    decision, _ = decide(
        Desired("up", 0), controllers(1000, c0="gone", c1="placed"), Memory(1.0, 1.0, own="1"), 3.0, NOW
    )
    assert decision.place is not None and Unit("controller", "0") not in decision.place


@pytest.mark.loopback
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


def test_a_chat_page_that_the_target_placed_is_kept_as_it_is() -> None:
    page, gateway = Unit("ui", "0"), Unit("gateway", "0")
    placements = {replica("0"): Placement("placed"), gateway: Placement("placed"), page: Placement("gone")}
    seen, memory = Observation(placements, READY, Part("running", unit="0")), Memory(1.0, 1.0)
    assert decide(Desired("up", 1), seen, memory, 0.0, NOW)[0].place is None
    assert decide(Desired("up", 2), seen, memory, 0.0, NOW)[0].place == (gateway, replica("0"), replica("1"), page)
