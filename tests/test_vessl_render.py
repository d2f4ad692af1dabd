"""`render` for target vessl: the YAML of a run and of a service, offline, the same each time, and legal for VESSL.

PENSTOCK_WRITE_GOLDEN=1 writes the goldens again.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import yaml
from launching import call

from penstock import __version__
from penstock.models import Facts, facts
from penstock.spec import reading
from penstock.targets.vessl import run_yaml
from penstock.testing.fake_vessl import forms

GOLDEN = Path(__file__).parent / "golden" / "vessl"
EXAMPLE = Path(__file__).parent.parent / "examples" / "vessl.yaml"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCK = {"cluster": "vessl-gcp-oregon", "preset": "gpu-l4-small"}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"vessl": BLOCK},
    "everything": {
        "ui": True,
        "gateway": {"port": 9000},
        "cache": {"weights": "vessl-artifact://acme/serving/cache"},
        "vessl": {
            **BLOCK,
            "spot": True,
            "preset": "gpu-l4-small-spot",
            "image": "registry.example.org/vllm:own",
            "code": "git://github.com/example/penstock-wheel",
            "secrets": {"HF_TOKEN": "hf-token"},
            "mounts": {"/data": "nfs://10.0.0.4/data"},
            "imports": {"/lora": "vessl-model://acme/lora/3"},
            "exports": {"/results": "volume://vessl-storage/results"},
            "max_hours": 0.5,
        },
    },
    "service": {
        "replicas": {"min": 1, "max": 3},
        "gateway": {"store": "postgresql://penstock@db.example.org/penstock"},
        "vessl": {**BLOCK, "kind": "service", "spot": True},
    },
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network, no account, and a hub's AWQ model whose config and sizes are known."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("`render` asked the network")

    known = facts._from_catalog("meta-llama/Meta-Llama-3.1-8B")
    config = {**known.config, "quantization_config": AWQ}

    def read(reference: str) -> Facts:
        return msgspec.structs.replace(known, reference=reference, config=config, index_bytes=5_727_060_000)

    monkeypatch.setattr(facts, "read", read)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_TOKEN", "never-in-a-run")
    return tmp_path


def file_of(folder: Path, shape: str) -> Path:
    if shape == "published":
        return EXAMPLE
    fields: dict[str, Any] = {"name": "llama8", "model": "meta-llama/Llama-3.1-8B-Instruct", "target": "vessl"}
    fields |= {"hardware": {"gpu": "l4"}, "engine": {"max_model_len": 8192}, **SHAPES[shape]}
    path = folder / f"{shape}.yaml"
    path.write_text(yaml.safe_dump(fields), "utf-8")
    return path


def rendered(folder: Path, shape: str) -> str:
    done = call("render", file_of(folder, shape))
    assert done.code == 0, done
    return done.out


def plain(text: str) -> str:
    """Without what each change of penstock's code changes: the plan, and its version."""
    return re.sub(r'^    \{"deployment":.*$', "    PLAN", text, flags=re.MULTILINE).replace(__version__, "VERSION")


@pytest.mark.parametrize("shape", ["published", *SHAPES])
def test_a_shape_is_rendered_offline_and_twice_the_same_and_as_its_golden_which_fits_the_forms_of_vessl(
    shape: str, alone: Path
) -> None:
    text = rendered(alone, shape)
    assert rendered(alone, shape) == text and "never-in-a-run" not in text and "\t" not in text
    golden = GOLDEN / f"{shape}.yaml"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(plain(text), "utf-8")
    assert plain(text) == golden.read_text("utf-8")
    form = yaml.safe_load(text)
    judge = forms.service_problems if shape == "service" else forms.run_problems
    assert judge(form) == []
    assert "termination_protection" not in form and "interactive" not in form, "either keeps an idle run charged"


def test_a_run_holds_the_file_and_the_plan_that_another_machine_reads(alone: Path) -> None:
    text = rendered(alone, "everything")
    file, plan = run_yaml.embedded(text)
    assert reading.parse(file) == reading.load(file_of(alone, "everything"))
    assert '"deployment":"llama8"' in plan and str(alone) not in plan
    again = yaml.safe_dump(yaml.safe_load(text))  # as VESSL's CLI sends it
    assert run_yaml.embedded(again) == (file, plan)
    with pytest.raises(ValueError, match="penstock did not render it"):
        run_yaml.embedded(yaml.safe_dump({"run": [{"command": "sleep 1"}]}))
    with pytest.raises(ValueError, match="command"):
        run_yaml.embedded("run: [{}]")


def test_the_published_example_is_planned_for_one_l4(alone: Path) -> None:
    """8B in AWQ with 65,536 tokens, as vllm-run of VESSL's examples serves it."""
    form = yaml.safe_load(rendered(alone, "published"))
    assert form["resources"] == {"cluster": "vessl-gcp-oregon", "preset": "gpu-l4-small"}
    assert form["image"].startswith("vllm/vllm-openai:v") and form["env"]["HF_TOKEN"]["secret"] == "hf-token"
    _, plan = run_yaml.embedded(yaml.safe_dump(form))
    facts_of_plan = msgspec.json.decode(plan)
    assert facts_of_plan["max_model_len"] == 65536 and facts_of_plan["layout"]["tensor"] == 1
