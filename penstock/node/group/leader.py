"""Rank 0 of a replica on several machines: gathers the other nodes, decides, and watches them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.engines import Diagnosis
from penstock.errors import Problem
from penstock.hardware.network import free_port
from penstock.node.group import addresses
from penstock.node.group.addresses import Formation, GroupNode, Introduction
from penstock.node.group.rendezvous import PREPARING, BoardClient, wait_for
from penstock.planner import Plan
from penstock.wire.announcement import MachineReading, NodeView, PostView

_START_S = 120.0

OnWait = Callable[[str, tuple[NodeView, ...]], None]


class GroupLeader:
    """`form` blocks; `trouble` and `views` do not."""

    def __init__(self, plan: Plan, board: BoardClient, hosts: tuple[str, ...], is_stopped: Callable[[], bool]) -> None:
        self._plan, self._board, self._hosts, self._is_stopped = plan, board, hosts, is_stopped
        self._instances: dict[int, str] = {}
        self._epoch = ""
        self._formation: Formation | None = None
        self._gone: dict[int, str] = {}

    def form(self, own: Introduction, patience_s: float | None, on_wait: OnWait) -> Formation | Diagnosis | None:
        """Gather all nodes and decide; a Diagnosis if the group cannot form, None if the node is stopped.

        `patience_s`: how long to wait for the others, but for those that fetch the model; None: no limit.
        """
        self._formation, self._gone = None, {}
        self._epoch = secrets.token_hex(4)
        # Every node answers this epoch with new facts.
        self._post("gather")
        while not wait_for(lambda: self._all_in("here", on_wait), self._is_stopped, patience_s, self._board.world):
            if self._is_stopped() or not self._is_one_preparing():
                return self._absent(patience_s)
        posts = self._board.posts()
        died = self._died_early(posts)
        if died is not None:
            return died
        if len(posts) < self._plan.n_nodes - 1:  # one vanished between two looks
            return self._absent(patience_s)
        self._instances = {rank: row.post.instance for rank, row in posts.items()}
        others = [posts[rank].post.content["introduction"] for rank in range(1, self._plan.n_nodes)]
        return self._decide([own, *msgspec.convert(others, list[Introduction])])

    def post_go(self, formation: Formation) -> None:
        """Let the others start."""
        self._post("go", formation=msgspec.to_builtins(formation))

    def post_ready(self) -> None:
        """Let the others know that the engine serves."""
        if self._formation is not None:
            self._post("go", formation=msgspec.to_builtins(self._formation), is_ready=True)

    def go(self, formation: Formation) -> Diagnosis | None:
        """Let the others start and wait until they have; why they have not, or None."""
        self.post_go(formation)
        if wait_for(
            lambda: self._all_in("running") or self.trouble() is not None, self._is_stopped, _START_S, self._board.world
        ):
            return self.trouble()
        if self._is_stopped():
            return None
        return self.trouble() or Diagnosis(f"not every node started within {_START_S:.0f} s")

    def trouble(self) -> Diagnosis | None:
        """Why this epoch cannot go on (a node is gone, restarted, or its engine died), or None."""
        posts = self._board.posts()
        for node in self._formation.nodes[1:] if self._formation else ():
            reason = self._trouble_of(node, posts.get(node.rank))
            if reason is not None:
                self._gone[node.rank] = reason
        if not self._gone:
            return None
        contents = [row.post.content for rank, row in posts.items() if rank in self._gone]
        hint = next((content["hint"] for content in contents if content.get("hint")), None)
        is_final = any(content.get("is_final") and content.get("phase") == "died" for content in contents)
        return Diagnosis("; ".join(f"node {rank} {reason}" for rank, reason in self._gone.items()), hint, is_final)

    def _trouble_of(self, node: GroupNode, row: PostView | None) -> str | None:
        if row is None:
            return f"{node.host} ({node.address}) does not answer any more" if self._board.can_judge() else None
        if row.post.instance != self._instances.get(node.rank):
            return f"{node.host} ({node.address}) was started again"
        if row.post.epoch != self._epoch:  # it took this node for gone
            return f"{node.host} ({node.address}) has left the group"
        return f"{node.host}: {row.post.content.get('reason')}" if row.post.content.get("phase") == "died" else None

    def over(self, phase: str = "over", wait_s: float = 0.0) -> None:
        """End this epoch: the others end their engines, with "stopping" and "failed" also themselves.

        Waits `wait_s` at most until they can read it.
        """
        self._post(phase)
        self._board.wait_posted(wait_s)

    def views(self) -> tuple[NodeView, ...]:
        return addresses.as_views(self._plan, self._formation, self._gone) if self._formation else ()

    def machines(self) -> tuple[MachineReading, ...]:
        """The machines of the other nodes by rank, as far as they post them."""
        readings = []
        for _, row in sorted(self._board.posts().items()):
            with contextlib.suppress(msgspec.ValidationError):
                readings.append(msgspec.convert(row.post.content.get("machine"), MachineReading))
        return tuple(readings)

    def _post(self, phase: str, **content: object) -> None:
        self._board.post(self._epoch, phase=phase, **content)

    def _all_in(self, phase: str, on_wait: OnWait | None = None) -> bool:
        """Whether all others have reached that phase of this epoch, or died in it."""
        posts = self._board.posts()
        missing = [
            rank
            for rank in range(1, self._plan.n_nodes)
            if rank not in posts
            or posts[rank].post.epoch != self._epoch
            or posts[rank].post.content.get("phase") not in (phase, "died")
        ]
        if missing and on_wait is not None:
            notes = {rank: row.post.content.get("note") for rank, row in posts.items() if rank in missing}
            names = [self._name(rank) + (f": {notes[rank]}" if notes.get(rank) else "") for rank in missing]
            views = (self._waiting_view(rank, rank in missing, notes) for rank in range(self._plan.n_nodes))
            on_wait(f"waiting for {', '.join(names)}", tuple(views))
        return not missing

    def preparing(self) -> tuple[NodeView, ...]:
        """The nodes while rank 0 itself is not here yet: what the others have said so far."""
        posts = self._board.posts()
        notes = {rank: row.post.content.get("note") for rank, row in posts.items()}
        return tuple(self._waiting_view(rank, rank not in posts, notes) for rank in range(self._plan.n_nodes))

    def _waiting_view(self, rank: int, is_missing: bool, notes: Mapping[int, str | None]) -> NodeView:
        host = self._hosts[rank] if rank < len(self._hosts) else f"rank {rank}"
        state, ranks = "waiting" if is_missing else "here", addresses.ranks_of(self._plan, rank)
        return NodeView(rank, host, state, ranks=ranks, reason=notes.get(rank))

    def _is_one_preparing(self) -> bool:
        posts = self._board.posts().values()
        return any(row.post.epoch == self._epoch and row.post.content.get("phase") == PREPARING for row in posts)

    def _name(self, rank: int) -> str:
        return f"{self._hosts[rank]} (node {rank})" if rank < len(self._hosts) else f"node {rank}"

    def _died_early(self, posts: Mapping[int, PostView]) -> Diagnosis | None:
        """Why a node cannot take part: it has no model, or no GPU."""
        contents = {rank: row.post.content for rank, row in posts.items() if row.post.content.get("phase") == "died"}
        if not contents:
            return None
        reason = "; ".join(f"{self._name(rank)}: {content.get('reason')}" for rank, content in contents.items())
        hint = next((content["hint"] for content in contents.values() if content.get("hint")), None)
        return Diagnosis(reason, hint, all(content.get("is_final") for content in contents.values()))

    def _absent(self, patience_s: float | None) -> Diagnosis | None:
        if self._is_stopped():
            return None
        posts = self._board.posts()
        missing = [self._name(rank) for rank in range(1, self._plan.n_nodes) if rank not in posts]
        return Diagnosis(
            f"{', '.join(missing) or 'a node'} did not join within {patience_s or 0:.0f} s (engine.join_timeout_s)",
            "`penstock doctor FILE` checks every node; `penstock logs` shows the log of each.",
            is_final=True,
        )

    def _decide(self, introductions: Sequence[Introduction]) -> Formation | Diagnosis:
        facts = [introduction.facts for introduction in introductions]
        problems = addresses.problems(self._plan, facts)
        if problems:
            return _refused(problems)
        chosen = addresses.choose_addresses(introductions, addresses.wanted_network(self._plan))
        if isinstance(chosen, Problem):
            return _refused([chosen])
        nodes = tuple(
            GroupNode(rank, node.host, interface.address, interface.name, tuple(gpu.index for gpu in node.machine.gpus))
            for rank, (node, interface) in enumerate(zip(facts, chosen, strict=True))
        )
        head, is_ray = nodes[0].address, self._plan.executor == "ray"
        ray_port, token = (free_port(head), secrets.token_hex(32)) if is_ray else (0, "")
        self._formation = Formation(nodes, free_port(head, {ray_port}), ray_port, token)
        return self._formation


def _refused(problems: Sequence[Problem]) -> Diagnosis:
    """All problems of these nodes at once; a restart would not change them."""
    hints = "; ".join(dict.fromkeys(problem.hint for problem in problems if problem.hint))
    return Diagnosis("; ".join(problem.message for problem in problems), hints or None, is_final=True)
