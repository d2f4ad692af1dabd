"""The rules of STYLE.md that a machine can hold: who imports whom, names, sizes, prints, foreign names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engines import vllm_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "penstock"
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = [*FILES, *sorted((ROOT / "tools").glob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]
TREES = {path: ast.parse(path.read_text("utf-8")) for path in OURS}

# A unit (a module of the package, or a whole sub-package) imports only units of a lower level, and itself.
LEVELS = {
    "penstock": 0,
    "errors": 0,
    "units": 0,
    "target_blocks": 0,
    "spec": 1,
    "announce": 1,
    "catalog": 1,
    "log_sources": 1,
    "metrics": 1,
    "native": 1,
    "sse": 1,
    "store_schema": 1,
    "warden": 1,
    "client": 2,
    "plan": 2,
    "processes": 2,
    "engines": 3,
    "machine": 3,
    "hub": 3,
    "models": 3,
    "plan_view": 3,
    "runs": 3,
    "ssh": 3,
    "remote_node": 4,
    "store": 2,
    "ray_dashboard": 3,
    "ray_job": 0,
    "ray_guard": 5,
    "slurm_queue": 1,
    "slurm_script": 3,
    "slurm_site": 3,
    "sweep": 3,
    "node_facts": 4,
    "node_check": 5,
    "collective": 5,
    "reach_check": 6,
    "model_check": 6,
    "findings": 6,
    "network_findings": 7,
    "doctor": 8,
    "formation": 5,
    "messenger": 3,
    "rendezvous": 5,
    "ray_nodes": 6,
    "parts": 7,
    "gpu_claims": 4,
    "crew": 6,
    "follower": 8,
    "engine_process": 4,
    "facts": 4,
    "measured": 4,
    "plan_plot": 4,
    "targets": 4,
    "logs": 5,
    "observe": 5,
    "planning": 5,
    "preflight": 5,
    "chat": 6,
    "cli_keys": 6,
    "cli_plan": 6,
    "deploy": 6,
    "gateway": 6,
    "node": 9,
    "testing": 6,
    "bench": 7,
    "cli_bench_asks": 8,
    "cli_bench_launch": 9,
    "cli_bench_sweep": 10,
    "cli_bench_more": 11,
    "cli_bench": 10,
    "cli_gateway": 7,
    "cli_remote": 7,
    "remote": 6,
    "cli_doctor": 9,
    "gateway_job": 7,
    "placed_gateway": 6,
    "controller": 7,
    "screen": 7,
    "cli": 12,
    "__main__": 13,
}
# Units that must start alone in a small place: the only units they may import.
ALONE = {
    "gateway": {"penstock", "errors", "units", "announce", "native", "store", "gateway"},
    "chat": {"penstock", "errors", "units", "client", "chat"},
    "warden": set[str](),
}
PURE = (
    *sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "plan").glob("*.py")),
    *(
        "plan_view.py",
        "gateway/http1.py",
        "gateway/route.py",
        "gateway/health.py",
        "gateway/peek.py",
        "gateway/stream.py",
        "gateway/memory.py",
        "gateway/exposition.py",
        "bench/readout.py",
        "bench/scrape.py",
        "bench/show.py",
        "bench/stats.py",
        "bench/validity.py",
        "sse.py",
        "metrics.py",
        "units.py",
        "errors.py",
    ),
)
EFFECTS = {
    *("asyncio", "logging", "os", "pathlib", "psutil", "random", "secrets", "select", "shutil", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "datetime", "http.client"),
}
HEAVY = {
    *("gguf", "gradio", "huggingface_hub", "kubernetes", "matplotlib", "numpy", "ray", "rich", "safetensors"),
    *("tokenizers", "torch", "transformers", "vllm", "xllamacpp", "yaml"),
}
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "base", "core", "types", "manager", "managers"}
FORBIDDEN_CLASS = re.compile(r"^Abstract|Mixin$|Impl$|Manager$")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 70, 8
# Only the command line prints, and the programs whose standard output is a log file.
MAY_PRINT = {
    "cli.py": "the command line",
    "cli_bench_more.py": "the command line",
    "cli_bench_sweep.py": "the command line",
    "cli_keys.py": "the command line",
    "cli_plan.py": "the command line",
    "cli_bench.py": "the command line",
    "cli_gateway.py": "the command line",
    "cli_remote.py": "the command line",
    "cli_doctor.py": "the command line",
    "chat": "the terminal chat",
    "screen.py": "StartDisplay writes to the stream that the command line gives it",
    "native.py": "python -m penstock.native",
    "node.py": "a program of its own: its output is the replica's log",
    "follower.py": "the same, on further nodes",
    "parts.py": "the same",
    "sweep.py": "the same, at a job's end",
    "engine_process.py": "copies the engine's output into the node's, the replica's log",
    "engines/llamacpp.py": "its `main` is the engine's program",
    "controller.py": "a program of its own: its output is controller.log",
    "testing": "programs and checks for tests",
}


def where(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return TREES[path]


def unit_of(module: str) -> str:
    """ "penstock.gateway.http1" -> "gateway"; "penstock" itself stays."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def unit_of_file(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "penstock" if first == "__init__" else first


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, inside functions too; `from penstock import runs` is penstock.runs."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where(path)}:{node.lineno}: relative import"
            module = str(node.module)
            inside = [f"{module}.{name.name}" for name in node.names if is_module(f"{module}.{name.name}")]
            yield from ((node.lineno, name) for name in inside or [module])


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.startswith("penstock.") and (path.is_dir() or path.with_suffix(".py").is_file())


