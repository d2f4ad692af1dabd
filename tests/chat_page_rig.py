"""The chat page's real process over a real gateway, whose engine says what a test wrote.

    with chat_page(folder) as rig:
        rig.answers["hello"] = Answer(("Good ", gate, "morning"))
        browser.goto(rig.url)

Gateway and engine run in one event loop, in a thread of the test's process; the page is `python -m penstock.chat.page`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from gateway_rig import DONE, SSE_HEAD, TOKEN, Rig, Seen, chunk
from waiting import left_s, until

from penstock.chat.page.config import PageConfig
from penstock.gateway.accounting import store
from penstock.gateway.accounting.usage_store import UsageStore
from penstock.gateway.config import ServedModel
from penstock.hardware.network import free_port
from penstock.spec.gateway import Price

MODEL = "demo"
PRICE = Price(input=1.0, output=2.0, cached=0.5)

Result = TypeVar("Result")


class Gate:
    """A place in an answer at which the engine waits until the test opens it."""

    is_open = False

    def open(self) -> None:
        self.is_open = True


@dataclass(frozen=True)
class Answer:
    """What the engine streams: text, other deltas ({"reasoning": ...}), pauses in seconds, and gates.

    `status` other than 200: refused, with `steps[0]` as the message.
    """

    steps: tuple[str | float | Gate | dict[str, Any], ...]
    finish_reason: str = "stop"
    usage: dict[str, Any] = field(default_factory=lambda: {"prompt_tokens": 18, "completion_tokens": 3})
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """A request as the engine got it. `is_cut`: its peer left before the end."""

    path: str
    body: dict[str, Any]
    is_cut: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def question(self) -> str:
        if "prompt" in self.body:
            return str(self.body["prompt"])
        content = self.body["messages"][-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class ScriptedEngine:
    """Answers from `answers` by the last message; to anything else it says "You said: " and that."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[Asked] = []

    def n_open(self, question: str) -> int:
        """Answers to it that still grow."""
        return sum(asked.question == question and not asked.ended.is_set() for asked in self.asked)

    async def reply(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if not seen.body:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        asked = Asked(seen.head.target.decode(), json.loads(seen.body))
        self.asked.append(asked)
        answer = self.answers.get(asked.question) or Answer(("You said: ", asked.question))
        if answer.status != 200:
            writer.write(_refusal(answer))
            asked.ended.set()
            return True
        left = asyncio.ensure_future(reader.read(1))
        playing = asyncio.ensure_future(_play(answer, asked, writer))
        await asyncio.wait((left, playing), return_when=asyncio.FIRST_COMPLETED)
        asked.is_cut = not playing.done()
        playing.cancel()
        left.cancel()
        asked.ended.set()
        return False


def _refusal(answer: Answer) -> bytes:
    facts = {"message": answer.steps[0], "type": "BadRequestError", "param": None, "code": answer.status}
    body = json.dumps({"error": facts}).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    head = f"HTTP/1.1 {answer.status} Refused\r\nContent-Type: application/json\r\n{lines}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _play(answer: Answer, asked: Asked, writer: asyncio.StreamWriter) -> None:
    is_chat = "messages" in asked.body

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        facts = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        return chunk(b"data: " + json.dumps({**facts, "choices": choices, **more}).encode() + b"\n\n")

    writer.write(SSE_HEAD)
    for step in answer.steps:
        if isinstance(step, Gate):
            while not step.is_open:
                await asyncio.sleep(0.01)
        elif isinstance(step, float):
            await asyncio.sleep(step)
        else:
            delta = {"content": step} if isinstance(step, str) else step
            piece = {"delta": delta} if is_chat else {"text": step}
            writer.write(event([{"index": 0, **piece, "finish_reason": None}]))
            await writer.drain()
    end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    writer.write(event([{"index": 0, **end, "finish_reason": answer.finish_reason}]))
    writer.write(event([], usage=answer.usage) + chunk(DONE) + b"0\r\n\r\n")
    await writer.drain()


class ChatPage:
    """`url`: of the page. `log`: what its process wrote. `rig`: the gateway that runs."""

    rig: Rig

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self.engine = ScriptedEngine()
        self.answers = self.engine.answers
        self.gateway_port, self.port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.log = folder / "page.log"
        gateway, home = f"http://127.0.0.1:{self.gateway_port}", str(folder / "page")
        self.config = PageConfig(gateway, "127.0.0.1", self.port, home, True, prices={MODEL: PRICE}, **changes)
        self.url = f"http://127.0.0.1:{self.port}/"
        self.process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """In the loop of gateway and engine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(left_s())

    def start_gateway(self, *, is_ready: bool = True, **changes: Any) -> None:
        """A gateway at the same address, with the engine as its replica "0"."""
        facts: dict[str, Any] = {
            "listen": f"127.0.0.1:{self.gateway_port}",
            "auth": "keys",
            "store": str(self.folder / "keys.db"),
            "hold_s": 600.0,
            "prices": {MODEL: PRICE},
            "models": (ServedModel(MODEL),),
        }

        async def start() -> Rig:
            rig = Rig(**facts | changes)
            await rig.gateway.start()
            return rig

        self.rig = self.do(start())
        if is_ready:
            self.add_replica()

    def stop_gateway(self) -> None:
        """It and its engines; whoever streams is cut."""
        self.do(self.rig.__aexit__())

    @contextlib.contextmanager
    def another_gateway(self, **changes: Any) -> Iterator[None]:
        """In place of the usual one for a while, without a replica."""
        self.stop_gateway()
        self.start_gateway(is_ready=False, **changes)
        try:
            yield
        finally:
            self.stop_gateway()
            self.start_gateway()

    def add_replica(self, **more: Any) -> None:
        """Or the same one at a new address; `more`: of its announcement."""
        engine = self.do(self.rig.engine(self.engine.reply, "0"))
        self.announce("ready", engine.url, **more)

    def announce(self, state: str, url: str | None = None, **more: Any) -> None:
        """The replica's state, as its node would tell."""
        status, answer = self.do(self.rig.announce("0", url, state, lease_s=3600, **more))
        assert status == 200, answer

    def kill_replicas(self) -> None:
        """As kill -9 of the engines: their connections are reset and nobody listens. Their node says so."""

        async def kill(rig: Rig) -> None:
            for engine in rig._engines:
                await engine.stop()
                for writer in engine.writers:
                    writer.transport.abort()
            rig._engines.clear()

        self.do(kill(self.rig))
        self.announce("restarting", reason="the engine died")

    def make_key(self, name: str) -> str:
        status, key = self.do(self.rig.admin("/admin/keys", {"name": name}))
        assert status == 200, key
        return str(key["key"])

    def revoke(self, name: str) -> None:
        async def revoke(rig: Rig) -> None:
            client = await rig.client(rig.gateway.admin.port)
            client.get(f"/admin/keys/{name}", f"Authorization: Bearer {TOKEN}\r\n", method="DELETE")
            assert (await client.response())[0].status == 200

        self.do(revoke(self.rig))

    def n_counted(self, name: str) -> int:
        """Requests that the gateway has counted for that key."""
        with contextlib.closing(store.connect(str(self.folder / "keys.db"))) as database:
            return sum(row.n_requests for row in UsageStore(database).usage(["key"]) if row.group == (name,))

    def start_page(self) -> None:
        """Blocks until it answers."""
        Path(self.config.folder).mkdir(mode=0o700, exist_ok=True)
        path = self.folder / "ui.json"
        path.write_bytes(msgspec.json.encode(self.config))
        with self.log.open("ab") as log:
            argv = [sys.executable, "-m", "penstock.chat.page", str(path)]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, process_group=0)
        process = self.process

        def answers() -> bool:
            assert process.poll() is None, self.log.read_text()[-4000:]
            return self.is_up()

        until(answers, "the page answers")

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.url}health", timeout=2).status == 200  # type: ignore[no-any-return]
        return False

    def kill_page(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def end(self) -> None:
        self.kill_page()
        self.stop_gateway()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(left_s())


@contextlib.contextmanager
def chat_page(folder: Path, **changes: Any) -> Iterator[ChatPage]:
    """`changes`: of the page's config."""
    rig = ChatPage(folder, **changes)
    try:
        rig.start_gateway()
        rig.start_page()
        yield rig
    finally:
        rig.end()
