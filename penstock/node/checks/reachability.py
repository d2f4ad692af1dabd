"""Which addresses of the other nodes this node reaches.

Start `python -m penstock.node.checks.reachability` on all nodes at once.

Every node opens a door (`rendezvous.Door`) on the same port for some seconds and knocks at the addresses of all
others, again and again, since they do not start in the same moment. Prints JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

from penstock.node.group.rendezvous import knock, open_door

_EVERY_S = 0.5


class Reached(msgspec.Struct, frozen=True):
    """By rank and address: seconds there and back, the best of several. `error`: why nothing could be tried."""

    by_rank: dict[int, dict[str, float]] = {}
    error: str | None = None


def nonce_of(secret: str, rank: int) -> str:
    """What the door of that rank says: told to nobody, known to all that share the secret."""
    return hashlib.sha256(f"{secret}:{rank}".encode()).hexdigest()[:32]


def peers_text(peers: Mapping[int, Sequence[str]]) -> str:
    """Addresses by rank as one word of a command line: "0=10.0.0.1,192.168.1.4;2=10.0.0.3"."""
    return ";".join(f"{rank}={','.join(addresses)}" for rank, addresses in peers.items())


def parse_peers(text: str) -> dict[int, tuple[str, ...]]:
    pairs = (part.partition("=") for part in text.split(";") if part)
    return {int(rank): tuple(word for word in words.split(",") if word) for rank, _, words in pairs}


def look(rank: int, port: int, secret: str, peers: Mapping[int, Sequence[str]], seconds: float) -> Reached:
    """Keep a door open for `seconds`, and try every address of the others meanwhile. Blocks as long."""
    ends = time.monotonic() + seconds
    found: dict[int, dict[str, float]] = {other: {} for other in peers}
    lock = threading.Lock()

    def ask(other: int, address: str) -> None:
        nonce = nonce_of(secret, other)
        while time.monotonic() < ends:
            took_s = knock(address, port, nonce)
            if took_s is not None:
                with lock:
                    found[other][address] = min(took_s, found[other].get(address, took_s))
            time.sleep(_EVERY_S)

    try:
        with open_door(port, nonce_of(secret, rank)):
            for other, addresses in peers.items():
                for address in addresses:
                    threading.Thread(target=ask, args=(other, address), daemon=True).start()
            time.sleep(seconds)
    except OSError as exc:
        return Reached(error=f"cannot listen on port {port}: {exc.strerror}")
    with lock:
        return Reached({other: dict(times) for other, times in found.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was reached as JSON, on one line."""
    parser = argparse.ArgumentParser(prog="python -m penstock.node.checks.reachability")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--peers", type=parse_peers, required=True)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args(argv)
    if options.rank not in options.peers:  # this node is not among those that answered before
        return 0
    reached = look(options.rank, options.port, options.secret, options.peers, options.seconds)
    sys.stdout.write(msgspec.json.encode(reached).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
