"""The charts of a report as PNG files. Needs matplotlib, the extra "bench"; nothing else imports it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.report.svg import COLOURS, DASHES, Chart
from penstock.errors import UserError

_SIZE_IN, _DPI = (6.4, 4.0), 150


def check() -> None:
    """Nothing when pictures can be drawn.  Raises UserError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise UserError(
            "cannot draw pictures: the package matplotlib is not installed", hint="pip install 'penstock[bench]'"
        ) from exc


def save(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One PNG a chart, named by its title; the files.  Raises UserError as `check` does, or when it cannot write."""
    check()
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    written = []
    for chart in charts:
        figure = Figure(figsize=_SIZE_IN, dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        for index, series in enumerate(chart.series):
            colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
            xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
            if series.kind == "dots":
                axes.plot(xs, ys, ".", color=colour, markersize=3, label=series.name)
                continue
            style = (0, tuple(float(word) / 2 for word in dash.split())) if dash else "-"
            marker = "o" if len(xs) <= 12 else None
            axes.plot(xs, ys, color=colour, linestyle=style, marker=marker, markersize=4, label=series.name)
        for place, word in chart.marks:
            axes.axvline(place, color="#555555", linewidth=0.8)
            axes.annotate(word, (place, 1), xycoords=("data", "axes fraction"), fontsize=8, va="top")
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        if chart.is_log_x:
            axes.set_xscale("log")
        if chart.is_log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(chart.series) > 1:
            axes.legend(frameon=False, fontsize=8)
        path = folder / f"{re.sub('[^a-z0-9]+', '-', chart.title.lower()).strip('-')}.png"
        try:
            figure.savefig(path)
        except OSError as exc:
            raise UserError(f'could not write "{path}": {exc.strerror}') from exc
        written.append(path)
    return written
