"""Cases that are kept in golden/: what is asked, and what is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).parent / "golden"


def cases(name: str) -> list[list[str]]:
    """Pairs of what is asked and what is answered, of a file with "ASKED\\n=> ANSWER" and an empty line between two."""
    return [case.split("\n=> ") for case in (GOLDEN / name).read_text("utf-8").strip().split("\n\n")]


def lines(name: str) -> list[str]:
    """The lines of a file, each of them a case."""
    return (GOLDEN / name).read_text("utf-8").splitlines()


def table(name: str) -> Any:
    """The rows of a YAML file, or its mapping."""
    return yaml.safe_load((GOLDEN / name).read_text("utf-8"))
