"""What Prometheus gets of a deployment: configuration, targets, rules and alerts, as text; names in PromQL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden_files import cases

from penstock.deployment import preflight
from penstock.errors import SpecError
from penstock.observe import prometheus, rules
from penstock.observe.promql import names_in, unknown_names, with_matchers
from penstock.spec import reading
from penstock.spec.deployment import Deployment, Observe
from penstock.wire.announcement import MachineReading

FOLDER = Path("/runs/demo/prometheus")
GUIDE = Path(__file__).parent.parent / "docs" / "how-to" / "prometheus.md"
HOSTILE = 'a"b\n{}\\'


def deployment(**fields: Any) -> Deployment:
    promised = {"ttft_ms": 2000, "tpot_ms": 50.5}
    return reading.from_mapping({"model": "penstock-demo", "name": "demo", "workload": promised, **fields})


def config(source: prometheus.Source = prometheus.Source(), **fields: Any) -> dict[str, Any]:  # noqa: B008
    content: dict[str, Any] = yaml.safe_load(prometheus.config(deployment(**fields), FOLDER, source))
    return content


def alerts(**fields: Any) -> dict[str, rules.Rule]:
    return {rule.alert or "": rule for rule in rules.alerts(rules.groups(deployment(**fields)))}


def test_both_pages_are_scraped_with_the_key_from_a_file_within_limits_and_sent_on() -> None:
    ours, engines, dcgm = config()["scrape_configs"]
    assert [job["metrics_path"] for job in (ours, engines)] == ["/metrics", "/metrics/engines"]
    for job in (ours, engines):
        assert job["authorization"] == {"credentials_file": "/runs/demo/prometheus/scrape-key"}
        assert job["honor_labels"] and job["body_size_limit"] == "64MB" and job["label_value_length_limit"] == 4096
    assert "authorization" not in dcgm, "the exporters of other software get no key"
    assert "remote_write" not in config()
    remote = {"url": "https://metrics.example.org/write", "token_file": "/secrets/token"}
    assert config(observe={"prometheus": True, "remote_write": remote})["remote_write"] == [
        {"url": remote["url"], "authorization": {"credentials_file": "/secrets/token"}}
    ]
    # A gateway with TLS is checked by its certificate or not at all.
    by_file, unchecked = prometheus.Source("https", "/certs/gateway.pem"), prometheus.Source("https", is_checked=False)
    assert config(by_file)["scrape_configs"][0]["tls_config"] == {"ca_file": "/certs/gateway.pem"}
    assert config(unchecked)["scrape_configs"][0]["tls_config"] == {"insecure_skip_verify": True}
    argv = prometheus.argv("prometheus", Observe(retention="3d"), FOLDER, 9090)
    assert "--web.listen-address=127.0.0.1:9090" in argv and "--storage.tsdb.retention.time=3d" in argv
    assert not [word for word in argv if word.startswith("--web.enable")], "it takes no orders"


def test_targets_name_the_deployment_and_exporters_their_node() -> None:
    (row,) = json.loads(prometheus.targets(deployment(), ["10.0.0.2:9", "10.0.0.1:9"]))
    assert row == {"targets": ["10.0.0.1:9", "10.0.0.2:9"], "labels": {"deployment": "demo", "target": "local"}}
    (single,) = json.loads(prometheus.targets(deployment(), ["10.0.0.2:9"]))
    assert single["labels"]["instance"] == "gateway", "its series go on where its port changes"
    machines = [MachineReading("gpu1", dcgm_port=9400), MachineReading("gpu2"), MachineReading("gpu1", dcgm_port=9400)]
    (exporter,) = json.loads(prometheus.dcgm_targets(deployment(), machines))
    assert exporter["targets"] == ["gpu1:9400"] and exporter["labels"]["node"] == "gpu1"
    hostile = prometheus.dcgm_targets(deployment(), [MachineReading(HOSTILE, dcgm_port=1)])
    assert json.loads(hostile)[0]["labels"]["node"] == HOSTILE


def test_every_alert_has_a_severity_plain_words_and_a_place_in_the_guide() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")
        for line in GUIDE.read_text("utf-8").splitlines()
        if line.startswith("#")
    }
    text = GUIDE.read_text("utf-8")
    for name, rule in alerts().items():
        assert rule.labels["severity"] in ("page", "ticket", "warn")
        assert rule.annotations["summary"] and rule.annotations["description"].endswith(".")
        assert rule.annotations["runbook_url"].partition("#")[2] in headings, name
        assert f"`{name}`" in text, f"{name} is not in {GUIDE.name}"


def test_every_selector_is_of_this_deployment_alone() -> None:
    for group in rules.groups(deployment()):
        for rule in group.rules:
            selectors = re.findall(r"\{([^{}]*)\}", rule.expr)
            assert selectors and all('deployment="demo"' in selector for selector in selectors), rule.expr


def test_latencies_alert_only_where_they_are_promised_and_at_their_bound() -> None:
    assert {name for name in alerts() if name.startswith(("PenstockTtft", "PenstockTpot"))} == {
        f"Penstock{of}{word}" for of in ("Ttft", "Tpot") for word in ("Fast", "Medium", "Slow")
    }
    assert not [name for name in alerts(workload={}) if name.startswith(("PenstockTtft", "PenstockTpot"))]
    text = rules.to_yaml(rules.groups(deployment()))
    assert 'le=~"2(\\\\.0)?"' in text, "2 s, as Prometheus 2 and 3 write it"
    assert 'le=~"0\\\\.0505"' in text


@pytest.mark.parametrize(
    ("observe", "field"),
    [
        ({"port": 70000}, "observe.port"),
        ({"retention": "two weeks"}, "observe.retention"),
        ({"retention_size": "1 GB"}, "observe.retention_size"),
        ({"prometheus": True, "remote_write": {"url": "https://user:word@host/"}}, "observe.remote_write.url"),
        ({"remote_write": {"url": "https://host/write"}}, "observe.remote_write"),
        ({"grafana": True}, "observe.grafana"),
        ({"prometheus_binary": "/opt/prometheus"}, "observe.prometheus_binary"),
    ],
)
def test_settings_that_prometheus_would_refuse_are_refused(observe: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        deployment(observe=observe)
    assert field in str(caught.value.detail)


def test_a_program_that_is_named_must_be_there_and_a_token_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    observe = {"prometheus": True, "prometheus_binary": str(tmp_path / "none")}
    remote = {"url": "https://host/write", "token_file": str(token)}
    problems = [*preflight.prometheus_problems(deployment(observe={**observe, "remote_write": remote}).observe)]
    assert [problem.path for problem in problems] == ["observe.prometheus_binary", "observe.remote_write.token_file"]
    assert "can be read by others" in problems[1].message
    monkeypatch.setenv("PATH", str(tmp_path))  # a program that is absent is only a warning
    assert "apt-get install prometheus" in str(preflight.prometheus_warning(Observe(prometheus=True)))
    assert preflight.prometheus_warning(Observe()) is None
    assert [*preflight.prometheus_problems(Observe(prometheus=True))] == []


# ---- names in PromQL: what a rule or a panel may ask for -------------------------------------------------------------


@pytest.mark.parametrize(("expr", "names"), cases("promql_names.txt"))
def test_names_of_an_expression(expr: str, names: str) -> None:
    assert names_in(expr) == set(names.split())


def test_a_name_that_nobody_writes_is_found() -> None:
    known = "penstock_requests_total + penstock_request_seconds_bucket + vllm:num_requests_running + up"
    assert not unknown_names(known)
    assert unknown_names(f"{known} + requests_total + vllm:gpu_cache_usage_perc + penstock_request_seconds") == {
        "requests_total",
        "vllm:gpu_cache_usage_perc",
        "penstock_request_seconds",
    }
    assert not unknown_names("deployment:bad:ratio5m", recorded=frozenset({"deployment:bad:ratio5m"}))
    rule = rules.Rule("vllm:gpu_cache_usage_perc > 1 or penstock:bad_requests:ratio_rate5m > 1", alert="X")
    with pytest.raises(ValueError, match="penstock:bad_requests:ratio_rate5m, vllm:gpu_cache_usage_perc"):
        rules.check((rules.Group("g", "15s", (rule,)),))


def test_matchers_join_those_that_are_there() -> None:
    expr = 'rate(a{x="1"}[5m]) / b{ } - c + ab unless a:b'
    added = with_matchers(expr, lambda name: [] if name == "c" else [f'of="{name}"', 'd="2"'])
    assert added == (
        'rate(a{of="a", d="2", x="1"}[5m]) / b{of="b", d="2"} - c + ab{of="ab", d="2"} unless a:b{of="a:b", d="2"}'
    )
    assert names_in(added) == names_in(expr)
