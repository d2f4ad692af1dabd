"""The verb `autoscale simulate`: the policy on a trace, next to others, as a table, JSON and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import arguments
from penstock.cli.autoscale_replay import add_policy, policy_of
from penstock.cli.output import print_json, print_step, table
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.deployment.autoscale import Policy
    from penstock.testing.scaling.comparison import Row
    from penstock.testing.scaling.scores import Reference
    from penstock.testing.scaling.traces import Trace

_LEAST_HOURS = 3.0
_MOST_REQUESTS = 5_000_000
_HEAD = ("", "IN TIME", "WORST 5 MIN", "LOST", "REPLICA-HOURS", "/ PEAK", "/ ORACLE", "CHANGES/H", "HELD P99")


def register(parser: argparse.ArgumentParser) -> None:
    from penstock.testing.scaling.traces import NAMED

    add = parser.add_argument
    text = f"a file in Azure's, BurstGPT's or Mooncake's format, plain or .xz, or one of {', '.join(NAMED)}"
    add("--trace", required=True, metavar="FILE|NAME", help=text)
    text = "so many times the requests, in the same time (default: 1)"
    add("--scale-load", type=arguments.number(0, 1000, is_above=True), default=1.0, metavar="X", help=text)
    text = "how long; a shorter trace is repeated (default: 3, or the trace's own length where that is more)"
    add("--hours", type=arguments.number(0, 24 * 7, is_above=True), metavar="H", help=text)
    add("--seed", type=arguments.count_or_zero, default=0, metavar="N", help="of the synthetic traces (default: 0)")
    add("--plot", type=Path, metavar="FILE", help="draw load, replicas and broken promises into an .svg file")
    add_policy(parser)
    arguments.add_json(parser)
    examples = (
        "penstock autoscale simulate --trace code --start-s 100",
        "penstock autoscale simulate --trace azure-code.csv --scale-load 3 --policy qwen.yaml --plot code.svg",
    )
    arguments.complete(parser, _simulate, examples)


def _simulate(options: argparse.Namespace) -> int:
    import msgspec

    from penstock.testing.scaling.comparison import compared

    if options.plot and options.plot.suffix.lower() != ".svg":
        raise UserError(f'cannot draw "{options.plot}": pictures are SVG', hint="Name a file that ends in .svg.")
    policy, trace = policy_of(options), _trace(options)
    if not options.json:
        print_step(
            f"{len(trace.arrivals):,} requests in {trace.duration_s / 3600:.1f} h, a start takes {policy.start_s:g} s"
        )
    known, rows = compared(trace, policy)
    if options.plot:
        _draw(options.plot, trace, policy, rows)
    if options.json:
        facts = {row.name: msgspec.to_builtins(row.scores) for row in rows}
        print_json({"trace": trace.name, "reference": msgspec.to_builtins(known), "scalers": facts})
    else:
        print(_text(known, rows))
    return 0


def _trace(options: argparse.Namespace) -> Trace:
    from penstock.testing.scaling import traces

    path, hours = Path(options.trace), options.hours
    if options.trace in traces.NAMED:
        trace = traces.named(options.trace, 3600 * (hours or _LEAST_HOURS), options.seed)
    elif path.is_file():
        trace = traces.read(path)
        duration_s = 3600 * hours if hours else max(trace.duration_s, 3600 * _LEAST_HOURS)
        _check_size(len(trace.arrivals) * duration_s / trace.duration_s * options.scale_load)
        trace = traces.repeated(trace, duration_s)
    else:
        hint = f"A path of a file, or one of {', '.join(traces.NAMED)}."
        raise UserError(f'there is no trace "{options.trace}"', hint=hint)
    _check_size(len(trace.arrivals) * options.scale_load)
    return traces.scaled(trace, options.scale_load, options.seed)


def _check_size(n_requests: float) -> None:
    if n_requests > _MOST_REQUESTS:
        message = f"cannot simulate {n_requests:,.0f} requests, at most {_MOST_REQUESTS:,}"
        raise UserError(message, hint="Give less --scale-load or --hours.")


def _text(known: Reference, rows: Sequence[Row]) -> str:
    cells = [
        (
            row.name,
            f"{row.scores.attainment:.1%}",
            f"{row.scores.worst:.1%}",
            str(row.scores.lost),
            f"{row.scores.replica_hours:.1f}",
            f"{row.scores.per_peak:.2f}",
            f"{row.scores.per_oracle:.2f}",
            f"{row.scores.changes_per_hour:.1f}",
            f"{row.scores.hold_s_p99:.1f} s",
        )
        for row in rows
    ]
    oracle = f"{known.oracle_hours:.1f} replica-hours by who knows the future ({known.oracle_attainment:.1%} in time)"
    return f"{table(cells, _HEAD, right=range(1, len(_HEAD)))}\n{oracle}"


def _draw(path: Path, trace: Trace, policy: Policy, rows: Sequence[Row]) -> None:
    from penstock.bench.report.svg import standalone
    from penstock.testing.scaling import pictures

    try:
        path.write_text(standalone(pictures.charts(trace, policy, rows)), "utf-8")
    except OSError as exc:
        raise UserError(f'could not write "{path}": {exc.strerror}') from exc
