"""The names in PromQL: what a rule or a panel may ask for."""

from __future__ import annotations

import pytest

from penstock.observe.promql import names_in, unknown_names, with_matchers


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("up", {"up"}),
        ('sum by (model) (rate(penstock_requests_total{outcome="ok"}[5m]))', {"penstock_requests_total"}),
        ('vllm:kv_cache_usage_perc{a=~"a{2}|sum"} > 0.9 and on (replica) up', {"vllm:kv_cache_usage_perc", "up"}),
        ("histogram_quantile(0.99, sum(rate(a_bucket[$__rate_interval])) by (le))", {"a_bucket"}),
        ('a{job=~"$job", instance=~"${instance:regex}"} * 1e3 > bool 0x1F offset 5m', {"a"}),
        ('{__name__="penstock_node_cpu_ratio", node!=""}', {"penstock_node_cpu_ratio"}),
        ("max_over_time(rate(a[5m])[1h:1m]) / on () group_left (gpu) scalar(b)", {"a", "b"}),
        ('label_replace(a, "x", "$1", "sum(by)", "(.*)")', {"a"}),
        ("sum(a) BY (b) unless absent(c) or -Inf < NaN", {"a", "c"}),
        ("a @ end() - a offset 1h30m", {"a"}),
    ],
)  # fmt: skip
def test_names_of_an_expression(expr: str, names: set[str]) -> None:
    assert names_in(expr) == names


def test_a_name_that_nobody_writes_is_found() -> None:
    known = "penstock_requests_total + penstock_request_seconds_bucket + vllm:num_requests_running + up"
    assert not unknown_names(known)
    assert unknown_names(f"{known} + requests_total + vllm:gpu_cache_usage_perc + penstock_request_seconds") == {
        "requests_total",
        "vllm:gpu_cache_usage_perc",
        "penstock_request_seconds",
    }
    assert not unknown_names("deployment:bad:ratio5m", recorded=frozenset({"deployment:bad:ratio5m"}))


def test_matchers_join_those_that_are_there() -> None:
    expr = 'rate(a{x="1"}[5m]) / b{ } - c + ab unless a:b'
    added = with_matchers(expr, lambda name: [] if name == "c" else [f'of="{name}"', 'd="2"'])
    assert added == (
        'rate(a{of="a", d="2", x="1"}[5m]) / b{of="b", d="2"} - c + ab{of="ab", d="2"} unless a:b{of="a:b", d="2"}'
    )
    assert names_in(added) == names_in(expr)
