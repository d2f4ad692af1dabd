"""Targets: where replicas run. One file each; this module holds the seam, its contract and the name table.

A target places `python -m penstock.node` somewhere and knows whether it is still there. It knows no engine and no
Ray; it does not restart what dies (the controller decides that) and does not say when an engine is ready (the node
announces that to the gateway).
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from penstock.errors import PenstockError, Problem, UserError
from penstock.hardware import Machine
from penstock.run_folder import Artifact, Handle, Launch, Listen, Run
from penstock.spec.deployment import Deployment

# name -> "module:Class"
TABLE = {
    "local": "penstock.targets.local:Local",
    "ray": "penstock.targets.ray.target:RayJobs",
    "slurm": "penstock.targets.slurm.target:Slurm",
    "ssh": "penstock.targets.ssh.target:OverSsh",
}


class Placement(msgspec.Struct, frozen=True):
    """Where a replica is in its target's eyes.

    "queued": waits for machines, `starts_at` (Unix seconds) is the target's estimate. "placed": on all its nodes.
    "broken": some of its nodes are gone and `resize` brings them back. "gone": nothing of it runs. `is_final`: placing
    it again is not what its owner wants (somebody cancelled its job). `ends_at`: when its machines are taken away;
    `lead_s`: so long before, the next must be started (None: as long as starts take).
    """

    state: Literal["queued", "placed", "broken", "gone"]
    reason: str | None = None
    is_final: bool = False
    starts_at: float | None = None
    ends_at: float | None = None
    lead_s: float | None = None


class Surveyed(msgspec.Struct, frozen=True):
    """What a command printed on one node. `exit_code` None: the node could not be asked, and `err` says why."""

    host: str
    exit_code: int | None
    out: str = ""
    err: str = ""


class LeftBehind(PenstockError):
    """Raised by `cancel` when it has ended all that it could reach, and has noted the rest for `finish`."""


class Target(ABC):
    """The seam. `testing/conformance.py` checks every target against this contract.

    `render` is pure. `check`, `machines`, `survey` and `status` change nothing. `submit`, `resize` and `cancel` block
    until the target has accepted, are safe to repeat, and never touch another run. "gone" means that no process of the
    replica is left.
    """

    name: str
    features: frozenset[str]  # of: "resize", "logs-follow", "many-nodes", "elastic" (each replica gets own machines)
    listen: Listen = "loopback"

    @abstractmethod
    def check(self, deployment: Deployment) -> list[Problem]:
        """All reasons why this deployment could not be submitted here."""

    @abstractmethod
    def machines(self, deployment: Deployment) -> list[Machine]:
        """The machines a replica may use, as they are now."""

    @abstractmethod
    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        """What `python ARGV` prints on the nodes that replicas may use, run on all of them at once.

        In `argv` "{rank}" is the node's place in the answer, from 0.
        """

    @abstractmethod
    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        """Exactly what `submit` would send."""

    def spread(self, deployment: Deployment, handle: Handle, n_more: int = 0) -> list[int]:
        """How many nodes of a run each of `machines` has, in their order, once so many more replicas are placed.

        Not asked of elastic targets.
        """
        return [len(handle.replicas) + n_more]

    def rehearsed(self) -> Target:
        """This target for `render` and `--dry-run`: where its machines cannot be asked, the file's word is taken."""
        return self

    @abstractmethod
    def submit(self, run: Run, replicas: Sequence[str]) -> Handle:
        """Place the replicas of a run whose folder is written. What was placed before an error is ended again."""

    @abstractmethod
    def status(self, run: Run, handle: Handle) -> dict[str, Placement]:
        """The placement of every replica in the handle."""

    @abstractmethod
    def logs(self, run: Run, handle: Handle, replica: str, follow: bool, last: int | None = None) -> Iterator[str]:
        """Lines of a replica's log: all, or the `last` that are there; with `follow` it then waits for more until the
        caller stops."""

    @abstractmethod
    def resize(self, run: Run, handle: Handle, replicas: Sequence[str]) -> Handle:
        """Make exactly these replicas placed: start what is absent or gone, end what is not named."""

    def tend(self, run: Run, handle: Handle) -> None:  # noqa: B027 - most targets have nothing of the kind
        """Called again and again while the run lives: keeps up what the target itself holds beside it (a tunnel)."""

    def gateway_jobs(self, run: Run) -> dict[str, Placement] | None:
        """Gateways of the run that this target placed and was not told to end, oldest first, those that are over too.

        None while it cannot say. Only for runs whose gateway is not a process beside the controller.
        """
        raise NotImplementedError

    def start_gateway(self, run: Run) -> str:
        """Place one more gateway, which writes its address into the run's folder when it listens; its job."""
        raise NotImplementedError

    def end_gateway(self, run: Run, jobs: Sequence[str] | None, grace_s: float) -> None:  # noqa: B027 - as above
        """Drain these gateways, or all; after `grace_s` by force. Blocks; safe to repeat."""

    def finish(self, facts: dict[str, Any]) -> None:
        """End what an earlier `cancel` could not reach, from its note alone.  Raises PenstockError while it cannot."""
        raise UserError(f'target "{self.name}" leaves nothing behind')

    @abstractmethod
    def cancel(self, run: Run, handle: Handle, grace_s: float) -> None:
        """End every replica; after `grace_s` by force. Nothing of them is left when it returns."""


@functools.cache
def load(name: str) -> Target:
    """The target of that name, one in a process, so that it may remember.  Raises UserError when there is none."""
    if name not in TABLE:
        raise UserError(
            f'cannot use target "{name}": this version of penstock has no such target',
            hint=f"Targets here: {', '.join(TABLE)}.",
        )
    module, _, attribute = TABLE[name].partition(":")
    target = getattr(importlib.import_module(module), attribute)()
    assert isinstance(target, Target)
    return target
