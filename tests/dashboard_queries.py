"""The queries of the dashboards, with the variables of Grafana filled in."""

from __future__ import annotations

import re

from penstock.observe import grafana
from penstock.observe.boards.catalog import BOARDS
from penstock.observe.panels import Board


def substituted(expr: str) -> str:
    """As Grafana fills its variables in when all is chosen."""
    expr = expr.replace("$__rate_interval", "5m").replace("$__range", "1h")
    return re.sub(r"\$(deployment|model|replica)\b", ".*", expr)


def queries(board: Board) -> list[tuple[str, str]]:
    """(title, expression) of every query of the dashboard."""
    panels = grafana.dashboard(board)["panels"]
    return [(panel["title"], substituted(target["expr"])) for panel in panels for target in panel.get("targets", ())]


def all_queries() -> list[tuple[str, str]]:
    return [each for board in BOARDS for each in queries(board)]
