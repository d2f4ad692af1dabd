"""The boards as Grafana's dashboards (10.4 and newer), and the files that give them to a Grafana. Pure.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from penstock.observe.boards.catalog import BOARDS
from penstock.observe.panels import RATE, Board, Kind, Panel, Query, select
from penstock.observe.prometheus import INTERVAL_S

Json = dict[str, Any]

TAG = "penstock"
_COLUMNS = 24
_SCHEMA = 39  # of Grafana 10.4
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_MATCHERS = {label: f'{label}=~"${label}"' for label in ("deployment", "model", "replica")} | {
    "model_name": 'model_name=~"$model"'  # vLLM's word
}
_HEIGHTS = {"stat": 4, "graph": 8, "stack": 8, "table": 9}
# https://github.com/grafana/grafana/blob/main/packages/grafana-data/src/valueFormats/categories.ts
_UNITS = {
    "": "short", "share": "percentunit", "s": "s", "requests/s": "reqps", "requests/min": "reqpm",
    "tokens/s": "suffix: tokens/s", "tokens": "suffix: tokens", "bytes": "bytes", "bytes/s": "Bps", "W": "watt",
    "°C": "celsius", "Hz": "hertz", "USD": "currencyUSD", "USD/h": "suffix: USD/h", "J": "joule", "h": "h",
    "1/s": "cps", "up": "none",
}  # fmt: skip
_NAN = {"type": "special", "options": {"match": "nan", "result": {"index": 0, "text": "No traffic"}}}
_UP = {
    "type": "value",
    "options": {
        "0": {"index": 1, "text": "Down", "color": "red"},
        "1": {"index": 2, "text": "Up", "color": "green"},
    },
}


def files() -> dict[str, str]:
    """The text of each board's file by its name, to import in Grafana."""
    return {f"{board.name}.json": json.dumps(dashboard(board), indent=1) + "\n" for board in BOARDS}


def provisioning(url: str, folder: Path) -> dict[str, str]:
    """Files by their names under `folder`, which a Grafana reads whose GF_PATHS_PROVISIONING is `folder`/provisioning.

    `url` is Prometheus's. https://grafana.com/docs/grafana/latest/administration/provisioning/
    """
    import yaml

    source: Json = {"name": "penstock", "uid": "penstock", "type": "prometheus", "access": "proxy", "url": url}
    source |= {"jsonData": {"timeInterval": f"{INTERVAL_S}s"}}  # the least range of a rate is four of it
    provider = {
        "name": "penstock",
        "folder": "penstock",
        "type": "file",
        "options": {"path": str(folder / "dashboards")},
    }
    return {
        "provisioning/datasources/penstock.yaml": yaml.safe_dump({"apiVersion": 1, "datasources": [source]}),
        "provisioning/dashboards/penstock.yaml": yaml.safe_dump({"apiVersion": 1, "providers": [provider]}),
    } | {f"dashboards/{name}": text for name, text in files().items()}


def dashboard(board: Board) -> Json:
    """The dashboard that Grafana imports as it is: it asks for a Prometheus by its first variable."""
    return {
        "id": None,
        "uid": _uid(board.name),
        "title": board.title,
        "description": board.about,
        "tags": [TAG],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all graphs
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "links": [_links()],
        "annotations": {"list": [*_annotations()]},
        "templating": {"list": [*_variables()]},
        "panels": [*_panels(board)],
    }


def _uid(name: str) -> str:
    return f"penstock-{name}"


def _links() -> Json:
    """A menu of the other boards, which keeps time and variables."""
    return {
        "type": "dashboards", "title": "penstock", "tags": [TAG], "asDropdown": True, "includeVars": True,
        "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": "",
    }  # fmt: skip


def _annotations() -> Iterator[Json]:
    restarts = f"changes(penstock_replica_restarts_total[{RATE}]) > 0"
    scaled = f"changes(penstock_replicas_desired[{RATE}]) > 0"
    for name, expr, title, colour in (
        ("Restarts", restarts, "replica {{replica}} was restarted", "red"),
        ("Scaling", scaled, "another number of replicas is asked for", "blue"),
    ):
        yield {
            "name": name, "datasource": _DATASOURCE, "enable": True, "hide": False, "iconColor": colour,
            "expr": select(expr, _MATCHERS), "titleFormat": title, "step": "60s",
        }  # fmt: skip


