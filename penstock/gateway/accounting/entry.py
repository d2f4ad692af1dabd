"""Keys and quotas before a request, one ledger row after it. In memory only: the ledger's thread does the rest.

`requests` feeds an Entry: `start`, `begin` with the response's head, `feed` with every piece, `end`.
"""

from __future__ import annotations

import calendar
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import gmtime
from typing import Final

from penstock.gateway.accounting.keys import KeyHolder, Keyring, credential
from penstock.gateway.accounting.ledger import Ledger
from penstock.gateway.accounting.quota import Quota, Refusal
from penstock.gateway.accounting.record import OUTCOMES, Record
from penstock.gateway.accounting.running_totals import new_totals
from penstock.gateway.accounting.store_writer import News
from penstock.gateway.accounting.token_usage import MAX_TOKENS, BodyWatch, StreamStrip, StreamWatch, ask_for_usage
from penstock.gateway.accounting.usage_store import State
from penstock.gateway.body_fields import Usage
from penstock.gateway.config import GatewayConfig
from penstock.gateway.metrics.counters import MAX_SERIES, Family, Labels
from penstock.gateway.responses import Answer, error_answer
from penstock.spec.gateway import Price
from penstock.wire.http1 import Headers, RequestHead, ResponseHead, find_header
from penstock.world import REAL, World

log = logging.getLogger(__name__)
Watch = BodyWatch | StreamWatch | StreamStrip

# What a path generates: whether a stream of it must be asked for its usage, and what ends each of its tokens' events.
_GENERATING: Final[dict[bytes, tuple[bool, bytes | None]]] = {
    b"/v1/chat/completions": (True, None),
    b"/v1/completions": (True, None),
    b"/v1/responses": (False, b".delta\n"),
}
_NOTHING: Final = (False, None)
# Requests to these carry no prompt.
_NO_PROMPT: Final = frozenset((b"/tokenize", b"/detokenize", b"/v1/audio/transcriptions", b"/v1/audio/translations"))
_CHAT: Final = b"/v1/chat/completions"  # its streams begin with an event that carries the role and no token
# A request that may be refused for what has ended elsewhere asks again: every gateway tells its own twice a second.
HELD_S = 1.0
KEYS_LATE_S = 10.0  # they are read twice a second
RETAKE_S = 0.02
OUTPUT_TOKENS = 256  # reserved where the client sets no limit
BYTES_PER_TOKEN = 4.0  # of a request's body, until a model's own replies tell better
PROMPT_TOKENS_MAX = 131_072
_LEARNING, _LEARN_FROM_TOKENS = 0.05, 32
_WORDS: Final = {
    "requests": ("rate_limit_exceeded", "{limit:g} requests a minute"),
    "tokens": ("rate_limit_exceeded", "{limit:g} tokens a minute"),
    "concurrency": ("concurrency_exceeded", "{limit:g} requests at once"),
    "budget": ("insufficient_quota", "${limit:g} this month"),
}


class UseCount:
    """What was used of one model: by all, or by one key."""

    __slots__ = ("n_cached", "n_output", "n_prompt", "n_requests")

    def __init__(self) -> None:
        self.n_requests = self.n_prompt = self.n_cached = self.n_output = 0

    def add(self, record: Record) -> None:
        self.n_requests += 1
        self.n_prompt += record.prompt_tokens
        self.n_cached += record.cached_tokens
        self.n_output += record.output_tokens

    def by_kind(self, labels: Labels) -> dict[Labels, float]:
        counts = (("prompt", self.n_prompt), ("cached", self.n_cached), ("output", self.n_output))
        return {(*labels, ("kind", kind)): n for kind, n in counts}


@dataclass
class Account:
    """A model's price, its counts since the start, and averages for requests that end without a usage report."""

    price: Price | None = None
    n_rows: Counter[State] = field(default_factory=Counter)
    count: UseCount = field(default_factory=UseCount)
    bytes_per_token: float = BYTES_PER_TOKEN
    tokens_per_event: float = 1.0
    by_key: dict[str, UseCount] = field(default_factory=dict)  # by its name

    def learn(self, usage: Usage, n_body_bytes: int, n_events: int) -> None:
        if usage.prompt_tokens >= _LEARN_FROM_TOKENS:
            self.bytes_per_token += _LEARNING * (n_body_bytes / usage.prompt_tokens - self.bytes_per_token)
        if n_events >= _LEARN_FROM_TOKENS:
            self.tokens_per_event += _LEARNING * (max(1.0, usage.output_tokens / n_events) - self.tokens_per_event)

    def estimate_prompt(self, n_body_bytes: int) -> int:
        return min(PROMPT_TOKENS_MAX, math.ceil(n_body_bytes / self.bytes_per_token))


