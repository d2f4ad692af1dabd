"""Sizing: worked numbers, refusals with their numbers, and how a machine is shared."""

from __future__ import annotations

import msgspec
import pytest
from samples import DEMO, LLAMA_70B, cpu_machine, demo_plan, deployment, gpu_machine

from penstock import plan
from penstock.errors import PlanError
from penstock.plan import ModelFacts, Plan
from penstock.spec import Parallel
from penstock.units import GIB, MIB

LLAMA = "meta-llama/Llama-3.1-70B-Instruct"
SMALL_LLAMA = msgspec.structs.replace(
    LLAMA_70B, weights_bytes=15 * GIB, n_layers=32, n_heads=32, n_kv_heads=8, max_position=131_072
)


def planned(model: ModelFacts = LLAMA_70B, n_gpus: int = 0, n_replicas: int = 1, **fields: object) -> Plan:
    machine = gpu_machine(n_gpus) if n_gpus else cpu_machine()
    return plan.make(deployment(LLAMA, **fields), model, machine, "vllm", "0.33.0", n_replicas)


def test_kv_cache_of_llama_70b_is_320_kib_a_token() -> None:
    assert plan.kv_bytes_per_token(LLAMA_70B) == 327_680
    assert plan.kv_bytes_per_token(LLAMA_70B, dtype_bytes=1) == 163_840


def test_the_demo_model_on_a_cpu_is_counted_by_hand() -> None:
    made = demo_plan("vllm")
    # 2 * 4 layers * 4 heads * 32 * 2 bytes = 2 KiB a token; 8 requests of 1024 tokens = 16 MiB, raised to the least.
    assert made.need == plan.Need(6 * MIB, 64 * MIB, 1200 * MIB)
    assert made.need.total_bytes == 1270 * MIB
    assert (made.device, made.layout, made.executor) == ("cpu", Parallel(), "mp")
    assert (made.max_model_len, made.max_num_seqs, made.n_threads) == (1024, 8, 7)


def test_a_plan_carries_what_the_engine_needs_of_the_file() -> None:
    engine = {"max_model_len": 512, "args": {"seed": 1}, "env": {"A": "1"}, "drain_s": 5, "stall_s": 7}
    wanted = deployment(
        "penstock-demo", name="d", engine=engine, gateway={"aliases": ["x", "d"]}, workload={"concurrency": 3}
    )
    made = plan.make(wanted, DEMO, cpu_machine(), "vllm", "0.32.0", 1)
    assert made.served_names == ("d", "penstock-demo", "x")
    assert (made.max_model_len, made.max_num_seqs) == (512, 3)
    assert (made.args, made.env, made.drain_s, made.stall_s) == ({"seed": 1}, {"A": "1"}, 5, 7)
    assert (made.engine, made.engine_version, made.deployment) == ("vllm", "0.32.0", "d")


def test_kv_cache_covers_the_concurrency_up_to_half_of_what_the_weights_leave() -> None:
    few = deployment(LLAMA, engine={"max_model_len": 2048}, workload={"concurrency": 4})
    asked = plan.make(few, SMALL_LLAMA, cpu_machine(64), "vllm", "1", 1)
    assert asked.need.kv_cache_bytes == 4 * 2048 * 131_072
    made = plan.make(deployment(LLAMA), SMALL_LLAMA, cpu_machine(55), "vllm", "1", 1)
    assert made.need.kv_cache_bytes == 20 * GIB


def test_kv_cache_holds_at_least_one_whole_request() -> None:
    made = plan.make(deployment(LLAMA), SMALL_LLAMA, cpu_machine(40), "vllm", "1", 1)
    assert made.need.kv_cache_bytes == 131_072 * 131_072  # 16 GiB, more than half of the 25 GiB left


