"""How weights are read: the rate of a disk, what vLLM is started with, and what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import network_disk
import pytest
from samples import demo_plan, deployment

from penstock.engines import Diagnosis, Disk, LoadChoice, Place, Seen
from penstock.engines.vllm.engine import Vllm
from penstock.engines.vllm.load_format import Setting, choose
from penstock.errors import SpecError
from penstock.models import read_rate
from penstock.models.read_rate import Reading, file_system_of, is_of_network
from penstock.node import load_choice
from penstock.node.local_processes import NodeArgs, Prerequisites
from penstock.node.readings import Readings
from penstock.node.shared_cache import SharedCache
from penstock.node.staging import Stage
from penstock.node.supervisor import NodeSupervisor
from penstock.planner import Plan
from penstock.run_folder import Launch
from penstock.text import GIB, MIB
from penstock.wire.announcement import Progress
from penstock.world import REAL

ALL = ("instanttensor", "runai_model_streamer")
CUDA = Setting("cuda", packages=ALL)
INSTANT, STREAMED = {"load-format": "instanttensor"}, {"load-format": "runai_streamer"}
AHEAD = {"safetensors-load-strategy": "prefetch"}


def disk(
    n_gib: float,
    gb_per_s: float,
    file_system: str,
    alone: float | None = None,
    cached: float | None = 0.0,
    free_gib: float = 500,
    is_direct: bool = True,
    buffered: float | None = None,
) -> Disk:
    """Files of `n_gib` on a disk of that rate; `alone`: the rate of one reader that maps them, `buffered`: of eight by
    way of the page cache, GB/s."""
    one = (alone or gb_per_s) * 1e9
    eight = (buffered or gb_per_s) * 1e9
    reading = Reading("/m/a", int(gb_per_s * 1e9), 1.0, is_direct, cached, file_system, one, eight)
    return Disk(int(n_gib * GIB), reading, int(free_gib * GIB))


@pytest.mark.parametrize(
    ("files", "setting", "flags", "why"),
    [
        (disk(131, 2.1, "ext4", buffered=1.0), CUDA, INSTANT, "2.1 GB/s past the page cache"),
        (disk(700, 2.1, "ext4"), CUDA, INSTANT, "2.1 GB/s past the page cache"),
        (disk(19, 1.1, "ext4", 0.66, buffered=1.27), CUDA, AHEAD, "1.9 times"),
        (disk(131, 2.1, "xfs"), Setting("cuda"), {}, "one reader gets all"),
        (disk(131, 6.0, "xfs", alone=2.0), Setting("cuda"), AHEAD, "3.0 times"),
        (disk(131, 6.0, "xfs", alone=2.0), Setting("cuda", 2, ALL), AHEAD, "3.0"),
        (disk(131, 0.4, "ext4", alone=0.1), CUDA, AHEAD, "4.0 times"),
        (disk(131, 0.4, "ext4", alone=0.1, free_gib=100), CUDA, {}, "do not fit in 100 GiB"),
        (disk(131, 2.1, "ext4", is_direct=False), CUDA, {}, "one reader gets all"),
        (disk(131, 2.1, "ext4", cached=0.95), CUDA, {}, "the files are in memory"),
        (disk(131, 9.0, "tmpfs", cached=None), CUDA, {}, "the files are in memory"),
        (disk(131, 1.2, "nfs4"), CUDA, AHEAD, "nfs4 is read over a network"),
        (disk(131, 1.2, "fuse.gcsfuse"), CUDA, AHEAD, "over a network"),
        (disk(700, 1.2, "lustre"), CUDA, STREAMED, "do not fit in 500 GiB"),
        (disk(700, 1.2, "lustre"), Setting("cuda", 2, ALL), {}, "do not fit in 500 GiB"),
        (disk(700, 1.2, "lustre"), Setting("cuda"), {}, "do not fit in 500 GiB"),
        (disk(16, 6.0, "ext4", alone=2.0), Setting("cpu", packages=ALL), {}, "default"),
        (disk(16, 1.0, "nfs"), Setting("cpu"), AHEAD, "over a network"),
        (disk(300, 1.0, "nfs"), Setting("cpu"), {}, "do not fit"),
    ],
)
def test_the_load_follows_from_what_was_measured(
    files: Disk, setting: Setting, flags: dict[str, str], why: str
) -> None:
    choice = choose(files, setting)
    assert choice.args == flags and why in choice.why


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = [("/", "overlay"), ("/data", "nfs4"), ("/data/fast", "ext4"), ("/database", "xfs"), ("/late", "ext4")]
    for path, kind in (("/m", "overlay"), ("/data/m", "nfs4"), ("/data/fast/m", "ext4"), ("/data", "nfs4")):
        assert file_system_of(path, mounts) == kind
    assert file_system_of("/late/m", [*mounts, ("/late", "wekafs")]) == "wekafs"  # mounted over the other
    assert file_system_of("/m", []) == ""
    kinds = ("nfs4", "lustre", "ceph", "fuse.juicefs", "wekafs", "gpfs", "beegfs")
    assert all(map(is_of_network, kinds)) and not any(map(is_of_network, ("ext4", "xfs", "overlay", "fuseblk", "")))


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 40 * MIB)
    (tmp_path / "config.json").write_text("{}")
    yield file


def test_files_are_read_past_the_cache_or_by_way_of_it(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_rate.measure([model_file], seconds=0.2)
    assert found is not None and found.took_s > 0 and found.mapped_bytes_per_s and found.buffered_bytes_per_s
    assert (found.n_bytes, found.rate("direct")) == (8 * MIB, found.bytes_per_s)  # the fourth block is not there
    plain, tried = read_rate._read, list[str]()

    def without(blocks: read_rate.Blocks, way: read_rate.Way, seconds: float) -> tuple[int, float] | None:
        tried.append(way)
        return None if way == "direct" else plain(blocks, way, seconds)

    monkeypatch.setattr(read_rate, "_read", without)  # a file system that knows no O_DIRECT
    found = read_rate.measure([model_file], seconds=0.2)
    assert found is not None and not found.is_direct and tried == ["mapped", "buffered", "direct"]
    assert found.rate("direct") == found.bytes_per_s == pytest.approx(found.rate("buffered"), rel=0.01)
    assert read_rate.measure([model_file.parent / "absent"]) is None and read_rate.measure([]) is None


def test_the_program_prints_a_reading(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_rate.main(str(model_file.parent)) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Reading).n_bytes
    assert read_rate.main(str(model_file.parent / "absent")) == 1 and capsys.readouterr().out == "null\n"


_MBYTES = 40
# In a mount namespace of its own, which ends with it: the folder behind a network disk of so many MB/s.
_BEHIND_A_NETWORK = f"""
import subprocess, sys
from pathlib import Path
from penstock.models import read_rate
program, folder, mount = sys.argv[1:]
words = [sys.executable, program, folder, mount, "--mbytes", "{_MBYTES}", "--latency-ms", "2"]
with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as disk:
    assert disk.stdout.readline() == b"ready\\n"
    same = (Path(mount) / "model.safetensors").read_bytes() == (Path(folder) / "model.safetensors").read_bytes()
    sys.stderr.write(str(same))
    read_rate.main(mount)
    disk.stdin.close()
