"""The rules of STYLE.md that a machine can hold: who imports whom, names, sizes, prints, foreign names."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.engines.vllm import names
from penstock.spec.deployment import TARGETS
from penstock.targets import Capability, Target

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "penstock"
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = [*FILES, *sorted((ROOT / "tools").glob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]
NODES: dict[Path, dict[type[ast.AST], list[Any]]] = {}
# The nodes of a file that rules are about. All others are dropped when it was read.
KINDS = {
    *(ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Constant, ast.Call, ast.While, ast.Attribute, ast.Expr),
}

# A room is a module or a folder at the top of the package. It imports rooms of a lower level, and itself.
ROOMS = (
    ("errors",),
    ("text", "paths"),
    ("spec", "hardware", "wire"),
    ("models", "processes", "log_lines"),
    ("planner", "world"),
    ("engines", "run_folder"),
    ("observe", "chat"),
    ("node", "targets", "gateway"),
    ("deployment",),
    ("bench",),
    ("testing",),
    ("cli",),
    ("__main__",),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
MAX_FOLDERS, MAX_FILES = 15, 9  # files: 8 when run_folder is a room
# The gateway must start alone in a small container; the watchdog must survive whatever breaks the rest.
ALONE = {
    "gateway/": {"penstock", "errors", "paths", "text", "spec", "wire", "processes", "log_lines", "world", "gateway"},
    "deployment/controller/watchdog.py": set[str](),
}
PURE = (
    *sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "planner").rglob("*.py")),
    *(
        "cli/plan_text.py",
        "cli/top_text.py",
        "cli/top_view.py",
        "text.py",
        "errors.py",
        "wire/http1.py",
        "wire/sse.py",
        "wire/prometheus.py",
    ),
    *("chat/conversation.py", "chat/settings.py", "chat/statistics.py", "chat/failures.py"),
    *("chat/waiting.py", "chat/files.py"),
    *("wire/metric_names.py", "observe/promql.py", "observe/panels.py", "observe/boards/operations.py"),
    *("observe/google.py", "observe/export.py"),
    *("gateway/routing/policies.py", "gateway/routing/health.py", "gateway/routing/replicas.py"),
    *("gateway/request.py", "gateway/streams.py", "gateway/metrics/counters.py", "deployment/controller/decide.py"),
    *("deployment/autoscale.py", "testing/scaling/simulator.py", "testing/scaling/baselines.py"),
    *("testing/scaling/scores.py", "testing/scaling/comparison.py", "testing/scaling/pictures.py"),
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
# These make Gradio's components, with handlers that it knows by their annotations.
MAY_IMPORT_HEAVY = {
    f"chat/page/{name}.py"
    for name in ("layout", "chat_tab", "completion_tab", "compare_tab", "elsewhere_tab", "settings_panel")
}
# Modules of the room that are no target: the ssh program, the verbs on a login node, ports that lead elsewhere,
# machines that are not asked, the code that goes along, what an answer inside prints, waiting.
SHARED_BY_TARGETS = {"openssh", "login", "tunnel", "assumed", "code_archive", "inside", "waiting"}
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "base", "core", "types", "manager", "managers"}
FORBIDDEN_CLASS = re.compile(r"^Abstract|Mixin$|Impl$|Manager$")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 70, 8
# Only the command line prints, and programs whose standard output is a log file.
MAY_PRINT = {
    "cli": "the command line",
    "node": "a program: its output is the replica's log",
    "deployment/controller": "a program: its output is controller.log",
    "deployment/container": "a program: its output is the container's log",
    "gateway/compiled.py": "python -m penstock.gateway.compiled",
    "engines/llamacpp/engine.py": "its `main` is the engine's program",
    "targets/cloudera/start.py": "a program: its output is the console of a pod in the workbench",
    "targets/kubernetes/prepare.py": "a program: its output is the log of the init container",
    "targets/kubernetes/packages.py": "a program: its output is the log of the init container",
    "chat/page/__main__.py": "a program: its output is ui.log",
    "testing": "programs and checks for tests",
}


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text("utf-8"))
    except SystemError:  # another thread parses too: https://github.com/python/cpython/issues/106905
        return ast.parse(path.read_text("utf-8"))


def _nodes(path: Path) -> dict[type[ast.AST], list[Any]]:
    """The nodes of KINDS of one file: `ast.walk` takes three times as long, and each rule would walk again."""
    nodes: dict[type[ast.AST], list[Any]] = {kind: [] for kind in KINDS}
    waiting: list[ast.AST] = [_tree(path)]
    while waiting:
        node = waiting.pop()
        if type(node) in KINDS:
            nodes[type(node)].append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                waiting.extend(part for part in value if isinstance(part, ast.AST))
            elif isinstance(value, ast.AST):
                waiting.append(value)
    return nodes


@pytest.fixture(autouse=True, scope="module")
def _files() -> Iterator[None]:
    gc.disable()  # a million objects are made, and no garbage
    NODES.update({path: _nodes(path) for path in OURS})
    gc.enable()
    yield
    NODES.clear()  # every later collection in this process would visit them


def nodes_of(path: Path, *kinds: type[ast.AST]) -> Iterator[Any]:
    return (node for kind in kinds for node in NODES[path][kind])


def strings(path: Path) -> Iterator[ast.Constant]:
    return (node for node in nodes_of(path, ast.Constant) if isinstance(node.value, str))


def where(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def room_of(module: str) -> str:
    """ "penstock.gateway.http1" -> "gateway"; "penstock" itself stays."""
    return module.split(".")[1] if "." in module else module


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of_file(path: Path) -> str:
    return room_of(module_of(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, inside functions too; `from penstock import text` is penstock.text."""
    for node in nodes_of(path, ast.Import):
        yield from ((node.lineno, name.name) for name in node.names)
    for node in nodes_of(path, ast.ImportFrom):
        assert node.level == 0, f"{where(path)}:{node.lineno}: relative import"
        module = str(node.module)
        inside = [f"{module}.{name.name}" for name in node.names if is_module(f"{module}.{name.name}")]
        yield from ((node.lineno, name) for name in inside or [module])


