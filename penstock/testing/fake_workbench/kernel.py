"""The kernel in which the fake runs a script: `python kernel.py SCRIPT`. Standard library only.

As in a notebook's kernel there is no `__file__`, an event loop already runs, and SystemExit is no failure.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from pathlib import Path


async def run(script: str) -> int:
    code = compile(Path(script).read_text("utf-8"), "<kernel>", "exec")
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as exc:
        print(f"An exception has occurred, use %tb to see the full traceback.\n\nSystemExit: {exc}", file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever a script raises
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1])))
