"""kubectl as the way to a cluster: its contexts, its proxy and tunnels, and what happens when they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kubernetes_stub import Answer, TlsStub
from waiting import until

from penstock.errors import PenstockError, UserError
from penstock.hardware.network import free_port
from penstock.targets.kubernetes import access
from penstock.targets.kubernetes import api as api_module
from penstock.targets.kubernetes.api import ApiError, connect
from penstock.wire.client import Client

CONTEXTS: list[dict[str, object]] = [
    {"name": "a", "context": {"cluster": "x"}},
    {"name": "b", "context": {"namespace": "team"}},
]
USES_CONNECTION = """
import sys
from penstock.targets.kubernetes.api import connect
connect("a").version()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a fake kubectl, the only one in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = Path(__file__).with_name("fake_kubectl.py")
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} {folder} "$@"\n')
    program.chmod(0o755)
    configure(folder, CONTEXTS, "a")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    # Keeps what other tests have cached apart.
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield folder
    assert [pid for pid in pids(folder) if is_running(pid)] == []


def configure(folder: Path, contexts: list[dict[str, object]] | None, current: str) -> None:
    text = json.dumps({"contexts": contexts, "current-context": current})
    (folder / "config.json").write_text(text)


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_running(pid: int) -> bool:
    """Not a zombie either, which init takes its time to bury."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.nightly
@pytest.mark.processes
def test_a_context_is_the_current_one_or_the_one_that_is_named(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect().context == "a" and connect().namespace == "default"
    assert connect("b").namespace == "team" and connect("b", "other").namespace == "other"
    with pytest.raises(UserError, match='no context "c"') as caught:
        connect("c")
    assert caught.value.detail == "contexts: a, b"
    configure(kubectl, None, "")
    monkeypatch.setenv("KUBECONFIG", "another")
    with pytest.raises(UserError, match="no current context"):
        connect()


def test_an_absent_kubectl_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match="kubectl is not installed here") as caught:
        connect()
    assert "https://kubernetes.io/docs/tasks/tools" in str(caught.value.hint)


@pytest.mark.nightly
@pytest.mark.processes
def test_a_proxy_that_died_is_started_again_or_says_why_it_does_not_start(kubectl: Path) -> None:
    api = connect()
    try:
        assert api.version() == connect("a").version()  # one for the process
        (pid,) = pids(kubectl)
        os.kill(pid, signal.SIGKILL)
        assert api.version() == (1, pids(kubectl)[1]) != (1, pid)
        os.kill(pids(kubectl)[1], signal.SIGKILL)
        (kubectl / "complaint").write_text("E1122 18:23:26.388079   16777 proxy.go:1] error: no such user\n")
        with pytest.raises(ApiError, match='kubectl proxy for context "a" ended at once') as caught:
            api.version()
        assert caught.value.detail == "error: no such user" and caught.value.is_retryable
    finally:
        access.proxy_of("a").end()


@pytest.mark.processes
def test_the_proxy_ends_with_its_process_also_when_that_is_killed(
    kubectl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    for number in (signal.SIGKILL, signal.SIGTERM):
        argv = [sys.executable, "-c", USES_CONNECTION]
        owner = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert owner.stdout is not None and owner.stdin is not None
        assert owner.stdout.readline() == b"up\n"
        pid = pids(kubectl)[-1]
        folder = Path(psutil.Process(pid).cmdline()[-1].partition("=")[2]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        owner.send_signal(number)
        owner.wait()
        until(lambda pid=pid: not is_running(pid), "kubectl ended")  # type: ignore[misc]
        until(lambda folder=folder: not folder.exists(), "its folder is gone")  # type: ignore[misc]
        owner.stdout.close()
        owner.stdin.close()


# ---- port-forward and exec -------------------------------------------------------------------------------------------


def minor(url: str) -> int:
    return int(Client(url, timeout_s=2.0).get_json("/version")["minor"])


def is_up(url: str) -> bool:
    try:
        return minor(url) > 0
    except PenstockError:
        return False


@pytest.mark.processes
def test_a_tunnel_is_opened_again_on_its_port(kubectl: Path) -> None:
    with access.port_forward("a", "team", "x-gateway", 8000, free_port("127.0.0.1")) as tunnel:
        pid = minor(tunnel.url)
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_up(tunnel.url), "the tunnel is open again")
        assert minor(tunnel.url) != pid and tunnel.last_words() is None
    assert not is_up(tunnel.url) and len(pids(kubectl)) == 2


@pytest.mark.nightly
@pytest.mark.processes
def test_a_tunnel_that_does_not_open_or_stays_closed_says_why(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_GIVES_UP_S", 0.3)
    with access.port_forward("a", "team", "x-gateway", 8000, free_port("127.0.0.1")) as tunnel:
        (kubectl / "complaint").write_text("error: lost connection to pod\n")
        os.kill(minor(tunnel.url), signal.SIGKILL)
        until(lambda: tunnel.last_words() is not None, "the tunnel is given up")
        assert tunnel.last_words() == "error: lost connection to pod"
    (kubectl / "complaint").write_text('Error from server (NotFound): services "x-gateway" not found\n')
    with (
        pytest.raises(PenstockError, match="could not open a tunnel to service/x-gateway") as caught,
        access.port_forward("a", "team", "x-gateway", 8000, 12345),
    ):
        pass
    assert caught.value.detail == 'Error from server (NotFound): services "x-gateway" not found'


@pytest.mark.nightly
@pytest.mark.processes
def test_exec_has_the_exit_code_of_the_command(kubectl: Path) -> None:
    argv = access.exec_argv("a", "team", "deployment/x-gateway", "gateway", ["penstock", "keys", "list"])
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 3
    assert "'exec', '-i', 'deployment/x-gateway', '-c', 'gateway', '--', 'penstock', 'keys', 'list'" in done.stdout
    assert "-it" in access.exec_argv(None, "team", "deployment/x", "gateway", [], is_terminal=True)


# ---- in a pod --------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.processes
def test_in_a_pod_its_service_account_is_used_and_its_token_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> None:
    account = tmp_path / "account"
    account.mkdir()
    for name, data in (("token", b"first\n"), ("namespace", b"team"), ("ca.crt", certificate[0].read_bytes())):
        (account / name).write_bytes(data)
    stub = TlsStub(tmp_path, certificate)
    stub.on("GET", "/version", {"major": "1", "minor": "30"})
    stub.on("GET", "/api/v1/namespaces/team/pods/a/log", Answer(200, iter([b"1 one\n2 t", b"wo\n"])))
    monkeypatch.setattr(api_module, "_ACCOUNT", account)
    monkeypatch.setattr(api_module, "_TOKEN_S", 0.0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(stub.port))
    try:
        api = connect()
        assert api.namespace == "team" and api.context is None
        assert api.version() == (1, 30)
        (account / "token").write_text("second")
        api.raw("GET", "/version")
        assert list(api.logs("a", follow=True)) == ["one", "two"]
    finally:
        stub.end()
    first, second, third = stub.requests
    assert first.headers["authorization"] == "Bearer first" and second.headers["authorization"] == "Bearer second"
    assert first.peer is second.peer and second.peer is not third.peer
    with pytest.raises(PenstockError, match="could not reach the API server of this pod's cluster: connection refused"):
        api.raw("GET", "/version")
