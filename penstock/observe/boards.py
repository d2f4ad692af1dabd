"""The four boards: operations, instances, users' status, capacity and cost. Pure.

GPU panels fall back on a DCGM exporter where nodes read no GPU themselves.
"""

from __future__ import annotations

from penstock.engines.vllm import names as vllm
from penstock.observe.panels import (
    PLAIN,
    RANGE,
    RATE,
    Board,
    Panel,
    Query,
    Thresholds,
    Unit,
    attained,
    high,
    low,
    mean,
    once,
    quantile,
    quantiles,
    rate,
)

# Outcomes that no client caused.
_FAILED = '{outcome=~"broken|no_replica|late|queue_full"}'
_TTFT = "penstock_time_to_first_token_seconds"
_TPOT = "penstock_time_per_output_token_seconds"
_RUNNING = f"({vllm.RUNNING} or llamacpp:requests_processing)"
_QUEUED = f"({vllm.WAITING} or llamacpp:requests_deferred)"
_KV = vllm.KV_USE
_PREEMPTIONS = vllm.SERIES["preemptions"]


def _tokens(by: str = "") -> tuple[str, str]:
    """Tokens per second into engines and out of them."""
    group = f" by ({by})" if by else ""
    pairs = (
        (vllm.SERIES["prompt_tokens"], "llamacpp:prompt_tokens_total"),
        (vllm.SERIES["generation_tokens"], "llamacpp:tokens_predicted_total"),
    )
    in_, out = (f"sum{group} (rate({one}[{RATE}]) or rate({other}[{RATE}]))" for one, other in pairs)
    return in_, out


def _hits(by: str = "") -> str:
    return f"{rate(vllm.SERIES['prefix_hits'], by)} / ({rate(vllm.SERIES['prefix_queries'], by)} > 0)"


def _share_failed() -> str:
    """0, not nothing, where requests ended and none failed: then no series of failures exists."""
    all_requests = f"({rate('penstock_requests_total')} > 0)"
    return f"{rate(f'penstock_requests_total{_FAILED}')} / {all_requests} or 0 * {all_requests}"


_IN, _OUT = _tokens()
_READY, _DESIRED = (f"sum({once(f'penstock_replicas_{word}')})" for word in ("ready", "desired"))
_GPU_USE = f"avg({once('penstock_gpu_utilization_ratio')}) or avg(DCGM_FI_DEV_GPU_UTIL) / 100"
_POWER = f"sum({once('penstock_gpu_power_watts')}) or sum(DCGM_FI_DEV_POWER_USAGE)"
# The exporter counts millijoules.
_ENERGY = (
    f"({rate('penstock_gpu_energy_joules_total')} or sum(rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[{RATE}])) / 1000)"
)


def _stat(
    title: str, about: str, unit: Unit, expr: str, thresholds: Thresholds = PLAIN, width: int = 3, legend: str = ""
) -> Panel:
    return Panel(title, about, unit, "stat", (Query(expr, legend),), thresholds, width)


