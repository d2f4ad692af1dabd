"""An engine whose times are known: `python benchmarks/bench_mock.py PORT`. One thread, epoll, absolute times.

A first chunk is due 50 ms after its request reached the kernel, chunk k another 10 ms k later, each in a write of its
own; the last brings usage and the end with it. Due times are never moved by a late write, and every write's lateness
is kept: GET /truth tells it (and what the gaps between writes really were) as JSON, GET /reset forgets. It spins when
the next write is near, so it wants a core of its own. Any other POST is answered whole and at once.
"""

from __future__ import annotations

import gc
import json
import select
import socket
import struct
import sys
from collections import deque
from time import perf_counter, time

FIRST_S = 0.05
GAP_S = 0.01
N_CHUNKS = 128
SO_TIMESTAMPNS = 35  # asm-generic/socket.h
_SPIN_S = 0.002

_ANSWER = (
    b'{"id":"cmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":" word word"},"finish_reason":"stop"}],"usage":{"prompt_tokens":12,"completion_tokens":2,'
    b'"total_tokens":14}}'
)
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_PLAIN = _JSON % (len(_ANSWER), _ANSWER)
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"mock"}]}'
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(finish: bytes) -> bytes:
    return (
        b'data: {"id":"cmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"content":" word"},"logprobs":null,"finish_reason":%s}]}\n\n' % finish
    )


def _usage(n_chunks: int) -> bytes:
    return (
        b'data: {"id":"cmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":'
        b'{"prompt_tokens":12,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (n_chunks, n_chunks + 12)
    )


