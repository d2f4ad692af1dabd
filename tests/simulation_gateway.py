"""The gateway in a simulation: real requests, queue, retries, replica table and admin calls on a virtual event loop.

Connections are objects; bytes on them arrive later, in their order. Engines are scripted and speak HTTP.
"""

from __future__ import annotations

import asyncio
import re
import socket
from asyncio import events
from collections.abc import Callable
from typing import Any, cast

import msgspec
from simulation_world import SimProcess

from penstock.errors import PenstockError
from penstock.gateway.accounting.record import Record
from penstock.gateway.admin import AdminApi
from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.gateway.connections import engine
from penstock.gateway.connections.engine import Pool, UpstreamConnection
from penstock.gateway.context import GatewayContext
from penstock.gateway.live.news import dated
from penstock.gateway.metrics.counters import Counters
from penstock.gateway.request import RequestFacts
from penstock.gateway.requests.forwarded import ForwardedRequest
from penstock.gateway.requests.sending import forward
from penstock.gateway.responses import Answer
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.gateway.routing.static_upstreams import LapsedProbes
from penstock.spec.gateway import QueueBounds
from penstock.wire.http1 import parse_request

MODEL = "penstock-demo"
HOLD_S, DRAIN_S, QUEUE = 40.0, 10.0, 12
_LEASE_CHECK_S = 1.0
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\ncontent-length: 2"
_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN = re.compile(rb'"t": (\d+)')


class Loop(asyncio.BaseEventLoop):
    """An event loop of one simulated process: `turn` runs what is due by the machine's clock."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._selector = self

    def time(self) -> float:
        return self._gateway.machine.time_s

    def select(self, timeout: float | None) -> list[Any]:
        return []

    def _process_events(self, _: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def turn(self) -> float | None:
        """Run all callbacks that are due; when the next timer is, or None."""
        events._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
            while self._ready:  # type: ignore[attr-defined]
                self._run_once()  # type: ignore[attr-defined]
        finally:
            events._set_running_loop(None)
        timers = self._scheduled  # type: ignore[attr-defined]
        return cast(float, timers[0]._when) if timers else None

    async def create_connection(self, factory: Any, *address: Any, **_: Any) -> Any:  # type: ignore[override]
        return await self._gateway.connect(factory, address[1])

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._gateway.machine.error = context.get("exception") or RuntimeError(context["message"])


class _Socket:
    family = socket.AF_UNIX


class Connection(asyncio.Transport):
    """A connection from a gateway to an engine: the gateway's end."""

    def __init__(self, gateway: Gateway, of: Engine, protocol: UpstreamConnection) -> None:
        super().__init__()
        self.gateway, self.engine, self.protocol = gateway, of, protocol
        self.is_open = True
        self._last_s = 0.0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Socket()

    def is_closing(self) -> bool:
        return not self.is_open

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.gateway.machine.after(0.001, lambda: self.engine.ask(self))

    def abort(self) -> None:
        if self.is_open:
            self.close()
            self.gateway.run(lambda: self.protocol.connection_lost(None))

    def close(self) -> None:
        self.is_open = False
        self.gateway.machine.after(0.001, lambda: self.engine.leave(self))

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def arrive(self, data: bytes | None, seconds: float) -> None:
        """Bytes from the engine after some time, behind those on their way; None: the end."""
        machine = self.gateway.machine
        self._last_s = max(self._last_s + 1e-6, machine.time_s + seconds + machine.jitter())
        machine.at(self._last_s, lambda: self._take(data))

    def time_out(self) -> None:
        """The kernel gives up on a machine that acknowledges nothing."""

        def lose() -> None:
            if self.is_open and self.gateway.process.is_alive:
                self.is_open = False
                self.gateway.run(lambda: self.protocol.connection_lost(TimeoutError()))

        self.gateway.machine.after(engine.USER_TIMEOUT_MS / 1000, lose)

    def _take(self, data: bytes | None) -> None:
        if not self.is_open or not self.gateway.process.is_alive:
            return
        if data is None:
            self.is_open = False
            self.gateway.run(lambda: self.protocol.connection_lost(None))
        else:
            self.gateway.run(lambda: self.protocol.data_received(data) if self.is_open else None)


