"""What Slurm prints, parsed: recorded from 22.05, and as the manuals of later versions have it."""

from __future__ import annotations

from datetime import datetime

import pytest

from penstock.targets.slurm import queue
from penstock.targets.slurm.queue import mib_of, parse_jobs, parse_submitted, reason_in_words, seconds_of

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
