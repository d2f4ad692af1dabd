"""The contract of targets (testing/conformance.py), each on its place in memory.

Of `local` it runs on processes: it is nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_recorded
import msgspec
import pytest
from cloudera_rig import DOMAIN, ask_here, left
from place_stubs import (
    HOSTS,
    Clock,
    ContainerStub,
    KubernetesStub,
    PodsStub,
    RayStub,
    SlurmStub,
    SshStub,
    TunnelsStub,
    client_of,
)
from samples import NOW, demo_plan, deployment, draft

from penstock import targets
from penstock.errors import PenstockError
from penstock.paths import home
from penstock.run_folder import Launch, Run, create, replica
from penstock.targets import Target, waiting
from penstock.targets.cloudera import folder
from penstock.targets.cloudera import target as cloudera
from penstock.targets.cloudera import view as view_of_pods
from penstock.targets.kubernetes import access, placing, view
from penstock.targets.kubernetes import target as kubernetes
from penstock.targets.kubernetes.api import Api
from penstock.targets.ray import jobs_api
from penstock.targets.ray import target as ray
from penstock.targets.slurm import commands
from penstock.targets.slurm import target as slurm
from penstock.targets.ssh import bundle, liveness, logs, placement
from penstock.targets.ssh import target as ssh
from penstock.targets.vessl import api as vessl_api
from penstock.targets.vessl import runs
from penstock.targets.vessl.target import OnVessl
from penstock.testing import conformance
from penstock.testing.conformance import check_target
from penstock.testing.fake_vessl import server
from penstock.testing.fake_vessl.account import CLUSTER
from penstock.testing.fake_vessl.server import FakeVessl
from penstock.testing.fake_workbench.server import PROJECT, Workbench

# Tests that check the contract of a target. A new target joins by a row.
CHECKED = {
    "cloudera": "test_contracts.py",
    "kubernetes": "test_contracts.py",
    "local": "test_local_target.py",
    "ray": "test_contracts.py",
    "slurm": "test_contracts.py",
    "ssh": "test_contracts.py",
    "vessl": "test_contracts.py",
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (conformance, commands, slurm, ray, liveness, placement):
        monkeypatch.setattr(module, "time", made)
    return made


def written(target: Target, /, **fields: Any) -> tuple[Run, Launch]:
    """A run whose folder is written and that is not placed yet, and the launch of its nodes."""
    wanted, plan = deployment(name="one", **fields), demo_plan("fake", drain_s=10.0)
    token = home() / "runs" / "one" / "secrets" / "admin-token"
    launch = Launch("one", plan, ("http://127.0.0.1:1",), str(token), listen=target.listen)
    artifact = target.render(launch, sys.executable, wanted)
    facts = {"plan": plan, "artifact": artifact, "placed": target.placed(wanted)}
    return create(msgspec.structs.replace(draft(wanted), **facts), NOW), launch


def parse_once(run: Run, patch: pytest.MonkeyPatch) -> None:
    """The file of the run's deployment, which is parsed each time that a target asks."""
    wanted = run.deployment()
    patch.setattr(Run, "deployment", lambda _: wanted)


def test_every_target_is_checked() -> None:
    assert CHECKED.keys() == targets.TABLE.keys()
    for name in CHECKED.values():
        assert "check_target(" in Path(__file__).with_name(name).read_text("utf-8")


