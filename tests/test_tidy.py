"""The rules of STYLE.md that a machine can hold: who imports whom, names, sizes, prints, foreign names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from penstock.engines.vllm import names
from penstock.spec.deployment import TARGETS
from penstock.targets import Capability, Target

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "penstock"
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = [*FILES, *sorted((ROOT / "tools").glob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}
TREES = {path: ast.parse(path.read_text("utf-8")) for path in OURS}

# A room is a module or a folder at the top of the package. It imports rooms of a lower level, and itself.
ROOMS = (
    ("errors",),
    ("text", "paths"),
    ("spec", "hardware", "wire"),
    ("models", "processes", "log_lines"),
    ("planner",),
    ("engines", "run_folder"),
    ("node", "targets", "gateway"),
    ("deployment",),
    ("bench",),
    ("cli", "testing"),
    ("__main__",),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
MAX_FOLDERS, MAX_FILES = 14, 8
# The gateway must start alone in a small container; the watchdog must survive whatever breaks the rest.
ALONE = {
    "penstock/gateway": {"penstock", "errors", "paths", "text", "spec", "wire", "gateway"},
    "penstock/deployment/controller/watchdog.py": set[str](),
}
PURE = (
    *sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "planner").rglob("*.py")),
    *("cli/plan_text.py", "text.py", "errors.py", "wire/http1.py", "wire/sse.py", "wire/prometheus.py"),
    *("gateway/routing/policies.py", "gateway/routing/health.py", "gateway/routing/replicas.py"),
    *("gateway/request.py", "gateway/streams.py", "gateway/metrics.py", "deployment/controller/decide.py"),
    *("bench/results/parse.py", "bench/results/engine_metrics.py", "bench/results/stats.py"),
    *("bench/results/validity.py", "bench/report/text.py"),
)
EFFECTS = {
    *("asyncio", "logging", "os", "pathlib", "psutil", "random", "secrets", "select", "shutil", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "datetime", "http.client"),
}
HEAVY = {
    *("gguf", "gradio", "huggingface_hub", "kubernetes", "matplotlib", "numpy", "ray", "rich", "safetensors", "scipy"),
    *("tokenizers", "torch", "transformers", "vllm", "xllamacpp", "yaml"),
}
# Modules of the room that are no target: the ssh program, and the verbs on a login node.
SHARED_BY_TARGETS = {"openssh", "login"}
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "base", "core", "types", "manager", "managers"}
FORBIDDEN_CLASS = re.compile(r"^Abstract|Mixin$|Impl$|Manager$")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 70, 8
# Only the command line prints, and programs whose standard output is a log file.
MAY_PRINT = {
    "cli": "the command line",
    "node": "a program: its output is the replica's log",
    "deployment/controller": "a program: its output is controller.log",
    "gateway/compiled.py": "python -m penstock.gateway.compiled",
    "engines/llamacpp/engine.py": "its `main` is the engine's program",
    "testing": "programs and checks for tests",
}


def where(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return TREES[path]


def room_of(module: str) -> str:
    """ "penstock.gateway.http1" -> "gateway"; "penstock" itself stays."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def room_of_file(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "penstock" if first == "__init__" else first


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, inside functions too; `from penstock import text` is penstock.text."""
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


def test_every_room_has_a_level() -> None:
    rooms = {room_of_file(path) for path in FILES} - {"penstock"}
    assert rooms == LEVELS.keys(), f"LEVELS and the package differ in {sorted(rooms ^ LEVELS.keys())}"


def test_the_top_of_the_package_is_small() -> None:
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    files = list(PACKAGE.glob("*.py"))
    assert len(folders) <= MAX_FOLDERS, sorted(folders)
    assert len(files) <= MAX_FILES, sorted(files)


def test_imports_only_go_down() -> None:
    up = [
        f"{where(path)}:{line} imports {name}: {room} is on level {LEVELS[room]}, {other} on {LEVELS[other]}"
        for path in FILES
        if (room := room_of_file(path)) != "penstock"
        for line, name in ours_imported(path)
        if (other := room_of(name)) not in (room, "penstock") and LEVELS[other] >= LEVELS[room]
    ]
    assert not up, "\n".join(up)


def test_no_import_goes_in_a_circle() -> None:
    """Within a room too. Imports inside functions count: they are circles that Python happens to survive."""
    graph = {module_of(path): {name for _, name in ours_imported(path)} & MODULES for path in FILES}
    graph["penstock"] = set()  # the library's face: it imports when a name is used, and for type checkers
    done: set[str] = set()
    circles = []

    def visit(module: str, way: tuple[str, ...]) -> None:
        if module in way:
            circles.append(" -> ".join((*way[way.index(module) :], module)))
        elif module not in done:
            for name in sorted(graph[module] - {module}):
                visit(name, (*way, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    assert not circles, "\n".join(circles)


def test_no_package_imports_its_own_submodules() -> None:
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for path in FILES
        if path.name == "__init__.py" and path.parent != PACKAGE
        for line, name in ours_imported(path)
        if name.startswith(f"{module_of(path)}.")
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_that_start_alone_import_little() -> None:
    too_much = [
        f"{where(path)}:{line} imports {name}"
        for place, legal in ALONE.items()
        for path in FILES
        if path.relative_to(ROOT).as_posix().startswith(place)
        for line, name in ours_imported(path)
        if room_of(name) not in legal
    ]
    assert not too_much, "\n".join(too_much)


def test_targets_do_not_import_each_other() -> None:
    targets = PACKAGE / "targets"
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for path in targets.rglob("*.py")
        for line, name in ours_imported(path)
        if name.startswith("penstock.targets.")
        and name.split(".")[2] not in {path.relative_to(targets).parts[0].removesuffix(".py"), *SHARED_BY_TARGETS}
    ]
    assert not wrong, "\n".join(wrong)


# Its block and its row in the file's type name a target; "ray" is also a package and an executor.
MAY_NAME_TARGETS = {"spec/blocks.py": frozenset(TARGETS), "spec/deployment.py": frozenset(TARGETS)}
RAY_THE_LIBRARY = ("planner", "engines", "node", "hardware", "deployment/doctor/nodes.py")


def test_a_target_has_nine_methods_and_every_capability_is_read() -> None:
    methods = {name for name, value in vars(Target).items() if callable(value) and not name.startswith("_")}
    assert methods == {"check", "machines", "survey", "render", "place", "status", "logs", "end", "keep_up"}
    outside = "".join(path.read_text("utf-8") for path in FILES if room_of_file(path) == "deployment")
    assert [name for name in get_args(Capability) if f'"{name}"' not in outside] == []


def test_only_targets_know_the_names_of_targets() -> None:
    """As a word of its own, or at the head of a field's path ("slurm.time"); an import of one counts too."""
    wrong = []
    for path in FILES:
        if room_of_file(path) == "targets":
            continue
        legal = MAY_NAME_TARGETS.get(where(path), frozenset())
        legal |= {"ray"} if where(path).startswith(RAY_THE_LIBRARY) else frozenset()
        words = [
            (node.lineno, node.value.partition(".")[0])
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        words += [
            (line, name.split(".")[2])
            for line, name in ours_imported(path)
            if name.startswith("penstock.targets.") and name.count(".") >= 2
        ]
        wrong += [f"{where(path)}:{line} names {word}" for line, word in words if word in {*TARGETS} - legal]
    assert not wrong, "\n".join(wrong)


def test_pure_modules_import_nothing_that_acts() -> None:
    acting = [
        f"{name}:{line} imports {module}"
        for name in PURE
        for line, module in imported(PACKAGE / name)
        if module in EFFECTS
    ]
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
        if not any(where(path).startswith(place) for place in MAY_PRINT)
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
    flags = set(names.FLAGS.values()) - {"--host", "--port", "--model", "--max-model-len"}
    found = [
        f"{where(path)}:{node.lineno} {node.value!r}"
        for path in FILES
        if where(path) != "engines/vllm/names.py" and room_of_file(path) != "testing"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value in flags or re.search(r"\bvllm:[a-z]", node.value)
    ]
    assert not found, "vLLM's names belong in engines/vllm/names.py:\n" + "\n".join(found)
