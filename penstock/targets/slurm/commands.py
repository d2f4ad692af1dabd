"""Slurm's own commands, run: what they answer, and what a silence means."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence

import msgspec

from penstock import processes
from penstock.engines.vllm import images
from penstock.errors import PenstockError, Problem, UserError
from penstock.spec.deployment import Deployment
from penstock.spec.secret_values import secret_names
from penstock.targets.slurm import queue, site
from penstock.targets.slurm import script as slurm_script
from penstock.targets.slurm.queue import Job

_ASK_TIMEOUT_S = 30.0
_SUBMIT_TIMEOUT_S = 120.0
_FRESH_S = 1.0
_SILENT_S = 5.0
_POLL_S = 0.3
_AWAY_S = 15.0  # a slurmctld that restarts; squeue itself waits for MessageTimeout, by default 10 s
_RETRY_S = 1.0


class Queue:
    """The jobs of this user, as squeue lists them. Its last answer is kept."""

    def __init__(self) -> None:
        self.silence: str | None = None  # why Slurm does not answer
        self._jobs: dict[str, Job] | None = None
        self._asked_at = -1e9

    def cached(self) -> dict[str, Job] | None:
        """All jobs, at most a second old; None while Slurm does not answer."""
        if time.monotonic() - self._asked_at > (_FRESH_S if self.silence is None else _SILENT_S):
            with contextlib.suppress(PenstockError):
                self.now()
        return self._jobs if self.silence is None else None

    def answered(self, patience_s: float = _AWAY_S) -> dict[str, Job]:
        """As `now`, asked again for so long: a late end is better than half an end."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self.now()
            except PenstockError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)

    def now(self) -> dict[str, Job]:
        """All jobs, also those that ended a few minutes ago.  Raises PenstockError."""
        done = ask(["squeue", "-h", "-t", "all", "-u", getpass.getuser(), "-o", queue.FORMAT])
        self._asked_at = time.monotonic()
        if done.returncode:
            self.silence = complaint(done)
            raise PenstockError(f"could not read Slurm's job queue: {self.silence}", is_retryable=True)
        self.silence, self._jobs = None, queue.parse_jobs(done.stdout)
        return self._jobs

    def submit(self, argv: Sequence[str], what: str, hint: str, variables: Collection[str]) -> str:
        """Run sbatch; the number of the job."""
        done = ask(argv, _SUBMIT_TIMEOUT_S, variables=variables)
        job = queue.parse_submitted(done.stdout)
        self._asked_at = -1e9
        if done.returncode or job is None:
            raise PenstockError(f"could not submit {what}: {complaint(done)}", hint=hint, is_retryable=True)
        number, cluster = job
        if cluster is not None:  # squeue here may never list it
            done = ask(["scancel", "-M", cluster, number])
            raise UserError(
                f'cannot use job {number} for {what}: sbatch sent it to cluster "{cluster}"',
                detail=f"scancel -M {cluster} {number}: {complaint(done) if done.returncode else 'done'}",
                hint="Run penstock on a login node of that cluster; whatever adds --clusters to sbatch here must not.",
            )
        return number

    def cancel(self, numbers: Sequence[str]) -> None:
        if numbers:
            ask(["scancel", *numbers])

    def wait_over(self, numbers: Sequence[str], timeout_s: float) -> list[str]:
        """Those that are not over after that time. A job that is requeued in it is cancelled.  Raises PenstockError."""
        deadline = time.monotonic() + timeout_s
        while True:
            jobs = self.answered(max(_AWAY_S, deadline - time.monotonic()))
            left = [number for number in numbers if number in jobs and not jobs[number].is_over]
            if not left or time.monotonic() >= deadline:
                return left
            self.cancel([number for number in left if jobs[number].is_queued])
            time.sleep(_POLL_S)

    def with_steps(self, numbers: Sequence[str]) -> set[str]:
        """Jobs with a step that a signal reaches; where Slurm does not list its steps, all that run."""
        done = ask(["squeue", "-h", "-s", "-j", ",".join(numbers), "-o", "%i"])
        if done.returncode:
            jobs = self.answered()
            # A signal to a pending job hangs until it runs.
            return {job for job in numbers if job in jobs and not (jobs[job].is_queued or jobs[job].is_over)}
        return {job for job, _, step in (word.partition(".") for word in done.stdout.split()) if step.isdigit()}


