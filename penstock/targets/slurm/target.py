"""Target "slurm": every unit is a job, placed and ended by Slurm's own commands.

A replica is drained by a signal to its step; its job ends when its nodes end, and is cancelled only when it does not.
A job is known by its number in the handle or, if the controller was killed before it wrote that, by folder and name.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.errors import PenstockError, Problem, UserError
from penstock.hardware import Machine
from penstock.log_lines import bound_log
from penstock.paths import home
from penstock.planner import Plan
from penstock.run_folder import Artifact, Handle, Kind, Launch, Run, Unit, order, replica, unit_of
from penstock.spec.blocks import Slurm as SlurmBlock
from penstock.spec.deployment import Deployment
from penstock.targets import Login, Placement, Surveyed, Target
from penstock.targets.code_archive import unpack
from penstock.targets.openssh import is_legal
from penstock.targets.slurm import commands, queue, site
from penstock.targets.slurm import script as slurm_script
from penstock.targets.slurm.commands import Queue, ask
from penstock.targets.slurm.queue import Job

_GOODBYE_S = 15.0
_TERM_S = 15.0
_KILL_S = 120.0
_SWEEP_S = 15.0
_FORCE_EVERY_S = 5.0
_NOT_LAUNCHED = "JobLaunchFailure"
_SHARED = "Set PENSTOCK_HOME to a folder on a file system that all nodes have."


class Slurm(Target):
    name = "slurm"
    capabilities = frozenset({"survey", "places-gateway"})
    listen = "network"
    shares_files = True
    is_elastic = True
    order_every_s = 30.0  # a scheduler that many submit to gets slow for all

    def __init__(self) -> None:
        self._queue = Queue()
        self._site: site.Site | None = None  # as last read, by `check` or `machines`; `render` asks nothing
        self._last: dict[tuple[str, str], Placement] = {}
        self._forced_at: dict[str, float] = {}

    # ---- before ------------------------------------------------------------------------------------------------------

    def placed(self, deployment: Deployment) -> tuple[Kind, ...]:
        if deployment.gateway.on != "job":
            return ("replica",)
        controller: tuple[Kind, ...] = ("controller",) if _block(deployment).controller == "job" else ()
        return ("replica", "gateway", *controller)

    def time_limit_s(self, deployment: Deployment) -> tuple[str, float] | None:
        limit_s = queue.seconds_of(_block(deployment).time or "")
        return None if limit_s is None else ("slurm.time", limit_s)

    def warnings(self, deployment: Deployment, plan: Plan) -> tuple[str, ...]:
        n_reserved = (site.gpus_wanted(deployment) or 0) if _block(deployment).gres is not None else 0
        n_used = plan.ranks_each if plan.device == "cuda" else 0
        words = f"slurm.gres reserves {n_reserved} GPUs on each node, and the plan uses {n_used or 'none'}"
        return (words,) if n_reserved > n_used else ()

    def login(self, deployment: Deployment) -> Login | None:
        block = _block(deployment)
        if block.login is None or shutil.which("sbatch") is not None:
            return None
        if not is_legal(block.login):
            hint = "example: login: ada@cluster"
            raise UserError(f'cannot use slurm.login "{block.login}": it is not a host name', hint=hint)
        config = os.environ.get("PENSTOCK_SSH_CONFIG") or block.ssh_config
        path = str(Path(config).expanduser().resolve()) if config else None
        return Login(block.login, block.python or "python3", path)

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        run_path = home() / "runs" / deployment.name
        problems = slurm_script.problems(deployment, str(run_path))
        if problems:
            return problems
        why = self._read_site(is_rehearsal)
        if why is not None:
            return [] if is_rehearsal else [Problem("target", why, "run penstock on a login node")]
        assert self._site is not None
        problems = site.problems(self._site, deployment)
        return problems or commands.tested(deployment, str(run_path), site.gpu_type(self._site, deployment))

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        why = self._read_site(is_rehearsal)
        if why is not None:
            return site.machines_of_file(deployment, why)
        assert self._site is not None
        return site.machines(self._site, deployment, commands.versions(deployment))

    def _read_site(self, is_rehearsal: bool) -> str | None:
        """Read the cluster; why that cannot be.  Raises PenstockError when Slurm does not answer and it must."""
        self._site = None
        if shutil.which("sbatch") is None:
            return "this machine is no client of Slurm: there is no sbatch"
        try:
            self._site = commands.read_site()
        except PenstockError as exc:
            if not is_rehearsal:
                raise
            return exc.message
        return None

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home(), prefix="survey.") as folder:  # on the shared file system
            name = f"penstock-survey-{secrets.token_hex(4)}"
            if _block(deployment).container:
                unpack(Path(folder) / slurm_script.CODE)
            words = slurm_script.survey(deployment, sys.executable, argv, folder, str(Path.home()))
            output = _run_survey(["srun", f"--job-name={name}", *words], name, timeout_s)
            surveyed = _surveyed(Path(folder))
        if not surveyed and folder in output:  # the nodes could not write into it
            output = f"the nodes do not see {home()}. {_SHARED}"
        return surveyed or [Surveyed("slurm", None, err=" ".join(output.split())[-500:])]

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        run_path = str(Path(launch.token_file).parent.parent)
        text = msgspec.json.format(msgspec.json.encode(launch), indent=2).decode()
        card, most_mib = site.gpu_type(self._site, deployment), site.least_memory_mib(self._site, deployment)
        needs = slurm_script.needs_of(launch.plan, _block(deployment), card, most_mib)
        text_of_job = slurm_script.render(deployment, launch.plan, run_path, python, needs, str(Path.home()))
        files = {slurm_script.FILE: text_of_job}
        if "gateway" in self.placed(deployment):
            here = [urlsplit(url).hostname or "" for url in launch.announce_urls]
            files[slurm_script.GATEWAY_FILE] = slurm_script.gateway(deployment, run_path, python, here)
        if "controller" in self.placed(deployment):
            files[slurm_script.CONTROLLER_FILE] = slurm_script.controller(deployment, run_path, python)
        words = ("sbatch", "--parsable", f"--job-name=penstock-{deployment.name}-{{replica}}")
        argv = (*words, f"{run_path}/artifact/{slurm_script.FILE}", "{replica}", "{launch}")
        return Artifact(argv, {**files, "launch.json": text + "\n"})

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        entries = dict(run.handle().units)
        if not (entries or run.handle().ordered):  # end what an earlier launch left
            self._end_replicas(run, self._replica_jobs(run), 0.0)
        before = dict(entries)
        problems = self._start(run, [unit for unit in sorted(units, key=order) if unit.kind != "replica"], entries)
        leaving = [entries.pop(key) for key in list(entries) if unit_of(key) not in units]
        self._dismiss(run, {str(entry["job"]) for entry in entries.values()})
        known = set(self._replica_jobs(run))
        ending = [str(entry.get("job")) for entry in leaving]
        self._end_replicas(run, [job for job in ending if job in known], run.plan().drain_s + _GOODBYE_S)
        problems += self._start(run, [unit for unit in sorted(units, key=order) if unit.kind == "replica"], entries)
        ours = {str(entry["job"]) for entry in entries.values()}
        self._end_replicas(run, [number for number in self._replica_jobs(run) if number not in ours], 0.0)
        if problems and entries == before:
            raise problems[0]
        return Handle(self.name, entries)

    def status(self, run: Run) -> dict[Unit, Placement]:
        jobs = self._queue.cached()
        lead_s = _block_of(run).successor_s
        placements = {}
        for key, entry in run.handle().units.items():
            unit, number = unit_of(key), str(entry.get("job"))
            before = self._last.get((str(run.path), number))
            if jobs is None:
                # A controller that restarts while Slurm is silent must not count the job as lost.
                last = before or Placement("placed")
                reason = last.reason or f"Slurm does not answer: {self._queue.silence}"
                placements[unit] = msgspec.structs.replace(last, reason=reason)
                continue
            placements[unit] = self._last[str(run.path), number] = _placement_of(
                run, unit, number, jobs.get(number), before, lead_s
            )
        return placements

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        return run.log_lines(_log_name(unit), follow, last)

    def end(self, run: Run, grace_s: float) -> None:
        known = [str(entry.get("job")) for key, entry in run.handle().units.items() if unit_of(key).kind == "replica"]
        if not (known or (shutil.which("squeue") and run.path.exists())):
            return
        services = self._dismiss(run, set())
        self._make_over(services, grace_s)
        self._end_replicas(run, sorted({*known, *self._replica_jobs(run)}), grace_s)
        self._make_over(self._dismiss(run, set()), 0.0)  # submitted by a controller that was ended since

    def keep_up(self, run: Run) -> None:
        """Start requeued jobs now, which Slurm holds for two minutes; cancel gateways that drained for too long."""
        for key, entry in run.handle().units.items():
            bound_log(run.log(_log_name(unit_of(key))))
            job = (self._queue.cached() or {}).get(str(entry.get("job")))
            is_held = job is not None and job.is_queued and job.reason == "BeginTime"
            if is_held and unit_of(key).kind == "replica" and self._is_due(str(entry["job"])):
                ask(["scontrol", "update", f"jobid={entry['job']}", "starttime=now"])
        notes = sorted(run.gateway_folder.glob(f"{_DRAINING}*"))
        jobs = (self._queue.cached() if notes else None) or {}
        for note in notes:
            number = note.name.removeprefix(_DRAINING)
            is_late = time.time() - note.stat().st_mtime > run.deployment().gateway.drain_s + _TERM_S
            is_alive = number in jobs and not jobs[number].is_over
            if is_alive and is_late and self._is_due(number):
                self._queue.cancel([number])

    def _is_due(self, number: str) -> bool:
        """Whether Slurm was not asked to change this job within the last seconds."""
        is_due = time.monotonic() - self._forced_at.get(number, -1e9) > _FORCE_EVERY_S
        self._forced_at |= {number: time.monotonic()} if is_due else {}
        return is_due

    def _start(self, run: Run, units: Sequence[Unit], entries: dict[str, dict[str, object]]) -> list[PenstockError]:
        """Submit a job for each of these units that has none, and note it in `entries`; returns what was refused."""
        jobs, problems = self._queue.now(), []
        lost = _lost_nodes(run, jobs)
        for unit in units:
            job = jobs.get(str(entries.get(unit.key, {}).get("job")))
            if job is None or job.is_over:
                try:
                    entries[unit.key] = {"job": _submitted_before(run, unit, jobs) or self._send(run, unit, lost)}
                except PenstockError as exc:
                    problems.append(exc)
        return problems

    def _of_folder(self, folder: Path) -> list[Job]:
        return [job for job in self._queue.answered().values() if job.folder == str(folder) and not job.is_over]

    def _replica_jobs(self, run: Run) -> list[str]:
        return [job.number for job in self._of_folder(run.path)]

    def _send(self, run: Run, unit: Unit, lost: Sequence[str]) -> str:
        """Submit the job of a unit, link its log to its plain name, and return its number. `lost`: nodes to avoid."""
        (run.path / "jobs").mkdir(exist_ok=True)
        launch, name = run.record().id, _job_name(run, unit)
        file = str(run.artifact_path / _FILES[unit.kind])
        argv = ["sbatch", "--parsable", f"--job-name={name}", file, launch, unit.name]
        if unit.kind == "replica":
            if _block(run.deployment()).container:
                unpack(run.path / slurm_script.CODE)
            argv = [w.replace("{replica}", unit.name).replace("{launch}", launch) for w in run.artifact().argv]
        if lost:
            argv.insert(1, f"--exclude={','.join([*slurm_script.excluded(run.deployment()), *lost])}")
        what = f'{unit.kind} {unit.name} of "{run.name}"'
        number = self._queue.submit(argv, what, f"The script: {file}", slurm_script.variables(run.deployment()))
        log = run.log(_log_name(unit))
        fresh = log.with_name(f".{log.name}.{number}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(f"{name}_{number}.log")
        fresh.replace(log)
        return number

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _dismiss(self, run: Run, keep: Collection[str]) -> list[str]:
        """Begin to end all gateways and controllers of a run except `keep`; their numbers. Does not wait.

        A gateway drains; it gets one signal, since a second one would end its drain.
        """
        if not shutil.which("squeue"):
            return []
        # A controller does not end itself here: it ends when its successor runs.
        keep = {*keep, os.environ.get("SLURM_JOB_ID", "")}
        jobs = [job for job in self._of_folder(run.gateway_folder) if job.number not in keep]
        for job in jobs:
            note = run.gateway_folder / f"{_DRAINING}{job.number}"
            # A signal to a pending job hangs until it runs.
            if job.is_queued or not job.name.startswith(f"penstock-{run.name}-gateway-"):
                self._queue.cancel([job.number])
            # scancel alone would be KILL after KillWait, however long requests last.
            elif not note.exists() and not ask(["scancel", "--signal=TERM", "--batch", job.number]).returncode:
                note.touch()
        return [job.number for job in jobs]

    def _end_replicas(self, run: Run, numbers: Sequence[str], grace_s: float) -> None:
        """End jobs and wait until nothing of them runs: their nodes drain, for at most `grace_s`.

        Machines that do not report are not waited for: Slurm keeps such a job completing until it gives them up.
        """
        silent = [number for number in _silent_jobs(run) if number in numbers]
        self._queue.cancel(silent)
        numbers = [number for number in numbers if number not in silent]
        if not numbers:
            return
        # Cancelled now, it would leave what it is about to remove.
        sweeping = {number for number in numbers if (_note(run, number) or "").startswith("sweeping")}
        with_nodes = self._queue.with_steps(numbers) - sweeping
        self._queue.cancel([number for number in numbers if number not in with_nodes | sweeping])
        for number in sorted(with_nodes):
            ask(["scancel", "--signal=INT", number])
        if not self._queue.wait_over(numbers, max(grace_s if with_nodes else 0.0, _SWEEP_S if sweeping else 0.0)):
            return
        for number in sorted(with_nodes & {*self._queue.wait_over(numbers, 0.0)}):
            ask(["scancel", "--signal=TERM", number])  # the second signal: its node does not wait any more
        self._make_over(numbers, _TERM_S if with_nodes else 0.0)

    def _make_over(self, numbers: Sequence[str], grace_s: float) -> None:
        """Cancel jobs that are not over after `grace_s`.  Raises PenstockError for those that stay."""
        if not numbers:
            return
        self._queue.cancel(self._queue.wait_over(numbers, grace_s))
        left = self._queue.wait_over(numbers, _KILL_S)
        if left:
            raise PenstockError(
                f"could not end job {', '.join(left)} of Slurm: it is still there {_KILL_S:.0f} s after scancel",
                hint="`squeue -l` shows its state; a node that does not answer keeps it completing.",
                is_retryable=True,
            )


_FILES = {
    "replica": slurm_script.FILE,
    "gateway": slurm_script.GATEWAY_FILE,
    "controller": slurm_script.CONTROLLER_FILE,
}
_AGAIN = "was requeued: "
_DRAINING = "told-"  # the note that a gateway drains; the next controller reads it too


def _run_survey(argv: Sequence[str], name: str, timeout_s: float) -> str:
    """Run srun, and cancel its job after `timeout_s`; what it printed, or why it did not run."""
    stdout, stderr = subprocess.PIPE, subprocess.STDOUT
    child = subprocess.Popen(
        argv, env=commands.environment(), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        return child.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        answer = ask(["squeue", "-h", "-n", name, "-o", "%T %r"]).stdout.split(maxsplit=1)
        ask(["scancel", f"--name={name}", f"--user={getpass.getuser()}"])
        child.kill()
        child.communicate()
    if answer and answer[0] == "PENDING":
        return f"no node free within {timeout_s:.0f} s: {queue.reason_in_words(answer[-1].strip())}"
    return f"no answer within {timeout_s:.0f} s"


def _job_name(run: Run, unit: Unit) -> str:
    return f"penstock-{run.name}-{unit.name if unit.kind == 'replica' else f'{unit.kind}-{unit.name}'}"


def _log_name(unit: Unit) -> str:
    return f"replica-{unit.name}" if unit.kind == "replica" else unit.kind


def _silent_jobs(run: Run) -> list[str]:
    """The jobs of replicas that do not report."""
    state, entries = run.state(), run.handle().units
    silent = [row.replica for row in state.replicas if row.state == "silent"] if state is not None else []
    return [str(entries[replica(name).key]["job"]) for name in silent if replica(name).key in entries]


def _lost_nodes(run: Run, jobs: Mapping[str, Job]) -> list[str]:
    """The nodes of silent jobs. Slurm may believe in them for minutes, and start new jobs there."""
    silent = [jobs[number] for number in _silent_jobs(run) if number in jobs]
    return sorted({job.nodes for job in silent if not job.is_queued})


def _submitted_before(run: Run, unit: Unit, jobs: Mapping[str, Job]) -> str | None:
    """The job of this unit that a controller submitted and, killed, did not note."""
    folder = run.path if unit.kind == "replica" else run.gateway_folder
    alive = (job for job in jobs.values() if job.folder == str(folder) and not job.is_over)
    name = _job_name(run, unit)
    return next((job.number for job in alive if job.name == name), None)


def _placement_of(
    run: Run, unit: Unit, number: str, job: Job | None, before: Placement | None, lead_s: float | None
) -> Placement:
    note = _note(run, number)
    # Not asked again: that would be sacct in every tick for as long as squeue lists the job.
    if before is not None and before.state == "gone" and (job is None or (job.is_over and before.is_final)):
        return before
    placement = _placement(job, note, lead_s, before) if job is not None else _forgotten(number, note)
    if job is not None and job.is_over and job.reason == _NOT_LAUNCHED and not any((run.path / "jobs").glob("*")):
        # Slurm could not even open its log, and another job of ours would end in the same way.
        words = f"its job {number} could not start: {job.nodes} does not see {run.path} ({_NOT_LAUNCHED}). {_SHARED}"
        placement = Placement("gone", words, is_final=True)
    if unit.kind == "replica":
        return placement
    # It is restarted even when it was cancelled by hand: without it nothing is served.
    reason = placement.reason or (f"job {number} on {job.nodes}" if job is not None else None)
    return msgspec.structs.replace(placement, is_final=False, reason=reason)


def _placement(job: Job, note: str | None, lead_s: float | None, before: Placement | None) -> Placement:
    """`note`: what the job itself wrote last; `lead_s`: as in `Placement`."""
    if job.is_queued:
        is_again = before is not None and (before.state == "placed" or _AGAIN in (before.reason or ""))
        words = f"job {job.number} {_AGAIN if is_again else ''}{queue.reason_in_words(job.reason)}"
        return Placement("queued", words, starts_at=job.starts_at)
    if not job.is_over:
        is_running = job.state == "RUNNING"
        return Placement(
            "placed",
            ends_at=job.ends_at if is_running else None,
            lead_s=lead_s,
            placed_at=job.starts_at if is_running else None,
            where=f"job {job.number} on {job.nodes}",
        )
    if job.state == "CANCELLED":
        who = commands.accounted(job.number).partition(" ")[2].replace("by", "by uid").strip()
        words = f"its job {job.number} was cancelled by hand" + (f" ({who})" if who else "")
        return Placement("gone", words, is_final=True)
    return Placement("gone", f"its job {job.number} {queue.end_in_words(job.state, note)}")


def _forgotten(number: str, note: str | None) -> Placement:
    """The placement of a job that squeue no longer lists."""
    state = commands.accounted(number)
    if state.startswith("CANCELLED"):
        return Placement("gone", f"its job {number} was cancelled by hand ({state.lower()})", is_final=True)
    if state:
        return Placement("gone", f"its job {number} {queue.end_in_words(state, note)}")
    if note is None or note.startswith("started"):
        return Placement("gone", f"Slurm does not know its job {number} any more")
    return Placement("gone", f"its job {number} {queue.end_in_words('is over', note)}")


def _note(run: Run, number: str) -> str | None:
    """What the job wrote last; None before it started."""
    try:
        return (run.path / "jobs" / number).read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _block(deployment: Deployment) -> SlurmBlock:
    return deployment.slurm or SlurmBlock()


def _block_of(run: Run) -> SlurmBlock:
    try:
        return _block(run.deployment())
    except PenstockError:  # a damaged folder must end too
        return SlurmBlock()


def _surveyed(folder: Path) -> list[Surveyed]:
    ranks = sorted(int(path.stem) for path in folder.glob("*.host"))

    def answer(rank: int) -> Surveyed:
        paths = (folder / f"{rank}.{kind}" for kind in ("host", "code", "out", "err"))
        host, code, out, err = (path.read_text("utf-8", "replace") if path.exists() else "" for path in paths)
        return Surveyed(host.strip(), int(code) if code.strip() else None, out, err)

    return [answer(rank) for rank in ranks]
