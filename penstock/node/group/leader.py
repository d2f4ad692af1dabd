"""The first node of a replica that is cut over several machines: gathers the others, decides, and watches them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import msgspec

from penstock.engines import Diagnosis
from penstock.errors import Problem
from penstock.hardware import NodeFacts
from penstock.hardware.network import free_port
from penstock.node.group import addresses
from penstock.node.group.addresses import Formation, Spot
from penstock.node.group.rendezvous import Group, open_door, reached, wait_for
from penstock.planner import Plan
from penstock.wire.announcement import NodeView, PostView

_PROBE_S = 20.0
_START_S = 120.0

OnWait = Callable[[str, tuple[NodeView, ...]], None]


class Lead:
    """Rank 0's part. `form` blocks; `trouble` and `views` do not."""

    def __init__(self, plan: Plan, group: Group, hosts: tuple[str, ...], is_stopped: Callable[[], bool]) -> None:
        self._plan, self._group, self._hosts, self._is_stopped = plan, group, hosts, is_stopped
        self._instances: dict[int, str] = {}
        self._epoch = ""
        self._formation: Formation | None = None
        self._gone: dict[int, str] = {}

    def form(self, facts: NodeFacts, patience_s: float | None, on_wait: OnWait) -> Formation | Diagnosis | None:
        """Gather all nodes and decide; a Diagnosis when that cannot be, None when we were told to stop.

        `patience_s`: how long to wait for the others, None for as long as it takes.
        """
        self._formation, self._gone = None, {}
        self._epoch = secrets.token_hex(4)
        with open_door() as door:
            # The newest word of every node is needed, so the others answer this epoch with facts of their own.
            self._say("gather")
            if not wait_for(lambda: self._all("here", on_wait), self._is_stopped, patience_s):
                return self._absent(patience_s)
            posts = self._group.others()
            died = self._died_early(posts)
            if died is not None:
                return died
            self._instances = {rank: row.post.instance for rank, row in posts.items()}
            told = {rank: _Told(row.post.content) for rank, row in posts.items()}
            told[0] = _Told({"facts": msgspec.to_builtins(facts), "port": door.port, "nonce": door.nonce})
            every = [told[rank].facts for rank in range(self._plan.n_nodes)]
            found = addresses.problems(self._plan, every)
            if found:
                return _refused(found)
            doors = {rank: (one.facts, one.port, one.nonce) for rank, one in told.items()}
            self._say("probe", doors=msgspec.to_builtins(doors))
            seen = {0: reached(doors)}
            if not wait_for(lambda: self._all("probed"), self._is_stopped, _PROBE_S):
                return self._trouble_or(f"not every node answered the probe of the network within {_PROBE_S:.0f} s")
            seen |= {rank: _reached_of(row) for rank, row in self._group.others().items()}
        return self._decide(every, seen)

    def tell_go(self, made: Formation) -> None:
        """Tell the others to start."""
        self._say("go", formation=msgspec.to_builtins(made))

    def go(self, made: Formation) -> Diagnosis | None:
        """Tell the others to start, and wait until they have; why not, or None."""
        self.tell_go(made)
        if wait_for(lambda: self._all("running") or self.trouble() is not None, self._is_stopped, _START_S):
            return self.trouble()
        return None if self._is_stopped() else self._trouble_or(f"not every node started within {_START_S:.0f} s")

    def trouble(self) -> Diagnosis | None:
        """Why this epoch cannot go on: a node that is gone, came again, or whose part died. None when all is well."""
        others = self._group.others()
        for spot in self._formation.spots[1:] if self._formation else ():
            row = others.get(spot.rank)
            why = None
            if row is None:
                why = f"{spot.host} ({spot.address}) does not answer any more" if self._group.can_judge() else None
            elif row.post.instance != self._instances.get(spot.rank):
                why = f"{spot.host} ({spot.address}) was started again"
            elif row.post.epoch == self._epoch and row.post.content.get("phase") == "died":
                why = f"{spot.host}: {row.post.content.get('reason')}"
            if why is not None:
                self._gone[spot.rank] = why
        if not self._gone:
            return None
        told = [row.post.content for rank, row in others.items() if rank in self._gone]
        hint = next((content["hint"] for content in told if content.get("hint")), None)
        is_final = any(content.get("is_final") and content.get("phase") == "died" for content in told)
        return Diagnosis("; ".join(f"node {rank} {why}" for rank, why in self._gone.items()), hint, is_final)

    def over(self, phase: str = "over") -> None:
        """This epoch has ended: the others end their part of it. "stopping" and "failed" end them for good."""
        self._say(phase)

    def wait_said(self, timeout_s: float) -> None:
        """Until the others can read what was said last."""
        self._group.wait_posted(timeout_s)

    def views(self) -> tuple[NodeView, ...]:
        return addresses.as_views(self._plan, self._formation, self._gone) if self._formation else ()

    def _say(self, phase: str, **content: object) -> None:
        self._group.say(self._epoch, phase=phase, **content)

    def _all(self, phase: str, on_wait: OnWait | None = None) -> bool:
        there = self._group.others()
        is_so = {
            rank: row.post.epoch == self._epoch and row.post.content.get("phase") in (phase, "died")
            for rank, row in there.items()
        }
        missing = [rank for rank in range(1, self._plan.n_nodes) if not is_so.get(rank)]
        if missing and on_wait is not None:
            names = ", ".join(self._name(rank) for rank in missing)
            views = (self._waiting_view(rank, rank in missing) for rank in range(self._plan.n_nodes))
            on_wait(f"waiting for {names}", tuple(views))
        return not missing

    def _waiting_view(self, rank: int, is_missing: bool) -> NodeView:
        host = self._hosts[rank] if rank < len(self._hosts) else f"rank {rank}"
        return NodeView(rank, host, "waiting" if is_missing else "here", ranks=addresses.ranks_of(self._plan, rank))

    def _name(self, rank: int) -> str:
        return f"{self._hosts[rank]} (node {rank})" if rank < len(self._hosts) else f"node {rank}"

    def _died_early(self, posts: Mapping[int, PostView]) -> Diagnosis | None:
        """Why a node cannot take part at all: it has no model, or no GPU."""
        told = {rank: row.post.content for rank, row in posts.items() if row.post.content.get("phase") == "died"}
        if not told:
            return None
        why = "; ".join(f"{self._name(rank)}: {content.get('reason')}" for rank, content in told.items())
        hint = next((content["hint"] for content in told.values() if content.get("hint")), None)
        return Diagnosis(why, hint, all(content.get("is_final") for content in told.values()))

    def _absent(self, patience_s: float | None) -> Diagnosis | None:
        if self._is_stopped():
            return None
        there = self._group.others()
        missing = [self._name(rank) for rank in range(1, self._plan.n_nodes) if rank not in there]
        return Diagnosis(
            f"{', '.join(missing) or 'a node'} did not join within {patience_s or 0:.0f} s (engine.join_timeout_s)",
            "`penstock doctor FILE` asks every node; `penstock logs` shows what each of them said.",
            is_final=True,
        )

    def _trouble_or(self, why: str) -> Diagnosis | None:
        if self._is_stopped():
            return None
        return self.trouble() or Diagnosis(why)

    def _decide(
        self, facts: list[NodeFacts], seen: Mapping[int, Mapping[int, list[str]]]
    ) -> Formation | Diagnosis | None:
        chosen = addresses.choose_addresses(facts, seen, addresses.wanted_interface(self._plan))
        if isinstance(chosen, Problem):
            return _refused([chosen])
        spots = tuple(
            Spot(rank, node.host, one.address, one.name, tuple(gpu.index for gpu in node.machine.gpus))
            for rank, (node, one) in enumerate(zip(facts, chosen, strict=True))
        )
        head = spots[0].address
        self._formation = Formation(
            spots, free_port(head), free_port(head) if self._plan.executor == "ray" else 0
        )  # fmt: skip
        return self._formation


class _Told:
    """A node's first post of an epoch."""

    def __init__(self, content: Mapping[str, object]) -> None:
        self.facts = msgspec.convert(content["facts"], NodeFacts)
        self.port = msgspec.convert(content["port"], int)
        self.nonce = msgspec.convert(content["nonce"], str)


def _reached_of(row: PostView) -> dict[int, list[str]]:
    return msgspec.convert(row.post.content.get("reached") or {}, dict[int, list[str]], strict=False)


def _refused(found: list[Problem]) -> Diagnosis:
    """All that is wrong with these nodes, at once: starting again unchanged would end the same way."""
    hints = "; ".join(dict.fromkeys(problem.hint for problem in found if problem.hint))
    return Diagnosis("; ".join(problem.message for problem in found), hints or None, is_final=True)
