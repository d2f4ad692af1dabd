"""A whole start on a machine with a GPU, as far as penstock can see: nvidia-smi, vLLM and its log are stand-ins.

The log is that of a real start (golden/vllm-0.33.0), and what it reports must come back in the next plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Place, a_place, ask, call

from penstock import processes

ROOT = Path(__file__).parent.parent
LOG = Path(__file__).parent / "golden" / "vllm-0.33.0" / "h200-start.log"
NVIDIA_SMI = """#!/bin/sh
for index in 0 1 2; do echo "$index, GPU-4f1c$index, NVIDIA H200, 143771, 143000"; done
"""
# `vllm serve FOLDER ...`: the log of the real start, then the fake engine.
SERVE = """
import os
import sys
from pathlib import Path

from penstock.testing.fake_engine.__main__ import main

words = sys.argv[3:]
at = words.index("--served-model-name")
names = words[at + 1 : words.index("--host")]
place = [*words[words.index("--host") :][:2], *words[words.index("--port") :][:2]]
plan = Path(os.environ["VLLM_CACHE_ROOT"]) / "startup_plan" / "plan.json"
if os.environ["VLLM_ENABLE_STARTUP_PLAN"] == "1":
    plan.parent.mkdir()
    plan.write_text("")
print(Path({log!r}).read_text("utf-8"), flush=True)
sys.exit(main(["--model", sys.argv[2], "--served-model-name", *names, *place, "--load-s", "0"]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    tools, site = tmp_path / "bin", tmp_path / "site"
    program, info = site / "vllm" / "entrypoints" / "cli" / "main.py", site / "vllm-0.33.0.dist-info"
    for folder in (tools, program.parent, info):
        folder.mkdir(parents=True)
    for package in (program.parent, program.parent.parent, site / "vllm"):
        (package / "__init__.py").touch()
    program.write_text(SERVE.format(log=str(LOG)), "utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT}")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr("penstock.engines.vllm.engine._missing_library", lambda: None)
    with a_place(tmp_path) as found:
        yield found


@pytest.mark.processes
def test_what_a_start_reports_is_shown_and_planned_with(place: Place) -> None:
    path = place.folder / "gpu.yaml"
    path.write_text(
        "model: penstock-demo\nname: gpu\ngateway: {port: 0}\nhardware: {gpu_ids: [2]}\n"
        "workload: {input_tokens: 500, tpot_ms: 0.01}\n",
        "utf-8",
    )
    before = call("plan", path, "--json").json
    assert before["fits"] and before["measured_on"] is None
    done = call("up", path)
    assert done.code == 0, done.err
    assert "warning: workload.tpot_ms 0.01 is missed: likely " in done.err
    run = place.run("gpu")
    ask(run)
    visible = {
        processes.environment(each).get("CUDA_VISIBLE_DEVICES") for each in processes.find_marked(str(run.path), "0")
    }
    assert visible == {"2"} and run.handle().replicas["0"]["gpus"] == [2]
    made = run.plan()
    assert (made.device, made.engine_version, made.forecast is not None) == ("cuda", "0.33.0", True)
    planned = before["memory"]["kv_cache_gib"]["likely"]
    line = f"110.98 GiB of KV cache a GPU, planned {planned:.2f} ({110.98 / planned - 1:+.1%})"
    status = call("status", "gpu").out
    assert line in done.out and line in status
    assert "replica 0 ready after" in status.split("starts, newest first:")[1]
    difference = call("status", "gpu", "--json").json["kv_cache"]["0"]
    assert difference["measured_kv_gib"] == 110.98
    assert difference["planned_kv_gib"] == pytest.approx(planned, abs=0.01)
    after = call("plan", path, "--json").json
    assert after["measured_on"] is not None
    assert after["memory"]["kv_cache_gib"]["likely"] == pytest.approx(110.98, abs=0.02)
    assert "measured at an earlier start on" in " ".join(after["warnings"])
    assert call("plan", path, "--no-measured", "--json").json == before
    assert before["start"] is None and after["start"]["n_starts"] == 1
    (cache,) = (run.path.parent.parent / "engine-cache").glob("vllm-0.33.0/*")
    (start,) = cache.glob("start-*")
    assert (start / "startup_plan" / "plan.json").exists()
    assert (start / "torch_compile_cache").resolve() == cache / "torch_compile_cache"
    again = call("up", path, "--dry-run", "--json", "--name", "other", "--set", "gateway.port=0").json
    assert again["plan"]["forecast"]["kv_cache_gib"] == pytest.approx(110.98, abs=0.02)
