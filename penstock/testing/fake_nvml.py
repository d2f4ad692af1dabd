"""A module like pynvml, for tests without a GPU: put `FakeNvml(...)` into sys.modules as "pynvml"."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec


class FakeGpu(msgspec.Struct):
    """A GPU with NVML's units: MHz, mW, mJ, bytes, %. A field that is None is not supported. `xids`: not read yet."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    utilization: int | None = 37
    memory_used: int | None = 30 * 2**30
    memory_total: int = 80 * 2**30
    power_mw: int | None = 412_345
    limit_mw: int | None = 700_000
    energy_mj: int | None = 5_000_000_123
    temperature: int | None = 41
    sm_mhz: int | None = 1980
    memory_mhz: int | None = 2619
    reasons: int | None = 0x1
    xids: list[int] = []
    is_lost: bool = False
    has_memory_v2: bool = True
    slices: Sequence[FakeGpu] = ()


class FakeNvml(types.ModuleType):
    """`calls` counts the calls by name. `without`: functions that the driver lacks."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    nvmlMemory_v2 = 0x02000028
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        """Any error."""

    def __init__(self, gpus: Sequence[FakeGpu] = (), *, has_driver: bool = True, without: Sequence[str] = ()) -> None:
        super().__init__("pynvml")
        self.gpus, self.has_driver, self.without = list(gpus), has_driver, without
        self.calls: dict[str, int] = {}
        fields: Mapping[str, str] = {
            "nvmlDeviceGetUUID": "uuid",
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetPowerUsage": "power_mw",
            "nvmlDeviceGetEnforcedPowerLimit": "limit_mw",
            "nvmlDeviceGetTotalEnergyConsumption": "energy_mj",
            "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons": "reasons",
        }
        for name, field in fields.items():
            setattr(self, name, self._reader(name, field))

    def _reader(self, name: str, field: str) -> Callable[[FakeGpu], Any]:
        return lambda gpu: self._supported(name, gpu, getattr(gpu, field))

    def _supported(self, name: str, gpu: FakeGpu, value: Any) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        is_known = name in ("nvmlDeviceGetUUID", "nvmlDeviceGetName")
        if value is None or name in self.without or (gpu.is_lost and not is_known):
            raise self.NVMLError("GPU is lost" if gpu.is_lost else "Not Supported")
        return value

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if not gpu.slices:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.slices):
            raise self.NVMLError("Not Found")
        return gpu.slices[index]

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(gpu=self._supported("nvmlDeviceGetUtilizationRates", gpu, gpu.utilization))

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        used = self._supported("nvmlDeviceGetMemoryInfo", gpu, gpu.memory_used)
        if version is not None and not gpu.has_memory_v2:
            raise self.NVMLError("Function Not Found")
        reserved = 0 if version is not None else 2**29  # the first version counts it as used
        return SimpleNamespace(used=used + reserved, total=gpu.memory_total)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return int(self._supported("nvmlDeviceGetTemperature", gpu, gpu.temperature))

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, clock: int) -> int:
        mhz = gpu.sm_mhz if clock == self.NVML_CLOCK_SM else gpu.memory_mhz
        return int(self._supported("nvmlDeviceGetClockInfo", gpu, mhz))

    def nvmlEventSetCreate(self) -> list[FakeGpu]:
        return []

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, kinds: int, events: list[FakeGpu]) -> None:
        self._supported("nvmlDeviceRegisterEvents", gpu, gpu.uuid)
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[FakeGpu], timeout_ms: int) -> Any:
        assert timeout_ms == 0
        for gpu in events:
            if gpu.xids:
                return SimpleNamespace(eventType=8, eventData=gpu.xids.pop(0))
        raise self.NVMLError("Timeout")
