"""How many people a deployment serves, and the first limit that they reach. Pure.

A person thinks for Z seconds, asks, and waits R seconds for the whole answer: by the interactive response time law
C requests at once serve C x (R + Z) / R people.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import msgspec

from penstock.planner.ranges import Range
from penstock.planner.speed.estimate import Speed
from penstock.spec.deployment import Workload


class Person(msgspec.Struct, frozen=True):
    """One user. context_tokens: the conversation with the answer, which the KV cache holds and a turn reads again."""

    context_tokens: int = 4000
    reply_tokens: int = 300
    think_time_s: float = 30.0


class Capacity(msgspec.Struct, frozen=True):
    """Of the deployment, over all data ranks."""

    kv_tokens: int
    max_num_seqs: int


class Users(msgspec.Struct, frozen=True):
    """`n_users` people, `n_at_once` of them waiting `response_s`; `first_limit` stops one more."""

    n_users: Range
    n_at_once: int
    first_limit: str
    response_s: Range
    assumed: str


def users(person: Person, capacity: Capacity, workload: Workload, speed_at: Callable[[Workload], Speed]) -> Users:
    """The most people whose requests all fit and meet the targets of `workload` (None: no target).
    65,536 tokens of KV cache, 4,000 a person: 16 at once; 6 s an answer and 30 s to think: 16 x 36 / 6 = 96 people.
    `speed_at` must not get faster with concurrency."""
    prompt, reply = max(1, person.context_tokens - person.reply_tokens), max(1, person.reply_tokens)

    def speed_of(n: int) -> Speed:
        return speed_at(Workload(prompt, reply, n, workload.ttft_ms, workload.tpot_ms))

    room, first_limit = _room(person, capacity)
    n_at_once = bisect.bisect_left(range(1, room + 1), True, key=lambda n: bool(_missed(speed_of(n), workload)))
    if n_at_once < room:
        first_limit = _missed(speed_of(n_at_once + 1), workload)
    assumed = f"{person.context_tokens:,} tokens of context, {person.reply_tokens:,} a reply, "
    assumed += f"{person.think_time_s:g} s to think"
    if not n_at_once:
        return Users(Range(0, 0, 0), 0, first_limit, Range(0, 0, 0), assumed)
    speed = speed_of(n_at_once)
    response = (speed.ttft_ms + speed.tpot_ms * max(0, person.reply_tokens - 1)) * 1e-3
    waits = (response.high, response.likely, response.low)
    people = Range(*(float(int(n_at_once * (wait + person.think_time_s) / wait)) for wait in waits))
    return Users(people, n_at_once, first_limit, response, assumed)


def _room(person: Person, capacity: Capacity) -> tuple[int, str]:
    by_cache = capacity.kv_tokens // max(1, person.context_tokens)
    if by_cache > capacity.max_num_seqs:
        return capacity.max_num_seqs, f"max_num_seqs {capacity.max_num_seqs:,} at once"
    share = f"{capacity.kv_tokens:,} tokens / {person.context_tokens:,} a person"
    return by_cache, f"KV cache: {share} = {by_cache:,} at once"


def _missed(speed: Speed, workload: Workload) -> str:
    rows = (
        ("time to first token", speed.ttft_ms.likely, workload.ttft_ms),
        ("time per token", speed.tpot_ms.likely, workload.tpot_ms),
    )
    missed = [f"{what}: {value:.3g} ms, at most {most:g}" for what, value, most in rows if most and value > most]
    return missed[0] if missed else ""