def _variables() -> Iterator[Json]:
    yield {
        "name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0,
        "refresh": 1, "regex": "", "multi": False, "includeAll": False, "current": {}, "options": [],
        "skipUrlSync": False,
    }  # fmt: skip
    series = {
        "deployment": "penstock_replicas_ready",
        "model": "penstock_replicas_ready",
        "replica": "penstock_requests_in_flight",
    }
    chosen: dict[str, str] = {}
    for label, name in series.items():
        query = f"label_values({select(name, chosen)}, {label})"
        yield {
            "name": label, "label": label.capitalize(), "type": "query", "datasource": _DATASOURCE,
            "query": {"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"}, "hide": 0,
            # 2: at a change of the time range; replicas come and go.
            "refresh": 2, "regex": "", "sort": 7, "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]}, "options": [], "skipUrlSync": False,
        }  # fmt: skip
        chosen[label] = _MATCHERS[label]
    yield {
        "name": "filters", "label": "Filters", "type": "adhoc", "datasource": _DATASOURCE, "filters": [],
        "hide": 0, "skipUrlSync": False,
    }  # fmt: skip


def _panels(board: Board) -> Iterator[Json]:
    """Row headings and panels, laid from left to right, each with its number."""
    numbers, y = count(1), 0
    for title, panels in board.rows:
        yield {
            "id": next(numbers), "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        }  # fmt: skip
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > _COLUMNS:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": _HEIGHTS[panel.kind]}
            yield {"id": next(numbers), "gridPos": place} | _panel(panel)
            x, height = x + panel.width, max(height, place["h"])
        y += height


def _panel(panel: Panel) -> Json:
    shapes = {"stat": _stat, "graph": _graph, "stack": _graph, "table": _table}
    return {
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "targets": [_target(query, number, panel.kind) for number, query in enumerate(panel.queries)],
    } | shapes[panel.kind](panel)


def _target(query: Query, number: int, kind: Kind) -> Json:
    # The last point of a range would be shown for an hour after its series ended.
    is_instant = kind in ("stat", "table")
    return {
        "refId": _letter(number),
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": select(query.expr, _MATCHERS),
        "legendFormat": query.legend or "__auto",
        "range": not is_instant,
        "instant": is_instant,
        "format": "table" if kind == "table" else "time_series",
    }


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def _defaults(panel: Panel) -> Json:
    steps = [{"color": colour, "value": value} for value, colour in panel.thresholds or ((None, "green"),)]
    shares = {"min": 0, "max": 1} if panel.unit == "share" and panel.kind != "stat" else {}
    return {
        "unit": _UNITS[panel.unit],
        "noValue": "No traffic" if all(RATE in query.expr for query in panel.queries) else "No data",
        "mappings": [_NAN, *([_UP] if panel.unit == "up" else [])],
        "thresholds": {"mode": "absolute", "steps": steps},
    } | shares


def _stat(panel: Panel) -> Json:
    has_names = len(panel.queries) > 1
    return {
        "type": "stat",
        "fieldConfig": {"defaults": _defaults(panel) | {"color": {"mode": "thresholds"}}, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "value_and_name" if has_names else "value",
            "wideLayout": True,
        },
    }


def _graph(panel: Panel) -> Json:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.kind == "stack" else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.kind == "stack" else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
    }
    defaults = _defaults(panel) | {"custom": custom, "color": {"mode": "palette-classic"}, "min": 0}
    return {
        "type": "timeseries",
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _table(panel: Panel) -> Json:
    """A row for each set of labels, a column for each query; the first column leads to the board of that replica."""
    names = {f"Value #{_letter(number)}": query.legend for number, query in enumerate(panel.queries)}
    chosen = [f"var-{label}=${{__data.fields.{label}}}" for label in ("deployment", "replica")]
    link = {
        "title": "only this replica",
        "url": f"/d/{_uid('instances')}?${{__url_time_range}}&{'&'.join(chosen)}",
    }
    overrides = [
        {
            "matcher": {"id": "byName", "options": query.legend},
            "properties": [{"id": "unit", "value": _UNITS[query.unit]}],
        }
        for query in panel.queries
    ]
    overrides.append(
        {"matcher": {"id": "byName", "options": "replica"}, "properties": [{"id": "links", "value": [link]}]}
    )
    return {
        "type": "table",
        "fieldConfig": {
            "defaults": _defaults(panel) | {"noValue": "", "custom": {"align": "auto", "filterable": True}},
            "overrides": overrides,
        },
        "options": {"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": "replica", "desc": False}]},
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": names}},
        ],
    }