@cache
def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.startswith("penstock.") and (path.is_dir() or path.with_suffix(".py").is_file())


def ours_imported(path: Path) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in imported(path) if name.partition(".")[0] == "penstock")


def test_every_room_has_a_level_and_the_top_of_the_package_is_small() -> None:
    rooms = {room_of_file(path) for path in FILES} - {"penstock"}
    assert rooms == LEVELS.keys(), f"LEVELS and the package differ in {sorted(rooms ^ LEVELS.keys())}"
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(folders) <= MAX_FOLDERS and len(list(PACKAGE.glob("*.py"))) <= MAX_FILES


def import_problems(path: Path) -> Iterator[str]:
    """What the imports of one file of ours break."""
    room, targets = room_of_file(path), PACKAGE / "targets"
    legal = next((rooms for place, rooms in ALONE.items() if where(path).startswith(place)), None)
    for line, name in ours_imported(path):
        other = room_of(name)
        problem = f"{where(path)}:{line} imports {name}"
        if "penstock" not in (room, other) and other != room and LEVELS[other] >= LEVELS[room]:
            yield f"{problem}: {room} is on level {LEVELS[room]}, {other} on {LEVELS[other]}"
        if path.name == "__init__.py" and path.parent != PACKAGE and name.startswith(f"{module_of(path)}."):
            yield f"{problem}: a package does not import its own submodules"
        if legal is not None and other not in legal:
            yield f"{problem}: it must start alone"
        if path.is_relative_to(targets) and name.startswith("penstock.targets."):
            own = path.relative_to(targets).parts[0].removesuffix(".py")
            if name.split(".")[2] not in {own, *SHARED_BY_TARGETS}:
                yield f"{problem}: a target does not import another"
    for line, name in imported(path):
        if where(path) in PURE and name in EFFECTS:
            yield f"{where(path)}:{line} imports {name}: it is pure"
    heads = [node.lineno for node in nodes_of(path, ast.Import, ast.ImportFrom) if node.col_offset == 0]
    for line, name in imported(path):
        if line in heads and name.partition(".")[0] in HEAVY and where(path) not in MAY_IMPORT_HEAVY:
            yield f"{where(path)}:{line} imports {name}: heavy packages are imported inside functions"


