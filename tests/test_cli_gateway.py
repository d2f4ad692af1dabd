"""`penstock gateway`: what it refuses, and a real one with workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import gateway as cli_gateway
from penstock.cli import main
from penstock.wire import prometheus

UPSTREAM = ["--upstream", "m=http://127.0.0.1:9"]


def config_of(*arguments: str) -> Any:
    return cli_gateway.make_config(main.parser().parse_args(["gateway", *arguments]), Path("/run/x"))


def test_arguments_become_a_config() -> None:
    config = config_of(
        *("--upstream", "a=http://h:1", "--upstream", "a=unix:/e.sock", "--upstream", "b=http://h:2"),
        *("--alias", "a=gpt", "--auth", "keys", "--store", "postgresql://db/x", "--policy", "prefix"),
        *("--listen", "0.0.0.0:80", "--workers", "4", "--max-body-bytes", "1000", "--total-timeout", "9.5"),
    )
    assert [(model.name, model.aliases) for model in config.models] == [("a", ("gpt",)), ("b", ())]
    assert [(upstream.model, upstream.url) for upstream in config.upstreams][1] == ("a", "unix:/e.sock")
    assert (config.store, config.policy, config.workers) == ("postgresql://db/x", "prefix", 4)
    assert (config.limits.body_bytes, config.limits.total_s, config.limits.head_bytes) == (1000, 9.5, 32768)
    assert config.admin == "unix:/run/x/admin.sock"


def test_every_setting_of_the_file_has_an_argument() -> None:
    config = config_of(
        *(*UPSTREAM, "--upstream", "n=http://h:2", "--upstream-key", "m=/run/key", "--upstream-key", "n=env:KEY"),
        *("--max-in-flight", "7", "--queue-requests", "9", "--queue-bytes", "10", "--queue-key-share", "0.25"),
        *("--allow-origin", "https://a.example", "--path-prefix", "/p", "--body-timeout", "3", "--stall-timeout", "4"),
    )
    assert [(upstream.key_file, upstream.key_env) for upstream in config.upstreams] == [
        ("/run/key", None),
        (None, "KEY"),
    ]
    assert (config.max_in_flight, config.allowed_origins, config.path_prefix) == (7, ("https://a.example",), "/p")
    assert (config.queue.n_requests, config.queue.body_bytes, config.queue.key_share) == (9, 10, 0.25)
    assert (config.limits.body_s, config.limits.stall_s) == (3, 4)


def test_ledger_days_are_a_number_or_all() -> None:
    days = [config_of(*UPSTREAM, *more).ledger_days for more in ((), ("--ledger-days", "7"), ("--ledger-days", "all"))]
    assert days == [90, 7, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--upstream"),
        (["--upstream", "http://127.0.0.1:9"], "MODEL=URL"),
        (["--upstream", "m\r\nX: y=http://127.0.0.1:9"], "MODEL=URL"),
        (["--upstream", "m=https://127.0.0.1:9"], "is not http://host:port or unix:/path"),
        (["--listen", "0.0.0.0:9300", *UPSTREAM], "--auth none"),
        (["--listen", "nonsense", *UPSTREAM], "neither host:port nor unix:/path"),
        (["--auth", "keys", *UPSTREAM], "without a store"),
        (["--workers", "0", *UPSTREAM], "from 1 to 64"),
        (["--ledger-days", "0", *UPSTREAM], "a whole number of days from 1"),
        (["--workers", "2", "--listen", "unix:/tmp/x", *UPSTREAM], "Unix socket"),
        (["--tls-cert", "x", *UPSTREAM], "tls_key: is missing"),
        (["--admin", "127.0.0.1:1", *UPSTREAM], "without its token"),
        (["--alias", "other=x", *UPSTREAM], "no --upstream has"),
        (["--alias", "m=m", *UPSTREAM], "declared twice"),
        (["--allow-origin", "*", *UPSTREAM], "without keys lets every web page"),
        (["--path-prefix", "p", *UPSTREAM], "is not a path"),
        (["--upstream-key", "x=/run/key", *UPSTREAM], "no --upstream has"),
        (["--policy", "fastest", *UPSTREAM], "least-load"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["gateway", *arguments]) == 2
    assert words in capsys.readouterr().err


# Real ones.

FAKE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self): self.say(b"ok")
    def do_POST(self): self.rfile.read(int(self.headers["content-length"])); self.say(b'{"by": "fake"}')
    def say(self, body):
        self.send_response(200); self.send_header("content-length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    # Killed, it leaves the folder of its admin socket: that goes with ours.
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        env = {**os.environ, "TMPDIR": folder}
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, process_group=0, env=env)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a worker that outlived it would hold its pipes
            process.communicate()


def ask(url: str, body: object = None, token: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=5) as answer:
        return json.loads(answer.read())


def until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("not within 5 s")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def three_workers(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str], int]]:
    """A gateway of three workers with the token "secret": its process, the addresses it told, its engine's port."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("secret")
    upstream = free_port()
    argv = [sys.executable, "-m", "penstock", "gateway", "--listen", "127.0.0.1:0", "--workers", "3", "--json"]
    argv += ["--upstream", f"m=http://127.0.0.1:{upstream}", "--admin", "127.0.0.1:0"]
    argv += ["--admin-token-file", str(token)]
    with running([sys.executable, "-c", FAKE, str(upstream)]), running(argv) as gateway:
        assert gateway.stdout is not None
        yield gateway, json.loads(gateway.stdout.readline()), upstream


