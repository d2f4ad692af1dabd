"""One HTML page of one run, several, or a sweep: without network or script, for phones and print. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from penstock.bench import calibrate
from penstock.bench.report import figures, text
from penstock.bench.report.svg import Chart, svg
from penstock.bench.results.folder import Result

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--soft:#5b5b5b;--line:#d9d9d9;--back:#fff;--card:#f5f6f7;--bad:#b3261e;
--good:#00704e}
@media(prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#a8a8a8;--line:#3a3a3a;--back:#161718;--card:#222426;
--bad:#ff8a80;--good:#5fd3a8}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1100px;padding:16px;background:var(--back);color:var(--ink);
font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.45em;margin:.2em 0}h2{font-size:1.1em;margin:1.6em 0 .5em}p{margin:.4em 0}.soft{color:var(--soft)}
.bad{color:var(--bad);font-weight:600}.good{color:var(--good);font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:8px;margin:1em 0}
.card{background:var(--card);border-radius:8px;padding:8px 12px}.card b{display:block;font-size:1.35em}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px}
figure{margin:0;break-inside:avoid}svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,"DejaVu Sans",sans-serif;fill:var(--soft)}svg .title{font-weight:600;font-size:13px;
fill:var(--ink)}svg .small{font-size:11px}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.line{fill:none;stroke-width:2}.dots{fill:none;stroke-width:3;stroke-linecap:round;opacity:.55}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}td.words{text-align:left;white-space:normal;overflow-wrap:anywhere}
.facts td:first-child{width:16em}th{font-weight:600;color:var(--soft)}
@media(max-width:600px){.cells tr:first-child{display:none}.cells tr{display:block;padding:6px 0;
border-bottom:1px solid var(--line)}.cells td{display:flex;justify-content:space-between;gap:12px;padding:1px 0;
border:0;white-space:normal;text-align:right}
.cells td::before{content:attr(data-name);color:var(--soft);text-align:left}
.cells td:first-child{font-weight:600}.facts td{display:block;width:auto}.facts td:first-child{width:auto;border:0;
padding-bottom:0;color:var(--soft)}}
@media print{:root{--ink:#000;--soft:#333;--line:#bbb;--back:#fff;--card:#fff;--bad:#000;--good:#000}
body{max-width:none;font-size:10pt}.card{border:1px solid #bbb}.charts{grid-template-columns:1fr 1fr}}
"""
_CARDS = (
    ("request_throughput", "requests/s"),
    ("output_throughput", "output tokens/s"),
    ("median_ttft_ms", "TTFT median, ms"),
    ("p99_ttft_ms", "TTFT p99, ms"),
    ("median_tpot_ms", "TPOT median, ms"),
    ("p99_tpot_ms", "TPOT p99, ms"),
    ("median_e2el_ms", "whole request median, ms"),
    ("completed", "answered"),
    ("failed", "failed"),
    ("request_goodput", "within bounds, requests/s"),
    ("prefix_hit_rate", "of prompt tokens from the cache"),
    ("joules_per_token", "J per output token"),
)
_WORDS = ("mean", "median", "p90", "p95", "p99", "max")
_METRICS = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "gap between tokens"), ("e2el", "whole request"))


class SweepPoint(msgspec.Struct, frozen=True):
    """One run of a sweep: its layout ("TP 2"), what was offered (requests/s, or at once), whether it kept the SLO."""

    layout: str
    offered: float
    run: Result
    is_inside: bool
    reason: str = ""


def page(runs: Sequence[Result], plan: Mapping[str, Any] | None = None) -> str:
    title = f"Load test {runs[0].name}" if len(runs) == 1 else f"{len(runs)} load tests"
    parts = [f"<h1>{escape(title)}</h1>"]
    for run in runs:
        parts.append(_verdict(run, is_named=len(runs) > 1))
        parts += [f'<p class="bad">{escape(note)}</p>' for note in text.caveats(run.summary)]
    if len(runs) == 1:
        parts += [_cards(runs[0]), _latencies(runs[0])]
    else:
        parts.append(_side_by_side(runs))
    parts += [_prediction(run, plan) for run in runs]
    parts.append(_drawn(figures.of_runs(runs)))
    parts += [_facts(run, is_named=len(runs) > 1) for run in runs]
    return _whole(title, parts)


