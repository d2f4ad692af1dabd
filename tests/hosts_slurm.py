"""A real Slurm on hosts (hosts.py): slurmctld on login, slurmd on every node, munge on all, GPUs that are only files.

    slurm.run(["srun", "-N2", "hostname"])             # on login, as root
    job = slurm.submit("#!/bin/sh\\nsleep 60")
    slurm.wait(job, "RUNNING")

Partitions: `main`, the default, and `high`, which preempts jobs of `main` (they are requeued). Each node claims 8 CPUs,
16 GB of memory and 4 GPUs of type h100, whatever the machine has. Root's home is shared by all hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
from hosts import MACHINES, PATH, Host, HostProcess, Hosts
from hosts_janitor import note
from waiting import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
GPUS = 4
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")

# What runs on these hosts between tests.
SERVICES = {"sshd listener", "munged", "slurmctld", "slurmscriptd", "slurmd"}

# Without cgroups a job's daemonised processes outlive it: real clusters are set up both ways. That one is the harder.
PROCTRACKS = ("linuxproc", pytest.param("cgroup", marks=pytest.mark.nightly))

# The reason for each odd line: AuthType's socket is each host's own /run/munge. config_overrides: 8 CPUs on 2 real
# ones. DefMemPerCPU: else one step takes all the node's memory. SchedulerParameters: no second of waiting per job.
SLURM_CONF = (MACHINES / "slurm.conf").read_text()
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\nConstrainRAMSpace=yes\n"

# Slurm names its control groups after the node, so two clusters would share them: each node gets a part of the tree.
OWN_CGROUPS = (MACHINES / "own_cgroups.sh").read_text()


def missing_slurm(proctrack: str) -> str | None:
    """Why there can be no Slurm here, beyond what hosts need; None where there can."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    if absent:
        return f"not installed: {', '.join(absent)} (`make hosts` installs Slurm)"
    if proctrack == "cgroup" and not (CGROUPS / "memory" / "cgroup.procs").exists():
        return "proctrack/cgroup: this machine has no cgroup v1, and on v2 slurmd needs a systemd that runs"
    return None


def _program(process: HostProcess) -> str:
    """Daemons write what they like in argv[0]: "sshd: /usr/sbin/sshd -D [listener]" for the one, "sshd: root@notty"."""
    first = process.argv[0] if process.argv else ""
    return "sshd listener" if first.startswith("sshd: /usr/sbin/sshd") else Path(first.split(":")[0]).name


class Slurm:
    """A Slurm on hosts that have a login. It ends with them. Ready when the constructor returns."""

    def __init__(self, hosts: Hosts, proctrack: str = "linuxproc") -> None:
        self.hosts, self.login, self.proctrack = hosts, hosts.login, proctrack
        etc = hosts.base / "etc" / "system" / "slurm"  # which is every host's /etc/slurm, at later starts by hosts.py
        etc.mkdir()
        (hosts.base / "etc" / "munge.key").write_bytes(os.urandom(128))
        (hosts.base / "etc" / "munge.key").chmod(0o600)
        (etc / "gres.conf").write_text(self._gpus())
        (etc / "cgroup.conf").write_text(CGROUP_CONF)
        (etc / "slurm.conf").write_text(
            SLURM_CONF.format(
                login=self.login.address,
                log=hosts.base / "log",
                proctrack=proctrack,
                task="cgroup" if proctrack == "cgroup" else "none",
                gpus=GPUS,
                nodes="\n".join(f"NodeName={node.name} NodeAddr={node.address}" for node in hosts),
            )
        )
        for host in [self.login, *hosts]:
            host.run(["mount", "--bind", str(etc), "/etc/slurm"])
        self.login.service(["bash", "-c", f"{self._munged(self.login)}; exec slurmctld -i -D"])
        for node in hosts:
            node.service(["bash", "-c", f"set -e; {self._cgroups(node)}{self._munged(node)}; exec slurmd -D"])
        self.wait_idle()

    def run(self, words: list[str], *, check: bool = True, stdin: str = "", cwd: str = "/root") -> str:
        """Standard output of a program on login."""
        return self.login.run(words, check=check, stdin=stdin, cwd=cwd).stdout

    def submit(self, script: str, *options: str) -> int:
        """The number of the new job."""
        return int(self.run(["sbatch", "--parsable", *options], stdin=script).split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says; empty once Slurm has forgotten it, five minutes after its end."""
        line = self.run(["scontrol", "show", "job", "-o", str(number)], check=False)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def wait(self, number: int, *states: str) -> dict[str, str]:
        """Block until the job is in one of the states; what `job` says then."""

        def reached() -> dict[str, str] | None:
            job = self.job(number)
            return job if job.get("JobState") in states else None

        job = until(reached, f"job {number} is {' or '.join(states)}")
        assert job is not None
        return job

    def wait_idle(self) -> None:
        """Block until every node is idle."""
        until(lambda: self._states() == ["idle"] * len(self.hosts), "all nodes of Slurm are idle")

    def clear(self) -> None:
        """No jobs, all nodes on and idle, no process but the services, empty disks: what a test may expect to find."""
        self.hosts.heal()
        if self.run(["squeue", "-h"]):
            # KILL, for a job that ignores TERM would hold its nodes for KillWait.
            self.run(["scancel", "--user=root", "--full", "--signal=KILL", "--state=RUNNING"], check=False)
            self.run(["scancel", "--user=root"])
        for name in self.hosts.names:
            if self._states(name) != ["idle"]:
                self.run(["scontrol", "update", f"nodename={name}", "state=resume"], check=False)
        self.wait_idle()
        for host in [self.login, *self.hosts]:
            for process in host.processes():
                if process.pid != 1 and _program(process) not in SERVICES:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.outer_pid, signal.SIGKILL)
            host.run(["find", "/dev/shm", "-mindepth", "1", "-delete"])
        self.hosts.clear_disks("slurmd", "slurmctld")

    def _states(self, node: str = "") -> list[str]:
        words = ["sinfo", "-h", "-N", "-p", "main", "-o", "%T", *(["-n", node] if node else [])]
        return self.run(words, check=False).split()

    def _munged(self, host: Host) -> str:
        """Munge goes to the background when its socket is there, so what comes next can use it."""
        base = self.hosts.base
        files = f"--log-file={base}/log/{host.name}.munged --seed-file=/run/munge/seed --pid-file=/run/munge/pid"
        return f"munged --key-file={base}/etc/munge.key {files}"

    def _cgroups(self, node: Host) -> str:
        if self.proctrack != "cgroup":
            return ""
        group = f"penstock-{self.hosts.slot}-{node.name}"
        found = [name for name in CONTROLLERS if (CGROUPS / name).is_dir()]
        for name in found:
            note(self.hosts.base, f"cgroup {CGROUPS / name / group}")
        return OWN_CGROUPS.format(controllers=" ".join(found), group=group)

    def _gpus(self) -> str:
        """Devices 195:N as NVIDIA's, without a driver behind them: an allocated GPU opens with ENXIO, another with
        EPERM. Copies of /dev/null would do for the count, but the devices of one number are one to the cgroup."""
        folder = self.hosts.base / "dev"
        folder.mkdir()
        try:
            for number in range(GPUS):
                os.mknod(folder / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(195, number))
        except PermissionError:
            return f"AutoDetect=off\nName=gpu Type=h100 Count={GPUS}\n"
        return f"AutoDetect=off\nName=gpu Type=h100 File={folder}/gpu[0-{GPUS - 1}]\n"
