"""Readings of GPUs by NVML, the library behind nvidia-smi.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
Every call may fail by itself: not supported (inside MIG, on some cards), no permission, a GPU that fell off the bus.
Then that field is None and the others stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.wire.announcement import GpuReading

# Why clocks are lowered: bits of nvmlDeviceGetCurrentClocksEventReasons, without 0x1 (idle).
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
THROTTLE = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_KEPT_XIDS = 16
_MOST_EVENTS = 64  # in one reading

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class _Device:
    """A GPU, or a slice of one (MIG): `parent` is the whole GPU's handle, which alone reports errors."""

    index: int
    uuid: str
    handle: Any
    parent: Any


class GpuReader:
    """The GPUs that a process with these CUDA_VISIBLE_DEVICES (None: not set) would use, at most `count`.

    No GPUs where there is no driver. Not for several threads.
    """

    def __init__(self, visible: str | None, count: int) -> None:
        self._gpus: list[_GpuSeries] = []
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no package, no library, no driver, one that does not fit: there are no GPUs
            return
        devices = chosen(list(_devices(pynvml)), visible)[:count]
        self._gpus = [_GpuSeries(pynvml, device) for device in devices]

    def read(self) -> tuple[GpuReading, ...]:
        """Blocks for some milliseconds a GPU, with a driver in trouble for longer."""
        return tuple(gpu.read() for gpu in self._gpus)


def chosen(devices: Sequence[_Device], visible: str | None) -> list[_Device]:
    """The devices of CUDA_VISIBLE_DEVICES, in its order: indices, or (beginnings of) UUIDs. As CUDA does, it ends at
    the first word that names none."""
    if visible is None:
        return list(devices)
    named: list[_Device] = []
    for word in (word.strip() for word in visible.split(",")):
        device = next(
            (one for one in devices if word and (word == str(one.index) or one.uuid.startswith(word))),
            None,
        )
        if device is None or device in named:
            break
        named.append(device)
    return named


def _devices(nvml: Any) -> Iterator[_Device]:
    """All that the driver lists, the slices of a GPU in place of the GPU."""
    for index in range(_ask(nvml.nvmlDeviceGetCount) or 0):
        handle = _ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        mode = _ask(nvml.nvmlDeviceGetMigMode, handle)
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            yield _Device(index, _ask(nvml.nvmlDeviceGetUUID, handle) or f"index-{index}", handle, handle)
            continue
        for number in range(_ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = _ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is not None:
                yield _Device(index, _ask(nvml.nvmlDeviceGetUUID, part) or f"index-{index}-{number}", part, handle)


class _GpuSeries:
    """One GPU from reading to reading."""

    def __init__(self, nvml: Any, device: _Device) -> None:
        self._nvml, self._device = nvml, device
        self._name = str(self._read("nvmlDeviceGetName") or "")
        self._xids: list[int] = []
        self._n_xids = 0
        self._events: Any = None
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(device.parent, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read(self) -> GpuReading:
        nvml = self._nvml
        self._take_xids()
        use = self._read("nvmlDeviceGetUtilizationRates")
        # The second version counts what the driver keeps for itself apart, as nvidia-smi does.
        memory = self._read("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None))
        memory = memory or self._read("nvmlDeviceGetMemoryInfo")
        reasons = self._read("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before driver 535
            reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return GpuReading(
            index=self._device.index,
            uuid=self._device.uuid,
            name=self._name,
            utilization=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=_thousandth(self._read("nvmlDeviceGetPowerUsage")),
            power_limit_watts=_thousandth(self._read("nvmlDeviceGetEnforcedPowerLimit")),
            energy_joules=_thousandth(self._read("nvmlDeviceGetTotalEnergyConsumption")),
            temperature_celsius=self._read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            throttle=tuple(word for bit, word in THROTTLE.items() if (reasons or 0) & bit),
            xids=tuple(self._xids),
            n_xids=self._n_xids,
        )

    def _read(self, name: str, *arguments: Any) -> Any:
        call = getattr(self._nvml, name, None)
        return None if call is None else _ask(call, self._device.handle, *arguments)

    def _take_xids(self) -> None:
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            event = _ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)  # without an event: a timeout
            if event is None:
                return
            if event.eventType & self._nvml.nvmlEventTypeXidCriticalError:
                self._n_xids += 1
                self._xids = [*self._xids, int(event.eventData)][-_KEPT_XIDS:]


def _ask(call: Callable[..., _T], *arguments: Any) -> _T | None:
    """None where it fails: NVMLError, and whatever ctypes makes of a library that is older than its wrapper."""
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001 - NVMLError is known only where the package is
        return None


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
