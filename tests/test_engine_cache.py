"""What an engine compiles is kept for its next start, in a folder that only this user can write to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from samples import LLAMA_70B, deployment, gpu_machine

from penstock.engines import Command, Place, Seen
from penstock.engines.vllm import names
from penstock.engines.vllm.engine import Vllm
from penstock.node import engine_cache, engine_process
from penstock.planner import Plan, launch
from penstock.planner.launch import Sized
from penstock.wire.announcement import Progress

VLLM = Vllm()
KEPT = Place("127.0.0.1", 41000, "/tmp/penstock-0a1b2c-0", "/venv/bin/python", cache="/home/me/cache")
PARTS = Path("engine-cache/vllm-0.33.0/NVIDIA-H100-580.65")


def plan(version: str = "0.33.0", **fields: Any) -> Plan:
    made = launch.make_on_gpus(deployment(), LLAMA_70B, gpu_machine(8), version, 1, Sized(not_modelled="a test"))
    return msgspec.structs.replace(made, **fields)


def folder(environment: dict[str, str] | None = None, **fields: Any) -> str | None:
    return engine_cache.folder_for(VLLM, plan(**fields), environment or {}, lambda: "NVIDIA H100, 580.65")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o755)
    return tmp_path / "home"


def test_the_folder_is_of_one_version_gpu_and_driver_and_only_its_owners(home: Path) -> None:
    assert folder() == str(home / PARTS)
    assert (home / PARTS).stat().st_mode & 0o777 == 0o700
    assert folder(version="0.34.1") != folder()


def test_a_user_who_keeps_it_elsewhere_and_a_cpu_get_none(home: Path) -> None:
    assert folder({names.CACHE_ROOT: "/mine"}) is None
    assert folder(device="cpu") is None
    assert engine_cache.folder_for(VLLM, plan(), {}, lambda: "") is None
    assert not list(home.iterdir())


def test_a_folder_that_others_can_replace_is_not_used_and_the_start_goes_on(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.chmod(0o775)
    assert folder() is None
    assert f"other users can write to {home} (chmod go-w {home})" in capsys.readouterr().out
    home.chmod(0o755)
    (home / "engine-cache").rename(home / "other")
    (home / "engine-cache").write_text("")
    assert folder() is None
    assert "are not kept" in capsys.readouterr().out


def test_another_share_of_the_gpu_has_another_startup_plan_and_the_same_compiled_code() -> None:
    first, other = (VLLM.command(plan(gpu_memory_utilization=share), KEPT) for share in (0.9, 0.5))
    assert first.defaults[names.CACHE_ROOT] != other.defaults[names.CACHE_ROOT]
    assert first.defaults["TRITON_CACHE_DIR"] == other.defaults["TRITON_CACHE_DIR"] == "/home/me/cache/triton"
    assert set(first.links.values()) == set(other.links.values()) >= {"/home/me/cache/torch_compile_cache"}
    assert VLLM.command(plan(gpu_memory_utilization=0.9), KEPT) == first


def test_a_start_with_what_was_compiled_before_is_read_from_its_log() -> None:
    for line in ("Directly load AOT compilation from path /x", "Directly load the compiled graph(s)"):
        assert VLLM.read(line, Seen(Progress("weights")), plan()).progress.stage == "compile"
    line = "Initial free memory 78.61 GiB, reserved 55.62 GiB memory for KV Cache as specified by kv_cache_memory_bytes"
    seen = VLLM.read(line, Seen(Progress("compile")), plan())
    assert (seen.measured, seen.progress.stage) == ({"kv_cache_gib": 55.62}, "kv cache")


@pytest.mark.parametrize(("version", "is_on"), [("0.31.2", False), ("0.32.0", True), ("0.33.0", True), ("mine", False)])
def test_the_startup_plan_is_used_where_the_version_has_it(version: str, is_on: bool) -> None:
    assert ("VLLM_ENABLE_STARTUP_PLAN" in VLLM.command(plan(version), KEPT).defaults) is is_on


def test_the_values_of_the_file_and_of_the_nodes_own_environment_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = VLLM.command(plan(env={"TRITON_CACHE_DIR": "/mine"}), KEPT)
    assert (command.defaults | command.env)["TRITON_CACHE_DIR"] == "/mine"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    command = Command(("vllm",), {"A": "1"}, defaults={"TRITON_CACHE_DIR": "/ours", "CUDA_CACHE_PATH": "/ours"})
    environment = engine_process._environment(command, tmp_path)
    assert [environment[name] for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "A")] == ["/mine", "/ours", "1"]


def test_a_link_is_made_once_and_leaves_what_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        engine_process._link(tmp_path / "start" / "kept", tmp_path / "kept")
    assert (tmp_path / "start" / "kept").resolve() == tmp_path / "kept"
    (tmp_path / "start" / "own").mkdir()
    engine_process._link(tmp_path / "start" / "own", tmp_path / "kept")
    assert not (tmp_path / "start" / "own").is_symlink()
    shutil.copytree(tmp_path, copy := tmp_path / "copy", symlinks=True)
    assert (copy / "start" / "kept").resolve() == copy / "kept", "a copy for another machine leads to itself"