class Engine:
    """A scripted engine: it loads, answers N tokens, and may crash, hang, or fail."""

    def __init__(self, process: SimProcess, name: str, port: int, ready_at: float) -> None:
        self.process, self.name, self.port, self.ready_at = process, name, port, ready_at
        self.is_hung = self.is_deaf = False  # it answers nothing; only no /health and no /metrics
        self.is_off = False  # its machine has no power: nothing ends its connections
        self.has_all_parts: Callable[[], bool] = lambda: True
        self.running: dict[Connection, int] = {}
        self.n_steps = 0
        process.on_end.append(self._cut)

    @property
    def is_up(self) -> bool:
        return self.process.is_alive and self.process.machine.time_s >= self.ready_at and self.has_all_parts()

    def ask(self, connection: Connection) -> None:
        if not self.process.is_alive:
            if not self.is_off:
                connection.arrive(None, 0.0)
            else:
                connection.time_out()
            return
        machine = self.process.machine
        self.running[connection] = number = self.running.get(connection, 0) + 1
        n_tokens = 1 + machine.random.randrange(8)
        connection.arrive(_SSE, 0.02)
        machine.after(0.05, lambda: self._say(connection, number, 0, n_tokens))

    def _say(self, connection: Connection, number: int, token: int, n_tokens: int) -> None:
        if not self.process.is_alive or self.running.get(connection) != number:
            return
        machine = self.process.machine
        if self.is_hung:
            machine.after(1.0, lambda: self._say(connection, number, token, n_tokens))
            return
        self.n_steps += 1
        if token > n_tokens:
            connection.arrive(b"0\r\n\r\n", 0.0)
            del self.running[connection]
            return
        text = b'data: {"t": %d}\n\n' % token if token < n_tokens else b"data: [DONE]\n\n"
        connection.arrive(b"%x\r\n%s\r\n" % (len(text), text), 0.0)
        machine.after(0.3 * machine.random.random(), lambda: self._say(connection, number, token + 1, n_tokens))

    def leave(self, connection: Connection) -> None:
        self.running.pop(connection, None)

    def _cut(self) -> None:
        for connection in self.running:
            if not self.is_off:
                connection.arrive(None, 0.001)
            else:
                connection.time_out()
        self.running.clear()


class Client:
    """A client of the gateway with one streamed request. `ends`: how it ended; exactly one of them is right."""

    address = "client"
    keeps_alive = True

    def __init__(self, gateway: Gateway, number: int) -> None:
        self.gateway, self.number = gateway, number
        self.began_at = gateway.machine.time_s
        self.work: Any = None
        self.is_gone = False
        self.data = bytearray()
        self.ends: list[str] = []

    def read_from(self, source: object) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.data += data

    @property
    def write_begun(self) -> Callable[[bytes], object]:
        return self.write

    def respond(self, answer: Answer) -> None:
        self._end(f"status {answer.status}")

    def finish(self) -> None:
        self._end("error event" if b'"error"' in self.data else "complete")

    def fail(self, *, is_framed: bool) -> None:
        self._end("cut")

    def leave(self) -> None:
        """It closes its connection."""
        if not self.ends and self.gateway.process.is_alive:
            self.is_gone = True
            self.gateway.run(lambda: self.work.cancel() if self.work is not None else None)
            self._end("left")

    def _end(self, how: str) -> None:
        self.work = None
        self.ends.append(how)
        self.gateway.machine.note(f"request {self.number}: {how}")

    @property
    def is_whole(self) -> bool:
        """Return whether the engine's last event came."""
        before, last, _ = bytes(self.data).partition(b"data: [DONE]")
        return bool(last) and b'"error"' not in before

    def tokens(self) -> list[int]:
        return [int(number) for number in _TOKEN.findall(bytes(self.data))]


class _Reporter:
    """What the admin API needs of a reporter in a gateway without workers."""

    class news:
        @staticmethod
        def take(_: object) -> None:
            pass

    def relay(self, path: bytes, body: bytes) -> None:
        pass


