"""What `bench serve` makes of a run as a whole: its exit code, and where a trace ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.bench.results import validity
from penstock.cli import main
from penstock.models import files
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.running import InThread, in_thread

pytestmark = pytest.mark.processes  # a server in a thread: sockets


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[InThread]:
    """A server in a thread, whose CPU time and lateness would be the generator's."""
    monkeypatch.setattr(validity, "MAX_CPU_SHARE", 1e9)
    monkeypatch.setattr(validity, "MAX_LATENESS_MS", 1e9)
    with in_thread(Options(model="m", ttft_s=0, tokens_per_s=float("inf"))) as running:
        yield running


def test_a_run_that_is_not_valid_exits_with_1(
    engine: InThread, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validity, "MAX_LATENESS_MS", -1.0)
    words = "bench serve --model m --requests 2 --concurrency 1 --warmup 0 --max-tokens 1 --json --url"
    assert main.run([*words.split(), engine.url]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["valid"]) == (2, False)
    assert "late at p99" in result["invalid_because"][0]


def test_a_trace_alone_is_replayed_whole(
    engine: InThread, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"timestamp": index * 20, "input_length": 5, "output_length": 1} for index in range(7)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--dataset", f"replay:{tmp_path / 't.jsonl'}", "--tokenizer", str(files.BUNDLED), "--json"]
    assert main.run(["bench", "serve", "--url", engine.url, "--model", "m", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["pace"]["arrival"], result["pace"]["n_requests"]) == (7, "replay", 7)


def test_a_trace_is_replayed_to_its_end(engine: InThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"prompt": "a", "max_tokens": 1, "offset_s": index * 1e-4} for index in range(1200)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = f"bench serve --url {engine.url} --model m --arrival replay --no-stream --json --out {tmp_path}/o"
    assert main.run([*words.split(), "--dataset", f"jsonl:{trace}"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] + result["failed"] == 1200
