"""GPU time and what it costs: counting, the store, shares of keys, prices from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_rig import TOKEN as ADMIN
from gateway_rig import Rig, say
from store_rig import NOW, Store

from penstock.deployment import preflight
from penstock.errors import SpecError, UserError
from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.accounting.usage_store import GpuUse
from penstock.gateway.metrics.cost import Spending, SpendingMeter, cost_between, gpu_shares, key_uses
from penstock.gateway.metrics.counters import Family, Labels
from penstock.gateway.metrics.gpu_time import SLOT_S, SLOTS_MAX, GpuSeconds, GpuTime
from penstock.gateway.routing.replicas import Replica
from penstock.hardware import Gpu, Machine
from penstock.spec import reading
from penstock.spec.deployment import Hardware
from penstock.wire.announcement import Announcement, EngineLoad, GatewayView, GpuReading, MachineReading, ReplicaView
from penstock.wire.live import Cost, KeyUse

BODY = b'{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


def replica(name: str = "0", **changes: Any) -> Replica:
    facts: dict[str, Any] = {"model": "m", "state": "ready", "lease_s": 30.0}
    return Replica(Announcement(name, **(facts | changes)), None, 0.0)


def test_ready_replicas_count_and_those_at_work_are_busy() -> None:
    idle, ours, others = replica(), replica("1"), replica("2", load=EngineLoad(2.0))
    ours.in_flight = 1
    loading, gone = replica("3", state="loading"), replica("4", lease_s=0.5)
    clock = GpuTime(4, 3.0)
    for now in (1.0, 2.0, 3.5):
        clock.count([idle, ours, others, loading, gone], now, NOW)
    assert dict(clock.families()) == {
        "gpu_seconds_total": {(("model", "m"),): 30.0},
        "gpu_busy_seconds_total": {(("model", "m"),): 20.0},
        "gpu_hour_usd": {(): 3.0},
    }


def test_a_stopped_process_and_a_stepping_clock_invent_no_time() -> None:
    clock = GpuTime(1, None)
    for now, wall_s in ((0.0, NOW), (20.0, NOW + 3600), (21.0, NOW - 86400), (21.0, NOW)):
        clock.count([replica()], now, wall_s)
    assert dict(clock.families())["gpu_seconds_total"] == {(("model", "m"),): 11.0}
    assert sum(seconds.ready for seconds in clock.slots.values()) == 11.0
    assert GpuTime(0, 3.0).families() == []


def test_slots_are_forgotten_when_the_store_has_them_and_bounded_while_it_is_away() -> None:
    clock = GpuTime(1, None)
    for second in range(4):
        clock.count([replica()], second, NOW + second * SLOT_S)
    written = dict(clock.slots)
    assert len(written) == 3
    clock.count([replica()], 3.5, NOW + 3 * SLOT_S)
    clock.forget(written)
    assert list(clock.slots.values()) == [GpuSeconds(1.5, 0.0)]  # the newest grew on
    for second in range(SLOTS_MAX + 5):
        clock.count([replica(lease_s=1e9)], 4 + second, NOW + second * SLOT_S)
    assert len(clock.slots) == SLOTS_MAX


def test_an_hour_costs_its_gpus_and_its_tokens_share_that() -> None:
    older = Spending(100.0, 50.0, 10.0, 1000.0, 900.0, 100.0, 5.0)
    newer = Spending(3700.0, 50.0 + 7200, 10.0 + 1800, 1000.0 + 6e6, 900.0 + 3e6, 100.0 + 1e6, 5.0 + 1.5e6)
    assert cost_between(older, newer, 3.0) == Cost(6.0, 1.0, 0.75, 1.5)
    assert cost_between(older, newer, None) == Cost(None, None, 0.75, 1.5)
    without_store = newer._replace(tokens=older.tokens)
    assert cost_between(older, without_store, 3.0).usd_per_million_tokens == 2.0
    assert cost_between(older, older, 3.0) == Cost()
    assert cost_between(older, older._replace(at=200.0), 3.0) == Cost()  # no GPU: nothing is said


def view(*rows: tuple[str, float, float], gpu: str = "") -> GatewayView:
    """Replicas by name, tokens and joules; each on a GPU of its own, or all on one."""
    views = []
    for name, tokens, joules in rows:
        machine = MachineReading("h", gpus=(GpuReading(0, gpu or f"u{name}", energy_joules=joules),))
        announced = replica(name, load=EngineLoad(0.0, output_tokens=tokens), machines=(machine,)).announcement
        views.append(ReplicaView(announced, 0.0, True, False, 0))
    return GatewayView(tuple(views), 0, 0, 0)


def test_engines_and_drivers_that_begin_again_lose_nothing_and_a_shared_gpu_burns_its_energy_once() -> None:
    meter = SpendingMeter()
    counts: dict[Labels, float] = {
        (("model", "m"), ("kind", kind)): n for kind, n in (("prompt", 5.0), ("cached", 2.0))
    }
    tokens: list[Family] = [("tokens_total", counts)]
    meter.read(tokens, view(("a", 100.0, 50.0)), 0.0)
    meter.read(tokens, view(("a", 150.0, 60.0), ("b", 1000.0, 1000.0)), 1.0)
    meter.read(tokens, view(("a", 10.0, 0.0), ("b", float("nan"), 1001.0)), 2.0)
    assert meter.read(tokens, view(("a", 11.0, 2.0)), 3.0) == Spending(3.0, 0.0, 0.0, 5.0, 51.0, 51.0, 13.0)
    meter = SpendingMeter()
    meter.read([], view(("a", 0.0, 10.0), ("b", 0.0, 10.0), gpu="u"), 0.0)
    assert meter.read([], view(("a", 0.0, 17.0), ("b", 0.0, 17.0), gpu="u"), 1.0).joules == 7.0


def test_keys_share_the_cost_of_their_models_gpus_by_tokens() -> None:
    def tokens(key: str, model: str, **kinds: float) -> dict[Any, float]:
        return {(("key", key), ("model", model), ("kind", kind)): n for kind, n in kinds.items()}

    families: list[Any] = [
        ("key_tokens_total", tokens("a", "m", prompt=10, cached=9, output=20) | tokens("b", "m", prompt=60, output=0)
            | tokens("b", "n", prompt=1)),
        ("key_requests_total", {(("key", "a"), ("model", "m")): 4}),
        ("gpu_seconds_total", {(("model", "m"),): 3600.0}),
    ]  # fmt: skip
    assert key_uses(families, 9.0) == (
        KeyUse("b", "m", 0, 60, 0, 6.0),
        KeyUse("a", "m", 4, 10, 20, 3.0),
        KeyUse("b", "n", 0, 1, 0, None),
    )
    assert {use.cost_usd for use in key_uses(families, None)} == {None}
    assert key_uses([], 9.0) == ()


def test_shares_of_groups_add_up_to_the_models_cost() -> None:
    gpu_time = {"m": GpuUse(3600.0, 900.0, 6.0), "n": GpuUse(3600.0, 3600.0, None)}
    lines = [(("alice",), "m", 2_000_000), (("bob",), "m", 1_000_000), (("bob",), "n", 5), (("carol",), "other", 7)]
    assert gpu_shares(lines, gpu_time) == {("alice",): (4.0, 2.0, 0.75), ("bob",): (2.0, 2.0, 0.375)}
    assert gpu_shares([((), "m", 0)], gpu_time) == {(): (None, None, 0.75)}


async def test_a_gateway_counts_gpu_time_and_use_by_key_and_keeps_it(tmp_path: Path) -> None:
    place = str(tmp_path / "s.sqlite")
    store = Store(place)
    _, secret = store.keys.create("alice", Limits(), NOW)
    facts: dict[str, Any] = {"gpus_per_replica": 2, "gpu_hour_usd": 3.0, "store": place, "auth": "keys"}
    async with Rig(**facts) as rig:
        await rig.engine(say(ANSWER))
        client = await rig.client()
        client.post(b'{"model":"demo"}', headers=f"Authorization: Bearer {secret}\r\n")
        assert (await client.response())[0].status == 200
        keeper = rig.gateway._reporter.gpu_time
        assert keeper is not None
        keeper.tick(rig.gateway._context.replicas.all(), (keeper._last or 0.0) + 5.0, NOW)
        text = await client.metrics(f"Authorization: Bearer {ADMIN}\r\n")
        assert 'penstock_key_tokens_total{key="alice",model="demo",kind="prompt"} 40\n' in text
        assert 'penstock_key_requests_total{key="alice",model="demo"} 1\n' in text
        assert 'penstock_gpu_seconds_total{model="demo"} 10' in text and "penstock_gpu_hour_usd 3\n" in text
        client.get("/dashboard/live?once", f"Authorization: Bearer {ADMIN}\r\n")
        snapshot = msgspec.json.decode((await client.response())[1])
        assert snapshot["keys"][0]["key"] == "alice" and snapshot["keys"][0]["cost_usd"] > 0
    assert store.usage.gpu_time()["demo"].gpu_s == pytest.approx(10, abs=1)
    store.close()


GPU = Gpu(0, "NVIDIA H100 80GB HBM3", 85_520_809_984, 85_520_809_984)
MACHINE = Machine("h", 8, 10**11, 10**11, (GPU,))


def test_a_price_comes_from_the_file_or_from_a_price_file(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("h100-sxm: 2.5\nl4: 1\n")
    assert preflight.gpu_price(Hardware(price_per_gpu_hour=2.0), MACHINE) == 2.0
    assert preflight.gpu_price(Hardware(price_file=str(prices)), MACHINE) == 2.5
    assert preflight.gpu_price(Hardware(), MACHINE) is None
    without = msgspec.structs.replace(MACHINE, gpus=())
    assert preflight.gpu_price(Hardware(price_file=str(prices)), without) is None
    assert preflight.gpu_price(Hardware(price_per_gpu_hour=2.0), without) is None
    with pytest.raises(SpecError) as refusal:  # two are one too many
        reading.parse("model: m\nhardware: {price_per_gpu_hour: 1, price_file: p.yaml}")
    assert [problem.path for problem in refusal.value.problems] == ["hardware.price_file"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("[", "cannot read price file"),
        ("- h100-sxm", "it is no list of GPUs and prices"),
        ("h100-sxm: cheap", "the price of h100-sxm is 'cheap'"),
        ("h100-sxm: -1", "the price of h100-sxm is -1"),
        ("h100-sxm: .nan", "the price of h100-sxm is nan"),
        ("h100-sxm: true", "the price of h100-sxm is True"),
        ("h1oo-sxm: 1", 'no GPU "h1oo-sxm" in the catalogue'),
        ("l4: 1", 'cannot find a price for GPU "h100-sxm"'),
    ],
)
def test_a_price_file_that_cannot_be_used_is_refused_in_words(tmp_path: Path, text: str | None, message: str) -> None:
    prices = tmp_path / "prices.yaml"
    if text is not None:
        prices.write_text(text)
    with pytest.raises(UserError) as refusal:
        preflight.gpu_price(Hardware(price_file=str(prices)), MACHINE)
    assert message in refusal.value.message and refusal.value.hint
