"""The batch script, byte by byte, for the shipped examples; and the words that may not stand in it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from golden_files import cases
from samples import LLAMA_70B, demo_plan

from penstock.errors import SpecError
from penstock.planner import Need, Plan
from penstock.spec import reading
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Cache, Deployment, GatewaySpec, Hardware, Parallel, Ui
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
    return slurm_script.render(deployment, plan, RUN + deployment.name, "/usr/bin/python3", needs, "/home/ada")


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


MODULES = {"cuda/12.4": "load cuda/12.4", "gcc/13 openmpi": "load gcc/13 openmpi", "use-cuda": "load use-cuda"}
MODULES |= {own: own for own in ("--force purge", "purge", "use $HOME/modules", "swap cray gnu", "unload intel/2024")}


def test_entries_of_modules_are_words_of_module() -> None:
    text = script(Deployment("m", "one", "slurm", slurm=Slurm(modules=tuple(MODULES))))
    lines = [f"module {line} || give_up 'failed: module {line}'\n" for line in MODULES.values()]
    assert "".join(lines) in text and refused(modules=[*MODULES]) == []


def contained(**block: Any) -> tuple[str, str]:
    """What stands before, and what in, the command of the nodes' step."""
    wanted = Deployment(
        "m", "one", "slurm", hardware=Hardware("h100-sxm", 4), cache=Cache("~/w"), slurm=msgspec.convert(block, Slurm)
    )
    assert slurm_script.problems(wanted, RUN + "one") == []
    step = script(wanted).partition("leftovers: ")[0].partition('"${step[@]}"')[2].partition("code=$?")[0]
    return step.partition(" --wait")[0].strip(), step.partition("node \\\n")[2].partition(" -m penstock")[0].strip()


def test_a_container_gets_mounts_code_and_its_flags_in_the_words_of_its_runtime() -> None:
    code = f"-u PYTHONHOME PYTHONNOUSERSITE=1 PYTHONPATH={RUN}one/code HOME=/home/ada"
    step, words = contained(container="/i/a.sif", container_flags=["--bind /data", "--no-home"], python="/opt/python")
    seen = "/home/ada/.penstock,/shared/models/x,/home/ada/w"
    assert (step, words) == (
        "", f"apptainer exec --nv --bind {seen} --bind /data --no-home /i/a.sif env {code} /opt/python"
    )  # fmt: skip
    block = {"container": "nvcr.io#nvidia/vllm:1", "container_runtime": "pyxis", "container_flags": ["--mpi=none"]}
    mounts = "/home/ada:/home/ada,/tmp:/tmp,/shared/models/x:/shared/models/x"
    options = f"'--container-image=nvcr.io#nvidia/vllm:1' --container-mounts={mounts} --no-container-entrypoint"
    assert contained(**block) == (f"{options} --mpi=none", f"env {code} python3")
    exports = ["export TOKEN=$(cat ~/.token)"]
    step, words = contained(container="vllm:1", container_runtime="podman-hpc", prologue=exports)
    first = "podman-hpc run --rm --gpu --net=host --ipc=host --pid=host --entrypoint=env --volume=/home/ada:/home/ada"
    assert step == "" and words.startswith(first) and "'--env=HF_*'" in words
    assert words.endswith(f"--env=TOKEN vllm:1 {code} python3")


def refused(**block: object) -> list[str]:
    deployment = Deployment("m", "one", "slurm", slurm=msgspec.convert(block, Slurm))
    return [str(problem) for problem in slurm_script.problems(deployment, RUN + "one")]


@pytest.mark.parametrize(("block", "problem"), cases("slurm/file_mistakes.txt"))
def test_a_word_that_would_be_another_line_is_refused(block: str, problem: str) -> None:
    assert refused(**json.loads(block)) == [problem]


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
