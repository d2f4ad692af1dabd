"""The job that fetches a model into the project of the fake workbench, from a hub on the network of the pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cloudera_rig import file_for
from hosts import Hosts
from hub_server import HubServer, asked_hub
from launching import PROMPT, Place, call, now, wait_ready
from waiting import until

from penstock.models.files import BUNDLED
from penstock.run_folder import Run
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import Workbench
from penstock.testing.fake_workbench.workloads import Workload

pytestmark = pytest.mark.hosts
MODEL = "org/tiny"
FILES = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.suffix in (".json", ".safetensors")}


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


@pytest.fixture
def hub(place: Place, pod_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with asked_hub(monkeypatch, MODEL, FILES, pod_hosts.own_address) as made:
        yield made


def file(place: Place, workbench: Workbench, hub: HubServer, name: str = "one", nodes: str = "jobs") -> Path:
    env = {"HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
    return file_for(place, workbench, name, model=MODEL, engine={"env": env}, cloudera={"nodes": nodes})


def fetches(workbench: Workbench) -> list[Workload]:
    return [run for run in workbench.workloads.runs.values() if run.body["name"].endswith("-weights")]


def reason(place: Place) -> str:
    return call("status", "one").out


def kept(workbench: Workbench) -> Path:
    return workbench.pods.folder / ".cache" / "huggingface" / "hub" / "models--org--tiny"


def up_until_weights_come(place: Place, workbench: Workbench, hub: HubServer, nodes: str = "jobs") -> Run:
    """Weights that hang."""
    hub.is_open.clear()
    assert call("up", file(place, workbench, hub, nodes=nodes), "--json", "--no-wait").code == 0
    run = place.run()
    until(lambda: "waits for the weights" in reason(place) and " files, " in reason(place), "progress")
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", ["jobs", "workers"])
def test_weights_come_by_a_job_before_nodes_start_and_a_hub_that_refuses_them_ends_the_start(
    place: Place, workbench: Workbench, hub: HubServer, nodes: str
) -> None:
    run = up_until_weights_come(place, workbench, hub, nodes)
    assert [each.body.get("nvidia_gpu", 0) for each in workbench.workloads.runs.values()] == [0], "no node waits"
    hub.is_open.set()
    wait_ready(run)
    assert len(fetches(workbench)) == 1 and kept(workbench).is_dir()
    assert call("down", "one", "--weights").code == 0
    assert not kept(workbench).exists()

    workbench.pods.n_free = 0  # type: ignore[attr-defined]
    assert call("up", file(place, workbench, hub, nodes=nodes), "--json", "--no-wait").code == 0
    hub.token = "hf_of_ada"
    workbench.pods.n_free = None  # type: ignore[attr-defined]
    until(lambda: "the weights could not be fetched" in reason(place), "the hub refuses them: the reason")
    assert len(fetches(workbench)) == 2, "another run would end as this one"
    assert call("down", "one").code == 0


@pytest.mark.nightly
def test_a_killed_fetch_continues_and_other_deployments_find_what_came(
    place: Place, workbench: Workbench, hub: HubServer
) -> None:
    run = up_until_weights_come(place, workbench, hub)
    [first] = fetches(workbench)
    assert first.pod is not None
    first.pod.kill()
    until(lambda: len(fetches(workbench)) == 2, "the next run of the job")
    hub.asked.clear()
    hub.is_open.set()
    wait_ready(run)
    assert all(name.endswith(".safetensors") for name in hub.downloads), "what was there is not fetched again"
    assert call("up", file(place, workbench, hub, "two"), "--json").code == 0
    place.run("two")
    assert expected_text(PROMPT, 8) in call("chat", "two", "-m", PROMPT, "--max-tokens", 8).out
    assert len(fetches(workbench)) == 2, "the second deployment needs no job"
    done = call("down", "two", "--weights")
    assert done.code == 2 and 'cannot remove the weights of "two": one uses them' in done.err, done
    assert kept(workbench).is_dir() and now(run).phase == "ready"
    assert call("down", "one").code == 0