class Accounting:
    """Keys, quotas and the ledger of one gateway. UserError when the config's store cannot be opened."""

    def __init__(self, config: GatewayConfig, world: World = REAL) -> None:
        self.world = world
        self.now: Callable[[], float] = world.now
        self.unix: Callable[[], float] = world.unix
        self.running_totals = new_totals()
        wanted = (config.store, config.access_log, config.traces)
        self.ledger = Ledger(config, self.running_totals, world) if any(each is not None for each in wanted) else None
        self.keyring = Keyring(config.key_hashes, self.running_totals)
        self.n_unknown_keys = 0
        self.refusals: Counter[str] = Counter()  # by limit
        self._prices = config.prices
        self._accounts: dict[str, Account] = {}
        self._submitted_usd: dict[str, float] = {}
        self._store = self.ledger.store if self.ledger is not None else None
        self._keys_stale_s = config.keys_stale_s
        self._are_keys_late = False
        if self._store is not None:
            self._on_news(self._store.first_news)

    def start(self) -> None:
        if self.ledger is not None:
            self.ledger.start(self._on_news)

    async def stop(self) -> None:
        if self.ledger is not None:
            await self.ledger.stop()

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def find(self, head: RequestHead) -> KeyHolder | None:
        """The holder of the request's key, if the key is valid now, and was in the store not long ago."""
        holder = self.keyring.find(credential(head), self.unix())
        return None if holder is not None and holder.is_stored and self.are_keys_stale else holder

    @property
    def keys_age_s(self) -> float:
        """Seconds since the store's keys were read and were those in memory; 0 without a store."""
        return 0.0 if self._store is None else self.now() - self._store.confirmed_at

    @property
    def are_keys_stale(self) -> bool:
        return self.keys_age_s > self._keys_stale_s

    def watch_keys(self) -> None:
        """Logs when the store's keys are late, and when they are read again. Call it once a second, on the loop."""
        age_s, are_late = self.keys_age_s, self.keys_age_s > KEYS_LATE_S
        if are_late != self._are_keys_late:
            state = f"{age_s:.0f} s old; after {self._keys_stale_s:g} s they are refused" if are_late else "read again"
            log.warning("store: its keys are %s", state)
        self._are_keys_late = are_late

    def open(self, record: Record, holder: KeyHolder | None, body: bytes = b"") -> Entry | None:
        """An entry for a request that is about to be forwarded; None where nothing is counted."""
        if self.ledger is None and (holder is None or not holder.quota.is_limited):
            return None
        return Entry(self, record, holder, body)

    def refuse(self, record: Record, holder: KeyHolder) -> None:
        """Writes down a request for a model that its key may not use."""
        if (entry := self.open(record, holder)) is not None:
            record.status, record.ended_at = 403, self.now()
            entry.end(was_read=False)

    def over_limit(self, refusal: Refusal, holder: KeyHolder, now: float) -> Answer:
        self.refusals[refusal.kind] += 1
        code, words = _WORDS[refusal.kind]
        begun = gmtime(self.unix())
        next_month = (begun.tm_year + begun.tm_mon // 12, begun.tm_mon % 12 + 1, 1, 0, 0, 0)
        wait_s = refusal.retry_after_s or calendar.timegm(next_month) - self.unix()
        headers = ((b"retry-after", b"%d" % max(1, math.ceil(wait_s))), *holder.quota.headers(now))
        message = f"key {holder.name!r} has used its {words.format(limit=refusal.limit)}"
        return error_answer(429, message, code, headers=headers)

    def account(self, model: str) -> Account:
        if model not in self._accounts:
            self._accounts[model] = Account(self._prices.get(model))
        return self._accounts[model]

    def count_key(self, account: Account, name: str) -> UseCount:
        """The counts of a key that asks for this model for the first time; beyond MAX_SERIES all are "other"."""
        n_series = sum(len(each.by_key) for each in self._accounts.values())
        return account.by_key.setdefault(name if n_series < MAX_SERIES else "other", UseCount())

    def charge(self, key_id: str, cost_usd: float, quota: Quota | None) -> None:
        self._submitted_usd[key_id] = self._submitted_usd.get(key_id, 0.0) + cost_usd
        if quota is not None:
            quota.spent_usd += cost_usd

    def families(self) -> list[Family]:
        ledger = self.ledger
        unknown: dict[Labels, float] = {(): self.n_unknown_keys}
        by_limit: dict[Labels, float] = {(("limit", kind),): n for kind, n in self.refusals.items()}
        families: list[Family] = [("unknown_keys_total", unknown), ("quota_refusals_total", by_limit)]
        if ledger is None:
            return families
        if self._store is not None:
            families.append(("store_keys_age_seconds", {(): self.keys_age_s}))
        tokens, rows, key_requests, key_tokens = (dict[Labels, float]() for _ in range(4))
        for model, account in self._accounts.items():
            tokens |= account.count.by_kind((("model", model),))
            rows |= {(("model", model), ("state", state)): n for state, n in account.n_rows.items()}
            for name, count in account.by_key.items():
                labels = (("key", name), ("model", model))
                key_requests[labels] = count.n_requests
                key_tokens |= count.by_kind(labels)
        return [
            *families,
            ("tokens_total", tokens),
            ("ledger_requests_total", rows),
            ("key_requests_total", key_requests),
            ("key_tokens_total", key_tokens),
            *ledger.families(),
        ]

    def _on_news(self, news: News) -> None:
        if news.keys is not None:
            self.keyring.replace(news.keys, self.now())
        if self._store is not None:
            self._store.known = news.revision
        for key_id, quota in self.keyring.quotas().items():
            waiting_usd = self._submitted_usd.get(key_id, 0.0) - news.submitted_usd.get(key_id, 0.0)
            quota.spent_usd = news.spent_usd.get(key_id, 0.0) + waiting_usd


class Entry:
    """One request in the ledger.

    `body`: what the engine gets, until its answer begins. `strips_usage`: the client did not ask for the usage event.
    """

    # Defaults stay with the class: most requests set few of them.
    strips_usage = False
    is_held = False  # `take_held` decides
    _is_open = False  # its share of the limits is taken
    _n_reserved = 0
    _n_token_chunks = 0

    def __init__(self, accounting: Accounting, record: Record, holder: KeyHolder | None, body: bytes) -> None:
        self._accounting = accounting
        self._record = record
        self._facts = facts = record.facts
        self._holder = holder
        self.body = body
        self._watch: Watch | None = None
        if holder is not None:
            record.key_id, record.key = holder.id, holder.name
        if facts.streams and not facts.wants_usage:
            self.strips_usage = _GENERATING.get(facts.path, _NOTHING)[0]
            if self.strips_usage and body:
                self.body = ask_for_usage(body, has_options=facts.has_options)

    def start(self) -> Answer | None:
        """Takes the request's share of its key's limits, until `end`; returns the refusal when a limit is reached.

        Where that is uncertain the request `is_held`, and neither refused nor admitted.
        """
        holder = self._holder
        if holder is None or not holder.quota.is_limited:
            return None
        now = self._accounting.now()
        self._n_reserved = self._estimate_tokens()
        if (refusal := holder.quota.take(now, self._n_reserved)) is None:
            self._is_open = True
            return None
        if refusal.is_unsure:
            self.is_held = True
            return None
        return self._accounting.over_limit(refusal, holder, now)

    async def take_held(self) -> Answer | None:
        """Does what `start` left open, within HELD_S."""
        holder, ledger, now = self._holder, self._accounting.ledger, self._accounting.now
        began_at = now()
        assert holder is not None
        refusal: Refusal | None = None
        holder.quota.n_held += 1
        try:
            while not self._is_open and now() - began_at < HELD_S:
                if ledger is not None:
                    ledger.catch_up()
                await self._accounting.world.pause(RETAKE_S)
                refusal = holder.quota.take(now(), self._n_reserved)
                self._is_open = refusal is None
        finally:
            holder.quota.n_held -= 1
            self.is_held = False
        return None if refusal is None else self._accounting.over_limit(refusal, holder, now())

    def headers(self) -> Headers:
        holder = self._holder
        return holder.quota.headers(self._accounting.now()) if holder is not None and holder.quota.is_limited else ()

    def begin(self, head: ResponseHead) -> None:
        """The response that the client gets begins; not called for an answer that leads to a retry."""
        self.body = b""  # up to 32 MiB, and it will not be sent again
        if head.status >= 300 or find_header(head.headers, b"content-encoding") not in (None, b"identity"):
            return
        if not self._record.streams:
            self._watch = BodyWatch()
        elif self.strips_usage and head.length is None:
            self._watch = StreamStrip()
        else:
            self._watch = StreamWatch(_GENERATING.get(self._facts.path, _NOTHING)[1])

    def feed(self, data: bytes, is_end: bool) -> bytes:
        """Takes the next piece of the response's body; returns what the client gets now."""
        return data if (watch := self._watch) is None else watch.feed(data, is_end)

    def add_token_chunks(self, n_chunks: int) -> None:
        """Counts events of one token each, which passed without `feed`."""
        self._n_token_chunks += n_chunks

    def _n_events(self, watch: Watch) -> int:
        # A path whose tokens have a mark of their own counts nothing else.
        has_mark = _GENERATING.get(self._facts.path, _NOTHING)[1] is not None
        return watch.n_events + (0 if has_mark else self._n_token_chunks)

    def end(self, *, was_read: bool) -> None:
        """Complete the record by what was used, and give it to the ledger.

        `was_read`: an engine got the request, and did not answer that it failed or that the request is wrong.
        """
        accounting, record, watch, holder = self._accounting, self._record, self._watch, self._holder
        facts, outcome, account = record.facts, record.outcome, accounting.account(record.model)
        record.state = self._state()
        usage = watch.usage() if watch is not None else None
        if usage is not None and max(usage.prompt_tokens, usage.output_tokens) >= MAX_TOKENS:
            usage = None  # it would take the key's budget and its tokens for years
        if usage is not None and watch is not None:
            account.learn(usage, facts.n_body_bytes, self._n_events(watch))
        elif was_read and (facts.path in _GENERATING or outcome != "complete"):
            usage, record.is_estimate = self._estimate(watch, account), True
        n_used = 0
        if usage is not None:
            record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            record.output_tokens = usage.output_tokens
            n_used = usage.prompt_tokens + usage.output_tokens
        quota = holder.quota if holder is not None else None
        if self._is_open and quota is not None:
            self._is_open = False
            if quota.give_back(self._n_reserved, n_used) and accounting.ledger is not None:
                accounting.ledger.catch_up()
        account.n_rows[record.state] += 1
        account.count.add(record)
        if holder is not None:
            (account.by_key.get(holder.name) or accounting.count_key(account, holder.name)).add(record)
        if accounting.ledger is None:
            return
        if account.price is not None:
            record.cost_usd = account.price.cost_usd(record.prompt_tokens, record.cached_tokens, record.output_tokens)
        accounting.ledger.add(record)
        if record.cost_usd:
            accounting.charge(record.key_id, record.cost_usd, quota)

    def _state(self) -> State:
        record = self._record
        if record.outcome == "complete":
            if record.status >= 500 or (self._watch is not None and self._watch.has_error):
                return "engine-failed"
            if record.status >= 400:
                return "refused"
        return OUTCOMES[record.outcome][0]

    def _estimate(self, watch: Watch | None, account: Account) -> Usage:
        n_without_token = self._facts.n_choices if self._facts.path == _CHAT else 0
        n_events = self._n_events(watch) if watch is not None else 0
        n_token_events = max(0, n_events - n_without_token - (self._record.outcome == "complete" and n_events > 0))
        n_prompt = 0 if self._facts.path in _NO_PROMPT else account.estimate_prompt(self._facts.n_body_bytes)
        return Usage(n_prompt, 0, min(MAX_TOKENS, math.ceil(n_token_events * account.tokens_per_event)))

    def _estimate_tokens(self) -> int:
        facts = self._facts
        n_tokens = self._accounting.account(self._record.model).estimate_prompt(facts.n_body_bytes)
        if facts.path in _GENERATING:
            n_tokens += (facts.output_tokens_max or OUTPUT_TOKENS) * facts.n_choices
        return min(n_tokens, MAX_TOKENS)
