"""The compiled gateway: found by its sources' hash alone, and every test of the gateway's passes on it too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import waiting

from penstock.errors import UserError
from penstock.gateway import compiled

ROOT = Path(__file__).resolve().parent.parent
# They put something else in a method's place, which compiled classes do not allow.
REPLACING = (
    *("test_bug_in_a_handler_does_not_leave_the_client_waiting", "test_stream_keeps_its_bytes_its_count_and_its_end"),
    "test_a_full_table_of_files_is_not_the_replicas_failure",
)
ON_COMPILED = """
import sys
from penstock.gateway import compiled
assert compiled.activate() and compiled.is_active()
import penstock.bench.load.connections, penstock.gateway.requests.sending, penstock.wire.http1
ours = (penstock.bench.load.connections, penstock.gateway.requests.sending, penstock.wire.http1)
assert not any(name.__file__.endswith(".py") for name in ours)
import pytest
raise SystemExit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_was_not_compiled_whole_is_not_found(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NATIVE", "1")
    assert not compiled.activate()
    assert not compiled.is_active()
    compiled.folder().mkdir(parents=True)
    for name in compiled.MODULES[1:]:
        (compiled.folder() / f"{name}{compiled._SUFFIX}").touch()
    assert compiled._files(compiled.folder()) == {}
    (compiled.folder() / f"{compiled.MODULES[0]}{compiled._SUFFIX}").touch()
    assert set(compiled._files(compiled.folder())) == set(compiled.MODULES)


def test_without_a_compiler_it_says_what_is_missing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="a C compiler"):
        compiled.build()
    assert compiled.main() == 2
    assert "it runs as Python" in capsys.readouterr().err
    assert not list(empty_cache.rglob("*.so"))


@pytest.mark.processes
def test_tests_of_the_gateway_pass_compiled() -> None:
    """The malformed requests of test_gateway_smuggling among them; 30 s of CPU."""
    try:
        compiled.build()
    except UserError as error:
        pytest.skip(f"{error.message} (make native)")
    tests = sorted(str(path) for name in ("bench_serve", "gateway_*") for path in ROOT.glob(f"tests/test_{name}.py"))
    names = " and ".join(f"not {name}" for name in REPLACING)
    # Of those with processes or sockets only the ones on real loops.
    chosen = ["-m", "not nightly and not postgres", "-k", f"{names} and (not processes or test_gateway_loops)"]
    done = subprocess.run(
        [sys.executable, "-c", ON_COMPILED, "-q", "-p", "no:cacheprovider", *chosen, *tests],
        env=os.environ | {"PENSTOCK_NATIVE": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=waiting.left_s(),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
