"""The pure parts of target cloudera: statuses in words, what is sent, the relay's headers, lines of logs."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from samples import DEMO, LLAMA_70B, cpu_machine, demo_plan, deployment, gpu_machine, sized

from penstock import targets
from penstock.planner import Plan, launch
from penstock.run_folder import Launch
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.targets import Placement
from penstock.targets.cloudera import names, session, view, words, workloads
from penstock.targets.cloudera.relay import Relay, Upstream, forwarded_head
from penstock.targets.cloudera.words import NodeRun, PodNote
from penstock.targets.cloudera.workloads import Choices

GOLDEN = Path(__file__).parent / "golden" / "cloudera"
BLOCK = {"workbench": "https://ml-1.example", "project": "llm", "runtime": "images/python3.11-cuda:1"}


def row(status: str, **more: Any) -> dict[str, Any]:
    return {"id": "a", "status": f"ENGINE_{status}", **more}


def of(status: str, note: PodNote = PodNote(), failure: str | None = None) -> NodeRun:  # noqa: B008
    return NodeRun(row(status), note, failure, 48.0)


def test_a_session_says_what_ends_it_and_a_laptop_or_a_pod_of_ours_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CDSW_PROJECT_ID", "PENSTOCK_UNIT", "IDLE_MAXIMUM_MINUTES", "SESSION_MAXIMUM_MINUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IDLE_MAXIMUM_MINUTES", "60")
    assert session.time_limits() is None
    monkeypatch.setenv("CDSW_PROJECT_ID", "p")
    idle = "this session ends after 60 idle minutes (IDLE_MAXIMUM_MINUTES)"
    assert session.time_limits() == f"{idle}: the deployment goes on"
    monkeypatch.setenv("SESSION_MAXIMUM_MINUTES", "10080")
    whole = "after 10080 minutes in all (SESSION_MAXIMUM_MINUTES)"
    assert session.time_limits() == f"{idle} and {whole}: the deployment goes on"
    monkeypatch.setenv("PENSTOCK_UNIT", "gateway")
    assert session.time_limits() is None


# ---- statuses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "life"),
    [
        ("ENGINE_SCHEDULING", "queued"),
        ("running", "placed"),
        ("APPLICATION_STOPPING", "placed"),
        ("ENGINE_TIMEDOUT", "gone"),
        ("ENGINE_OF_A_LATER_VERSION", "placed"),
        ("", "placed"),
    ],
)
def test_statuses_of_all_versions_are_read(text: str, life: str) -> None:
    assert words.life({"status": text}) == life
    assert words.life(None) == "gone"


def test_a_replica_is_where_its_nodes_are() -> None:
    here = PodNote(address="10.0.0.1", began_at=1.0, ends_at=50.0, ends_by="JOB_MAXIMUM_MINUTES=1")
    later = PodNote(ends_at=90.0, ends_by="JOB_MAXIMUM_MINUTES=2")
    placed = words.placement_of_replica({0: of("RUNNING", here), 1: of("STARTING"), 2: of("RUNNING", later)})
    assert placed == Placement("placed", ends_at=50.0, ends_by="JOB_MAXIMUM_MINUTES=1", where="10.0.0.1")
    waits = words.placement_of_replica({0: of("RUNNING"), 1: of("SCHEDULING", failure="no GPU is free")})
    assert (waits.state, waits.reason) == ("queued", "1 of 2 nodes wait for a machine of the workbench: no GPU is free")
    broken = words.placement_of_replica({0: of("RUNNING"), 1: of("TIMEDOUT")})
    assert (broken.state, broken.reason, broken.is_final) == ("broken", "node 1 reached its time limit", False)
    gone = words.placement_of_replica({0: of("STOPPED")})
    assert (gone.state, gone.reason, gone.is_final) == ("gone", "its job was stopped in the workbench", True)
    assert words.placement_of_replica({0: NodeRun(None)}).reason == "its job was deleted in the workbench"


@pytest.mark.parametrize(
    ("note", "failure", "reason"),
    [
        (
            PodNote(began_at=1.0),
            None,
            "failed without a word: most often its pod needed more memory than 48 GB; raise cloudera.memory_gb",
        ),
        (PodNote(), "OOMKilled", "failed: its pod needed more memory than 48 GB; raise cloudera.memory_gb (OOMKilled)"),
        (PodNote(), "ImagePullBackOff", "failed: ImagePullBackOff"),
        (PodNote(began_at=1.0, ended_at=2.0, code=3), None, "failed: penstock ended with code 3"),
        (PodNote(reason="the runtime has Python 3.10"), None, "failed: the runtime has Python 3.10"),
    ],
)
def test_why_a_run_failed(note: PodNote, failure: str | None, reason: str) -> None:
    assert words.why_gone(of("FAILED", note, failure)) == reason


def test_an_application_that_starts_is_queued_and_one_that_was_stopped_gone() -> None:
    assert words.placement_of_application({"status": "APPLICATION_RUNNING"}, "gateway") == Placement("placed")
    assert words.placement_of_application({"status": "APPLICATION_STARTING"}, "gateway").state == "queued"
    stopped = words.placement_of_application({"status": "stopped"}, "gateway")
    assert stopped == Placement("gone", "the application of the gateway was stopped in the workbench")
    assert "deleted" in (words.placement_of_application(None, "chat page").reason or "")


def test_names_tell_whose_a_workload_is_and_the_newest_run_of_a_job_is_found_in_any_order() -> None:
    title = names.workload("llama-70", "0123456789ab", names.node_part("1", 0))
    assert title == "penstock-llama-70-0123456789ab-r1-n0"
    assert names.is_of(title, "llama-70") and not names.is_of(title, "llama")
    assert names.deployment_in(title) == "llama-70" and names.deployment_in("penstock-of-another-kind") is None
    assert names.subdomain("llama-70", "ui") == "penstock-llama-70-ui"
    rows = [row("RUNNING", scheduling_at=f"2026-01-0{day}T00:00:00Z") for day in (2, 3, 1)]
    assert words.newest(rows) == rows[1] and words.newest([]) is None and words.time_of("soon") is None


# ---- what is sent ----------------------------------------------------------------------------------------------------


def file(**fields: Any) -> Deployment:
    return deployment(name="one", target="cloudera", cloudera={**BLOCK, **fields.pop("cloudera", {})}, **fields)


def a_launch(plan: Plan) -> Launch:
    return Launch(
        "one", plan, ("http://10.0.0.9:1",), "/laptop/secrets/admin-token", announce_file="/laptop/address.json"
    )


def test_a_deployment_is_rendered_as_it_is_kept_in_golden_files() -> None:
    """70B over two pods of one GPU each, with the chat page."""
    wanted = file(
        model="meta-llama/Llama-3.1-70B-Instruct", hardware={"gpu": "h200-sxm", "gpus_per_node": 1, "nodes": 2}
    )
    wanted = msgspec.structs.replace(wanted, ui=True)
    box = gpu_machine(1, 141)
    plan = launch.make_on_gpus(wanted, LLAMA_70B, box, "0.33.0", 1, sized(wanted, box))
    files = workloads.artifact(a_launch(plan), wanted, Choices("images/python3.11-cuda:1", "7", most_gpus=1)).files
    kept = sorted(path.name.replace("amp-", "amp:") for path in GOLDEN.iterdir())
    assert files.keys() == {*kept, "launch.json", "start.py", "amp:deployment.yaml"}
    for name in kept:
        if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
            (GOLDEN / name.replace("amp:", "amp-")).write_text(files[name], "utf-8")
        assert files[name] == (GOLDEN / name.replace("amp:", "amp-")).read_text("utf-8"), (
            f"golden/cloudera/{name} is another"
        )
    offered = reading.from_mapping(yaml.safe_load(files["amp:deployment.yaml"])).cloudera
    assert offered is not None and (offered.workbench, offered.project) == (None, None)
    there = json.loads(files["launch.json"])
    assert there["announce_file"] == "/home/cdsw/.penstock/runs/one/gateway/address.json"
    assert there["token_file"] == "/home/cdsw/.penstock/runs/one/secrets/admin-token"
    assert msgspec.convert(there, Launch).cache.stage == "none" and there["announce_urls"] == []
    assert there["plan"]["layout"]["pipeline"] * there["plan"]["layout"]["tensor"] == 2
    environments = [json.loads(files[name])["environment"] for name in kept if name.endswith(".json")]
    assert not [key for env in environments for key in env if re.search("token|secret|password", key.lower())]


def test_a_rehearsal_asks_no_workbench_and_renders_the_runtime_of_the_file() -> None:
    plan = launch.make(file(), DEMO, cpu_machine(), "llamacpp", "1.0", 1)
    target = targets.load("cloudera")
    assert target.check(file(), is_rehearsal=True) == [] and target.warnings(file(), demo_plan("vllm")) == ()
    files = target.render(a_launch(plan), "python3", file()).files
    assert json.loads(files["node.json"])["runtime_identifier"] == BLOCK["runtime"]
    cpu, memory_gb = workloads.needs(file(), plan)
    assert cpu == plan.n_threads and 1 <= memory_gb <= 4
    assert workloads.needs(file(cloudera={"cpu": 3.5, "memory_gb": 48}), plan) == (3.5, 48)


# ---- the relay -------------------------------------------------------------------------------------------------------

UP = Upstream("https://penstock-one.ml-1.example", "workbench-key")


def test_the_relay_moves_the_clients_key_and_adds_the_workbenchs() -> None:
    head = b"POST /v1/x?a=b HTTP/1.1\r\nHost: 127.0.0.1:9\r\nAuthorization: Bearer sk-1\r\n"
    head += b"Connection: keep-alive\r\nX-A: b\r\n\r\n"
    assert forwarded_head(head, UP).split(b"\r\n") == [
        b"POST /v1/x?a=b HTTP/1.1",
        b"X-A: b",
        b"host: penstock-one.ml-1.example",
        b"authorization: Bearer workbench-key",
        b"connection: close",
        b"x-api-key: sk-1",
        b"",
        b"",
    ]
    own = b"GET / HTTP/1.1\r\nX-Api-Key: sk-2\r\n\r\n"
    assert b"x-api-key: sk-2" in forwarded_head(own, UP)
    assert b"x-api-key" not in forwarded_head(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", UP)


def relayed(url: str, answer: bytes | None = None) -> bytes:
    """What a client gets by a relay to `url`, or to a server that gives this answer."""

    async def on_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer or b"")
        writer.close()

    async def talk() -> bytes:
        above = await asyncio.start_server(on_request, "127.0.0.1", 0)
        to = url if answer is None else f"http://127.0.0.1:{above.sockets[0].getsockname()[1]}"
        server = await asyncio.start_server(Relay(Upstream(to, "key"))._on_client, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        whole = await reader.read()
        writer.close()
        for each in (server, above):
            each.close()
        return whole

    return asyncio.run(talk())


@pytest.mark.processes
@pytest.mark.nightly
def test_an_answer_passes_unchanged_and_no_answer_or_a_login_of_the_workbench_is_explained() -> None:
    answer = relayed("http://127.0.0.1:9")
    assert answer.startswith(b"HTTP/1.1 502 ") and b"could not connect to http://127.0.0.1:9" in answer
    for whole in (b"HTTP/1.1 200 OK\r\na: b\r\n\r\ndata: 1\n\n", b"HTTP/1.1 302 Found\r\nlocation: /ui/\r\n\r\n"):
        assert relayed("", whole) == whole
    login = relayed("", b"HTTP/1.1 302 Found\r\nlocation: https://ml-1.example/login\r\n\r\n")
    assert login.startswith(b"HTTP/1.1 401 ") and b"does not open applications" in login


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_lines_of_several_nodes_are_told_apart_and_a_begun_line_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "_LOOK_S", 0.0)
    data = {0: b"one\ntw", 1: None}
    looks = iter(range(9))

    def is_over() -> bool:
        look = next(looks)
        if look == 1:
            data.update({0: b"one\ntwo\n", 1: b"here\n"})
        return look == 3

    reads = [lambda ending, rank=rank: None if ending else data[rank] for rank in (0, 1)]
    assert list(view.log_lines(reads, True, None, is_over)) == ["one", "two", "n1: here"]
    data[0] = b"again"
    assert list(view.log_lines(reads, False, None, is_over)) == ["again", "n1: here"]
    assert list(view.log_lines(reads, False, 1, is_over)) == ["n1: here"]
    assert list(view.log_lines(reads, False, 0, is_over)) == []
