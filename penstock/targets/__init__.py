"""Targets: where replicas run. One file each; this module holds the seam, its contract and the name table.

A target places `python -m penstock.node` somewhere and knows whether it is still there. It knows no engine and no
Ray; it does not restart what dies (the controller decides that) and does not say when an engine is ready (the node
announces that to the gateway).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from penstock.errors import Problem, UserError
from penstock.plan import Machine, Plan
from penstock.runs import Artifact, Handle, Run
from penstock.spec import Deployment

# name -> "module:Class"
TABLE = {
    "local": "penstock.targets.local:Local",
}


class Launch(msgspec.Struct, frozen=True):
    """What a node is told. Rendered into the artifact as launch.json; the token stays in its own file or variable."""

    deployment: str
    plan: Plan
    announce_url: str
    token_file: str
    lease_s: float = 6.0


class Placement(msgspec.Struct, frozen=True):
    """Where a replica is in its target's eyes: waiting for a machine, on one, or gone (and why, when it is known)."""

    state: Literal["queued", "placed", "gone"]
    reason: str | None = None


class Target(ABC):
    """The seam. `testing/conformance.py` checks every target against this contract.

    `render` is pure. `check`, `machines` and `status` change nothing. `submit`, `resize` and `cancel` block until the
    target has accepted, are safe to repeat, and never touch another run. "gone" means that no process of the replica
    is left.
    """

    name: str
    features: frozenset[str]  # of: "resize", "logs-follow", "many-nodes"

    @abstractmethod
    def check(self, deployment: Deployment) -> list[Problem]:
        """All reasons why this deployment could not be submitted here."""

    @abstractmethod
    def machines(self, deployment: Deployment) -> list[Machine]:
        """The machines a replica may use, as they are now."""

    @abstractmethod
    def render(self, launch: Launch, python: str) -> Artifact:
        """Exactly what `submit` would send."""

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

    @abstractmethod
    def cancel(self, run: Run, handle: Handle, grace_s: float) -> None:
        """End every replica; after `grace_s` by force. Nothing of them is left when it returns."""


def load(name: str) -> Target:
    """The target of that name.  Raises UserError when this version has none."""
    if name not in TABLE:
        raise UserError(
            f'cannot use target "{name}": this version of penstock has no such target',
            hint=f"Targets here: {', '.join(TABLE)}.",
        )
    module, _, attribute = TABLE[name].partition(":")
    target = getattr(importlib.import_module(module), attribute)()
    assert isinstance(target, Target)
    return target