def sweep_page(points: Sequence[SweepPoint], label: str, slo: str, answers: Sequence[str]) -> str:
    """The report of a sweep. `label`: what was raised; `slo` and `answers` in words."""
    title = f"Sweep over {label}"
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="soft">bound: {escape(slo)}</p>']
    parts += [f"<p><b>{escape(answer)}</b></p>" for answer in answers]
    parts.append(_drawn(figures.curve([(point.layout, point.offered, point.run) for point in points], label)))
    columns = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")
    head = ("layout", label, "requests/s", "tokens/s", "TTFT median", "TTFT p99", "TPOT median", "failed", "inside")
    rows = [
        (
            point.layout,
            number_text(point.offered),
            *(number_text(point.run.number(name)) for name in columns),
            number_text(point.run.number("failed")),
            "yes" if point.is_inside else f"no: {point.reason}",
        )
        for point in sorted(points, key=lambda point: (point.layout, point.offered))
    ]
    parts += ["<h2>Runs</h2>", _table(head, rows)]
    parts += [_facts(points[0].run, is_named=False)] if points else []
    return _whole(title, parts)


def number_text(value: float | None) -> str:
    """Three digits or so: 0.0312 -> "0.031", 0.9 -> "0.90", 12.345 -> "12.3", 12345.6 -> "12,346", None -> "-"."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:,.{digits}f}"


def _whole(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _verdict(run: Result, is_named: bool) -> str:
    name = f"<b>{escape(run.name)}</b>: " if is_named else ""
    summary = run.summary
    model = summary.get("model") or _dig(summary, "service", "model") or _dig(summary, "flags", "model")
    about = f"{escape(str(model))}, " if model else ""
    about += f"{number_text(run.number('duration'))} s"
    if why := run.invalid_because:
        return f'<p>{name}<span class="bad">not valid: {escape(why)}</span> <span class="soft">({about})</span></p>'
    generator = summary.get("generator")
    share, late = (_dig(generator, name) for name in ("cpu_share", "lateness_p99_ms"))
    own = []
    if isinstance(share, int | float):
        own.append(f"the generator used {share:.0%} of a core")
    if isinstance(late, int | float):
        own.append(f"was {number_text(float(late))} ms late at p99")
    details = f"; {' and '.join(own)}" if own else ""
    return f'<p>{name}<span class="good">valid</span> <span class="soft">({about}{details})</span></p>'


def _dig(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _cards(run: Result) -> str:
    cells = [
        f'<div class="card"><b>{number_text(value)}</b>{escape(words)}</div>'
        for name, words in _CARDS
        if (value := run.number(name)) is not None
    ]
    return f'<div class="cards">{"".join(cells)}</div>'


def _latencies(run: Result) -> str:
    words = list(dict.fromkeys((*_WORDS, *(f"p{number:g}" for number in run.summary.get("percentiles") or ()))))
    rows = [
        (title, *(number_text(run.number(f"{word}_{name}_ms")) for word in words))
        for name, title in _METRICS
        if run.number(f"mean_{name}_ms") is not None
    ]
    return "<h2>Latency, ms</h2>" + _table(("", *words), rows) if rows else ""


def _side_by_side(runs: Sequence[Result]) -> str:
    rows = [
        (words, *(number_text(run.number(name)) for run in runs))
        for name, words in _CARDS
        if any(run.number(name) is not None for run in runs)
    ]
    return "<h2>Side by side</h2>" + _table(("", *(run.name for run in runs)), rows)


def _prediction(run: Result, plan: Mapping[str, Any] | None) -> str:
    pairs = calibrate.pairs(run, plan)
    if not pairs:
        return ""
    rows = [
        (
            pair.words,
            f"{number_text(pair.likely)} ({number_text(pair.low)} to {number_text(pair.high)})",
            number_text(pair.measured),
            f"{pair.off:+.0%}",
            "yes" if pair.is_inside else "no",
        )
        for pair in pairs
    ]
    head = ("", "predicted", "measured", "predicted is off by", "in the range")
    return f"<h2>Predicted and measured: {escape(run.name)}</h2>" + _table(head, rows)


def _drawn(charts: Sequence[Chart]) -> str:
    if not charts:
        return ""
    drawn = "".join(f"<figure>{svg(chart)}</figure>" for chart in charts)
    return f'<h2>Drawn</h2><div class="charts">{drawn}</div>'


def _facts(run: Result, is_named: bool) -> str:
    """Flags, versions, machine and formulas: a number without them compares with nothing."""
    parts = []
    for block in ("launch", "flags", "versions", "machine", "errors", "formulas"):
        facts = run.summary.get(block)
        if isinstance(facts, Mapping) and facts:
            rows = [(str(key), _plain(value)) for key, value in facts.items() if value is not None]
            body = "".join(f'<tr><td>{escape(a)}</td><td class="words">{escape(b)}</td></tr>' for a, b in rows)
            parts.append(f'<h2>{block.capitalize()}</h2><div class="wide facts"><table>{body}</table></div>')
    name = f"<h2>{escape(run.name)}</h2>" if is_named and parts else ""
    return name + "".join(parts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Its cells know their column, since a phone shows one below the other."""
    top = "".join(f"<th>{escape(word)}</th>" for word in head)
    cells = [
        [f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(head, row, strict=True)]
        for row in rows
    ]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="wide cells"><table><tr>{top}</tr>{body}</table></div>'