@pytest.mark.processes
def test_workers_share_a_port_and_what_the_admin_address_hears(tmp_path: Path) -> None:
    with three_workers(tmp_path) as (gateway, facts, upstream):
        until(lambda: len(children(gateway.pid)) == 3)

        def count_ready() -> set[int]:
            # Each question is a connection of its own, which the kernel gives to one of the workers.
            return {ask(f"{facts['listen']}/health")["ready_replicas"] for _ in range(30)}

        until(lambda: count_ready() == {1})
        assert ask(f"{facts['listen']}/v1/chat/completions", {"model": "m"}) == {"by": "fake"}
        for path in ("drain", "undrain", "drain"):
            body = {"replica": f"127.0.0.1:{upstream}"}
            ask(f"{facts['admin']}/admin/{path}", body, "secret")
            expected = {1} if path == "undrain" else {0}
            until(lambda expected=expected: count_ready() == expected)
        # A worker that is killed comes back and is told of the drain.
        before = children(gateway.pid)
        os.kill(max(before), signal.SIGKILL)
        until(lambda: len(set(children(gateway.pid)) - set(before)) == 1)
        until(lambda: count_ready() == {0})
        workers = children(gateway.pid)
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(10) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.processes
def test_metrics_and_drains_outlive_each_worker(tmp_path: Path) -> None:
    with three_workers(tmp_path) as (gateway, facts, upstream):
        replica = {"replica": f"127.0.0.1:{upstream}"}

        def count() -> float:
            with urllib.request.urlopen(f"{facts['listen']}/metrics", timeout=5) as answer:
                return prometheus.parse(answer.read().decode()).get("penstock_requests_total", 0.0)

        def health() -> set[int]:
            return {ask(f"{facts['listen']}/health")["ready_replicas"] for _ in range(30)}

        until(lambda: len(children(gateway.pid)) == 3 and health() == {1})
        for _ in range(20):
            ask(f"{facts['listen']}/v1/chat/completions", {"model": "m"})
        until(lambda: count() == 20)
        ask(f"{facts['admin']}/admin/drain", replica, "secret")
        until(lambda: health() == {0})
        seen, was = [20.0], set(children(gateway.pid))
        for pid in sorted(was):  # worker 0, which has the admin address, is the first
            before = set(children(gateway.pid))
            os.kill(pid, signal.SIGKILL)
            until(lambda before=before: len(set(children(gateway.pid)) - before) == 1)
            for _ in range(20):
                assert health() == {0}
                seen.append(count())
        assert set(seen) == {20.0}
        assert not was & set(children(gateway.pid))
        view = ask(f"{facts['admin']}/admin/replicas", None, "secret")
        assert (view["requests_total"], view["replicas"][0]["is_draining"]) == (20, True)
        ask(f"{facts['admin']}/admin/undrain", replica, "secret")
        until(lambda: health() == {1})


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["1", "2"])
def test_store_that_cannot_be_opened_is_told_before_anybody_is_sent_here(workers: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "penstock", "gateway", "--listen", "127.0.0.1:0", "--workers", workers, *UPSTREAM]
    with running([*argv, "--auth", "keys", "--store", str(tmp_path / "absent" / "x.db")]) as gateway:
        told, error = gateway.communicate(timeout=20)
    assert (gateway.returncode, told) == (2, "")
    assert "could not use store" in error


@contextlib.contextmanager
def holding(workers: int) -> Iterator[subprocess.Popen[str]]:
    """A gateway that drains for as long as it may: one request waits for an engine that is not there."""
    argv = [sys.executable, "-m", "penstock", "gateway", "--listen", "127.0.0.1:0", "--json", *UPSTREAM]
    with running([*argv, "--workers", str(workers)]) as gateway:
        assert gateway.stdout is not None
        listen = json.loads(gateway.stdout.readline())["listen"]
        read_until(gateway, "serving on", workers)
        with socket.create_connection(("127.0.0.1", int(listen.rpartition(":")[2]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
            yield gateway


def read_until(gateway: subprocess.Popen[str], words: str, n_lines: int) -> None:
    assert gateway.stderr is not None
    for line in gateway.stderr:
        n_lines -= words in line
        if n_lines == 0:
            return
    raise AssertionError(f"it ended before it said {words!r}")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_second_signal_ends_it_at_once_with_1(workers: int) -> None:
    with holding(workers) as gateway:
        gateway.send_signal(signal.SIGTERM)
        read_until(gateway, "draining", workers)
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(10) == 1


@pytest.mark.processes
def test_ctrl_c_which_a_terminal_sends_to_every_process_is_one_signal() -> None:
    with holding(workers=2) as gateway:
        os.killpg(gateway.pid, signal.SIGINT)
        read_until(gateway, "stopped, 0 requests cut", 1)  # by the worker that holds nothing
        assert gateway.poll() is None
        os.killpg(gateway.pid, signal.SIGINT)
        assert gateway.wait(10) == 1


@pytest.mark.processes
def test_workers_end_with_a_parent_that_was_killed() -> None:
    argv = [sys.executable, "-m", "penstock", "gateway", "--listen", "127.0.0.1:0", "--workers", "2", *UPSTREAM]
    with running(argv) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdout.readline().startswith("listening on http://127.0.0.1:")
        until(lambda: len(children(gateway.pid)) == 2)
        workers = children(gateway.pid)
        gateway.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
