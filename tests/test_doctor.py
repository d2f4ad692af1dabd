"""Doctor's checks of this machine, and what it makes of what nodes said; the nodes themselves: test_doctor_hosts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from samples import cpu_machine, deployment, gpu_machine
from test_facts import Hub, as_json, served  # noqa: F401 - a fixture

from penstock import engines, targets
from penstock.deployment.doctor import examine, network
from penstock.deployment.doctor import nodes as findings
from penstock.deployment.doctor.model import check_model
from penstock.deployment.doctor.network import Route
from penstock.deployment.doctor.nodes import SurveyedNode
from penstock.deployment.preflight import UNREAD
from penstock.engines.llamacpp.engine import LlamaCpp
from penstock.errors import Finding, UserError
from penstock.hardware import Interface, Machine, NodeFacts
from penstock.hardware import network as preflight
from penstock.models import Facts, catalog
from penstock.models.read_rate import Reading
from penstock.node.checks import machine as node_check
from penstock.node.checks.all_reduce import Collective, Timed
from penstock.node.checks.machine import Holder, Limits, NodeCheck, Space, Weights
from penstock.spec.deployment import Parallel
from penstock.targets import Surveyed
from penstock.targets.local import Local
from penstock.text import GIB, MIB

replace = msgspec.structs.replace


def checks_here(monkeypatch: pytest.MonkeyPatch, machine: Machine | None = None, **changes: Any) -> dict[str, Finding]:
    """What doctor reports of this machine, when its survey answers so."""
    node = surveyed(machine=machine, **changes)
    survey = [Surveyed(node.name, 0, msgspec.json.encode(node.check).decode())]
    monkeypatch.setattr(Local, "survey", lambda *_: survey)
    monkeypatch.setattr(examine, "gpus", lambda: list(node.check.facts.machine.gpus))
    return {finding.check: finding for finding in reversed(examine.examine_here())}


@pytest.fixture
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_port", lambda host, port: None)


@pytest.mark.usefixtures("free_port")
def test_this_machine_gets_the_checks_of_a_node_and_of_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = checks_here(monkeypatch, weights=None)
    own = {"python", "disk", "port", "engine llamacpp", "engine vllm"}
    assert set(checks) == own | {"memory", "/dev/shm", "ulimits", "gpu", "versions", "addresses"}
    assert checks["memory"].found == "16.0 GiB free of 32.0 GiB, 8 CPUs"
    assert checks["port"].found == "127.0.0.1:8000 is free"
    assert checks["gpu"].found == "none found"
    assert {finding.node for finding in checks.values()} == {None}
    assert not home.exists()
    unread = "GPU 0 (NVIDIA GB10): nvidia-smi prints [N/A] for its memory, [N/A] for what is free"
    gpu = checks_here(monkeypatch, msgspec.structs.replace(cpu_machine(), unread=(unread,)))["gpu"]
    assert (gpu.state, gpu.found, gpu.cure) == ("bad", unread, UNREAD), "not: none found"
    checks = checks_here(monkeypatch, cpu_machine(0.5), shm_bytes=GIB // 2)
    assert (checks["memory"].state, checks["/dev/shm"].state) == ("bad", "warning")
    assert findings.of_run_folders(Space("run folders", "/h", 63 * MIB, True)).state == "bad", "as `up` says"
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    disk = checks_here(monkeypatch)["disk"]
    assert (disk.state, disk.cure) == ("bad", "Set PENSTOCK_HOME to a folder you may write.")

    def refuse(host: str, port: int) -> None:
        raise UserError("cannot listen", detail="Process 7 listens there", hint="End it.")

    monkeypatch.setattr(preflight, "check_port", refuse)
    port = checks_here(monkeypatch)["port"]  # 8000 without a file is a guess
    assert (port.state, port.found, port.cure) == ("warning", "cannot listen (Process 7 listens there)", "End it.")


@pytest.mark.usefixtures("free_port")
def test_an_absent_engine_is_bad_where_it_would_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for n_gpus, llamacpp, vllm in ((0, "bad", "warning"), (2, "warning", "bad")):
        findings = checks_here(monkeypatch, gpu_machine(n_gpus))
        assert (findings["engine llamacpp"].state, findings["engine vllm"].state) == (llamacpp, vllm)
    missing = LlamaCpp().missing()
    assert isinstance(missing, engines.Missing)
    assert findings["engine llamacpp"].cure == missing.install


ETH = Interface("eth0", "10.0.0.1", 24, 10_000)
VERSIONS = {"python": "3.11.7", "penstock": "1.0", "vllm": "0.33.0", "ray": "2.60.0", "torch": "2.13.0"}


def surveyed(rank: int = 0, machine: Machine | None = None, **changes: Any) -> SurveyedNode:
    """A node that has nothing wrong, but for these changes."""
    made = replace(machine or cpu_machine(), versions=changes.pop("versions", VERSIONS))
    facts = NodeFacts(f"node{rank}", made, (ETH,), 8 * GIB)
    weights = Weights("/models/m", 100 * GIB, 80 * GIB, (), Reading("/models/m/a", GIB, 0.5, True, 0.0))
    check = NodeCheck(
        facts=facts, at=time.time(), limits=Limits(65536, 65536, None, None), shm_total_bytes=8 * GIB,
        spaces=(Space("home", "/x", 100 * GIB, True),), weights=weights, holders=(), driver="580.65.06",
        torch_cuda="13.0", wanted_torch="2.13.0",
    )  # fmt: skip
    of_facts = {name: changes.pop(name) for name in ("environment", "shm_bytes", "interfaces") if name in changes}
    check = replace(check, facts=replace(facts, **of_facts))
    own = {name: changes.pop(name) for name in ("behind_s", "clock_error_s") if name in changes}
    return SurveyedNode(rank, f"node{rank}", replace(check, **changes), **own)


def wrong(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.state) for finding in found if finding.state != "ok"]


@pytest.mark.parametrize(
    ("changes", "expected", "said", "cure"),
    [
        ({"limits": Limits(256, 4096, None, None)}, ("ulimits", "warning"), "open files: 256", "ulimit -n 4096"),
        ({"limits": Limits(512, 512, None, None)}, ("ulimits", "warning"), "open files: 512", "an administrator"),
        ({"limits": Limits(65536, None, 100, None)}, ("ulimits", "warning"), "processes: 100", "ulimit -u"),
        ({"shm_bytes": 64 * MIB}, ("/dev/shm", "bad"), "64.0 MiB free of 8.0 GiB: NCCL", "--shm-size 8g"),
        ({"shm_bytes": 512 * MIB}, ("/dev/shm", "warning"), "512 MiB free", "--shm-size 8g"),
        ({"driver": "535.104.05"}, ("driver", "bad"), "which needs driver 580 or newer", "built with CUDA 12"),
        ({"driver": None}, ("driver", "warning"), "driver unknown", "nvidia-smi"),
        ({"torch_cuda": None}, ("driver", "bad"), "was built without CUDA", "for CUDA"),
        ({"wanted_torch": "2.12.1"}, ("torch", "bad"), "built for 2.12.1", "pip install torch==2.12.1"),
        ({"environment": {"NCCL_SOCKET_IFNAM": "x"}}, ("variables", "warning"), "NCCL_SOCKET_IFNAME?", "node0"),
        ({"interfaces": (Interface("lo", "127.0.0.1", 8),)}, ("addresses", "warning"), "but loopback", "Connect"),
        ({"behind_s": 60.0, "clock_error_s": 2.0}, ("clock", "warning"), "1m00s behind", "NTP"),
        ({"spaces": (Space("home", "/h", MIB, True),)}, ("disk", "warning"), "1.0 MiB free at /h", "Free space"),
        ({"spaces": (Space("home", "/h", GIB, False),)}, ("disk", "warning"), "cannot write /h", "user"),
    ],
)
def test_what_is_wrong_on_a_node_is_named_with_its_cure(
    changes: dict[str, Any], expected: tuple[str, str], said: str, cure: str
) -> None:
    found = findings.of_node(surveyed(0, gpu_machine(2), **changes), deployment())
    assert wrong(found) == [expected]
    (bad,) = [finding for finding in found if finding.state != "ok"]
    assert said in bad.found and cure in (bad.cure or "")


def test_a_healthy_node_has_nothing_wrong() -> None:
    for machine in (cpu_machine(), gpu_machine(2)):
        found = findings.of_node(surveyed(machine=machine), deployment())
        assert wrong(found) == [] and {finding.node for finding in found} == {"node0"}


def test_memory_of_a_gpu_that_another_process_holds_names_it() -> None:
    full = replace(gpu_machine(1).gpus[0], memory_free_bytes=10 * GIB)
    box = replace(gpu_machine(2), gpus=(full, gpu_machine(2).gpus[1]))
    held = surveyed(machine=box, holders=(Holder(0, 4242, 70 * GIB, "python train.py", "bob"),))
    for hardware, state in (({}, "warning"), ({"gpus_per_node": 2}, "bad")):
        (bad,) = [f for f in findings.of_node(held, deployment(hardware=hardware)) if f.state != "ok"]
        assert (bad.check, bad.state) == ("gpu", state)
        assert "process 4242 (python train.py, user bob) holds 70.0 GiB" in bad.found
    (absent,) = [f for f in findings.of_node(held, deployment(hardware={"gpu_ids": [1, 7]})) if f.state == "bad"]
    assert (absent.check, absent.found) == ("gpu", "hardware.gpu_ids: node0 has no usable GPU 7")
    placed = findings.of_node(held, deployment(hardware={"gpus_per_node": 2}), is_elastic=True)
    (later,) = [finding for finding in placed if finding.state != "ok"]
    assert later.state == "warning" and "waits until that is free" in str(later.cure)


def test_nodes_that_differ_are_named_and_one_that_lacks_the_engine() -> None:
    found = findings.of_all([surveyed(0, gpu_machine(2)), surveyed(1, gpu_machine(1))], deployment(), "1.0")
    assert [(f.node, f.found) for f in found if f.state == "bad"] == [("node1", "has 1 GPUs, others have 2")]
    found = findings.of_all([surveyed()], deployment(hardware={"gpus_per_node": 1}), "1.1")
    told = ["penstock is 1.1 here, 1.0 on node0", "has 0 GPUs, 1 are needed"]
    assert [f.found for f in found if f.state == "bad"] == told
    bare = surveyed(versions={"penstock": "1.0"})
    assert ("engine", "bad") not in wrong(findings.of_node(bare, deployment()))
    found = findings.of_node(bare, deployment(target="ssh", hardware={"nodes": 2}))
    assert [f.found for f in found if f.check == "engine"] == ["vLLM is not installed", "Ray is not installed"]
    refused = findings.unreachable("slurm", "srun: error: Invalid node name specified")
    assert "what the file requests" in str(refused.cure), "no machine that is off"
    assert findings.unreachable("node1", "no answer within 30 s").cure == "Check that it is on and reachable."


def test_loading_cannot_be_faster_than_the_disk() -> None:
    slow = surveyed(1, weights=Weights("/m", GIB, 200 * GIB, (), Reading("/m/a", GIB, 10.0, True, None)))
    (found,) = findings.of_loading([surveyed(), slow], deployment(), None)
    assert (found.state, found.found) == ("warning", "at best 33m20s: 200 GiB per node, node1 reads slowest")
    assert "a local NVMe disk" in (found.cure or "")
    (half,) = findings.of_loading([surveyed(), slow], deployment(target="ssh", hardware={"nodes": 2}), None)
    assert half.found == "at best 16m40s: 100 GiB per node, node1 reads slowest"
    wanted = deployment(target="slurm", slurm={"time": "20:00"}, engine={"start_timeout_s": 60})
    told = findings.of_loading([slow], wanted, targets.load("slurm").time_limit_s(wanted))
    assert [(f.state, f.found.partition("; but ")[2]) for f in told] == [
        ("bad", "engine.start_timeout_s is 1m00s"),
        ("bad", "slurm.time is 20m00s"),
    ]


def test_weights_that_are_not_there_are_told_with_the_room_for_them() -> None:
    absent = surveyed(weights=Weights("/cache", 10 * GIB, absent=("a/b is not in the cache",)))
    assert [f.state for f in findings.of_weights(absent, None)] == ["bad"]
    (bad,) = findings.of_weights(absent, 40 * GIB)
    assert (bad.state, bad.found) == ("bad", "40.0 GiB to download, 10.0 GiB free at /cache")
    assert [f.state for f in findings.of_weights(absent, 4 * GIB)] == ["warning"]
    slow = surveyed(weights=Weights("/m", GIB, GIB, (), Reading("/m/a", GIB, 10.0, False, 0.5)))
    rate = findings.of_weights(slow, None)[-1]
    assert (rate.state, rate.check) == ("warning", "read rate")
    assert "0.11 GB/s" in rate.found and "through the page cache; 50% of it was in memory" in rate.found


ROUTE = Route((surveyed(0), surveyed(1)), (ETH, replace(ETH, address="10.0.0.2")))
GLOO = Collective("gloo", 2, 1, (Timed(80 * 1024, 0.0004, 900), Timed(64 * MIB, 0.1, 10)))


def test_an_all_reduce_is_shown_against_the_line_rate() -> None:
    found = network.of_collective(GLOO, ROUTE)
    assert found.state == "ok"
    assert GLOO.bus_gbs(GLOO.sizes[1]) == pytest.approx(0.671, abs=1e-3)  # that of nccl-tests
    eight = Collective("nccl", 2, 4, (Timed(64 * MIB, 0.001, 10),))
    assert eight.bus_gbs(eight.sizes[0]) == pytest.approx(117.4, abs=0.1)
    assert eight.node_gbs(eight.sizes[0]) == pytest.approx(67.1, abs=0.1)
    assert found.found == ("gloo, 2 ranks over eth0: bus bandwidth 0.67 GB/s at 64.0 MiB, 80.0 KiB in 400 us")
    slow = replace(GLOO, sizes=(Timed(80 * 1024, 0.05, 9), Timed(64 * MIB, 5.0, 1)))
    assert "the line rate is 1.25 GB/s" in network.of_collective(slow, ROUTE).found
    failed = replace(GLOO, sizes=(), error="join: waiting for the others: no end after 60 s")
    assert "all TCP ports" in (network.of_collective(failed, ROUTE).cure or "")
    ib = Route(ROUTE.nodes, tuple(replace(one, is_infiniband=True) for one in ROUTE.interfaces))
    fast = Collective("nccl", 2, 8, (Timed(80 * 1024, 1e-4, 9),), network="Socket")
    assert "fell back to TCP" in network.of_collective(fast, ib).found


def test_the_gpus_of_one_machine_are_held_against_the_catalogue() -> None:
    """The numbers are those of two H200s."""
    h200 = replace(gpu_machine(1).gpus[0], name="NVIDIA H200", memory_bytes=143771 * MIB)
    box = replace(gpu_machine(2), gpus=(h200, h200))
    sizes = (Timed(80 * 1024, 45.8e-6, 2000), Timed(256 * MIB, 897e-6, 1166))
    two = Collective("nccl", 1, 2, sizes, network="Socket")
    good = network.inside(two, box)
    assert good is not None and good.state == "ok"
    assert good.found.startswith("256 MiB between the 2 GPUs takes 897 us, the plan assumes ")
    assert "2 ranks inside one node: bus bandwidth 299.26 GB/s" in network.of_collective(two, ROUTE).found
    slow = network.inside(replace(two, sizes=(sizes[0], Timed(256 * MIB, 0.02, 9))), box)
    assert slow is not None and slow.state == "warning"


def test_a_slow_network_changes_the_plan_and_says_how() -> None:
    model = Facts("llama", catalog.model_config("llama-3.1-70b"), "the catalogue")
    hardware = {"nodes": 2, "network": "ib-ndr"}
    wanted = deployment("meta-llama/Llama-3.1-70B", target="ssh", hardware=hardware, parallel={"tensor": 8})
    slow = Collective("nccl", 2, 4, (Timed(80 * 1024, 1e-3, 900), Timed(64 * MIB, 0.1, 10)))
    found = network.planned(wanted, model, gpu_machine(4), "0.33.0", 1, slow)
    assert found is not None and found.state == "warning"
    assert "0.7 GB/s per node measured, the plan assumed 122.0 (ib-ndr-400): TPOT" in found.found
    assert "one node alone is faster with this network (tensor 4, pipeline 1, data 1)" in found.found
    fast = Collective("nccl", 2, 4, (Timed(80 * 1024, 2e-5, 900), Timed(64 * MIB, 0.0006, 10)))
    quick = network.planned(wanted, model, gpu_machine(4), "0.33.0", 1, fast)
    assert quick is not None and "TPOT" in quick.found
    words, cure = network._better(Parallel(tensor=8, pipeline=2), 8)
    assert words == "the better layout over this network is tensor 8, pipeline 2, data 1"
    assert cure == "parallel: {tensor: 8, pipeline: 2, data: 1}, or fix the network."


def test_packets_of_several_sizes_are_named_although_all_nodes_reach_each_other() -> None:
    rows = [replace(ETH, address=f"10.0.0.{rank + 1}", mtu=mtu) for rank, mtu in enumerate((9000, 1500))]
    nodes = [surveyed(rank, interfaces=(row,)) for rank, row in enumerate(rows)]
    times = {rank: {1 - rank: {rows[1 - rank].address: 0.0001}} for rank in (0, 1)}
    (_, mtu, _), route = network.of_reach(nodes, times, deployment(hardware={"nodes": 2}))
    assert route is not None and mtu.state == "warning"
    assert mtu.found == f"packets have several sizes (MTU): {nodes[0].name} 9000, {nodes[1].name} 1500"


def test_on_cpus_the_wait_of_a_token_is_shown() -> None:
    split, chain = (network.on_cpus(GLOO, layout, 40) for layout in (Parallel(tensor=2), Parallel(pipeline=2)))
    assert split is not None and split.state == "ok"
    assert "a token waits for 81 of them: 32.4 ms per token" in split.found
    assert chain is not None and "by pipeline over nodes" in chain.found


NAME = "someone/tiny"


def on_hub(hub: Hub, n_bytes: int, weights: str = "model.safetensors") -> None:
    """A model on the stand-in hub, with so many bytes in one file of that name."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
    hub.add(NAME, config__json=as_json(config))
    rows = [{"rfilename": "config.json", "size": 0}, {"rfilename": weights, "size": n_bytes}]
    hub.files[f"api/models/{NAME}/revision/main?blobs=true"] = as_json({"id": NAME, "sha": "c0ffee", "siblings": rows})


