"""Who asks, whether they may, and what it came to: keys and quotas before a request, one ledger row after it.

`forward` feeds an Entry: `start`, `begin` with the response's head, `feed` with every piece, `end`. All of it is memory
only; the ledger's thread does the rest.
"""

from __future__ import annotations

import calendar
import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.gateway.access import Holder, Keyring
from penstock.gateway.answer import Answer, error_answer
from penstock.gateway.config import GatewayConfig
from penstock.gateway.exposition import Family, Labels
from penstock.gateway.http1 import Headers, RequestHead, ResponseHead
from penstock.gateway.ledger import Ledger, News
from penstock.gateway.quota import Counts, LocalCounts, Quota, Refusal
from penstock.gateway.usage import Ask, BodyWatch, StreamStrip, StreamWatch, Usage, ask_for_usage
from penstock.store import Row, State

Watch = BodyWatch | StreamWatch | StreamStrip

# What a path generates: whether a stream of it must be asked for its usage, and what ends each of its tokens' events.
_GENERATING: dict[bytes, tuple[bool, bytes | None]] = {
    b"/v1/chat/completions": (True, None),
    b"/v1/completions": (True, None),
    b"/v1/responses": (False, b".delta\n"),
}
_CHAT = b"/v1/chat/completions"  # its streams begin with an event that carries the role and no token
OUTPUT_TOKENS = 256  # reserved where the client sets no limit
BYTES_PER_TOKEN = 4.0  # of a request's body, until a model's own replies tell better
PROMPT_TOKENS_MAX = 131_072
_LEARNING = 0.05
_LEARN_FROM = 32  # tokens
_CLIENT_CLOSED = 499  # nginx's status for a client that left before its answer
_OUTCOME_STATES: dict[str, State] = {
    "complete": "complete",
    "client_gone": "client-cancelled",
    "broken": "engine-failed",
    "late": "engine-failed",
    "no_replica": "refused",
    "queue_full": "refused",
    "refused": "refused",
}
_OUTCOME_STATUSES = {
    "client_gone": _CLIENT_CLOSED,
    "broken": 502,
    "late": 504,
    "no_replica": 503,
    "queue_full": 429,
    "refused": 429,
}
_WORDS = {
    "requests": ("rate_limit_exceeded", "{limit:g} requests a minute"),
    "tokens": ("rate_limit_exceeded", "{limit:g} tokens a minute"),
    "concurrency": ("concurrency_exceeded", "{limit:g} requests at once"),
    "budget": ("insufficient_quota", "${limit:g} this month"),
}


class Habits(msgspec.Struct):
    """What a model's complete requests taught: for estimates where a request ends without the engine's count."""

    bytes_per_token: float = BYTES_PER_TOKEN
    tokens_per_event: float = 1.0


class Totals(msgspec.Struct):
    """Counts since the gateway started, for its metrics."""

    n_unknown_keys: int = 0
    rows: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)  # by model and state
    tokens: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)  # by model and kind
    refusals: Counter[str] = msgspec.field(default_factory=Counter)  # by limit


