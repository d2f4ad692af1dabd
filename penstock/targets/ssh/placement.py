"""Which hosts a replica takes, and what is kept of a node that was placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from penstock.wire.announcement import Process


class Node(msgspec.Struct, frozen=True):
    """One node of a replica. `folder`: of the run, on its host. `port`: of its engine there. `announce`: leads from
    there to our admin address. `local`: leads from here to the engine; None for all but the first node."""

    host: str
    name: str
    folder: str
    python: str
    process: Process
    boot: str
    port: int
    announce: int
    local: int | None = None


def assign(
    hosts: Sequence[str], n_nodes: int, replicas: Sequence[str], existing: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """The hosts of each replica by rank: those it has, else those with the fewest replicas, in the file's order. Pure.

    Three hosts, two nodes a replica: replica 0 takes the first and second, replica 1 the first and third.
    """
    chosen = {replica: tuple(existing[replica]) for replica in replicas if replica in existing}
    uses = Counter(host for taken in chosen.values() for host in taken)
    for replica in replicas:
        if replica not in chosen:
            best = sorted(range(len(hosts)), key=lambda at: (uses[hosts[at]], at))[:n_nodes]
            chosen[replica] = tuple(hosts[at] for at in sorted(best))
            uses.update(chosen[replica])
    return chosen
