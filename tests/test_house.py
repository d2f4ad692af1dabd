"""The budget of lines of every room and of the tests. A ceiling only falls; a file that is in no row fails.

The budget is where the present redesign ends, the ceiling what a room may have until then. Who makes a room smaller
lowers its ceiling in the same commit; a feature brings a row of its own.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "penstock"
LOOSE = {"errors", "text", "paths", "processes", "log_lines", "world", "__init__", "__main__"}
# Room -> (ceiling, budget), in lines of *.py. A file is in the room with the longest name that its path begins with.
ROOMS = {
    "": (770, 691),  # errors text paths processes world
    "log_lines.py": (204, 139),  # every log's bound, and who reads across it
    "run_folder.py": (596, 720),
    "spec/": (1348, 1200),
    "hardware/": (719, 670),
    "wire/": (2199, 1990),
    "models/": (3903, 2900),
    "planner/": (2226, 1620),
    "planner/architecture/": (1449, 1250),
    "planner/memory/": (1308, 1150),
    "planner/speed/": (1022, 900),
    "engines/": (309, 280),
    "engines/vllm/": (1193, 1150),
    "engines/vllm/trial.py": (46, 46),  # what `up --replace` asks
    "engines/llamacpp/": (257, 250),
    "observe/": (1822, 1060),
    "chat/": (1124, 820),
    "chat/page/": (2558, 1330),
    "node/": (3275, 2440),
    "node/group/": (914, 760),
    "node/checks/": (606, 520),
    "targets/": (1009, 1050),
    "targets/ssh/": (1614, 1260),
    "targets/slurm/": (1515, 1100),
    "targets/ray/": (1234, 960),
    "targets/kubernetes/": (5996, 3400),
    "targets/cloudera/": (4174, 2390),
    "targets/vessl/": (2072, 1020),
    "gateway/": (2278, 1150),
    "gateway/requests/": (778, 560),
    "gateway/metrics/": (956, 850),
    "gateway/accounting/": (2729, 2030),
    "gateway/connections/": (1124, 1050),
    "gateway/live/": (676, 390),
    "gateway/routing/": (1018, 900),
    "gateway/workers/": (764, 670),
    "deployment/": (3754, 2620),
    "deployment/place.py": (88, 88),
    "deployment/replace.py": (157, 157),  # `up --replace`: asks first, and brings back
    "deployment/controller/": (1862, 1720),
    "deployment/doctor/": (1121, 780),
    "deployment/container/": (475, 120),
    "bench/": (1010, 840),
    "bench/load/": (1243, 1060),
    "bench/datasets/": (627, 520),
    "bench/results/": (1320, 1060),
    "bench/report/": (829, 570),
    "cli/": (6538, 4250),
    "cli/bench/": (1128, 880),
    "testing/": (5152, 1430),
}
TESTS = (51340, 32_000)
UNUSED = 60  # lines that a room may stay below its ceiling: what is more has been won, and is kept


def room_of(path: Path) -> str:
    name = path.relative_to(PACKAGE).as_posix()
    room = max((room for room in ROOMS if name.startswith(room)), key=len)
    assert room or path.stem in LOOSE, f"{name} is in no row of the table"
    return room


def count(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def problem(name: str, n_lines: int, ceiling: int) -> str | None:
    if n_lines > ceiling:
        return f"{name} has {n_lines} lines, at most {ceiling}: make room in it first"
    if n_lines < ceiling - UNUSED:
        return f"{name} has {n_lines} lines: lower its ceiling of {ceiling}"
    return None


def test_no_room_is_above_its_ceiling_and_what_was_won_is_kept() -> None:
    sizes = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        sizes[room_of(path)] += count([path])
    tests = count([*(ROOT / "tests").rglob("*.py")])
    problems = [problem(f"penstock/{room}", sizes[room], ceiling) for room, (ceiling, _) in ROOMS.items()]
    problems += [problem("tests/", tests, TESTS[0])]
    assert [text for text in problems if text] == []


def test_a_file_in_no_row_fails() -> None:
    with pytest.raises(AssertionError, match=r"helpers\.py is in no row"):
        room_of(PACKAGE / "helpers.py")
