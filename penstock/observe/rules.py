"""Recording rules and alerts of one deployment, for Prometheus and the operators that run it. Pure.

Errors and promised latencies alert by burn rate: how many times faster than allowed the error budget is used, over a
long window, and over a short one so that an alert ends soon after its cause. Factors and windows:
https://sre.google/workbook/alerting-on-slos/. Every name in an expression is one of `promql.unknown_names`' tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.engines.vllm import names as vllm
from penstock.observe.promql import names_in, unknown_names
from penstock.spec.deployment import Deployment
from penstock.text import show_seconds

Severity = Literal["page", "ticket", "warn"]

GUIDE = "https://github.com/penstock/penstock/blob/main/docs/how-to/prometheus.md"
AVAILABILITY, IN_TIME = 0.999, 0.99
BAD = ("broken", "no_replica", "late", "queue_full")  # of the gateway's outcomes; a client that left is not one
_MIN_RATE = 0.02  # requests per second: one failure in a quiet night is not a trend
# What makes an alert: name, long and short window, factor of the budget, severity.
_BURNS: tuple[tuple[str, str, str, float, Severity], ...] = (
    ("Fast", "1h", "5m", 14.4, "page"),
    ("Medium", "6h", "30m", 6.0, "page"),
    ("Slow", "3d", "6h", 1.0, "ticket"),
)
_WINDOWS = ("5m", "30m", "1h", "6h", "3d")


class Rule(msgspec.Struct, frozen=True, omit_defaults=True, rename={"for_": "for"}):
    """One rule, in Prometheus's words: https://prometheus.io/docs/prometheus/latest/configuration/recording_rules/"""

    expr: str
    record: str | None = None
    alert: str | None = None
    for_: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Group(msgspec.Struct, frozen=True):
    name: str
    interval: str
    rules: tuple[Rule, ...]


class _Alert(NamedTuple):
    """`topic`: the heading of the guide that says what to do. In `expr` "@" is the deployment's matcher."""

    name: str
    topic: str
    severity: Severity
    for_: str
    expr: str
    summary: str
    description: str


class _Budget(NamedTuple):
    """What a burn rate is of. `subject`: of sentences; `series`: of the recorded ratios of bad requests."""

    name: str
    topic: str
    series: str
    budget: float
    subject: str


def groups(deployment: Deployment) -> tuple[Group, ...]:
    """The rules of a deployment; latencies only where `workload` promises them.

    Raises ValueError for an expression over a name that nobody writes: that is a fault of this file.
    """
    ratios, burns = list[Rule](), list[_Alert]()
    for budget, bad, all_ in _budgets(deployment):
        ratios += _ratios(budget, bad, all_)
        burns += _burns(budget, all_)
    single = [*_serving(deployment), *_engines(), *_machines(), *_parts()]
    made = (
        Group("penstock-ratios", "30s", tuple(_filled(rule, deployment) for rule in ratios)),
        Group("penstock-budgets", "30s", tuple(_filled(_rule(alert), deployment) for alert in burns)),
        Group("penstock-state", "15s", tuple(_filled(_rule(alert), deployment) for alert in single)),
    )
    check(made)
    return made


def plain(rules: tuple[Group, ...]) -> dict[str, Any]:
    """The rule file of Prometheus, which is also the `spec` of a PrometheusRule and of GMP's Rules."""
    return {"groups": msgspec.json.decode(msgspec.json.encode(rules))}


def to_yaml(rules: tuple[Group, ...]) -> str:
    import yaml

    return str(yaml.safe_dump(plain(rules), sort_keys=False, width=10_000))


def check(made: tuple[Group, ...]) -> None:
    recorded = frozenset(rule.record for group in made for rule in group.rules if rule.record is not None)
    unknown = {name for group in made for rule in group.rules for name in unknown_names(rule.expr, recorded)}
    if unknown:
        raise ValueError(f"rules name unknown metrics: {', '.join(sorted(unknown))}")


def _filled(rule: Rule, deployment: Deployment) -> Rule:
    return msgspec.structs.replace(rule, expr=rule.expr.replace("@", f'deployment="{deployment.name}"'))


