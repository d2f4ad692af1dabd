"""What the autoscaler is told, and what becomes of its decisions: without processes, at times that the test gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from samples import NOW, demo_plan, deployment, gpu_machine, gpu_plan, run_folder, sized, told, view

from penstock.deployment import autoscale
from penstock.deployment.autoscale import Decision, Policy, Recent, Sample
from penstock.deployment.controller import scaler
from penstock.deployment.controller.load_samples import LoadSampler
from penstock.deployment.controller.scaler import Kept, Look, Scaler
from penstock.deployment.observe import Observation
from penstock.run_folder import Desired, Handle, Part, ReplicaStatus, Run, State, replica
from penstock.targets import Placement
from penstock.wire.announcement import EngineLoad, GatewayView, LoadCounts, ReplicaView
from penstock.wire.gateways import joined

AUTO = Desired("up", 1)


def counted(gateway: str = "a", age_s: float = 100.0, **counts: int) -> LoadCounts:
    return LoadCounts(gateway, age_s, **counts)


def seen(rows: GatewayView | None, **states: Any) -> Observation:
    """One look; `states` of replicas by number: r0="placed"."""
    placements = {replica(name[1:]): Placement(state) for name, state in states.items()}
    return Observation(placements, rows, Part("running", unit="0"))


def rows_with(*counts: LoadCounts, waiting: int = 0, in_flight: int = 0) -> GatewayView:
    return GatewayView((), in_flight, waiting, 0, counts)


def taken(sampler: LoadSampler, rows: GatewayView, now: float) -> Sample:
    sample = sampler.take(seen(rows), (), {}, now)
    assert sample is not None
    return sample


def test_a_sample_has_what_was_counted_since_the_last_and_adds_up_gateways() -> None:
    sampler = LoadSampler(NOW)
    first = rows_with(counted("a", arrivals=100, body_bytes=50_000), counted("b", arrivals=7))
    assert taken(sampler, first, NOW + 1).arrivals == 0, "what was counted before this controller began"
    later = rows_with(
        counted("a", 101, arrivals=103, body_bytes=52_000, ttft_good=2, ttft_total=3),
        counted("b", 101, arrivals=8, output_tokens=40), waiting=2, in_flight=3,
    )  # fmt: skip
    sample = taken(sampler, later, NOW + 2)
    assert (sample.arrivals, sample.prompt_tokens, sample.output_tokens) == (4, 500, 40)
    assert (sample.in_flight, sample.held, sample.ttft_good, sample.ttft_total) == (5, 2, 2, 3)
    assert sampler.take(seen(None), (), {}, NOW + 3) is None
    known = counted("b", 103, arrivals=10, body_bytes=2000, known_bytes=1000, known_tokens=100)
    assert taken(sampler, rows_with(known), NOW + 4).prompt_tokens == 200, "as answered requests have them"


def test_a_gateway_that_was_started_again_makes_no_negative_rate() -> None:
    sampler = LoadSampler(NOW)
    taken(sampler, rows_with(counted("a", 500, arrivals=1000)), NOW + 1)
    assert taken(sampler, rows_with(counted("a", 0.5, arrivals=3)), NOW + 2).arrivals == 3
    # A worker that was killed had requests in flight, which count no more.
    assert taken(sampler, rows_with(counted("a", 1.5, arrivals=1)), NOW + 3).arrivals == 0
    assert (
        taken(sampler, rows_with(counted("a", 2.5, arrivals=2), counted("b", 0.3, arrivals=4)), NOW + 4).arrivals == 5
    )
    known = taken(sampler, rows_with(counted("a", 3.5, arrivals=2), counted("c", 900, arrivals=4000)), NOW + 5)
    assert known.arrivals == 0, "c is older than its first look: what it counted came at other times"
    two = joined([rows_with(counted("a")), rows_with(counted("b"))])
    assert [row.gateway for row in two.counts] == ["a", "b"]


def test_engines_count_generated_tokens_and_their_requests() -> None:
    def look(tokens: float) -> GatewayView:
        load = EngineLoad(3, 2, 0.5, output_tokens=tokens)
        leaving = ReplicaView(told("1", load=EngineLoad(1)), 0.1, True, True, 1)
        return view(told("0", load=load), leaving, told("2", "loading"), told("3", "sleeping"))

    sampler, ordered = LoadSampler(NOW), {str(n): NOW - 10.0 * n for n in range(5)}
    sampler.take(seen(look(100)), (), ordered, NOW + 1)
    sample = sampler.take(seen(look(160)), ("3",), ordered, NOW + 2)
    assert sample is not None
    assert sample.output_tokens == 60
    states = {row.id: (row.state, row.running, row.waiting, row.kv_use) for row in sample.replicas}
    assert states == {
        "0": ("ready", 3, 2, 0.5), "1": ("draining", 1, 0, 0.0), "2": ("starting", 0, 0, 0.0),
        "3": ("draining", 0, 0, 0.0), "4": ("starting", 0, 0, 0.0),
    }  # fmt: skip
    assert [row.age_s for row in sample.replicas] == [2, 12, 22, 32, 42]


class Wishes:
    """In place of the policy: the numbers to wish, one a call, the last for ever."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.policies, self.befores = list(numbers), list[Policy](), list[int | None]()

    def __call__(self, recent: Recent, state: autoscale.State, policy: Policy, now: float) -> Decision:
        self.policies.append(policy)
        self.befores.append(state.replicas)
        number = self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]
        n_starting = sum(row.state == "starting" for sample in recent.samples[-1:] for row in sample.replicas)
        if n_starting and number < (state.replicas or 0):
            number = state.replicas or 0
        return Decision(number, autoscale.State(t=now, replicas=number), f"load {number}.50")