def ours_imported(path: Path) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in imported(path) if name.partition(".")[0] == "penstock")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_unit_has_a_level() -> None:
    units = {unit_of_file(path) for path in FILES}
    assert units <= LEVELS.keys(), f"give these a level in LEVELS: {sorted(units - LEVELS.keys())}"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_imports_only_go_down(path: Path) -> None:
    unit = unit_of_file(path)
    up = [
        f"{where(path)}:{line} imports {name}: {unit} is on level {LEVELS[unit]}, {other} on {LEVELS[other]}"
        for line, name in ours_imported(path)
        if (other := unit_of(name)) != unit and LEVELS[other] >= LEVELS[unit] > 0
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("unit", ALONE)
def test_a_unit_that_starts_alone_imports_little(unit: str) -> None:
    files = [path for path in FILES if unit_of_file(path) == unit]
    assert files
    too_much = [
        f"{where(path)}:{line} imports {name}"
        for path in files
        for line, name in ours_imported(path)
        if unit_of(name) not in ALONE[unit]
    ]
    assert not too_much, "\n".join(too_much)


@pytest.mark.parametrize("package", ["targets", "catalog"])
def test_files_of_a_table_do_not_import_each_other(package: str) -> None:
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for path in (PACKAGE / package).glob("*.py")
        for line, name in ours_imported(path)
        if name.startswith(f"penstock.{package}.")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_fake_engine_starts_without_penstocks_own_dependencies() -> None:
    files = (PACKAGE / "testing" / "fake_engine").glob("*.py")
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for path in files
        for line, name in imported(path)
        if name.split(".")[0] in {"msgspec", "psutil", "yaml", "rich", "uvloop"}
        or (name.startswith("penstock.") and not name.startswith("penstock.testing.fake_engine"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_nothing_that_acts(name: str) -> None:
    acting = [f"{name}:{line} imports {module}" for line, module in imported(PACKAGE / name) if module in EFFECTS]
    assert not acting, "\n".join(acting)


def test_heavy_packages_are_imported_inside_functions() -> None:
    heavy = [
        f"{where(path)}:{node.lineno} imports {name} for the whole module"
        for path in FILES
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        if name.partition(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(heavy)


def test_modules_are_nouns_of_the_field() -> None:
    wrong = [where(path) for path in OURS if {path.stem, path.parent.name} & FORBIDDEN_MODULES]
    assert not wrong, f"not a noun of the field: {wrong}"


def test_class_names_say_what_they_are() -> None:
    wrong = [
        f"{where(path)}:{node.lineno} {node.name}"
        for path in OURS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and FORBIDDEN_CLASS.search(node.name)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    lines = {where(path): len(path.read_text("utf-8").splitlines()) for path in OURS}
    long = [f"{name}: {count} lines" for name, count in lines.items() if count > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES}: {long}"


def test_functions_are_short() -> None:
    long = [
        f"{where(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in OURS
        for node in functions(path)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, f"over {MAX_FUNCTION_LINES}:\n" + "\n".join(long)


def test_functions_take_few_parameters() -> None:
    many = [
        f"{where(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in functions(path)
        if len([a for a in [*node.args.args, *node.args.kwonlyargs] if a.arg not in ("self", "cls")]) > MAX_PARAMETERS
    ]
    assert not many, f"over {MAX_PARAMETERS} parameters, use a frozen struct:\n" + "\n".join(many)


def test_only_the_command_line_and_programs_print() -> None:
    prints = [
        f"{where(path)}:{node.lineno}"
        for path in FILES
        if not MAY_PRINT.keys() & {where(path), where(path).split("/")[0]}
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, f"only {sorted(MAY_PRINT)} may print: {prints}"


def test_no_file_of_the_package_names_a_folder_of_a_developer() -> None:
    found = [
        f"{where(path)}:{number} {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(r"(?<![\w.])/(work|root|home)/", line)
    ]
    assert not found, "\n".join(found)


def test_names_of_vllm_are_data_in_one_file() -> None:
    # --host, --port and --model are everybody's, --max-model-len is also what llamacpp's own program calls it.
    flags = set(vllm_names.FLAGS.values()) - {"--host", "--port", "--model", "--max-model-len"}
    found = [
        f"{where(path)}:{node.lineno} {node.value!r}"
        for path in FILES
        if where(path) != "engines/vllm_names.py" and unit_of_file(path) != "testing"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value in flags or re.search(r"\bvllm:[a-z]", node.value)
    ]
    assert not found, "vLLM's names belong in engines/vllm_names.py:\n" + "\n".join(found)
