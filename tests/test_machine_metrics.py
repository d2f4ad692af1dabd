"""What nodes announce as metrics: GPUs, machines, starts."""

from __future__ import annotations

import msgspec

from penstock.gateway.metrics import machine_metrics
from penstock.gateway.metrics.counters import OUTCOMES, Counters, families, write_metrics
from penstock.gateway.workers import reports
from penstock.gateway.workers.reports import WorkerReport
from penstock.wire.announcement import Announcement, GatewayView, GpuReading, MachineReading, ReplicaView
from penstock.wire.metric_names import METRICS

GPU = GpuReading(
    0,
    "GPU-1",
    "H100",
    utilization=0.5,
    memory_used_bytes=1,
    memory_total_bytes=2,
    power_watts=300.5,
    power_limit_watts=700.0,
    energy_joules=1e6,
    temperature_celsius=41,
    sm_clock_mhz=1980,
    memory_clock_mhz=2619,
    throttle=("sw_power_cap",),
    xids=(79,),
    n_xids=1,
)
NODE = MachineReading("n1", 0.25, 8, 10, 20, 30, 40, received_bytes=50, sent_bytes=60, gpus=(GPU,))


def announced(name: str = "0", **changes: object) -> Announcement:
    facts = {"machines": (NODE,), "engine": "vllm 0.33.0", "start_s": {"weights": 12.5}, "n_restarts": 2} | changes
    return Announcement(name, "m", "ready", 6.0, **facts)  # type: ignore[arg-type]


def text_of(*announcements: Announcement, is_alive: bool = True) -> str:
    rows = tuple(ReplicaView(announcement, 0.0, is_alive, False, 0) for announcement in announcements)
    return write_metrics(machine_metrics.families(GatewayView(rows, 0, 0, 0)), []).decode()


def test_a_gpu_has_a_series_of_each_family() -> None:
    lines = text_of(announced()).splitlines()
    gpu = 'replica="0",node="n1",gpu="0",uuid="GPU-1"'
    assert f"penstock_gpu_power_watts{{{gpu}}} 300.5" in lines
    assert f'penstock_gpu_clock_hertz{{{gpu},clock="sm"}} 1980000000' in lines
    assert f'penstock_gpu_throttled{{{gpu},reason="sw_power_cap"}} 1' in lines
    assert 'penstock_replica_start_seconds{replica="0",stage="weights"} 12.5' in lines
    assert 'penstock_engine_info{replica="0",engine="vllm 0.33.0"} 1' in lines
    assert 'penstock_replica_restarts_total{replica="0"} 2' in lines
    assert 'penstock_replica_state{replica="0",state="ready"} 1' in lines
    names = {line.split()[2].removeprefix("penstock_") for line in lines if line.startswith("# TYPE")}
    of_cost = {"gpu_seconds_total", "gpu_busy_seconds_total", "gpu_hour_usd"}
    announced_ones = {name for name in METRICS if name.startswith(("gpu_", "node_", "engine_info", "replica_"))}
    assert names == announced_ones - of_cost


def test_several_replicas_of_a_machine_give_it_one_series_and_a_dead_lease_none() -> None:
    text = text_of(announced("0"), announced("1"))
    assert text.count("penstock_node_disk_free_bytes{") == 1
    assert text.count("penstock_gpu_power_watts{") == 2
    assert "penstock_gpu" not in text_of(announced(machines=(MachineReading("n1"),)))
    assert text_of(announced(), is_alive=False) == ""


def test_what_the_driver_does_not_report_is_left_out() -> None:
    inside_mig = MachineReading("n1", gpus=(GpuReading(0, "MIG-1", memory_used_bytes=5),))
    lines = text_of(announced(machines=(inside_mig,))).splitlines()
    names = {line.partition("{")[0] for line in lines if "gpu=" in line}
    assert names == {"penstock_gpu_memory_used_bytes", "penstock_gpu_xid_errors_total"}


def test_hostile_words_are_escaped_and_bounded() -> None:
    name = 'a"} 1\npenstock_x{b="\\' + "x" * 1000
    gpus = tuple(
        GpuReading(index, name, power_watts=1e308 * 10, memory_used_bytes=10**400, throttle=(name,) * 99)
        for index in range(99)
    )
    hostile = announced(machines=(MachineReading(name, gpus=gpus),) * 99, start_s={f"{n}{name}": 1 for n in range(99)})
    lines = text_of(hostile).splitlines()
    names = ("# ", "penstock_gpu_xid", "penstock_gpu_thr", "penstock_replica_", "penstock_engine_")
    assert all(line.startswith(names) for line in lines)
    assert len(lines) < 200 and max(map(len, lines)) < 1000
    assert 'stage="0a\\"} 1\\npenstock_x{b=\\"\\\\xxx' in "\n".join(lines)


def test_what_every_worker_knows_outlives_no_worker() -> None:
    counts = [("gpu_xid_errors_total", {(): 1.0}), ("retries_total", {(): 2.0})]
    left = reports.ended(msgspec.msgpack.encode(WorkerReport(counts, [])))  # type: ignore[arg-type]
    assert [name for name, _ in left.families] == ["retries_total"]


def test_outcomes_are_written_before_the_first_of_them() -> None:
    """A counter that appears with its first value has not increased, for Prometheus."""
    counters = Counters(["m"])
    assert counters.n_served() == 0
    samples = dict(families(counters, GatewayView((), 0, 0, 0), {}, {}, {})[0][1])
    assert samples[("model", "m"), ("outcome", "no_replica")] == 0 and len(samples) == len(OUTCOMES)
