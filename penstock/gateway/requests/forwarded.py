"""A request that is forwarded: what all of its states share, and how it ends.

It is in one state at a time. Each state is a class with the data that it alone needs; `sending.py` has those before
the engine answers, `streaming.py` the one after. A state takes these events, and all others change nothing:

| state     | admitted        | replica | failed, lost   | head      | whole | deadline, client gone, shutdown |
|-----------|-----------------|---------|----------------|-----------|-------|---------------------------------|
| Admitting | Waiting Sending |         |                |           |       | Ended                           |
| Waiting   |                 | Sending |                |           |       | Ended                           |
| Sending   |                 |         | Waiting Ended  | Streaming |       | Ended                           |
| Streaming |                 |         | Ended          |           | Ended | Ended                           |
| Ended     |                 |         |                |           |       |                                 |
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from penstock.gateway import waiting_streams
from penstock.gateway.accounting.entry import Entry
from penstock.gateway.accounting.record import OUTCOMES, Record
from penstock.gateway.config import Address
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.context import GatewayContext
from penstock.gateway.metrics.counters import Outcome
from penstock.gateway.origins import origin_headers
from penstock.gateway.responses import Answer, error_answer, own_headers
from penstock.gateway.routing.replicas import NO_HINTS, Replica, RoutingHints
from penstock.gateway.streams import Ending
from penstock.wire.http1 import LAST_CHUNK, Headers, write_chunk

log = logging.getLogger(__name__)


class State:
    """What a request does now. `replica_name`: of the replica that it counts on, empty without one."""

    replica_name = ""
    held_at: float | None = None  # since when it is in the queue for a replica
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Do what must wait for something, as `task`."""

    def check(self, now: float) -> None:
        """Look once a second whether an engine is silent."""

    def leave(self) -> None:
        """Give back everything that the state holds."""
        task, self.task = self.task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def note_usage(self) -> None:
        """Measure what depends on the answer's tokens; after `leave`."""


class Ended(State):
    """Its client has all that it gets."""


BETWEEN: Final = State()
ENDED: Final = Ended()


