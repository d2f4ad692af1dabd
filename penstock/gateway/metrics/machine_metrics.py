"""Metrics of what nodes announce: GPUs, machines, and the starts of replicas. Pure.

A node is authenticated, and may still announce nonsense: lengths and numbers of series are bounded here, and values
that cannot be are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.gateway.metrics.counters import Family, Labels
from penstock.wire.announcement import GatewayView, GpuReading, ReplicaView

MAX_MACHINES = 64  # of a replica
MAX_GPUS = 32  # of a machine
MAX_WORDS = 32  # reasons of a GPU, stages of a start
MAX_LABEL_CHARS = 128
MAX_VALUE = 1e18  # a GPU's energy of a century is 1e12 J

Sample = tuple[str, Labels, float | None]

# Family -> field of the reading.
_OF_GPUS = {
    "gpu_utilization_ratio": "utilization",
    "gpu_memory_used_bytes": "memory_used_bytes",
    "gpu_memory_total_bytes": "memory_total_bytes",
    "gpu_power_watts": "power_watts",
    "gpu_power_limit_watts": "power_limit_watts",
    "gpu_energy_joules_total": "energy_joules",
    "gpu_temperature_celsius": "temperature_celsius",
    "gpu_xid_errors_total": "n_xids",
}
_OF_MACHINES = {
    "node_cpu_utilization_ratio": "cpu_use",
    "node_memory_used_bytes": "memory_used_bytes",
    "node_memory_total_bytes": "memory_total_bytes",
    "node_disk_free_bytes": "disk_free_bytes",
    "node_disk_total_bytes": "disk_total_bytes",
    "node_network_received_bytes_total": "received_bytes",
    "node_network_sent_bytes_total": "sent_bytes",
}


def families(view: GatewayView) -> list[Family]:
    """Of the replicas whose lease is alive; no family without a series. A machine with several replicas has one series
    of each `node_` family."""
    values: dict[str, dict[Labels, float]] = {}
    for row in view.replicas:
        for name, labels, value in _of_replica(row) if row.is_alive else ():
            if value is not None and 0 <= value < MAX_VALUE:
                values.setdefault(name, {})[labels] = value
    return list(values.items())


def _of_replica(row: ReplicaView) -> Iterator[Sample]:
    announcement = row.announcement
    replica = ("replica", announcement.replica)
    yield "replica_restarts_total", (replica,), announcement.n_restarts
    yield "replica_state", (replica, ("state", announcement.state)), 1
    if announcement.engine:
        yield "engine_info", (replica, ("engine", _cut(announcement.engine))), 1
    for stage, seconds in list(announcement.start_s.items())[:MAX_WORDS]:
        yield "replica_start_seconds", (replica, ("stage", _cut(stage))), seconds
    for machine in announcement.machines[:MAX_MACHINES]:
        node = ("node", _cut(machine.host))
        for name, field in _OF_MACHINES.items():
            yield name, (node,), getattr(machine, field)
        for gpu in machine.gpus[:MAX_GPUS]:
            yield from _of_gpu((replica, node, ("gpu", str(gpu.index)), ("uuid", _cut(gpu.uuid))), gpu)


def _of_gpu(labels: Labels, gpu: GpuReading) -> Iterable[Sample]:
    for name, field in _OF_GPUS.items():
        yield name, labels, getattr(gpu, field)
    for clock, mhz in (("sm", gpu.sm_clock_mhz), ("memory", gpu.memory_clock_mhz)):
        if mhz is not None:
            yield "gpu_clock_hertz", (*labels, ("clock", clock)), mhz * 1e6
    for reason in gpu.throttle[:MAX_WORDS]:
        yield "gpu_throttled", (*labels, ("reason", _cut(reason))), 1


def _cut(text: str) -> str:
    return text[:MAX_LABEL_CHARS]
