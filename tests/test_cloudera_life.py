"""Real vLLM cut over two pods of the fake workbench, with mp in the 64 MB of /dev/shm that a project has at first."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cloudera_rig import SUBDOMAINS, file_for, left
from launching import Place, call, now, replica_of, started
from waiting import until

from penstock.run_folder import Run
from penstock.testing.demo_prompts import DEMO_PROMPTS, MAX_TOKENS
from penstock.testing.fake_workbench.server import Workbench
from penstock.testing.fake_workbench.workloads import READONLY_PORT
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

pytestmark = [pytest.mark.hosts, pytest.mark.vllm]
READY_S, PLACE_S = 400.0, 1200.0
CHATS = [row for row in DEMO_PROMPTS if row.kind == "chat"][:4]
TWO_PODS: dict[str, Any] = {"hardware": {"nodes": 2, "gpus_per_node": 0}, "workload": {"concurrency": 4}}


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


def up(place: Place, workbench: Workbench, executor: str, cut_by: str) -> tuple[Run, Client]:
    args = {"enforce-eager": True} if cut_by == "tensor" else {}  # vLLM loses requests between stages with it
    engine = {"kind": "vllm", "executor": executor, "max_model_len": 1024, "args": args}
    block = {"public": True, "memory_gb": 6, **({"shared_memory_mb": 512} if executor == "ray" else {})}
    file = file_for(place, workbench, engine=engine, cloudera=block, parallel={cut_by: 2}, **TWO_PODS)
    done = call("up", file, "--json", "--no-wait")
    assert done.code == 0, done
    run = place.run()
    until(lambda: now(run).phase == "ready", "ready")
    assert run.url == f"http://{SUBDOMAINS[0]}.{workbench.domain}", "public: clients need no login of the workbench"
    return run, Client(str(run.known_url), str(done.events[0]["key"]), 60.0)


def is_ready_since(run: Run, at: float) -> bool:
    announcement = replica_of(run).announcement
    return now(run).phase == "ready" and announcement is not None and (announcement.started_at or 0.0) > at


def check_texts(client: Client) -> None:
    for row in CHATS:
        messages = [{"role": "user", "content": row.prompt}]
        assert client.chat(messages, model="one", max_tokens=MAX_TOKENS, temperature=0).text == row.text


def ray_token() -> str:
    with started("dashboard", "one", "--ray", "0") as command:
        return str(command.communicate()[0]).strip()


def check_dashboard(run: Run, workbench: Workbench, address: str) -> str:
    """Ray's dashboard where the workbench's proxy leads all viewers of the project to: only the token opens it, and no
    file has that."""
    place, token = f"http://{address}:{READONLY_PORT}", ray_token()
    for key in (None, "wrong"):
        for path in ("/api/version", "/api/jobs/", "/nodes?view=summary"):
            with pytest.raises(HttpError) as refusal:
                Client(place, key).get_json(path)
            assert refusal.value.status == (401 if key is None else 403)
        with pytest.raises(HttpError):
            Client(place, key).post_json("/api/jobs/", {"entrypoint": "true"})
    ray = Client(place, token)
    assert "ray_version" in ray.get_json("/api/version")
    assert isinstance(ray.get_json("/api/jobs/"), list)
    first = next(row for row in workbench.workloads.runs.values() if row.body["name"].endswith("n0"))
    log = call("logs", "one").out
    assert f"Ray's dashboard: https://read-only-{first.engine}.{workbench.domain}" in log
    assert len(token) == 64 and token not in log
    files = [path for path in workbench.pods.folder.rglob("*") if path.is_file()]
    assert len(files) > 10 and not any(token.encode() in path.read_bytes() for path in files)
    processes = [process for host in workbench.pods.hosts for process in host.processes()]  # type: ignore[attr-defined]
    assert any("gcs_server" in word for process in processes for word in process.argv), "Ray runs"
    assert not any(token in word for process in processes for word in process.argv)
    return token


@pytest.mark.nightly
@pytest.mark.parametrize(("executor", "cut_by"), [("mp", "tensor"), ("ray", "pipeline")])
def test_vllm_over_two_pods_gives_the_reference_text_and_comes_back_when_one_is_killed(
    place: Place, workbench: Workbench, executor: str, cut_by: str
) -> None:
    run, client = up(place, workbench, executor, cut_by)
    announcement = replica_of(run).announcement
    assert announcement is not None and len({node.address for node in announcement.nodes}) == 2
    check_texts(client)
    token = check_dashboard(run, workbench, announcement.nodes[0].address) if executor == "ray" else None
    second = next(row for row in workbench.workloads.runs.values() if row.body["name"].endswith("n1"))
    assert second.pod is not None
    second.pod.kill()
    killed_at = time.time()
    until(lambda: now(run).phase == "degraded", "status says that it is lost")
    until(lambda: is_ready_since(run, killed_at), "the replica is back")
    check_texts(client)
    if executor == "ray":
        assert len(ray_token()) == 64 and ray_token() != token, "each start has its own"
    assert call("down", "one").code == 0
    assert left(workbench) == []
