"""The bundled model on the embedded engine and on real vLLM, behind the real gateway. One model load an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_engine
from real_engine import Live

from penstock.testing.demo_prompts import DEMO_PROMPTS

# The toy model fills an answer up with blanks where a grammar allows them.
FLAGS = {
    "vllm": (
        "--set",
        """engine.args.structured-outputs-config='{"backend":"xgrammar","disable_any_whitespace":true}'""",
    )
}
ENGINES = [pytest.param("llamacpp", marks=pytest.mark.llamacpp), pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with real_engine.deployed(request.param, f"real-{request.param}", *FLAGS.get(request.param, ())) as running:
        yield running


def test_greedy_answers_are_the_reference_texts(live: Live) -> None:
    real_engine.check_prompts(live)


def test_a_streamed_answer_is_the_same_text_in_pieces(live: Live) -> None:
    river = next(row for row in DEMO_PROMPTS if "river" in row.prompt)
    real_engine.check_stream(live, river.prompt, river.text)


def test_the_openai_client_works(live: Live) -> None:
    real_engine.check_openai_client(live)


def test_what_cannot_be_answered_is_refused_in_openai_shape(live: Live) -> None:
    real_engine.check_refusals(live)


def test_a_json_schema_reaches_the_engine(live: Live) -> None:
    real_engine.check_json_schema(live)


def test_chat_prints_one_answer(live: Live) -> None:
    done = live.command("chat", live.name, "-m", "What is the capital of South Korea?")
    assert done.returncode == 0, done.stderr
    assert "Seoul" in done.stdout


def test_a_load_test_measures_it(live: Live, tmp_path: Path) -> None:
    words = "--requests 12 --concurrency 3 --input-tokens 8 --output-tokens 8 --json --out"
    done = live.command("bench", "serve", live.name, *words.split(), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["completed"], result["failed"]) == (12, 0)
    assert 12 <= result["total_output_tokens"] <= 96
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]
    assert sum(result["replicas"].values()) == 12
    # What was launched is kept beside what was measured, and the page shows both.
    plan = json.loads((tmp_path / "out" / "plan.json").read_text("utf-8"))
    assert result["versions"][plan["engine"]] == plan["engine_version"]
    assert (tmp_path / "out" / "spec.yaml").exists()
    assert "<svg" in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("live", "role", "part"),
    [
        pytest.param(engine, role, part, marks=[getattr(pytest.mark, engine), *marks], id=f"{engine}-{role}")
        for engine, marks in (("llamacpp", []), ("vllm", [pytest.mark.nightly]))
        for role, part in (("controller", "controller"), ("gateway", "gateway"), ("engine", "replica"))
    ],
    indirect=["live"],
)
def test_a_killed_part_comes_back(live: Live, role: str, part: str) -> None:
    real_engine.check_killed(live, role, part)


@pytest.mark.vllm
@pytest.mark.parametrize("live", ENGINES[1:], indirect=True)
def test_a_killed_engine_core_takes_the_engine_with_it_and_comes_back(live: Live) -> None:
    real_engine.check_killed(live, "EngineCore", "replica")


@pytest.mark.llamacpp
@pytest.mark.parametrize("live", ENGINES[:1], indirect=True)
def test_a_second_replica_serves_and_goes_again(live: Live) -> None:
    assert live.command("scale", live.name, "2").returncode == 0
    assert [replica["state"] for replica in live.status()["replicas"]] == ["ready", "ready"]
    assert live.command("scale", live.name, "1").returncode == 0
    assert [replica["state"] for replica in live.status()["replicas"]] == ["ready"]
    real_engine.check_openai_client(live)


@pytest.mark.vllm
def test_vllm_that_refuses_its_settings_says_why() -> None:
    """A start that cannot work: exit code 1, our reading, vLLM's last lines, and nothing left."""
    with real_engine.a_home() as home:
        live = Live(home, "refused")
        flags = ("--port", "0", "--set", "engine.args.dtype=float99")
        done = live.command("up", "--name", "refused", "--engine", "vllm", *flags)
        assert done.returncode == 1
        assert 'could not start replica 0 of "refused": vLLM exited with code 2: vLLM refused' in done.stderr
        assert "float99" in done.stderr
        assert "hint: Check engine.args" in done.stderr
        assert live.status()["phase"] == "failed"
        real_engine.assert_nothing_left(live, set())