class Books:
    """Keys, quotas and the ledger of one gateway. UserError when the config's store cannot be opened."""

    def __init__(self, config: GatewayConfig, counts: Counts | None = None) -> None:
        self.needs_key = config.auth == "keys"
        self.ledger = Ledger(config.store) if config.store else None
        self.keyring = Keyring(config.key_hashes, counts or LocalCounts())
        self.totals = Totals()
        self._prices = config.prices
        self._habits: dict[str, Habits] = {}
        self._submitted_usd: dict[str, float] = {}
        if self.ledger is not None:
            self._on_news(self.ledger.first_news)

    def start(self) -> None:
        if self.ledger is not None:
            self.ledger.start(self._on_news)

    async def stop(self) -> None:
        if self.ledger is not None:
            await self.ledger.stop()

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def find(self, head: RequestHead) -> Holder | None:
        """Whose key a request carries, if it is good now."""
        return self.keyring.find(head.get(b"authorization"), time.time())

    def open(self, asked: Asked, holder: Holder | None, body: bytes = b"") -> Entry | None:
        """An entry for a request that is about to be forwarded; None where nobody counts."""
        if self.ledger is None and (holder is None or not holder.quota.is_limited):
            return None
        return Entry(self, asked, holder, body)

    def refuse(self, asked: Asked, holder: Holder, status: int) -> None:
        """Takes down a request that is refused before it is forwarded."""
        entry = self.open(asked, holder)
        if entry is not None:
            entry.refuse(status)

    def habits(self, model: str) -> Habits:
        found = self._habits.get(model)
        if found is None:
            found = self._habits[model] = Habits()
        return found

    def cost_usd(self, model: str, usage: Usage) -> float | None:
        """What a request costs, if its model has a price."""
        price = self._prices.get(model)
        return None if price is None else price.cost_usd(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)

    def write(self, row: Row, quota: Quota | None) -> None:
        """Takes a row, and what it says into the totals and its key's budget."""
        totals = self.totals
        totals.rows[row.model, row.state] += 1
        if row.prompt_tokens:
            totals.tokens[row.model, "prompt"] += row.prompt_tokens
            totals.tokens[row.model, "cached"] += row.cached_tokens
        if row.output_tokens:
            totals.tokens[row.model, "output"] += row.output_tokens
        if self.ledger is None:
            return
        self.ledger.add(row)
        if row.cost_usd:
            self._submitted_usd[row.key_id] = self._submitted_usd.get(row.key_id, 0.0) + row.cost_usd
            if quota is not None:
                quota.spent_usd += row.cost_usd

    def families(self) -> list[Family]:
        """For the metrics."""
        totals, ledger = self.totals, self.ledger
        unknown: dict[Labels, float] = {(): totals.n_unknown_keys}
        by_limit: dict[Labels, float] = {(("limit", kind),): n for kind, n in totals.refusals.items()}
        found: list[Family] = [
            ("unknown_keys_total", "counter", "Requests without a good key.", unknown),
            ("quota_refusals_total", "counter", "Requests over a limit of their key.", by_limit),
        ]
        if ledger is None:
            return found
        tokens: dict[Labels, float] = {(("model", m), ("kind", kind)): n for (m, kind), n in totals.tokens.items()}
        rows: dict[Labels, float] = {(("model", m), ("state", state)): n for (m, state), n in totals.rows.items()}
        return [
            *found,
            ("tokens_total", "counter", "Tokens in the ledger; cached ones are prompt tokens too.", tokens),
            ("ledger_requests_total", "counter", "Requests in the ledger, by state.", rows),
            ("ledger_rows_waiting", "gauge", "Rows that are not on the disk yet.", {(): ledger.n_waiting}),
            ("ledger_rows_lost_total", "counter", "Rows that found the queue full.", {(): ledger.n_lost}),
            ("store_failures_total", "counter", "Turns of the store that failed.", {(): ledger.n_failures}),
            ("store_up", "gauge", "Whether the store's last turn worked.", {(): int(not ledger.is_failing)}),
        ]

    def next_number(self) -> int:
        return self.ledger.next_number() if self.ledger is not None else 0

    def _on_news(self, news: News) -> None:
        if news.keys is not None:
            self.keyring.replace(news.keys, time.monotonic())
        for key_id, quota in self.keyring.quotas().items():
            waiting_usd = self._submitted_usd.get(key_id, 0.0) - news.submitted_usd.get(key_id, 0.0)
            quota.spent_usd = news.spent_usd.get(key_id, 0.0) + waiting_usd


class Asked(msgspec.Struct, frozen=True):
    """A request as its entry needs it. Not its body: that has up to 32 MiB, and an entry lives as its response."""

    path: bytes
    n_body_bytes: int
    ask: Ask
    model: str
    request_id: bytes
    received_at: float