@pytest.mark.loopback
def test_a_model_of_the_hub_is_found_with_its_size(served: Hub) -> None:  # noqa: F811
    on_hub(served, 40 * GIB)
    told = check_model(deployment(NAME))
    assert (told.is_absent, told.download_bytes) == (True, 40 * GIB)
    assert [f.found for f in told.findings] == [f"{NAME} is on the hub: 40.0 GiB"]
    on_hub(served, 40 * GIB, "pytorch_model.bin")
    (pickled,) = check_model(deployment(NAME)).findings
    assert pickled.state == "bad" and "Its weights are pickled (pytorch_model.bin)" in pickled.found
    assert check_model(deployment(NAME, cache={"allow_pickle": True})).findings[0].state == "ok"


@pytest.mark.loopback
def test_a_gated_or_missing_model_is_named_with_the_way_in(
    served: Hub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def finding(model: str = NAME, **fields: Any) -> Finding:
        (only,) = check_model(deployment(model, **fields)).findings
        return only

    served.refused[f"{NAME}/resolve/main/config.json"] = (403, "GatedRepo")
    gated = finding()
    assert gated.state == "bad" and "it is gated" in gated.found
    assert gated.cure == "Accept the licence on its hub page, then set HF_TOKEN. (HF_TOKEN is not set here)"
    served.refused[f"{NAME}/resolve/main/config.json"] = (401, "RepoNotFound")
    assert "no such repository, or a private one" in finding().found
    assert finding("/models/absent").found.startswith('cannot use model "/models/absent": no such folder')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in finding().found
    # One that the nodes fetch is planned from what is known of it.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    known = check_model(deployment("meta-llama/Llama-3.1-8B-Instruct", target="kubernetes"))
    assert known.whole is not None and known.findings[0].state == "warning"
    assert "planned from the catalogue's copy of meta-llama/Meta-Llama-3.1-8B" in known.findings[0].found
    assert finding(target="kubernetes").state == "bad"


def test_weights_are_found_by_the_index_and_what_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(
        as_json({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    (tmp_path / "one.safetensors").write_bytes(b"12345")
    found = node_check.find_weights(str(tmp_path), None, is_read=False)
    assert (found.n_bytes, found.absent) == (5, ("two.safetensors",))
    assert node_check.find_weights("/models/absent", None).absent == ("no such folder",)
    cache = node_check.find_weights(NAME, str(tmp_path / "cache"))
    assert (cache.path, cache.absent) == (str(tmp_path / "cache"), (f"{NAME} is not in the cache",))


def test_processes_on_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*words: str) -> str:
        if words[0].startswith("--query-compute-apps"):
            return "GPU-b, 99999999, 1024, python, with a comma\nGPU-a, 1, [N/A], init\nGPU-x, 5, 1, lost\n"
        return "0, GPU-a\n1, GPU-b\n"

    monkeypatch.setattr(node_check, "nvidia_smi", said)
    assert [(one.gpu, one.pid, one.n_bytes, one.name) for one in node_check.gpu_holders()] == [
        (1, 99999999, GIB, "python, with a comma"),
        (0, 1, 0, "init"),
    ]
    assert node_check._driver() is None
    monkeypatch.setattr(node_check, "nvidia_smi", lambda *_: "535.104.05\n535.104.05\n")
    assert node_check._driver() == "535.104.05"
