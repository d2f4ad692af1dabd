"""What Slurm prints, parsed: what a cluster has, with words for what it lacks that lead to what there is; its queue."""

from __future__ import annotations

from datetime import datetime

import pytest
import yaml
from golden_files import cases

from penstock.errors import SpecError
from penstock.hardware import Machine
from penstock.spec import reading
from penstock.spec.blocks import Slurm
from penstock.targets.slurm import queue
from penstock.targets.slurm import site as slurm_site
from penstock.targets.slurm.queue import mib_of, parse_jobs, parse_submitted, reason_in_words, seconds_of
from penstock.targets.slurm.site import Site, expand, parse_gres

VERSIONS = {"vllm": "0.33.0"}
PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 Nodes=c[1-2] State=UP
PartitionName=gpu AllowGroups=ALL Default=NO MaxNodes=2 MaxTime=12:00:00 Nodes=g[1-3],old1 State=UP
PartitionName=long AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=g[1-3] State=UP
PartitionName=closed AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=g1 State=DOWN
"""
NODE = (
    "NodeName={name} Arch=x86_64 CPUAlloc=0 CPUEfctv={cpus} CPUTot={cpus} AvailableFeatures={features} "
    "ActiveFeatures={features} Gres={gres} NodeAddr={name} Version=22.05.8 OS=Linux 6.1 #1 SMP "
    "RealMemory=512000 AllocMem=0 FreeMem=1 State={state} Partitions={partitions} CfgTRES=cpu=8\n"
)


def node(name: str, gres: str, partitions: str, state: str = "IDLE", features: str = "(null)", cpus: int = 64) -> str:
    return NODE.format(name=name, gres=gres, partitions=partitions, state=state, features=features, cpus=cpus)


NODES = (
    node("c1", "(null)", "cpu") + node("c2", "(null)", "cpu", cpus=32)
    + node("g1", "gpu:h100:4(S:0-1)", "gpu,long,closed", features="ib,h100")
    + node("g2", "gpu:h100:4(S:0-1)", "gpu,long", "MIXED", features="ib,h100")
    + node("g3", "gpu:h100:4(S:0-1)", "gpu,long", "IDLE+DRAIN", features="h100")
    + node("old1", "gpu:v100:2", "gpu")
)  # fmt: skip


SITE = slurm_site.parse(PARTITIONS, NODES)
GPUS = {"gpu": "h100-sxm", "gpus_per_node": 4}


def problems(**fields: object) -> list[str]:
    raw = {"model": "m/x", "target": "slurm", **fields}
    return [str(problem) for problem in slurm_site.problems(SITE, reading.from_mapping(raw))]


def machines(site: Site = SITE, **fields: object) -> list[Machine]:
    return slurm_site.machines(site, reading.from_mapping({"model": "m/x", "target": "slurm", **fields}), VERSIONS)


def of_file(**fields: object) -> list[Machine]:
    wanted = reading.from_mapping({"model": "m/x", "target": "slurm", **fields})
    return slurm_site.machines_of_file(wanted, "no sbatch here")


def test_a_good_request_is_not_refused_and_problems_come_together() -> None:
    block = {"partition": "gpu", "gres": "gpu:h100:4", "time": "12:00:00"}
    assert problems(hardware={**GPUS, "nodes": 2}, slurm=block) == []
    assert problems(hardware={**GPUS, "nodes": 3}, slurm={"partition": "long", "time": "7-0"}) == []
    assert problems(engine={"kind": "vllm"}) == []
    wrong = {"partition": "gpu", "time": "2-0", "gres": "gpu:tpu:1", "cpus_per_node": 100}
    assert len(problems(hardware={"gpu": "h100-sxm"}, slurm=wrong)) == 2, "all that is wrong is told together"


@pytest.mark.parametrize(("fields", "problem"), cases("slurm/site_mistakes.txt"))
def test_what_the_site_lacks_is_refused_with_what_it_has(fields: str, problem: str) -> None:
    assert problems(**yaml.safe_load(fields)) == [problem]


def test_machines_are_those_that_a_job_may_get() -> None:
    first, second = machines(hardware=GPUS, slurm={"partition": "long", "memory": "100G"})
    assert (first.host, second.host) == ("g1", "g2"), "a drained node is not counted on"
    assert (len(first.gpus), first.memory_free_bytes, first.versions) == (4, 100 * 2**30, VERSIONS)
    assert first.gpus[0].memory_bytes > 79 * 2**30
    for request in ({"slurm": {"gres": "shard:8"}}, {"hardware": {"gpus_per_node": 0}}):
        assert {len(machine.gpus) for machine in machines(**request)} == {0}
    # Without a site the file is believed, and what it does not say is not known.
    assert [len(machine.gpus) for machine in of_file(hardware={**GPUS, "nodes": 2})] == [4, 4]
    (alone,) = of_file(hardware={"gpu": "h100-sxm"}, slurm={"gres": "gpu:h100:2"})
    assert (len(alone.gpus), alone.memory_bytes, alone.gpus[0].memory_bytes) == (2, None, first.gpus[0].memory_bytes)
    assert [machine.memory_bytes for machine in of_file(slurm={"memory": "64G"})] == [64 * 2**30]
    with pytest.raises(SpecError) as caught:
        of_file(slurm={"gres": "gpu:4"})
    (problem,) = caught.value.problems
    assert (problem.path, "nothing else tells the memory of the GPUs: no sbatch" in problem.message) == (
        "hardware.gpu",
        True,
    )


@pytest.mark.parametrize(
    ("kinds", "card", "kind"),
    [
        (["h100", "v100"], "h100-sxm", "h100"),
        (["nvidia_h100_80gb_hbm3"], "h100-sxm", "nvidia_h100_80gb_hbm3"),
        (["nvidia_h100_80gb_hbm3"], "h100-pcie", None),
        (["h100_nvl", "h100"], "h100-pcie", "h100"),
        (["A100_40", "A100_80"], "a100-sxm4-80", "A100_80"),
        (["a100_3g.20gb", "a100"], "a100-sxm4-40", "a100"),
        (["quadro_rtx_6000"], "rtx-6000-ada", None),
        (["gb200"], "b200-sxm", None),
        (["big", ""], "h100-sxm", None),
    ],
)
def test_the_card_of_the_file_becomes_the_sites_type(kinds: list[str], card: str, kind: str | None) -> None:
    rows = "".join(node(f"g{index}", f"gpu:{name}:4" if name else "gpu:4", "cpu") for index, name in enumerate(kinds))
    site = slurm_site.parse(PARTITIONS, rows)
    raw = {"model": "m/x", "target": "slurm", "hardware": {"gpu": card, "gpus_per_node": 4}}
    assert slurm_site.gpu_type(site, reading.from_mapping(raw)) == kind
    if kind is not None:
        assert len(machines(site, hardware=raw["hardware"])) == 1


@pytest.mark.parametrize(
    ("kind", "card", "hint"),
    [
        ("h20", "h200", "if h20 is that card, set slurm.gres: gpu:h20:4"),
        ("l40", "l40s", "if l40 is that card, set slurm.gres: gpu:l40:4"),
        ("nvidia_h100_80gb_hbm3", "h100-pcie", "one of h100-sxm, or another slurm.partition"),
    ],
)
def test_another_type_of_gpu_is_not_taken_for_the_card_of_the_file(kind: str, card: str, hint: str) -> None:
    site = slurm_site.parse(PARTITIONS, node("g1", f"gpu:{kind}:4", "cpu"))
    raw = {"model": "m/x", "target": "slurm", "hardware": {"gpu": card, "gpus_per_node": 4}}
    (problem,) = slurm_site.problems(site, reading.from_mapping(raw))
    assert (problem.path, problem.hint) == ("hardware.gpu", hint)
    assert not slurm_site.problems(site, reading.from_mapping({**raw, "slurm": {"gres": f"gpu:{kind}:4"}}))


@pytest.mark.parametrize("gres", ["gpu:h100", "gpu", "gpu:h100,shard:2", "shard,gpu:h100:1"])
def test_a_gres_without_a_number_is_one_as_for_slurm(gres: str) -> None:
    nodes = machines(slurm={"partition": "gpu", "gres": gres})
    assert {len(machine.gpus) for machine in nodes} == {1}
    assert ("old1" in [machine.host for machine in nodes]) == (gres == "gpu"), "only nodes with that type"


def test_gres_and_node_lists() -> None:
    assert slurm_site.requested(Slurm(gres="gpu:3g.20gb")) == [("gpu", "3g.20gb", 1)]
    assert slurm_site.requested(Slurm(gres="gpu:2")) == [("gpu", "", 2)]
    assert slurm_site.requested(Slurm()) == []
    assert parse_gres("gpu:h100:4(S:0,1),shard:8,gpu:2") == [("gpu", "h100", 4), ("shard", "", 8), ("gpu", "", 2)]
    assert parse_gres("(null)") == []
    assert expand("a[1-2,07]x,b") == ["a1x", "a2x", "a07x", "b"]
    assert expand("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    assert expand("") == []


# ---- the queue: recorded from 22.05, and as the manuals of later versions have it ------------------------------------


LINES = (
    "7\tRUNNING\t2026-11-20T20:01:33\t2026-11-20T20:11:33\tnode1\tone-0\t/root/.penstock/runs/one\tNone\n"
    "8\tPENDING\tN/A\tN/A\t\tone-1\t/root/.penstock/runs/one\tResources\n"
    "9\tCANCELLED\t2026-11-20T20:01:33\t2026-11-20T20:02:00\tnode[1-2]\ta b\t/root\tNone\n"
    "slurm_load_jobs error: nothing of ours\n"
)


def test_jobs_are_read_by_number() -> None:
    jobs = parse_jobs(LINES)
    assert list(jobs) == ["7", "8", "9"]
    assert jobs["7"].ends_at == datetime(2026, 11, 20, 20, 11, 33).timestamp()
    assert (jobs["8"].starts_at, jobs["8"].is_queued, jobs["8"].is_over) == (None, True, False)
    assert jobs["9"].is_over
    for state in ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "PENDING", "REQUEUE_HOLD"):
        assert not parse_jobs(LINES.replace("CANCELLED", state))["9"].is_over


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("None", "Slurm has not looked at it yet"),
        ("Resources", "waits for nodes to become free (Resources)"),
        ("(Priority)", "other jobs have a higher priority (Priority)"),
        ("QOSMaxJobsPerUserLimit", "its QOS has as much as it may of jobs (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpGRES", "its account has as much as it may of GPUs (AssocGrpGRES)"),
        ("AssocGrpCPUMinutesLimit", "its account has as much as it may of CPUs (AssocGrpCPUMinutesLimit)"),
        ("ReqNodeNotAvail, Unavailable:n1", "the requested nodes are not available (ReqNodeNotAvail, Unavailable:n1)"),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_reasons_are_words_with_slurms_own(reason: str, words: str) -> None:
    assert reason_in_words(reason) == words


def test_ends_have_what_the_job_wrote_and_who_cancelled_it_and_a_new_job_its_number_and_cluster() -> None:
    assert queue.end_in_words("NODE_FAIL", "started node1") == "lost a node"
    assert queue.end_in_words("FAILED", "ended 137") == "failed with code 137"
    assert queue.end_in_words("FAILED", "failed could not load module x") == "failed: could not load module x"
    assert queue.end_in_words("COMPLETED", "ended 0") == "ended by itself"
    assert queue.end_in_words("NEW_STATE", None) == "new_state"
    states = queue.parse_sacct("17|CANCELLED by 1000\n18|COMPLETED\n")
    assert states == {"17": "CANCELLED by 1000", "18": "COMPLETED"}
    texts = ("17\n", "17;gpu\n", "Welcome to the site!\n17\n", "", "error")
    assert [parse_submitted(text) for text in texts] == [("17", None), ("17", "gpu"), ("17", None), None, None]


def test_times_and_sizes_of_slurm() -> None:
    times = {"30": 1800, "30:15": 1815, "4:00:00": 14400, "1-0": 86400, "1-12": 129600, "1-12:30": 131400}
    times |= {"1-00:00:01": 86401}
    nothing = dict.fromkeys(("UNLIMITED", "soon", "-1", "1:2:3:4", ""))
    assert {text: seconds_of(text) for text in (*times, *nothing)} == times | nothing
    assert [mib_of(text) for text in ("64G", "1000", "2048K", "1T", "0", "64 G")] == [65536, 1000, 2, 1048576, 0, None]
