"""The dashboards: every name is known, every query parses, no panels overlap, and others' schemas accept them."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml
from dashboard_queries import queries
from golden_files import table
from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.deployment.metrics import write_grafana
from penstock.observe import export, google, grafana
from penstock.observe.boards.catalog import BOARDS
from penstock.observe.boards.instances import INSTANCES
from penstock.observe.names import samples
from penstock.observe.panels import Board, Panel, Query

boards = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


@boards
def test_every_query_parses_and_its_matchers_are_labels_of_its_families(board: Board) -> None:
    for title, expr in queries(board):
        promql_parser.parse(expr)
        for name, inside in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expr):
            labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)
            known = {*samples()[name].labels, "deployment"} if name in samples() else {"deployment", "alertstate"}
            assert set(labels) <= known, f"{title}: {name} has no label {set(labels) - known}"
        ours = [name for name in re.findall(r"[a-zA-Z_:][\w:]*", expr) if name in samples()]
        assert all(re.search(rf'{name}{{[^}}]*deployment=~"\.\*"', expr) for name in ours), f"{title}: {expr}"


def test_a_name_in_no_table_is_an_error() -> None:
    panel = Panel("t", "a", "", "graph", (Query("sum(rate(penstock_request_total[5m]))"),))
    with pytest.raises(ValueError, match="penstock_request_total"):
        grafana.dashboard(Board("x", "x", "x", (("row", (panel,)),)))


@boards
def test_the_layout_has_no_overlap_and_every_panel_says_what_it_is(board: Board) -> None:
    content = json.loads(json.dumps(grafana.dashboard(board)))
    panels = content["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert_no_overlap([tuple(panel["gridPos"][side] for side in "xywh") for panel in panels], 24)
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJKLMNOP"[: len(panel["targets"])])
        # A tile or a table shows what is now: the last point of a range outlives its series.
        assert all(target["instant"] == (panel["type"] != "timeseries") for target in panel["targets"])


def assert_no_overlap(places: list[tuple[int, int, int, int]], columns: int) -> None:
    assert all(x >= 0 and w > 0 and h > 0 and x + w <= columns for x, _, w, h in places)
    for (x, y, w, h), (x2, y2, w2, h2) in combinations(places, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y, f"{(x, y, w, h)} and {(x2, y2, w2, h2)}"


@boards
def test_grafanas_own_types_read_it_and_write_it_as_it_was(board: Board) -> None:
    content = grafana.dashboard(board)
    again = json.loads(json.dumps(Dashboard.from_json(content).to_json(), default=lambda each: each.to_json()))
    # Its types are of an older version: these fields are read by Grafana from the annotation's and the variable's own.
    free = r"\.annotations\.list\[\d\]\.(titleFormat|step)|\.templating\.list\[4\]\.filters"
    assert [path for path in lost(content, again) if not re.fullmatch(free, path)] == []


def lost(content: Any, again: Any, path: str = "") -> list[str]:
    """The paths of what is other in `again`; fields that it adds are none."""
    if isinstance(content, dict):
        return [
            each
            for key, value in content.items()
            if value is not None
            for each in (lost(value, again[key], f"{path}.{key}") if key in again else [f"{path}.{key}"])
        ]
    if isinstance(content, list):
        pairs = list(zip(content, again, strict=False))
        longer = [f"{path}: {len(content)} and {len(again)}"] if len(content) != len(again) else []
        return longer + [each for at, (one, two) in enumerate(pairs) for each in lost(one, two, f"{path}[{at}]")]
    return [] if content == again else [f"{path}: {content!r} and {again!r}"]


def test_a_board_finds_the_others_and_a_row_its_replica() -> None:
    content = grafana.dashboard(INSTANCES)
    assert content["links"][0]["tags"] == content["tags"] == [grafana.TAG]
    variables = {variable["name"] for variable in content["templating"]["list"]}
    assert variables == {"datasource", "deployment", "model", "replica", "filters"}
    (table,) = (panel for panel in content["panels"] if panel["type"] == "table")
    (link,) = (
        each["value"][0]["url"]
        for override in table["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == "links"
    )
    assert link.startswith(f"/d/{content['uid']}?")
    assert link.endswith("&var-deployment=${__data.fields.deployment}&var-replica=${__data.fields.replica}")
    uids = [grafana.dashboard(board)["uid"] for board in BOARDS]
    assert len(set(uids)) == len(uids)


def test_a_grafana_of_the_run_gets_all_files_with_its_folder_and_prometheus(tmp_path: Path) -> None:
    written = grafana.provisioning("http://127.0.0.1:9099", tmp_path)
    source = yaml.safe_load(written["provisioning/datasources/penstock.yaml"])["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9099")
    provider = yaml.safe_load(written["provisioning/dashboards/penstock.yaml"])["providers"][0]
    assert provider["options"]["path"] == str(tmp_path / "dashboards")
    assert {f"dashboards/{board.name}.json" for board in BOARDS} == {name for name in written if name[0] == "d"}
    write_grafana(tmp_path / "grafana", "http://127.0.0.1:9099")
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert names == {f"grafana/{name}" for name in written}


def prometheus_queries(content: Any) -> list[str]:
    if isinstance(content, dict):
        below = [each for value in content.values() for each in prometheus_queries(value)]
        return [*below, content["prometheusQuery"]] if "prometheusQuery" in content else below
    return [each for value in content for each in prometheus_queries(value)] if isinstance(content, list) else []


def test_google_clouds_board_has_the_documented_structure() -> None:
    content = json.loads(json.dumps(google.dashboard("qwen")))
    jsonschema.validate(content, table("google_dashboard.yaml"))
    tiles = content["mosaicLayout"]["tiles"]
    assert_no_overlap([tuple(tile[side] for side in ("xPos", "yPos", "width", "height")) for tile in tiles], 48)
    for expr in prometheus_queries(content):
        promql_parser.parse(expr)
        assert "$" not in expr.replace('"$1.0"', "") and "ALERTS" not in expr
        assert 'deployment="qwen"' in expr or "DCGM" in expr
    cards = {tile["widget"]["title"]: tile["widget"]["scorecard"] for tile in tiles if "scorecard" in tile["widget"]}
    assert cards["Replicas, ready"]["thresholds"] == [{"value": 0.5, "color": "RED", "direction": "BELOW"}]
    assert cards["TTFT kept"]["thresholds"] == [
        {"value": 0.9, "color": "RED", "direction": "BELOW"},
        {"value": 0.99, "color": "YELLOW", "direction": "BELOW"},
    ]
    assert cards["KV cache"]["thresholds"][0] == {"value": 0.9, "color": "YELLOW", "direction": "ABOVE"}
    # A name with quotes stays inside its matcher.
    hostile = prometheus_queries(google.dashboard('a"} or vector(1) #'))[0]
    promql_parser.parse(hostile)
    assert r'deployment="a\"} or vector(1) #"' in hostile


def test_exported_files_are_json() -> None:
    written = export.dashboards("qwen")
    assert set(written) == {"google/operations.json", *(f"grafana/{board.name}.json" for board in BOARDS)}
    assert all(json.loads(text) for text in written.values())