class Gateway:
    """One gateway process. `call` is its admin address, `request` its public one."""

    def __init__(self, process: SimProcess, engines: dict[int, Engine]) -> None:
        self.process, self.machine, self.engines = process, process.machine, engines
        config = GatewayConfig(
            listen="127.0.0.1:1", admin="127.0.0.1:2", admin_token_file="", models=(ServedModel(MODEL),), auth="none",
            hold_s=HOLD_S, drain_s=DRAIN_S, queue=QueueBounds(n_requests=QUEUE, key_share=1.0),
        )  # fmt: skip
        world = process.world
        self.loop = Loop(self)
        self.context = GatewayContext(
            config, ReplicaTable(config.models, config.policy), WaitingQueue(config.queue), Pool(world=world),
            Counters((MODEL,)), world,
        )  # fmt: skip
        self._api = AdminApi(self.context, cast(Any, None), cast(Any, _Reporter()), cast(Any, None), "token")
        self._probes = LapsedProbes(self.context)
        self._timer: float | None = None
        self.is_serving = False
        self.clients: list[Client] = []
        process.on_term = self._drain
        process.on_end.append(self._cut)

    def main(self) -> None:
        """Begin to serve."""
        self.is_serving = True
        self._look_after()

    def run(self, call: Callable[[], object]) -> None:
        """Call in this process, and let what follows happen."""
        if not self.process.is_alive:
            return
        self.loop.call_soon(call)
        self._turn()

    def _turn(self) -> None:
        if not self.process.is_alive or events._get_running_loop() is not None:
            return  # the turn that runs will do it
        timer = self.loop.turn()
        if timer is not None and timer != self._timer:
            self._timer = timer
            self.machine.at(timer, self._turn)

    def _look_after(self) -> None:
        """As `Gateway._check_leases` once a second."""

        def look() -> None:
            now = self.machine.time_s
            self.context.replicas.take_lapsed(now)
            self._probes.start_due(now)
            self.context.look_after(now)

        self.run(look)
        if self.process.is_alive:
            self.machine.after(_LEASE_CHECK_S, self._look_after)

    async def connect(self, factory: Callable[[], UpstreamConnection], port: int) -> Any:
        await asyncio.sleep(0.001)
        row = self.engines.get(port)
        if row is not None and row.is_off:
            await asyncio.get_running_loop().create_future()
        if row is None or not row.is_up:
            raise ConnectionRefusedError(111, "refused")
        protocol = factory()
        connection = Connection(self, row, protocol)
        protocol.connection_made(connection)
        return connection, protocol

    # ---- what comes from outside -------------------------------------------------------------------------------------

    def request(self, client: Client) -> None:
        """A client's request has come whole."""
        self.clients.append(client)
        facts = RequestFacts(b"/v1/chat/completions", b"%d" % client.number, self.machine.time_s, 2)
        facts.model, facts.streams = MODEL, True
        record = Record(parse_request(_HEAD), facts, MODEL, "", self.machine.time_s)
        forwarded = ForwardedRequest(self.context, record, b"{}", cast(Any, client))
        self.run(lambda: forward(forwarded))

    def call(self, path: str, body: object) -> Any:
        """An admin call: what its answer says."""
        if path == "/admin/replicas":
            view = self.context.replicas.view(
                self.machine.time_s, self.context.queue.waiting, self.context.counters.n_requests
            )
            return msgspec.to_builtins(view)
        answers: list[Any] = []
        data = msgspec.json.encode(body)
        if path == "/admin/news":
            data = dated(data, self.machine.time_s)
        self.run(lambda: answers.append(self._api.apply(path.encode(), data)))
        if not answers:
            raise PenstockError("the gateway ended", is_retryable=True)
        return msgspec.to_builtins(answers[0])

    def _drain(self) -> None:
        self.is_serving = False
        self._end_when_idle(self.machine.time_s + DRAIN_S)

    def _end_when_idle(self, ends_at: float) -> None:
        if not self.process.is_alive:
            return
        if self.context.under_way and self.machine.time_s < ends_at:
            self.machine.after(0.1, lambda: self._end_when_idle(ends_at))
            return
        for request in tuple(self.context.under_way):
            self.run(request.cancel)  # type: ignore[attr-defined]
        self.process.end(0)

    def _cut(self) -> None:
        for client in self.clients:
            if not client.ends:
                client.ends.append("gateway died")
        for connection in [c for row in self.engines.values() for c in row.running if c.gateway is self]:
            connection.is_open = False
            connection.engine.running.pop(connection, None)

    def leaks(self) -> dict[str, int]:
        """What it still counts; nothing when no request is under way."""
        context = self.context
        counts = {
            "waiting": context.queue.waiting,
            "bytes": context.queue._n_bytes,
            "in flight": context.replicas.in_flight_total,
            "under way": len(context.under_way),
        }
        return {name: number for name, number in counts.items() if number}

    def discard(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.loop.close()
