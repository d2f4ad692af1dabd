"""The operations board for Google Cloud Monitoring, over Managed Service for Prometheus. Pure.

https://cloud.google.com/monitoring/api/ref_v3/rest/v1/projects.dashboards
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from penstock.observe.boards.operations import OPERATIONS
from penstock.observe.panels import RATE, Board, Panel, Query, Thresholds, select

Json = dict[str, Any]

_COLUMNS = 48
_SCALE = 2  # its columns to one of a board's
_HEIGHTS = {"stat": 8, "graph": 16, "stack": 16}
_HEADING = 4
_SEVERITY = {"blue": 0, "green": 0, "orange": 1, "red": 2}
_COLOURS = {"orange": "YELLOW", "red": "RED"}
# UCUM, as in https://cloud.google.com/monitoring/api/ref_v3/rest/v3/projects.metricDescriptors
_UNITS = {
    "": "1", "share": "10^2.%", "s": "s", "requests/s": "{requests}/s", "tokens/s": "{tokens}/s", "1/s": "1/s",
    "W": "W",
}  # fmt: skip


def dashboard(deployment: str, board: Board = OPERATIONS) -> Json:
    """For `gcloud monitoring dashboards create --config-from-file`. `deployment` is the name whose series it shows."""
    return {
        "displayName": f"{board.title} of {deployment}",
        "labels": {"penstock": ""},
        "mosaicLayout": {"columns": _COLUMNS, "tiles": [*_tiles(deployment, board)]},
    }


def _tiles(deployment: str, board: Board) -> Iterator[Json]:
    y = 0
    for title, panels in board.rows:
        heading = {"title": title, "sectionHeader": {"subtitle": "", "dividerBelow": True}}
        yield {"xPos": 0, "yPos": y, "width": _COLUMNS, "height": _HEADING, "widget": heading}
        x, y, height = 0, y + _HEADING, 0
        for panel in panels:
            for widget in _widgets(deployment, panel):
                width = panel.width * _SCALE
                if x + width > _COLUMNS:
                    x, y, height = 0, y + height, 0
                height = max(height, _HEIGHTS[panel.kind])
                yield {"xPos": x, "yPos": y, "width": width, "height": _HEIGHTS[panel.kind], "widget": widget}
                x += width
        y += height


def _widgets(deployment: str, panel: Panel) -> Iterator[Json]:
    """A graph, or a tile for each query. Alerts that fire are no series here: Cloud Monitoring has its own page."""
    queries = [query for query in panel.queries if "ALERTS" not in query.expr]
    if panel.kind != "stat" and queries:
        yield {"title": panel.title, "xyChart": _chart(deployment, panel)}
        return
    for query in queries:
        title = f"{panel.title}, {query.legend}" if query.legend else panel.title
        card = {"timeSeriesQuery": _query(deployment, panel, query), "thresholds": [*_thresholds(panel.thresholds)]}
        yield {"title": title, "scorecard": card | {"sparkChartView": {"sparkChartType": "SPARK_LINE"}}}


def _chart(deployment: str, panel: Panel) -> Json:
    """Series with labels get their legend from those."""
    plot = "STACKED_AREA" if panel.kind == "stack" else "LINE"
    data = [
        {"timeSeriesQuery": _query(deployment, panel, query), "plotType": plot, "targetAxis": "Y1"}
        | ({"legendTemplate": query.legend} if "{{" not in query.legend else {})
        for query in panel.queries
    ]
    return {
        "dataSets": data,
        "yAxis": {"scale": "LINEAR"},
        "thresholds": [{"value": value} for value, _ in panel.thresholds if value is not None],
        "chartOptions": {"mode": "COLOR"},
    }


def _query(deployment: str, panel: Panel, query: Query) -> Json:
    expr = select(query.expr, {"deployment": f"deployment={json.dumps(deployment)}"})
    return {"prometheusQuery": expr.replace(RATE, "5m"), "unitOverride": _UNITS[panel.unit]}


def _thresholds(thresholds: Thresholds) -> Iterator[Json]:
    """A value that ends a better colour above it is crossed above, one that ends a worse one below it, below."""
    for (_, below), (value, above) in pairwise(thresholds):
        is_worse = _SEVERITY[above] > _SEVERITY[below]
        colour, direction = (above, "ABOVE") if is_worse else (below, "BELOW")
        yield {"value": value, "color": _COLOURS[colour], "direction": direction}