def test_slurm_keeps_the_contract_of_targets(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = slurm.Slurm()
    gateway = {"on": "job", "auth": "keys", "drain_s": 2}
    run, launch = written(target, target="slurm", gateway=gateway, slurm={"time": "10"})
    stub = SlurmStub(run)
    for module in (commands, slurm):
        monkeypatch.setattr(module, "ask", stub.ask)
    monkeypatch.setattr(slurm, "_run_survey", stub.survey)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    check_target(target, run, launch, sys.executable, stub.living)


def test_ray_keeps_the_contract_of_targets(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target, stub = ray.RayJobs(), RayStub()
    run, launch = written(target, target="ray", ray={"address": stub.address})
    monkeypatch.setattr(ray, "Dashboard", stub)
    monkeypatch.setattr(jobs_api, "package", lambda with_model: ("penstock.zip", b""))
    # What forgets a survey in a thread does it at once.
    at_once = SimpleNamespace(Thread=lambda target, args, name: SimpleNamespace(start=lambda: target(*args)))
    monkeypatch.setattr(ray, "threading", at_once)
    check_target(target, run, launch, sys.executable, lambda: list(stub.rows))


def test_ssh_keeps_the_contract_of_targets(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, stub = ssh.OverSsh(), SshStub.new()
    run, launch = written(target, target="ssh", ssh={"hosts": list(HOSTS)})
    for module in (ssh, placement):
        monkeypatch.setattr(module, "Ssh", stub)
    monkeypatch.setattr(bundle, "_PACKAGE", tmp_path)  # a small one
    monkeypatch.setattr(placement, "Tunnels", TunnelsStub)
    monkeypatch.setattr(placement, "free_lasting_ports", lambda n: list(range(20_000, 20_000 + n)))
    monkeypatch.setattr(logs, "lines", lambda hosts, *more: hosts.lines(*more))

    def leftovers() -> list[str]:
        return [f"{host}: {pids}" for host, pids in stub.processes.items() if pids] + sorted(stub.folders)

    check_target(target, run, launch, sys.executable, leftovers)


@pytest.fixture
def workbench_here(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """A workbench whose pods start at once."""
    (tmp_path / "project").mkdir()
    with Workbench(PodsStub(tmp_path / "project"), DOMAIN, listens=False) as made:
        ask_here(made, monkeypatch, clock)
        monkeypatch.setattr(made.workloads, "_answers", lambda application: True)
        monkeypatch.setattr(folder, "send_code", lambda *_: None)  # a zip of all of penstock
        for module in (cloudera, view_of_pods):
            monkeypatch.setattr(module, "time", clock)
        yield made


def written_there(workbench: Workbench, patch: pytest.MonkeyPatch) -> tuple[cloudera.ClouderaAi, Run, Launch]:
    target, block = cloudera.ClouderaAi(), {"workbench": workbench.url, "project": PROJECT}
    fields: dict[str, Any] = {"gateway": {"auth": "keys", "port": 8000}, "cloudera": block}
    assert target.check(deployment(name="one", target="cloudera", **fields)) == []  # finds the runtime
    run, launch = written(target, target="cloudera", **fields)
    parse_once(run, patch)
    return target, run, launch


def test_cloudera_keeps_the_contract_of_targets(workbench_here: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    target, run, launch = written_there(workbench_here, monkeypatch)
    store = workbench_here.pods.folder / ".penstock" / "runs" / run.name / run.store_file.name
    store.parent.mkdir(parents=True)
    store.write_text("keys")
    check_target(target, run, launch, sys.executable, lambda: left(workbench_here))
    assert store.exists() and target.leftovers() == [], "keys and usage outlive `down` and `clean`"
    (keys,) = target.kept_keys(run.name)
    cloudera.finish(keys)
    assert not store.parent.exists() and target.kept_keys(run.name) == []


def test_a_job_that_the_workbench_refuses_or_has_no_machine_for_says_so(
    workbench_here: Workbench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, run, _ = written_there(workbench_here, monkeypatch)
    workbench_here.refuses_creation = (403, "quota exceeded: 1 GPU of 1 in use")
    with pytest.raises(PenstockError, match="quota exceeded"):
        target.place(run, [replica("0")])
    assert workbench_here.left() == [], "nothing stays behind a start that failed"
    workbench_here.refuses_creation, workbench_here.workloads.next_fault = None, "schedules for ever"
    run.write_handle(target.place(run, [replica("0")]))
    clock.sleep(5.0)
    row = target.status(run)[replica("0")]
    assert row.state == "queued" and "waits for a machine of the workbench" in (row.reason or "")
    target.end(run, 0.0)


def test_vessl_keeps_the_contract_of_targets(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runs, waiting):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(server, "Container", ContainerStub)
    with FakeVessl(tmp_path / "vessl", listens=False) as vessl:
        monkeypatch.setattr(vessl_api, "Client", client_of(vessl.ask))
        monkeypatch.setattr(vessl_api, "control", lambda *_: vessl.world.living[-1])
        for name, value in vessl.variables.items():
            monkeypatch.setenv(name, value)
        block = {"cluster": CLUSTER, "preset": "cpu-medium", "image": "penstock/fake:1"}
        run, launch = written(OnVessl(), target="vessl", vessl=block, gateway={"port": 8000, "auth": "keys"})
        parse_once(run, monkeypatch)

        def leftovers() -> list[str]:
            secrets = [name for name in vessl.world.secrets if name.startswith("penstock-")]
            return [*(str(each.id) for each in vessl.world.living), *secrets]

        check_target(OnVessl(), run, launch, sys.executable, leftovers)


def test_kubernetes_keeps_the_contract_of_targets(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target, stub = kubernetes.Kubernetes(), KubernetesStub()
    for module in (kubernetes, placing, view, waiting):
        monkeypatch.setattr(module, "time", clock)
    way = SimpleNamespace(where='context "test"', headers=dict, complaint=lambda: None)
    monkeypatch.setattr(kubernetes, "connect", lambda *_: Api(way, stub.NAMESPACE, "test"))
    monkeypatch.setattr(Api, "_exchange", lambda _, *asked: stub.ask(*asked))
    monkeypatch.setattr(Api, "_lines", lambda _, *asked: stub.lines(*asked))
    block = {"image": "own", "cpus_per_node": 1, "memory": "1Gi", "expose": "LoadBalancer"}
    gateway, engine = {"auth": "keys", "port": 8000, "drain_s": 10}, {"kind": "fake"}
    run, launch = written(target, target="kubernetes", kubernetes=block, gateway=gateway, engine=engine)
    parse_once(run, monkeypatch)
    check_target(target, run, launch, sys.executable, lambda: [key for key in stub.objects if "one-store" not in key])
    monkeypatch.setattr(access, "is_configured", lambda: True)
    (keys,) = target.kept_keys("one")
    assert keys.what == 'keys and usage of "one", in claim "one-store"' and 'namespace "team"' in keys.place
    kubernetes.finish(keys)
    assert list(stub.objects) == [] == target.kept_keys("one")
    never = {key for key in kubernetes_recorded.recorded() if kubernetes_recorded.is_write(key)} - stub.asked
    assert never == set(), "what was asked of the API server was asked of the stub"
