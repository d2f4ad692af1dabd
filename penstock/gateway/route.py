"""Which replica takes a request. Pure: the caller gives the candidates and the turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def in_flight(self) -> int: ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


def choose(candidates: Sequence[CandidateT], turn: int, avoid: Collection[str] = ()) -> CandidateT | None:
    """The candidate with the fewest requests in flight; `turn`, which counts up, rotates among equals.

    Names in `avoid` (those that lost this request before) are taken only when there is no other.
    """
    preferred = [candidate for candidate in candidates if candidate.name not in avoid] or candidates
    if not preferred:
        return None
    least = min(candidate.in_flight for candidate in preferred)
    equals = [candidate for candidate in preferred if candidate.in_flight == least]
    return equals[turn % len(equals)]
