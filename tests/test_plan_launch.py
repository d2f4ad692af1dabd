"""Plans of a launch: golden text of plans and refusals (golden/plan/launch.txt), and what follows by rule.

PENSTOCK_WRITE_GOLDEN=1 writes the golden file; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from samples import DEMO, LLAMA_70B, cpu_machine, demo_plan, deployment, gpu_machine, sized

from penstock import planner
from penstock.engines.vllm.engine import pass_through
from penstock.errors import PlanError
from penstock.hardware import Machine
from penstock.models import ModelFacts
from penstock.planner import Plan, launch
from penstock.planner.launch import Sized
from penstock.text import GIB, MIB, show_bytes

GOLDEN = Path(__file__).parent / "golden" / "plan" / "launch.txt"
LLAMA = "meta-llama/Llama-3.1-70B-Instruct"
SMALL_LLAMA = msgspec.structs.replace(
    LLAMA_70B, weights_bytes=15 * GIB, n_layers=32, n_heads=32, n_kv_heads=8, max_position=131_072
)
SMALL: dict[str, Any] = {"model": "llama-3.1-8b", "facts": SMALL_LLAMA}
NAMED: dict[str, Any] = {"hardware": {"gpu_ids": [0, 1]}}
ODD = msgspec.structs.replace(LLAMA_70B, n_heads=12)
BOX = gpu_machine(8)
FULL_GPU = msgspec.structs.replace(gpu_machine(2).gpus[0], memory_free_bytes=20 * GIB)
BUSY = msgspec.structs.replace(gpu_machine(2), gpus=(FULL_GPU, gpu_machine(2).gpus[1]))


def on_gpus(
    machine: Machine = BOX,
    n_replicas: int = 1,
    model: str = "llama-3.1-70b",
    facts: ModelFacts = LLAMA_70B,
    **fields: Any,
) -> Plan:
    """The plan of a 70B model (131.4 GiB) on H100s of 79.1 GiB, or of `model`."""
    wanted = deployment(LLAMA, **fields)
    return launch.make_on_gpus(wanted, facts, machine, "0.33.0", n_replicas, sized(wanted, machine, model, n_replicas))


def not_modelled(n_replicas: int = 1, **fields: Any) -> Plan:
    unknown = Sized(not_modelled="cannot plan x: no")
    return launch.make_on_gpus(deployment(LLAMA, **fields), ODD, BOX, "0.33.0", n_replicas, unknown)


def on_cpu(free_gib: float = 64, n_replicas: int = 1, **fields: Any) -> Plan:
    """Of an 8B model, 15 GiB of weights and 128 KiB a token."""
    return launch.make(deployment(LLAMA, **fields), SMALL_LLAMA, cpu_machine(free_gib), "vllm", "1", n_replicas)


def demo(kind: str = "vllm", n_replicas: int = 1, **fields: Any) -> Plan:
    return launch.make(deployment(**fields), DEMO, cpu_machine(2), kind, "1", n_replicas)


def no_room(plan: Plan, machine: Machine, n_more: int) -> Plan:
    launch.check_room(deployment(plan.model.reference), plan, machine, n_more)
    return plan


SHORT: dict[str, Any] = {"engine": {"max_model_len": 8192}}
LONGER = {"max_model_len": 131_073}
CASES: dict[str, Callable[[], Plan]] = {
    # As `penstock plan` answers for eight H100 (test_plan_solve): four of them, for the whole length.
    "the layout on GPUs is the planner's": on_gpus,
    "a shorter context takes fewer GPUs": lambda: on_gpus(**SHORT),
    "the file's own layout and share": lambda: on_gpus(
        parallel={"tensor": 4, "pipeline": 2}, engine={"gpu_memory_utilization": 0.8}
    ),
    "replicas share the GPUs": lambda: on_gpus(gpu_machine(4), 4, **SMALL),
    "targets that are missed": lambda: on_gpus(workload={"ttft_ms": 1, "tpot_ms": 100_000}, **SHORT),
    "longer than the model, allowed": lambda: on_gpus(engine={**LONGER, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}),
    "longer than the model": lambda: on_gpus(engine=LONGER),
    "not modelled": lambda: not_modelled(engine={"max_model_len": 4096}),
    "not modelled, two replicas": lambda: not_modelled(2),
    "not modelled, heads that do not divide": lambda: not_modelled(parallel={"tensor": 5}),
    "a GPU that another process fills does not count": lambda: no_room(on_gpus(BUSY, **SMALL), BUSY, 1),
    "two replicas and one free GPU": lambda: on_gpus(BUSY, 2, **SMALL),
    "two more replicas and one free GPU": lambda: no_room(on_gpus(BUSY, **SMALL), BUSY, 2),
    "a context that does not fit": lambda: on_gpus(gpu_machine(2)),
    "weights that do not fit": lambda: on_gpus(gpu_machine(1)),
    "half of the GPUs for a replica": lambda: on_gpus(gpu_machine(4), 2),
    "no more GPUs than the file allows": lambda: on_gpus(hardware={"gpus_per_node": 2}),
    "tensor that does not divide the heads": lambda: on_gpus(parallel={"tensor": 3}),
    "more replicas than the file's GPUs": lambda: on_gpus(
        BOX, 2, hardware={"gpus_per_node": 4}, parallel={"tensor": 4}
    ),
    "a layout wider than the GPUs that the file names": lambda: on_gpus(
        gpu_machine(2), parallel={"tensor": 4}, **NAMED
    ),
    "more replicas than the GPUs that the file names": lambda: on_gpus(
        gpu_machine(2), 3, parallel={}, **NAMED, **SMALL
    ),
    "more replicas than GPUs": lambda: on_gpus(gpu_machine(4), 2, parallel={"tensor": 2, "pipeline": 2}, **SMALL),
    # 2 * 4 layers * 4 heads * 32 * 2 bytes = 2 KiB a token; 8 requests of 1024 tokens = 16 MiB, raised to the least.
    "the demo model on the CPU": lambda: demo_plan("vllm"),
    "the workload's concurrency": lambda: on_cpu(engine={"max_model_len": 2048}, workload={"concurrency": 4}),
    "half of what the weights leave": lambda: on_cpu(55),
    "one whole request, more than half": lambda: on_cpu(40),
    "a replica of two on the CPU": lambda: on_cpu(n_replicas=2, engine={"max_model_len": 32_768}),
    "two ranks on the CPU": lambda: on_cpu(parallel={"tensor": 2}, engine={"max_model_len": 1024}),
    "targets on the CPU": lambda: demo("llamacpp", workload={"tpot_ms": 9}),
    "too little memory": lambda: demo(n_replicas=3, engine={"max_model_len": 1024}),
    "too little memory for more replicas": lambda: no_room(demo_plan("vllm"), cpu_machine(3), 3),
    "longer than the demo model": lambda: demo(engine={"max_model_len": 2000}),
    "tensor that does not divide the demo model": lambda: demo(parallel={"tensor": 3}),
    "llama.cpp runs in one process": lambda: demo("llamacpp", parallel={"tensor": 4}),
    "llama.cpp without Ray": lambda: demo("llamacpp", engine={"executor": "ray"}),
}


def shown(make: Callable[[], Plan]) -> str:
    try:
        plan = make()
    except PlanError as error:
        assert error.exit_code == 2
        return f"refused: {error.message}\ndetail: {error.detail}\nhint: {error.hint}"
    cut, need = plan.layout, plan.need
    memory = (need.weights_bytes, need.kv_cache_bytes, need.overhead_bytes)
    lines = [
        f"{plan.engine} on {plan.device} by {plan.executor}, TP{cut.tensor} PP{cut.pipeline}, {plan.n_threads} threads",
        f"{plan.max_model_len} tokens, {plan.max_num_seqs} at once, {plan.gpu_memory_utilization:g} of the memory",
        f"weights, KV cache, other: {', '.join(map(show_bytes, memory))}; {'with' if plan.forecast else 'no'} forecast",
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan.warnings)])


def test_plans_and_refusals_are_the_golden_ones() -> None:
    text = "".join(f"== {name}\n{shown(make)}\n\n" for name, make in CASES.items())
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        GOLDEN.write_text(text, "utf-8")
    assert text == GOLDEN.read_text("utf-8")


def test_a_plan_carries_what_the_engine_needs_of_the_file() -> None:
    engine = {"max_model_len": 512, "args": {"seed": 1}, "env": {"A": "1"}, "drain_s": 5, "stall_s": 7}
    plan = demo(name="d", engine=engine, gateway={"aliases": ["x", "d"]}, workload={"concurrency": 3})
    assert plan.served_names == ("d", "penstock-demo", "x")
    assert (plan.max_model_len, plan.max_num_seqs) == (512, 3)
    assert (plan.args, plan.env, plan.drain_s, plan.stall_s) == ({"seed": 1}, {"A": "1"}, 5, 7)
    assert (plan.engine, plan.engine_version, plan.deployment) == ("vllm", "1", "d")


def test_a_model_with_states_is_started_with_as_many_requests_as_its_cache_blocks_allow() -> None:
    model: dict[str, Any] = {"model": "qwen3.5-27b", "facts": SMALL_LLAMA, "machine": gpu_machine(1)}
    plan = on_gpus(**model, engine={"args": {"seed": 1}})
    assert plan.args == {"max-num-seqs": 312, "seed": 1}
    assert "--max-num-seqs 312" in " ".join(pass_through(plan.args))
    assert on_gpus(**model, engine={"args": {"max_num_seqs": 100}}).args == {"max_num_seqs": 100}
    with pytest.raises(PlanError, match="max_num_seqs 1,024 is over the 343 cache blocks") as refused:
        on_gpus(**model, engine={"args": {"max-num-seqs": 1024}})
    assert refused.value.hint == "Set engine.args.max-num-seqs: 312, or use more GPUs."
    # No graphs of decode steps, no rule; flags that are not counted halve what is promised.
    for flag in ({"compilation-config": '{"cudagraph_mode": "PIECEWISE"}'}, {"optimization_level": 1}):
        assert on_gpus(**model, engine={"args": {"max-num-seqs": 1024, **flag}}).args["max-num-seqs"] == 1024
    unsure = on_gpus(**model, engine={"args": {"speculative-config": "{}", "seed": 1}})
    assert unsure.args["max-num-seqs"] == 171 and unsure.warnings[1].endswith("fewer cache blocks than 171")
    with pytest.raises(PlanError, match="one request of") as refused:
        on_gpus(**model, engine={"gpu_memory_utilization": 0.85})
    assert str(refused.value.hint).startswith("Set engine.max_model_len: ")
    assert "max-num-seqs" not in on_gpus().args


def test_memory_follows_the_worked_numbers() -> None:
    assert planner.kv_bytes_per_token(LLAMA_70B) == 327_680
    assert planner.kv_bytes_per_token(LLAMA_70B, dtype_bytes=1) == 163_840
    assert demo_plan("vllm").need.total_bytes == 1270 * MIB
    assert on_cpu(engine={"max_model_len": 2048}, workload={"concurrency": 4}).need.kv_cache_bytes == 4 * 2048 * 131_072
    assert 2 * on_cpu(n_replicas=2, engine={"max_model_len": 32_768}).need.total_bytes <= 64 * GIB
    plan = on_gpus()
    assert plan.need.total_bytes <= 4 * 79.2 * GIB  # NCCL is outside the engine's share
    assert plan.forecast is not None
    assert plan.need.kv_cache_bytes == pytest.approx(4 * plan.forecast.kv_cache_gib * GIB, rel=0.001)


def test_threads_leave_one_for_the_rest() -> None:
    for n_cpus, n_replicas, expected in ((8, 1, 7), (8, 2, 3), (2, 1, 1), (1, 1, 1), (2, 4, 1)):
        plan = launch.make(deployment(), DEMO, cpu_machine(n_cpus=n_cpus), "llamacpp", "1", n_replicas)
        assert plan.n_threads == expected
    # A deployment without replicas is planned for one.
    assert launch.make(deployment(replicas=0), DEMO, cpu_machine(), "llamacpp", "1.0", 0) == demo_plan()
