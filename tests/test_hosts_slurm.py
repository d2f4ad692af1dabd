"""The Slurm that other tests run on (hosts_slurm.py) is a real one, in both its ways to track processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hosts_slurm import PROCTRACKS, Slurm, missing_slurm

pytestmark = pytest.mark.hosts

both = pytest.mark.parametrize("slurm", PROCTRACKS, indirect=True)

# For each GPU file: what opening it says.
OPEN_GPUS = """
import glob, os, sys
for path in sorted(glob.glob(sys.argv[1] + "/dev/gpu*")):
    try:
        os.open(path, os.O_RDONLY)
    except OSError as error:
        print(os.path.basename(path), os.strerror(error.errno), sep=":")
"""


@both
def test_jobs_see_their_gpus_and_only_cgroups_keep_them_from_others(slurm: Slurm) -> None:
    folder = str(slurm.hosts.base)
    words = ["srun", "-N1", "--gpus=1", "python3", "-c", OPEN_GPUS, folder]
    if not list(Path(folder, "dev").iterdir()):
        pytest.skip("no device files can be made here")
    opened = dict(line.split(":") for line in slurm.run(words).split("\n") if line)
    kept = "Operation not permitted" if slurm.proctrack == "cgroup" else "No such device or address"
    assert opened == {"gpu0": "No such device or address", "gpu1": kept, "gpu2": kept, "gpu3": kept}
    assert slurm.run(["srun", "-N1", "--gpus=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]) == "0,1\n"
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        slurm.run(["srun", "-N1", "--gpus-per-node=9", "true"])


@both
def test_what_a_job_leaves_running_ends_with_it_only_in_cgroups(slurm: Slurm) -> None:
    number = slurm.submit("#!/bin/bash\n(setsid sleep 321 &)\nexec sleep 0.3")
    slurm.wait(number, "COMPLETED")
    slurm.wait_idle()
    left = [process for node in slurm.hosts for process in node.processes() if process.argv == ["sleep", "321"]]
    assert len(left) == (0 if slurm.proctrack == "cgroup" else 1)
    slurm.clear()
    assert not [process for node in slurm.hosts for process in node.processes() if process.argv == ["sleep", "321"]]


def test_between_tests_disks_are_emptied_and_what_is_mounted_stays(slurm: Slurm) -> None:
    slurm.run(["touch", "/tmp/a", "/root/b", "/dev/shm/c", f"{slurm.hosts.shared}/d"])
    slurm.hosts[0].run(["touch", "/tmp/a", "/dev/shm/c"])
    slurm.clear()
    for host in (slurm.login, slurm.hosts[0]):
        found = host.run(["ls", "/tmp/a", "/root/b", "/dev/shm/c", f"{slurm.hosts.shared}/d"], check=False)
        assert not found.stdout
        host.run(["ls", str(Path(__file__)), str(slurm.hosts.ssh_config), "/root/.ssh/config"])


def test_where_slurm_is_absent_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hosts_slurm.PROGRAMS", ("slurmctld-of-another-world",))
    assert "not installed: slurmctld-of-another-world" in str(missing_slurm("linuxproc"))


@both
def test_no_control_group_is_named_after_a_node_alone(slurm: Slurm) -> None:
    slurm.run(["srun", "-N2", "true"])
    found = subprocess.run("ls -d /sys/fs/cgroup/*/slurm_node*", shell=True, capture_output=True, text=True)  # noqa: S602
    assert not found.stdout
