"""Charts as values, and as inline SVG. Pure.

Lines differ by dashes too, for print in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Literal

import msgspec

# Okabe and Ito's colours, which people with any colour vision tell apart. https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#7F7F7F", "#882255")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 2", "12 4", "3 6")
_WIDTH, _HEIGHT = 460, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 34, 44
_MOST_POINTS = 600
# Of a file by itself; in the HTML report the page's style holds.
_STYLE = (
    'text{font:12px system-ui,"DejaVu Sans",sans-serif;fill:#5b5b5b}.title{font-weight:600;font-size:13px;fill:#1b1b1b}'
    ".small{font-size:11px}.grid{stroke:#d9d9d9}.axis{stroke:#5b5b5b}.line{fill:none;stroke-width:1.5}"
    ".dots{fill:none;stroke-width:3;stroke-linecap:round}"
)
Point = tuple[float, float]


class Series(msgspec.Struct, frozen=True):
    """One line, or dots."""

    name: str
    points: tuple[Point, ...]
    kind: Literal["line", "dots"] = "line"


class Chart(msgspec.Struct, frozen=True):
    """What is drawn. `begins_at_zero` is of the x axis; the y axis always does."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log_x: bool = False
    begins_at_zero: bool = True

    @property
    def has_points(self) -> bool:
        return any(series.points for series in self.series)


def svg(chart: Chart) -> str:
    points = [point for series in chart.series for point in series.points]
    xs = [x for x, _ in points] + ([0.0] if chart.begins_at_zero else [])
    x_axis = _Axis.of(xs, chart.is_log_x, False)
    y_axis = _Axis.of([y for _, y in points], False, True)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f'<text class="title" x="{_LEFT}" y="15">{escape(chart.title)}</text>',
        *_grid(x_axis, y_axis, chart),
    ]
    for index, series in enumerate(chart.series):
        parts.append(_drawn(series, index, x_axis, y_axis))
    parts += _legend(chart.series)
    return "".join([*parts, "</svg>"])


def standalone(charts: Sequence[Chart]) -> str:
    """The charts, one below the other, as the text of an SVG file."""
    height = _HEIGHT * len(charts)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{2 * _WIDTH}">']
    parts.append(f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" fill="#fff"/>')
    for index, chart in enumerate(charts):
        parts.append(f'<g transform="translate(0 {index * _HEIGHT})">{svg(chart)}</g>')
    return "".join([*parts, "</svg>\n"])


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> tuple[Point, ...]:
    if len(points) <= most:
        return tuple(points)
    step = (len(points) - 1) / (most - 1)
    return tuple(points[round(index * step)] for index in range(most))


class _Axis(msgspec.Struct, frozen=True):
    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], is_log: bool, from_zero: bool) -> _Axis:
        usable = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)] or [1.0]
        low, high = min(usable), max(usable)
        if is_log:
            low, high = (low / 1.1, high * 1.1) if low == high else (low, high)
            return cls(low, high, True, _log_ticks(low, high))
        low = min(0.0, low) if from_zero else low
        high = high if high > low else low + 1.0
        step = _step((high - low) / 5)
        first, last = math.floor(low / step), math.ceil(high / step)
        top = last * step if from_zero else high
        ticks = tuple(number * step for number in range(first, last + 1) if low - 1e-9 <= number * step <= top + 1e-9)
        return cls(low, top, False, ticks)

    def share(self, value: float) -> float:
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [tick for tick in fine if low * 0.999 <= tick <= high * 1.001]
    return tuple(inside if len(inside) <= 7 else [tick for tick in inside if math.log10(tick) % 1 < 1e-9])


def tick_text(value: float) -> str:
    """0.5 -> "0.5", 12000 -> "12k", 3000000 -> "3M"."""
    for size, letter in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def _x(axis: _Axis, value: float) -> float:
    return round(_LEFT + axis.share(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(axis: _Axis, value: float) -> float:
    return round(_HEIGHT - _BOTTOM - axis.share(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _grid(x_axis: _Axis, y_axis: _Axis, chart: Chart) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    for tick in x_axis.ticks:
        x = _x(x_axis, tick)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{tick_text(tick)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text x="{middle_x}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>')
    turned = f'transform="rotate(-90 13 {middle_y})"'
    parts.append(f'<text x="13" y="{middle_y}" text-anchor="middle" {turned}>{escape(chart.y_label)}</text>')
    return parts


def _drawn(series: Series, index: int, x_axis: _Axis, y_axis: _Axis) -> str:
    colour = COLOURS[index % len(COLOURS)]
    places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in thinned(series.points)]
    title = f"<title>{escape(series.name)}</title>"
    if series.kind == "dots":
        dots = "".join(f"M{x} {y}h0" for x, y in places)
        return f'<path class="dots" d="{dots}" stroke="{colour}">{title}</path>'
    line = " ".join(f"{x},{y}" for x, y in places)
    dash = f' stroke-dasharray="{DASHES[index % len(DASHES)]}"' if index else ""
    ends = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places) if len(places) <= 12 else ""
    return f'<polyline class="line" points="{line}" stroke="{colour}"{dash}>{title}</polyline>{ends}'


def _legend(series: Sequence[Series]) -> list[str]:
    """Names next to their lines, in one row under the title; nothing for one series, which the title names."""
    if len(series) < 2:
        return []
    parts, x = [], float(_LEFT)
    for index, line in enumerate(series):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
        parts.append(
            f'<line class="line" x1="{x:.0f}" x2="{x + 20:.0f}" y1="25" y2="25" stroke="{colour}" '
            f'stroke-dasharray="{dash}"/><text class="small" x="{x + 24:.0f}" y="29">{escape(line.name)}</text>'
        )
        x += 36 + 6.2 * len(line.name)
    return parts
