"""Prints JSON, steps, errors and tables. Output into a pipe or a file keeps its lines whole: `UNLIMITED` columns."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import IO, Any

from penstock.errors import PenstockError
from penstock.text import printable

# Wider than any line: a program that reads our output gets one line a row.
UNLIMITED = 10_000
_REPEAT_S = 2.0
_LEAST_ROOM = 20  # columns for the widest cells of a table


def print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


def print_step(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_error(error: PenstockError, as_json: bool) -> int:
    """Print an error on standard error, or as JSON on standard output; its exit code."""
    with contextlib.suppress(OSError):  # a closed or full output: the exit code is all that is left
        if as_json:
            print_json(error.facts())
        else:
            print(_error_text(error), file=sys.stderr)
    return error.exit_code


def _error_text(error: PenstockError) -> str:
    bold, plain = ("\033[1;31m", "\033[0m") if has_colour(sys.stderr) else ("", "")
    lines = [f"{bold}error:{plain} {printable(error.message)}"]
    for word, text in (("detail", error.detail), ("hint", error.hint)):
        if text:
            first, *more = printable(text).splitlines()
            lines += [f"  {word}:", *(f"    {line}" for line in (first, *more))] if more else [f"  {word}: {first}"]
    return "\n".join(lines)


def repeat(options: argparse.Namespace, show: Callable[[argparse.Namespace], int]) -> int:
    """Show it every two seconds until Ctrl-C, on a terminal each time in place of the last."""
    once = argparse.Namespace(**(vars(options) | {"watch": False}))
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if sys.stdout.isatty():
                print("\033[H\033[2J", end="")
            show(once)
            sys.stdout.flush()
            time.sleep(_REPEAT_S)
    return 0


def has_colour(stream: IO[str]) -> bool:
    """Whether a terminal shows this, and its owner has not set NO_COLOR."""
    return stream.isatty() and "NO_COLOR" not in os.environ


def width(most: int = UNLIMITED) -> int:
    """Columns to use on standard output, `most` at most; `most` where it is no terminal."""
    return min(most, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else most


def render(thing: Any, width: int, has_colour: bool = False) -> str:
    """A rich renderable as lines of at most `width` columns, without spaces at their ends."""
    import io

    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, force_terminal=has_colour, color_system="standard" if has_colour else None,
        highlight=False, markup=False, emoji=False, legacy_windows=False, _environ={},
    )  # fmt: skip
    with console.capture() as capture:
        console.print(thing)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def table(
    rows: Sequence[Sequence[str]],
    head: Sequence[str] = (),
    columns: int | None = None,
    right: Collection[int] = (),
    indent: int = 0,
) -> str:
    """Aligned columns, two spaces between them, at most `columns` wide (default: `width()`); nothing is cut off.

    The widest column continues below where it is too wide; where that leaves too little room, each row becomes a block
    of lines, one a column. `right`: the numbers of the columns that are aligned at their right end.
    """
    lines = [head, *rows] if head else rows
    widths = [max(map(len, cells)) for cells in zip_longest(*lines, fillvalue="")]
    try:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # in a pod, whose image is an engine's
        return "\n".join(_aligned(line, widths, right, indent) for line in lines)
    grid, columns = Table.grid(padding=(0, 2, 0, 0)), width() if columns is None else columns
    widest = widths.index(max(widths)) if widths else 0
    room = columns - indent - 2 * len(widths) - (sum(widths) - max(widths, default=0))
    if head and room < min(_LEAST_ROOM, max(widths, default=0)):
        return "\n".join(_block(row, head, columns, indent) for row in rows)
    for number in range(len(widths)):
        justify: Any = "right" if number in right else "left"
        grid.add_column(overflow="fold", justify=justify, no_wrap=bool(head) and number != widest)
    for line in lines:
        grid.add_row(*(Text(cell) for cell in line))
    return render(Padding(grid, (0, 0, 0, indent)), columns)


def _aligned(line: Sequence[str], widths: Sequence[int], right: Collection[int], indent: int) -> str:
    cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(line)]
    return (" " * indent + "  ".join(cells)).rstrip()


def _block(row: Sequence[str], head: Sequence[str], columns: int, indent: int) -> str:
    """A row as its first cell, and below it a line for each other cell that is not empty."""
    cells = [(name, cell) for name, cell in zip(head[1:], row[1:], strict=True) if cell]
    return "\n".join([" " * indent + row[0], table(cells, (), columns, (), indent + 2)])
