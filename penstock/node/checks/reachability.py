"""Which addresses of the other nodes this node reaches: `python -m penstock.node.checks.reachability` on all at once.

Every node listens on the same port for some seconds and connects to all addresses of the others, again and again, since
they do not start in the same moment. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

_EVERY_S = 0.5
_TIMEOUT_S = 3.0
_NONCE_BYTES = 32


class Reached(msgspec.Struct, frozen=True):
    """By rank and address: seconds of a round trip, the best of several. `error`: why nothing was tried."""

    by_rank: dict[int, dict[str, float]] = {}
    error: str | None = None


def nonce_of(secret: str, rank: int) -> str:
    """What the probe server of that rank sends; every node with the secret knows it."""
    return hashlib.sha256(f"{secret}:{rank}".encode()).hexdigest()[:_NONCE_BYTES]


class ProbeServer:
    """Listens on all addresses of this node and sends its nonce: two machines may have the same private address.

    Raises OSError where the port is taken.
    """

    def __init__(self, port: int, nonce: str) -> None:
        self._nonce = nonce.encode()
        self._socket = socket.create_server(("0.0.0.0", port), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        # A thread in accept() keeps the socket open after close() alone.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_TIMEOUT_S)
                connection.sendall(self._nonce)


def probe(address: str, port: int, nonce: str) -> float | None:
    """Seconds for a connection to the probe server with that nonce; None when the address does not lead to it."""
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), _TIMEOUT_S) as connection:
            took_s = time.monotonic() - began
            answer = connection.recv(_NONCE_BYTES, socket.MSG_WAITALL)
    except OSError:
        return None
    return took_s if answer == nonce.encode() else None


def peers_text(peers: Mapping[int, Sequence[str]]) -> str:
    """Addresses by rank as one word of a command line: "0=10.0.0.1,192.168.1.4;2=10.0.0.3"."""
    return ";".join(f"{rank}={','.join(addresses)}" for rank, addresses in peers.items())


def parse_peers(text: str) -> dict[int, tuple[str, ...]]:
    pairs = (part.partition("=") for part in text.split(";") if part)
    return {int(rank): tuple(word for word in words.split(",") if word) for rank, _, words in pairs}


def probe_all(rank: int, port: int, secret: str, peers: Mapping[int, Sequence[str]], seconds: float) -> Reached:
    """Listen for `seconds`, and try every address of the other nodes. Blocks as long."""
    ends = time.monotonic() + seconds
    times: dict[int, dict[str, float]] = {peer: {} for peer in peers}
    lock = threading.Lock()

    def try_address(peer: int, address: str) -> None:
        nonce = nonce_of(secret, peer)
        while time.monotonic() < ends:
            took_s = probe(address, port, nonce)
            if took_s is not None:
                with lock:
                    times[peer][address] = min(took_s, times[peer].get(address, took_s))
            time.sleep(_EVERY_S)

    try:
        server = ProbeServer(port, nonce_of(secret, rank))
    except OSError as exc:
        return Reached(error=f"cannot listen on port {port}: {exc.strerror}")
    with contextlib.closing(server):
        for peer, addresses in peers.items():
            for address in addresses:
                threading.Thread(target=try_address, args=(peer, address), daemon=True).start()
        time.sleep(seconds)
    with lock:
        return Reached({peer: dict(row) for peer, row in times.items()})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.node.checks.reachability")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--peers", type=parse_peers, required=True)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args(argv)
    if options.rank not in options.peers:  # this node is not among those that answered before
        return 0
    reached = probe_all(options.rank, options.port, options.secret, options.peers, options.seconds)
    sys.stdout.write(msgspec.json.encode(reached).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
