"""The number of replicas follows the load on a real Slurm, which takes one more job in 30 s at most."""

from __future__ import annotations

import subprocess
import sys

import autoscale_story
import pytest
from autoscale_story import FIELDS, SLOW
from launching import measured
from slurm_cluster import ENV, Desk

pytestmark = [pytest.mark.hosts, pytest.mark.nightly]


def test_on_slurm(desk: Desk) -> None:
    """Two jobs, at least 30 s one after the other; what waits in the queue is cancelled first."""
    desk.up(desk.write(args=SLOW, **FIELDS))
    words = ["one", "--requests", "6", "--concurrency", "4", "--max-tokens", "300", "--json"]
    argv = [sys.executable, "-m", "penstock", "bench", "serve", *words]
    bench = desk.slurm.login.popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = bench.communicate()
    assert measured(bench.returncode, out)["failed"] == 0, err
    desk.wait(lambda: desk.status()["replicas"] == [], "nobody asks: all jobs end")
    assert desk.slurm.run(["squeue", "-h"]) == ""
    assert desk.call("chat", "one", "-m", "tell me a story", "--max-tokens", 8).strip().startswith("1:tell 2:me")
    told = desk.call("autoscale", "explain", "one", "--json")
    autoscale_story.check_log(autoscale_story.decisions_in(told))
    desk.down()
