"""The verb `requests`: the slowest of the last hour with where their time went, or the newest of the access log."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli import arguments
from penstock.cli.output import print_json, table
from penstock.text import printable, show_seconds

if TYPE_CHECKING:
    from penstock.gateway.accounting.access_log import Line
    from penstock.wire.live import SlowRequest

_SLOW_HEAD = ("AT", "TOOK", "HOLD", "GATEWAY", "FIRST BYTE", "STREAM", "TOKENS", "OUTCOME", "REPLICA", "KEY", "REQUEST")
_HEAD = ("AT", "STATUS", "OUTCOME", "TOOK", "FIRST TOKEN", "TOKENS", "REPLICA", "KEY", "REQUEST")
_LAST = 20


def register(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("--slow", action="store_true", help="the slowest of the last hour, and where their time went")
    text = f"so many requests (default: {_LAST}; --slow: {_LAST} at most)"
    parser.add_argument("-n", "--lines", type=arguments.count_or_zero, default=_LAST, metavar="N", help=text)
    arguments.add_json(parser, "print one JSON object per line")
    examples = ("penstock requests --slow", "penstock requests qwen -n 100", "penstock requests qwen --slow --json")
    arguments.complete(parser, _run, examples)


def _run(options: argparse.Namespace) -> int:
    import msgspec

    from penstock import run_folder
    from penstock.deployment import live

    run = run_folder.choose(options.name)
    slow = [*live.snapshot(run).slow[: options.lines]] if options.slow else []
    newest = [] if options.slow else live.newest_requests(run, options.lines)
    if options.json:
        for row in (*slow, *newest):
            print_json(msgspec.to_builtins(row))
        return 0
    cells = [*map(_slow_cells, slow), *map(_cells, newest)]
    print(table(cells, _SLOW_HEAD if options.slow else _HEAD) if cells else "no request yet")
    return 0


def _slow_cells(row: SlowRequest) -> Sequence[str]:
    return (
        time.strftime("%H:%M:%SZ", time.gmtime(row.at)),
        show_seconds(row.duration_s),
        *(_seconds(part) for part in (row.hold_s or None, row.own_s or None, row.first_byte_s, row.stream_s)),
        f"{row.prompt_tokens} + {row.output_tokens}",
        *(printable(f"{row.outcome} {row.status}"), row.replica or "-", printable(row.key) or "-", row.request_id),
    )


def _cells(row: Line) -> Sequence[str]:
    ttft_s = None if row.ttft_ms is None else row.ttft_ms / 1000
    return (
        *(row.time, str(row.status), row.outcome, show_seconds(row.duration_ms / 1000), _seconds(ttft_s)),
        f"{row.prompt_tokens} + {row.output_tokens}",
        *(row.replica or "-", printable(row.key) or "-", printable(row.request_id)),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)