class Rig:
    """A scaler with a clock of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, *numbers: int, **fields: Any) -> None:
        self.wishes = Wishes(*numbers)
        patch.setattr(scaler, "scale", self.wishes)
        fields = {"replicas": {"min": 0, "max": 5}, **fields}
        self.run, self.now = run_folder(deployment(**fields)), NOW
        self.wanted, self.last = AUTO, cast(State | None, None)
        self.asked: int | None = None
        self.scaler = self.begin()

    def begin(self) -> Scaler:
        self.scaler = Scaler(self.run, self.run.deployment(), demo_plan(), self.last, self.now)
        return self.scaler

    def step(
        self, rows: GatewayView | None, failed: Sequence[str] = (), refused: Sequence[str] = (), **states: Any
    ) -> int:
        self.now += 1.0
        look = Look(seen(rows, **states), failed, refused, (), self.asked)
        self.scaling = self.scaler.step(self.wanted, look, self.now)
        return self.scaling.replicas

    def events(self) -> list[str]:
        texts = [event.text for event in self.scaler.events]
        self.scaler.events.clear()
        return texts


READY = view(told("0"))
SLURM = {"target": "slurm", "slurm": {"partition": "gpu"}, "gateway": {"auth": "keys"}}
KEDA = {
    "target": "kubernetes",
    "replicas": {"min": 0, "max": 5, "actuator": "keda"},
    "kubernetes": {"prometheus_url": "http://prometheus:9090"},
    "gateway": {"auth": "keys"},
}
MakeRig = Callable[..., Rig]


@pytest.fixture
def rig_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRig:
    return lambda *numbers, **fields: Rig(monkeypatch, *numbers, **fields)


def test_decisions_are_kept_and_told_when_the_number_changes(rig_of: MakeRig) -> None:
    rig = rig_of(1, 1, 3)
    assert [rig.step(READY, r0="placed") for _ in range(3)] == [1, 1, 3]
    assert rig.events() == ["1 -> 1: load 1.50", "1 -> 3: load 3.50"]
    rig.begin()
    assert rig.step(None, r0="placed") == 3, "a controller that takes over goes on"
    assert rig.step(READY, r0="placed") == 3
    assert rig.wishes.befores[-1] == 3
    assert rig.events() == []
    lines = rig.run.samples_file.read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Sample).t for line in lines] == [NOW + n for n in (1, 2, 3, 5)]


def test_a_controller_whose_memory_is_some_seconds_old_ends_nothing_that_was_ordered_since(
    rig_of: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster its pod may be another one. What it has is a copy of what the last one wrote."""
    rig = rig_of(1, 2, **KEDA | {"replicas": {"min": 1, "max": 3}})
    record = rig.run.record()
    monkeypatch.setattr(Run, "record", lambda _: msgspec.structs.replace(record, placed=("replica", "controller")))
    rig.begin()
    assert rig.step(READY, r0="placed") == 1
    rig.run.write_handle(Handle("kubernetes", {"replica/0": {}, "replica/1": {}}))
    rig.begin()
    assert rig.step(None, r0="placed", r1="placed") == 2
    rig.run.write_handle(Handle("kubernetes", {f"replica/{n}": {} for n in range(9)}))
    rig.begin()
    assert rig.step(None, r0="placed") == 3, "at most as many as the file says"
    rolled = rig_of(3, **KEDA | {"replicas": {"min": 1, "max": 3}})
    rolled.run.write_handle(Handle("kubernetes", {f"replica/{n}": {} for n in range(3)}))
    rolled.begin()
    assert rolled.step(None, r0="placed") == 3, "a roll: of the controller before there is nothing"