def _rule(alert: _Alert) -> Rule:
    annotations = {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": f"{GUIDE}#{alert.topic}",
    }
    labels: dict[str, str] = {"severity": alert.severity}
    return Rule(alert.expr, alert=alert.name, for_=alert.for_, labels=labels, annotations=annotations)


# ---- burn rates ------------------------------------------------------------------------------------------------------


def _budgets(deployment: Deployment) -> Iterator[tuple[_Budget, str, str]]:
    """Each budget with the expressions, over the window "%", of its bad requests and of all, per second."""
    bad = "|".join(BAD)
    yield (
        _Budget("PenstockErrors", "errors", "penstock:bad_requests", 1 - AVAILABILITY, "requests fail"),
        f'sum by (deployment) (rate(penstock_requests_total{{@,outcome=~"{bad}"}}[%]))',
        "sum by (deployment) (rate(penstock_requests_total{@}[%]))",
    )
    workload = deployment.workload
    for name, series, promised_ms, what in (
        ("PenstockTtft", "time_to_first_token", workload.ttft_ms, "wait longer for the first token than the promised"),
        ("PenstockTpot", "time_per_output_token", workload.tpot_ms, "take longer for a token than the promised"),
    ):
        if promised_ms is None:
            continue
        family = f"penstock_{series}_seconds"
        all_ = f"sum by (deployment) (rate({family}_count{{@}}[%]))"
        kept = f'sum by (deployment) (rate({family}_bucket{{@,le=~"{_bound(promised_ms)}"}}[%]))'
        subject = f"requests {what} {promised_ms:g} ms"
        yield _Budget(name, "latency", f"penstock:{series}_misses", 1 - IN_TIME, subject), f"({all_} - {kept})", all_


def _bound(promised_ms: float) -> str:
    """A pattern of the bucket bound "0.5" or "2.0", which some versions of Prometheus write as "2"."""
    text = str(promised_ms / 1000)
    return f"{text[:-2]}(\\\\.0)?" if text.endswith(".0") else text.replace(".", "\\\\.")


def _ratios(budget: _Budget, bad: str, all_: str) -> Iterator[Rule]:
    for window in _WINDOWS:
        expr = f"{bad} / ({all_} > 0)".replace("%", window)
        yield Rule(expr, record=f"{budget.series}:ratio_rate{window}")


def _burns(budget: _Budget, all_: str) -> Iterator[_Alert]:
    for word, long, short, factor, severity in _BURNS:
        limit = f"{factor * budget.budget:.6g}"
        expr = (
            f"{budget.series}:ratio_rate{long}{{@}} > {limit}"
            f" and {budget.series}:ratio_rate{short}{{@}} > {limit}"
            f" and {all_.replace('%', long)} > {_MIN_RATE}"
        )
        yield _Alert(
            f"{budget.name}{word}",
            budget.topic,
            severity,
            "1m",
            expr,
            f"{{{{ $value | humanizePercentage }}}} of {budget.subject}",
            f"{{{{ $value | humanizePercentage }}}} of the requests of {{{{ $labels.deployment }}}} in the last {long}"
            f" {budget.subject.removeprefix('requests ')}; {budget.budget:.1%} is the budget, and"
            f" {factor:g} times that, also over {short}, raises this alert.",
        )


# ---- single conditions -----------------------------------------------------------------------------------------------


