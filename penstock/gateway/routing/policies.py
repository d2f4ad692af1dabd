"""Which replica takes a request: one function per policy. Pure: the caller gives the candidates, the turn and the key.

A key (a prompt's first bytes, or a session) should meet the same replica again. Rendezvous hashing places it, so a
replica that comes or goes moves only its own keys: https://en.wikipedia.org/wiki/Rendezvous_hashing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from penstock.spec.gateway import PolicyName

# A replica takes at most this times its fair share of the load before a key goes to its next choice.
# Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, https://arxiv.org/abs/1608.01350
LOAD_BOUND = 1.25

_MASK = 2**64 - 1


class Candidate(Protocol):
    """`load` is in requests; a replica of `weight` 2 should have twice the load of one of 1."""

    @property
    def name(self) -> str: ...
    @property
    def load(self) -> float: ...
    @property
    def weight(self) -> float: ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


def choose(
    policy: PolicyName, candidates: Sequence[CandidateT], turn: int, key: bytes = b"", avoid: Collection[str] = ()
) -> CandidateT | None:
    """The candidate that `policy` takes; `turn`, which counts up, rotates among equals.

    Names in `avoid` (those that lost this request before) are taken only when there is no other. Without a key,
    "prefix" and "sticky" are "least-load".
    """
    if avoid:
        candidates = [candidate for candidate in candidates if candidate.name not in avoid] or candidates
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    chosen: CandidateT = _POLICIES[policy](candidates, turn, key)
    return chosen


def least_load(candidates: Sequence[CandidateT], turn: int, _key: bytes = b"") -> CandidateT:
    """The least (load + 1) / weight: where this request would weigh least."""
    shares = [(candidate.load + 1) / candidate.weight for candidate in candidates]
    least = min(shares)
    equals = [candidate for candidate, share in zip(candidates, shares, strict=True) if share == least]
    return equals[turn % len(equals)]


def round_robin(candidates: Sequence[CandidateT], turn: int, _key: bytes = b"") -> CandidateT:
    """In turn whatever their load, each as often as its weight: of weights 2 and 1 two of three."""
    if all(candidate.weight == candidates[0].weight for candidate in candidates):
        return candidates[turn % len(candidates)]
    # Steps of the golden ratio spread the turns of a heavy replica between those of the others.
    at = turn * 0.6180339887498949 % 1.0 * sum(candidate.weight for candidate in candidates)
    for candidate in candidates:
        at -= candidate.weight
        if at < 0:
            return candidate
    return candidates[-1]


def prefix(candidates: Sequence[CandidateT], turn: int, key: bytes) -> CandidateT:
    """The key's best-scored candidate whose load stays within LOAD_BOUND of its fair share of all load.

    With m requests in flight on n equal replicas none gets more than ceil(LOAD_BOUND * (m + 1) / n):
    9 on 4 replicas -> ceil(1.25 * 10 / 4) = 4. The least loaded one is always below it.
    """
    if not key:
        return least_load(candidates, turn)
    total = sum(candidate.load for candidate in candidates) + 1
    per_weight = LOAD_BOUND * total / sum(candidate.weight for candidate in candidates)
    within = [candidate for candidate in candidates if candidate.load + 1 <= math.ceil(per_weight * candidate.weight)]
    return _best_scored(within, key) if within else least_load(candidates, turn)


def sticky(candidates: Sequence[CandidateT], turn: int, key: bytes) -> CandidateT:
    """The key's best-scored candidate, whatever its load."""
    return _best_scored(candidates, key) if key else least_load(candidates, turn)


_POLICIES: dict[PolicyName, Callable[[Sequence[Any], int, bytes], Any]] = {
    "least-load": least_load,
    "prefix": prefix,
    "round-robin": round_robin,
    "sticky": sticky,
}


def _best_scored(candidates: Sequence[CandidateT], key: bytes) -> CandidateT:
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return max(candidates, key=lambda candidate: _score(candidate, seed))


def _score(candidate: Candidate, seed: int) -> float:
    """Weighted rendezvous: -weight / ln(u) of a u in (0, 1) that is fixed for name and key."""
    name = hashlib.blake2b(candidate.name.encode(), digest_size=8).digest()
    # The finalizer of splitmix64, https://prng.di.unimi.it/splitmix64.c: close inputs get unrelated outputs.
    mixed = (int.from_bytes(name, "little") ^ seed) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return -candidate.weight / math.log((mixed + 0.5) / 2**64)
