"""Target "slurm": every replica is a job. Slurm's own commands are all that is used, and squeue's word is cached.

What a job does is in `slurm_script`; it ends by itself when its nodes end, so a replica is drained by a signal to its
step and the job is cancelled only when that does not help. A job of ours is known by its number in the handle and, if
we were killed before that was written, by its working folder, which is the run's.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from penstock import processes
from penstock.errors import PenstockError, Problem, UserError
from penstock.hardware import Machine
from penstock.paths import home
from penstock.run_folder import Artifact, Handle, Launch, Run
from penstock.spec.blocks import Slurm as SlurmBlock
from penstock.spec.deployment import Deployment
from penstock.targets import Placement, Surveyed, Target
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
_GOODBYE_S = 15.0
_TERM_S = 15.0
_KILL_S = 120.0
_SWEEP_S = 15.0


class Slurm(Target):
    name = "slurm"
    features = frozenset({"resize", "logs-follow", "many-nodes", "elastic"})
    listen = "network"

    def __init__(self, is_rehearsal: bool = False) -> None:
        self._is_rehearsal = is_rehearsal
        self._jobs: dict[str, Job] | None = None
        self._asked_at = -1e9
        self._silence: str | None = None
        self._last: dict[tuple[str, str], Placement] = {}

    def rehearsed(self) -> Slurm:
        return Slurm(is_rehearsal=shutil.which("sbatch") is None)

    # ---- before ------------------------------------------------------------------------------------------------------

    def check(self, deployment: Deployment) -> list[Problem]:
        run_path = home() / "runs" / deployment.name
        found = slurm_script.problems(deployment, str(run_path))
        if found or self._is_rehearsal:
            return found
        if shutil.which("sbatch") is None:
            hint = "run penstock on a login node, where it is"
            return [Problem("target", "this machine is no client of Slurm: there is no sbatch", hint)]
        return site.problems(_site(), deployment) or _tested(deployment, str(run_path))

    def machines(self, deployment: Deployment) -> list[Machine]:
        if self._is_rehearsal:
            return site.machines(None, deployment, {})
        return site.machines(_site(), deployment, _versions(deployment))

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        with tempfile.TemporaryDirectory(dir=_shared_folder(), prefix="survey.") as folder:
            name = f"penstock-survey-{secrets.token_hex(4)}"
            words = slurm_script.survey(deployment, sys.executable, argv, folder)
            child = subprocess.Popen(
                ["srun", f"--job-name={name}", *words],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                said, _ = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                said = self._survey_over_time(child, name, timeout_s)
            found = _surveyed(Path(folder))
        return found or [Surveyed("slurm", None, err=" ".join(said.split())[-500:])]

    def _survey_over_time(self, child: subprocess.Popen[str], name: str, timeout_s: float) -> str:
        told = _ask(["squeue", "-h", "-n", name, "-o", "%T %r"]).stdout.split(maxsplit=1)
        _ask(["scancel", f"--name={name}", f"--user={getpass.getuser()}"])
        child.kill()
        child.communicate()
        if told and told[0] == "PENDING":
            return f"no node free within {timeout_s:.0f} s: {queue.reason_in_words(told[-1].strip())}"
        return f"no answer within {timeout_s:.0f} s"

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        run_path = str(Path(launch.token_file).parent.parent)
        text = msgspec.json.format(msgspec.json.encode(launch), indent=2).decode()
        files = {slurm_script.FILE: slurm_script.render(deployment, launch.plan, run_path, python)}
        if deployment.gateway.on == "job":
            here = [urlsplit(url).hostname or "" for url in launch.announce_urls]
            files[slurm_script.GATEWAY_FILE] = slurm_script.gateway(deployment, run_path, python, here)
        words = ("sbatch", "--parsable", f"--job-name={deployment.name}-{{replica}}")
        argv = (*words, f"{run_path}/artifact/{slurm_script.FILE}", "{replica}", "{launch}")
        return Artifact(argv, {**files, "launch.json": text + "\n"})

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, run: Run, replicas: Sequence[str]) -> Handle:
        self._end(run, self._of_folder(run), 0.0)  # of a launch before this one, which should have left none
        self.end_gateway(run, None, 0.0)
        try:
            return self.resize(run, Handle(self.name), replicas)
        except BaseException:
            with contextlib.suppress(PenstockError):
                self._end(run, self._of_folder(run), 0.0)
            raise

    def status(self, run: Run, handle: Handle) -> dict[str, Placement]:
        numbers = {replica: str(entry.get("job")) for replica, entry in handle.replicas.items()}
        jobs = self._cached()
        if jobs is None:
            return {replica: self._unknown(run, number) for replica, number in numbers.items()}
        lead_s = _block(run).successor_s
        found = {}
        for replica, number in numbers.items():
            job, note = jobs.get(number), _note(run, number)
            before = self._last.get((str(run.path), number))
            # What is final is not asked again, for sacct would be at every look while squeue still tells the job.
            if before is not None and before.state == "gone" and (job is None or (job.is_over and before.is_final)):
                found[replica] = before
            elif job is not None:
                found[replica] = _placement(job, note, lead_s, before)
            else:
                found[replica] = _forgotten(number, note)
            self._last[str(run.path), number] = found[replica]
        return found

    def _unknown(self, run: Run, number: str) -> Placement:
        """While Slurm does not answer: its last word. A controller that restarts must not look like a lost job."""
        before = self._last.get((str(run.path), number), Placement("placed"))
        return msgspec.structs.replace(before, reason=before.reason or f"Slurm does not answer: {self._silence}")

    def logs(self, run: Run, handle: Handle, replica: str, follow: bool, last: int | None = None) -> Iterator[str]:
        return run.log_lines(f"replica-{replica}", follow, last)

    def resize(self, run: Run, handle: Handle, replicas: Sequence[str]) -> Handle:
        entries = dict(handle.replicas)
        leaving = [entries.pop(replica) for replica in list(entries) if replica not in replicas]
        self._end(run, [str(entry.get("job")) for entry in leaving], run.plan().drain_s + _GOODBYE_S)
        jobs = self._now()
        for replica in replicas:
            job = jobs.get(str(entries.get(replica, {}).get("job")))
            if job is None or job.is_over:
                entries[replica] = {"job": self._submitted_before(run, replica, jobs) or self._send(run, replica)}
        ours = {str(entry["job"]) for entry in entries.values()}
        self._end(run, [number for number in self._of_folder(run) if number not in ours], 0.0)
        return Handle(self.name, entries)

    def cancel(self, run: Run, handle: Handle, grace_s: float) -> None:
        known = [str(entry.get("job")) for entry in handle.replicas.values()]
        if known or (shutil.which("squeue") and run.path.exists()):
            self._end(run, sorted({*known, *self._of_folder(run)}), grace_s)
        self.end_gateway(run, None, 0.0)  # one whose sbatch outlived the controller that was ended

    def _submitted_before(self, run: Run, replica: str, jobs: Mapping[str, Job]) -> str | None:
        """A job that was sent for this replica by somebody who was killed before it could be noted."""
        name = f"{run.name}-{replica}"
        alive = (job for job in jobs.values() if job.folder == str(run.path) and not job.is_over)
        return next((job.number for job in alive if job.name == name), None)

    def _of_folder(self, run: Run) -> list[str]:
        return [job.number for job in self._answered().values() if job.folder == str(run.path) and not job.is_over]

    def _send(self, run: Run, replica: str) -> str:
        (run.path / "jobs").mkdir(exist_ok=True)
        launch = run.record().id
        argv = [word.replace("{replica}", replica).replace("{launch}", launch) for word in run.artifact().argv]
        return self._sent(run, argv, f"replica {replica}", slurm_script.FILE, f"{run.name}-{replica}")

    def _sent(self, run: Run, argv: Sequence[str], what: str, file: str, name: str) -> str:
        """Submit it; its number, with which its log has its plain name."""
        done = _ask(argv, _SUBMIT_TIMEOUT_S, variables=slurm_script.variables(run.deployment()))
        sent = queue.parse_submitted(done.stdout)
        self._asked_at = -1e9
        if done.returncode or sent is None:
            raise PenstockError(
                f'could not submit {what} of "{run.name}": {_said(done)}',
                hint=f"The script: {run.artifact_path / file}",
                is_retryable=True,
            )
        number, cluster = sent
        if cluster is not None:
            _take_back(number, cluster, f'{what} of "{run.name}"')
        log = run.log(what.replace(" ", "-"))
        fresh = log.with_name(f".{log.name}.{number}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(f"{name}_{number}.log")
        fresh.replace(log)
        return number

    # ---- the gateway's job -------------------------------------------------------------------------------------------

    # Its working folder is not the run's, so that it is none of the replicas' jobs.

    def gateway_jobs(self, run: Run) -> dict[str, Placement] | None:
        jobs = self._cached()
        if jobs is None:
            return None
        ours = [job for job in jobs.values() if job.folder == str(run.gateway_folder) and not _told(run, job).exists()]
        lead_s = _block(run).successor_s
        return {job.number: _gateway_placement(job, lead_s) for job in sorted(ours, key=lambda job: int(job.number))}

    def start_gateway(self, run: Run) -> str:
        name = f"{run.name}-gateway"
        file = str(run.artifact_path / slurm_script.GATEWAY_FILE)
        argv = ["sbatch", "--parsable", f"--job-name={name}", file, run.record().id]
        return self._sent(run, argv, "gateway", slurm_script.GATEWAY_FILE, name)

    def end_gateway(self, run: Run, jobs: Sequence[str] | None, grace_s: float) -> None:
        if not (run.is_gateway_placed and shutil.which("squeue")):
            return
        ours = [job for job in self._answered().values() if job.folder == str(run.gateway_folder) and not job.is_over]
        ours = [job for job in ours if jobs is None or job.number in jobs]
        for job in ours:
            # A signal to a job that waits hangs until it runs; a second one would end its drain.
            if not (job.is_queued or _told(run, job).exists()):
                _told(run, job).touch()
                # scancel alone would be KILL after KillWait, however long requests last.
                _ask(["scancel", "--signal=TERM", "--batch", job.number])
        try:
            self._make_over([job.number for job in ours], grace_s)
        except PenstockError:
            for job in ours:  # with its note it would be no gateway of ours any more, and nobody would try again
                _told(run, job).unlink(missing_ok=True)
            raise

    def _end(self, run: Run, numbers: Sequence[str], grace_s: float) -> None:
        """End jobs and wait until nothing of them runs: their nodes drain, for at most `grace_s`."""
        if not numbers:
            return
        # Cancelled now, it would leave what it is about to clear away.
        sweeping = {number for number in numbers if (_note(run, number) or "").startswith("sweeping")}
        with_nodes = self._with_nodes(numbers) - sweeping
        self._cancel([number for number in numbers if number not in with_nodes | sweeping])
        for number in sorted(with_nodes):
            _ask(["scancel", "--signal=INT", number])
        if not self._wait_over(numbers, max(grace_s if with_nodes else 0.0, _SWEEP_S if sweeping else 0.0)):
            return
        for number in sorted(with_nodes & {*self._wait_over(numbers, 0.0)}):
            _ask(["scancel", "--signal=TERM", number])  # the second signal: its node does not wait any more
        self._make_over(numbers, _TERM_S if with_nodes else 0.0)

    def _with_nodes(self, numbers: Sequence[str]) -> set[str]:
        """Those with a step that a signal reaches; where Slurm does not tell its steps, all that run."""
        done = _ask(["squeue", "-h", "-s", "-j", ",".join(numbers), "-o", "%i"])
        if done.returncode:
            jobs = self._answered()
            # A signal to a job that waits hangs until it runs.
            return {job for job in numbers if job in jobs and not (jobs[job].is_queued or jobs[job].is_over)}
        return {job for job, _, step in (word.partition(".") for word in done.stdout.split()) if step.isdigit()}

    def _make_over(self, numbers: Sequence[str], grace_s: float) -> None:
        """Cancel those that are not over by themselves after `grace_s`.  Raises PenstockError for those that stay."""
        self._cancel(self._wait_over(numbers, grace_s))
        left = self._wait_over(numbers, _KILL_S)
        if left:
            raise PenstockError(
                f"could not end job {', '.join(left)} of Slurm: it is still there {_KILL_S:.0f} s after scancel",
                hint="`squeue -l` shows its state; a node that does not answer keeps it completing.",
                is_retryable=True,
            )

    def _cancel(self, numbers: Sequence[str]) -> None:
        if numbers:
            _ask(["scancel", *numbers])

    def _wait_over(self, numbers: Sequence[str], timeout_s: float) -> list[str]:
        """Those that are not over when the time is. One that is requeued meanwhile is cancelled at once.

        Raises PenstockError when Slurm does not answer then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            jobs = self._answered(max(_AWAY_S, deadline - time.monotonic()))
            left = [number for number in numbers if number in jobs and not jobs[number].is_over]
            if not left or time.monotonic() >= deadline:
                return left
            self._cancel([number for number in left if jobs[number].is_queued])
            time.sleep(_POLL_S)

    # ---- squeue ------------------------------------------------------------------------------------------------------

    def _cached(self) -> dict[str, Job] | None:
        """All jobs of this user, at most a second old; None while Slurm does not answer."""
        if time.monotonic() - self._asked_at > (_FRESH_S if self._silence is None else _SILENT_S):
            with contextlib.suppress(PenstockError):
                self._now()
        return self._jobs if self._silence is None else None

    def _answered(self, patience_s: float = _AWAY_S) -> dict[str, Job]:
        """As `_now`, which is asked again for so long: half an end is worse than a late one."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._now()
            except PenstockError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)

    def _now(self) -> dict[str, Job]:
        """All jobs of this user, those that ended a few minutes ago too.  Raises PenstockError."""
        words = ["squeue", "-h", "-t", "all", "-u", getpass.getuser(), "-o", queue.FORMAT]
        done = _ask(words)
        self._asked_at = time.monotonic()
        if done.returncode:
            self._silence = _said(done)
            raise PenstockError(f"could not read Slurm's job queue: {self._silence}", is_retryable=True)
        self._silence, self._jobs = None, queue.parse_jobs(done.stdout)
        return self._jobs


def _take_back(number: str, cluster: str, what: str) -> NoReturn:
    """Cancel a job that something of the site sent to a cluster by name: squeue here may never tell of it."""
    done = _ask(["scancel", "-M", cluster, number])
    raise UserError(
        f'cannot use job {number} for {what}: sbatch sent it to cluster "{cluster}"',
        detail=f"scancel -M {cluster} {number}: {_said(done) if done.returncode else 'done'}",
        hint="Run penstock on a login node of that cluster; whatever adds --clusters to sbatch here must not.",
    )


_AGAIN = "was requeued: "


def _told(run: Run, job: Job) -> Path:
    """The note that this gateway was told to drain, for whoever comes after us."""
    return run.gateway_folder / f"told-{job.number}"


def _gateway_placement(job: Job, lead_s: float | None) -> Placement:
    if job.is_over:
        return Placement("gone", f"its job {job.number} {queue.end_in_words(job.state, None)}")
    found = _placement(job, None, lead_s, None)
    return msgspec.structs.replace(found, reason=found.reason or f"job {job.number} on {job.nodes}")


def _placement(job: Job, note: str | None, lead_s: float | None, before: Placement | None) -> Placement:
    """Where a job's replica is. `note`: what the job itself wrote last; `lead_s`: as `Placement` has it."""
    if job.is_queued:
        is_again = before is not None and (before.state == "placed" or _AGAIN in (before.reason or ""))
        words = f"job {job.number} {_AGAIN if is_again else ''}{queue.reason_in_words(job.reason)}"
        return Placement("queued", words, starts_at=job.starts_at)
    if not job.is_over:
        return Placement("placed", ends_at=job.ends_at if job.state == "RUNNING" else None, lead_s=lead_s)
    if job.state == "CANCELLED":
        who = _accounted(job.number).partition(" ")[2].replace("by", "by uid").strip()
        words = f"its job {job.number} was cancelled by hand" + (f" ({who})" if who else "")
        return Placement("gone", words, is_final=True)
    return Placement("gone", f"its job {job.number} {queue.end_in_words(job.state, note)}")


