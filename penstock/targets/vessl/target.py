"""Target "vessl": a deployment is one run of VESSL, a container that holds all of it, or a service of such containers.

`up` sends the YAML. What runs inside is the program of `deployment/container`. `runs` and `services` have what
differs: a run is asked by its control port, a service only by VESSL's API.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

from penstock.errors import PenstockError, Problem, UserError
from penstock.hardware import Machine
from penstock.planner import Plan
from penstock.run_folder import Artifact, Desired, Handle, Kind, Launch, Run, Unit, no_address, order
from penstock.spec.blocks import Vessl
from penstock.spec.deployment import Deployment
from penstock.targets import Adopted, Placement, Target, Tunnel
from penstock.targets.assumed import machines_of_file
from penstock.targets.vessl import checks, folder, run_yaml
from penstock.targets.vessl.api import Preset
from penstock.targets.vessl.connections import Connections
from penstock.targets.vessl.run_yaml import block_of
from penstock.targets.vessl.runs import Runs
from penstock.targets.vessl.services import Services


class OnVessl(Target):
    name = "vessl"
    capabilities = frozenset({"tunnels"})
    has_own_caches = True
    fetches_models = True
    is_elastic = True  # the container refuses what does not fit into it

    def __init__(self) -> None:
        self._connections = Connections()
        self._runs, self._services = Runs(self._connections), Services(self._connections)
        self._presets: dict[str, Preset] = {}  # by deployment, as last checked

    # ---- before ------------------------------------------------------------------------------------------------------

    def placed(self, deployment: Deployment) -> tuple[Kind, ...]:
        kinds: tuple[Kind, ...] = ("replica", "gateway", "controller")
        return kinds if deployment.chat_page is None else (*kinds, "ui")

    def time_limit_s(self, deployment: Deployment) -> tuple[str, float] | None:
        hours = block_of(deployment).max_hours
        return None if hours is None else ("vessl.max_hours", hours * 3600)

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        problems = checks.file_problems(deployment)
        if is_rehearsal:
            return problems
        try:
            found, preset = checks.problems(self._connections.of_block(block_of(deployment)), deployment)
        except PenstockError as exc:
            return [*problems, Problem("vessl", exc.message, exc.hint)]
        self._presets.pop(deployment.name, None)
        if preset is not None:
            self._presets[deployment.name] = preset
        return [*problems, *(problem for problem in found if problem.path not in {each.path for each in problems})]

    def warnings(self, deployment: Deployment, plan: Plan) -> tuple[str, ...]:
        preset, weights = self._presets.get(deployment.name), deployment.cache.weights or ""
        notes = [] if preset is None else [checks.price(preset)]
        if run_yaml.weights_folder(deployment) is None:
            notes.append("cache.weights is not set: each start downloads the model (a volume keeps it)")
        if not run_yaml.shares_keys(deployment):
            notes.append(
                "keys and usage end with it, at `penstock down` too: gateway.store: postgresql://... keeps them"
            )
        if weights.startswith("vessl-artifact://"):
            notes.append("cache.weights is saved when the run ends, and not at all when its machine is taken away")
        if block_of(deployment).kind == "service" and deployment.replicas.follows_load:
            notes.append("VESSL scales by the use of the GPU, which says little of a language model's load")
        if deployment.observe.prometheus:
            notes.append("observe.prometheus: the image needs the program; it answers on loopback of the container")
        return tuple(filter(None, notes))

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        block = block_of(deployment)
        if is_rehearsal:
            return machines_of_file(deployment, "a rehearsal does not ask VESSL", [block.preset or "machine"])
        preset = self._presets.get(deployment.name)
        if preset is None:
            asked = self._connections.of_block(block)
            cluster = asked.clusters().get(block.cluster or "")
            rows = () if cluster is None else asked.presets(cluster.id)
            preset = next((row for row in rows if row.name == block.preset), None)
        if preset is None:
            raise UserError(f'there is no preset "{block.preset}" in cluster "{block.cluster}"')
        return [checks.machine(deployment, preset)]

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        is_service = block_of(deployment).kind == "service"
        name = run_yaml.SERVICE_FILE if is_service else run_yaml.RUN_FILE
        words = ("vessl", "service" if is_service else "run", "create", "-f", name)
        return Artifact(words, {name: run_yaml.to_yaml(run_yaml.form(deployment, launch.plan))}, name)

    # ---- a run or a service ------------------------------------------------------------------------------------------

    def _life(self, run: Run) -> Runs | Services:
        """By its file, which a damaged folder may lack; then by what was noted."""
        with contextlib.suppress(PenstockError):
            return self._services if block_of(run.deployment()).kind == "service" else self._runs
        note = folder.note_of(run)
        return self._services if note is not None and note.kind == "service" else self._runs

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        self._life(run).place(run, units)
        return Handle(self.name, {unit.key: {} for unit in sorted(units, key=order)})

    def status(self, run: Run) -> dict[Unit, Placement]:
        return self._life(run).status(run)

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        return self._life(run).logs(run, unit, follow, last)

    def fetch(self, run: Run) -> None:
        self._life(run).fetch(run)

    def order(self, run: Run, desired: Desired) -> None:
        self._life(run).order(run, desired)

    def end(self, run: Run, grace_s: float) -> None:
        self._life(run).end(run, grace_s)

    def inside(self, run: Run, words: Sequence[str], is_terminal: bool) -> list[str]:
        if words[0] == "dashboard":
            raise UserError(f'cannot show the token of Ray\'s dashboard of "{run.name}": no port of VESSL leads to it')
        return self._life(run).inside(run, words, is_terminal)

    def tunnel(self, run: Run, port: int, kind: Kind = "gateway") -> AbstractContextManager[Tunnel]:
        """There is none: the address is public, once VESSL has told it."""
        raise no_address(run.name)

    def adopt(self, name: str, deployment: Deployment | None = None) -> Adopted | None:
        try:
            asked = self._connections.of_block(block_of(deployment) if deployment is not None else Vessl())
        except UserError:
            return None  # nobody has configured it here
        return self._runs.adopt(name, asked, self.placed) or self._services.adopt(name, asked, self.placed)
