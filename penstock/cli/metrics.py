"""The verb `metrics`: a query to the deployment's Prometheus, its alerts, the pages of metrics, their names, or files
for a Prometheus elsewhere."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import arguments
from penstock.cli.output import print_json, table
from penstock.errors import UserError
from penstock.text import printable

if TYPE_CHECKING:
    from penstock.observe.queries import Series

_MODES = ("query", "alerts", "names", "export", "engines")
_N_COLUMNS = 60  # of a line of blocks
_MIN_STEP_S = 5.0  # that of a scrape
_BLOCKS = "▁▂▃▄▅▆▇█"
# The same in every series of a deployment, unless they differ in an answer.
_USUAL = ("deployment", "instance", "job", "target")


def register(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", nargs="?", metavar="PROMQL", help="what to ask its Prometheus; absent: print /metrics")
    parser.add_argument("--deployment", metavar="NAME", help="optional when only one runs")
    text = "the values of this time until now: 30m, 1h, 7d"
    parser.add_argument("--range", type=arguments.period_s, metavar="TIME", dest="range_s", help=text)
    text = "between two values of a range (default: a 60th of it)"
    parser.add_argument("--step", type=arguments.period_s, metavar="TIME", dest="step_s", help=text)
    parser.add_argument("--engines", action="store_true", help="print the engines' pages in place of the gateway's")
    parser.add_argument("--alerts", action="store_true", help="list the alerts that are pending or firing")
    parser.add_argument("--names", action="store_true", help="list every metric, and names of older engines")
    text = "write what a Prometheus and a Grafana of yours need into a folder"
    parser.add_argument("--export", type=Path, metavar="DIR", help=text)
    arguments.add_json(parser)
    examples = (
        "penstock metrics 'sum by (outcome) (rate(penstock_requests_total[5m]))'",
        "penstock metrics 'sum(rate(penstock_tokens_total[1m]))' --range 1h",
        "penstock metrics --alerts",
    )
    arguments.complete(parser, _metrics, examples)


def _metrics(options: argparse.Namespace) -> int:
    _check(options)
    if options.names:
        return _names(options.json)
    from penstock import run_folder
    from penstock.deployment import metrics

    run = run_folder.choose(options.deployment)
    if options.export is not None:
        try:
            metrics.export(run, options.export.resolve())
        except OSError as exc:
            raise UserError(f'cannot write to "{options.export}": {exc.strerror}') from exc
        if not options.json:
            print(f"{options.export} has what a Prometheus needs to watch {run.name}: see its README.md")
        return 0
    if options.query is None and not options.alerts:
        page = metrics.page(run, options.engines)
        print_json({"page": page}) if options.json else print(page, end="")
        return 0
    url = metrics.prometheus_url(run)
    return _alerts(url, options.json) if options.alerts else _ask(url, options)


def _check(options: argparse.Namespace) -> None:
    modes = [name for name in _MODES if getattr(options, name) not in (None, False)]
    if len(modes) > 1:
        words = " and ".join("a query" if name == "query" else f"--{name}" for name in modes)
        raise UserError(f"cannot do {words} together", hint="Give one of them.")
    if options.query is None and (options.range_s or options.step_s):
        raise UserError("--range and --step are for a query", hint="Example: penstock metrics up --range 1h")
    if options.step_s and not options.range_s:
        raise UserError("--step needs --range", hint="Example: --range 1h --step 15s")


def _ask(url: str, options: argparse.Namespace) -> int:
    from penstock.observe import queries

    span = None
    if options.range_s:
        end, step_s = time.time(), options.step_s or max(_MIN_STEP_S, options.range_s / _N_COLUMNS)
        span = queries.Span(end - options.range_s, end, step_s)
    series = queries.ask(url, options.query, span)
    if options.json:
        print_json([{"labels": row.labels, "points": [_json_point(*point) for point in row.points]} for row in series])
    elif not series:
        print("no data: no series matches now" if span is None else "no data in that time")
    else:
        print(series_text(series, span is not None or any(len(row.points) > 1 for row in series)))
    return 0


def _json_point(at: float, value: float) -> tuple[float, float | str]:
    """JSON has no NaN and no infinity: those are text, as Prometheus writes them."""
    return at, value if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def series_text(series: Sequence[Series], is_range: bool) -> str:
    """A row for each series: its value, or its last, least and greatest one and a line of blocks."""
    names = _names_of([row.labels for row in series])
    if not is_range:
        pairs = [(name, _show(row.points[-1][1])) for name, row in zip(names, series, strict=True)]
        return table(pairs, ("SERIES", "VALUE"), right=(1,))
    rows = []
    for name, row in zip(names, series, strict=True):
        values = [value for _, value in row.points]
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        rows.append((name, *map(_show, (values[-1], min(finite), max(finite))), blocks(values)))
    return table(rows, ("SERIES", "LAST", "LEAST", "MOST", ""), right=(1, 2, 3))


def _names_of(labels: Sequence[dict[str, str]]) -> list[str]:
    """PromQL's names of the series, without the usual labels where all have the same."""
    same = {key for key in _USUAL if len({row.get(key) for row in labels}) == 1}
    return [_name_of({key: value for key, value in row.items() if key not in same}) for row in labels]


def _name_of(labels: dict[str, str]) -> str:
    metric = labels.get("__name__", "")
    pairs = ", ".join(f"{key}={_one_line(value)}" for key, value in labels.items() if key != "__name__")
    return f"{metric}{{{pairs}}}" if metric and pairs else metric or pairs or "-"


def _one_line(text: str) -> str:
    return " ".join(printable(text).splitlines())


def _show(value: float) -> str:
    return f"{value:.6g}"


def blocks(values: Sequence[float]) -> str:
    """Values as a line of at most 60 blocks, the least as the lowest; a gap where there is no number."""
    size = math.ceil(len(values) / _N_COLUMNS) or 1
    chunks = [values[at : at + size] for at in range(0, len(values), size)]
    means = [_mean([value for value in chunk if math.isfinite(value)]) for chunk in chunks]
    finite = [mean for mean in means if mean is not None]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    step = (most - least) / (len(_BLOCKS) - 1) or 1.0
    return "".join(" " if mean is None else _BLOCKS[round((mean - least) / step)] for mean in means)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _alerts(url: str, as_json: bool) -> int:
    from penstock.observe import queries

    alerts = queries.alerts(url)
    if as_json:
        print_json([{field: getattr(alert, field) for field in alert.__struct_fields__} for alert in alerts])
    elif not alerts:
        print("no alert is pending or firing")
    else:
        rows = [
            (
                alert.state,
                alert.labels.get("severity", ""),
                alert.labels.get("alertname", ""),
                alert.since[:19].replace("T", " "),
                _one_line(alert.annotations.get("summary", "")),
            )
            for alert in alerts
        ]
        print(table(rows, ("STATE", "SEVERITY", "ALERT", "SINCE (UTC)", "")))
    return 0


def _names(as_json: bool) -> int:
    from penstock.observe import names

    rows, renames = names.rows(), names.renames()
    if as_json:
        facts = {"metrics": [row._asdict() for row in rows], "renames": [rename._asdict() for rename in renames]}
        print_json(facts)
        return 0
    cells = [(row.name, row.kind, ",".join(row.labels), row.since or "", row.about) for row in rows]
    print(table(cells, ("NAME", "KIND", "LABELS", "SINCE", "")))
    cells_of_old = [(rename.old, rename.name, rename.source) for rename in renames]
    print("\n" + table(cells_of_old, ("OLD NAME", "NAME HERE", "ENGINE")))
    return 0
