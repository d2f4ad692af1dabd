"""Verbs of deployments that live on a login node, by a program that stands in for ssh."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import cli_remote, remote
from penstock.errors import PenstockError
from penstock.remote import Login

# A tunnel says more than a pipe holds, and breaks when there is a file `go`.
PROGRAM = """#!/bin/sh
echo "$@" >>{folder}/calls
case " $* " in *" -N "*) ;; *) echo '{{"url": "http://[fd00::1]:8000"}}'; exit ;; esac
head -c 200000 /dev/zero | tr '\\0' x >&2
while [ ! -e {folder}/go ]; do sleep 0.01; done
echo "client_loop: send disconnect: Broken pipe" >&2
exit 255
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program notes what it was called with."""
    (tmp_path / "ssh").write_text(PROGRAM.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "calls"


@pytest.fixture
def open_port() -> Iterator[socket.socket]:
    """A port of this machine that answers: the near end of a tunnel."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_tunnel_leads_to_a_gateway_by_ipv6_and_notices_a_dead_link(calls: Path, open_port: socket.socket) -> None:
    port = open_port.getsockname()[1]
    with remote.tunnel(Login("login"), "one", port) as tunnel:
        assert tunnel.url == f"http://127.0.0.1:{port}"
        assert tunnel.last_words() is None
        open_port.accept()
    words = calls.read_text().splitlines()[1]
    assert f"-L 127.0.0.1:{port}:[fd00::1]:8000 -- login" in words
    assert "-o ServerAliveInterval=15 -o ServerAliveCountMax=3" in words


def test_a_held_tunnel_that_breaks_is_an_error(
    calls: Path, open_port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_remote, "_LOOK_S", 0.01)
    port = open_port.getsockname()[1]

    def cut() -> None:
        open_port.accept()
        (calls.parent / "go").touch()

    threading.Thread(target=cut).start()
    with pytest.raises(PenstockError) as caught:
        cli_remote._hold(Login("login"), "one", port)
    error = caught.value
    assert (error.message, error.exit_code) == ('lost the tunnel to login node "login"', 1)
    assert error.detail is not None and error.detail.endswith("client_loop: send disconnect: Broken pipe")
    assert len(error.detail) == 500
    assert error.hint == f"Run it again: penstock tunnel one --port {port}"
