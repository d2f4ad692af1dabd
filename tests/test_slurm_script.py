"""The batch script, byte by byte, for the shipped examples; and the words that may not stand in it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
from samples import LLAMA_70B, demo_plan

from penstock.errors import SpecError
from penstock.planner import Need, Plan
from penstock.spec import reading
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment, GatewaySpec, Parallel, Ui
from penstock.targets.slurm import script as slurm_script
from penstock.text import GIB

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "slurm"
EXAMPLES = sorted((ROOT / "examples").glob("slurm-*.yaml"))
RUN = "/home/ada/.penstock/runs/"


def planned(deployment: Deployment) -> Plan:
    """A plan with the file's layout, as `up` makes it of a model that is here."""
    model = msgspec.structs.replace(
        LLAMA_70B, reference=deployment.model, path="/shared/models/x", weights_bytes=141 * GIB
    )
    return demo_plan(
        "vllm",
        deployment=deployment.name,
        model=model,
        device="cuda" if deployment.hardware.gpus_per_node else "cpu",
        layout=deployment.parallel if isinstance(deployment.parallel, Parallel) else Parallel(),
        executor="ray" if deployment.engine.executor == "ray" else "mp",
        need=Need(141 * GIB, 40 * GIB, GIB),
        n_threads=7,
        drain_s=deployment.engine.drain_s,
        n_nodes=deployment.hardware.nodes,
    )


def script(deployment: Deployment) -> str:
    plan = planned(deployment)
    needs = slurm_script.needs_of(plan, deployment.slurm or Slurm(), "h100", 2**20)
    return slurm_script.render(deployment, plan, RUN + deployment.name, "/usr/bin/python3", needs)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_the_script_of_an_example_is_the_golden_one(file: Path) -> None:
    """After a change that is meant: PENSTOCK_WRITE_GOLDEN=1 writes them anew, and the diff is read."""
    text, golden = script(reading.load(file)), GOLDEN / f"{file.stem}.sh"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8")


@pytest.mark.processes
@pytest.mark.nightly
def test_bash_reads_every_golden_script() -> None:
    for file in sorted(GOLDEN.glob("*.sh")):
        subprocess.run(["bash", "-n", str(file)], check=True)


def test_every_node_runs_the_prologue() -> None:
    block = Slurm(modules=("cuda",), prologue=("mkdir -p /tmp/x", "echo it's {here} || give_up no"))
    text = script(Deployment("m", "one", "slurm", slurm=block))
    on_node = text.partition("on_node=")[2]
    words = shlex.split(on_node.partition("  # the lines")[0])
    assert words == [f"{slurm_script._GIVE_UP}\nmkdir -p /tmp/x\necho it's {{here}} || give_up no\n"]
    assert text.index("module load cuda") < text.index("on_node="), "what changes variables alone, once"


def refused(**block: object) -> list[str]:
    deployment = Deployment("m", "one", "slurm", slurm=msgspec.convert(block, Slurm))
    return [f"{problem.path}: {problem.message}" for problem in slurm_script.problems(deployment, RUN + "one")]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"partition": "gpu\n#SBATCH --uid=0"}, "slurm.partition: 'gpu\\n#SBATCH --uid=0' cannot be written"),
        ({"account": 'a"b'}, "slurm.account"),
        ({"qos": "a b"}, "slurm.qos"),
        ({"time": "soon"}, 'slurm.time: "soon" is no time'),
        ({"memory": "lots"}, 'slurm.memory: "lots" is no size'),
        ({"modules": ["cuda\nrm -rf /"]}, "slurm.modules"),
        ({"prologue": ["export A=1\nexport B=2"]}, "slurm.prologue"),
        ({"venv": "/x\n"}, "slurm.venv"),
        ({"directives": ["output=/tmp/x"]}, 'slurm.directives: "output" is set by penstock'),
        ({"directives": ["--mem=3G"]}, 'slurm.directives: "mem" is set by another field'),
        ({"directives": ["mail-type=END\n"]}, "slurm.directives"),
        ({"directives": ["clusters=gpu"]}, 'slurm.directives: "clusters" would send the jobs to another cluster'),
        ({"directives": ["--cluster gpu"]}, 'slurm.directives: "cluster" would send the jobs to another cluster'),
        ({"directives": ["-M gpu"]}, 'slurm.directives: "M" would send the jobs to another cluster'),
        ({"directives": ["no-requeue --clusters=gpu"]}, "slurm.directives: 'no-requeue --clusters=gpu' is more than"),
        ({"successor_s": -1}, "slurm.successor_s: -1 is below 0"),
        ({"cpus_per_node": 0}, "slurm.cpus_per_node: 0 is below 1"),
    ],
)
def test_a_word_that_would_be_another_line_is_refused(block: dict[str, object], words: str) -> None:
    (told,) = refused(**block)
    assert told.startswith(words)


