"""Sizing: worked numbers, refusals with their numbers, and how a machine is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from samples import DEMO, LLAMA_70B, cpu_machine, demo_plan, deployment, gpu_machine, sized

from penstock import planner
from penstock.errors import PlanError
from penstock.hardware import Machine
from penstock.models import ModelFacts
from penstock.planner import Plan, launch
from penstock.planner.launch import Sized
from penstock.spec.deployment import Parallel
from penstock.text import GIB, MIB

LLAMA = "meta-llama/Llama-3.1-70B-Instruct"
SMALL_LLAMA = msgspec.structs.replace(
    LLAMA_70B, weights_bytes=15 * GIB, n_layers=32, n_heads=32, n_kv_heads=8, max_position=131_072
)
SMALL: dict[str, Any] = {"model": "llama-3.1-8b", "facts": SMALL_LLAMA}
BOX = gpu_machine(8)


def on_gpus(
    machine: Machine = BOX,
    n_replicas: int = 1,
    model: str = "llama-3.1-70b",
    facts: ModelFacts = LLAMA_70B,
    **fields: Any,
) -> Plan:
    """The plan of a 70B model (131.4 GiB) on H100s of 79.1 GiB, unless told otherwise."""
    wanted = deployment(LLAMA, **fields)
    said = sized(wanted, machine, model, n_replicas)
    return launch.make_on_gpus(wanted, facts, machine, "0.33.0", n_replicas, said)


def test_kv_cache_of_llama_70b_is_320_kib_a_token() -> None:
    assert planner.kv_bytes_per_token(LLAMA_70B) == 327_680
    assert planner.kv_bytes_per_token(LLAMA_70B, dtype_bytes=1) == 163_840


def test_the_demo_model_on_a_cpu_is_counted_by_hand() -> None:
    made = demo_plan("vllm")
    # 2 * 4 layers * 4 heads * 32 * 2 bytes = 2 KiB a token; 8 requests of 1024 tokens = 16 MiB, raised to the least.
    assert made.need == planner.Need(6 * MIB, 64 * MIB, 1200 * MIB)
    assert made.need.total_bytes == 1270 * MIB
    assert (made.device, made.layout, made.executor) == ("cpu", Parallel(), "mp")
    assert (made.max_model_len, made.max_num_seqs, made.n_threads) == (1024, 8, 7)


def test_a_plan_carries_what_the_engine_needs_of_the_file() -> None:
    engine = {"max_model_len": 512, "args": {"seed": 1}, "env": {"A": "1"}, "drain_s": 5, "stall_s": 7}
    wanted = deployment(
        "penstock-demo", name="d", engine=engine, gateway={"aliases": ["x", "d"]}, workload={"concurrency": 3}
    )
    made = launch.make(wanted, DEMO, cpu_machine(), "vllm", "0.32.0", 1)
    assert made.served_names == ("d", "penstock-demo", "x")
    assert (made.max_model_len, made.max_num_seqs) == (512, 3)
    assert (made.args, made.env, made.drain_s, made.stall_s) == ({"seed": 1}, {"A": "1"}, 5, 7)
    assert (made.engine, made.engine_version, made.deployment) == ("vllm", "0.32.0", "d")


@pytest.mark.parametrize(
    ("fields", "free_gib", "kv_bytes"),
    [
        ({"engine": {"max_model_len": 2048}, "workload": {"concurrency": 4}}, 64, 4 * 2048 * 131_072),
        ({}, 55, 20 * GIB),
        ({}, 40, 131_072 * 131_072),  # one whole request, 16 GiB: more than half of the 25 GiB left
    ],
)
def test_kv_cache_covers_the_concurrency_up_to_half_of_what_the_weights_leave(
    fields: dict[str, Any], free_gib: int, kv_bytes: int
) -> None:
    made = launch.make(deployment(LLAMA, **fields), SMALL_LLAMA, cpu_machine(free_gib), "vllm", "1", 1)
    assert made.need.kv_cache_bytes == kv_bytes


def test_replicas_share_the_memory_of_a_machine() -> None:
    wanted = deployment(LLAMA, engine={"max_model_len": 32_768})
    one = launch.make(wanted, SMALL_LLAMA, cpu_machine(64), "vllm", "1", 1)
    two = launch.make(wanted, SMALL_LLAMA, cpu_machine(64), "vllm", "1", 2)
    assert one.need.kv_cache_bytes == (64 - 15) * GIB // 2
    assert two.need.kv_cache_bytes == (64 // 2 - 15) * GIB // 2
    assert 2 * two.need.total_bytes <= 64 * GIB
    cut = deployment(LLAMA, parallel={"tensor": 2}, engine={"max_model_len": 1024})
    ranks = launch.make(cut, SMALL_LLAMA, cpu_machine(64), "vllm", "1", 1)
    assert ranks.need.overhead_bytes == (1200 + 850) * MIB  # a worker process for each further rank


@pytest.mark.parametrize(("n_cpus", "n_replicas", "expected"), [(8, 1, 7), (8, 2, 3), (2, 1, 1), (1, 1, 1), (2, 4, 1)])
def test_threads_leave_one_for_the_rest(n_cpus: int, n_replicas: int, expected: int) -> None:
    made = launch.make(deployment(), DEMO, cpu_machine(n_cpus=n_cpus), "llamacpp", "1", n_replicas)
    assert made.n_threads == expected


def test_a_deployment_without_replicas_is_planned_for_one() -> None:
    assert launch.make(deployment(replicas=0), DEMO, cpu_machine(), "llamacpp", "1.0", 0) == demo_plan()


def test_only_vllm_runs_on_gpus() -> None:
    assert [launch.device_of(BOX, name) for name in ("vllm", "llamacpp", "fake")] == ["cuda", "cpu", "cpu"]
    assert launch.device_of(cpu_machine(), "vllm") == "cpu"


def refused(call: Callable[..., Plan | None], *args: Any, **fields: Any) -> tuple[str, str | None, str | None]:
    with pytest.raises(PlanError) as caught:
        call(*args, **fields)
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.detail, caught.value.hint


def test_the_layout_on_gpus_is_the_planners() -> None:
    """As `penstock plan` says of eight H100 (test_plan_solve): four of them, for the whole length."""
    made = on_gpus()
    assert (made.device, made.layout, made.max_model_len) == ("cuda", Parallel(tensor=4), 131_072)
    assert made.need.weights_bytes == pytest.approx(131.4 * GIB, rel=0.01)
    assert made.need.total_bytes <= 4 * 79.2 * GIB  # NCCL stands beside the engine's share
    assert made.forecast is not None and made.warnings == ()
    assert made.need.kv_cache_bytes == pytest.approx(4 * made.forecast.kv_cache_gib * GIB, rel=0.001)
    assert on_gpus(engine={"max_model_len": 8192}).layout == Parallel(tensor=2)
    kept = on_gpus(parallel={"tensor": 4, "pipeline": 2}, engine={"gpu_memory_utilization": 0.8})
    assert (kept.layout, kept.gpu_memory_utilization) == (Parallel(tensor=4, pipeline=2), 0.8)


def test_a_model_too_large_is_refused_in_the_planners_words_with_the_length_that_fits() -> None:
    machine = gpu_machine(2)
    said = sized(deployment(LLAMA), machine).sizing
    assert said is not None and not said.fits and said.kv is not None
    message, detail, hint = refused(on_gpus, machine)
    assert message == f'cannot place model "{LLAMA}" on box: {said.reason}'
    assert "one request of 131,072 tokens needs 20.00 GiB" in message
    assert (
        detail
        == "2 x NVIDIA H100 80GB HBM3 in box for a replica, vLLM 0.33.0, 131072 tokens a request, 0.92 of the memory."
    )
    longest = said.kv.largest_max_model_len
    assert hint == f"Set engine.max_model_len: {longest} (the largest that fits), or use more GPUs."
    assert on_gpus(machine, engine={"max_model_len": longest}).max_model_len == longest
    assert refused(on_gpus, machine, engine={"max_model_len": longest + 1})


def test_a_context_longer_than_the_models_is_refused_unless_vllm_is_told_to_take_it() -> None:
    longer = {"max_model_len": 131_073}
    message, _, hint = refused(on_gpus, engine=longer)
    assert message == f'cannot serve model "{LLAMA}" with max_model_len 131073'
    assert hint == "Set engine.max_model_len to 131072 or less."
    made = on_gpus(engine={**longer, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}})
    assert made.max_model_len == 131_073
    assert "over the model's 131,072" in made.warnings[0]


def test_replicas_share_the_gpus_of_a_machine() -> None:
    assert on_gpus(gpu_machine(4), 4, **SMALL).layout == Parallel()


@pytest.mark.parametrize(
    ("n_gpus", "n_replicas", "fields", "message", "detail", "hint"),
    [
        (1, 1, {}, "weights take 131.45 GiB of a GPU", "1 x NVIDIA H100", "Use more GPUs"),
        (4, 2, {}, "no layout fits 2 GPUs; the nearest: ", "2 of 4 x NVIDIA H100 80GB HBM3 in box for a replica, ", ""),
        (8, 1, {"hardware": {"gpus_per_node": 2}}, "one request of 131,072 tokens needs 20.00 GiB", "", ""),
        (8, 1, {"parallel": {"tensor": 3}}, "on box: 64 attention heads do not divide by tensor 3", "", ""),
        (
            *(8, 2, {"hardware": {"gpus_per_node": 4}, "parallel": {"tensor": 4}}),
            *("cannot place 2 x 4 ranks on box", "parallel: tensor 4", ""),
        ),
        (
            *(4, 2, {**SMALL, "parallel": {"tensor": 2, "pipeline": 2}}),
            "cannot place 2 x 4 ranks on box: it has 4 GPUs, 4 with 92% of the memory free",
            *("parallel: tensor 2, pipeline 2, data 1; free: GPU 0 80.0 GiB, GPU 1", "nvidia-smi"),
        ),
    ],
)
def test_what_the_gpus_cannot_hold_is_refused_with_the_numbers(
    n_gpus: int, n_replicas: int, fields: dict[str, Any], message: str, detail: str, hint: str
) -> None:
    error = refused(on_gpus, gpu_machine(n_gpus), n_replicas, **fields)
    assert message in error[0] and str(error[1]).startswith(detail) and hint in str(error[2])


def test_a_gpu_that_another_process_fills_does_not_count() -> None:
    box = gpu_machine(2)
    full = msgspec.structs.replace(box.gpus[0], memory_free_bytes=20 * GIB)
    busy = msgspec.structs.replace(box, gpus=(full, box.gpus[1]))
    assert [gpu.index for gpu in launch.usable_gpus(busy, 0.92)] == [1]
    made = on_gpus(busy, **SMALL)
    assert made.layout == Parallel()
    launch.check_room(deployment(LLAMA), made, busy, n_more=1)
    for message, _, _ in (
        refused(on_gpus, busy, 2, **SMALL),
        refused(launch.check_room, deployment(LLAMA), made, busy, n_more=2),
    ):
        assert message == "cannot place 2 x 1 ranks on box: it has 2 GPUs, 1 with 92% of the memory free"


def test_what_is_not_modelled_is_started_all_the_same_with_a_warning() -> None:
    wanted, unknown = deployment(LLAMA, engine={"max_model_len": 4096}), Sized(not_modelled="cannot plan x: no")
    odd = msgspec.structs.replace(LLAMA_70B, n_heads=12)
    made = launch.make_on_gpus(wanted, odd, BOX, "0.33.0", 1, unknown)
    assert (made.layout, made.max_model_len, made.forecast) == (Parallel(tensor=6), 4096, None)
    assert made.warnings[0].startswith("not planned: cannot plan x: no; vLLM is started anyway")
    two = launch.make_on_gpus(wanted, odd, BOX, "0.33.0", 2, unknown)
    assert two.layout == Parallel(tensor=4)
    fixed = deployment(LLAMA, parallel={"tensor": 5})
    message, _, hint = refused(launch.make_on_gpus, fixed, odd, BOX, "0.33.0", 1, unknown)
    assert message == f'cannot cut model "{LLAMA}" over tensor: 5'
    assert hint == "Set parallel.tensor to one of 1, 2, 3, 4, 6, 12."


def test_targets_that_are_missed_are_told() -> None:
    made = on_gpus(workload={"ttft_ms": 1, "tpot_ms": 1000}, engine={"max_model_len": 8192})
    (warning,) = made.warnings
    assert warning.startswith("workload.ttft_ms 1 is missed: likely ")
    on_cpu = launch.make(deployment(workload={"tpot_ms": 9}), DEMO, cpu_machine(), "llamacpp", "1", 1)
    assert on_cpu.warnings == ("workload.tpot_ms is not checked: speed is planned for vLLM on GPUs alone",)


def test_more_replicas_are_checked_with_the_memory_that_each_takes() -> None:
    wanted, made = deployment(), demo_plan("vllm")  # 1270 MiB each
    launch.check_room(wanted, made, cpu_machine(3), n_more=2)
    message, _, _ = refused(launch.check_room, wanted, made, cpu_machine(3), n_more=3)
    assert message == 'cannot place model "penstock-demo" on desk: needs 3.7 GiB, has free 3.0 GiB'


@pytest.mark.parametrize(
    ("fields", "engine", "n_replicas", "message", "detail", "hint"),
    [
        (
            *({"engine": {"max_model_len": 1024}}, "vllm", 3),
            'cannot place model "penstock-demo" on desk: needs 3.7 GiB, has free 2.0 GiB',
            "3 replicas x (Weights 6.0 MiB + KV cache 64.0 MiB (1024 tokens a request) + engine 1.2 GiB (estimate)); "
            "32.0 GiB of memory in all.",
            "Use a smaller or quantised model, a lower engine.max_model_len, fewer replicas, or a larger machine.",
        ),
        (
            *({"engine": {"max_model_len": 2000}}, "vllm", 1),
            'cannot serve model "penstock-demo" with max_model_len 2000',
            "Its own files allow 1024 tokens (max_position_embeddings or context_length).",
            "Set engine.max_model_len to 1024 or less.",
        ),
        (
            *({"parallel": {"tensor": 3}}, "vllm", 1),
            'cannot cut model "penstock-demo" over tensor: 3',
            "Its 8 attention heads do not divide by 3.",
            "Set parallel.tensor to one of 1, 2, 4, 8.",
        ),
        (
            *({"parallel": {"tensor": 4}}, "llamacpp", 1),
            "cannot cut a model over 4 ranks on engine llamacpp: it runs in one process",
            *(None, "Remove parallel and hardware.nodes, or use --engine vllm."),
        ),
    ],
)
def test_what_the_cpu_cannot_take_is_refused(
    fields: dict[str, Any], engine: str, n_replicas: int, message: str, detail: str | None, hint: str
) -> None:
    wanted = deployment(**fields)
    assert refused(launch.make, wanted, DEMO, cpu_machine(2), engine, "1", n_replicas) == (message, detail, hint)