def _forgotten(number: str, note: str | None) -> Placement:
    """Where the replica of a job is that squeue does not tell any more."""
    state = _accounted(number)
    if state.startswith("CANCELLED"):
        return Placement("gone", f"its job {number} was cancelled by hand ({state.lower()})", is_final=True)
    if state:
        return Placement("gone", f"its job {number} {queue.end_in_words(state, note)}")
    if note is None or note.startswith("started"):
        return Placement("gone", f"Slurm does not know its job {number} any more")
    return Placement("gone", f"its job {number} {queue.end_in_words('is over', note)}")


def _accounted(number: str) -> str:
    """A job's last state by Slurm's accounting, where the site has one."""
    if shutil.which("sacct") is None:
        return ""
    done = _ask(["sacct", "-X", "-n", "-P", "-j", number, "-o", "JobIDRaw,State"])
    return queue.parse_sacct(done.stdout).get(number, "")


def _note(run: Run, number: str) -> str | None:
    """What the job wrote of itself; None before it started."""
    try:
        return (run.path / "jobs" / number).read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _block(run: Run) -> SlurmBlock:
    try:
        return run.deployment().slurm or SlurmBlock()
    except PenstockError:  # a damaged folder is ended all the same
        return SlurmBlock()


def _site() -> site.Site:
    """The cluster's partitions and nodes.  Raises PenstockError when Slurm does not answer."""
    told = [_ask(["scontrol", "show", what, "-o"]) for what in ("partition", "node")]
    for done in told:
        if done.returncode:
            raise PenstockError(f"could not read Slurm's nodes: {_said(done)}", is_retryable=True)
    return site.parse(told[0].stdout, told[1].stdout)