def test_replicas_share_the_memory_of_a_machine() -> None:
    wanted = deployment(LLAMA, engine={"max_model_len": 32_768})
    one = plan.make(wanted, SMALL_LLAMA, cpu_machine(64), "vllm", "1", 1)
    two = plan.make(wanted, SMALL_LLAMA, cpu_machine(64), "vllm", "1", 2)
    assert one.need.kv_cache_bytes == (64 - 15) * GIB // 2
    assert two.need.kv_cache_bytes == (64 // 2 - 15) * GIB // 2
    assert 2 * two.need.total_bytes <= 64 * GIB


@pytest.mark.parametrize(("n_cpus", "n_replicas", "expected"), [(8, 1, 7), (8, 2, 3), (2, 1, 1), (1, 1, 1), (2, 4, 1)])
def test_threads_leave_one_for_the_rest(n_cpus: int, n_replicas: int, expected: int) -> None:
    made = plan.make(deployment(), DEMO, cpu_machine(n_cpus=n_cpus), "llamacpp", "1", n_replicas)
    assert made.n_threads == expected


def test_a_deployment_without_replicas_is_planned_for_one() -> None:
    assert plan.make(deployment(replicas=0), DEMO, cpu_machine(), "llamacpp", "1.0", 0) == demo_plan()


@pytest.mark.parametrize(
    ("model", "n_gpus", "tensor"), [(SMALL_LLAMA, 1, 1), (SMALL_LLAMA, 8, 1), (LLAMA_70B, 2, 2), (LLAMA_70B, 8, 2)]
)
def test_a_model_is_cut_over_the_fewest_gpus_that_hold_it(model: ModelFacts, n_gpus: int, tensor: int) -> None:
    made = planned(model, n_gpus)
    assert made.layout == Parallel(tensor=tensor)
    assert made.device == "cuda"
    assert made.need.overhead_bytes == int(2.5 * GIB) * tensor


def test_only_divisors_of_the_heads_are_chosen() -> None:
    odd = msgspec.structs.replace(LLAMA_70B, n_heads=56)  # 2.4 GPUs' worth of weights: 3 does not divide 56
    assert planned(msgspec.structs.replace(odd, weights_bytes=170 * GIB), 8).layout.tensor == 4


def test_a_layout_in_the_file_is_kept() -> None:
    made = planned(LLAMA_70B, 8, parallel={"tensor": 4, "pipeline": 2}, engine={"gpu_memory_utilization": 0.8})
    assert made.layout == Parallel(tensor=4, pipeline=2)
    assert made.gpu_memory_utilization == 0.8


def test_an_engine_without_gpu_support_is_planned_on_the_cpu() -> None:
    assert plan.make(deployment(), DEMO, gpu_machine(2), "llamacpp", "1", 1).device == "cpu"


def refused(call: object = planned, *args: object, **fields: object) -> tuple[str, str | None, str | None]:
    assert callable(call)
    with pytest.raises(PlanError) as caught:
        call(*args, **fields)
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.detail, caught.value.hint


def test_a_model_too_large_for_the_gpus_is_refused_with_the_sum() -> None:
    assert refused(planned, LLAMA_70B, 1) == (
        'cannot place model "meta-llama/Llama-3.1-70B-Instruct" on box: needs 134 GiB, 1 GPU(s) give 73.6 GiB',
        "Weights 131 GiB + KV cache 64.0 MiB (131072 tokens a request) + engine 2.5 GiB (estimate); "
        "1.0 TiB of memory in all.",
        "Use a smaller or quantised model, a lower engine.max_model_len, fewer replicas, or a larger machine.",
    )


def test_replicas_too_large_for_a_machine_are_refused_with_the_sum() -> None:
    message, detail, _ = refused(
        plan.make, deployment(engine={"max_model_len": 1024}), DEMO, cpu_machine(2), "vllm", "1", 3
    )
    assert message == 'cannot place model "penstock-demo" on desk: needs 3.7 GiB, has free 2.0 GiB'
    assert detail == (
        "3 replicas x (Weights 6.0 MiB + KV cache 64.0 MiB (1024 tokens a request) + engine 1.2 GiB (estimate)); "
        "32.0 GiB of memory in all."
    )


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert refused(planned, LLAMA_70B, 8, engine={"max_model_len": 200_000}) == (
        'cannot serve model "meta-llama/Llama-3.1-70B-Instruct" with max_model_len 200000',
        "Its own files allow 131072 tokens (max_position_embeddings or context_length).",
        "Set engine.max_model_len to 131072 or less.",
    )


def test_heads_that_do_not_divide_are_refused_with_what_would() -> None:
    message, detail, hint = refused(planned, DEMO, 8, parallel={"tensor": 3})
    assert message == 'cannot cut model "meta-llama/Llama-3.1-70B-Instruct" over tensor: 3'
    assert detail == "Its 8 attention heads do not divide by 3."
    assert hint == "Set parallel.tensor to one of 1, 2, 4, 8."


def test_on_gpus_the_kv_cache_is_what_weights_and_engine_leave() -> None:
    made = planned(SMALL_LLAMA, 2, parallel={"tensor": 2}, engine={"gpu_memory_utilization": 0.5})
    assert made.need.total_bytes == 80 * GIB  # half of two cards of 80 GiB
    assert made.need.kv_cache_bytes == 80 * GIB - made.need.weights_bytes - 2 * int(2.5 * GIB)


def test_more_ranks_than_gpus_are_refused() -> None:
    message, detail, _ = refused(planned, SMALL_LLAMA, 4, 2, parallel={"tensor": 2, "pipeline": 2})
    assert message == "cannot place 2 x 4 ranks on box: it has 4 GPUs, 4 with 92% of the memory free"
    assert detail is not None
    assert detail.startswith("parallel: tensor 2, pipeline 2, data 1; free: GPU 0 80.0 GiB, GPU 1")


def test_a_gpu_that_somebody_else_fills_does_not_count() -> None:
    box = gpu_machine(2)
    full = msgspec.structs.replace(box.gpus[0], memory_free_bytes=20 * GIB)
    busy = msgspec.structs.replace(box, gpus=(full, box.gpus[1]))
    assert [gpu.index for gpu in plan.usable_gpus(busy, 0.92)] == [1]
    assert plan.make(deployment(LLAMA), SMALL_LLAMA, busy, "vllm", "1", 1).layout == Parallel()
    message, _, hint = refused(plan.make, deployment(LLAMA), SMALL_LLAMA, busy, "vllm", "1", 2)
    assert message == "cannot place 2 x 1 ranks on box: it has 2 GPUs, 1 with 92% of the memory free"
    assert hint is not None
    assert "nvidia-smi" in hint


def test_ranks_on_a_cpu_cost_a_worker_process_each() -> None:
    cut = deployment(LLAMA, parallel={"tensor": 2}, engine={"max_model_len": 1024})
    made = plan.make(cut, SMALL_LLAMA, cpu_machine(64), "vllm", "1", 1)
    assert made.need.overhead_bytes == (1200 + 850) * MIB


def test_more_replicas_are_checked_with_the_memory_that_each_takes() -> None:
    wanted, made = deployment(), demo_plan("vllm")  # 1270 MiB each
    plan.check_room(wanted, made, cpu_machine(3), n_more=2)
    message, _, _ = refused(plan.check_room, wanted, made, cpu_machine(3), n_more=3)
    assert message == 'cannot place model "penstock-demo" on desk: needs 3.7 GiB, has free 3.0 GiB'


def test_more_replicas_need_free_gpus() -> None:
    made = planned(SMALL_LLAMA, 2)
    box = gpu_machine(2)
    in_use = msgspec.structs.replace(box.gpus[0], memory_free_bytes=5 * GIB)
    left = msgspec.structs.replace(box, gpus=(in_use, box.gpus[1]))
    plan.check_room(deployment(LLAMA), made, left, n_more=1)
    message, _, _ = refused(plan.check_room, deployment(LLAMA), made, left, n_more=2)
    assert message == "cannot place 2 x 1 ranks on box: it has 2 GPUs, 1 with 92% of the memory free"


def test_llamacpp_refuses_to_be_cut() -> None:
    message, _, hint = refused(plan.make, deployment(parallel={"tensor": 4}), DEMO, cpu_machine(), "llamacpp", "1", 1)
    assert message == "cannot cut a model over 4 ranks on engine llamacpp: it runs in one process"
    assert hint == "Remove parallel, or use --engine vllm."
