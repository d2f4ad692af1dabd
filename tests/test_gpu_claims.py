"""GPUs on a machine that nobody shares out: two nodes never take the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import PenstockError, UserError
from penstock.hardware import Gpu
from penstock.node import gpu_locks, gpu_memory
from penstock.paths import gpu_locks_folder, is_private
from penstock.text import GIB


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path


def machine(*free_gib: int) -> list[Gpu]:
    return [Gpu(index, "H200", 100 * GIB, free * GIB) for index, free in enumerate(free_gib)]


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(gpu_memory, "_POLL_S", 0.01)


def test_two_nodes_take_different_gpus_and_none_that_somebody_fills() -> None:
    first = gpu_locks.claim(2, 0.9, look=lambda: machine(100, 100, 100, 100))
    second = gpu_locks.claim(2, 0.9, look=lambda: machine(100, 100, 100, 100))
    assert (first.indices, second.indices) == ((0, 1), (2, 3))
    with pytest.raises(PenstockError, match="could not get 1 GPUs"):
        gpu_locks.claim(1, 0.9, wait_s=0.0, look=lambda: machine(100, 100, 100, 100))
    first.release()
    assert gpu_locks.claim(1, 0.9, wait_s=0.0, look=lambda: machine(10, 100, 100, 100)).indices == (1,)


def test_a_lock_folder_that_others_reach_is_refused(folder: Path) -> None:
    """Another user could make it first, with links in it, and hold all locks."""
    place, elsewhere = gpu_locks_folder(), folder / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    place.symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link, or other users can reach it") as refusal:
        gpu_locks.claim(1, 0.9, look=lambda: machine(100))
    assert "TMPDIR" in str(refusal.value.hint) and list(elsewhere.iterdir()) == []
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(UserError, match="other users"):
        gpu_locks.claim(1, 0.9, look=lambda: machine(100))
    place.chmod(0o700)
    assert gpu_locks.claim(1, 0.9, look=lambda: machine(100)).indices == (0,)


def test_a_folder_of_another_user_is_not_private(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "theirs").mkdir(mode=0o700)
    assert is_private(folder / "theirs")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not is_private(folder / "theirs")


@pytest.mark.loopback
def test_it_waits_for_the_memory_of_a_dead_one_and_a_refusal_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PenstockError, match=r"GPU 0 10\.0 GiB"):
        gpu_locks.claim(1, 0.9, wait_s=0.0, look=lambda: machine(10))
    with pytest.raises(PenstockError, match="it has none"):
        gpu_locks.claim(1, 0.9, wait_s=0.0, look=list)
    monkeypatch.setattr(gpu_locks, "_POLL_S", 0.001)
    looks = iter([machine(10), machine(50), machine(100)])
    assert gpu_locks.claim(1, 0.9, look=lambda: next(looks)).indices == (0,)


NVIDIA_SMI = """#!/bin/sh
for index in 0 1; do
  read free <"${0%/*}/free$index"
  echo "$index, GPU-$index, NVIDIA H200, 143771, $free"
  [ "$free" -ge 143000 ] || echo $((free + step)) >"${0%/*}/free$index"
done
"""


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(("step", "held"), [(70_000, None), (0, "GPU 1 134 GiB")])
def test_the_end_of_an_engine_waits_for_the_memory_of_its_gpus_and_says_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, held: str | None
) -> None:
    """Killed, an engine on four H200s held 134 GB for seconds."""
    install_nvidia_smi(tmp_path, monkeypatch, NVIDIA_SMI.replace("step))", f"{step}))"))
    for free_mib, index in ((143_000, 0), (143_000, 1)):
        (tmp_path / f"free{index}").write_text(f"{free_mib}\n")
    memory = gpu_memory.GpuMemory([1])
    for free_mib, index in ((1_000, 0), (5_784, 1)):  # the first is another engine's
        (tmp_path / f"free{index}").write_text(f"{free_mib}\n")
    assert memory.wait_free(timeout_s=1.0 if held is None else 0.0) == held


NVIDIA_SMI_APPS = """#!/bin/sh
case "$*" in
*query-gpu*) echo "0, GPU-0"; echo "1, GPU-1";;
*) read left <"${0%/*}/left"; [ "$left" = 0 ] || echo "GPU-1, 77, 128000, VLLM::Worker"
   [ "$left" -ge 9 ] || echo $((left - 1)) >"${0%/*}/left";;
esac
"""


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(("left", "held"), [(2, None), (9, "GPU 1 125 GiB (process 77)")])
def test_down_waits_until_the_driver_lists_none_of_the_ended_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, held: str | None
) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, NVIDIA_SMI_APPS)
    (tmp_path / "left").write_text(f"{left}\n")
    assert gpu_memory.wait_released({5, 77}, 5.0 if held is None else 0.0) == held
    assert gpu_memory.wait_released({5}, 0.0) is None, "the memory of others is theirs"
