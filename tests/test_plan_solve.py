"""The planner's answers, from the words of `penstock plan` on: a golden file of cases, and what no case can show.

golden/plan/cases.txt: a command line, then its answer. A new case is a line that begins with "$ ";
PENSTOCK_WRITE_GOLDEN=1 writes the answers: read the difference before committing it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_files import table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_shapes import asked, solved

from penstock.cli import plan, plan_text
from penstock.deployment import planning
from penstock.errors import PenstockError, UserError
from penstock.hardware import catalog
from penstock.models import catalog as models_catalog
from penstock.planner.memory.tensors import inventory, split_layers
from penstock.planner.request import Sizing, contract
from penstock.planner.solve import sizing_of

CASES = Path(__file__).parent / "golden" / "plan" / "cases.txt"
EXPECTED = {case.partition("\n")[0]: case for case in CASES.read_text("utf-8").removeprefix("$ ").split("\n$ ")}


def answer_to(words: str) -> Sizing:
    parser = argparse.ArgumentParser()
    plan.register(parser)
    return planning.solve(*plan.request_of(parser.parse_args(words.split())))


def shown(words: str) -> str:
    """A case as the golden file has it: what decides, without the figures that other tests hold."""
    try:
        sizing = answer_to(words)
    except PenstockError as error:
        return f"{words}\n  exit {error.exit_code}: {error.message}\n  hint: {str(error.hint)[:60]}\n"
    word = "does not start" if sizing.is_refused else "fits" if sizing.fits else "does not fit"
    lines = [f"{word}: {sizing.reason}", *(f"but {target.partition(':')[0]}" for target in sizing.missed)]
    if sizing.layout and sizing.weights:
        each = " ".join(f"{gib:.2f}" for gib in sizing.weights.per_gpu_gib)
        lines.append(f"{plan_text.layout_text(sizing.layout)}, weights {each} GiB, {sizing.settings.dtype}")
        lines.append(f"engine: {' '.join(sizing.engine_args) or 'no flags'}")
    if sizing.kv:
        lines.append(f"KV cache of {sizing.kv.num_blocks:,} blocks, {sizing.kv.bytes_per_token:,.0f} B a token")
    lines += [f"no speed, {'no users' if sizing.users is None else 'users'}"] if sizing.speed is None else []
    lines += [f"lever: {' '.join(lever.flags)}: {'fits' if lever.fits else 'no fit'}" for lever in sizing.levers]
    lines += [f"warning: {warning}" for warning in sizing.warnings]
    return "\n  ".join([words, *lines]) + "\n"


@pytest.mark.parametrize("words", EXPECTED)
def test_the_answer_is_the_golden_one(words: str) -> None:
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        EXPECTED[words] = shown(words)
        CASES.write_text("\n".join(f"$ {case.rstrip()}" for case in EXPECTED.values()) + "\n", "utf-8")
    assert shown(words).rstrip() == EXPECTED[words].rstrip()


@pytest.mark.parametrize(
    "words",
    [
        "qwen3.5-27b --gpu h100-sxm",
        "qwen3.5-27b --gpu h100-sxm --no-prefix-caching --gpu-memory-utilization 0.85 --max-model-len 65536",
        "qwen3.5-27b --gpu h100-sxm --available-kv-gib 17",
        "qwen3.5-122b-a10b --gpu h100-sxm --gpus-per-node 4 --tensor 4",
        "qwen3-next-80b-a3b --gpu h100-sxm --gpus-per-node 4 --tensor 2 --data 2 --expert",
        "nemotron-h-56b --gpu h100-sxm --gpus-per-node 2 --pipeline 2 --max-model-len 8192",
        "jamba-v0.1 --gpu h100-sxm --gpus-per-node 2 --tensor 2 --max-model-len 8192",
        "granite-4.0-h-small --gpu h100-sxm --max-model-len 8192",
    ],
)
def test_a_model_with_states_runs_no_more_requests_than_it_has_cache_blocks(words: str) -> None:
    capped = answer_to(words)
    assert capped.fits and capped.kv is not None and capped.users is not None
    seqs = capped.settings.max_num_seqs
    assert seqs <= capped.kv.num_blocks
    if capped.kv.num_blocks < 1024:  # the default on these cards
        assert f"--max-num-seqs {seqs}" in " ".join(capped.engine_args) and seqs >= capped.kv.num_blocks // 2
        assert f"{seqs}" in contract(capped)["engine_args"]
        asked = answer_to(f"{words} --max-num-seqs {capped.kv.num_blocks + 40}")
        assert "cache blocks of its states, take" in asked.reason and not asked.fits
    assert answer_to(f"{words} --max-num-seqs {seqs}").settings.max_num_seqs == seqs
    # Without CUDA graphs vLLM takes any; 0.18 with them, and captures fewer.
    for flag in ("--enforce-eager", "--engine-version 0.18"):
        free = answer_to(f"{words} {flag}")
        assert (free.settings.max_num_seqs, "--max-num-seqs" in free.engine_args) == (1024, False)


def test_every_refused_layout_has_its_number_and_a_config_its_own_length() -> None:
    sizing = answer_to("llama-3.1-70b --gpu h100-sxm --gpus-per-node 8")
    refused = {(row.tensor, row.pipeline, row.data): row.reason for row in sizing.rejected}
    assert "64 attention heads do not divide by tensor 3" in refused[3, 1, 1]
    assert "20.00 GiB of KV cache" in refused[2, 1, 1]
    assert "takes 8 GPUs where 4 are enough" in refused[8, 1, 1]
    assert all(any(letter.isdigit() for letter in reason) for reason in refused.values())
    config = {**models_catalog.model_config("command-r-v01"), "model_max_length": 131_072}
    assert solved("command-r-v01", "h200-sxm", config).settings.max_model_len == 131_072


def test_a_folder_needs_no_more_than_a_config_and_a_checkpoint_of_another_size_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models_catalog.model_config("llama-3.1-8b")))
    assert not answer_to(f"{tmp_path} --gpu h100-sxm").warnings
    index = {"metadata": {"total_size": 20_000_000_000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (warning,) = answer_to(f"{tmp_path} --gpu h100-sxm").warnings
    assert "20.00 GB" in warning and "16.06 GB" in warning


@pytest.mark.parametrize(
    ("model", "gpu", "fields"),
    [
        ("llama-3.1-70b", "h100-sxm", {}),
        ("llama-3.1-8b", "a10g", {"max_model_len": 32_768}),
        ("llama-3.1-405b", "h100-sxm", {"gpus_per_node": 8, "nodes": 2}),
        ("deepseek-v3", "h100-sxm", {"gpus_per_node": 8}),
    ],
)
def test_the_flags_of_a_lever_give_what_it_says(model: str, gpu: str, fields: dict[str, Any]) -> None:
    sizing = solved(model, gpu, **fields)
    layout = sizing.layout
    assert layout is not None and sizing.levers
    same = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data, "expert": layout.expert}
    for lever in sizing.levers:
        words = iter(lever.flags)
        changed = {word.removeprefix("--").replace("-", "_"): next(words) for word in words if word != "--expert"}
        wanted = {name: int(value) if value.isdigit() else value for name, value in changed.items()}
        got = solved(model, gpu, **{**fields, **same, **wanted})
        assert (got.fits, got.kv.tokens if got.kv else None) == (lever.fits, lever.tokens), lever


@pytest.mark.parametrize("model", ["llama-3.1-405b", "qwen3-235b-a22b"])
def test_a_thousand_gpus_take_few_calls(model: str) -> None:
    """Asked: under a CPU-second (`benchmarks/cli_cost.py`). Calls are counted: a busy machine changes seconds."""
    request = asked(model, "h100-sxm", gpus_per_node=8, nodes=128)
    n_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    split_layers.cache_clear()
    inventory.cache_clear()
    sys.setprofile(count)
    try:
        sizing = sizing_of(request, catalog.gpu("h100-sxm"), catalog.link("ib-ndr"))
    finally:
        sys.setprofile(None)
    assert sizing.fits
    # 0.6 to 1.3 million measured, 0.15 to 0.4 s of CPU; 3.2 million took 0.8 s.
    assert 100_000 < n_calls < 2_000_000


@pytest.mark.processes
def test_planning_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys; from penstock.cli import main; main.run(['plan', 'llama-3.1-8b', '--gpu', 'h200', '--json']); "
        "sys.exit(bool({'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---- configs that no model has ---------------------------------------------------------------------------------------


SEEING = models_catalog.model_config("qwen3-vl-8b")
BLIND = ({**SEEING, "vision_config": {"hidden_size": -5}}, "hidden_size of vision_config is -5, not a count")


@pytest.mark.parametrize(("fields", "words"), [*table("plan/impossible_configs.yaml"), BLIND])
def test_a_config_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        solved("llama-3.1-8b", "h100-sxm", {**models_catalog.model_config("llama-3.1-8b"), **fields})
    assert words in caught.value.message and caught.value.exit_code == 2


VALUES = st.one_of(
    st.sampled_from([None, 0, 1, -1, 3, 10**9, 10**18, 1.5, float("nan"), True, "", "x", "bfloat16"]),
    st.sampled_from([[], {}, [1], ["x"], {"a": 1}, [None], [[1, 2]], {"a": {}}, ["full_attention"]]),
    st.integers(0, 2**40),
)


def spots(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(object, key) of every field, nested ones too."""
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from spots(value)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_broken_configs_are_answered_or_refused(data: st.DataObject) -> None:
    """A field dropped, of another type, zero or huge: exit code 0, 2, 3 or 4, never a traceback."""
    model = data.draw(st.sampled_from(models_catalog.model_names()))
    config = copy.deepcopy(models_catalog.model_config(model))
    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(list(spots(config))))
        if data.draw(st.booleans()):
            holder[key] = copy.deepcopy(data.draw(VALUES))  # the next change may be inside it
        else:
            del holder[key]
    try:
        sizing = solved(
            model, "h100-sxm", config, gpus_per_node=4, max_model_len=data.draw(st.sampled_from([None, 99]))
        )
    except PenstockError as error:
        assert error.exit_code in (2, 4)
    else:
        assert sizing.reason