def _tested(deployment: Deployment, run_path: str) -> list[Problem]:
    """What sbatch itself says of the request, which knows accounts, QOS and limits."""
    needs = slurm_script.Needs(deployment.hardware.gpus_per_node or 0, None, None)
    if deployment.slurm is not None and deployment.slurm.gres is not None:
        needs = slurm_script.Needs(0, None, None)
    asked = {"it": slurm_script.directives(deployment, needs, run_path)}
    if deployment.gateway.on == "job":
        asked["the gateway's job"] = slurm_script.gateway_directives(deployment, run_path)
    variables, found = slurm_script.variables(deployment), []
    for what, words in asked.items():
        lines = [f"#SBATCH --{line}" for line in words]
        done = _ask(
            ["sbatch", "--test-only"], stdin="\n".join(["#!/bin/bash", *lines, "true", ""]), variables=variables
        )
        found += [Problem("slurm", f"sbatch refuses {what}: {_said(done)}")] if done.returncode else []
    return found


def _versions(deployment: Deployment) -> dict[str, str]:
    """Versions of the engines' packages on the nodes, from the same Python here: they share it."""
    if deployment.slurm is not None and deployment.slurm.container:
        return {"vllm": "", "ray": ""}  # an image may need a node to run; its vLLM is found out there
    script = slurm_script.probe(deployment, sys.executable)
    done = _ask(["bash", "-s"], stdin=script)
    try:
        told = msgspec.json.decode(done.stdout.strip().splitlines()[-1])
        return dict(told["machine"]["versions"])
    except (IndexError, KeyError, TypeError, msgspec.DecodeError) as exc:
        raise UserError(
            "cannot run penstock with the Python that the nodes will use",
            detail=_said(done),
            hint="Set slurm.python, slurm.venv or slurm.conda to one that has penstock and the engine.",
        ) from exc