def _serving(deployment: Deployment) -> Iterator[_Alert]:
    wait_s = max(15.0, deployment.gateway.hold_s / 2)
    yield _Alert(
        "PenstockNoReplica", "no-replica", "page", f"{wait_s:.0f}s",
        "sum by (deployment, model) (penstock_requests_waiting{@}) > 0"
        " and on (deployment, model) max by (deployment, model) (penstock_replicas_ready{@}) == 0",
        "no replica of {{ $labels.model }} serves, and {{ $value }} requests wait",
        f"For {show_seconds(wait_s)} no replica of {{{{ $labels.model }}}} was ready while {{{{ $value }}}} requests"
        f" waited. Each is refused after {show_seconds(deployment.gateway.hold_s)}.",
    )  # fmt: skip
    held = "sum by (deployment) (penstock_requests_waiting{@})"
    yield _Alert(
        "PenstockQueue", "queue", "warn", "5m",
        f"({held} + (sum by (deployment) ({vllm.WAITING}{{@}}) or 0 * {held}))"
        " / (sum by (deployment) (max by (deployment, model) (penstock_replicas_ready{@})) > 0) > 10",
        "{{ $value | humanize }} requests wait for each replica",
        "For 5 minutes more than 10 requests a replica waited in the gateway and in the engines: now"
        " {{ $value | humanize }}. More replicas, or fewer clients, shorten the queue.",
    )  # fmt: skip
    yield _Alert(
        "PenstockReplicaRestarted", "restarts", "warn", "0s",
        "max by (deployment, replica) (increase(penstock_replica_restarts_total{@}[15m])) > 0.5",
        "replica {{ $labels.replica }} was restarted",
        "The engine of replica {{ $labels.replica }} of {{ $labels.deployment }} was started again about"
        " {{ $value | humanize }} times in the last 15 minutes; `penstock status` has the reasons.",
    )  # fmt: skip
    slow_s = deployment.engine.start_timeout_s / 2
    yield _Alert(
        "PenstockSlowStart", "slow-start", "warn", "0s",
        "sum by (deployment, replica) (max by (deployment, replica, stage) (penstock_replica_start_seconds{@}))"
        f" > {slow_s:.6g}",
        "replica {{ $labels.replica }} took {{ $value | humanizeDuration }} to start",
        "Replica {{ $labels.replica }} took {{ $value | humanizeDuration }} to start, more than half of"
        f" engine.start_timeout_s ({show_seconds(2 * slow_s)}), after which a start counts as failed.",
    )  # fmt: skip


def _engines() -> Iterator[_Alert]:
    by_replica = "sum by (deployment, replica)"
    running = f"{by_replica} (min_over_time({vllm.RUNNING}{{@}}[2m]))"
    steps = f"{by_replica} (increase({vllm.ITERATIONS[0]}{{@}}[2m]))"
    preempted = f"{by_replica} (rate({vllm.SERIES['preemptions']}{{@}}[5m]))"
    waiting = f"{by_replica} ({vllm.WAITING}{{@}})"
    yield _Alert(
        "PenstockKvCacheFull", "kv-cache", "warn", "10m",
        f"max by (deployment, replica) ({vllm.KV_USE}{{@}}) > 0.9"
        f" and on (deployment, replica) ({preempted} > 0 or {waiting} > 0)",
        "the KV cache of replica {{ $labels.replica }} is {{ $value | humanizePercentage }} full",
        "For 10 minutes the KV cache of replica {{ $labels.replica }} was more than 90% full while requests waited in"
        " the engine or were preempted: now {{ $value | humanizePercentage }}. A full cache alone is no problem.",
    )  # fmt: skip
    yield _Alert(
        "PenstockPreemptions", "kv-cache", "warn", "5m",
        f"{preempted} > 1",
        "replica {{ $labels.replica }} preempts {{ $value | humanize }} requests a second",
        "For 5 minutes the engine of replica {{ $labels.replica }} preempted more than 1 request a second (now"
        " {{ $value | humanize }}): their KV cache is computed again, which costs time.",
    )  # fmt: skip
    yield _Alert(
        "PenstockEngineStalled", "stalled", "page", "30s",
        f"{running} > 0 and on (deployment, replica) {steps} == 0",
        "replica {{ $labels.replica }} has {{ $value }} requests and makes no token",
        "For 2 minutes the engine of replica {{ $labels.replica }} had requests (now {{ $value }}) and finished no"
        " step. Its health check may still answer.",
    )  # fmt: skip


