"""Several threads that use a type for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import waiting

PROGRAM = """
import sys, threading
import msgspec
from penstock.wire.structs import prepare_loaded

sys.setswitchinterval(1e-6)
for _ in range(200):
    class A(msgspec.Struct):
        x: int = 0
        y: "dict[str, list[int]]" = {}
    class B(msgspec.Struct):
        a: "tuple[A, ...]" = ()
        c: "A | None" = None
    prepare_loaded()
    start = threading.Barrier(4)
    def decode():
        start.wait()
        msgspec.json.decode(b'{"a": [{"x": 1, "y": {"k": [1]}}], "c": {"x": 1}}', type=B)
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


@pytest.mark.processes
@pytest.mark.nightly
def test_types_that_were_prepared_do_not_crash_threads() -> None:
    """Without it msgspec ends the process within some ten rounds."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=waiting.left_s())
    assert done.returncode == 0, done.stderr