def test_one_that_is_lost_starts_again_from_now(rig_of: MakeRig) -> None:
    rig = rig_of(1)
    rig.step(READY, r0="placed")
    rig.now += 5000.0

    def left_s() -> float:
        assert rig.scaling.ready_at is not None
        return rig.scaling.ready_at - rig.now

    rig.step(view(told("0", "loading")), r0="placed")
    assert left_s() == pytest.approx(100, abs=1), "its engine was started again"
    rig.step(READY, r0="placed")
    assert rig.scaling.ready_at is None
    rig.now += 5000.0
    rig.step(None, r0="placed")
    assert left_s() < 0, "a gateway that knows nothing yet"
    for state in ("gone", "queued"):
        rig.step(READY, r0="placed")
        rig.now += 5000.0
        rig.step(view(), r0=state)
        rig.step(view(), r0=state)
        assert left_s() == pytest.approx(100, abs=2), "it is placed again"
    rig.step(READY, r0="placed")
    rig.last = State(NOW, "ready", 1, (ReplicaStatus("0", "ready", "placed"),))
    rig.begin()
    rig.now += 5000.0
    rig.step(view(told("0", "loading")), r0="placed")
    assert left_s() == pytest.approx(100, abs=1), "also when another controller saw it serve"


def test_one_that_ends_is_no_start_that_is_late(rig_of: MakeRig) -> None:
    rig = rig_of(1)
    rig.step(READY, r0="placed")
    rig.now += 5000.0
    draining = Look(seen(view(told("0", "stopping"), told("1", "loading")), r0="placed", r1="placed"), (), (), ("0",))
    ready_at = rig.scaler.step(AUTO, draining, rig.now).ready_at
    assert ready_at == pytest.approx(rig.now + 100, abs=1)


def test_a_pinned_number_stays_and_is_where_the_load_begins_again(rig_of: MakeRig) -> None:
    rig = rig_of(2)
    rig.wanted = Desired("up", 4, is_pinned=True)
    assert [rig.step(READY, r0="placed") for _ in range(2)] == [4, 4]
    assert (rig.scaling.is_pinned, rig.events()) == (True, [])
    rig.wanted = AUTO
    assert rig.step(READY, r0="placed") == 2
    assert rig.wishes.befores == [4]


def test_a_held_request_wakes_at_once_and_nothing_ends_while_one_is_held(rig_of: MakeRig) -> None:
    rig = rig_of(0)
    assert rig.step(READY, r0="placed") == 0
    assert (rig.step(rows_with()), rig.scaling.ready_at) == (0, None)
    rig.now -= 0.8  # a tick without a sample
    assert rig.step(rows_with(waiting=2)) == 1
    kept = msgspec.json.decode(rig.run.scaling_file.read_bytes(), type=Kept)
    assert kept.remembered.asked_t == rig.now, "the next controller knows it, also when no sample says so"
    assert rig.events()[-1] == "0 -> 1: 2 requests held, and there is no replica"
    assert rig.step(rows_with(waiting=2)) == 1, "whatever the policy says"
    assert rig.scaling.ready_at == pytest.approx(rig.now + 100, abs=1), "as long as a start is thought to take"
    assert rig.step(rows_with(), r0="placed") == 1, "and it loads"
    assert rig.step(READY, r0="placed") == 0
    assert rig.scaling.ready_at is None


def test_a_start_that_failed_is_tried_again_later_each_time(rig_of: MakeRig) -> None:
    rig = rig_of(1)
    failed, gone = view(told("0", "failed")), {"r0": "gone"}
    rig.step(failed, ("0",), **gone)
    assert "the start of replica 0 failed: the next is tried in 30.0 s" in rig.events()[0]
    assert rig.scaling.failure == "the start of replica 0 failed"
    assert rig.scaling.ready_at == pytest.approx(rig.now + 130, abs=1)
    pauses = []
    for _ in range(3):
        began = rig.now
        while not rig.scaler.retried:
            rig.step(failed, ("0",), **gone)
        pauses.append(rig.now - began)
        rig.step(view(told("0", "loading")), r0="placed")
        rig.step(failed, ("0",), **gone)
    assert pauses == pytest.approx([30, 60, 120], abs=2)
    rig.step(READY, r0="placed")
    assert rig.scaling.failure is None


