"""A real Prometheus as a child of a real deployment with the fake engine: it scrapes, answers, dies, and comes back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launching import Place, ask, call, kill, now, pid_of, pids
from waiting import until

from penstock.run_folder import Part, Run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]


def part_of(run: Run) -> Part:
    part = now(run).prometheus
    assert part is not None
    return part


def value(query: str) -> float | None:
    """The only value of a query's answer, None without one."""
    rows = call("metrics", query, "--json").json
    return float(rows[0]["points"][-1][1]) if isinstance(rows, list) and rows else None


def test_it_watches_dies_comes_back_and_ends_with_its_deployment(place: Place, tmp_path: Path) -> None:
    file = place.write("one", replicas=2, workload={"ttft_ms": 2000}, observe={"prometheus": True})
    run = place.up(file)
    until(lambda: part_of(run).state == "running", "it runs")
    url = str(part_of(run).url)
    place.addresses.add(url)
    assert url in call("status").out and url.startswith("http://127.0.0.1:")
    ask(run)
    first = pid_of(run, "prometheus")
    kill(first)
    until(lambda: part_of(run).state == "running" and part_of(run).n_restarts == 1, "it is back")
    assert part_of(run).url == url, "at the same address"
    assert f"its process {first} was gone" in call("status").out

    def is_scraped() -> bool:
        return value("sum(up)") == 2 and value('sum(penstock_requests_total{outcome="complete"})') == 1

    until(is_scraped, "both pages are scraped")
    assert value('count(sum by (replica) (vllm:num_requests_running{deployment="one"}))') == 2, "each replica's page"
    assert value('penstock_replicas_ready{deployment="one",instance="gateway"}') == 2
    refused = call("metrics", "sum(up) by (")
    assert refused.code == 2 and "1:13: parse error" in refused.err
    assert "LAST" in call("metrics", "up", "--range", "1m").out
    assert call("metrics", "--alerts", "--json").json == []
    check_pages_and_export(tmp_path / "export")

    second, controller = pid_of(run, "prometheus"), pid_of(run, "controller")
    kill(controller)
    until(lambda: pids(run, "controller") not in ([], [controller]), "another controller")
    until(lambda: now(run).controller.state == "running", "that runs")
    assert pid_of(run, "prometheus") == second, "the new controller adopts it"
    ask(run)
    assert call("down").code == 0
    place.assert_nothing_left()
    assert "no Prometheus watches" in call("metrics", "up", "--deployment", "one").err


def check_pages_and_export(folder: Path) -> None:
    assert "penstock_replicas_ready" in call("metrics").out
    assert 'replica="0"' in call("metrics", "--engines").out
    assert call("metrics", "--export", folder).code == 0
    assert (folder / "grafana" / "operations.json").exists() and (folder / "google" / "operations.json").exists()
    key = folder / "scrape-key"
    assert key.stat().st_mode & 0o077 == 0 and "prometheus.yml" in (folder / "README.md").read_text()
