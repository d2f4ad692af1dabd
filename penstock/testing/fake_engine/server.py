"""The fake engine's connections and generations: the only file with sockets and a clock."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from penstock.testing.fake_engine import replies, requests, sleeping
from penstock.testing.fake_engine.metrics import Metrics
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import Ask, Refusal, Request
from penstock.testing.fake_engine.startup_log import Line, died
from penstock.text import KIB, MIB
from penstock.wire import http1
from penstock.wire.http1 import END, ProtocolError, RequestHead

HEAD_BYTES_MAX, BODY_BYTES_MAX = 64 * KIB, 64 * MIB
JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
_METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_METHODS = {
    "/health": ("GET",),
    "/ping": ("GET", "POST"),
    "/version": ("GET",),
    "/load": ("GET",),
    "/metrics": ("GET",),
    "/v1/models": ("GET",),
    "/tokenize": ("POST",),
    "/v1/chat/completions": ("POST",),
    "/v1/completions": ("POST",),
    **sleeping.METHODS,
}
_PREFIXES_MAX = 10_000  # of chats that count as cached
_BATCH_TOKENS = 64  # with --tokens-per-s inf: tokens in one write, so that streams take turns


def is_armed(options: Options) -> bool:
    return options.fault_once is None or not Path(options.fault_once).exists()


def disarm(options: Options) -> None:
    if options.fault_once is not None:
        Path(options.fault_once).touch()


class Generation:
    def __init__(self, ask: Ask, connection: Connection, reply_id: str, model: str) -> None:
        self.ask = ask
        self.connection = connection
        self.created = int(time.time())
        self.reply_id = reply_id
        self.model = model
        self.events = replies.Events(ask, reply_id, model, self.created)
        self.n_sent = 0


class Engine:
    """What one engine knows. `die` ends the process at once; `keeps` is how many requests `seen` remembers."""

    def __init__(self, options: Options, log: Callable[[Line], None], die: Callable[[], None], keeps: int = 0) -> None:
        self.options = options
        self.log = log
        self.metrics = Metrics(options)
        self.sleep = sleeping.Sleep(options, log, lambda: self.metrics.n_running)
        self.seen: deque[Request] = deque(maxlen=keeps)
        self.connections: set[Connection] = set()
        self.is_dead = False
        self.is_draining = False
        self._die = die
        self._created = int(time.time())
        self._failure: str | None = None
        self._is_hung = False
        self._n_generations = 0
        self.key = os.environ.get("PENSTOCK_ENGINE_KEY")  # engines.KEY_VARIABLE: not imported, we stand alone
        self._slots = asyncio.Semaphore(options.max_num_seqs)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cached: dict[bytes, None] = {}

    def answer(self, request: Request) -> tuple[int, bytes, str | None]:
        match request.path:
            case "/health" | "/ping":
                return 503 if self.is_dead else 200, b"", None
            case "/metrics":
                return 200, self.metrics.page().encode(), _METRICS_TYPE
            case "/version":
                payload: dict[str, object] = {"version": replies.VERSION}
            case "/load":
                payload = {"server_load": self.metrics.n_running + self.metrics.n_waiting}
            case "/v1/models":
                payload = replies.models(self.options, self._created)
            case _:
                tokens = requests.read_tokenize(request.body, request.headers, self.options)
                limit = self.options.max_model_len
                payload = {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}
        return 200, replies.dump(payload).encode(), JSON

    def generate(self, request: Request, connection: Connection) -> asyncio.Task[None]:
        """Starts an answer. Raises Refusal; may end the process (--crash-after-requests)."""
        is_chat = request.path == "/v1/chat/completions"
        ask = requests.read_generation(request.body, request.headers, is_chat, self.options)
        if self.is_dead or self.is_draining:
            message = replies.ENGINE_DIED if self.is_dead else replies.STOPPING
            raise Refusal(500, requests.error(message, "InternalServerError", None, 500))
        self.sleep.refuse()
        self._n_generations += 1
        self._count_faults()
        if self.options.enable_prompt_tokens_details:
            ask = replace(ask, n_cached_tokens=self._find_cached(ask))
        name = request.headers.get("x-request-id") or f"{self._n_generations:016x}"
        reply_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{name}"
        generation = Generation(ask, connection, reply_id, self.options.names[0])
        task = asyncio.get_running_loop().create_task(self._run(generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def change_sleep(self, request: Request, connection: Connection) -> asyncio.Task[None]:
        """Starts an answer to a route of `sleeping`, which may take its time."""

        async def answer() -> None:
            status, payload = await self.sleep.answer(request)
            self.metrics.sleep_level = self.sleep.level
            connection.refuse(status, payload)
            connection.next()

        return asyncio.get_running_loop().create_task(answer())

    def _find_cached(self, ask: Ask) -> int:
        """The tokens of the longest beginning that an earlier chat had, too; the last token is never cached."""
        n_cached = max((n for digest, n in ask.prefixes if digest in self._cached), default=0)
        self._cached |= dict.fromkeys(digest for digest, _ in ask.prefixes)
        while len(self._cached) > _PREFIXES_MAX:
            del self._cached[next(iter(self._cached))]
        return min(n_cached, ask.n_prompt_tokens - 1)

    async def stop(self, timeout_s: float) -> None:
        self.is_draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await self._fail_all()

    async def lose_core(self) -> None:
        """What vLLM does when its EngineCore process is gone, short of the exit."""
        self.is_dead = True
        for line in died():
            self.log(line)
        await self._fail_all()

    def hang_up(self) -> None:
        self.is_dead = True
        for connection in tuple(self.connections):
            connection.abort()

    async def _fail_all(self) -> None:
        self._failure = replies.ENGINE_DIED
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _count_faults(self) -> None:
        after, hang_after = self.options.crash_after_requests, self.options.hang_after_requests
        if after is not None and self._n_generations > after and is_armed(self.options):
            self._crash()
        if hang_after is not None and self._n_generations > hang_after and is_armed(self.options):
            self._is_hung = True
            disarm(self.options)

    def _crash(self) -> None:
        disarm(self.options)
        for line in died():
            self.log(line)
        self._die()

    async def _run(self, generation: Generation) -> None:
        """One generation from queue to end. A cancel without a failure means: the client left."""
        connection, ask = generation.connection, generation.ask
        if ask.streams:
            connection.begin_stream()
        try:
            await self._run_in_slot(generation)
            self._finish(generation)
        except asyncio.CancelledError:
            if self._failure is None or connection.is_gone:
                return
            if ask.streams:
                connection.send(replies.error_event(self._failure) + replies.DONE)
            else:
                connection.refuse(500, requests.error(self._failure, "InternalServerError", None, 500))
        if ask.streams:
            connection.end_stream()
        connection.next()

    async def _run_in_slot(self, generation: Generation) -> None:
        now = asyncio.get_running_loop().time
        ask, arrived_at = generation.ask, now()
        await self.sleep.awake.wait()  # not counted: vLLM's metrics stand still in its sleep
        self.metrics.n_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.metrics.n_waiting -= 1
        self.metrics.started(ask.n_prompt_tokens, now() - arrived_at)
        reason = "abort"
        try:
            if self._is_hung:
                await asyncio.Event().wait()
            await self._pace(generation, arrived_at)
            reason = "stop" if ask.ends_itself else "length"  # the engine knows nothing of tools
        finally:
            if reason == "abort" and self._failure is not None:
                reason = "error"
            self._slots.release()
            self.metrics.ended(ask.n_prompt_tokens, generation.n_sent, now() - arrived_at, reason)

    async def _pace(self, generation: Generation, arrived_at: float) -> None:
        now = asyncio.get_running_loop().time
        ask, rate = generation.ask, self.options.tokens_per_s
        await asyncio.sleep(self.options.ttft_s)
        first_at = last_at = now()
        self.metrics.prefilled(ask.n_prompt_tokens, first_at - arrived_at)
        if ask.streams:
            generation.connection.send(generation.events.first())
        while generation.n_sent < ask.n_tokens:
            due = generation.n_sent + _BATCH_TOKENS
            if rate != float("inf"):
                due = min(due, 1 + int((now() - first_at) * rate))
            if due <= generation.n_sent:
                await asyncio.sleep(first_at + generation.n_sent / rate - now())
                continue
            gap_s = now() - last_at if generation.n_sent else None
            self._send_tokens(generation, min(due, ask.n_tokens), gap_s)
            last_at = now()
            await generation.connection.drained()

    def _send_tokens(self, generation: Generation, upto: int, gap_s: float | None) -> None:
        first, limit = generation.n_sent, self.options.crash_mid_stream
        crashes = limit is not None and upto >= limit and is_armed(self.options)
        if crashes and limit is not None:
            upto = max(limit, first)
        if upto > first:
            self.metrics.decoded(upto - first, gap_s)
        generation.n_sent = upto
        if generation.ask.streams:
            per_chunk = self.options.tokens_per_chunk
            generation.connection.send(generation.events.tokens(first, upto, per_chunk))
        if crashes:
            self._crash()
            raise asyncio.CancelledError  # only where dying returns: inside a test's process

    def _finish(self, generation: Generation) -> None:
        if generation.ask.streams:
            generation.connection.send(generation.events.end())
        else:
            body = replies.whole(generation.ask, generation.reply_id, generation.model, generation.created)
            generation.connection.respond(200, body, JSON)


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_gone = False
        self._reader = http1.Reader(http1.parse_request, HEAD_BYTES_MAX)
        self._head: RequestHead | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.engine.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        self.engine.connections.discard(self)
        self._may_write.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._task is None:
            self._advance()
        elif self._reader.n_buffered > BODY_BYTES_MAX:
            self.abort()  # a client that pipelines this much waits for nothing

    def next(self) -> None:
        """The generation is over: on to the request behind it."""
        self._task = None
        self._end_request()
        self._advance()

    async def drained(self) -> None:
        """Waits while the client reads too slowly, and lets other streams have their turn."""
        await self._may_write.wait()
        await asyncio.sleep(0)

    def respond(self, status: int, body: bytes, content_type: str | None, allow: str | None = None) -> None:
        self._log(status)
        is_last = self._head is None or not self._head.keeps_alive
        lines = [f"allow: {allow}"] if allow is not None else []
        lines.append(f"content-length: {len(body)}")
        lines += [f"content-type: {content_type}"] if content_type is not None else []
        lines += ["vary: Origin", *(["connection: close"] if is_last else [])]
        if not self.is_gone:
            self._transport.write(_response_head(status, *lines) + body)

    def refuse(self, status: int, payload: dict[str, object], allow: str | None = None) -> None:
        self.respond(status, replies.dump(payload).encode(), JSON, allow)

    def begin_stream(self) -> None:
        """Without chunks (HTTP/1.0) the end of the connection ends the stream."""
        self._log(200)
        end = "transfer-encoding: chunked" if self._is_chunked else "connection: close"
        self._transport.write(_response_head(200, f"content-type: {EVENT_STREAM}", "vary: Origin", end))

    def send(self, piece: bytes) -> None:
        if piece and not self.is_gone:
            self._transport.write(http1.write_chunk(piece) if self._is_chunked else piece)

    def end_stream(self) -> None:
        if not self.is_gone and self._is_chunked:
            self._transport.write(http1.LAST_CHUNK)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def _is_chunked(self) -> bool:
        return self._head is not None and not self._head.is_http_10

    def _advance(self) -> None:
        try:
            while self._task is None and not self._transport.is_closing():
                event = self._reader.next_event()
                if event is None:
                    return
                if event is END:
                    self._answer_request()
                elif isinstance(event, bytes):
                    self._body += event
                    if len(self._body) > BODY_BYTES_MAX:
                        raise ProtocolError(413, "the body is too large")
                else:
                    self._head = event
                    if event.expects_continue and self._reader.n_buffered == 0:
                        self._transport.write(http1.CONTINUE)
        except ProtocolError:
            self._head = None
            self.respond(400, b"Invalid HTTP request received.", None)
            self._transport.close()

    def _answer_request(self) -> None:
        head, body = self._head, bytes(self._body)
        assert head is not None
        self._body.clear()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        query = head.target.partition(b"?")[2].decode("latin-1")
        request = Request(head.method.decode(), head.path.decode(), headers, body, query)
        self.engine.seen.append(request)
        self._answer(request)
        if self._task is None:
            self._end_request()

    def _end_request(self) -> None:
        if self._head is not None and not self._head.keeps_alive:
            self._transport.close()
        self._head = None

    def _answer(self, request: Request) -> None:
        methods = _METHODS.get(request.path)
        try:
            if self.engine.key and request.headers.get("authorization") != f"Bearer {self.engine.key}":
                self.refuse(401, {"error": "Unauthorized"})
            elif methods is None or (request.path in sleeping.METHODS and not self.engine.sleep.is_open):
                self.refuse(404, {"detail": "Not Found"})
            elif request.method not in methods:
                self.refuse(405, {"detail": "Method Not Allowed"}, ", ".join(methods))
            elif request.path.endswith("/completions"):
                self._task = self.engine.generate(request, self)
            elif request.path in sleeping.METHODS:
                self._task = self.engine.change_sleep(request, self)
            else:
                self.respond(*self.engine.answer(request))
        except Refusal as refusal:
            self.refuse(refusal.status, refusal.payload)

    def _log(self, status: int) -> None:
        if self._head is not None:
            host, port = (self._transport.get_extra_info("peername") or ("?", 0))[:2]
            what = f'"{self._head.method.decode()} {self._head.path.decode()} HTTP/1.1"'
            self.engine.log(Line(f"INFO:     {host}:{port} - {what} {status} {HTTPStatus(status).phrase}"))


def _response_head(status: int, *lines: str) -> bytes:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    return http1.STATUS_LINE[status] + "\r\n".join([f"date: {date}", "server: uvicorn", *lines, "", ""]).encode()
