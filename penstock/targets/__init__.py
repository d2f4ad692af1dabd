"""Targets: where units run. This module holds the seam, its contract and the name table.

A target places units: replicas (`python -m penstock.node`) and, where it can, the gateway and the controller. It knows
whether a unit is still there. It does not restart what dies (the controller decides that) and does not say when an
engine is ready (the node announces that).
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Literal, NamedTuple, Protocol

import msgspec

from penstock.errors import Finding, PenstockError, Problem, UserError
from penstock.hardware import Machine
from penstock.paths import home
from penstock.planner import Plan
from penstock.run_folder import Artifact, Desired, Handle, Kind, Launch, Left, Listen, Run, Unit
from penstock.spec.deployment import Deployment, is_legal_name
from penstock.wire.announcement import Restart

# name -> "module:Class"
TABLE = {
    "cloudera": "penstock.targets.cloudera.target:ClouderaAi",
    "kubernetes": "penstock.targets.kubernetes.target:Kubernetes",
    "local": "penstock.targets.local:Local",
    "ray": "penstock.targets.ray.target:RayJobs",
    "slurm": "penstock.targets.slurm.target:Slurm",
    "ssh": "penstock.targets.ssh.target:OverSsh",
    "vessl": "penstock.targets.vessl.target:OnVessl",
}
# "survey": runs a program on the nodes, for `doctor`. "places-gateway": takes gateway.on: job. "tunnels": its gateway
# is reached by `tunnel` and `inside`. "keeps-weights": it keeps weights of a deployment beyond its end. "actuators":
# another autoscaler of the place may set the number of replicas. "measures": `doctor` may start small workloads there.
Capability = Literal["survey", "places-gateway", "tunnels", "keeps-weights", "actuators", "measures"]


class Placement(msgspec.Struct, frozen=True):
    """Where a unit is in its target's eyes.

    "queued": waits for machines, until `starts_at` (Unix seconds) as the target estimates. "placed": on all its nodes.
    "broken": some nodes are gone; `place` brings them back, or with `is_repaired_by_target` the target does. "gone":
    nothing of it runs. `is_final`: its owner ended it, so it is not placed again; of one that is queued or broken: it
    can never start as it is. `ends_at`: when its machines are taken away; `ends_by`: the limit that does it,
    where it has a name; `lead_s`: so long before that its successor starts (None: as long as starts take).
    `placed_at`: since when it is "placed", where the target learns late of a lost machine: a unit that then stops
    announcing gets a successor. `where`: its machines, for people. `restart`: the last time that the target itself
    brought it, or a part of it, back.
    """

    state: Literal["queued", "placed", "broken", "gone"]
    reason: str | None = None
    is_final: bool = False
    is_repaired_by_target: bool = False
    starts_at: float | None = None
    ends_at: float | None = None
    ends_by: str | None = None
    lead_s: float | None = None
    placed_at: float | None = None
    where: str | None = None
    restart: Restart | None = None


class Surveyed(msgspec.Struct, frozen=True):
    """What a command printed on one node. `exit_code` None: the node did not answer, and `err` says why."""

    host: str
    exit_code: int | None
    out: str = ""
    err: str = ""


class LeftBehind(PenstockError):
    """Raised by `end` when it has ended all that it could reach, and has noted the rest for `finish`."""


class Login(msgspec.Struct, frozen=True):
    """A login node, as ssh calls it, and the Python there that has penstock."""

    host: str
    python: str = "python3"
    ssh_config: str | None = None


class Tunnel(Protocol):
    """An open tunnel: `url` is its end on this machine."""

    url: str

    def last_words(self) -> str | None:
        """What its process printed before it ended; None while the tunnel is open."""


class Adopted(NamedTuple):
    """A deployment that another machine started, with its new run folder here. `where`: its place, for people."""

    run: Run
    where: str


class Facts:
    """What is true of a target without asking it.

    `listen`: where engines listen. `is_this_machine`: replicas run on the machine of `up`. `shares_files`: nodes see
    this machine's folders. `has_own_caches`: nodes download hub models themselves; with `fetches_models` by
    `cache.weights` in the target's own words, also in a revision that this machine does not know. `is_elastic`: each
    replica gets its own machines. `executor`: what starts vLLM's ranks on several nodes where the file leaves it open.
    `order_every_s`: the autoscaler orders at most one more replica in that time.
    """

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    listen: ClassVar[Listen] = "loopback"
    is_this_machine: ClassVar[bool] = False
    shares_files: ClassVar[bool] = False
    has_own_caches: ClassVar[bool] = False
    fetches_models: ClassVar[bool] = False
    is_elastic: ClassVar[bool] = False
    order_every_s: ClassVar[float] = 0.0
    executor: ClassVar[Literal["auto", "mp"]] = "auto"

    def placed(self, deployment: Deployment) -> tuple[Kind, ...]:
        """The kinds of units that it places. The others live next to `up`."""
        return ("replica",)

    def time_limit_s(self, deployment: Deployment) -> tuple[str, float] | None:
        """How long a replica may run, and the field of the file that says so."""
        return None

    def warnings(self, deployment: Deployment, plan: Plan) -> tuple[str, ...]:
        """What is legal in the file and may still surprise."""
        return ()

    def login(self, deployment: Deployment) -> Login | None:
        """The login node where the verbs of this deployment must run; None for here."""
        return None

    def nodes_per_machine(self, deployment: Deployment, handle: Handle, n_more: int = 0) -> list[int]:
        """Nodes of a run on each of `machines`, in their order, with `n_more` replicas; not for elastic targets."""
        return [len(handle.replicas) + n_more]


class Target(Facts, ABC):
    """The seam. `testing/conformance.py` checks every target against this contract.

    `render` is pure. `check`, `machines`, `survey` and `status` change nothing. `place` and `end` block until the
    target has accepted, are safe to repeat, and never touch another run. "gone" means that no process of the unit is
    left.
    """

    @abstractmethod
    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        """All reasons why this deployment could not be placed. A rehearsal may be where the target cannot be asked:
        then only the file is checked."""

    @abstractmethod
    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        """The machines a replica may use, as they are now; in a rehearsal where the target cannot be asked, those that
        the file describes (`assumed.machines_of_file`)."""

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        """What `python ARGV` prints on the nodes that replicas may use, all asked at the same time.

        In `argv` "{rank}" is the node's place in the answer, from 0. Only with the capability "survey".
        """
        raise UserError(f'cannot ask the nodes of target "{self.name}"')

    def measure(self, deployment: Deployment, download_bytes: int | None, say: Callable[[str], None]) -> list[Finding]:
        """What of the place only its own machines tell, for `doctor`. Blocks for minutes; leaves nothing there.

        `download_bytes`: of the model's files. Only with the capability "measures".  Raises PenstockError.
        """
        raise UserError(f'cannot measure target "{self.name}"')

    @abstractmethod
    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        """Exactly what `place` would send."""

    @abstractmethod
    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        """Place exactly these units: start what is absent, gone or broken, end what is not named.

        The caller writes the handle. Raises PenstockError when nothing could be changed; when only a part could, the
        handle says which, and the next call raises why.
        """

    @abstractmethod
    def status(self, run: Run) -> dict[Unit, Placement]:
        """The placement of every unit in the run's handle that was not told to end."""

    @abstractmethod
    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        """Lines of a unit's log, all or the `last`; with `follow` it then waits for more until the caller stops."""

    @abstractmethod
    def end(self, run: Run, grace_s: float) -> None:
        """End every unit, gateways first; after `grace_s` by force. Nothing of them is left when it returns.

        Works on a damaged folder too.
        """

    def fetch(self, run: Run) -> None:
        """Bring this run folder up to date, where its controller keeps another on a machine that shares no files."""

    def order(self, run: Run, desired: Desired) -> None:
        """Write down what the user asked for, where the controller reads it.  Raises PenstockError."""
        run.write_desired(desired)

    def keep_up(self, run: Run) -> None:
        """Called every second or so while the run lives: keeps up what the target holds besides units (tunnels)."""

    def asked_replicas(self, run: Run) -> int | None:
        """How many replicas another autoscaler of the place asks for (`replicas.actuator`); None where there is none,
        or where that is not known now. Only with the capability "actuators"."""
        return None

    def rolls(self, run: Run, deployment: Deployment) -> bool:
        """Whether placing this deployment replaces what serves of the run when its successor is ready."""
        return False

    # ---- from any machine that reaches the target --------------------------------------------------------------------

    def adopt(self, name: str, deployment: Deployment | None = None) -> Adopted | None:
        """The deployment of that name that another machine started; None where there is none, or nothing to ask.

        `deployment`: its file, which may say where to look.  Raises PenstockError when the target could be asked and
        does not answer.
        """
        return None

    def leftovers(self) -> list[Left]:
        """What it still has of deployments that are gone; `finish` ends each.  Raises PenstockError as `adopt` does."""
        return []

    def kept_keys(self, name: str) -> list[Left]:
        """The keys and usage that it keeps of an ended deployment.  Raises PenstockError as `adopt` does."""
        return []

    def tunnel(self, run: Run, port: int, kind: Kind = "gateway") -> AbstractContextManager[Tunnel]:
        """A tunnel from this port of 127.0.0.1 to the gateway or the chat page. Only with the capability "tunnels"."""
        raise UserError(f'cannot open a tunnel to target "{self.name}"')

    def inside(self, run: Run, words: Sequence[str], is_terminal: bool) -> list[str]:
        """The command that runs `keys`, `usage` or `dashboard` next to the gateway, for its store or admin address,
        with our input and output; its exit code is theirs. Only with the capability "tunnels"."""
        raise UserError(f'cannot run commands next to the gateway of target "{self.name}"')

    def end_weights(self, run: Run) -> None:
        """Remove the weights that it keeps for an ended deployment. Only with the capability "keeps-weights"."""


