"""`penstock doctor FILE` on two real nodes: what is healthy is measured, and each planted fault is named.

The nodes are namespaces with networks of their own (hosts.py). The target that asks them is a stand-in that starts
programs there; what the programs find and measure is real.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hosts import ROOT, Hosts
from samples import deployment

from penstock import targets
from penstock.deployment.doctor import examine as doctor
from penstock.errors import Finding, Problem
from penstock.hardware import Machine, NodeFacts
from penstock.run_folder import Artifact
from penstock.spec.deployment import Deployment
from penstock.targets import Surveyed, Target

pytestmark = pytest.mark.hosts

Examine = Callable[..., list[Finding]]


class OverHosts(Target):
    """Nodes are hosts; `env` and `wrap` are what a test plants on one of them, by name."""

    name = "ssh"
    capabilities = frozenset({"survey"})
    hosts: ClassVar[Hosts]
    env: ClassVar[dict[str, dict[str, str]]] = {}
    wrap: ClassVar[dict[str, list[str]]] = {}
    problems: ClassVar[list[Problem]] = []

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        return self.problems

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        rows = self.survey(deployment, ["-m", "penstock.hardware.detect"], 30.0)
        return [msgspec.json.decode(row.out, type=NodeFacts).machine for row in rows if row.exit_code == 0]

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda rank: self._ask(rank, argv, timeout_s), range(len(self.hosts))))

    def _ask(self, rank: int, argv: Sequence[str], timeout_s: float) -> Surveyed:
        host = self.hosts[rank]
        if not host.is_on:
            return Surveyed(host.name, None, err=f"ssh: connect to host {host.address} port 22: No route to host")
        words = [*self.wrap.get(host.name, []), sys.executable, *(word.replace("{rank}", str(rank)) for word in argv)]
        own = self.env.get(host.name, {})
        env = own | {"PYTHONPATH": f"{own.get('PYTHONPATH', '')}:{ROOT}".lstrip(":")}
        done = host.run(words, env=env, check=False, timeout_s=timeout_s)
        return Surveyed(host.name, done.returncode, done.stdout, done.stderr)

    def render(self, *_: object) -> Artifact:
        return Artifact((), {})

    def place(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    status = logs = end = place


@pytest.fixture
def examine(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Examine]:
    """Doctor on a file for both hosts, without the all-reduce unless a test wants it."""
    monkeypatch.setitem(targets.TABLE, "ssh", f"{__name__}:OverHosts")
    monkeypatch.setattr(doctor, "_REACH_S", 2.5)
    monkeypatch.setattr(doctor, "_MEASURE_S", 2.0)
    targets.load.cache_clear()
    OverHosts.hosts, OverHosts.env, OverHosts.wrap, OverHosts.problems = hosts, {}, {}, []

    def run(model: str = "penstock-demo", is_quick: bool = True, **fields: Any) -> list[Finding]:
        fields = {"target": "ssh", "hardware": {"nodes": 2}, "gateway": {"port": 0}} | fields
        fields["engine"] = {"kind": "vllm", "executor": "mp"} | fields.get("engine", {})
        return doctor.examine(deployment(model, **fields), is_quick)

    yield run
    targets.load.cache_clear()


def bad(found: list[Finding]) -> list[Finding]:
    """What is bad, but for the last line that sums it up."""
    return [one for one in found if one.state == "bad" and not one.found.startswith("`up` would refuse it, or")]


def the(found: list[Finding], check: str, node: str | None = None) -> Finding:
    rows = [one for one in found if one.check == check and (node is None or one.node == node)]
    assert len(rows) == 1, found
    return rows[0]


@pytest.mark.nightly
def test_two_healthy_nodes_are_measured(hosts: Hosts, examine: Examine) -> None:
    found = examine(is_quick=False)
    assert bad(found) == []
    for host in hosts:
        assert f"{host.address} (eth0" in the(found, "addresses", host.name).found
    net = the(found, "network").found
    assert f"node1 {hosts[0].address} (eth0), node2 {hosts[1].address} (eth0)" in net
    assert the(found, "distance").found.startswith("a connection takes 0.") or " ms" in the(found, "distance").found
    measured = the(found, "all-reduce")
    assert measured.state == "ok" and measured.found.startswith("gloo, 2 ranks over eth0: bus bandwidth ")
    assert "a token waits for 9 of them" in the(found, "planner").found  # four layers, cut by tensor
    assert the(found, "deployment").state == "ok"
    assert "the same on all 2 nodes: python 3" in the(found, "versions").found


@pytest.mark.nightly
def test_a_wrong_interface_a_firewall_and_a_cut_cable_are_named(hosts: Hosts, examine: Examine) -> None:
    (absent,) = bad(examine(engine={"env": {"NCCL_SOCKET_IFNAME": "ib9"}}))
    assert absent.check == "network" and "no interface ib9 of node1 is reached" in absent.found
    assert "eth0" in (absent.cure or "")
    # The address is there, but what is sent to it goes nowhere.
    hosts["node1"].run(["ip", "route", "add", "blackhole", f"{hosts['node2'].address}/32"])
    (blocked,) = bad(examine(is_quick=False))
    assert blocked.check == "network" and "is not reached from" in blocked.found
    assert any(host.address in (blocked.cure or "") for host in hosts)
    hosts["node2"].cut()
    found = {one.check: one for one in bad(examine(is_quick=False))}
    assert found.keys() == {"addresses", "network"}
    assert (found["addresses"].node, found["addresses"].found) == ("node2", "none but loopback")
    assert "is not reached from" in found["network"].found
    assert "open the network between them" in (found["network"].cure or "")


@pytest.mark.nightly
def test_what_is_wrong_is_named_all_together(hosts: Hosts, examine: Examine, tmp_path: Path) -> None:
    folder = hosts.shared / "python"
    (folder / "vllm-0.31.0.dist-info").mkdir(parents=True)
    (folder / "vllm-0.31.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    OverHosts.env["node2"] = {"PYTHONPATH": str(folder), "NCCL_IB_HCAS": "mlx5_0"}
    hosts["node2"].run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"])
    OverHosts.wrap["node2"] = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    found = examine(engine={"env": {"NCCL_SOCKET_IFNAM": "eth0"}})
    (one,) = bad(found)
    assert one.check == "versions" and "vllm is 0.31.0 on node2 (rank 1)" in one.found
    rows = [(one.node, one.found) for one in found if one.check == "variables"]
    assert [node for node, _ in rows] == ["node2", None]
    assert "did you mean NCCL_IB_HCA?" in rows[0][1] and "did you mean NCCL_SOCKET_IFNAME?" in rows[1][1]
    shm, limits = the(found, "/dev/shm", "node2"), the(found, "ulimits", "node2")
    assert shm.state == "warning" and shm.found.startswith("64.0 MiB free of 64.0 MiB")
    assert limits.state == "warning" and limits.found.startswith("open files: 256,")
    assert the(found, "/dev/shm", "node1").state == the(found, "ulimits", "node1").state == "ok"

    # Only this machine and, by the cluster's file system, nobody else has the model's folder. A bad partition: the
    # scheduler's own word, by the target's `check`.
    OverHosts.env.clear()
    OverHosts.problems = [Problem("slurm.partition", 'no partition "gpus"', "there are: gpu, debug")]
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", str(ROOT / "penstock" / "models" / "demo_model"), str(model)], check=True)
    told = bad(examine(str(model), parallel={"tensor": 3}))
    assert {one.node for one in told if one.check == "weights"} == {"node1", "node2"}
    assert f"{model}: no such folder not there" in {one.found for one in told}
    (file,) = (one for one in told if one.check == "file")
    assert (file.found, file.cure) == ('slurm.partition: no partition "gpus"', "there are: gpu, debug")
    (cut,) = (one for one in told if one.check == "deployment")
    assert "Its 8 attention heads do not divide by 3" in cut.found
    assert cut.cure == "Set parallel.tensor to one of 1, 2, 4, 8."

    # A penstock that does not run, and a node without power: neither takes another check away.
    OverHosts.problems = []
    broken = hosts.shared / "broken" / "msgspec"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no wheel for this machine')")
    OverHosts.env["node1"] = {"PYTHONPATH": str(broken.parent)}
    (one,) = bad(examine())
    assert (one.check, one.node) == ("node", "node1") and "no wheel for this machine" in one.found
    OverHosts.env.clear()
    hosts["node2"].kill()
    found = examine(engine={"env": {"NCCL_SOCKET_IFNAM": "eth0"}})
    (one,) = bad(found)
    assert (one.check, one.node) == ("node", "node2") and "No route to host" in one.found
    assert the(found, "memory").node == "node1" and the(found, "variables").state == "warning"