"""


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK), reason="needs root, to mount a disk")
def test_a_slow_network_disk_is_measured_and_read_ahead(model_file: Path) -> None:
    (mount := model_file.parent / "mount").mkdir()
    argv = ["unshare", "--mount", sys.executable, "-c", _BEHIND_A_NETWORK, network_disk.__file__]
    done = subprocess.run([*argv, str(model_file.parent), str(mount)], capture_output=True, timeout=120, check=True)
    reading = msgspec.json.decode(done.stdout, type=Reading)
    assert done.stderr == b"True" and reading.is_of_network and reading.file_system == "fuse.network"
    # The disk gives 10 ms ahead; a busy machine reads more slowly, and none faster.
    assert max(reading.rate(way) for way in ("mapped", "buffered", "direct")) < 1.5e6 * _MBYTES
    choice = choose(Disk(16 * GIB, reading, 500 * GIB), CUDA)
    assert choice.args == {"safetensors-load-strategy": "prefetch"} and choice.way == "buffered"
    assert list(mount.iterdir()) == []


# ---- what an engine is started with ---------------------------------------------------------------------------------


def plan_of(folder: Path, version: str = "0.33.0", **fields: object) -> Plan:
    plan = demo_plan("vllm")
    model = msgspec.structs.replace(plan.model, path=str(folder), form="safetensors", reference="a/b")
    return msgspec.structs.replace(plan, model=model, engine_version=version, **fields)


def test_the_choice_is_left_open_by_the_file_or_is_not(model_file: Path) -> None:
    folder, engine = model_file.parent, Vllm()
    assert engine.can_choose_load(plan_of(folder))
    for version in ("0.29.1", "dev"):
        assert not engine.can_choose_load(plan_of(folder, version))
    for flag in ("load_format", "safetensors-load-strategy", "model-loader-extra-config"):
        assert not engine.can_choose_load(plan_of(folder, args={flag: "eager"}))
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    assert not engine.can_choose_load(plan_of(folder))
    (folder / "config.json").write_text("{}")
    (folder / "consolidated-00001.safetensors").touch()  # vLLM reads those, with Mistral's names
    assert not engine.can_choose_load(plan_of(folder))


def test_a_choice_becomes_flags_and_words(model_file: Path) -> None:
    of_the_file = deployment("a/b", engine={"load": "fastsafetensors", "args": {"seed": 7}})  # is passed on
    assert of_the_file.engine.flags == {"seed": 7, "load-format": "fastsafetensors"}
    plan = plan_of(model_file.parent, args={"seed": 7})
    chosen = load_choice.with_choice(plan, disk(131, 2.1, "ext4", buffered=1.0), lambda _, files: choose(files, CUDA))
    command = Vllm().command(chosen.plan, Place("127.0.0.1", 1, "/tmp/x", "python"))
    assert " ".join(command.argv).endswith("--seed 7 --load-format instanttensor")
    assert chosen.text == (
        "131 GiB at 2.10 GB/s on ext4: about 1m06s to read; "
        "instanttensor, since ext4 gives 2.1 GB/s past the page cache"
    )
    assert chosen.has_format and chosen.expected_s == pytest.approx(67.0)
    of_network = disk(131, 2.1, "nfs4", alone=0.5)
    chosen = load_choice.with_choice(plan, of_network, lambda _, files: choose(files, CUDA))
    assert chosen.plan.args == {"seed": 7, "safetensors-load-strategy": "prefetch"} and not chosen.has_format
    slow = load_choice.with_choice(plan, disk(131, 2.0, "ext4", alone=0.5), lambda *_: LoadChoice("so"))
    assert slow.plan.args == {"seed": 7} and slow.text == "131 GiB at 0.50 GB/s on ext4: about 4m41s to read; so"


def test_only_large_models_that_are_not_in_memory_are_measured(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, shares = plan_of(model_file.parent), [0.95, 0.2]
    assert load_choice.choose(plan) == load_choice.Chosen(plan)  # 40 MiB
    monkeypatch.setattr(load_choice, "_TOO_SMALL_BYTES", MIB)
    monkeypatch.setattr(read_rate, "cached_share", lambda _: shares.pop(0))
    assert load_choice.choose(plan).text == "40.0 MiB, in memory already"
    reading = Reading(str(model_file), 10**9, 1.0, True, 0.2, "nfs4")
    monkeypatch.setattr(read_rate, "measure", lambda _: reading)
    chosen = load_choice.choose(plan)
    assert chosen.plan.args["safetensors-load-strategy"] == "prefetch" and "over a network" in chosen.text
    shares.append(0.0)
    monkeypatch.setattr(read_rate, "measure", lambda _: None)
    assert load_choice.choose(plan) == load_choice.Chosen(plan)
    model_file.unlink()
    assert load_choice.choose(plan) == load_choice.Chosen(plan)


def test_a_start_that_failed_with_a_chosen_format_is_repeated_without_it(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(model_file.parent, args={"seed": 7})

    def chosen(plan: Plan) -> load_choice.Chosen:
        with_format = msgspec.structs.replace(plan, args={**plan.args, "load-format": "instanttensor"})
        return load_choice.Chosen(with_format, "so", 1.0, has_format=True)

    monkeypatch.setattr(load_choice, "choose", chosen)
    readings = Readings(lambda: None)  # type: ignore[arg-type, return-value]
    launch = Launch("x", plan, (), "")
    cache = SharedCache(launch, 0, None, lambda: False)  # type: ignore[arg-type]
    needs = Prerequisites(plan, NodeArgs("0"), False, readings, Stage(launch, None, lambda: False), cache)
    assert not needs.drop_format()
    assert needs.resolve()[0].args == {"seed": 7, "load-format": "instanttensor"}
    assert needs.drop_format() and needs.resolve()[0].args == {"seed": 7} and not needs.drop_format()
    assert needs.loading.text.startswith("the engine's default") and needs.loading.expected_s is None


def test_a_node_gives_up_at_once_only_where_no_format_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies while it loads the weights, for a reason that would be final."""
    has_format, starts, failed = [True], list[str](), list[str]()
    node = NodeSupervisor.__new__(NodeSupervisor)
    node.stops, node._world = 0, REAL
    progress = Seen(Progress("weights", fraction=0.5))
    stub: Any = SimpleNamespace(seen=progress, was_ready=False, reason=None, restarting=lambda _: None)
    node._report, node._announcer = stub, SimpleNamespace(start=lambda: None)  # type: ignore[assignment]
    node._prerequisites = SimpleNamespace(drop_format=lambda: bool(has_format and has_format.pop()))  # type: ignore[assignment]

    def run_engine() -> Diagnosis:
        starts.append("weights")
        return Diagnosis("vLLM exited with code 1: ImportError", is_final=True)

    for name, stand_in in (("_run_engine", run_engine), ("_refresh", lambda: None), ("_pause", lambda _: None)):
        monkeypatch.setattr(node, name, stand_in)
    monkeypatch.setattr(node, "_fail", lambda diagnosis: failed.append(diagnosis.reason))
    assert node.run() == 1 and len(starts) == 2 and len(failed) == 1
    for engine in ({"load": "a format"}, {"load": "pt", "args": {"load_format": "pt"}}):
        with pytest.raises(SpecError) as refused:
            deployment("a/b", engine=engine)
        assert [problem.path for problem in refused.value.problems] == ["engine.load"]
