"""Is it healthy, and if not, where to look. Pure."""

from __future__ import annotations

from penstock.observe.boards.expressions import (
    DESIRED,
    GPU_USE,
    KV,
    PHASES,
    POWER,
    PREEMPTIONS,
    QUEUED,
    READY,
    RUNNING,
    TOKENS_IN,
    TOKENS_OUT,
    TPOT,
    TTFT,
    hits,
    share_failed,
    stat,
)
from penstock.observe.panels import Board, Panel, Query, attained, high, low, once, quantile, quantiles, rate

_TILES = (
    stat(
        "Firing alerts",
        "Alerts of penstock's rules that fire now; Prometheus's page Alerts names them.",
        "",
        'sum(ALERTS{alertstate="firing"}) or vector(0)',
        ((None, "green"), (1, "red")),
    ),
    Panel(
        "Replicas",
        "Replicas that get traffic, and how many are asked for. Red: none gets traffic.",
        "",
        "stat",
        (Query(READY, "ready"), Query(DESIRED, "desired")),
        ((None, "red"), (0.5, "green")),
        3,
    ),
    stat(
        "Targets down",
        "Gateways, engines and exporters that cannot be read: their series are missing, not zero.",
        "",
        "(count(up == 0) or vector(0)) + (count(penstock_engine_scrape_up == 0) or vector(0))",
        ((None, "green"), (1, "red")),
    ),
    stat(
        "Failed",
        "Share of requests that broke, found no replica, waited too long or met a full queue. A client that left or"
        " asked for what is refused is not counted.",
        "share",
        share_failed(),
        high(0.001, 0.01),
    ),
    stat(
        "TTFT kept",
        "Share of streams whose first token came within workload.ttft_ms.",
        "share",
        attained("ttft", TTFT),
        low(0.9, 0.99),
    ),
    stat(
        "Token time kept",
        "Share of streams whose time per output token was within workload.tpot_ms.",
        "share",
        attained("tpot", TPOT),
        low(0.9, 0.99),
    ),
    stat("TTFT p95", "Time to the first token of streams, 95th percentile.", "s", quantile(0.95, TTFT), high(1, 3)),
    stat(
        "Token time p95",
        "Time per output token of streams after the first, 95th percentile.",
        "s",
        quantile(0.95, TPOT),
        high(0.05, 0.1),
    ),
    stat("Requests", "Requests ended per second, with any outcome.", "requests/s", rate("penstock_requests_total")),
    stat("Output", "Tokens per second out of all engines.", "tokens/s", TOKENS_OUT),
    stat("In flight", "Requests on replicas now.", "", "sum(penstock_requests_in_flight)"),
    stat(
        "Waiting",
        "Requests that wait in the gateway for a replica, and in engines for room in a batch.",
        "",
        f"sum(penstock_requests_waiting) + (sum{QUEUED} or vector(0))",
        high(10, 50),
    ),
    stat(
        "KV cache",
        "The fullest replica's KV cache. High use alone is healthy; with preemptions or waiting it is too small.",
        "share",
        f"max({KV})",
        high(0.9, 0.98),
    ),
    stat(
        "Preemptions",
        "Requests per second that lost their KV cache and are computed again.",
        "1/s",
        rate(PREEMPTIONS),
        high(0.1, 1),
    ),
    stat("Cache hits", "Share of prompt tokens that were in the prefix cache.", "share", hits()),
    stat("GPU use", "Mean share of time in which a kernel ran. One request already makes it high.", "share", GPU_USE),
)

_TRAFFIC = (
    Panel(
        "Requests by outcome",
        "Requests ended per second. broken, no_replica, late and queue_full are failures.",
        "requests/s",
        "stack",
        (Query(rate("penstock_requests_total", "outcome"), "{{outcome}}"),),
    ),
    Panel(
        "Tokens",
        "Tokens per second through the engines.",
        "tokens/s",
        "graph",
        (Query(TOKENS_IN, "in"), Query(TOKENS_OUT, "out")),
    ),
    Panel(
        "Responses by code",
        "Responses begun per second: 5xx is the engine's or the gateway's fault, 4xx the client's.",
        "requests/s",
        "stack",
        (Query(rate("penstock_responses_total", "code"), "{{code}}"),),
    ),
)

