"""A port of this machine that leads to a gateway elsewhere, for as long as a child process of ours forwards it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from penstock.errors import PenstockError, UserError
from penstock.hardware import network

_HOST = "127.0.0.1"
_OPEN_S = 20.0


class ForwardedPort:
    """A tunnel (`targets.Tunnel`) that is open for as long as the child lives."""

    def __init__(self, url: str, child: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.url, self._child, self._errors = url, child, errors

    def last_words(self) -> str | None:
        if self._child.poll() is None:
            return None
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace").strip()[-500:]


def local_port(wanted: int | None) -> int:
    """That port, or a free one.

    Raises UserError when another process has the port: it would receive the deployment's keys.
    """
    if not wanted:
        return network.free_port(_HOST)
    try:
        network.check_port(_HOST, wanted)
    except UserError as exc:
        hint = "Give another --port, or none for a free one."
        raise UserError(exc.message, detail=exc.detail, hint=hint) from exc
    return wanted


@contextlib.contextmanager
def forwarded(words: Sequence[str], port: int, failure: Callable[[str], PenstockError]) -> Iterator[ForwardedPort]:
    """Run a command that listens on this port of 127.0.0.1, for as long as the block lasts.

    `failure`: the error for what the command printed, when it ends before it listens.
    """
    # A file: the child would block on a pipe that is full and not read.
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            tunnel = ForwardedPort(f"http://{_HOST}:{port}", child, errors)
            _wait_open(tunnel, port, failure)
            yield tunnel
        finally:
            child.terminate()
            child.wait()


def _wait_open(tunnel: ForwardedPort, port: int, failure: Callable[[str], PenstockError]) -> None:
    deadline = time.monotonic() + _OPEN_S
    while time.monotonic() < deadline:
        complaint = tunnel.last_words()
        if complaint is not None:
            raise failure(complaint)
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), 1.0):
            return
        time.sleep(0.05)
    raise failure(f"the tunnel did not open within {_OPEN_S:.0f} s")
