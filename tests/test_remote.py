"""Verbs of deployments that live on a login node, by a program that stands in for ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import remote as cli_remote
from penstock.cli.main import run
from penstock.errors import PenstockError, UserError
from penstock.hardware.network import free_port
from penstock.targets import Login, Tunnel
from penstock.targets.tunnel import local_port

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

# A tunnel says more than a pipe holds, and breaks when there is a file `go`.
PROGRAM = """#!{python}
import pathlib, socket, sys, time
folder, words = pathlib.Path("{folder}"), " ".join(sys.argv[1:])
with (folder / "calls").open("a") as calls:
    calls.write(words + "\\n")
if " -N " not in words:
    page = " ui one --json" in words
    if page and (folder / "banner").exists():
        print("Welcome to the login node")
    print('{{"url": "http://[fd00::1]:%s", "key": "sk-1", "ui": {{}}}}' % ("7860/login" if page else 8000))
    sys.exit()
sys.stderr.write("x" * 200_000)
port = words.partition("-L 127.0.0.1:")[2].partition(":")[0]
with socket.create_server(("127.0.0.1", int(port))):
    while not (folder / "go").exists():
        time.sleep(0.01)
sys.exit("client_loop: send disconnect: Broken pipe")
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program notes what it was called with."""
    (tmp_path / "ssh").write_text(PROGRAM.format(python=sys.executable, folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "calls"


@pytest.fixture
def port() -> Iterator[int]:
    """A free one; what a held tunnel does to signals is taken back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield free_port("127.0.0.1")
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_chat_page_of_a_login_node_has_its_key_from_there_and_other_words_are_an_error(
    calls: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = cli_remote._on_login_node(Login("login"), "one")
    page = gateway.chat_page()
    assert page is not None and (page.key, page.url) == ("sk-1", None)
    with page.tunnel(port) as tunnel:
        assert tunnel.url == f"http://127.0.0.1:{port}"
    words = calls.read_text().splitlines()
    assert "-m penstock ui one --json" in words[1]
    assert f"-L 127.0.0.1:{port}:[fd00::1]:7860 -- login" in words[2]
    (calls.parent / "banner").touch()
    with pytest.raises(PenstockError, match="could not open the page") as caught:
        gateway.chat_page()
    assert str(caught.value.detail).startswith("Welcome to the login node")
    monkeypatch.setattr(cli_remote, "_PAGE_S", 0.0)
    with pytest.raises(PenstockError, match="could not run") as caught:
        gateway.chat_page()
    assert caught.value.is_retryable and caught.value.detail == "no answer within 0 s"


def test_a_port_that_another_program_has_is_not_told_to_be_the_deployment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(UserError, match="cannot listen") as caught:
        local_port(stranger.getsockname()[1])
    assert caught.value.hint == "Give another --port, or none for a free one."


def test_a_tunnel_leads_to_a_gateway_by_ipv6_and_one_that_breaks_is_an_error(
    calls: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = cli_remote._on_login_node(Login("login"), "one")

    @contextlib.contextmanager
    def opened(port: int) -> Iterator[Tunnel]:
        with gateway.tunnel(port) as found:
            assert (found.url, found.last_words()) == (f"http://127.0.0.1:{port}", None)
            (calls.parent / "go").touch()
            yield found

    monkeypatch.setattr(cli_remote, "_LOOK_S", 0.01)
    with pytest.raises(PenstockError) as caught:
        cli_remote._hold_open(gateway._replace(tunnel=opened), port)
    words = calls.read_text().splitlines()[1]
    assert f"-L 127.0.0.1:{port}:[fd00::1]:8000 -- login" in words
    assert "-o ServerAliveInterval=15 -o ServerAliveCountMax=3" in words
    error = caught.value
    assert (error.message, error.exit_code) == ('lost the tunnel to login node "login"', 1)
    assert error.detail is not None and error.detail.endswith("client_loop: send disconnect: Broken pipe")
    assert len(error.detail) == 500
    assert error.hint == f"Run it again: penstock tunnel one --port {port}"


def test_a_file_is_rendered_here_when_its_login_node_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\necho 'ssh: connect to host login port 22: Connection refused' >&2\nexit 255\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / "ssh") if name == "ssh" else None)
    words = "{model: penstock-demo, name: one, target: slurm, engine: {kind: fake}, slurm: {login: login}}"
    (tmp_path / "one.yaml").write_text(words)
    assert run(["render", str(tmp_path / "one.yaml")]) == 0
    out, err = capsys.readouterr()
    assert "cannot be reached over ssh" in err and "rendered here" in err
    assert "#SBATCH --nodes=1" in out
    assert "# warning: not asked: this machine is no client of Slurm" in out
    assert run(["up", str(tmp_path / "one.yaml"), "--no-wait"]) == 1, "a start needs it"
