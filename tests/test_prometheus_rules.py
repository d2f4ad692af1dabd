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
# Series -> their samples, one each 15 s (https://prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules/).
# In `{...}` deployment="demo" is added.
STEADY = {
    'penstock_requests_total{model="m",outcome="complete"}': "0+100x120",
    'up{job="penstock",instance="g:1"}': "1x120",
    'penstock_replicas_ready{model="m"}': "2x120",
}
ILL = STEADY | {
    'penstock_requests_total{model="m",outcome="broken"}': "0+4x120",
    'penstock_time_to_first_token_seconds_count{model="m",replica="0"}': "0+100x120",
    'penstock_time_to_first_token_seconds_bucket{model="m",replica="0",le="2.0"}': "0+80x120",
    'penstock_time_per_output_token_seconds_count{model="m",replica="0"}': "0+100x120",
    'penstock_time_per_output_token_seconds_bucket{model="m",replica="0",le="0.05"}': "0+80x120",
    'penstock_requests_waiting{model="m"}': "30x120",
    'penstock_requests_waiting{model="other"}': "3x120",
    'penstock_replicas_ready{model="other"}': "0x120",
    'penstock_replica_restarts_total{replica="0"}': "0x40 1x80",
    'penstock_replica_start_seconds{replica="0",stage="weights"}': "1700x120",
    'penstock_replica_start_seconds{replica="0",stage="graphs"}': "200x120",
    'vllm:num_requests_waiting{replica="0",engine="0"}': "4x120",
    'vllm:num_requests_running{replica="0",engine="0"}': "4x120",
    'vllm:iteration_tokens_total_count{replica="0",engine="0"}': "7x120",
    'vllm:kv_cache_usage_perc{replica="0",engine="0"}': "0.97x120",
    'vllm:num_preemptions_total{replica="0",engine="0"}': "0+30x120",
    'penstock_node_disk_free_bytes{node="a"}': "5x120",
    'penstock_node_disk_total_bytes{node="a"}': "100x120",
    'penstock_gpu_xid_errors_total{replica="0",node="a",gpu="0",uuid="u"}': "0x40 1x80",
    'penstock_gpu_throttled{replica="0",node="a",gpu="0",uuid="u",reason="hw_thermal_slowdown"}': "1x120",
    "penstock_store_up{}": "0x120",
    "penstock_store_keys_age_seconds{}": "0+15x120",
    "penstock_ledger_rows_lost_total{}": "0+1x120",
    'up{job="engines",instance="g:1"}': "0x120",
    "penstock_controller_age_seconds{}": "0+15x120",
}
WELL = STEADY | {
    'penstock_requests_total{model="m",outcome="broken"}': "0+0.04x120",  # 0.04%
    'penstock_requests_total{model="m",outcome="client_gone"}': "0+50x120",
    'penstock_time_to_first_token_seconds_count{model="m",replica="0"}': "0+100x120",
    'penstock_time_to_first_token_seconds_bucket{model="m",replica="0",le="2"}': "0+99.5x120",
    'penstock_requests_waiting{model="m"}': "3x120",
    'penstock_replica_restarts_total{replica="0"}': "7x120",
    'penstock_replica_start_seconds{replica="0",stage="weights"}': "300x120",
    'vllm:num_requests_waiting{replica="0",engine="0"}': "0x120",
    'vllm:num_requests_running{replica="0",engine="0"}': "4x120",
    'vllm:iteration_tokens_total_count{replica="0",engine="0"}': "0+9x120",
    'vllm:kv_cache_usage_perc{replica="0",engine="0"}': "0.99x120",  # a full cache alone is no problem
    'vllm:num_preemptions_total{replica="0",engine="0"}': "3x120",
    # Idle, and then a request: running, and no step yet.
    'vllm:num_requests_running{replica="1",engine="0"}': "0x79 1x40",
    'vllm:iteration_tokens_total_count{replica="1",engine="0"}': "5x120",
    'penstock_node_disk_free_bytes{node="a"}': "50x120",
    'penstock_node_disk_total_bytes{node="a"}': "100x120",
    'penstock_gpu_throttled{replica="0",node="a",gpu="0",uuid="u",reason="sw_power_cap"}': "1x120",
    'penstock_gpu_xid_errors_total{replica="0",node="a",gpu="0",uuid="u"}': "2x120",
    "penstock_store_up{}": "1x120",
    "penstock_store_keys_age_seconds{}": "0.5x120",
    "penstock_ledger_rows_lost_total{}": "0x120",
    'up{job="dcgm",instance="a:9400"}': "0x120",
    "penstock_controller_age_seconds{}": "4x120",
}
# One failure in a quiet night, and another deployment of the same Prometheus that fails.
QUIET = {
    'penstock_requests_total{model="m",outcome="complete"}': "0x60 1x60",
    'penstock_requests_total{model="m",outcome="broken"}': "0x60 1x60",
    'penstock_requests_total{model="m",outcome="broken",deployment="other"}': "0+10x120",
    'up{job="penstock",deployment="other"}': "0x120",
}
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
        "tests": [case(ILL, every), case(WELL, set()), case(QUIET, set())],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases), "utf-8")
    promtool("test", "rules", tmp_path / "cases.yml")