def test_imports_only_go_down_and_pure_modules_import_nothing_that_acts() -> None:
    assert [name for name in PURE if not (PACKAGE / name).is_file()] == []
    problems = [problem for path in FILES for problem in import_problems(path)]
    assert not problems, "\n".join(problems)


def test_no_import_goes_in_a_circle() -> None:
    """Within a room too. Imports inside functions count: they are circles that Python happens to survive."""
    graph = {module_of(path): {name for _, name in ours_imported(path)} for path in FILES}
    graph = {module: names & graph.keys() for module, names in graph.items()}
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


# Its block and its row in the file's type name a target; "ray" is also a package and an executor.
MAY_NAME_TARGETS = {"spec/blocks.py": frozenset(TARGETS), "spec/deployment.py": frozenset(TARGETS)}
RAY_THE_LIBRARY = ("planner", "engines", "node", "hardware", "deployment/doctor/nodes.py")


def test_a_target_has_these_methods_and_every_capability_is_read() -> None:
    methods = {name for name, value in vars(Target).items() if callable(value) and not name.startswith("_")}
    placing = {
        "check",
        "machines",
        "survey",
        "measure",
        "render",
        "place",
        "status",
        "logs",
        "end",
        "fetch",
        "order",
        "keep_up",
        "rolls",
        "asked_replicas",
    }
    from_anywhere = {"adopt", "leftovers", "kept_keys", "tunnel", "inside", "end_weights"}
    assert methods == placing | from_anywhere
    outside = "".join(path.read_text("utf-8") for path in FILES if room_of_file(path) in ("deployment", "cli"))
    assert [name for name in get_args(Capability) if f'"{name}"' not in outside] == []


def test_only_targets_know_the_names_of_targets() -> None:
    """As a word of its own, or at the head of a field's path ("slurm.time"); an import of one counts too."""
    wrong = []
    for path in FILES:
        if room_of_file(path) == "targets":
            continue
        legal = MAY_NAME_TARGETS.get(where(path), frozenset())
        legal |= {"ray"} if where(path).startswith(RAY_THE_LIBRARY) else frozenset()
        words = [(node.lineno, str(node.value).partition(".")[0]) for node in strings(path)]
        words += [
            (line, name.split(".")[2])
            for line, name in ours_imported(path)
            if name.startswith("penstock.targets.") and name.count(".") >= 2
        ]
        wrong += [f"{where(path)}:{line} names {word}" for line, word in words if word in {*TARGETS} - legal]
    assert not wrong, "\n".join(wrong)


def shape_problems(path: Path) -> Iterator[str]:
    """Names that say nothing, and what is too long."""
    if {path.stem, path.parent.name} & FORBIDDEN_MODULES:
        yield f"{where(path)}: not a noun of the field"
    n_lines = len(path.read_text("utf-8").splitlines())
    if n_lines > MAX_FILE_LINES:
        yield f"{where(path)}: {n_lines} lines"
    for node in nodes_of(path, ast.ClassDef):
        if FORBIDDEN_CLASS.search(node.name):
            yield f"{where(path)}:{node.lineno} {node.name}: not a noun of the field"
    for node in nodes_of(path, ast.FunctionDef, ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{where(path)}:{node.lineno} {node.name}: {length} lines"
        parameters = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]} - {"self", "cls"}
        if path.is_relative_to(PACKAGE) and len(parameters) > MAX_PARAMETERS:
            yield f"{where(path)}:{node.lineno} {node.name}: {len(parameters)} parameters, use a frozen struct"


def test_names_are_nouns_of_the_field_and_files_and_functions_are_short() -> None:
    problems = [problem for path in OURS for problem in shape_problems(path)]
    assert not problems, "\n".join(problems)


