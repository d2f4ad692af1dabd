"""llama.cpp from the wheel `xllamacpp`, which has no server command: this file is also the program to start."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import signal
import site
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from penstock.engines import (
    KEY_VARIABLE,
    Command,
    Death,
    Diagnosis,
    Engine,
    Missing,
    Place,
    Seen,
    explain,
    how_it_ended,
)
from penstock.engines.llamacpp import names
from penstock.errors import Problem
from penstock.planner import Plan
from penstock.spec.deployment import Scalar
from penstock.text import bare_flag
from penstock.wire.announcement import Progress

# Lines of llama.cpp's own log, and of the program below; xllamacpp 2026.10.
_MILESTONES = (
    (re.compile(r"llama_model_load|load_model: loading model"), "weights", 0.2),
    (re.compile(r"load_tensors"), "weights", 0.5),
    (re.compile(r"llama_context|llama_kv_cache"), "kv cache", 0.8),
    (re.compile(r"penstock: listening"), "probe", 0.99),
)
_OPENMP = "libgomp.so.1"
_DEATHS = (
    Death(re.compile(r"(ImportError: .*)"), "a library is missing ({0})", "See docs/reference/engines.md."),
    Death(
        re.compile(r"(?i)(.*(?:address already in use|couldn't bind).*)"),
        "its port was taken by another process ({0})",
        is_final=False,
    ),
    Death(
        re.compile(r"(?i)(.*(?:failed to open GGUF|invalid magic|error loading model: ).*)"),
        "the GGUF cannot be read ({0})",
    ),
    Death(
        re.compile(r"(?i)(.*(?:failed to allocate|bad_alloc|out of memory).*)"),
        "out of memory ({0})",
        "Lower engine.max_model_len.",
    ),
    Death(
        re.compile(r"(.*error: (?:unrecognized arguments: |argument ).*)"),
        "it refused its command line ({0})",
        "Check engine.args (docs/reference/engines.md).",
    ),
)
# Set by penstock from other fields of the file.
_OURS = {
    "model": "model",
    "host": "gateway.host",
    "port": "gateway.port",
    "alias": "name",
    "n-ctx": "engine.max_model_len",
}
_LEGAL = ("n-batch", "n-ubatch", "threads", "parallel", "verbosity")


class LlamaCpp(Engine):
    name = "llamacpp"
    package = "xllamacpp"
    forms = ("gguf",)
    metrics = names.METRICS
    prefix, families = names.PREFIX, names.FAMILIES

    def missing(self) -> Missing | None:
        if importlib.util.find_spec("xllamacpp") is None:
            return Missing("the package xllamacpp is not installed in this Python", "pip install xllamacpp")
        if not _finds_openmp():
            reason = f"{_OPENMP}, the OpenMP runtime that it needs, is not on this machine"
            return Missing(reason, "apt-get install libgomp1, or pip install simsimd, which carries it")
        return None

    def version(self) -> str:
        return metadata.version("xllamacpp")

    def problems(self, args: dict[str, Scalar | list[Scalar]], version: str | None = None) -> list[Problem]:
        problems = []
        for key in args:
            flag = bare_flag(key)
            if flag in _OURS:
                problems.append(Problem(f"engine.args.{key}", "penstock sets this", f"use {_OURS[flag]}"))
            elif flag not in _LEGAL:
                problems.append(Problem(f"engine.args.{key}", "unknown to llamacpp", f"legal: {', '.join(_LEGAL)}"))
        return problems

    def command(self, plan: Plan, place: Place) -> Command:
        argv = [place.python, "-m", "penstock.engines.llamacpp.engine", "--model", plan.model.path]
        argv += ["--alias", *plan.served_names, "--host", place.host, "--port", str(place.port)]
        settings: dict[str, Scalar | list[Scalar]] = {
            "max-model-len": plan.max_model_len,
            "parallel": plan.max_num_seqs,
            "threads": plan.n_threads,
        }
        for key, value in (settings | plan.args).items():
            argv += [f"--{key.lstrip('-').replace('_', '-')}", str(value)]
        env = {} if place.key is None else {KEY_VARIABLE: place.key}
        return Command(tuple(argv), env | plan.env)

    def read(self, line: str, seen: Seen, plan: Plan) -> Seen:
        for pattern, stage, fraction in _MILESTONES:
            if pattern.search(line) and (seen.progress.fraction or 0) < fraction:
                return msgspec.structs.replace(seen, progress=Progress(stage, fraction=fraction))
        return seen

    def diagnose(self, exit_code: int, tail: Sequence[str]) -> Diagnosis:
        return explain(f"llama.cpp {how_it_ended(exit_code)}", _DEATHS, tail)


def _finds_openmp() -> bool:
    if not sys.platform.startswith("linux"):
        return True
    try:
        ctypes.CDLL(_OPENMP)
    except OSError:
        return _carried_openmp() is not None
    return True


def _carried_openmp() -> Path | None:
    """The OpenMP runtime that another wheel carries under a name of its own; simsimd is a dependency for it."""
    folders = (Path(folder) for folder in site.getsitepackages())
    return next((path for folder in folders for path in folder.glob("*.libs/libgomp*.so*")), None)


def _link_openmp() -> None:
    """Start again with the carried runtime under the name that llama.cpp's wheel is linked with."""
    folder = tempfile.gettempdir()  # of this engine alone, removed with it
    carried = _carried_openmp()
    if carried is None or folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        return
    link = Path(folder) / _OPENMP
    link.unlink(missing_ok=True)
    link.symlink_to(carried)
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    os.execv(sys.executable, [sys.executable, "-m", "penstock.engines.llamacpp.engine", *sys.argv[1:]])


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve one GGUF file over llama.cpp's own HTTP server until SIGTERM or SIGINT."""
    options = options_of(argv)
    # Blocked in every thread and waited for: a signal that one of the server's threads takes would not wake this one.
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        server = server_of(options)
    except ImportError:
        _link_openmp()
        raise
    print(f"penstock: listening on {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait(stops)
    # Not through the server's destructor: it waits for ever where its loop had not begun yet when it was told to stop.
    os._exit(0)


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="penstock.engines.llamacpp.engine")
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", nargs="+", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--n-batch", type=int)
    parser.add_argument("--n-ubatch", type=int)
    parser.add_argument("--verbosity", type=int, default=3)
    return parser.parse_args(argv)


def server_of(options: argparse.Namespace) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = set(options.alias)
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.max_model_len * options.parallel
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = True
    params.ui = False
    # llama.cpp leaves /health and /v1/models open; neither has a secret.
    params.api_keys = [key for key in (os.environ.get(KEY_VARIABLE),) if key]
    params.cache_ram_mib = 0  # its default keeps up to 8 GiB of old prompts, which no plan has counted
    if options.n_batch:
        params.n_batch = options.n_batch
    if options.n_ubatch:
        params.n_ubatch = options.n_ubatch
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