def test_a_target_without_room_is_asked_again_later(rig_of: MakeRig) -> None:
    rig = rig_of(4)
    both = view(told("0"), told("1"))
    assert rig.step(both, r0="placed", r1="placed") == 4
    assert rig.step(both, refused=("2", "3"), r0="placed", r1="placed") == 2
    assert rig.scaling.reason == "load 4.50; the target has room for 2"
    n_steps = 0
    while rig.step(both, r0="placed", r1="placed") == 2:
        n_steps += 1
    assert n_steps == pytest.approx(59, abs=2)


def test_on_slurm_one_job_at_a_time_is_submitted_and_pending_ones_go_first(rig_of: MakeRig) -> None:
    rig = rig_of(*[4] * 130, 1, **SLURM)
    numbers = [rig.step(READY, r0="placed", r1="queued", r2="queued") for _ in range(62)]
    assert (numbers[0], numbers[28], numbers[31], numbers[61]) == (2, 2, 3, 4)
    while (number := rig.step(READY, r0="placed", r1="queued", r2="queued")) == 4:
        pass
    assert number == 1, "what waits in the queue loads nothing"
    rig.step(view(told("0"), told("1", "starting")), r0="placed", r1="placed", r2="queued")
    for _ in range(12):
        rig.step(READY, r0="placed")
    kept = msgspec.json.decode(rig.run.scaling_file.read_bytes())
    assert kept["waits_s"] == [pytest.approx(rig.now - NOW - 14, abs=2)]
    assert rig.wishes.policies[-1].start_s == 100 + kept["waits_s"][0], "a wait in the queue is a part of a start"
    other = rig_of(4, **SLURM)
    assert other.step(READY, r0="placed") == 2
    other.begin()
    numbers = [other.step(READY, r0="placed", r1="queued") for _ in range(31)]
    assert (numbers[0], numbers[27], numbers[30]) == (2, 2, 3), "a controller that takes over keeps the pause"


def test_the_policy_knows_what_a_replica_of_the_plan_can(home: Path) -> None:
    wanted, box = deployment("meta-llama/Llama-3.1-8B", replicas={"min": 1, "max": 2}), gpu_machine(1)
    can = sized(wanted, box, "llama-3.1-8b").throughput
    assert can is not None
    assert 20_000 < can.prefill_tokens_s < 80_000, "an H100 reads 1,000 tokens in 15 to 40 ms"
    assert 3_000 < can.decode_tokens_s < 40_000
    assert 64 <= can.max_running <= 1024
    assert gpu_plan().throughput is None, "a number that does not follow the load needs none"
    careful = deployment("meta-llama/Llama-3.1-8B", replicas={"min": 1, "max": 2}, workload={"tpot_ms": 8})
    slower = sized(careful, box, "llama-3.1-8b").throughput
    assert slower is not None
    assert slower.decode_tokens_s < can.decode_tokens_s


def test_another_autoscaler_sets_the_number_and_hears_what_the_load_needs(rig_of: MakeRig) -> None:
    rig = rig_of(1, 3, **KEDA)
    rig.asked = 1
    assert rig.step(READY, r0="placed") == 1
    assert (rig.step(READY, r0="placed"), rig.scaling.published) == (1, 3), "it has not heard yet"
    rig.asked = 3
    assert rig.step(READY, r0="placed") == 3
    assert rig.wishes.befores[-1] == 3, "what the load needed, not what is there"
    assert rig.scaling.reason == "keda asks for 3; load 3.50"
    rig.asked = None
    assert rig.step(READY, r0="placed") == 3, "an API that is silent changes nothing"
    rig.asked = 9
    assert rig.step(READY, r0="placed") == 5, "the file's bounds"
    rig.wanted = Desired("up", 2, is_pinned=True)
    assert (rig.step(READY, r0="placed"), rig.scaling.published) == (2, 2)


def test_a_held_request_wakes_one_before_the_other_autoscaler_hears_of_it(rig_of: MakeRig) -> None:
    rig = rig_of(0, 0, 1, **KEDA)
    rig.asked = 0
    assert rig.step(READY, r0="placed") == 0
    rig.now -= 0.8
    assert (rig.step(rows_with(waiting=1)), rig.scaling.published) == (1, 1)
    assert rig.step(rows_with(waiting=1)) == 1, "and it stays while it is held for"
    assert rig.step(rows_with(), r0="placed") == 1, "and while it loads"
