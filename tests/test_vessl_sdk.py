"""VESSL's own SDK judges what penstock renders, and VESSL's own CLI drives the fake of its API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vessl_judge
import yaml
from waiting import until

from penstock.targets.vessl import run_yaml
from penstock.testing.fake_vessl import forms
from penstock.testing.fake_vessl.server import FakeVessl

pytestmark = pytest.mark.processes
GOLDEN = Path(__file__).parent / "golden" / "vessl"
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
