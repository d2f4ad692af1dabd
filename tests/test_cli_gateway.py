"""`penstock gateway`: its arguments, what it refuses, and how it ends. test_gateway_workers.py has several workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_processes import read_until, running

from penstock.cli import gateway as cli_gateway
from penstock.cli import main

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
