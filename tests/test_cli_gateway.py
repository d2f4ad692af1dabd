"""`penstock gateway`: its arguments, what it refuses, and how it ends. test_gateway_workers.py has several workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import waiting
from gateway_processes import begin, gateway_argv, read_until, running
from golden_files import table

from penstock.cli import gateway as cli_gateway
from penstock.cli import main
from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.observe.names import renames
from penstock.spec.gateway import Limits, QueueBounds, Upstream

UPSTREAM = ["--upstream", "m=http://127.0.0.1:9"]


def config_of(*arguments: str) -> Any:
    return cli_gateway.make_config(main.parser().parse_args(["gateway", *arguments]), Path("/run/x"))


def test_every_argument_becomes_a_setting() -> None:
    config = config_of(
        *("--upstream", "a=http://h:1", "--upstream", "a=unix:/e.sock", "--upstream", "b=http://h:2"),
        *("--alias", "a=gpt", "--auth", "keys", "--store", "postgresql://db/x", "--policy", "prefix"),
        *("--upstream-key", "a=/run/key", "--upstream-key", "b=env:KEY", "--ledger-days", "all"),
        *("--listen", "0.0.0.0:80", "--workers", "4", "--max-body-bytes", "1000", "--total-timeout", "9.5"),
        *("--max-in-flight", "7", "--queue-requests", "9", "--queue-bytes", "10", "--queue-key-share", "0.25"),
        *("--allow-origin", "https://a.example", "--path-prefix", "/p", "--engine-route", "/sleep", "--hold", "5"),
        *("--body-timeout", "3", "--stall-timeout", "4", "--drain", "6", "--tls-cert", "c", "--tls-key", "k"),
    )
    a, e = Upstream("http://h:1", "a", "/run/key"), Upstream("unix:/e.sock", "a", "/run/key")
    assert config == GatewayConfig(
        listen="0.0.0.0:80", admin="unix:/run/x/admin.sock", admin_token_file="", auth="keys", hold_s=5.0, drain_s=6.0,
        models=(ServedModel("a", ("gpt",)), ServedModel("b")), store="postgresql://db/x", ledger_days=None, workers=4,
        policy="prefix", max_in_flight=7, queue=QueueBounds(9, 10, 0.25), tls_cert="c", tls_key="k",
        limits=Limits(body_bytes=1000, total_s=9.5, body_s=3.0, stall_s=4.0), path_prefix="/p",
        upstreams=(a, e, Upstream("http://h:2", "b", key_env="KEY")), allowed_origins=("https://a.example",),
        engine_routes=("/sleep",), engine_families=("vllm:", "llamacpp:"),
        renamed={rename.old: rename.name for rename in renames()},
    )  # fmt: skip
    assert config_of(*UPSTREAM).ledger_days == 90


@pytest.mark.parametrize(("arguments", "words"), table("gateway_arguments.yaml"))
def test_wrong_arguments_are_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["gateway", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_folder_of_a_killed_gateway_is_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, unknown = tmp_path / "penstock-gw-killed", tmp_path / "penstock-gw-unknown"
    for folder in (killed, unknown, tmp_path / "other"):
        folder.mkdir()
    (killed / "lock").touch()
    (tmp_path / "other" / "lock").touch()
    with cli_gateway.admin_folder() as living, cli_gateway.admin_folder():
        assert (living.exists(), killed.exists(), unknown.exists()) == (True, False, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "penstock-gw-unknown"]


# Real ones.


@pytest.mark.processes
@pytest.mark.nightly
def test_store_that_cannot_be_opened_is_told_before_anybody_is_sent_here(tmp_path: Path) -> None:
    store = ("--auth", "keys", "--store", str(tmp_path / "absent" / "x.db"))
    with running(gateway_argv("--workers", "2", *UPSTREAM, *store)) as gateway:
        assert "could not use store" in begin(gateway)["error"]["message"]  # and no address
        assert waiting.end(gateway) == 2


@contextlib.contextmanager
def holding() -> Iterator[subprocess.Popen[str]]:
    """A gateway that drains for as long as it may: one request waits for an engine that is not there."""
    with running(gateway_argv("--workers", "2", *UPSTREAM)) as gateway:
        listen = begin(gateway)["listen"]
        read_until(gateway, "serving on", 2)
        with socket.create_connection(("127.0.0.1", int(listen.rpartition(":")[2]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            yield gateway


@pytest.mark.processes
def test_second_signal_ends_it_at_once_with_1() -> None:
    with holding() as gateway:
        gateway.send_signal(signal.SIGTERM)
        read_until(gateway, "draining", 2)
        gateway.send_signal(signal.SIGTERM)
        assert waiting.end(gateway) == 1


@pytest.mark.processes
@pytest.mark.nightly
def test_ctrl_c_which_a_terminal_sends_to_every_process_is_one_signal() -> None:
    with holding() as gateway:
        os.killpg(gateway.pid, signal.SIGINT)
        read_until(gateway, "stopped, 0 requests cut", 1)  # by the worker that holds nothing
        assert gateway.poll() is None
        os.killpg(gateway.pid, signal.SIGINT)
        assert waiting.end(gateway) == 1