def test_only_the_command_line_and_programs_print() -> None:
    prints = [
        f"{where(path)}:{node.lineno}"
        for path in FILES
        if not any(where(path).startswith(place) for place in MAY_PRINT)
        for node in nodes_of(path, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, f"only {sorted(MAY_PRINT)} may print: {prints}"


def test_no_file_of_the_package_names_a_folder_of_a_developer() -> None:
    found = [
        f"{where(path)}:{number} {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(r"(?<![\w.])/(work|root|home)/(?!cdsw)", line)  # cdsw: the user of all pods of a workbench
    ]
    assert not found, "\n".join(found)


def test_names_of_vllm_are_data_in_one_file() -> None:
    # --host, --port and --model are everybody's, --max-model-len is also what llamacpp's own program calls it.
    flags = set(names.FLAGS.values()) - {"--host", "--port", "--model", "--max-model-len"}
    found = [
        f"{where(path)}:{node.lineno} {node.value!r}"
        for path in FILES
        if where(path) != "engines/vllm/names.py" and room_of_file(path) != "testing"
        for node in strings(path)
        if node.value in flags or re.search(r"\bvllm:[a-z]", str(node.value))
    ]
    assert not found, "vLLM's names belong in engines/vllm/names.py:\n" + "\n".join(found)


# ---- tests wait for what happens -------------------------------------------------------------------------------------

# Where the waiting of all tests is done, with one deadline for the whole run.
MAY_WAIT = {
    "tests/waiting.py",
    *("tests/simulation_world.py", "tests/simulation_gateway.py", "tests/virtual_loop.py"),  # their clocks are virtual
}
# Programs of rigs, not tests: a pod's init process, a proxy that is slow on purpose.
CLOCKS = {"monotonic", "time", "perf_counter"}
# File -> places that still wait for a time. A number only falls.
STILL_WAITING: dict[str, int] = {
    "tests/chat_page_rig.py": 2,
    "tests/gateway_rig.py": 1,
    "tests/hosts_janitor.py": 2,
    "tests/kubernetes_api.py": 3,
    "tests/kubernetes_kubectl.py": 1,
    "tests/kubernetes_kubelet.py": 1,
    "tests/kubernetes_logs.py": 1,
    "tests/kubernetes_pod.py": 6,
    "tests/kubernetes_sandbox.py": 1,
    "tests/kubernetes_services.py": 1,
    "tests/network_disk.py": 1,
    "tests/test_bench_serve.py": 2,
    "tests/test_kubernetes_faults.py": 3,
    "tests/test_life.py": 2,
    "tests/test_real_sleep.py": 1,
}


def is_call_of(node: ast.AST, module: str, names: Collection[str]) -> bool:
    """Return whether `node` calls MODULE.NAME for one of the names."""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and (function.value.id, function.attr in names) == (module, True)
    )


def waits(path: Path) -> Iterator[str]:
    """Sleeps, time limits of asyncio, and loops that look at the clock."""
    for node in nodes_of(path, ast.Call, ast.While):
        is_sleep = is_call_of(node, "time", {"sleep"}) or is_call_of(node, "asyncio", {"sleep"})
        is_yield = isinstance(node, ast.Call) and ast.unparse(node) == "asyncio.sleep(0)"
        is_loop = isinstance(node, ast.While) and any(is_call_of(part, "time", CLOCKS) for part in ast.walk(node))
        if (is_sleep and not is_yield) or is_call_of(node, "asyncio", {"timeout", "wait_for"}) or is_loop:
            yield f"{where(path)}:{getattr(node, 'lineno', 0)}"


def test_tests_wait_for_what_happens_and_not_for_a_time() -> None:
    """`tests/waiting.py` has what to call instead."""
    places = {
        where(path): sorted(set(waits(path)))
        for path in OURS
        if path.parent.name == "tests" and where(path) not in MAY_WAIT
    }
    counted = {name: len(rows) for name, rows in places.items() if rows}
    more = [row for name, rows in places.items() if len(rows) > STILL_WAITING.get(name, 0) for row in rows]
    assert not more, "these wait for a time:\n" + "\n".join(more)
    assert counted == STILL_WAITING, "lower the numbers of STILL_WAITING"


def test_no_thread_of_a_test_keeps_a_failed_run_from_ending() -> None:
    found = [
        f"{where(path)}:{node.lineno}"
        for path in OURS
        if path.parent.name == "tests"
        for node in nodes_of(path, ast.Call)
        if isinstance(node, ast.Call) and is_call_of(node, "threading", {"Thread"})
        if not any(keyword.arg == "daemon" for keyword in node.keywords)
    ]
    assert not found, "these threads need daemon=True:\n" + "\n".join(found)


# ---- clocks and processes come from a World --------------------------------------------------------------------------

# Rooms that a simulation runs: time, pauses, chance, threads and processes are arguments there (penstock/world.py).
SIMULATED = ("deployment/controller/", "node/", "gateway/")
# Act on this machine alone, and are no part of a simulation: programs, files, sockets, GPUs.
REAL_ONLY = {
    "deployment/controller/watchdog.py": "imports little, so that little can end it",
    "node/__main__.py": "the program: signals, and the time of each line of its log",
    "node/detached.py": "a program that starts the node",
    "node/checks/": "programs that measure machines",
    "node/engine_process.py": "the engine's process, with pipes",
    "node/file_server.py": "serves files over sockets",
    "node/gpu_locks.py": "locks of files",
    "node/gpu_memory.py": "the driver's own pace",
    "node/group/ray.py": "a program inside Ray",
    "node/leftovers.py": "ages of files",
    "node/load_choice.py": "reads a disk for a while",
    "node/local_processes.py": "Ray's and the engine's own pace",
    "node/peers.py": "copies files over sockets",
    "node/shared_cache.py": "copies files over sockets",
    "gateway/compiled.py": "a program: the compiler",
    "gateway/workers/": "processes that share a socket",
}
ACTING = {
    "time": {"time", "monotonic", "sleep", "perf_counter", "time_ns", "monotonic_ns"},
    "asyncio": {"sleep"},
    "threading": {"Thread", "Timer", "Event", "Condition"},
    "random": {"random", "uniform", "choice", "sample", "randint", "shuffle", "Random"},
    "subprocess": {"Popen", "run", "call", "check_call", "check_output"},
}


def test_simulated_rooms_take_time_and_processes_from_a_world() -> None:
    wrong = [
        f"{where(path)}:{getattr(node, 'lineno', 0)} {ast.unparse(node)}"
        for path in FILES
        if where(path).startswith(SIMULATED) and not where(path).startswith(tuple(REAL_ONLY))
        for node in nodes_of(path, ast.Attribute)
        if isinstance(node.value, ast.Name)
        if node.attr in ACTING.get(node.value.id, ())
    ]
    assert not wrong, "\n".join(wrong)


# ---- plain English ---------------------------------------------------------------------------------------------------

# The voice of messages, help and how-to pages (docs/reference/glossary.md has the words to use instead).
FORBIDDEN = re.compile(
    r"\b(mend(s|ed)?|told|somebody|meanwhile|knock(s|ed)?|doors?|crews?|parcels?|desks?|beside|anew|whoever"
    r"|wardens?|nobody|all the same|of its own|brought back)\b",
    re.IGNORECASE,
)
# Word lists and corpora of the bundled model are no messages.
NO_MESSAGES = ("testing/", "bench/datasets/tokenizers.py")


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of a file that a person may read: two spaces or more, and no docstring."""
    docstrings = {id(node.value) for node in nodes_of(path, ast.Expr)}
    for node in strings(path):
        if id(node) not in docstrings and str(node.value).count(" ") >= 2:
            yield node.lineno, str(node.value)


def test_messages_and_how_to_pages_are_in_plain_english() -> None:
    wrong = [
        f"{where(path)}:{line}: {text[:100]}"
        for path in FILES
        if not where(path).startswith(NO_MESSAGES)
        for line, text in messages(path)
        if FORBIDDEN.search(text)
    ]
    wrong += [
        f"{path.name}:{number}: {line}"
        for path in [*sorted((ROOT / "docs" / "how-to").glob("*.md")), ROOT / "docs" / "reference" / "cli.md"]
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not wrong, "\n".join(wrong)
