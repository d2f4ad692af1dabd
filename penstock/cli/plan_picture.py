"""The view of `penstock plan` as an SVG picture, without the command."""

from __future__ import annotations

import io
import re
from pathlib import Path

from penstock.cli import plan_text
from penstock.errors import UserError
from penstock.planner.request import Sizing, SizingRequest

# The picture must not fetch anything when it is opened: a local monospaced font is used.
_FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)


def check(path: Path) -> None:
    """Nothing when a picture can be written there.  Raises UserError."""
    if path.suffix.lower() != ".svg":
        raise UserError(f'cannot draw "{path}": pictures are SVG', hint="Name a file that ends in .svg.")
    if not path.absolute().parent.is_dir():
        raise UserError(f'cannot write "{path}": no such folder')


def save(request: SizingRequest, sizing: Sizing, path: Path) -> None:
    """Draw the answer into a file.  Raises UserError as `check` does, or when the file cannot be written."""
    check(path)
    from rich.console import Console

    console = Console(record=True, width=plan_text.WIDTH, file=io.StringIO(), highlight=False, markup=False)
    console.print(plan_text.page(plan_text.sections(request, sizing)))
    try:
        path.write_text(_FONTS.sub("", console.export_svg(title="penstock plan")), "utf-8")
    except OSError as exc:
        raise UserError(f'could not write "{path}": {exc.strerror}') from exc
