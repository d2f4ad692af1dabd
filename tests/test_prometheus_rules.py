"""The alerts on made series, by promtool: each fires when it should, and none on a deployment that is well."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.observe import prometheus, rules
from penstock.spec import reading

pytestmark = pytest.mark.processes

DEPLOYMENT = reading.from_mapping(
    {"model": "penstock-demo", "name": "demo", "workload": {"ttft_ms": 2000, "tpot_ms": 50}}
)
SERIES = yaml.safe_load((Path(__file__).parent / "golden" / "prometheus_series.yaml").read_text("utf-8"))
ILL, WELL = (SERIES["steady"] | SERIES[name] for name in ("ill", "well"))
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'


def promtool(*words: object) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def case(series: Mapping[str, str], firing: set[str]) -> dict[str, Any]:
    fired = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    return {
        "interval": "15s",
        "input_series": [{"series": _of_demo(name), "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": FIRING, "eval_time": "20m", "exp_samples": fired}],
    }


def _of_demo(series: str) -> str:
    comma = "" if "{}" in series else ","
    return series if "deployment=" in series else series.replace("{", f'{{deployment="demo"{comma}', 1)


def test_promtool_accepts_configuration_and_rules(tmp_path: Path) -> None:
    for name, text in {
        prometheus.CONFIG: prometheus.config(DEPLOYMENT, tmp_path, prometheus.Source("https", None, False)),
        prometheus.RULES: rules.to_yaml(rules.groups(DEPLOYMENT)),
        prometheus.TARGETS: prometheus.targets(DEPLOYMENT, ["127.0.0.1:1"]),
        prometheus.DCGM_TARGETS: prometheus.dcgm_targets(DEPLOYMENT, ()),
        prometheus.SCRAPE_KEY: "key",
    }.items():
        (tmp_path / name).write_text(text, "utf-8")
    promtool("check", "config", tmp_path / prometheus.CONFIG)
    promtool("check", "rules", "--lint=all", "--lint-fatal", tmp_path / prometheus.RULES)


def test_each_alert_fires_when_it_should_and_none_on_what_is_well(tmp_path: Path) -> None:
    made = rules.groups(DEPLOYMENT)
    (tmp_path / "rules.yml").write_text(rules.to_yaml(made), "utf-8")
    every = {rule.alert or "" for rule in rules.alerts(made)}
    cases = {
        "rule_files": [str(tmp_path / "rules.yml")],
        "evaluation_interval": "15s",
        "tests": [case(ILL, every), case(WELL, set()), case(SERIES["quiet"], set())],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases), "utf-8")
    promtool("test", "rules", tmp_path / "cases.yml")
