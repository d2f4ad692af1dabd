"""Snapshots as a gateway streams them: a deployment with a day of work behind it. Values depend on the time alone."""

from __future__ import annotations

import math

import msgspec
from golden_files import table
from msgspec.structs import replace

from penstock.wire.announcement import GpuReading, MachineReading, Progress
from penstock.wire.live import HISTORY_S, PERIOD_S, History, Rates, ReplicaLive, Snapshot

AT = 1_795_384_800.0
GIB = 2**30
SAMPLE = msgspec.convert(table("live.yaml"), Snapshot)
READY, LOADING = SAMPLE.replicas
(MACHINE,) = READY.machines
(GPU,) = MACHINE.gpus


def _wave(at: float, period_s: float, phase: float = 0.0) -> float:
    return 0.5 + 0.5 * math.sin(2 * math.pi * at / period_s + phase)


def _noise(at: float, seed: float) -> float:
    """0 to 1, the same for the same second."""
    return math.modf(abs(math.sin(at * 12.9898 + seed * 78.233)) * 43758.5453)[0]


def rates(at: float) -> Rates:
    load = 0.35 + 0.45 * _wave(at, 2900, 1.0) + 0.12 * _wave(at, 610) + 0.08 * _noise(at, 1)
    burst = max(0.0, _wave(at, 1700, 2.2) - 0.93) * 14
    return Rates(
        at=at,
        requests_per_s=34 * load,
        errors_per_s=0.2 if _noise(at, 2) > 0.985 else 0.0,
        prompt_tokens_per_s=21_400 * load * (0.9 + 0.2 * _noise(at, 3)),
        output_tokens_per_s=8_900 * load * (0.95 + 0.1 * _noise(at, 4)),
        ttft_s_p50=0.11 + 0.16 * load + 0.03 * _noise(at, 5),
        ttft_s_p99=0.42 + 0.9 * load + 1.2 * burst + 0.2 * _noise(at, 6),
        itl_s_p50=0.0072 + 0.004 * load,
        itl_s_p99=0.019 + 0.02 * load + 0.006 * _noise(at, 7),
        in_flight=round(190 * load + 20 * burst),
        waiting=round(22 * burst),
        engine_waiting=float(round(30 * burst + 3 * _noise(at, 8))),
        kv_use=min(0.97, 0.25 + 0.6 * load),
        n_ready=3,
        n_desired=4,
        gpu_use=min(1.0, 0.55 + 0.5 * load),
        power_watts=4300 + 5200 * load,
    )


def history(at: float = AT, seconds: float = HISTORY_S) -> History:
    rows = [rates(at - seconds + PERIOD_S * i) for i in range(int(seconds / PERIOD_S))]
    names = Rates.__struct_fields__
    return History(PERIOD_S, {name: [getattr(row, name) for row in rows] for name in names})


def _gpu(at: float, host: int, index: int) -> GpuReading:
    busy = min(1.0, 0.7 + 0.3 * _noise(at, host * 8 + index))
    gpu = replace(
        GPU,
        index=index,
        uuid=f"GPU-{host:04d}-{index}",
        utilization=busy,
        power_watts=380 + 270 * busy,
        temperature_celsius=52 + 14 * busy,
    )
    if (host, index) == (1, 5):
        return replace(gpu, temperature_celsius=81.0, sm_clock_mhz=1410.0, throttle=("sw thermal slowdown",))
    return replace(gpu, xids=(94,), n_xids=1) if (host, index) == (2, 3) else gpu


def machine(at: float, host: int, gpus: range = range(8)) -> MachineReading:
    return replace(
        MACHINE,
        host=f"gpu-{host:02d}.cluster",
        cpu_use=0.09 + 0.04 * _noise(at, host),
        memory_used_bytes=int((212 + 9 * host) * GIB),
        received_bytes=int(at * 4.1e7) % 10**15,
        sent_bytes=int(at * 1.9e7) % 10**15,
        gpus=tuple(_gpu(at, host, index) for index in gpus),
    )


def _ready(at: float, number: int, host: int) -> ReplicaLive:
    now = rates(at + 97 * number)
    same = ("kv_use", "ttft_s_p50", "ttft_s_p99", "itl_s_p50", "itl_s_p99")
    return replace(
        READY,
        replica=str(number),
        host=f"gpu-{host:02d}.cluster",
        in_flight=now.in_flight // 3,
        running=float(now.in_flight // 3),
        waiting=float(now.engine_waiting // 3),
        prompt_tokens_per_s=(now.prompt_tokens_per_s or 0) / 3,
        output_tokens_per_s=(now.output_tokens_per_s or 0) / 3,
        cache_hits=0.31 + 0.02 * number,
        n_restarts=1 if number == 1 else 0,
        up_s=at - AT + 86_400 * (3 - number % 3) + 5000 * number,
        machines=(machine(at, host),),
        **{name: getattr(now, name) for name in same},
    )


def _loading(at: float, host: int) -> ReplicaLive:
    done = 3 + int(at - AT) // 4 % 27
    progress = Progress("loading weights", done, 30, 2.4e9, (30 - done) * 4.0, done / 30)
    return replace(LOADING, host=f"gpu-{host:02d}.cluster", progress=progress, machines=(machine(at, host, range(0)),))


def snapshot(at: float = AT) -> Snapshot:
    return replace(
        SAMPLE,
        at=at,
        now=rates(at),
        replicas=(*(_ready(at, number, number) for number in range(3)), _loading(at, 3)),
        slow=tuple(replace(request, at=at + request.at) for request in SAMPLE.slow),
        events=tuple(replace(event, at=AT + event.at) for event in SAMPLE.events),
    )


def many(at: float = AT, n: int = 24) -> Snapshot:
    """A deployment of `n` small replicas, two on each machine, some of them in other states."""
    states = {3: "stalled", 7: "restarting", 11: "queued", 19: "stopping"}
    rows = []
    for number in range(n):
        row = _ready(at, number, number // 2)
        if number in states:
            row = ReplicaLive(row.replica, row.model, states[number], row.host, reason="for a test")
        rows.append(replace(row, machines=(machine(at, number // 2, range(0)),)))
    rows[5] = replace(rows[5], is_ejected=True)
    rows[6] = replace(rows[6], is_draining=True)
    return replace(snapshot(at), replicas=tuple(rows), reason=None, phase="ready")