class Entry:
    """One request in the books. `body`: what the engine is sent, until its answer begins. `strips_usage`: the client
    did not ask for the usage event that the answer will have.
    """

    __slots__ = (
        "_asked",
        "_at",
        "_books",
        "_first_at",
        "_holder",
        "_is_open",
        "_n_reserved",
        "_status",
        "_watch",
        "body",
        "feed",
        "strips_usage",
    )

    def __init__(self, books: Books, asked: Asked, holder: Holder | None, body: bytes) -> None:
        self._books = books
        self._asked = asked
        self._holder = holder
        self._at = time.time()
        self._n_reserved = 0
        self._is_open = False
        self._status = 0
        self._first_at: float | None = None
        self._watch: Watch | None = None
        # A piece of the response's body and whether it is the last; returns what of it the client gets now.
        self.feed: Callable[[bytes, bool], bytes] = self._feed_first
        must_ask, _ = _GENERATING.get(asked.path, (False, None))
        self.strips_usage = must_ask and asked.ask.stream is True and not asked.ask.wants_usage
        self.body = ask_for_usage(body, asked.ask) if self.strips_usage and body else body

    def start(self) -> Answer | None:
        """Takes the request's share of its key's limits; an answer when there is none. `end` gives it back."""
        holder = self._holder
        if holder is None or not holder.quota.is_limited:
            self._is_open = True
            return None
        now = time.monotonic()
        self._n_reserved = self._estimate_tokens()
        refusal = holder.quota.take(now, self._n_reserved)
        if refusal is None:
            self._is_open = True
            return None
        self._books.totals.refusals[refusal.kind] += 1
        self._status = 429
        return _refused(refusal, holder, now)

    def headers(self) -> Headers:
        """For the response's head."""
        holder = self._holder
        return holder.quota.headers(time.monotonic()) if holder is not None and holder.quota.is_limited else ()

    def begin(self, head: ResponseHead) -> None:
        """The response that the client gets begins; not called for those that are kept from it."""
        self.body = b""  # up to 32 MiB, and it will not be sent again
        self._status = head.status
        if head.status >= 300 or head.get(b"content-encoding") not in (None, b"identity"):
            return
        is_stream = (head.get(b"content-type") or b"").lower().startswith(b"text/event-stream")
        if not is_stream:
            self._watch = BodyWatch()
        elif self.strips_usage and head.length is None:
            self._watch = StreamStrip()
        else:
            _, mark = _GENERATING.get(self._asked.path, (False, None))
            self._watch = StreamWatch(mark)

    def _feed_first(self, data: bytes, is_end: bool) -> bytes:
        if self._watch is None:
            return data
        if data:
            self._first_at = time.monotonic()
            self.feed = self._watch.feed
        return self._watch.feed(data, is_end)

    def feed_chunks(self, data: bytes, is_end: bool) -> bool:
        """The same for a read of whole chunks: True when it was noted and may pass as it is, else `feed` gets it."""
        if self._watch is None:
            return True
        if is_end or not self._watch.note_chunks(data):
            return False
        if self._first_at is None:
            self._first_at = time.monotonic()
            self.feed = self._watch.feed
        return True

    def end(self, outcome: str, replica: str) -> None:
        """The request is over, however it ended: one row. `outcome` is forward's."""
        asked = self._asked
        self.feed = _pass_on  # a method of its own would keep the entry alive until the garbage collector came
        usage, is_estimate = self._count(outcome)
        if self._is_open:
            self._is_open = False
            if self._holder is not None:
                self._holder.quota.give_back(self._n_reserved, usage.prompt_tokens + usage.output_tokens)
        is_stream = isinstance(self._watch, StreamWatch | StreamStrip)
        ttft_ms = None
        if is_stream and self._first_at is not None:
            ttft_ms = (self._first_at - asked.received_at) * 1000
        self._books.write(
            Row(
                self._books.next_number(),
                self._at,
                self._holder.id if self._holder is not None else "",
                asked.model,
                replica,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.output_tokens,
                int(is_estimate),
                ttft_ms,
                (time.monotonic() - asked.received_at) * 1000,
                self._state(outcome),
                self._status or _OUTCOME_STATUSES.get(outcome, 0),
                self._books.cost_usd(asked.model, usage),
                asked.request_id.decode("latin-1"),
            ),
            self._holder.quota if self._holder is not None else None,
        )

    def refuse(self, status: int) -> None:
        """The gateway answers this status itself, and nothing is forwarded."""
        self._status = status
        self.end("refused", "")

    def _state(self, outcome: str) -> State:
        if outcome == "complete":
            if self._status >= 500 or (self._watch is not None and self._watch.has_error):
                return "engine-failed"
            if self._status >= 400:
                return "refused"
        return _OUTCOME_STATES[outcome]

    def _count(self, outcome: str) -> tuple[Usage, bool]:
        """The engine's own count, else ours: what passed, and whether it is an estimate."""
        watch, habits = self._watch, self._books.habits(self._asked.model)
        usage = watch.usage() if watch is not None else None
        if usage is not None:
            assert watch is not None
            self._learn(habits, usage, watch.n_events)
            return usage, False
        if watch is None or self._asked.path not in _GENERATING:
            return Usage(0, 0, 0), False
        n_without_token = self._asked.ask.n_choices if self._asked.path == _CHAT else 0
        n_events = max(0, watch.n_events - n_without_token - (outcome == "complete" and watch.n_events > 0))
        return Usage(self._estimate_prompt(habits), 0, math.ceil(n_events * habits.tokens_per_event)), True

    def _learn(self, habits: Habits, usage: Usage, n_events: int) -> None:
        if usage.prompt_tokens >= _LEARN_FROM:
            ratio = self._asked.n_body_bytes / usage.prompt_tokens
            habits.bytes_per_token += _LEARNING * (ratio - habits.bytes_per_token)
        if n_events >= _LEARN_FROM:
            ratio = max(1.0, usage.output_tokens / n_events)
            habits.tokens_per_event += _LEARNING * (ratio - habits.tokens_per_event)

    def _estimate_prompt(self, habits: Habits) -> int:
        return min(PROMPT_TOKENS_MAX, math.ceil(self._asked.n_body_bytes / habits.bytes_per_token))

    def _estimate_tokens(self) -> int:
        """Prompt and answer, for a reservation."""
        asked = self._asked
        n_tokens = self._estimate_prompt(self._books.habits(asked.model))
        if asked.path in _GENERATING:
            n_tokens += (asked.ask.output_tokens_max or OUTPUT_TOKENS) * asked.ask.n_choices
        return n_tokens


def _pass_on(data: bytes, _is_end: bool) -> bytes:
    return data


def _refused(refusal: Refusal, holder: Holder, now: float) -> Answer:
    code, words = _WORDS[refusal.kind]
    told = words.format(limit=refusal.limit)
    wait_s = refusal.retry_after_s or _until_next_month_s(time.time())
    headers = ((b"retry-after", b"%d" % max(1, math.ceil(wait_s))), *holder.quota.headers(now))
    return error_answer(429, f"key {holder.name!r} has used its {told}", code, headers=headers)


def _until_next_month_s(now: float) -> float:
    begun = time.gmtime(now)
    year, month = (begun.tm_year, begun.tm_mon + 1) if begun.tm_mon < 12 else (begun.tm_year + 1, 1)
    return calendar.timegm((year, month, 1, 0, 0, 0)) - now
