"""A cheap load client: closed loop, keep-alive, raw protocols; and the kernel's accounting of a process tree."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Load:
    """What to send, to which port, how often and how many at a time."""

    port: int
    n_requests: int
    concurrency: int
    streams: bool
    key: str | None = None

    def request(self) -> bytes:
        body = b'{"model": "m", "messages": [{"role": "user", "content": "Say something of sixteen words."}]'
        body += b', "max_tokens": 16' + (b', "stream": true}' if self.streams else b"}")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\nuser-agent: bench\r\n"
        head += "accept: */*\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {self.key}\r\n" if self.key else ""
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Outcome:
    """Latencies are of whole responses, in seconds. `n_chunks`: events of streams."""

    latencies_s: list[float] = field(default_factory=list)
    n_errors: int = 0
    n_chunks: int = 0
    wall_s: float = 0.0

    def latency_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 if ordered else float("nan")


class LoadConnection(asyncio.Protocol):
    """One client of the closed loop. `budget` is shared: a list with the number of requests left."""

    def __init__(self, load: Load, budget: list[int], outcome: Outcome, ended: asyncio.Future[None]) -> None:
        self._wire = load.request()
        self._streams = load.streams
        self._budget, self._outcome, self.ended = budget, outcome, ended
        self._buffer = b""
        self._sent_at = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        if self._budget[0] <= 0:
            self.transport.close()
            return
        self._budget[0] -= 1
        self._sent_at = time.perf_counter()
        self.transport.write(self._wire)

    def data_received(self, data: bytes) -> None:
        if self._streams:
            self._outcome.n_chunks += data.count(b"data: ")
            # The end may be cut between reads; an event never ends like it.
            self._buffer = (self._buffer + data)[-64:]
            if not self._buffer.endswith(b"0\r\n\r\n"):
                return
            self._buffer = b""
            self._finish(True)
            return
        self._buffer = self._buffer + data if self._buffer else data
        head, gap, rest = self._buffer.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        if gap and at >= 0 and len(rest) >= int(head[at + 15 :].partition(b"\r\n")[0]):
            self._buffer = b""
            self._finish(head.startswith(b"HTTP/1.1 200"))

    def _finish(self, is_good: bool) -> None:
        self._outcome.latencies_s.append(time.perf_counter() - self._sent_at)
        self._outcome.n_errors += not is_good
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._outcome.n_errors += 1
        if not self.ended.done():
            self.ended.set_result(None)


def _same(connection: LoadConnection) -> LoadConnection:
    return connection


async def run_load(load: Load) -> Outcome:
    """Sends the load and returns when every answer is here."""
    loop = asyncio.get_running_loop()
    outcome, budget = Outcome(), [load.n_requests]
    begun = time.perf_counter()
    ends = []
    for _ in range(load.concurrency):
        connection = LoadConnection(load, budget, outcome, loop.create_future())
        ends.append(connection.ended)
        await loop.create_connection(functools.partial(_same, connection), "127.0.0.1", load.port)
    await asyncio.gather(*ends)
    outcome.wall_s = time.perf_counter() - begun
    return outcome


def process_tree(root: int) -> list[int]:
    """`root` and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
            except OSError:
                continue  # it ended just now
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_s(root: int) -> float:
    """User and system time of the tree's processes and all their threads, /proc/PID/stat fields 14 and 15."""
    ticks = 0
    for pid in process_tree(root):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def rss_mb(root: int) -> float:
    """Resident memory of the tree, in MB (10**6 bytes); pages shared between its processes count in each."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in process_tree(root))
    return pages * _PAGE_BYTES / 1e6