class ForwardedRequest:
    """One request under way. It is its client's work."""

    # Defaults stay with the class: most requests set few of them.
    state: State = BETWEEN
    hints = NO_HINTS
    entry: Entry | None = None
    # Time that is not the gateway's own: waiting for a replica, and with one that lost the request.
    waited_s = 0.0
    hold_until = 0.0
    told_at = 0.0  # of the last comment about an engine's silence
    lost: tuple[str, ...] = ()  # replicas on which this request failed
    failed: tuple[Replica, Address] | None = None  # answered that it failed, and its address then
    has_head = False  # of the engine's answer
    # Of the response: a stream has an ending from its first byte on, which may be a comment.
    ending: Ending | None = None
    is_chunked = False
    is_framed = False  # its client sees when it is cut off
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, context: GatewayContext, record: Record, body: bytes, client: ClientConnection) -> None:
        self.context = context
        self.record = record
        self.head = record.head
        self.facts = record.facts
        self.model = record.model
        self.body = body
        self.client = client

    def start(self, hints: RoutingHints, entry: Entry | None) -> Answer | None:
        """Begin to count it, and ask for its share of its key's limits; returns the refusal of one."""
        context = self.context
        self.hints, self.entry = hints, entry
        self.client.work = self
        context.counters.n_requests += 1
        context.counters.n_body_bytes += self.facts.n_body_bytes
        context.under_way.add(self)
        if context.tracer is not None:
            self.record.trace = context.tracer.begin(self.head)
        if self.facts.timeout_s is not None:
            delay_s = self.facts.received_at + self.facts.timeout_s - context.now()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._be_late)
        if entry is None:
            return None
        refusal = entry.start()
        self.body = entry.body
        return refusal

    def enter(self, state: State) -> None:
        """Go on in this state, with its `run` as a task."""
        self.state = state
        state.task = asyncio.get_running_loop().create_task(self._run(state))

    def leave(self) -> None:
        """Give back what the present state holds; another one follows."""
        state, self.state = self.state, BETWEEN
        state.leave()

    async def _run(self, state: State) -> None:
        try:
            await state.run()
        except Exception:
            log.exception("request %s: a bug in the gateway", self.facts.request_id.decode())
            self.end_early("the gateway failed", 500, "internal_error")

    # Events.

    def cancel(self) -> None:
        """The client left, or the gateway must end."""
        if self.state is ENDED:
            return
        if self.client.is_gone:
            is_whole = self.ending is not None and self.ending.has_done()
            self.settle("complete" if is_whole else "client_gone")
        elif self.state.held_at is not None:
            self.refuse_for_now()
        else:
            self.end_early("the gateway is shutting down")

    def check(self, now: float) -> None:
        self.state.check(now)

    def _be_late(self) -> None:
        message = f"the request was not done within its x-request-timeout of {self.facts.timeout_s:g} s"
        self.end_early(message, 504, "deadline_exceeded", outcome="late")

    # The response.

    def write_own_headers(self, replica: str = "none") -> bytes:
        more: Headers = self.entry.headers() if self.entry is not None else ()
        origin = self.head.get(b"origin")
        if origin is not None:
            more += origin_headers(origin, self.context.needs_key, self.context.allowed_origins)
        return b"x-request-id: %s\r\nx-penstock-replica: %s\r\nserver-timing: gateway;dur=%.3f\r\n%s%s\r\n" % (
            *(self.facts.request_id, replica.encode(), self.record.own_s * 1000),
            *(
                b"".join([b"%s: %s\r\n" % header for header in more]),
                b"" if self.client.keeps_alive else b"connection: close\r\n",
            ),
        )

    def write(self, data: bytes, is_end: bool = False) -> None:
        """Body bytes for the client, in the coding of its response."""
        if self.is_chunked:
            data = (write_chunk(data) if data else b"") + (LAST_CHUNK if is_end else b"")
        if data:
            self.client.write(data)

    def send_comment(self, comment: bytes) -> None:
        """Tell the client of a waiting stream how things stand; the first comment begins a stream that has not."""
        if self.ending is None:
            self.ending = Ending()
            self.is_chunked = not self.head.is_http_10
            head = waiting_streams.write_head(self.context.unix(), self.is_chunked)
            self.client.write(head + self.write_own_headers())
        self.write(comment)

    # The end.

    def settle(self, outcome: Outcome) -> None:
        """Count the outcome and give everything back. The client is not touched."""
        state, record, context, entry = self.state, self.record, self.context, self.entry
        record.outcome, record.replica = outcome, state.replica_name
        self.leave()
        self.state = ENDED
        record.ended_at = record.last_at if outcome == "complete" else context.now()
        was_read = record.sent_at > 0 and record.status < 300
        record.status = record.status or OUTCOMES[outcome][1]
        if entry is not None:
            self.entry = None
            entry.end(was_read=was_read)
            if record.prompt_tokens:
                context.counters.n_known_bytes += self.facts.n_body_bytes
                context.counters.n_known_tokens += record.prompt_tokens - record.cached_tokens
        state.note_usage()
        context.slow.add(record)
        context.under_way.discard(self)
        context.counters.outcomes[self.model, outcome] += 1
        if self._timer is not None:
            self._timer.cancel()

    def refuse(self, answer: Answer) -> None:
        self.context.counters.series(self.model, "none").codes[answer.status] += 1
        self.settle("refused")
        self.client.respond(answer)

    def refuse_for_now(self) -> None:
        wait_s = self.context.replicas.retry_after_s(self.model, self.context.now())
        why = "" if (failure := self.context.replicas.failure) is None else f": {failure}"
        message = f"model {self.model!r} has no replica that takes requests now{why}"
        self.end_early(message, 503, "no_replica", outcome="no_replica", param="model", retry_after_s=wait_s)

    def end_early(
        self,
        message: str,
        status: int = 502,
        code: str = "upstream_failed",
        *,
        outcome: Outcome = "broken",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """End an incomplete response, as truthfully as its form allows: error answer, error event or cut connection."""
        if self.state is ENDED:
            return
        client, name = self.client, self.state.replica_name or "none"
        self.settle(outcome)
        if self.ending is not None:
            self.write(self.ending.write_end(status, message, code), is_end=True)
            client.finish()
        elif self.has_head:
            client.fail(is_framed=self.is_framed)
        else:
            self.context.counters.series(self.model, name).codes[status] += 1
            own_s = self.record.own_s or max(0.0, self.record.duration_s - self.waited_s)
            headers = own_headers(own_s, name.encode())
            if retry_after_s is not None:
                headers += ((b"retry-after", b"%d" % retry_after_s),)
            client.respond(error_answer(status, message, code, param, headers))
