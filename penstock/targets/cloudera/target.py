"""Target "cloudera": a project of a Cloudera AI workbench. Gateway and controller are one application, a node is a job.

The project's file system is the same in all pods: the run folder is there, and the API carries what a laptop needs.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from penstock.errors import Finding, PenstockError, Problem
from penstock.hardware import Machine
from penstock.paths import home
from penstock.planner import Plan
from penstock.run_folder import (
    Artifact,
    Desired,
    Handle,
    Kind,
    Launch,
    Left,
    Run,
    Unit,
    living,
    no_address,
    order,
    unit_of,
)
from penstock.spec.blocks import Cloudera
from penstock.spec.deployment import Deployment
from penstock.targets import Adopted, Placement, Target, Tunnel
from penstock.targets.cloudera import (
    checks,
    ending,
    folder,
    measuring,
    names,
    placing,
    session,
    view,
    weights,
    workloads,
)
from penstock.targets.cloudera.api import Workbench
from penstock.targets.cloudera.folder import Place
from penstock.targets.tunnel import forwarded

_FRESH_S = 2.0


class ClouderaAi(Target):
    name = "cloudera"
    capabilities = frozenset({"places-gateway", "tunnels", "measures", "keeps-weights"})
    listen = "network"
    has_own_caches = True
    is_elastic = True
    executor = "mp"  # vLLM on Ray wants more of /dev/shm than a project's pods have at first

    def __init__(self) -> None:
        self._workbenches: dict[tuple[Cloudera, str], Workbench] = {}
        self._choices = workloads.Choices()  # as last asked; `render` asks nothing
        self._fetcher = folder.Fetcher()
        self._weights_due_at = 0.0
        self._last: dict[str, tuple[float, dict[Unit, Placement]]] = {}

    # ---- before ------------------------------------------------------------------------------------------------------

    def placed(self, deployment: Deployment) -> tuple[Kind, ...]:
        return names.placed(deployment)

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        self._choices = workloads.Choices(names.block_of(deployment).runtime or "")
        problems = checks.file_problems(deployment)
        if problems or is_rehearsal:
            return problems
        try:
            workbench = self._connected(names.block_of(deployment))
        except PenstockError as exc:
            return [Problem("target", exc.message, exc.hint)]
        problems, self._choices = self._examined(workbench, deployment)
        return problems

    def _examined(self, workbench: Workbench, deployment: Deployment) -> tuple[list[Problem], workloads.Choices]:
        problems, choices = checks.examine(workbench, deployment)
        notes = (*choices.notes, *measuring.warnings(workbench, deployment))
        return problems, msgspec.structs.replace(choices, notes=notes)

    def warnings(self, deployment: Deployment, plan: Plan) -> tuple[str, ...]:
        return self._choices.notes

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        if is_rehearsal:
            return checks.of_file(deployment, "a rehearsal does not ask the workbench")
        workbench = self._connected(names.block_of(deployment))
        _, self._choices = self._examined(workbench, deployment)
        return [checks.machine(deployment, self._choices)]

    def measure(self, deployment: Deployment, download_bytes: int | None, say: Callable[[str], None]) -> list[Finding]:
        workbench = self._connected(names.block_of(deployment))
        _, choices = checks.examine(workbench, deployment)
        return measuring.measure(workbench, deployment, choices.runtime, download_bytes, say)

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        return workloads.artifact(launch, deployment, self._choices)

    # ---- placing -----------------------------------------------------------------------------------------------------

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        workbench = self._workbench_of(run)
        self._last.pop(str(run.path), None)
        checks.raise_shared_memory(workbench, run.deployment())
        return placing.place(workbench, run, units)

    def status(self, run: Run) -> dict[Unit, Placement]:
        units = sorted(map(unit_of, run.handle().units), key=order)
        now = time.monotonic()
        at, before = self._last.get(str(run.path), (float("-inf"), {}))
        if now - at < _FRESH_S and before.keys() == set(units):
            return before
        try:
            placements = view.look(self._workbench_of(run), run)
        except PenstockError as exc:
            # What the workbench does not tell has not changed: pods run without its API.
            unknown = Placement("placed", exc.message)
            return {unit: msgspec.structs.replace(before.get(unit, unknown), reason=exc.message) for unit in units}
        gateway = next((u for u, place in placements.items() if u.kind == "gateway" and place.state == "placed"), None)
        if gateway is not None and not session.is_inside(run) and not run.gateway_address_file.exists():
            folder.fetch_address(self._workbench_of(run), run)
            if not run.gateway_address_file.exists():
                placements[gateway] = Placement("queued", "the gateway starts in its application")
        self._last[str(run.path)] = (now, placements)
        return placements

    def keep_up(self, run: Run) -> None:
        """Of the controller: replicas whose weights have come are forgotten, so that it places them."""
        now = time.monotonic()
        if placing.WAITS not in run.handle().units.values() or not session.is_inside(run) or now < self._weights_due_at:
            return
        self._weights_due_at = now + _FRESH_S
        with contextlib.suppress(PenstockError):  # `status` says so
            if weights.bring(self._workbench_of(run), run).state == "there":
                handle = run.handle()
                left = {key: entry for key, entry in handle.units.items() if entry != placing.WAITS}
                run.write_handle(msgspec.structs.replace(handle, units=left))

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        n_nodes = run.plan().n_nodes if unit.kind == "replica" else 1
        parts = [names.log_of(unit.kind, unit.name, rank) for rank in range(n_nodes)]
        if session.is_inside(run):
            reads = [partial(view.log_here, run, part) for part in parts]
        else:
            workbench = self._workbench_of(run)
            reads = [partial(folder.log_bytes, workbench, run, part) for part in parts]
        return view.log_lines(reads, follow, last, run.is_ended)

    # ---- the run folder ----------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> None:
        if not session.is_inside(run) and self._fetcher.is_due(run, time.monotonic()):
            folder.fetch(self._workbench_of(run), run)

    def order(self, run: Run, desired: Desired) -> None:
        if session.is_inside(run):
            run.write_desired(desired)
        else:
            folder.order(self._workbench_of(run), run, desired)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, run: Run, grace_s: float) -> None:
        if not run.handle().units and folder.place_of(run) is None and not session.is_inside(run):
            return  # nothing was sent anywhere
        ending.end(self._workbench_of(run), run, grace_s)
        self._last.pop(str(run.path), None)

    def end_weights(self, run: Run) -> None:
        ending.end_weights(self._workbench_of(run), run)

    # ---- from any machine --------------------------------------------------------------------------------------------

    def adopt(self, name: str, deployment: Deployment | None = None) -> Adopted | None:
        for block in self._blocks(deployment):
            workbench = self._connected(block)
            run = folder.adopt(workbench, name, block)
            if run is not None:
                return Adopted(run, f'project "{block.project or workbench.project_id}" of {workbench.url}')
        return None

    def leftovers(self) -> list[Left]:
        return [left for place in map(self._place, self._blocks(None)) for left in ending.without_folder(*place)]

    def kept_keys(self, name: str) -> list[Left]:
        run = Run(home() / "runs" / name)
        blocks = self._blocks(run.deployment() if run.exists() else None)
        return [left for place in map(self._place, blocks) for left in ending.kept_keys(*place, name)]

    def _place(self, block: Cloudera) -> tuple[Workbench, Place]:
        workbench = self._connected(block)
        return workbench, Place(workbench.url, workbench.project_id, block.project, block.key_file, block.ca_file)

    def tunnel(self, run: Run, port: int, kind: Kind = "gateway") -> AbstractContextManager[Tunnel]:
        self.fetch(run)
        if not session.is_inside(run) and not run.gateway_address_file.exists():
            raise no_address(run.name)
        workbench = self._workbench_of(run)
        placing.require_gateway(workbench, run)
        words = [sys.executable, "-m", "penstock.targets.cloudera.relay", str(run.path), str(port)]
        return forwarded(
            [*words, *(["ui"] if kind == "ui" else [])], port,
            lambda complaint: PenstockError(f"could not open a way to {workbench.url}", detail=complaint or None),
        )  # fmt: skip

    def inside(self, run: Run, words: Sequence[str], is_terminal: bool) -> list[str]:
        return [sys.executable, "-m", "penstock.targets.cloudera.inside", str(run.path), *words]

    # ---- the workbench -----------------------------------------------------------------------------------------------

    def _blocks(self, deployment: Deployment | None) -> list[Cloudera]:
        """The ways to the projects that the file, or the runs of this machine, name; one for each project."""
        if session.is_in_pod() and home() == Path(names.HOME):
            return []  # the runs of this project have their folders here
        known = [run.deployment() for run in living() if run.record().target == self.name]
        blocks = [names.block_of(each) for each in (known if deployment is None else [deployment])]
        return list({(block.workbench, block.project): block for block in blocks if block.workbench}.values())

    def _workbench_of(self, run: Run) -> Workbench:
        workbench, place = self._place(names.block_of(run.deployment()))
        folder.note_place(run, place)
        return workbench

    def _connected(self, block: Cloudera) -> Workbench:
        key = (block, session.key_of(block))
        if key not in self._workbenches:
            workbench = session.connect(block)
            session.find_project(workbench, block)
            self._workbenches[key] = workbench
        return self._workbenches[key]


def finish(left: Left) -> None:
    """End what is left of a deployment without a folder.  Raises PenstockError."""
    place = msgspec.convert(left.facts, Place)
    block = Cloudera(workbench=place.workbench, project=place.project, key_file=place.key_file, ca_file=place.ca_file)
    workbench = session.connect(block)
    session.find_project(workbench, block)
    ending.end_lost(workbench, left.run_id, left.facts.get("with_keys", False))