@functools.cache
def load(name: str) -> Target:
    """The target of that name, one in a process, so that it may remember.  Raises UserError when there is none."""
    if name not in TABLE:
        message = f'cannot use target "{name}": this version of penstock has no such target'
        raise UserError(message, hint=f"Targets here: {', '.join(TABLE)}.")
    module, _, attribute = TABLE[name].partition(":")
    target = getattr(importlib.import_module(module), attribute)()
    assert isinstance(target, Target)
    return target


def discover(name: str, deployment: Deployment | None = None) -> Adopted | None:
    """Look for a deployment that another machine started, wherever a target can be asked, or where its file says; None
    when one of that name is here.  Raises PenstockError when a target does not answer, and no other has it."""
    if not is_legal_name(name) or _is_here(Run(home() / "runs" / name)):
        return None
    silent: PenstockError | None = None
    for target in map(load, TABLE if deployment is None else {deployment.target} & TABLE.keys()):
        try:
            adopted = target.adopt(name, deployment)
        except PenstockError as exc:
            silent = exc
            continue
        if adopted is not None:
            return adopted
    if silent is not None:
        raise silent
    return None


def _is_here(run: Run) -> bool:
    """Whether it has a folder. One that ended may have been started again by another machine, in a target for that."""
    return run.exists() and not (run.is_ended() and "tunnels" in load(run.handle().target).capabilities)


def finish(left: Left) -> None:
    """End what an earlier `end` could not reach, from its note alone.  Raises PenstockError while it cannot."""
    importlib.import_module(TABLE[left.target].partition(":")[0]).finish(left)
