"""The simulator, its traces and references, and `penstock autoscale` with both."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Done, call

from penstock.deployment.autoscale import Policy
from penstock.errors import UserError
from penstock.spec.deployment import Replicas
from penstock.testing.scaling import traces
from penstock.testing.scaling.baselines import Hpa, static
from penstock.testing.scaling.comparison import Follower, run
from penstock.testing.scaling.scores import attainment, reference, scores
from penstock.testing.scaling.simulator import Capacity, simulate
from penstock.testing.scaling.traces import Arrival, Trace


def test_a_start_takes_its_time_and_a_drain_finishes_what_runs() -> None:
    arrivals = tuple(Arrival(n * 0.5, 100, 600) for n in range(600))  # 10 s each at 60 tokens/s
    trace = Trace("even", arrivals, 300.0)
    outcome = simulate(trace, lambda sample: 2 if sample.t < 100 else 1, Capacity(start_s=50), initial=1)
    assert outcome.ready[49] == 1 and outcome.ready[52] == 2 and outcome.ready[110] == 1
    assert outcome.paid[101] == 2 and outcome.paid[130] == 1 and outcome.lost == 0


def test_requests_wait_in_the_gateway_until_there_is_a_replica() -> None:
    trace = traces.named("silence", 3600)
    policy = Policy(Replicas(min=0, max=4), start_s=100)
    outcome = run(trace, Follower(policy), policy)
    assert outcome.lost == 0 and outcome.ttft_s[0] <= 1.2 * 100 + 15
    assert outcome.paid[1700] == 0 and outcome.paid[-1] == 0


@pytest.mark.parametrize("name", sorted(traces.NAMED))
def test_a_trace_is_the_same_each_time_and_in_order(name: str) -> None:
    trace = traces.named(name, 400.0, seed=3)
    assert trace == traces.named(name, 400.0, seed=3) and trace.duration_s == 400.0
    assert list(trace.arrivals) == sorted(trace.arrivals) and 0 <= trace.arrivals[0].t <= trace.arrivals[-1].t < 401


def test_a_trace_is_scaled_stretched_shuffled_and_repeated() -> None:
    trace = traces.named("noise", 600.0)
    count = len(trace.arrivals)
    assert len(traces.scaled(trace, 2.5).arrivals) == pytest.approx(2.5 * count, rel=0.05)
    assert len(traces.scaled(trace, 0.5).arrivals) == pytest.approx(0.5 * count, rel=0.05)
    longer = traces.stretched(trace, 2.0)
    assert longer.duration_s == 1200 and len(longer.arrivals) == 2 * count
    assert len(traces.shuffled(trace, 60.0, 1).arrivals) == count
    assert len(traces.repeated(trace, 900.0).arrivals) == pytest.approx(1.5 * count, rel=0.05)


def test_files_of_three_formats_are_read(tmp_path: Path) -> None:
    azure, burst, mooncake = (tmp_path / name for name in ("a.csv", "b.csv", "c.jsonl"))
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n")
    burst.write_text("Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45,ChatGPT,1087,230\n")
    mooncake.write_text('{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0]}\n')
    assert traces.read(azure).arrivals == (Arrival(0.0, 48, 10),)
    assert traces.read(burst).arrivals == (Arrival(0.0, 472, 18), Arrival(40.0, 1087, 230))
    assert traces.read(mooncake).arrivals == (Arrival(0.0, 6758, 500),)
    burst.write_text("Timestamp,Request tokens,Response tokens\n5,472,18\nx,1,1\n")
    with pytest.raises(UserError, match="line 3: not a request"):
        traces.read(burst)


@pytest.mark.simulation
def test_penstock_keeps_more_promises_than_hpa_for_less() -> None:
    trace, policy = traces.named("ramp", 5400.0), Policy(Replicas(min=1, max=16), start_s=100)
    known = reference(trace, Capacity(start_s=100))
    ours = scores(run(trace, Follower(policy), policy), known)
    theirs = scores(run(trace, Hpa(10, 1, 16), policy), known)
    assert ours.attainment > theirs.attainment and ours.replica_hours < theirs.replica_hours
    assert known.oracle_attainment >= 0.98 and known.oracle_hours < ours.replica_hours
    assert attainment(simulate(trace, static(known.peak), initial=known.peak)) >= 0.99


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    def replay(text: str, *words: object) -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return call("autoscale", "replay", "-", *words)

    return replay


def test_replay_prints_a_decision_for_each_sample(replayed: Callable[..., Done], tmp_path: Path) -> None:
    block, whole = tmp_path / "block.yaml", tmp_path / "whole.yaml"
    block.write_text("min: 0\nmax: 3\n")
    whole.write_text("replicas: {min: 0, max: 2, metric: in_flight, target: 1}\nworkload: {ttft_ms: 500}\n")
    lines = ['{"t": 1.5, "unknown": [1]}', "", '{"t": 2.5, "arrivals": 9.0, "prompt_tokens": 90000.4, "held": 900}']
    first, second = replayed("\n".join(lines), "--policy", block, "--start-s", 20).events
    assert first == {"t": 1.5, "replicas": 0, "reason": first["reason"]} and second["replicas"] == 3
    lines[2] = '{"t": 2.5, "in_flight": 9}'
    assert replayed("\n".join(lines), "--policy", whole).events[1]["replicas"] == 2
    for text, words in (
        ("min: 3\nmax: 2\nup: {policies: [{type: Pod, value: 1}]}\n", "replicas.up.policies[0].type"),
        ("", "is empty"),
    ):
        block.write_text(text)
        refused = replayed("", "--policy", block)
        assert refused.code == 2 and words in refused.err


@pytest.mark.processes
def test_replay_answers_each_line_before_it_reads_the_next() -> None:
    command = [sys.executable, "-m", "penstock", "autoscale", "replay", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for t in range(3):
            process.stdin.write(json.dumps({"t": t, "arrivals": 1, "prompt_tokens": 100}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["t"] == t
        process.stdin.close()
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # The third is a byte that is not UTF-8, as standard input has it.
        *((line, "it is not JSON") for line in ("{", '{"t": NaN}', "\udcff")),
        *((line, "it is not a sample") for line in ("[1]", '{"arrivals": 1}', '{"t": 1, "held": "x"}')),
        ('{"t": 1, "replicas": [{"state": "gone"}]}', "it is not a sample"),
        ('{"t": 1, "replicas": [{"running": -1}]}', "running is below 0"),
    ],
)
def test_replay_refuses_a_line_with_its_number(replayed: Callable[..., Done], line: str, words: str) -> None:
    done = replayed(f'{{"t": 0}}\n{line}\n')
    assert done.code == 2 and len(done.out.splitlines()) == 1
    assert f"standard input, line 2: {words}" in done.err


def test_simulate_prints_a_row_for_each_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "noise.svg"
    command = ["autoscale", "simulate", "--trace", "noise", "--hours", "0.05", "--scale-load", "0.3"]
    rows = call(*command, "--plot", picture).out.splitlines()
    assert [row.split()[0] for row in rows[1:6]] == ["penstock", "HPA,", "KEDA,", "Knative,", "always"]
    assert picture.read_text().startswith("<svg xmlns=")
    assert call(*command, "--json").json["scalers"]["penstock"]["lost"] == 0
    refused = call("autoscale", "simulate", "--trace", "nothing")
    assert refused.code == 2 and 'there is no trace "nothing"' in refused.err