_LATENCY = (
    Panel(
        "Time to first token",
        "Of streams, from the request to the engine's first byte.",
        "s",
        "graph",
        quantiles(TTFT),
    ),
    Panel("Time per output token", "Of streams, after the first token.", "s", "graph", quantiles(TPOT)),
    Panel(
        "Whole request",
        "From a request to the end of its answer; long answers take long.",
        "s",
        "graph",
        quantiles("penstock_request_seconds"),
    ),
    Panel(
        "Wait for a replica",
        "Of requests that the gateway held because no replica had room.",
        "s",
        "graph",
        quantiles("penstock_request_hold_seconds"),
    ),
    PHASES,
    Panel(
        "Gateway's time",
        "In the gateway before an engine had the request, without waiting for a replica.",
        "s",
        "graph",
        quantiles("penstock_gateway_own_seconds"),
    ),
)

_SATURATION = (
    Panel(
        "Running and waiting",
        "Requests in engines' batches, in engines' queues, and held in the gateway.",
        "",
        "stack",
        (
            Query(f"sum{RUNNING}", "running"),
            Query(f"sum{QUEUED}", "waiting in engines"),
            Query("sum(penstock_requests_waiting)", "waiting in the gateway"),
        ),
    ),
    Panel(
        "KV cache",
        "Use of the fullest, the mean and the emptiest replica. Far apart: requests are not spread evenly.",
        "share",
        "graph",
        (Query(f"max({KV})", "fullest"), Query(f"avg({KV})", "mean"), Query(f"min({KV})", "emptiest")),
        high(0.9, 0.98),
    ),
    Panel(
        "Replicas by state",
        "How many are in each state, and how many are asked for.",
        "",
        "graph",
        (Query(f"sum by (state) ({once('penstock_replicas')})", "{{state}}"), Query(DESIRED, "desired")),
    ),
    Panel(
        "Trouble",
        "Per second: requests sent again, replicas left out after failures, connections refused, requests preempted.",
        "1/s",
        "graph",
        (
            Query(rate("penstock_retries_total"), "retries"),
            Query(rate("penstock_ejections_total"), "replicas left out"),
            Query(rate("penstock_connect_failures_total"), "connections refused"),
            Query(rate(PREEMPTIONS), "preemptions"),
        ),
    ),
    Panel(
        "Firing alerts",
        "By name; what each asks for is in penstock's how-to page about Prometheus.",
        "",
        "stack",
        (Query('sum by (alertname, severity) (ALERTS{alertstate="firing"})', "{{alertname}} {{severity}}"),),
    ),
    Panel(
        "Controller's last report",
        "It reports every 5 s; while it is silent nothing is restarted or scaled.",
        "s",
        "graph",
        (Query(f"max({once('penstock_controller_age_seconds')})", "age"),),
        high(30, 120),
    ),
)

_HARDWARE = (
    Panel("GPU use", "Mean share of time in which a kernel ran.", "share", "graph", (Query(GPU_USE, "mean"),)),
    Panel("GPU power", "Of all GPUs.", "W", "graph", (Query(POWER, "power"),)),
    Panel(
        "Fullest machine",
        "The highest use among the machines; the board of instances has each.",
        "share",
        "graph",
        (
            Query("max(penstock_node_cpu_utilization_ratio)", "CPU"),
            Query("max(penstock_node_memory_used_bytes / penstock_node_memory_total_bytes)", "memory"),
            Query("1 - min(penstock_node_disk_free_bytes / penstock_node_disk_total_bytes)", "disk"),
        ),
        high(0.9, 0.98),
    ),
)

OPERATIONS = Board(
    "operations",
    "penstock: operations",
    "Is it healthy, and if not, where to look.",
    (
        ("Now", _TILES),
        ("Traffic", _TRAFFIC),
        ("Latency", _LATENCY),
        ("Saturation", _SATURATION),
        ("Machines", _HARDWARE),
    ),
)
