"""Kills a replica every few seconds under load and counts what clients lost: the bar is nothing.

    python benchmarks/gateway_faults.py [--seconds 60] [--every 5] [--replicas 3] [--clients 24]

Fake engines (`penstock.testing.fake_engine`) behind one gateway in a process of its own, killed with SIGKILL in turn
and started again on their port; a thread announces those that live, as nodes do. Half of the clients stream. A failed
request is one without a 200 and a whole body; a stream without an end is one whose last event is not [DONE]. Prints
JSON; exits 1 when anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.wire.http1 import END, Reader, ResponseHead, parse_response

_TOKEN = "benchmark"
_LEASE_S = 3.0
_TOKENS = 20


@dataclass
class Replica:
    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.testing.fake_engine", "--model", "m", "--port", str(self.port)]
            + ["--ttft-s", "0.05", "--tokens-per-s", "50"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    first_losses: list[str] = field(default_factory=list)

    def lose(self, kind: str, what: str) -> None:
        self.outcomes[kind] += 1
        if len(self.first_losses) < 5:
            self.first_losses.append(f"{kind}: {what[:300]}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def announce(admin: int, replica: Replica) -> None:
    body = {"replica": replica.name, "model": "m", "state": "ready", "lease_s": _LEASE_S}
    body["url"] = f"http://127.0.0.1:{replica.port}"
    request = urllib.request.Request(
        f"http://127.0.0.1:{admin}/admin/announce", json.dumps(body).encode(), {"Authorization": f"Bearer {_TOKEN}"}
    )
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=2).read()


async def keep_announcing(admin: int, replica: Replica) -> None:
    while True:
        if await asyncio.to_thread(replica.is_healthy):
            await asyncio.to_thread(announce, admin, replica)
        await asyncio.sleep(0.5)


async def ask(port: int, streams: bool, tally: Tally, until: float) -> None:
    body = json.dumps({"model": "m", "prompt": "tell me", "max_tokens": _TOKENS, "stream": streams}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            while time.monotonic() < until:
                writer.write(head.encode() + b"\r\n\r\n" + body)
                status, answer, is_whole = await read_answer(reader)
                if status != 200 or not is_whole:
                    tally.lose("stream without an end" if streams and status == 200 else "failed", answer.decode())
                    break
                if streams and not answer.endswith(b"data: [DONE]\n\n"):
                    tally.lose("stream without an end", answer[-200:].decode())
                elif b'"source":"gateway"' in answer:
                    tally.outcomes["stream ended by an error event"] += 1
                else:
                    tally.outcomes["stream complete" if streams else "request complete"] += 1


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    parser: Reader[ResponseHead] = Reader(parse_response)
    status, body = 0, b""
    while True:
        event: Any = parser.next_event()
        if event is None:
            data = await reader.read(65536)
            if not data:
                return status, body, False
            parser.feed(data)
        elif event is END:
            return status, body, True
        elif isinstance(event, ResponseHead):
            status = event.status
        else:
            body += event


async def kill_in_turn(replicas: list[Replica], every_s: float, tally: Tally, until: float) -> None:
    turn = 0
    while time.monotonic() + every_s < until:
        await asyncio.sleep(every_s)
        victim = replicas[turn % len(replicas)]
        turn += 1
        victim.kill()
        tally.kills += 1
        await asyncio.sleep(0.2)
        victim.start()


async def measure(options: argparse.Namespace, port: int, admin: int, replicas: list[Replica]) -> Tally:
    tally = Tally()
    announcers = [asyncio.create_task(keep_announcing(admin, replica)) for replica in replicas]
    while not all([await asyncio.to_thread(replica.is_healthy) for replica in replicas]):
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    until = time.monotonic() + options.seconds
    await asyncio.gather(
        kill_in_turn(replicas, options.every, tally, until),
        *(ask(port, n % 2 == 1, tally, until) for n in range(options.clients)),
    )
    for task in announcers:
        task.cancel()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=24)
    options = parser.parse_args()
    port, admin = free_port(), free_port()
    replicas = [Replica(str(index), free_port()) for index in range(options.replicas)]
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        token, config = Path(folder, "token"), Path(folder, "gateway.json")
        token.touch(0o600)
        token.write_text(_TOKEN)
        facts = {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin}", "admin_token_file": str(token)}
        config.write_text(json.dumps(facts | {"models": [{"name": "m"}], "auth": "none"}))
        gateway = subprocess.Popen([sys.executable, "-m", "penstock.gateway", str(config)], stderr=subprocess.DEVNULL)
        try:
            for replica in replicas:
                replica.start()
            tally = asyncio.run(measure(options, port, admin, replicas))
        finally:
            for replica in replicas:
                replica.kill()
            gateway.send_signal(signal.SIGKILL)
            gateway.wait()
    n_lost = tally.outcomes["failed"] + tally.outcomes["stream without an end"]
    print(
        json.dumps(
            {"kills": tally.kills, "lost": n_lost, **tally.outcomes, "first_losses": tally.first_losses}, indent=1
        )
    )
    return 1 if n_lost else 0


if __name__ == "__main__":
    sys.exit(main())
