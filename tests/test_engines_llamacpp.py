"""The embedded engine behind the seam. What needs its wheel and a model is in test_real_engines, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from samples import DEMO, demo_plan

from penstock.engines import Diagnosis, Place, Seen
from penstock.engines.llamacpp.engine import LlamaCpp, main
from penstock.errors import Problem
from penstock.models import demo
from penstock.planner import Plan
from penstock.spec.deployment import Scalar
from penstock.wire.announcement import Progress

ENGINE = LlamaCpp()
PLACE = Place("127.0.0.1", 41000, "/tmp/x", "/venv/bin/python")
LEGAL = "legal: n-batch, n-ubatch, threads, parallel, verbosity"
PROGRAM = "-m penstock.engines.llamacpp.engine --alias a --port 0 --max-model-len 512 --model"


def gguf_plan(args: dict[str, Scalar | list[Scalar]] | None = None) -> Plan:
    model = msgspec.structs.replace(DEMO, path="/models/demo.gguf", form="gguf")
    return demo_plan(model=model, args=args or {}, env={"A": "1"})


def test_the_command_starts_the_program_in_the_engines_file_with_the_files_arguments() -> None:
    command = ENGINE.command(gguf_plan(), PLACE)
    assert " ".join(command.argv) == (
        "/venv/bin/python -m penstock.engines.llamacpp.engine --model /models/demo.gguf --alias penstock-demo "
        "--host 127.0.0.1 --port 41000 --max-model-len 1024 --parallel 8 --threads 7"
    )
    assert command.env == {"A": "1"}
    argv = ENGINE.command(gguf_plan({"n_batch": 64, "threads": 2}), PLACE).argv
    assert argv[-4:] == ("--threads", "2", "--n-batch", "64")


def test_arguments_it_does_not_take_are_refused() -> None:
    assert ENGINE.problems({"model": 1, "--port": 1, "n_ctx": 1, "flash": 1, "n_batch": 1}) == [
        Problem("engine.args.model", "penstock sets this", "use model"),
        Problem("engine.args.--port", "penstock sets this", "use gateway.port"),
        Problem("engine.args.n_ctx", "penstock sets this", "use engine.max_model_len"),
        Problem("engine.args.flash", "unknown to llamacpp", LEGAL),
    ]


def test_its_log_is_read_stage_by_stage_and_never_backwards() -> None:
    lines = [
        "srv    load_model: loading model '/models/demo.gguf'",
        "load_tensors:   CPU_Mapped model buffer size =     6.00 MiB",
        "llama_context: n_ctx = 8192",
        "llama_model_load: again",
        "penstock: listening on http://127.0.0.1:41000",
    ]
    seen, stages = Seen(Progress("imports", fraction=0.0)), []
    for line in lines:
        seen = ENGINE.read(line, seen, gguf_plan())
        stages.append((seen.progress.stage, seen.progress.fraction))
    assert stages == [("weights", 0.2), ("weights", 0.5), ("kv cache", 0.8), ("kv cache", 0.8), ("probe", 0.99)]


def test_a_death_is_explained_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line, reason, is_final in (
        ("couldn't bind HTTP server socket", "its port was taken by another process", False),
        ("llama_model_load: error loading model: bad file", "the GGUF cannot be read", True),
        ("terminate called: std::bad_alloc", "out of memory", True),
        ("x: error: unrecognized arguments: --y", "it refused its command line", True),
    ):
        diagnosis = ENGINE.diagnose(1, ["x", line])
        assert diagnosis.reason == f"llama.cpp exited with code 1: {reason} ({line})"
        assert diagnosis.is_final is is_final
    assert ENGINE.diagnose(-11, ["x"]) == Diagnosis("llama.cpp was killed by signal 11 (SIGSEGV)")
    with pytest.raises(SystemExit) as caught:
        main(["--model", "m", "--alias", "a", "--port", "1", "--max-model-len", "1", "--frobnicate"])
    assert caught.value.code == 2
    # Its program writes the very line that `diagnose` looks for.
    assert ENGINE.diagnose(2, capsys.readouterr().err.splitlines()).is_final


def test_an_absent_wheel_or_openmp_runtime_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = ENGINE.missing()
    assert missing is not None and missing.reason == "the package xllamacpp is not installed in this Python"
    assert missing.install == "pip install xllamacpp"
    monkeypatch.setattr("ctypes.CDLL", cannot_load)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert ENGINE.missing() is None  # simsimd, a dependency, carries one
    monkeypatch.setattr("site.getsitepackages", lambda: ["/nowhere"])
    missing = ENGINE.missing()
    assert missing is not None and missing.reason.startswith("libgomp.so.1, the OpenMP runtime")
    assert missing.install.startswith("apt-get install libgomp1")


@pytest.mark.nightly
@pytest.mark.llamacpp
def test_a_system_without_openmp_serves_with_the_runtime_of_a_wheel(tmp_path: Path) -> None:
    """The system's library is hidden in a mount namespace, where the system has one."""
    paths = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"libgomp\.so\.1 .*=> (\S+)", paths)
    hide = [f"mount --bind /dev/null {os.path.realpath(path)} &&" for path in found]
    script = f"{' '.join(hide)} exec {sys.executable} {PROGRAM} {demo.gguf_file()}"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    engine = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert engine.stderr is not None
        assert any("penstock: listening" in line for line in engine.stderr)
        assert not hide or (tmp_path / "libgomp.so.1").is_symlink()
    finally:
        engine.terminate()
        engine.communicate(timeout=60)


@pytest.mark.llamacpp
def test_an_engine_that_is_told_to_stop_as_it_begins_to_listen_ends() -> None:
    """Its server hung in its destructor, or a thread of it took the signal: about one start in three."""
    for _ in range(8):
        argv = [sys.executable, *PROGRAM.split(), str(demo.gguf_file())]
        engine = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        assert engine.stderr is not None
        assert any("penstock: listening" in line for line in engine.stderr)
        engine.terminate()
        engine.communicate(timeout=60)
        assert engine.returncode == 0
