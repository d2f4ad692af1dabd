"""The fake engine as a process: its start, its signals, its child, its deaths, as those of real vLLM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import psutil
import pytest
import waiting

from penstock.errors import PenstockError
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_engine.running import AsProcess, as_process
from penstock.wire.answers import HttpError, Reply
from penstock.wire.client import Client

pytestmark = pytest.mark.processes

HI = [{"role": "user", "content": "tell me a story"}]
SLOW = ("--model", "m", "--ttft-s", "0", "--tokens-per-s", "50")


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


@pytest.mark.nightly
@pytest.mark.parametrize("drain_s", [None, "0.2", "20"])
def test_it_drains_for_as_long_as_asked_and_refuses_what_is_new(drain_s: str | None) -> None:
    with as_process(*SLOW, *(("--shutdown-timeout", drain_s) if drain_s else ())) as engine:
        client = Client(engine.url)
        stream = client.stream_chat(HI, max_tokens=40 if drain_s == "20" else 1000)
        next(stream)
        engine.process.terminate()
        if drain_s == "20":
            engine.wait_for("draining in-flight requests")
            with pytest.raises(HttpError, match="cannot schedule new futures after shutdown"):
                client.chat(HI)
            *_, reply = stream
            assert isinstance(reply, Reply)
            assert reply.text == expected_text("tell me a story", 40)
        else:
            with pytest.raises(PenstockError, match="EngineCore encountered an issue"):
                list(stream)
        assert waiting.end(engine.process) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_its_child_looks_like_an_engine_core_and_outlives_only_a_killed_parent(number: signal.Signals) -> None:
    with as_process("--model", "m", "--child") as engine, core_of(engine) as core:
        engine.wait_until_ready()
        assert (core.name(), core.cmdline()) == ("VLLM::EngineCore", ["VLLM::EngineCore"])
        engine.process.send_signal(number)
        is_killed = number == signal.SIGKILL
        assert waiting.end(engine.process) == (-number if is_killed else 0)
        assert is_gone(core) is not is_killed
        assert is_killed or "Application shutdown complete." in engine.log()


@pytest.mark.nightly
def test_sigterm_while_loading_ends_it_or_is_ignored_as_asked() -> None:
    with as_process("--model", "m", "--load-s", "5", "--child", is_ready=False) as engine, core_of(engine) as core:
        engine.process.terminate()
        assert waiting.end(engine.process) == -signal.SIGTERM
        assert is_gone(core)
    with as_process("--model", "m", "--load-s", "0.3", "--ignore-sigterm-while-loading", is_ready=False) as engine:
        engine.wait_for("Starting to load model")
        engine.process.terminate()
        engine.wait_until_ready()
        engine.process.terminate()
        assert waiting.end(engine.process) == 0


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
        assert waiting.end(engine.process) == 1
        assert "EngineDeadError" in engine.log()
