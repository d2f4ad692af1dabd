"""The fake engine as a process: its start, its signals, its child, its deaths, as those of real vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.errors import PenstockError
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_engine.running import AsProcess, as_process
from penstock.wire.client import Chunk, Client, HttpError, Reply

pytestmark = pytest.mark.processes

HI = [{"role": "user", "content": "tell me a story"}]
SLOW = ("--model", "m", "--ttft-s", "0", "--tokens-per-s", "50")


def wait_until(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_healthy(engine: AsProcess) -> bool:
    try:
        Client(engine.url, timeout_s=5).get_json("/version")
    except PenstockError:
        return False
    return True


@contextlib.contextmanager
def core_of(engine: AsProcess) -> Iterator[psutil.Process]:
    """The engine's EngineCore child; killed on the way out if it is still there."""
    engine.wait_for("Starting to load model")
    (core,) = psutil.Process(engine.process.pid).children()
    try:
        yield core
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            core.kill()


def is_gone(process: psutil.Process) -> bool:
    """Nobody reaps an orphan in some containers: a zombie is gone, too."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_it_answers_a_moment_after_its_start() -> None:
    with as_process("--model", "m") as engine:
        assert Client(engine.url).chat(HI, max_tokens=3).text == expected_text("tell me a story", 3)


def test_nothing_answers_before_the_weights_are_loaded() -> None:
    with as_process("--model", "m", "--load-s", "0.4", is_ready=False) as engine:
        engine.wait_for("Starting to load model")
        port = int(engine.log().partition("'port': ")[2].partition(",")[0])
        with pytest.raises(PenstockError, match="connection refused"):
            Client(f"http://127.0.0.1:{port}").models()
        engine.wait_until_ready()
        assert engine.url.endswith(str(port))
        assert "Loading safetensors checkpoint shards: 100% Completed | 4/4" in engine.log()


def test_a_taken_port_ends_it_with_the_words_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with as_process("--model", "m", "--port", str(port), is_ready=False) as engine:
            assert engine.process.wait(10) == 1
            assert "OSError: [Errno 98] Address already in use" in engine.log()


def test_a_wrong_flag_ends_it_with_code_2() -> None:
    with as_process("--model", "m", "--no-such-flag", is_ready=False) as engine:
        assert engine.process.wait(10) == 2
        assert "unrecognized arguments: --no-such-flag" in engine.log()


def test_too_little_memory_ends_it_with_code_1_and_the_cause() -> None:
    with as_process("--model", "m", "--oom", is_ready=False) as engine:
        assert engine.process.wait(10) == 1
        assert "estimated maximum model length is 256" in engine.log()


def test_a_fault_once_is_over_at_the_next_start(tmp_path: Path) -> None:
    flags = ("--model", "m", "--crash-at-start", "boom", "--fault-once", str(tmp_path / "done"), "--child")
    with as_process(*flags, is_ready=False) as engine:
        assert engine.process.wait(10) == 1
        assert "RuntimeError: boom" in engine.log()
    with as_process(*flags) as engine:
        assert is_healthy(engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_it_ends_at_once_with_code_0_and_takes_its_child_along(number: signal.Signals) -> None:
    with as_process("--model", "m", "--child") as engine, core_of(engine) as core:
        engine.process.send_signal(number)
        assert engine.process.wait(10) == 0
        assert is_gone(core)
        assert "Application shutdown complete." in engine.log()


def test_without_a_shutdown_timeout_a_stream_ends_with_an_error() -> None:
    with as_process(*SLOW) as engine:
        stream = Client(engine.url).stream_chat(HI, max_tokens=1000)
        next(stream)
        engine.process.terminate()
        with pytest.raises(PenstockError, match="EngineCore encountered an issue"):
            list(stream)
        assert engine.process.wait(10) == 0


def test_with_a_shutdown_timeout_it_drains_and_refuses_what_is_new() -> None:
    with as_process(*SLOW, "--shutdown-timeout", "20") as engine:
        client = Client(engine.url)
        stream = client.stream_chat(HI, max_tokens=40)
        next(stream)
        engine.process.terminate()
        engine.wait_for("draining in-flight requests")
        assert is_healthy(engine)
        with pytest.raises(HttpError, match="cannot schedule new futures after shutdown"):
            client.chat(HI)
        *_, reply = stream
        assert isinstance(reply, Reply)
        assert reply.text == expected_text("tell me a story", 40)
        assert engine.process.wait(10) == 0


def test_a_drain_that_takes_too_long_is_cut() -> None:
    with as_process(*SLOW, "--shutdown-timeout", "0.2") as engine:
        stream = Client(engine.url).stream_chat(HI, max_tokens=1000)
        next(stream)
        engine.process.terminate()
        with pytest.raises(PenstockError, match="EngineCore"):
            list(stream)
        assert engine.process.wait(10) == 0


def test_sigterm_while_loading_ends_it_or_is_ignored_as_asked() -> None:
    with as_process("--model", "m", "--load-s", "5", "--child", is_ready=False) as engine, core_of(engine) as core:
        engine.process.terminate()
        assert engine.process.wait(10) == -signal.SIGTERM
        assert is_gone(core)
    with as_process("--model", "m", "--load-s", "0.3", "--ignore-sigterm-while-loading", is_ready=False) as engine:
        engine.wait_for("Starting to load model")
        engine.process.terminate()
        engine.wait_until_ready()
        assert is_healthy(engine)
        engine.process.terminate()
        assert engine.process.wait(10) == 0


def test_an_engine_that_ignores_sigterm_must_be_killed() -> None:
    with as_process("--model", "m", "--ignore-sigterm") as engine:
        engine.process.terminate()
        assert is_healthy(engine)
        engine.process.kill()
        assert engine.process.wait(10) == -signal.SIGKILL


def test_the_child_looks_like_an_engine_core_and_outlives_a_killed_parent() -> None:
    with as_process("--model", "m", "--child") as engine, core_of(engine) as core:
        wait_until(lambda: core.cmdline() == ["VLLM::EngineCore"])
        assert core.name() == "VLLM::EngineCore"
        assert f"(EngineCore pid={core.pid})" in engine.log()
        engine.process.kill()
        engine.process.wait(10)
        assert core.is_running()


def test_the_death_of_the_child_breaks_health_and_streams_and_then_ends_the_parent() -> None:
    with as_process(*SLOW, "--child") as engine, core_of(engine) as core:
        client = Client(engine.url)
        stream = client.stream_chat(HI, max_tokens=1000)
        next(stream)
        core.kill()
        with pytest.raises(PenstockError, match="EngineCore encountered an issue"):
            list(stream)
        with pytest.raises(HttpError) as seen:
            client.get_json("/health")
        assert seen.value.status == 503
        assert engine.process.wait(10) == 1
        assert "EngineDeadError" in engine.log()


def test_a_crash_mid_stream_kills_the_process_and_its_child() -> None:
    with as_process(*SLOW, "--child", "--crash-mid-stream", "3") as engine, core_of(engine) as core:
        stream = Client(engine.url).stream_chat(HI, max_tokens=1000)
        texts = []
        with pytest.raises(PenstockError, match="lost the connection"):
            for item in stream:
                assert isinstance(item, Chunk)
                texts.append(item.text)
        assert "".join(texts) == expected_text("tell me a story", 3)
        assert engine.process.wait(10) == 1
        assert is_gone(core)


def test_nothing_is_left_when_the_block_is_left() -> None:
    with as_process("--model", "m", "--child") as engine:
        core = psutil.Process(engine.process.pid).children()[0]
        os.kill(engine.process.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(core))