def test_a_gateway_in_a_job_needs_keys_and_a_page_of_a_controller_there_a_login() -> None:
    with pytest.raises(SpecError) as caught:
        reading.from_mapping({"model": "m", "target": "slurm", "gateway": {"on": "job", "auth": "none"}})
    (problem,) = caught.value.problems
    assert (problem.path, problem.hint) == ("gateway.auth", "set gateway.auth: keys, or on: login")
    gateway, block = GatewaySpec(on="job", auth="keys"), Slurm(controller="job")
    open_to_all = Deployment("m", "one", "slurm", gateway=gateway, slurm=block, ui=Ui(login="none"))
    (problem,) = slurm_script.problems(open_to_all, RUN + "one")
    assert (problem.path, problem.message.split(" reaches")[0]) == ("ui.login", "everyone who")
    assert slurm_script.problems(msgspec.structs.replace(open_to_all, ui=True), RUN + "one") == []


def test_good_words_are_taken_and_a_run_folder_that_a_script_cannot_name_is_refused() -> None:
    assert refused(partition="gpu,gpu-long", constraint="h100&ib", time="1-12:30", memory="64G", gres="gpu:h100:4",
                   directives=["--reservation=x", "no-requeue", "mail-user=a@b.c"]) == []  # fmt: skip
    (problem,) = slurm_script.problems(Deployment("m", "one", "slurm"), "/home/a$b/runs/one")
    assert "PENSTOCK_HOME" in str(problem.hint)


def test_sbatch_reads_from_the_environment_only_what_the_file_leaves_open() -> None:
    def variables(**block: object) -> list[str]:
        deployment = Deployment("m", "one", "slurm", slurm=msgspec.convert(block, Slurm))
        return sorted(slurm_script.variables(deployment))

    assert variables() == ["SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_WCKEY"]
    assert variables(account="lab", directives=["--reservation=x"]) == ["SBATCH_QOS", "SBATCH_WCKEY"]
    assert variables(qos="high", directives=["wckey x"]) == ["SBATCH_ACCOUNT", "SBATCH_RESERVATION"]


def test_a_job_on_the_cpu_asks_for_its_memory_and_one_on_gpus_for_those_and_has_time_to_drain() -> None:
    on_cpu = Deployment("m", "one", "slurm")
    assert slurm_script.needs_of(planned(on_cpu), Slurm()) == slurm_script.Needs(0, 7, 182 * 1024 * 5 // 4 + 1024)
    on_gpus = reading.load(ROOT / "examples" / "slurm-405b.yaml")
    needs = slurm_script.Needs(4, 16, (8 + 4 * 16) * 1024)
    assert slurm_script.needs_of(planned(on_gpus), Slurm()) == needs
    assert slurm_script.needs_of(planned(on_gpus), Slurm(), "h100", 65536) == slurm_script.Needs(4, 16, 65536, "h100")
    assert slurm_script.needs_of(planned(on_gpus), Slurm(memory="64G")).memory_mib is None
    assert slurm_script.needs_of(planned(on_gpus), Slurm(exclusive=True)) == slurm_script.Needs(4, None, 0)
    assert slurm_script.needs_of(planned(on_gpus), Slurm(gres="gpu:h100:4")).gpus == 0
    for limit, signal in ("2", "signal=INT@30"), ("4:00:00", "signal=INT@140"):  # most of a short one is left
        timed = Deployment("m", "one", "slurm", slurm=Slurm(time=limit))
        assert signal in slurm_script.directives(timed, slurm_script.Needs(0, 1, None), RUN)
