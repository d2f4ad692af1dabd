"""GPUs as NVML reports them: units, what is not supported, lost GPUs, MIG, which GPUs are a node's."""

from __future__ import annotations

import sys

import pytest

from penstock.node.gpu_readings import GpuReader
from penstock.testing.fake_nvml import FakeGpu, FakeNvml
from penstock.wire.announcement import GpuReading


def reader(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, visible: str | None = None, count: int = 8
) -> GpuReader:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return GpuReader(visible, count)


def test_readings_have_our_units(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = reader(monkeypatch, FakeNvml([FakeGpu("GPU-1", reasons=0x1 | 0x4 | 0x40)])).read()
    assert gpu == GpuReading(
        index=0,
        uuid="GPU-1",
        name="NVIDIA H100 80GB HBM3",
        utilization=0.37,
        memory_used_bytes=30 * 2**30,
        memory_total_bytes=80 * 2**30,
        power_watts=412.345,
        power_limit_watts=700.0,
        energy_joules=5_000_000.123,
        temperature_celsius=41,
        sm_clock_mhz=1980,
        memory_clock_mhz=2619,
        throttle=("sw_power_cap", "hw_thermal_slowdown"),
    )


@pytest.mark.parametrize("nvml", [None, FakeNvml([FakeGpu("GPU-1")], has_driver=False), FakeNvml()])
def test_without_package_driver_or_gpu_there_are_no_readings_and_no_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nvml: FakeNvml | None
) -> None:
    assert reader(monkeypatch, nvml).read() == ()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("field", "lacks"),
    [
        ("utilization", ["utilization"]),
        ("memory_used", ["memory_used_bytes", "memory_total_bytes"]),
        ("power_mw", ["power_watts"]),
        ("limit_mw", ["power_limit_watts"]),
        ("energy_mj", ["energy_joules"]),
        ("temperature", ["temperature_celsius"]),
        ("sm_mhz", ["sm_clock_mhz"]),
        ("memory_mhz", ["memory_clock_mhz"]),
        ("reasons", []),
    ],
)
def test_what_is_not_supported_is_none_and_the_rest_stays(
    monkeypatch: pytest.MonkeyPatch, field: str, lacks: list[str]
) -> None:
    (gpu,) = reader(monkeypatch, FakeNvml([FakeGpu("GPU-1", **{field: None})])).read()  # type: ignore[arg-type]
    assert [name for name in GpuReading.__struct_fields__ if getattr(gpu, name) is None] == lacks


def test_a_gpu_that_is_lost_keeps_its_name_and_the_other_its_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu("GPU-1"), FakeGpu("GPU-2")])
    readings = reader(monkeypatch, nvml)
    nvml.gpus[0].is_lost = True
    nvml.gpus[0].xids.append(79)
    lost, other = readings.read()
    assert (lost.uuid, lost.name, lost.power_watts, lost.memory_total_bytes) == ("GPU-1", other.name, None, None)
    assert (lost.xids, lost.n_xids, other.power_watts, other.n_xids) == ((79,), 1, 412.345, 0)
    nvml.gpus[0].xids += [94] * 20
    lost, _ = readings.read()
    assert (lost.xids, lost.n_xids) == ((94,) * 16, 21), "errors are counted, and the last are kept"


def test_older_drivers_are_asked_by_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeNvml(
        [FakeGpu("GPU-1", reasons=0x4, has_memory_v2=False)], without=["nvmlDeviceGetCurrentClocksEventReasons"]
    )
    (gpu,) = reader(monkeypatch, old).read()
    assert (gpu.throttle, gpu.memory_used_bytes) == (("sw_power_cap",), 30 * 2**30 + 2**29)


@pytest.mark.parametrize(
    ("visible", "count", "uuids"),
    [
        (None, 8, ["GPU-a1", "GPU-b2", "GPU-c3"]),
        (None, 2, ["GPU-a1", "GPU-b2"]),
        ("2,0", 8, ["GPU-c3", "GPU-a1"]),
        ("GPU-b, GPU-c3", 8, ["GPU-b2", "GPU-c3"]),
        ("1,9,0", 8, ["GPU-b2"]),
        ("", 8, []),
        ("-1", 8, []),
    ],
)
def test_the_gpus_are_those_that_cuda_would_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, uuids: list[str]
) -> None:
    nvml = FakeNvml([FakeGpu("GPU-a1"), FakeGpu("GPU-b2"), FakeGpu("GPU-c3")])
    assert [gpu.uuid for gpu in reader(monkeypatch, nvml, visible, count).read()] == uuids


def test_a_slice_has_its_own_memory_and_the_errors_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    part = FakeGpu("MIG-1", utilization=None, power_mw=None, energy_mj=None, memory_used=5, memory_total=10 * 2**30)
    nvml = FakeNvml([FakeGpu("GPU-1", slices=(part, FakeGpu("MIG-2")), xids=[94])])
    (gpu,) = reader(monkeypatch, nvml, "MIG-1").read()
    assert (gpu.index, gpu.uuid, gpu.utilization, gpu.power_watts) == (0, "MIG-1", None, None)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.xids) == (5, 10 * 2**30, (94,))