def _machines() -> Iterator[_Alert]:
    yield _Alert(
        "PenstockDiskFull", "disk", "warn", "5m",
        "penstock_node_disk_free_bytes{@} / (penstock_node_disk_total_bytes{@} > 0) < 0.1",
        "{{ $value | humanizePercentage }} of the disk of {{ $labels.node }} is free",
        "Less than 10% of the file system with the folder of penstock on {{ $labels.node }} is free (now"
        " {{ $value | humanizePercentage }}). Logs, the ledger and Prometheus's own data are written there.",
    )  # fmt: skip
    yield _Alert(
        "PenstockGpuXid", "gpu-errors", "warn", "0s",
        "max by (deployment, replica, node, gpu) (increase(penstock_gpu_xid_errors_total{@}[15m])) > 0.5",
        "GPU {{ $labels.gpu }} of {{ $labels.node }} reports errors",
        "The driver of GPU {{ $labels.gpu }} on {{ $labels.node }} (replica {{ $labels.replica }}) reported about"
        " {{ $value | humanize }} errors (XID) in the last 15 minutes; the kernel's log has their numbers.",
    )  # fmt: skip
    yield _Alert(
        "PenstockGpuThrottled", "throttle", "warn", "10m",
        'max by (deployment, node, gpu, reason) (penstock_gpu_throttled{@,reason=~".*_slowdown"}) > 0',
        "GPU {{ $labels.gpu }} of {{ $labels.node }} runs slower: {{ $labels.reason }}",
        "For 10 minutes the clocks of GPU {{ $labels.gpu }} on {{ $labels.node }} were lowered; NVML's reason is"
        ' "{{ $labels.reason }}".',
    )  # fmt: skip


def _parts() -> Iterator[_Alert]:
    yield _Alert(
        "PenstockStoreDown", "store", "warn", "2m",
        "min by (deployment) (penstock_store_up{@}) == 0",
        "the store of keys and usage does not answer",
        "For 2 minutes the gateway of {{ $labels.deployment }} could not use its store. It serves the keys that it"
        " knows until gateway.keys_stale_s; usage waits in memory, and new keys do not work.",
    )  # fmt: skip
    yield _Alert(
        "PenstockKeysLate", "store", "warn", "0s",
        "max by (deployment) (penstock_store_keys_age_seconds{@}) > 10",
        "client keys were last read {{ $value | humanizeDuration }} ago",
        "A gateway of {{ $labels.deployment }} last read its keys {{ $value | humanizeDuration }} ago, so a revoked key"
        " still works. After gateway.keys_stale_s it refuses them.",
    )  # fmt: skip
    yield _Alert(
        "PenstockUsageLost", "store", "warn", "0s",
        "sum by (deployment) (increase(penstock_ledger_rows_lost_total{@}[15m])) > 0",
        "the usage of {{ $value | humanize }} requests was lost",
        "In the last 15 minutes the usage of about {{ $value | humanize }} requests of {{ $labels.deployment }} was"
        " not written: the ledger's queue was full, or the store refused the rows.",
    )  # fmt: skip
    yield _Alert(
        "PenstockControllerSilent", "controller", "ticket", "1m",
        "min by (deployment) (penstock_controller_age_seconds{@}) > 60",
        "the controller has not reported for {{ $value | humanizeDuration }}",
        "The controller of {{ $labels.deployment }} has not reported for {{ $value | humanizeDuration }}. Requests are"
        " served, but nothing that dies is started again.",
    )  # fmt: skip
    yield _Alert(
        "PenstockTargetDown", "target-down", "page", "2m",
        'up{@,job=~"penstock|engines|.*-gateway"} == 0',
        "{{ $labels.instance }} cannot be scraped",
        "For 2 minutes Prometheus could not read {{ $labels.instance }} ({{ $labels.job }}): the gateway is gone or"
        " hangs, and alerts that need its metrics are silent.",
    )  # fmt: skip


def alerts(made: tuple[Group, ...]) -> list[Rule]:
    return [rule for group in made for rule in group.rules if rule.alert is not None]


def metrics_of(made: tuple[Group, ...]) -> set[str]:
    """All metrics that the rules read."""
    recorded = {rule.record for group in made for rule in group.rules}
    return {name for group in made for rule in group.rules for name in names_in(rule.expr)} - recorded
