"""The bundled model on the embedded engine, behind the real gateway. One deployment for the file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import real_engine
from real_engine import Live

from penstock.testing.demo_prompts import DEMO_PROMPTS

pytestmark = pytest.mark.llamacpp


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with real_engine.deployed("llamacpp", "real-llamacpp") as running:
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


@pytest.mark.parametrize(
    ("role", "part"), [("controller", "controller"), ("gateway", "gateway"), ("engine", "replica")]
)
def test_a_killed_part_comes_back(live: Live, role: str, part: str) -> None:
    real_engine.check_killed(live, role, part)


def test_a_second_replica_serves_and_goes_again(live: Live) -> None:
    assert live.command("scale", live.name, "2").returncode == 0
    assert [replica["state"] for replica in live.status()["replicas"]] == ["ready", "ready"]
    assert live.command("scale", live.name, "1").returncode == 0
    assert [replica["state"] for replica in live.status()["replicas"]] == ["ready"]
    real_engine.check_openai_client(live)


def test_chat_prints_one_answer(live: Live) -> None:
    done = live.command("chat", live.name, "-m", "What is the capital of South Korea?")
    assert done.returncode == 0, done.stderr
    assert "Seoul" in done.stdout