_TOKEN = _chunk(_event(b"null"))
_END = _chunk(_event(b'"length"')) + _chunk(_usage(N_CHUNKS)) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Peer:
    """One connection, and the stream on it."""

    __slots__ = ("buffer", "due_s", "n_left", "sent_s", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.due_s = 0.0
        self.sent_s = 0.0
        self.n_left = 0


class Mock:
    """All connections, and two queues of what is due: first chunks and next chunks. Both are in order of time by
    themselves, because within a queue everybody waits equally long."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.poller = select.epoll()
        self.poller.register(self.listener, select.EPOLLIN)
        self.peers: dict[int, Peer] = {}
        self.firsts: deque[Peer] = deque()
        self.nexts: deque[Peer] = deque()
        self.reset()

    def reset(self) -> None:
        self.epoch_s = time() - perf_counter()
        self.n_streams = self.n_answers = self.n_active = self.n_active_max = 0
        self.first_late: list[float] = []
        self.next_late: list[float] = []
        self.gaps: list[float] = []
        self.began_s = 0.0  # when more than 10 streams were open for the first time: after any test request
        self.ended_s = 0.0

    def serve(self) -> None:
        while True:
            self._send_due()
            due_s = min(self.firsts[0].due_s if self.firsts else 1e18, self.nexts[0].due_s if self.nexts else 1e18)
            left_s = due_s - perf_counter()
            timeout = 0.0 if left_s < _SPIN_S else left_s - 0.0015 if left_s < 1 else 1.0
            for number, _ in self.poller.poll(timeout):
                peer = self.peers.get(number)
                if peer is None:
                    self._accept()
                else:
                    self._read(peer)

    def _send_due(self) -> None:
        """Sends what is due now; a batch is bounded, so that requests are read (and their clocks started) on time."""
        firsts, nexts = self.firsts, self.nexts
        for _ in range(64):
            now = perf_counter()
            if nexts and nexts[0].due_s <= now:
                peer = nexts.popleft()
                if peer.n_left == 0:
                    continue
                self.next_late.append(now - peer.due_s)
                self.gaps.append(now - peer.sent_s)
                peer.n_left -= 1
                self._write(peer, _TOKEN if peer.n_left else _END)
            elif firsts and firsts[0].due_s <= now:
                peer = firsts.popleft()
                if peer.n_left == 0:
                    continue
                self.first_late.append(now - peer.due_s)
                peer.n_left -= 1
                self._write(peer, _HEAD + _TOKEN)
            else:
                return
            peer.sent_s = now
            if peer.n_left:
                peer.due_s += GAP_S
                nexts.append(peer)
            else:
                self.n_active -= 1
                self.ended_s = now

    def _write(self, peer: Peer, data: bytes) -> None:
        try:
            peer.sock.send(data)
        except OSError:  # gone, or does not read: no measurement survives that
            self._drop(peer)

    def _accept(self) -> None:
        try:
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self.peers[sock.fileno()] = Peer(sock)
                self.poller.register(sock, select.EPOLLIN)
        except BlockingIOError:
            return

    def _drop(self, peer: Peer) -> None:
        if peer.n_left:
            self.n_active -= 1
        peer.n_left = 0
        if self.peers.pop(peer.sock.fileno(), None) is not None:
            self.poller.unregister(peer.sock)
            peer.sock.close()

    def _read(self, peer: Peer) -> None:
        try:
            data, notes, _, _ = peer.sock.recvmsg(262144, 64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.buffer = peer.buffer + data if peer.buffer else data
        head, gap, body = peer.buffer.partition(b"\r\n\r\n")
        if not gap:
            return
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at >= 0 and len(body) < int(lower[at + 15 :].partition(b"\r\n")[0]):
            return
        if b"transfer-encoding: chunked" in lower and not body.endswith(b"0\r\n\r\n"):
            return
        peer.buffer = b""
        if head.startswith(b"GET"):
            self._write(peer, self._page(head))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self.n_streams += 1
            self.n_active += 1
            self.n_active_max = max(self.n_active_max, self.n_active)
            if self.n_active > 10 and self.began_s == 0.0:
                self.began_s = perf_counter()
            peer.n_left = N_CHUNKS
            peer.due_s = self._arrival_s(notes) + FIRST_S
            self.firsts.append(peer)
        else:
            self.n_answers += 1
            self._write(peer, _PLAIN)

    def _arrival_s(self, notes: list[tuple[int, int, bytes]]) -> float:
        """When the kernel had the request: what waits here before it is read is the mock's lateness, not the client's.

        https://docs.kernel.org/networking/timestamping.html
        """
        for level, kind, value in notes:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                s, ns = struct.unpack("qq", value[:16])
                return float(s + ns / 1e9 - self.epoch_s)
        return perf_counter()

    def _page(self, head: bytes) -> bytes:
        if head.startswith(b"GET /reset"):
            self.reset()
            page = b"{}"
        elif head.startswith(b"GET /truth"):
            page = json.dumps(self.truth()).encode()
        elif head.startswith(b"GET /metrics"):
            return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        else:
            page = _MODELS
        return _JSON % (len(page), page)

    def truth(self) -> dict[str, float]:
        """Times in ms, of the mock's own clock: what a client that is never late would have measured."""
        late = sorted(self.first_late)
        gaps = sorted(self.gaps)
        both = sorted([*self.first_late, *self.next_late])

        def at(ordered: list[float], share: float) -> float:
            return ordered[int((len(ordered) - 1) * share)] * 1000 if ordered else 0.0

        return {
            "n_streams": self.n_streams,
            "n_answers": self.n_answers,
            "n_chunks": len(both),
            "most_at_once": self.n_active_max,
            "began_s": self.began_s,
            "ended_s": self.ended_s,
            "ttft_p50_ms": FIRST_S * 1000 + at(late, 0.5),
            "ttft_p99_ms": FIRST_S * 1000 + at(late, 0.99),
            "itl_p50_ms": at(gaps, 0.5),
            "itl_p99_ms": at(gaps, 0.99),
            "late_p50_ms": at(both, 0.5),
            "late_p99_ms": at(both, 0.99),
        }


if __name__ == "__main__":
    gc.disable()
    Mock(int(sys.argv[1])).serve()