_TILES = (
    _stat(
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
        (Query(_READY, "ready"), Query(_DESIRED, "desired")),
        ((None, "red"), (0.5, "green")),
        3,
    ),
    _stat(
        "Targets down",
        "Gateways, engines and exporters that cannot be read: their series are missing, not zero.",
        "",
        "(count(up == 0) or vector(0)) + (count(penstock_engine_scrape_up == 0) or vector(0))",
        ((None, "green"), (1, "red")),
    ),
    _stat(
        "Failed",
        "Share of requests that broke, found no replica, waited too long or met a full queue. A client that left or"
        " asked for what is refused is not counted.",
        "share",
        _share_failed(),
        high(0.001, 0.01),
    ),
    _stat(
        "TTFT kept",
        "Share of streams whose first token came within workload.ttft_ms.",
        "share",
        attained("ttft", _TTFT),
        low(0.9, 0.99),
    ),
    _stat(
        "Token time kept",
        "Share of streams whose time per output token was within workload.tpot_ms.",
        "share",
        attained("tpot", _TPOT),
        low(0.9, 0.99),
    ),
    _stat("TTFT p95", "Time to the first token of streams, 95th percentile.", "s", quantile(0.95, _TTFT), high(1, 3)),
    _stat(
        "Token time p95",
        "Time per output token of streams after the first, 95th percentile.",
        "s",
        quantile(0.95, _TPOT),
        high(0.05, 0.1),
    ),
    _stat("Requests", "Requests ended per second, with any outcome.", "requests/s", rate("penstock_requests_total")),
    _stat("Output", "Tokens per second out of all engines.", "tokens/s", _OUT),
    _stat("In flight", "Requests on replicas now.", "", "sum(penstock_requests_in_flight)"),
    _stat(
        "Waiting",
        "Requests that wait in the gateway for a replica, and in engines for room in a batch.",
        "",
        f"sum(penstock_requests_waiting) + (sum{_QUEUED} or vector(0))",
        high(10, 50),
    ),
    _stat(
        "KV cache",
        "The fullest replica's KV cache. High use alone is healthy; with preemptions or waiting it is too small.",
        "share",
        f"max({_KV})",
        high(0.9, 0.98),
    ),
    _stat(
        "Preemptions",
        "Requests per second that lost their KV cache and are computed again.",
        "1/s",
        rate(_PREEMPTIONS),
        high(0.1, 1),
    ),
    _stat("Cache hits", "Share of prompt tokens that were in the prefix cache.", "share", _hits()),
    _stat("GPU use", "Mean share of time in which a kernel ran. One request already makes it high.", "share", _GPU_USE),
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
        "Tokens", "Tokens per second through the engines.", "tokens/s", "graph", (Query(_IN, "in"), Query(_OUT, "out"))
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
        quantiles(_TTFT),
    ),
    Panel("Time per output token", "Of streams, after the first token.", "s", "graph", quantiles(_TPOT)),
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
    Panel(
        "Phases in the engine",
        "Mean seconds of a request in the engine's queue, in prefill and in decode.",
        "s",
        "stack",
        tuple(
            Query(mean(f"{vllm.PREFIX}request_{phase}_time_seconds"), phase) for phase in ("queue", "prefill", "decode")
        ),
    ),
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
            Query(f"sum{_RUNNING}", "running"),
            Query(f"sum{_QUEUED}", "waiting in engines"),
            Query("sum(penstock_requests_waiting)", "waiting in the gateway"),
        ),
    ),
    Panel(
        "KV cache",
        "Use of the fullest, the mean and the emptiest replica. Far apart: requests are not spread evenly.",
        "share",
        "graph",
        (Query(f"max({_KV})", "fullest"), Query(f"avg({_KV})", "mean"), Query(f"min({_KV})", "emptiest")),
        high(0.9, 0.98),
    ),
    Panel(
        "Replicas by state",
        "How many are in each state, and how many are asked for.",
        "",
        "graph",
        (Query(f"sum by (state) ({once('penstock_replicas')})", "{{state}}"), Query(_DESIRED, "desired")),
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
            Query(rate(_PREEMPTIONS), "preemptions"),
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
    Panel("GPU use", "Mean share of time in which a kernel ran.", "share", "graph", (Query(_GPU_USE, "mean"),)),
    Panel("GPU power", "Of all GPUs.", "W", "graph", (Query(_POWER, "power"),)),
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

_BY_REPLICA = "deployment, replica"


def _by_replica(title: str, about: str, unit: Unit, expr: str, thresholds: Thresholds = ()) -> Panel:
    return Panel(title, about, unit, "graph", (Query(expr, "{{deployment}} {{replica}}"),), thresholds)


def _by_gpu(title: str, about: str, unit: Unit, ours: str, exporters: str) -> Panel:
    """`exporters`: what a DCGM exporter has for it; its hosts and GPUs have other labels."""
    legend = "{{node}}{{Hostname}} {{gpu}}"
    return Panel(title, about, unit, "graph", (Query(f"{once(ours)} or max by (Hostname, gpu) ({exporters})", legend),))


def _by_node(title: str, about: str, unit: Unit, *queries: tuple[str, str]) -> Panel:
    return Panel(title, about, unit, "graph", tuple(Query(expr, f"{{{{node}}}} {word}") for expr, word in queries))


def _used(thing: str) -> str:
    return f"{once(f'penstock_node_{thing}_used_bytes')} / {once(f'penstock_node_{thing}_total_bytes')}"


_ROWS = Panel(
    "Replicas",
    "One line for each replica; a click on its name shows it alone.",
    "",
    "table",
    (
        Query("sum by (deployment, replica) (penstock_requests_in_flight)", "in flight"),
        Query(f"sum by (deployment, replica) {_QUEUED}", "waiting"),
        Query(f"max by (deployment, replica) ({_KV})", "KV cache", "share"),
        Query(quantile(0.95, _TTFT, _BY_REPLICA), "TTFT p95", "s"),
        Query(quantile(0.95, _TPOT, _BY_REPLICA), "token time p95", "s"),
        Query(_tokens(_BY_REPLICA)[1], "output", "tokens/s"),
        Query(_hits(_BY_REPLICA), "cache hits", "share"),
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
    _by_replica("Output", "Tokens per second out of each engine.", "tokens/s", _tokens(_BY_REPLICA)[1]),
    _by_replica(
        "Time to first token, p95", "A replica far above the others is slow or has a queue.", "s",
        quantile(0.95, _TTFT, _BY_REPLICA),
    ),
    _by_replica(
        "Time per output token, p95", "A replica far above the others shares its GPU or throttles.", "s",
        quantile(0.95, _TPOT, _BY_REPLICA),
    ),
    _by_replica(
        "Failures", "Responses with a code of 500 or above, per second.", "1/s",
        rate('penstock_responses_total{code=~"5.."}', _BY_REPLICA),
    ),
)  # fmt: skip

_ENGINE = (
    _by_replica("KV cache", "Use of each KV cache.", "share", f"max by (deployment, replica) ({_KV})", high(0.9, 0.98)),
    _by_replica("Waiting", "Requests in each engine's queue.", "", f"sum by (deployment, replica) {_QUEUED}"),
    _by_replica("Cache hits", "Share of prompt tokens in each prefix cache.", "share", _hits(_BY_REPLICA)),
    _by_replica(
        "Preemptions", "Requests per second that are computed again.", "1/s",
        rate(_PREEMPTIONS, _BY_REPLICA),
    ),
    _LATENCY[4],
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
    _by_node("Memory", "Share that a new process cannot get.", "share", (_used("memory"), "")),
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

_UP = f"clamp_max({_READY}, 1)"
_PER_MINUTE = f"60 * {rate('penstock_requests_total')}"
_SUCCESS = f"1 - ({_share_failed()})"
_SPEED = f"1 / ({mean(_TPOT)} > 0)"

_NOW = (
    _stat("Service", "Up when a replica takes requests.", "up", _UP, ((None, "red"), (1, "green")), 4),
    _stat(
        "Available", "Share of the shown time in which a replica took requests.", "share",
        f"avg_over_time(({_READY} > bool 0)[{RANGE}:1m])", low(0.99, 0.999), 4,
    ),
    _stat("First token", "Median time to the first token.", "s", quantile(0.5, _TTFT), high(1, 3), 4),
    _stat("Speed", "Tokens per second of one answer.", "tokens/s", _SPEED, low(10, 20), 4),
    _stat("Success", "Requests that did not fail.", "share", _SUCCESS, low(0.95, 0.99), 4),
    _stat("Requests", "Requests per minute.", "requests/min", _PER_MINUTE, PLAIN, 4),
)  # fmt: skip

_HISTORY = (
    Panel("First token", "Median and 95th percentile.", "s", "graph", quantiles(_TTFT)[:2], high(1, 3), 12),
    Panel("Speed", "Tokens per second of one answer.", "tokens/s", "graph", (Query(_SPEED, "mean"),), width=12),
    Panel("Requests", "Per minute.", "requests/min", "graph", (Query(_PER_MINUTE, "requests"),), width=12),
    Panel(
        "Success", "Share of requests that did not fail.", "share", "graph", (Query(_SUCCESS, "success"),),
        low(0.95, 0.99), 12,
    ),
)  # fmt: skip

STATUS = Board(
    "status",
    "penstock: service status",
    "For users: does it answer, and how fast.",
    (("Now", _NOW), ("History", _HISTORY)),
)

_JOULES = f"{_ENERGY} / ({_OUT} > 0)"

_COST = (
    _stat("Energy per token", "GPUs' energy per output token, prompts included.", "J", _JOULES, width=4),
    _stat("Power", "That all GPUs draw.", "W", _POWER, width=4),
    Panel("Energy per token", "Joules per output token.", "J", "graph", (Query(_JOULES, "energy"),)),
)

_USE = (
    Panel(
        "Tokens by model", "Tokens per second in the ledger; cached ones are prompt tokens too.", "tokens/s", "stack",
        (Query(rate("penstock_tokens_total", "model, kind"), "{{model}} {{kind}}"),), (), 12,
    ),
)  # fmt: skip

_HEADROOM = (
    Panel(
        "Free KV cache", "Of the fullest replica, now and its least in an hour. None left: requests wait.",
        "share", "graph",
        (
            Query(f"1 - max({_KV})", "now"),
            Query(f"1 - max(max_over_time({_KV}[1h]))", "least in an hour"),
        ),
    ),
    Panel(
        "Requests per replica", "Running and waiting, by ready replica: what decides about another one.", "", "graph",
        (
            Query(f"sum{_RUNNING} / ({_READY} > 0)", "running"),
            Query(f"(sum{_QUEUED} + sum(penstock_requests_waiting)) / ({_READY} > 0)", "waiting"),
        ),
        high(10, 50),
    ),
    Panel(
        "Free GPU memory", "Of all GPUs; engines take what they are given at their start.", "bytes", "graph",
        (
            Query(
                f"sum({once('penstock_gpu_memory_total_bytes')}) - sum({once('penstock_gpu_memory_used_bytes')})"
                " or sum(DCGM_FI_DEV_FB_FREE) * 2 ^ 20",
                "free",
            ),
        ),
    ),
)  # fmt: skip

CAPACITY = Board(
    "capacity",
    "penstock: capacity and cost",
    "What it costs, who uses it, and how much room is left.",
    (("Cost", _COST), ("Use", _USE), ("Headroom", _HEADROOM)),
)

BOARDS = (OPERATIONS, INSTANCES, STATUS, CAPACITY)
