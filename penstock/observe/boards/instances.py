"""One replica against the others, and what it runs on. Pure."""

from __future__ import annotations

from penstock.engines.vllm import names as vllm
from penstock.observe.boards.expressions import KV, PHASES, PREEMPTIONS, QUEUED, TPOT, TTFT, hits, tokens
from penstock.observe.panels import Board, Panel, Query, Thresholds, Unit, high, mean, once, quantile, rate

_BY_REPLICA = "deployment, replica"


def _by_replica(title: str, about: str, unit: Unit, expr: str, thresholds: Thresholds = ()) -> Panel:
    return Panel(title, about, unit, "graph", (Query(expr, "{{deployment}} {{replica}}"),), thresholds)


def _by_gpu(title: str, about: str, unit: Unit, ours: str, exporters: str) -> Panel:
    """`exporters`: what a DCGM exporter has for it; its hosts and GPUs have other labels."""
    legend = "{{node}}{{Hostname}} {{gpu}}"
    return Panel(title, about, unit, "graph", (Query(f"{once(ours)} or max by (Hostname, gpu) ({exporters})", legend),))


def _by_node(title: str, about: str, unit: Unit, *queries: tuple[str, str]) -> Panel:
    return Panel(title, about, unit, "graph", tuple(Query(expr, f"{{{{node}}}} {word}") for expr, word in queries))


_MEMORY_USED = f"{once('penstock_node_memory_used_bytes')} / {once('penstock_node_memory_total_bytes')}"


_ROWS = Panel(
    "Replicas",
    "One line for each replica; a click on its name shows it alone.",
    "",
    "table",
    (
        Query("sum by (deployment, replica) (penstock_requests_in_flight)", "in flight"),
        Query(f"sum by (deployment, replica) {QUEUED}", "waiting"),
        Query(f"max by (deployment, replica) ({KV})", "KV cache", "share"),
        Query(quantile(0.95, TTFT, _BY_REPLICA), "TTFT p95", "s"),
        Query(quantile(0.95, TPOT, _BY_REPLICA), "token time p95", "s"),
        Query(tokens(_BY_REPLICA)[1], "output", "tokens/s"),
        Query(hits(_BY_REPLICA), "cache hits", "share"),
        Query(f"avg by (deployment, replica) ({once('penstock_gpu_utilization_ratio')})", "GPU use", "share"),
        Query(f"sum by (deployment, replica) ({once('penstock_gpu_power_watts')})", "power", "W"),
        Query(once("penstock_replica_restarts_total"), "restarts"),
        Query(f"sum by (deployment, replica) ({once('penstock_replica_start_seconds')})", "last start", "s"),
    ),
    width=24,
)

_BALANCE = (
    _by_replica(
        "Requests", "Responses begun per second.", "requests/s", rate("penstock_responses_total", _BY_REPLICA)
    ),
    _by_replica(
        "In flight", "Requests on each replica.", "", "sum by (deployment, replica) (penstock_requests_in_flight)"
    ),
    _by_replica("Output", "Tokens per second out of each engine.", "tokens/s", tokens(_BY_REPLICA)[1]),
    _by_replica(
        "Time to first token, p95", "A replica far above the others is slow or has a queue.", "s",
        quantile(0.95, TTFT, _BY_REPLICA),
    ),
    _by_replica(
        "Time per output token, p95", "A replica far above the others shares its GPU or throttles.", "s",
        quantile(0.95, TPOT, _BY_REPLICA),
    ),
    _by_replica(
        "Failures", "Responses with a code of 500 or above, per second.", "1/s",
        rate('penstock_responses_total{code=~"5.."}', _BY_REPLICA),
    ),
)  # fmt: skip

_ENGINE = (
    _by_replica("KV cache", "Use of each KV cache.", "share", f"max by (deployment, replica) ({KV})", high(0.9, 0.98)),
    _by_replica("Waiting", "Requests in each engine's queue.", "", f"sum by (deployment, replica) {QUEUED}"),
    _by_replica("Cache hits", "Share of prompt tokens in each prefix cache.", "share", hits(_BY_REPLICA)),
    _by_replica(
        "Preemptions", "Requests per second that are computed again.", "1/s",
        rate(PREEMPTIONS, _BY_REPLICA),
    ),
    PHASES,
    _by_replica(
        "Tokens of a step", "Mean tokens that one step of the engine computes: its batch.", "tokens",
        mean(f"{vllm.PREFIX}iteration_tokens_total", _BY_REPLICA),
    ),
)  # fmt: skip

_GPUS = (
    _by_gpu(
        "GPU use", "Share of time in which a kernel ran.", "share", "penstock_gpu_utilization_ratio",
        "DCGM_FI_DEV_GPU_UTIL / 100",
    ),
    _by_gpu(
        "GPU memory", "In use by any process.", "bytes", "penstock_gpu_memory_used_bytes",
        "DCGM_FI_DEV_FB_USED * 2 ^ 20",
    ),
    _by_gpu("Power", "That each GPU draws.", "W", "penstock_gpu_power_watts", "DCGM_FI_DEV_POWER_USAGE"),
    _by_gpu("Temperature", "Of each GPU.", "°C", "penstock_gpu_temperature_celsius", "DCGM_FI_DEV_GPU_TEMP"),
    Panel(
        "Clocks", "Rate of the streaming multiprocessors. Low under load: look at throttling.", "Hz", "graph",
        (
            Query(
                'max by (deployment, node, gpu) (penstock_gpu_clock_hertz{clock="sm"})'
                " or max by (Hostname, gpu) (DCGM_FI_DEV_SM_CLOCK * 1e6)",
                "{{node}}{{Hostname}} {{gpu}}",
            ),
        ),
    ),
    Panel(
        "Throttling and errors", "Why clocks are lowered now, and errors (XID) that the driver reported.", "", "graph",
        (
            Query(f"max by (node, gpu, reason) ({once('penstock_gpu_throttled')})", "{{node}} {{gpu}} {{reason}}"),
            Query(f"max by (node, gpu) ({once('penstock_gpu_xid_errors_total')})", "{{node}} {{gpu}} errors"),
        ),
    ),
)  # fmt: skip

_NODES = (
    _by_node("CPU", "Share of all CPUs in use.", "share", (once("penstock_node_cpu_utilization_ratio"), "")),
    _by_node("Memory", "Share that a new process cannot get.", "share", (_MEMORY_USED, "")),
    _by_node(
        "Free disk", "Share of the file system with the node's folder. Below a tenth there is an alert.", "share",
        (f"{once('penstock_node_disk_free_bytes')} / {once('penstock_node_disk_total_bytes')}", ""),
    ),
    _by_node(
        "Network", "Bytes per second, without loopback.", "bytes/s",
        (rate("penstock_node_network_received_bytes_total", "node"), "in"),
        (rate("penstock_node_network_sent_bytes_total", "node"), "out"),
    ),
    Panel(
        "Last start", "Seconds of each stage of the last start.", "s", "stack",
        (Query(once("penstock_replica_start_seconds"), "{{deployment}} {{replica}} {{stage}}"),),
    ),
    _by_replica("Restarts", "Times that each engine was started again.", "", once("penstock_replica_restarts_total")),
)  # fmt: skip

INSTANCES = Board(
    "instances",
    "penstock: instances",
    "One replica against the others, and what it runs on.",
    (("Replicas", (_ROWS,)), ("Balance", _BALANCE), ("Engines", _ENGINE), ("GPUs", _GPUS), ("Machines", _NODES)),
)