def accounted(number: str) -> str:
    """A job's last state by Slurm's accounting, where the site has one."""
    if shutil.which("sacct") is None:
        return ""
    done = ask(["sacct", "-X", "-n", "-P", "-j", number, "-o", "JobIDRaw,State"])
    return queue.parse_sacct(done.stdout).get(number, "")


def read_site() -> site.Site:
    """The cluster's partitions and nodes.  Raises PenstockError when Slurm does not answer."""
    answers = [ask(["scontrol", "show", what, "-o"]) for what in ("partition", "node")]
    for done in answers:
        if done.returncode:
            raise PenstockError(f"could not read Slurm's nodes: {complaint(done)}", is_retryable=True)
    return site.parse(answers[0].stdout, answers[1].stdout)


def tested(deployment: Deployment, run_path: str, gpu_type: str | None) -> list[Problem]:
    """What sbatch, which knows accounts, QOS and limits, refuses of the request."""
    has_gres = deployment.slurm is not None and deployment.slurm.gres is not None
    needs = slurm_script.Needs(0 if has_gres else deployment.hardware.gpus_per_node or 0, None, None, gpu_type)
    jobs = {"it": slurm_script.directives(deployment, needs, run_path)}
    if deployment.gateway.on == "job":
        jobs["the gateway's job"] = slurm_script.gateway_directives(deployment, run_path)
    variables, problems = slurm_script.variables(deployment), []
    for what, words in jobs.items():
        lines = [f"#SBATCH --{line}" for line in words]
        done = ask(["sbatch", "--test-only"], stdin="\n".join(["#!/bin/bash", *lines, "true", ""]), variables=variables)
        problems += [Problem("slurm", f"sbatch refuses {what}: {complaint(done)}")] if done.returncode else []
    return problems


def versions(deployment: Deployment) -> dict[str, str]:
    """Versions of the engines' packages on the nodes, from the same Python here: they share it."""
    if deployment.slurm is not None and deployment.slurm.container:
        return images.versions_of(deployment)  # an image may need a node to run
    script = slurm_script.probe(deployment, sys.executable)
    done = ask(["bash", "-s"], stdin=script)
    try:
        facts = msgspec.json.decode(done.stdout.strip().splitlines()[-1])
        return dict(facts["machine"]["versions"])
    except (IndexError, KeyError, TypeError, msgspec.DecodeError) as exc:
        raise UserError(
            "cannot run penstock with the Python that the nodes will use",
            detail=complaint(done),
            hint="Set slurm.python, slurm.venv or slurm.conda to one that has penstock and the engine.",
        ) from exc


# What a job may have of the environment of `up`; the rest of it, with the secrets of the shell, stays here.
_KEPT = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "SLURM_CONF", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
        *("HF_TOKEN", "HF_TOKEN_PATH"),  # the engine may need it to download the model
        *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "MODULEPATH", "MODULESHOME"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    )
)
_KEPT_PREFIXES = ("LC_", "HF_", "PENSTOCK_", "PYTHON", "CONDA_", "LMOD_", "CUDA_", "NCCL_", "GLOO_", "VLLM_")
_MARKS = (processes.MARK_RUN, processes.MARK_RUN_ID, processes.MARK_ROLE, processes.MARK_REPLICA)


def environment(variables: Collection[str] = ()) -> dict[str, str]:
    """What Slurm's commands, and with them a job, get of this process's environment; `variables` too.

    A job gets all that sbatch has. Our marks would make it a process of this machine.
    """
    return {name: value for name, value in os.environ.items() if name in variables or _is_kept(name)}


def _is_kept(name: str) -> bool:
    is_public = name.startswith(_KEPT_PREFIXES) and not secret_names([name]) and name not in _MARKS
    return name in _KEPT or is_public


def ask(
    words: Sequence[str], timeout_s: float = _ASK_TIMEOUT_S, stdin: str = "", variables: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Exit code 1 also for one that cannot be run or hangs."""
    env = environment(variables)
    try:
        return subprocess.run(
            list(words), input=stdin, env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        why = f"no answer within {timeout_s:.0f} s"
    except OSError as exc:
        why = str(exc)
    return subprocess.CompletedProcess(list(words), 1, "", f"{words[0]}: {why}")


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """A command's errors in one line, without its name and level in front."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    plain = [line.partition("error: ")[2] or line for line in lines]
    return "; ".join(dict.fromkeys(plain))[:500] or f"it ended with code {done.returncode}"
