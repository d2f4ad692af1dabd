"""Texts of target kubernetes as they are kept in golden/kubernetes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "kubernetes"


def kept(name: str, told: str) -> str:
    """The text of a file. PENSTOCK_WRITE_GOLDEN=1 writes what is told; read the difference before committing it."""
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        (GOLDEN / name).write_text(told, "utf-8")
    return (GOLDEN / name).read_text("utf-8")


def sections(told: Mapping[str, Iterable[str]]) -> str:
    """Texts under their names, as a file has them."""
    return "\n".join("\n".join([name, *(f"=> {row}" for row in rows), ""]) for name, rows in told.items())
