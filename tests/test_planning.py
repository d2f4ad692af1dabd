"""What the planner is asked and what it reads: deployments as requests, cards, values of earlier starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from samples import DEMO, LLAMA_70B, NOW, cpu_machine, deployment, gpu_machine, sized

from penstock.deployment import measured, planning, prepare
from penstock.errors import NotModelled, UserError
from penstock.hardware import Gpu, Machine, catalog
from penstock.models import Facts
from penstock.models import catalog as models_catalog
from penstock.planner import Plan, launch
from penstock.planner.engine_versions import NEWEST
from penstock.planner.inputs import key_of
from penstock.planner.request import SizingRequest
from penstock.spec.deployment import DEMO_MODEL, Parallel
from penstock.text import GIB, MIB

LLAMA = "meta-llama/Llama-3.1-8B"
FACTS = Facts("llama-3.1-8b", models_catalog.model_config("llama-3.1-8b"), "the catalogue")
# What `h200-start.log` (golden) says of Llama-3.1-8B on one H200 with vLLM 0.33.0.
H200_START = {
    "weights_gib": 15.0,
    "kv_cache_gib": 110.98,
    "kv_cache_tokens": 909_136.0,
    "concurrency": 110.98,
    "graphs_gib": 0.92,
    "consumed_gib": 15.68,
    "peak_gib": 1.96,
}
H200 = SizingRequest(FACTS, gpu="h200", max_model_len=8192, engine_version="0.33.0")
BOX = Machine("box", 64, 1024 * GIB, 1000 * GIB, (Gpu(0, "NVIDIA H200", 143_771 * MIB, 143_771 * MIB),))
WANTED = deployment(LLAMA, engine={"max_model_len": 8192})


VLLM_11 = "vllm/vllm-openai:v0.11.0"


@pytest.mark.parametrize(
    ("blocks", "version", "warning"),
    [
        ({"kubernetes": {"image": f"lab/{VLLM_11}@sha256:00"}}, "0.11.0", "a rehearsal does not ask the cluster"),
        ({"kubernetes": {}, "engine": {"kind": "vllm", "version": "0.12.0"}}, "0.12.0", "their memory is not known"),
        ({"kubernetes": {"image": "lab/mine:prod"}}, NEWEST, 'image "lab/mine:prod" names no version of vLLM'),
        ({"slurm": {"container": f"docker://{VLLM_11}"}}, "0.11.0", "there is no sbatch"),
        ({"slurm": {"gres": "gpu:l4:2"}}, NEWEST, "slurm.gres reserves 2 GPUs on each node, and the plan uses 1"),
        ({"vessl": {"image": VLLM_11, "cluster": "c", "preset": "p"}}, "0.11.0", "a rehearsal does not ask VESSL"),
        ({"cloudera": {"workbench": "https://a", "project": "p"}, "engine": {"kind": "vllm", "version": "0.11.2"}},
         "0.11.2", "a rehearsal does not ask the workbench"),
    ],
)  # fmt: skip
def test_a_rehearsal_plans_for_the_vllm_that_the_file_names(
    blocks: dict[str, Any], version: str, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    fields: dict[str, Any] = {"engine": {"kind": "vllm"}, "hardware": {"gpu": "l4"}, "parallel": {"tensor": 1}}
    target, gateway = next(iter(blocks)), {"auth": "keys"} | ({"on": "job"} if "slurm" in blocks else {})
    model = DEMO_MODEL if "slurm" in blocks else "Qwen/Qwen3-0.6B"
    plan = prepare.rehearse(deployment(model, target=target, gateway=gateway, **fields | blocks)).plan
    assert plan.engine_version == version and any(warning in text for text in plan.warnings), plan.warnings


def up(machine: Machine = BOX, **fields: Any) -> Plan:
    wanted = deployment(LLAMA, **{"engine": {"max_model_len": 8192}, **fields})
    return launch.make_on_gpus(wanted, LLAMA_70B, machine, "0.33.0", 1, sized(wanted, machine, "llama-3.1-8b"))


def kept(made: Plan, **changed: float) -> Path:
    path = measured.keep(made, H200_START | changed, NOW)
    assert path is not None
    return path


# ---- earlier starts --------------------------------------------------------------------------------------------------


def test_the_next_plan_has_the_kv_cache_that_the_engine_reported() -> None:
    before = planning.solve(H200)
    assert before.memory is not None and before.measured_on is None
    assert before.memory.kv_cache_gib.likely == pytest.approx(111.5, abs=0.5)
    kept(up())
    after = planning.solve(H200)
    assert after.memory is not None and after.kv is not None
    assert after.measured_on == "2027-01-15"
    assert "memory other than the weights was measured at an earlier start on 2027-01-15" in after.warnings
    assert after.memory.kv_cache_gib.low == after.memory.kv_cache_gib.high
    assert after.memory.kv_cache_gib.likely == pytest.approx(110.98, abs=0.02)
    assert after.kv.tokens == pytest.approx(909_136, rel=0.0002)
    assert after.memory.activation_gib.likely == pytest.approx(1.04, abs=0.001)
    assert after.memory.cuda_graph_gib.likely == pytest.approx(0.92, abs=0.001)
    assert planning.solve(H200, with_measured=False).measured_on is None
    # `up`, another length and another share of the same engine use it too.
    plan = up()
    assert plan.forecast is not None and any("2027-01-15" in warning for warning in plan.warnings)
    assert plan.forecast.kv_cache_gib == pytest.approx(110.98, abs=0.02)
    other = planning.solve(msgspec.structs.replace(H200, max_model_len=16_384, gpu_memory_utilization=0.8))
    assert other.measured_on is not None and other.memory is not None
    assert other.memory.activation_gib.likely == pytest.approx(1.04, abs=0.001)
    assert kept(up()) == kept(up(), kv_cache_gib=100.0, consumed_gib=26.66)  # a later start replaces an earlier one
    later = planning.solve(H200).memory
    assert later is not None and later.kv_cache_gib.likely == pytest.approx(100.0, abs=0.02)


def test_what_changes_memory_is_another_start() -> None:
    kept(up())
    others: dict[str, Any] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "kv_cache_dtype": "fp8",
        "quantization": "fp8",
        "engine_version": "0.32.0",
        "gpu": "h100-sxm",
        "more_args": ("--attention-backend", "TRITON_ATTN"),
        "environment": ("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0",),
    }
    for changed in ({"tensor": 2, "gpus_per_node": 2}, *({name: value} for name, value in others.items())):
        assert planning.solve(msgspec.structs.replace(H200, **changed)).measured_on is None, changed
    # Dummy weights, a chat template and a seed change none.
    words = ("--load-format", "dummy", "--chat-template", "a b", "--seed", "1")
    assert planning.solve(msgspec.structs.replace(H200, more_args=words)).measured_on is not None


def test_copies_of_a_config_that_differ_in_nothing_that_matters_are_one_model() -> None:
    copy = Facts("./mine", {**FACTS.config, "transformers_version": "9.9", "_name_or_path": "x"}, "a folder")
    card = catalog.gpu("h200")
    assert key_of(msgspec.structs.replace(H200, facts=copy, engine_version="0.33"), card) == key_of(H200, card)
    other = Facts("./mine", {**FACTS.config, "num_hidden_layers": 31}, "a folder")
    assert key_of(msgspec.structs.replace(H200, facts=other), card) != key_of(H200, card)


def test_a_damaged_file_is_left_out_with_a_warning_and_that_of_another_key_without() -> None:
    path = kept(up())
    whole = path.read_bytes()
    for text in (b"", b"{", b"[]", b'{"key": 1}', b"\xff\xfe"):
        path.write_bytes(text)
        sizing = planning.solve(H200)
        assert sizing.fits and sizing.measured_on is None
        (warning,) = [warning for warning in sizing.warnings if "measured values" in warning]
        assert warning.startswith(f"measured values in {path} cannot be read and were left out: ")
    path.write_bytes(whole.replace(b'"h200-sxm"', b'"h100-sxm"'))
    assert planning.solve(H200).measured_on is None


def test_nothing_is_kept_of_what_was_not_planned_or_did_not_report() -> None:
    on_cpu = launch.make(deployment(), DEMO, cpu_machine(), "vllm", "0.32.0", 1)
    assert measured.keep(on_cpu, H200_START, NOW) is None
    assert measured.keep(up(), {"load_s": 1.0}, NOW) is None
    complete = kept(up())
    assert measured.keep(up(), {"kv_cache_gib": 110.9}, NOW) is None  # a start with vLLM's start-up plan
    assert planning.solve(H200).measured_on is not None
    complete.unlink()
    path = measured.keep(up(), {"kv_cache_gib": 110.98}, NOW)  # kept without all its numbers: it replaces nothing
    assert path is not None and path.name == "TP1-PP1-DP1.json"
    assert planning.solve(H200).measured_on is None
    # The lines of a pipeline's stages look the same: they stay estimates.
    two = msgspec.structs.replace(BOX, gpus=(BOX.gpus[0], msgspec.structs.replace(BOX.gpus[0], index=1)))
    kept(up(two, parallel={"pipeline": 2}))
    asked = msgspec.structs.replace(H200, pipeline=2, gpus_per_node=2)
    assert planning.solve(asked).measured_on is None


# ---- deployments as requests -----------------------------------------------------------------------------------------


def request(**fields: Any) -> SizingRequest:
    return planning.request_of(deployment(LLAMA, **fields), FACTS, "h200")


def test_flags_that_planning_knows_are_read_from_the_engines_arguments() -> None:
    args = {"max-num-seqs": 64, "kv_cache_dtype": "fp8", "--enforce-eager": True, "enable-prefix-caching": False}
    asked = request(engine={"args": {**args, "seed": 7, "middleware": ["a", "b"]}, "env": {"B": "2", "A": "1"}})
    assert (asked.max_num_seqs, asked.kv_cache_dtype, asked.enforce_eager) == (64, "fp8", True)
    assert asked.prefix_caching is False
    assert asked.more_args == ("--seed", "7", "--middleware", "a", "b")
    assert asked.environment == ("A", "B", "7d0e0dc18142")
    # Keys of measurements and plans are kept and shown: no value of a variable goes in, and no secret's hash.
    secret = request(engine={"env": {"HF_TOKEN": {"value": "x", "secret": False}, "A": "1"}})
    assert secret.environment == ("A", "7fd9c9369bc5")
    # A switch may be given by its opposite; a value that only vLLM understands is passed on.
    for value in (True, None):
        assert request(engine={"args": {"no-enable-prefix-caching": value}}).prefix_caching is False
    assert request().prefix_caching is True
    odd = request(engine={"args": {"max-num-batched-tokens": "8k"}})
    assert (odd.max_num_batched_tokens, odd.more_args) == (None, ("--max-num-batched-tokens", "8k"))


def test_the_workload_and_the_layout_reach_the_planner_and_notes_become_warnings() -> None:
    workload = {"input_tokens": 5, "output_tokens": 6, "concurrency": 7, "ttft_ms": 80, "tpot_ms": 9}
    asked = request(workload=workload, parallel={"tensor": 2, "expert": True}, hardware={"gpus_per_node": 4})
    assert [getattr(asked, name) for name in workload] == [5, 6, 7, 80, 9]
    assert (asked.fixed_layout, asked.gpus_per_node) == (Parallel(2, expert=True), 4)
    assert request().fixed_layout is None
    # Those of the facts, and of flags whose memory is not counted.
    asked = request(engine={"args": {"speculative-config": "{}", "seed": 1}})
    noted = msgspec.structs.replace(asked, facts=msgspec.structs.replace(FACTS, notes=("read from a copy",)))
    warnings = ("read from a copy", "the memory of --speculative-config is not modelled, and not counted")
    assert planning.solve(noted).warnings[:2] == warnings


# ---- cards -----------------------------------------------------------------------------------------------------------


def test_a_card_has_the_facts_of_the_catalogue_and_its_own_memory() -> None:
    assert planning.card_of(BOX.gpus) == catalog.gpu("h200")
    assert planning.card_of((*BOX.gpus, *gpu_machine(1).gpus)).id == "h100-sxm"  # of different cards the smallest
    mig_slice = catalog.gpu_of_machine("NVIDIA H200", 71_000 * MIB)
    assert mig_slice.id == "h200-sxm" and mig_slice.memory.torch_total_gib < 70
    # An unknown one is planned by its driver's memory.
    unknown = msgspec.structs.replace(BOX, gpus=(Gpu(0, "NVIDIA X900", 49_140 * MIB, 49_140 * MIB),))
    card = planning.card_of(unknown.gpus)
    assert card.memory.torch_total_gib == pytest.approx(49_140 / 1024 - 0.55)
    assert (card.id, card.names, card.stands_in is None) == ("NVIDIA X900", ("NVIDIA X900",), False)
    plan = up(unknown)
    assert plan.need.total_bytes <= 49_140 * MIB
    assert any(warning.startswith("NVIDIA X900 is not in the catalogue: 47.44 GiB") for warning in plan.warnings)


# ---- what is not modelled --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "config"), [("1.0", {}), ("0.33.0", {"architectures": ["NobodyForCausalLM"]})], ids=["engine", "model"]
)
def test_what_is_not_modelled_stops_plan_and_not_up(version: str, config: dict[str, Any]) -> None:
    facts = Facts(LLAMA, {**FACTS.config, **config}, "a folder")
    with pytest.raises(NotModelled):
        planning.solve(SizingRequest(facts, gpu="h200", engine_version=version))
    sized_answer = planning.size(WANTED, facts, BOX, version, 1)
    assert sized_answer.sizing is None and sized_answer.not_modelled is not None
    plan = launch.make_on_gpus(WANTED, LLAMA_70B, BOX, version, 1, sized_answer)
    decides = "vLLM is started anyway and decides whether it fits"
    assert plan.warnings == (f"not planned: {sized_answer.not_modelled}; {decides}",)
    plain = deployment(LLAMA, engine={"args": {"quantization": "nvfp4"}})  # a format that is no flag of the engine
    with pytest.raises(UserError, match='cannot start vLLM with quantization "nvfp4"'):
        planning.size(plain, FACTS, BOX, "0.33.0", 1)
    with pytest.raises(UserError, match="no network"):  # an unknown network is the user's mistake
        up(hardware={"network": "carrier-pigeon"})
