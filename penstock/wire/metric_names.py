"""The one table of penstock's own metrics: kind, meaning, labels, unit, and how several workers' values make one. Pure.

Gateways write them, dashboards, rules and `penstock metrics --names` read the table: a name that is not in it is an
error. Names follow https://prometheus.io/docs/practices/naming/. Engines' names are in their own packages.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

PREFIX = "penstock_"

Kind = Literal["counter", "gauge", "histogram"]
# Of several workers: the sum, what each of them knows of all (any value does), or the least.
Joined = Literal["sum", "each", "least", "most"]


class Metric(NamedTuple):
    """`unit`: of its values, as Prometheus has it; empty for counts of things."""

    kind: Kind
    about: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    joined: Joined = "sum"


_MODEL = ("model",)
_SERVED = ("model", "replica")
_GPU = ("replica", "node", "gpu", "uuid")
_NODE = ("node",)

# By name, without the prefix.
METRICS: dict[str, Metric] = {
    "requests_total": Metric("counter", "Requests ended, by outcome.", ("model", "outcome")),
    "responses_total": Metric("counter", "Responses begun, by status code.", ("model", "replica", "code")),
    "requests_in_flight": Metric("gauge", "Requests on a replica now.", _SERVED),
    "requests_waiting": Metric("gauge", "Requests held for a replica now.", _MODEL),
    "replicas_ready": Metric("gauge", "Replicas that get traffic now.", _MODEL, joined="each"),
    "retries_total": Metric("counter", "Requests sent to an engine again.", _MODEL),
    "ejections_total": Metric("counter", "Replicas left out after failures.", ("replica",)),
    "connect_failures_total": Metric("counter", "Connections an engine refused."),
    "engine_scrape_up": Metric(
        "gauge", "Whether the engine's page is in /metrics/engines.", ("replica",), joined="each"
    ),
    "engine_scrape_seconds": Metric("gauge", "How long that page took.", ("replica",), "seconds", joined="each"),
    # Keys, quotas and the ledger.
    "unknown_keys_total": Metric("counter", "Requests without a valid key."),
    "quota_refusals_total": Metric("counter", "Requests over a limit of their key.", ("limit",)),
    "tokens_total": Metric(
        "counter", "Tokens in the ledger; cached ones are prompt tokens too.", ("model", "kind"), "tokens"
    ),
    "ledger_requests_total": Metric("counter", "Requests in the ledger, by state.", ("model", "state")),
    "ledger_rows_waiting": Metric("gauge", "Rows that are not on the disk yet."),
    "ledger_rows_lost_total": Metric("counter", "Rows that found the queue full, or can never be stored."),
    "store_failures_total": Metric("counter", "Turns of the store that failed."),
    "store_up": Metric("gauge", "Whether the store's last turn worked.", joined="least"),
    "store_keys_age_seconds": Metric("gauge", "Since the store's keys were last read.", (), "seconds", joined="most"),
    "access_log_lost_total": Metric("counter", "Requests that are missing in the access log."),
    "spans_lost_total": Metric("counter", "Spans that the collector did not take."),
    "key_requests_total": Metric("counter", "Requests in the ledger, by key.", ("key", "model")),
    "key_tokens_total": Metric("counter", "Tokens in the ledger, by key.", ("key", "model", "kind"), "tokens"),
    # Cost.
    "gpu_seconds_total": Metric("counter", "GPU seconds of ready replicas.", _MODEL, "seconds"),
    "gpu_busy_seconds_total": Metric("counter", "Those in which a request ran.", _MODEL, "seconds"),
    "gpu_hour_usd": Metric("gauge", "Price of one GPU for an hour.", (), "usd", joined="each"),
    # Time.
    "gateway_own_seconds": Metric("histogram", "Time in the gateway before an engine had it.", (), "seconds"),
    "time_to_first_byte_seconds": Metric(
        "histogram", "From a request to the first byte of its answer's body.", _SERVED, "seconds"
    ),
    "chunk_gap_seconds": Metric("histogram", "Between two reads of a stream.", _SERVED, "seconds"),
    "request_seconds": Metric("histogram", "From a request to the end of its answer.", _SERVED, "seconds"),
    # What the controller posts, and what the configuration says.
    "replicas_desired": Metric("gauge", "Replicas that were asked for.", joined="each"),
    "desired_replicas": Metric(
        "gauge", "Replicas that each model should have now, at 0 too.", ("deployment", "model"), joined="each"
    ),
    "replicas": Metric("gauge", "Replicas, by state.", ("state",), joined="each"),
    "controller_age_seconds": Metric("gauge", "Since the controller's last report.", (), "seconds", joined="each"),
    "slo_target_seconds": Metric("gauge", "Promised latencies.", ("metric",), "seconds", joined="each"),
    "build_info": Metric("gauge", "Always 1.", ("version",), joined="each"),
    "request_hold_seconds": Metric("histogram", "Waits of requests for a replica, not of all.", _MODEL, "seconds"),
    # The promises of `workload` are bounds of these two.
    "time_to_first_token_seconds": Metric(
        "histogram", "From a request to its engine's first byte of a stream.", _SERVED, "seconds"
    ),
    "time_per_output_token_seconds": Metric(
        "histogram", "Of a stream: from its first byte to its last, by its tokens but one.", _SERVED, "seconds"
    ),
    # What nodes announce: GPUs by NVML, their machines, the starts of replicas. Of live replicas only.
    "gpu_utilization_ratio": Metric(
        "gauge", "Share of the last second in which a kernel ran.", _GPU, "ratio", joined="each"
    ),
    "gpu_memory_used_bytes": Metric("gauge", "GPU memory in use, by any process.", _GPU, "bytes", joined="each"),
    "gpu_memory_total_bytes": Metric("gauge", "GPU memory.", _GPU, "bytes", joined="each"),
    "gpu_power_watts": Metric("gauge", "Power that the GPU draws.", _GPU, "watts", joined="each"),
    "gpu_power_limit_watts": Metric("gauge", "Power that the driver allows.", _GPU, "watts", joined="each"),
    "gpu_energy_joules_total": Metric(
        "counter", "Energy since the GPU's driver was loaded.", _GPU, "joules", joined="each"
    ),
    "gpu_temperature_celsius": Metric("gauge", "Temperature of the GPU.", _GPU, "celsius", joined="each"),
    "gpu_clock_hertz": Metric("gauge", "Clock rates now: sm, memory.", (*_GPU, "clock"), "hertz", joined="each"),
    "gpu_throttled": Metric("gauge", "1: the clocks are lowered for this reason.", (*_GPU, "reason"), joined="each"),
    "gpu_xid_errors_total": Metric(
        "counter", "Errors that the driver reported since the node started.", _GPU, joined="each"
    ),
    "node_cpu_utilization_ratio": Metric("gauge", "Share of all CPUs in use.", _NODE, "ratio", joined="each"),
    "node_memory_used_bytes": Metric("gauge", "Memory that a new process cannot get.", _NODE, "bytes", joined="each"),
    "node_memory_total_bytes": Metric("gauge", "Memory of the machine.", _NODE, "bytes", joined="each"),
    "node_disk_free_bytes": Metric(
        "gauge", "Free on the file system with the node's folder.", _NODE, "bytes", joined="each"
    ),
    "node_disk_total_bytes": Metric(
        "gauge", "Size of the file system with the node's folder.", _NODE, "bytes", joined="each"
    ),
    "node_network_received_bytes_total": Metric(
        "counter", "Bytes that the machine received, without loopback.", _NODE, "bytes", joined="each"
    ),
    "node_network_sent_bytes_total": Metric(
        "counter", "Bytes that the machine sent, without loopback.", _NODE, "bytes", joined="each"
    ),
    "replica_start_seconds": Metric(
        "gauge", "Time of each stage of the last start.", ("replica", "stage"), "seconds", joined="each"
    ),
    "replica_state": Metric("gauge", "Always 1, in the state that it has.", ("replica", "state"), joined="each"),
    "replica_restarts_total": Metric(
        "counter", "Times that the engine was started again.", ("replica",), joined="each"
    ),
    "engine_info": Metric("gauge", "1; the engine of a replica and its version.", ("replica", "engine"), joined="each"),
}


def metric(name: str) -> Metric:
    """The row of a name with or without the prefix, also of a histogram's _bucket, _sum and _count.

    Raises KeyError.
    """
    bare = name.removeprefix(PREFIX)
    if bare not in METRICS:
        for suffix in ("_bucket", "_sum", "_count"):
            base = bare.removesuffix(suffix)
            if base != bare and base in METRICS and METRICS[base].kind == "histogram":
                return METRICS[base]
        raise KeyError(name)
    return METRICS[bare]
