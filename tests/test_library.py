"""penstock as a library: lazily imported, typed, and the same as the command line."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from samples import deployment, run_folder

import penstock
from penstock.deployment import library, start
from penstock.errors import UserError
from penstock.run_folder import Desired

ROOT = Path(__file__).parent.parent


@pytest.mark.processes
def test_the_import_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import penstock; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "penstock"]


def test_every_name_leads_somewhere_and_is_documented() -> None:
    for name in penstock.__all__:
        value = getattr(penstock, name)
        assert inspect.getdoc(value), name
        assert name in dir(penstock)
    with pytest.raises(AttributeError, match="no attribute 'launch'"):
        _ = penstock.launch  # type: ignore[attr-defined]
    page = (ROOT / "docs" / "how-to" / "library.md").read_text("utf-8")
    assert [name for name in penstock.__all__ if name not in page and name not in ("Deployment", "State")] == []


def test_a_plan_of_a_model_or_a_deployment_is_that_of_the_command_line(tmp_path: Path) -> None:
    sizing = penstock.plan("llama-3.1-70b", gpu="h100-sxm", gpus=8, concurrency=16)
    assert sizing.fits and sizing.layout is not None and sizing.layout.tensor > 1
    assert not penstock.plan("llama-3.1-70b", gpu="l4").fits
    with pytest.raises(penstock.UserError):
        penstock.plan("llama-3.1-70b", gpu="no-such-card")
    # That of a deployment takes its hardware.
    fields = {"model": "llama-3.1-8b", "hardware": {"gpu": "h100-sxm"}, "parallel": {"tensor": 2}}
    sizing = penstock.plan(fields, gpus=2)
    assert sizing.layout is not None and sizing.layout.tensor == 2
    path = tmp_path / "d.yaml"
    path.write_text("model: llama-3.1-8b\nhardware: {gpu: h100-sxm, gpus_per_node: 4}\nparallel: {tensor: 4}\n")
    for source in (path, str(path), library.deployment_of(path)):
        layout = penstock.plan(source).layout
        assert layout is not None and layout.tensor == 4


@pytest.mark.usefixtures("home")
def test_a_deployment_is_found_by_its_name_and_what_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(deployment(name="d"))
    run.log("replica-0").write_text("first\nlast\n")
    assert penstock.status("d").phase == "starting"
    assert list(penstock.logs("d", last=1)) == ["last"]
    monkeypatch.setattr(start, "up", lambda wanted, replace: start.Started(wanted.name, run.url, "sk-1"))
    monkeypatch.setattr(start, "wait_listening", lambda run: None)
    running = penstock.up({"model": "penstock-demo", "name": "d"}, wait=False)
    assert (running.name, running.url, running.key) == ("d", run.url, "sk-1")
    assert (running.client().base_url, running.client().api_key) == (run.url, "sk-1")
    run.write_desired(Desired("down", 0))
    with pytest.raises(UserError, match="it is down"):
        running.scale(2)
    with pytest.raises(UserError, match="cannot find deployment"):
        penstock.down("nobody")
    with pytest.raises(UserError, match="cannot use this deployment"):
        penstock.up({"modle": "x"})
    with pytest.raises(UserError, match="could not read"):
        penstock.up("a" * 5000)
