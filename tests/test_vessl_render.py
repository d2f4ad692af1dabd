"""`render` for target vessl: the YAML of a run and of a service, offline, the same each time, and legal for VESSL.

PENSTOCK_WRITE_GOLDEN=1 writes the goldens again.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import vessl_judge
import yaml
from golden_files import table
from launching import call
from waiting import until

from penstock import __version__
from penstock.models import Facts, facts
from penstock.spec import reading
from penstock.targets.vessl import run_yaml
from penstock.testing.fake_vessl import forms
from penstock.testing.fake_vessl.server import FakeVessl

GOLDEN = Path(__file__).parent / "golden" / "vessl"
EXAMPLE = Path(__file__).parent.parent / "examples" / "vessl.yaml"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
SHAPES: dict[str, dict[str, Any]] = table("vessl_shapes.yaml")


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


# ---- VESSL's own SDK judges it, and VESSL's own CLI drives the fake of its API ---------------------------------------


TOOL = Path(__file__).parent.parent / "tools" / "vessl_sdk.py"
WALK = Path(__file__).with_name("vessl_judge_forms.py")
Cli = Callable[..., str]
# Commands of VESSL's CLI one after the other: its imports take a second.
SEVERAL = """
import sys
from vessl.cli._main import cli
for words in sys.argv[1:]:
    cli.main(words.split(), standalone_mode=False)
"""


@pytest.fixture
def vessl(tmp_path: Path) -> Iterator[FakeVessl]:
    with FakeVessl(tmp_path / "vessl") as fake:
        fake.world.secrets["penstock-llama8"] = (1, "a-token-of-the-fake")
        yield fake


@pytest.fixture
def cli(vessl: FakeVessl, tmp_path: Path) -> Cli:
    return lambda *words: vessl_judge.run("python", ["-c", SEVERAL, *words], tmp_path, vessl.variables)


@pytest.mark.processes
@pytest.mark.nightly
def test_the_sdk_takes_every_golden_and_has_the_forms_of_the_table(tmp_path: Path) -> None:
    goldens = sorted(GOLDEN.glob("*.yaml"))
    text = (GOLDEN / "plain.yaml").read_text("utf-8")
    wrong = {
        "field": ("resources:", "resource:"),
        "value": ("type: http", "type: https"),
        "source": ("source: ", "by: "),
    }
    files = [*goldens, *(tmp_path / f"{name}.yaml" for name in wrong)]
    for name, change in wrong.items():
        (tmp_path / f"{name}.yaml").write_text(text.replace(*change), "utf-8")
    # The version stands in the YAML, in the tool that installs it and in the judge.
    assert f'VERSION = "{run_yaml.SDK_VERSION}"' in TOOL.read_text("utf-8")
    assert vessl_judge.PLACE.name == run_yaml.SDK_VERSION
    answer = json.loads(vessl_judge.run("python", [str(WALK), *map(str, files)], tmp_path, {}).splitlines()[-1])
    assert answer["forms"] == forms.table()
    assert [answer["refusals"][file.name] for file in goldens] == [None] * 4
    assert all(answer["refusals"][f"{name}.yaml"] for name in wrong), answer["refusals"]
    for name, change in wrong.items():
        assert forms.run_problems(yaml.safe_load(text.replace(*change))), f"the table refuses it too: {name}"


@pytest.mark.processes
@pytest.mark.nightly
def test_vessls_own_cli_lives_with_the_fake(vessl: FakeVessl, cli: Cli, tmp_path: Path) -> None:
    """A rendered run, whose command is replaced by one that ends: created, listed, read, its log, terminated."""
    text = (GOLDEN / "plain.yaml").read_text("utf-8")
    head, _, rest = text.partition("- command: |-\n")
    file = tmp_path / "run.yaml"
    file.write_text(f"{head}- command: echo hello; exec sleep 60\nenv:\n{rest.partition('env:')[2]}", "utf-8")
    assert "/acme/runs/serving/1001" in cli(f"run create -f {file}")
    run = vessl.world.runs[1001]
    until(lambda: run.status == "running" and bool(run.logs), "the run has printed")
    out = cli("run list", "run read 1001", "run logs 1001", "run terminate 1001")
    assert out.count("llama8") >= 2 and "running" in out and "] hello" in out
    until(lambda: run.status == "terminated", "it has ended")
    assert run.processes() == []


@pytest.mark.processes
@pytest.mark.nightly
def test_vessls_own_cli_lives_with_the_fakes_services(vessl: FakeVessl, cli: Cli, tmp_path: Path) -> None:
    """A rendered revision, whose command is replaced: created, given the traffic, listed, read, scaled, terminated."""
    form = yaml.safe_load((GOLDEN / "service.yaml").read_text("utf-8"))
    form["run"][0]["command"] = "echo hello; exec sleep 60"
    form["service"]["healthcheck"]["exec"] = ["python3", "-c", "pass"]
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(form), "utf-8")
    assert "/acme/services/llama8" in cli(f"service create -f {file} -s llama8 --set-current-active -y")
    service = vessl.world.services["llama8"]
    until(lambda: "(not enabled)" not in cli("service read --service llama8"), "it has the traffic")
    out = cli(
        "service list",
        "service read --service llama8 --detail",
        "service scale --service llama8 --number 1 --max 2",
        "service terminate --service llama8 --number 1",
    )
    assert "llama8" in out and service.balancer.url in out and "Revision #1" in out and "nvidia.com/gpu" in out
    assert service.revisions[1].form["service"]["autoscaling"]["max"] == 2
    until(lambda: service.revisions[1].status == "stopped", "it has ended")
