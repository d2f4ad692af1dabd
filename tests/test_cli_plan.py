"""`penstock plan`: arguments in, text, JSON, files and exit codes out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from launching import Done, call
from plan_shapes import planned

from penstock.cli import main, plan
from penstock.deployment import planning
from penstock.errors import UserError
from penstock.hardware import Gpu, Links, detect
from penstock.hardware.catalog import GpuFacts
from penstock.planner.request import Sizing, SizingRequest, contract
from penstock.spec import reading
from penstock.spec.deployment import Parallel
from penstock.text import MIB

replace = msgspec.structs.replace
BASE = ("llama-3.1-70b", "--gpu", "h100-sxm", "--gpus-per-node", "8")

Asked = list[SizingRequest]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the solver was asked."""
    requests: Asked = []
    solve = planning.solve

    def remember(request: SizingRequest, card: GpuFacts | None, with_measured: bool) -> Sizing:
        requests.append(request)
        return solve(request, card, with_measured)

    monkeypatch.setattr(planning, "solve", remember)
    return requests


def told(*argv: object) -> Done:
    return call("plan", *argv)


def run(*argv: str) -> int:
    return plan.run(main.parser(["plan"]).parse_args(["plan", *argv]))


def test_every_flag_of_the_contract_reaches_the_solver(asked: Asked) -> None:
    words = (
        "--nodes 2 --network ib-ndr-400 --gpu-memory-gib 79.1 --tensor 4 --pipeline 2 --data 1 --expert "
        "--max-model-len 128K --max-num-seqs 256 --max-num-batched-tokens 8192 --kv-cache-dtype fp8 --quantization fp8 "
        "--dtype bfloat16 --gpu-memory-utilization 0.9 --block-size 32 --no-prefix-caching --enforce-eager "
        "--engine-version 0.20 --available-kv-gib 10.5 12 --input-tokens 500 --output-tokens 50 --concurrency 3 "
        "--ttft-ms 400 --tpot-ms 20 --context-per-user 9000 --think-time-s 12.5 --json"
    )
    run(*BASE, *words.split())
    assert run(*BASE) == 0
    request, plain = asked
    assert plain == SizingRequest(plain.facts, gpu="h100-sxm", gpus_per_node=8)  # the rest is the solver's
    more = {"available_kv_gib": (10.5, 12.0), "expert": True, "prefix_caching": False, "enforce_eager": True}
    numbers = {
        "nodes": 2, "gpu_memory_gib": 79.1, "tensor": 4, "pipeline": 2, "data": 1, "max_model_len": 131_072,
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9, "block_size": 32,
        "input_tokens": 500, "output_tokens": 50, "concurrency": 3, "ttft_ms": 400, "tpot_ms": 20,
        "context_per_user": 9000, "think_time_s": 12.5,
    }  # fmt: skip
    words_of = {"network": "ib-ndr-400", "kv_cache_dtype": "fp8", "quantization": "fp8", "dtype": "bfloat16"}
    assert request == replace(
        SizingRequest(request.facts, "h100-sxm", 8, engine_version="0.20"), **more, **numbers, **words_of
    )
    assert request.fixed_layout == Parallel(4, 2, 1, True)

    for listed in (["7", "8"], ["7,8"], ["7, 8"]):
        run(*BASE, "--available-kv-gib", *listed)
        assert asked[-1].available_kv_gib == (7.0, 8.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"--tensor {text}", None) for text in ("0", "two", "²")),
        *((f"--gpu-memory-utilization {text}", None) for text in ("nan", "1.1")),
        *((f"--available-kv-gib {text}", None) for text in ("inf", "5,")),
        *((words, None) for words in ("--max-model-len -1", "--ttft-ms 0", "--dtype int4", "--no-such-flag")),
        ("--gpu h200", None),
        *(("--tensor 2 --tensor 4", "given twice"), ("--plot {folder}/plan.pdf", "pictures are SVG")),
        *(("--plot {folder}/no/plan.svg", "no such folder"), ("--calibration {folder}/no.json", "cannot read")),
    ],
)
def test_bad_values_exit_with_2(words: str, said: str | None, asked: Asked, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(*BASE, *words.format(folder=tmp_path).split())
    assert asked == []


def test_json_is_the_contract_and_what_does_not_fit_exits_with_3() -> None:
    fits = planned("llama-3.1-70b", "h100-sxm", gpus_per_node=8)[1]
    assert told(*BASE, "--json").json == json.loads(json.dumps(contract(fits)))
    plain = told(*BASE[:3], "--json")
    assert plain.code == 3 and not plain.json["fits"] and plain.json["weights"]["params"] == 70_553_706_496
    shown = told(*BASE[:3])
    assert shown.code == 3 and "DOES NOT FIT" in shown.out


def test_without_a_gpu_named_this_machines_are_taken(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "gpus", lambda: [Gpu(at, "NVIDIA L4", 23034 * MIB, 1) for at in range(2)])
    monkeypatch.setattr(detect, "links", lambda indices: Links(len(indices), 1, None, "PHB", False))
    run("llama-3.1-70b")
    run("llama-3.1-70b", "--gpus-per-node", "1")
    assert [(request.gpu, request.gpus_per_node) for request in asked] == [("l4", 2), ("l4", 1)]
    assert [request.links and request.links.n_gpus for request in asked] == [2, 1]
    assert all(request.gpu_memory_gib is None for request in asked)
    # What the driver does not report is the catalogue's, with a warning.
    monkeypatch.setattr(detect, "gpus", lambda: [Gpu(0, "NVIDIA L4", 11_000 * MIB, 1)])
    monkeypatch.setattr(detect, "links", lambda indices: None)
    run("llama-3.1-70b")
    notes = " ".join(asked[-1].facts.notes)
    assert "the catalogue's links are used" in notes and "11,000 MiB a GPU, the catalogue 23,034" in notes
    for names, word in (([], "no GPU"), (["NVIDIA L4", "NVIDIA A10"], "several kinds")):
        monkeypatch.setattr(detect, "gpus", lambda names=names: [Gpu(at, name, 1, 1) for at, name in enumerate(names)])
        with pytest.raises(UserError, match=word) as caught:
            run("llama-3.1-70b")
        assert "--gpu h100-sxm" in str(caught.value.hint)


def test_write_replaces_a_file_only_by_force_and_writes_none_for_what_does_not_fit(
    asked: Asked, tmp_path: Path
) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text("mine", "utf-8")
    assert "the file exists" in told(*BASE, "--write", path).err
    assert path.read_text("utf-8") == "mine" and asked == []
    assert f"wrote {path}" in told(*BASE, "--write", path, "--force").out
    written = reading.load(path)
    assert (written.model, written.parallel) == (asked[0].facts.hub_id, Parallel(tensor=4))
    assert told(*BASE, "--plot", tmp_path / "plan.svg").code == 0
    assert (tmp_path / "plan.svg").read_text("utf-8").startswith("<svg")
    unfit = told(*BASE[:3], "--write", tmp_path / "other.yaml")
    assert unfit.code == 3 and "did not write" in unfit.out and not (tmp_path / "other.yaml").exists()
    # Nor for a checkpoint that is to be made: there is no line that starts it.
    made = told("llama-3.1-8b", "--gpu", "b200", "--quantization", "nvfp4", "--write", tmp_path / "d.yaml")
    assert made.code == 0 and "penstock up" not in made.out and "vllm serve" not in made.out
    assert "plan and serve a repository that has it" in " ".join(made.out.split())
    assert "did not write" in made.out and not (tmp_path / "d.yaml").exists()


@pytest.mark.parametrize(
    "words",
    [
        *("", "--gpu-memory-utilization 0.8", "--tensor 8 --enforce-eager --kv-cache-dtype fp8"),
        "--tensor 2 --pipeline 2 --max-num-seqs 64 --no-prefix-caching --block-size 32",
    ],
)
def test_the_last_lines_start_what_was_planned(words: str, tmp_path: Path) -> None:
    flags = ["--max-model-len", "8192", *words.split()]
    line = told(*BASE, *flags).out.replace("\\\n", " ").rpartition("start it\n")[2].partition("\n\n")[0]
    up = shlex.split(line)
    assert up[:2] == ["penstock", "up"]
    settings = [word for word in up[3:] if word != "--set"]
    path = tmp_path / "p.yaml"
    assert f"start it\n  penstock up {path}\n" in told(*BASE, *flags, "--write", path).out
    written, typed = reading.load(path), reading.read(up[2], settings)
    assert (typed.model, typed.parallel, typed.engine.args) == (written.model, written.parallel, written.engine.args)
    assert typed.engine.max_model_len == written.engine.max_model_len
    assert typed.engine.gpu_memory_utilization == written.engine.gpu_memory_utilization
    assert f"vllm serve {written.model}" in path.read_text("utf-8")


def test_the_file_names_a_folder_by_its_full_path_and_keeps_the_engines_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    request, fits = planned("llama-3.1-70b", "h100-sxm", gpus_per_node=8)
    request = replace(request, facts=replace(request.facts, reference="m", hub_id=None))
    flags = ("--tensor-parallel-size", "4", "--max-num-seqs", "64", "--enforce-eager", "--kv-cache-dtype=fp8")
    made = reading.parse(planning.deployment_text(request, replace(fits, engine_args=flags)))
    assert made.model == str(tmp_path / "m")
    assert made.engine.args == {"max-num-seqs": 64, "enforce-eager": True, "kv-cache-dtype": "fp8"}


def test_the_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    fields: tuple[Any, ...] = SizingRequest.__struct_fields__
    flags = {f"--{field.replace('_', '-')}" for field in fields}
    flags -= {"--facts", "--prefix-caching", "--more-args", "--environment", "--links", "--sure-share"}
    assert [flag for flag in flags | {"--no-prefix-caching", "--plot", "--write", "--json"} if flag not in shown] == []
