"""Requests and tokens a minute, requests at once, dollars a month. Pure: takes `now`.

A bucket holds one minute's worth and fills steadily. It follows a running total that includes what other gateways took,
and takes off what was added since its last look. Tokens are reserved before a request goes (its prompt by an estimate,
its answer by its limit) and settled with what the engine counted. A request that reserves more than a minute's worth
waits for a full bucket and leaves it in debt.

What others have now, requests at once and reserved tokens, may have ended since they told it. A request that only this
keeps out is `unsure`: ask again when the others have had time to tell.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.accounting.running_totals import AT_ONCE, Total, Totals
from penstock.wire.http1 import Headers

Kind = Literal["requests", "tokens", "concurrency", "budget"]

BUSY_RETRY_S = 1.0  # after too many at once: when one ends nobody knows
MAX_HELD = 64  # requests of a key that ask again


class Refusal(msgspec.Struct, frozen=True):
    kind: Kind
    limit: float
    retry_after_s: float
    is_unsure: bool = False  # only what others have now is in the way


class Bucket:
    """`per_minute` at once after a rest, and as many every minute; `total` is what all gateways took."""

    __slots__ = ("_at", "_seen", "level", "per_minute", "total")

    def __init__(self, per_minute: int, now: float, total: Total) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.total = total
        self._at = now
        self._seen = total.now()

    def look(self, now: float) -> float:
        """How much may be taken now; below 0 after more was used than reserved."""
        total, full = self.total.now(), float(self.per_minute)
        filled = min(full, self.level + max(0.0, now - self._at) * full / 60)
        self.level = min(full, filled - (total - self._seen))
        self._at, self._seen = max(now, self._at), total
        return self.level

    def wait_s(self, n: float) -> float:
        """Seconds after the last look until `n` are there; `n` is at most a minute's worth."""
        return max(0.0, (n - self.level) * 60 / self.per_minute)


class Quota:
    __slots__ = (
        *("_at_once", "_requests", "_reserved", "_tokens"),
        *("is_limited", "limits", "n_bodies", "n_held", "spent_usd"),
    )

    def __init__(self, key_id: str, limits: Limits, totals: Totals, now: float) -> None:
        def bucket(kind: str, per_minute: int | None) -> Bucket | None:
            return None if per_minute is None else Bucket(per_minute, now, totals[f"key:{key_id}:{kind}"])

        self.limits = limits
        self.n_bodies = 0  # of requests that are still arriving
        self.n_held = 0  # requests that were refused without certainty, and ask again
        self.spent_usd = 0.0  # this month, told from outside
        self._requests = bucket("requests", limits.rpm)
        self._tokens = bucket("tokens", limits.tpm)
        self._reserved = totals[f"key:{key_id}:tokens{AT_ONCE}"] if limits.tpm is not None else None
        self._at_once = totals[f"key:{key_id}{AT_ONCE}"] if limits.concurrency is not None else None
        numbers = (limits.rpm, limits.tpm, limits.concurrency, limits.budget_usd)
        self.is_limited = any(limit is not None for limit in numbers)

    def refuse_body(self) -> Refusal | None:
        """The limit that a request would pass whose body is about to arrive. Others' requests may end until it has."""
        limit = self.limits.concurrency
        if limit is None or self._at_once is None or self._at_once.own + self.n_bodies < limit:
            return None
        return Refusal("concurrency", limit, BUSY_RETRY_S)

    def take(self, now: float, n_tokens: int) -> Refusal | None:
        """Admits a request that reserves `n_tokens`, until `give_back`, or returns the limit it would pass."""
        limits, requests, tokens, at_once = self.limits, self._requests, self._tokens, self._at_once
        if limits.budget_usd is not None and self.spent_usd >= limits.budget_usd:
            return Refusal("budget", limits.budget_usd, 0.0)
        if at_once is not None and limits.concurrency is not None and at_once.now() >= limits.concurrency:
            is_unsure = at_once.own + self.n_held < min(limits.concurrency, MAX_HELD)
            return Refusal("concurrency", limits.concurrency, BUSY_RETRY_S, is_unsure)
        if requests is not None and requests.look(now) < 1:
            return Refusal("requests", requests.per_minute, requests.wait_s(1))
        if tokens is not None and self._reserved is not None:
            wanted = min(n_tokens, tokens.per_minute)
            if tokens.look(now) < wanted:
                is_unsure = tokens.level + self._reserved.others >= wanted and self.n_held < MAX_HELD
                return Refusal("tokens", tokens.per_minute, tokens.wait_s(wanted), is_unsure)
            tokens.total.own += n_tokens
            self._reserved.own += n_tokens
        if requests is not None:
            requests.total.own += 1
        if at_once is not None:
            at_once.own += 1
        return None

    def take_refused(self, now: float) -> None:
        """Counts a request that was refused, but not for its rate: else it would be refused for ever."""
        if self._requests is not None and self._requests.look(now) >= 1:
            self._requests.total.own += 1

    def give_back(self, n_reserved: int, n_used: int) -> bool:
        """Ends a request; returns whether another one like it may be waiting for that elsewhere."""
        is_wanted = False
        if self._tokens is not None and self._reserved is not None:
            is_wanted = self._tokens.level < n_reserved
            self._tokens.total.own += n_used - n_reserved
            self._reserved.own -= n_reserved
        if self._at_once is not None and self.limits.concurrency is not None:
            is_wanted = is_wanted or self._at_once.now() >= self.limits.concurrency
            self._at_once.own -= 1
        return is_wanted

    def headers(self, now: float) -> Headers:
        """x-ratelimit-* of the key's limits, with OpenAI's names; a reset is when the bucket is full again."""
        headers: list[tuple[bytes, bytes]] = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                level = bucket.look(now)
                headers += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(0, int(level))),
                    (b"x-ratelimit-reset-" + name, b"%.3fs" % bucket.wait_s(bucket.per_minute)),
                ]
        return tuple(headers)