def _surveyed(folder: Path) -> list[Surveyed]:
    ranks = sorted(int(path.stem) for path in folder.glob("*.host"))

    def text(rank: int, kind: str) -> str:
        path = folder / f"{rank}.{kind}"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    return [
        Surveyed(text(rank, "host").strip(), int(code) if (code := text(rank, "code").strip()) else None,
                 text(rank, "out"), text(rank, "err"))
        for rank in ranks
    ]  # fmt: skip


def _shared_folder() -> Path:
    path = home()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _environment(variables: Collection[str] = ()) -> dict[str, str]:
    """Ours without what would change Slurm's commands, or mark a job as a process of ours on this machine.

    `variables`: those that the command may have all the same.
    """
    strange = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_", "SRUN_", "SACCT_", "SCONTROL_")
    marks = (processes.MARK_RUN, processes.MARK_RUN_ID, processes.MARK_ROLE, processes.MARK_REPLICA)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(strange) or k in {"SLURM_CONF", *variables}}
    return {name: value for name, value in kept.items() if name not in marks}


def _ask(
    words: Sequence[str], timeout_s: float = _ASK_TIMEOUT_S, stdin: str = "", variables: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's. One that cannot be run, or hangs, is one that failed with words."""
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    try:
        return run(
            list(words), input=stdin, env=_environment(variables), capture_output=True, text=True, errors="replace",
            timeout=timeout_s,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        why = f"no answer within {timeout_s:.0f} s" if isinstance(exc, subprocess.TimeoutExpired) else str(exc)
        return subprocess.CompletedProcess(list(words), 1, "", f"{shlex.join(words[:1])}: {why}")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """A command's own words in one line, without its name and level in front."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    plain = [line.partition("error: ")[2] or line for line in lines]
    return "; ".join(dict.fromkeys(plain))[:500] or f"it ended with code {done.returncode}"
