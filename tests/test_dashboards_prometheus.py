"""Every query of the dashboards on a real Prometheus that reads made pages with every family of the tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from dashboard_queries import queries
from loopback_server import LoopbackHandler, LoopbackServer, running
from prometheus_rig import Prometheus, prometheus

from penstock.observe.boards.capacity import CAPACITY
from penstock.observe.boards.catalog import BOARDS
from penstock.observe.boards.operations import OPERATIONS
from penstock.observe.names import Row, rows
from penstock.observe.panels import Board
from penstock.observe.promql import DCGM

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("prometheus")]

HOSTILE = 'a"b\\{c="d"}'
# What queries ask of labels by name; all others are "x".
VALUES = {
    "outcome": ("complete", "broken"), "code": ("200", "503"), "kind": ("prompt", "output"), "metric": ("ttft", "tpot"),
    "replica": ("0", "1"), "state": ("ready",), "clock": ("sm",), "node": ("n1",), "gpu": ("0",), "model": (HOSTILE,),
    "key": (HOSTILE, "k"),
}  # fmt: skip
OF_GPUS = [row.name for row in rows() if "uuid" in row.labels]
BOUNDS = ("0.1", "1.0", "+Inf")


def page(n_scrapes: int, with_gpus: bool) -> str:
    """All families: counters that grow, histograms with half of their values within 1.0, gauges of 1."""
    lines = []
    for row in rows():
        if with_gpus or "uuid" not in row.labels:
            lines += [f"# TYPE {row.name} {row.kind}", *_samples(row, n_scrapes)]
    if not with_gpus:
        lines += [f'{name}{{Hostname="n1",gpu="0"}} {n_scrapes + 1}' for name in sorted(DCGM)]
    return "\n".join(lines) + "\n"


def _samples(row: Row, n: int) -> Iterator[str]:
    for labels in _label_sets([label for label in row.labels if label != "deployment"]):
        if row.kind == "histogram":
            counts = [(f'le="{bound}"', at * n) for at, bound in enumerate(BOUNDS)]
            yield from (_sample(f"{row.name}_bucket", [*labels, bound], count) for bound, count in counts)
            yield _sample(f"{row.name}_sum", labels, n)
            yield _sample(f"{row.name}_count", labels, 2 * n)
        else:
            yield _sample(row.name, labels, n if row.kind == "counter" else 1)


def _sample(name: str, labels: list[str], value: float) -> str:
    return f"{name}{{{','.join(labels)}}} {value}"


def _label_sets(labels: list[str]) -> list[list[str]]:
    sets: list[list[str]] = [[]]
    for label in labels:
        values = [value.replace("\\", "\\\\").replace('"', '\\"') for value in VALUES.get(label, ("x",))]
        sets = [[*chosen, f'{label}="{value}"'] for chosen in sets for value in values]
    return sets


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Deployment "made": two gateways with the same facts. "exporter": no GPU of ours, but a DCGM exporter's."""
    began = time.monotonic()

    class Page(LoopbackHandler):
        def do_GET(self) -> None:
            self.send(200, page(int((time.monotonic() - began) * 100), self.path == "/gpus").encode())

    stack = contextlib.ExitStack()
    servers = [stack.enter_context(running(LoopbackServer(Page))) for _ in range(3)]
    first, second, third = (server.url.removeprefix("http://") for server in servers)
    jobs = [
        {
            "job_name": name,
            "metrics_path": path,
            "static_configs": [{"targets": addresses, "labels": {"deployment": name}}],
        }
        for name, path, addresses in (("made", "/gpus", [first, second]), ("exporter", "/exporter", [third]))
    ]
    alerts = {"PenstockMade": "max by (deployment) (penstock_replicas_ready) > 0"}
    with stack, prometheus(tmp_path_factory.mktemp("prometheus"), jobs, alerts) as server:
        server.wait('rate(penstock_requests_total{deployment="exporter"}[10s])')
        server.wait('rate(penstock_requests_total{deployment="made"}[10s])')
        server.wait("count(ALERTS) > 1")
        yield server


def asked(expr: str, deployment: str) -> str:
    expr = expr.replace('deployment=~".*"', f'deployment="{deployment}"')
    return expr.replace("[5m]", "[10s]").replace("[1h:1m]", "[5s:1s]")


@pytest.mark.nightly
@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
@pytest.mark.parametrize("deployment", ["made", "exporter"])
def test_every_query_has_data(filled: Prometheus, board: Board, deployment: str) -> None:
    for _, expr in queries(board):
        if deployment == "made" or "DCGM" in expr or not any(name in expr for name in OF_GPUS):
            filled.wait(asked(expr, deployment))  # of a busy machine a scrape may be late


@pytest.mark.nightly
def test_values_are_those_of_the_pages(filled: Prometheus) -> None:
    """Two gateways know of one replica; half of the requests fail, and half keep the promise of one second."""
    values = {title: filled.ask(asked(expr, "made"))[0][1] for title, expr in reversed(queries(OPERATIONS))}
    expected = {"Firing alerts": 1.0, "Replicas": 1.0, "Targets down": 0.0, "Failed": 0.5, "TTFT kept": 0.5}
    expected["GPU use"] = 1.0
    assert {title: values[title] for title in expected} == pytest.approx(expected, rel=0.01)
    cost = dict(reversed(queries(CAPACITY)))
    by_key = {labels["key"]: value for labels, value in filled.ask(asked(cost["Cost by key"], "made"))}
    half = filled.ask(asked(cost["Cost per hour"], "made"))[0][1] / 2
    assert by_key == pytest.approx({HOSTILE: half, "k": half}, rel=0.05), "two keys alike"
    models = filled.ask('sum by (model) (penstock_requests_total{deployment="made"})')
    assert [labels["model"] for labels, _ in models] == [HOSTILE]
