"""Snapshots as a gateway streams them: a deployment with a day of work behind it. Values depend on the time alone."""

from __future__ import annotations

import math

import msgspec

from penstock.wire.announcement import GpuReading, MachineReading, Progress
from penstock.wire.live import (
    HISTORY_S,
    PERIOD_S,
    Attainment,
    Cost,
    Event,
    History,
    KeyUse,
    Rates,
    ReplicaLive,
    SlowRequest,
    Snapshot,
)

AT = 1_795_384_800.0
GIB = 2**30
MODEL = "qwen3-235b-a22b"


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
    is_hot = host == 1 and index == 5
    return GpuReading(
        index=index,
        uuid=f"GPU-{host:04d}-{index}",
        name="NVIDIA H100 80GB HBM3",
        utilization=busy,
        memory_used_bytes=int(71.5 * GIB),
        memory_total_bytes=80 * GIB,
        power_watts=380 + 270 * busy,
        power_limit_watts=700.0,
        temperature_celsius=81.0 if is_hot else 52 + 14 * busy,
        sm_clock_mhz=1410.0 if is_hot else 1980.0,
        memory_clock_mhz=2619.0,
        throttle=("sw thermal slowdown",) if is_hot else (),
        xids=(94,) if host == 2 and index == 3 else (),
        n_xids=1 if host == 2 and index == 3 else 0,
    )


def machine(at: float, host: int, gpus: range = range(8)) -> MachineReading:
    return MachineReading(
        host=f"gpu-{host:02d}.cluster",
        cpu_use=0.09 + 0.04 * _noise(at, host),
        n_cpus=128,
        memory_used_bytes=int((212 + 9 * host) * GIB),
        memory_total_bytes=1024 * GIB,
        disk_free_bytes=2_310 * GIB,
        disk_total_bytes=7_000 * GIB,
        received_bytes=int(at * 4.1e7) % 10**15,
        sent_bytes=int(at * 1.9e7) % 10**15,
        gpus=tuple(_gpu(at, host, index) for index in gpus),
    )


def _ready(at: float, number: int, host: int) -> ReplicaLive:
    now = rates(at + 97 * number)
    return ReplicaLive(
        replica=str(number),
        model=MODEL,
        state="ready",
        host=f"gpu-{host:02d}.cluster",
        engine="vllm",
        in_flight=now.in_flight // 3,
        running=float(now.in_flight // 3),
        waiting=float(now.engine_waiting // 3),
        kv_use=now.kv_use,
        prompt_tokens_per_s=(now.prompt_tokens_per_s or 0) / 3,
        output_tokens_per_s=(now.output_tokens_per_s or 0) / 3,
        ttft_s_p50=now.ttft_s_p50,
        ttft_s_p99=now.ttft_s_p99,
        itl_s_p50=now.itl_s_p50,
        itl_s_p99=now.itl_s_p99,
        cache_hits=0.31 + 0.02 * number,
        n_restarts=1 if number == 1 else 0,
        up_s=at - AT + 86_400 * (3 - number % 3) + 5000 * number,
        machines=(machine(at, host),),
    )


def _loading(at: float, host: int) -> ReplicaLive:
    done = 3 + int(at - AT) // 4 % 27
    progress = Progress("loading weights", done, 30, 2.4e9, (30 - done) * 4.0, done / 30)
    return ReplicaLive(
        replica="3",
        model=MODEL,
        state="loading",
        host=f"gpu-{host:02d}.cluster",
        engine="vllm",
        progress=progress,
        n_restarts=2,
        reason="the engine died: CUDA out of memory",
        machines=(msgspec.structs.replace(machine(at, host), gpus=()),),
    )


_EVENTS = (
    Event(AT - 9000, "up", "Qwen/Qwen3-235B-A22B on target slurm", who="ann@login1"),
    Event(AT - 8700, "replica ready", "ready after 1m49s", "0", None, {"weights": 61.0, "compile": 38.2}),
    Event(AT - 8690, "replica ready", "ready after 1m52s", "1", None, {"weights": 64.0, "compile": 38.9}),
    Event(AT - 8689, "phase", "starting -> ready"),
    Event(AT - 5200, "engine restarted", "CUDA error 700: an illegal memory access", "1"),
    Event(AT - 5090, "replica ready", "ready after 1m12s", "1", None, {"weights": 58.5, "compile": 4.2}),
    Event(AT - 2400, "key created", '"batch"', who="ann@login1"),
    Event(AT - 700, "scale", "3 -> 4 replicas", who="ann@login1"),
    Event(AT - 699, "phase", "ready -> degraded"),
    Event(AT - 400, "engine restarted", "the engine died: CUDA out of memory", "3"),
)
_SLOW = (
    ("batch", "broken", 502, 24.8, 9.1, 0.0012, 0.9, 14.8),
    ("notebook", "complete", 200, 21.3, 0.0, 0.0009, 1.4, 19.9),
    ("website", "complete", 200, 17.2, 7.4, 0.0011, 3.2, 6.6),
    ("batch", "complete", 200, 12.9, 0.0, 0.0008, 11.6, 1.3),
    ("website", "client_gone", 200, 9.4, 0.2, 0.2300, 0.5, 8.5),
)


def _slow(at: float) -> tuple[SlowRequest, ...]:
    rows = []
    for i, (key, outcome, status, took, hold, own, first, stream) in enumerate(_SLOW):
        who, times = (f"req-{7919 * (i + 3):x}c0ffee", key, MODEL, str(i % 3)), (took, hold, own, first, stream)
        n_tokens = (412 + 977 * i, int(stream * 95))
        trace_id = f"{0xA3CE929D0E0E4736 + i:016x}{0x4BF92F3577B34DA6:016x}" if i % 2 == 0 else None
        rows.append(SlowRequest(at - 300 * (i + 1), *who, outcome, status, *times, *n_tokens, trace_id))
    return tuple(rows)


def snapshot(at: float = AT) -> Snapshot:
    return Snapshot(
        deployment="qwen3-235b",
        at=at,
        version="0.1.0",
        now=rates(at),
        phase="degraded",
        reason="replica 3 is loading again after 2 restarts",
        replicas=(_ready(at, 0, 0), _ready(at, 1, 1), _ready(at, 2, 2), _loading(at, 3)),
        slo=Attainment(1000.0, 30.0, 0.9934, 0.9716),
        cost=Cost(78.4, 2.31, 0.184, 0.92),
        keys=(
            KeyUse("website", MODEL, 812_044, 2_931_440_120, 391_220_431, 6402.18),
            KeyUse("batch", MODEL, 90_113, 913_220_004, 202_331_090, 2719.6),
            KeyUse("notebook", MODEL, 1_201, 3_100_220, 901_233, 9.47),
        ),
        slow=_slow(at),
        events=_EVENTS,
    )


def many(at: float = AT, n: int = 24) -> Snapshot:
    """A deployment of `n` small replicas, two on each machine, some of them in other states."""
    states = {3: "stalled", 7: "restarting", 11: "queued", 19: "stopping"}
    rows = []
    for number in range(n):
        row = _ready(at, number, number // 2)
        if number in states:
            row = ReplicaLive(row.replica, row.model, states[number], row.host, reason="for a test")
        rows.append(msgspec.structs.replace(row, machines=(machine(at, number // 2, range(0)),)))
    rows[5] = msgspec.structs.replace(rows[5], is_ejected=True)
    rows[6] = msgspec.structs.replace(rows[6], is_draining=True)
    return msgspec.structs.replace(snapshot(at), replicas=tuple(rows), reason=None, phase="ready")
