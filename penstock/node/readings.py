"""This machine and this node's GPUs, read once a second by a thread."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil

from penstock.node.gpu_readings import GpuReader
from penstock.paths import nearest_existing
from penstock.wire.announcement import MachineReading
from penstock.world import REAL, World

PERIOD_S = 1.0
STALE_S = 10.0  # a driver that hangs must not leave its last numbers on display
# https://docs.nvidia.com/datacenter/dcgm/latest/gpu-telemetry/dcgm-exporter.html
_DCGM_PORT, _DCGM_EVERY_S, _DCGM_TIMEOUT_S = 9400, 60.0, 0.5
_DCGM_READ_BYTES = 65536
_NETWORK = Path("/sys/class/net")


class MachineReader:
    """`folder`: whose file system is the machine's disk. CPU use is that since the last `read`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        psutil.cpu_percent()  # the first call has nothing to compare with

    def read(self) -> MachineReading:
        memory, cpu_use = psutil.virtual_memory(), psutil.cpu_percent() / 100
        received, sent = _network_bytes()
        free, total = self._disk()
        return MachineReading(
            host=socket.gethostname(), cpu_use=round(cpu_use, 4), n_cpus=psutil.cpu_count(),
            memory_used_bytes=memory.total - memory.available, memory_total_bytes=memory.total,
            disk_free_bytes=free, disk_total_bytes=total, received_bytes=received, sent_bytes=sent,
        )  # fmt: skip

    def _disk(self) -> tuple[int, int] | tuple[None, None]:
        """Free for this user, and the size without what is kept for root."""
        with contextlib.suppress(OSError):
            usage = psutil.disk_usage(str(nearest_existing(self._folder)))
            return usage.free, usage.used + usage.free
        return None, None


def _network_bytes() -> tuple[int, int] | tuple[None, None]:
    """Received and sent: of the network cards where there are any, since what a bridge or a bond carries passes one of
    them too; else of all interfaces but loopback, as in a container."""
    counters = psutil.net_io_counters(pernic=True)
    cards = [name for name in counters if (_NETWORK / name / "device").exists()]
    names = cards or [name for name in counters if name != "lo"]
    if not names:
        return None, None
    return sum(counters[name].bytes_recv for name in names), sum(counters[name].bytes_sent for name in names)


def answers_as_dcgm(port: int = _DCGM_PORT) -> bool:
    """Whether a DCGM exporter serves its metrics on this port of this machine. Blocks for at most a second."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DCGM_TIMEOUT_S)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return b"DCGM_FI_" in connection.getresponse().read1(_DCGM_READ_BYTES)
    return False


class Readings:
    """Reads every second once started, in one thread: a slow reading delays the next and adds no other."""

    def __init__(
        self,
        read: Callable[[], MachineReading],
        finds_dcgm: Callable[[], bool] = answers_as_dcgm,
        world: World = REAL,
    ) -> None:
        self._world = world
        self._read, self._finds_dcgm = read, finds_dcgm
        self._gpus: GpuReader | None = None
        self._newest: tuple[float, MachineReading] | None = None
        self._dcgm_port: int | None = None
        self._next_dcgm_s = 0.0

    def start(self) -> None:
        self._world.thread(self.run, "readings")

    def use_gpus(self, environment: Mapping[str, str], count: int) -> None:
        """Also read the GPUs that an engine with this environment gets. Any thread; more than once does nothing."""
        if self._gpus is None and count:
            self._gpus = GpuReader(environment.get("CUDA_VISIBLE_DEVICES"), count)

    def latest(self) -> MachineReading | None:
        """None before the first reading, and when the last is too old to show. Any thread."""
        newest = self._newest
        return newest[1] if newest is not None and self._world.now() - newest[0] < STALE_S else None

    def run(self) -> None:
        next_s = self._world.now()
        while True:
            with contextlib.suppress(Exception):  # no reading is worth an engine, nor a line a second in its log
                self.look(self._world.now())
            next_s = max(next_s + PERIOD_S, self._world.now())
            self._world.sleep(max(0.0, next_s - self._world.now()))

    def look(self, now: float) -> None:
        """One reading. `now`: monotonic."""
        gpus = self._gpus.read() if self._gpus is not None else ()
        if gpus and now >= self._next_dcgm_s:
            self._next_dcgm_s = now + _DCGM_EVERY_S
            self._dcgm_port = _DCGM_PORT if self._finds_dcgm() else None
        machine = msgspec.structs.replace(self._read(), gpus=gpus, dcgm_port=self._dcgm_port if gpus else None)
        self._newest = (self._world.now(), machine)
