"""The one table of penstock's own metrics: kind, meaning, labels, unit, and how several workers' values make one. Pure.

Gateways write them, dashboards, rules and `penstock metrics --names` read the table: a name that is not in it is an
error. Names follow https://prometheus.io/docs/practices/naming/. Engines' names are in their own packages.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

PREFIX = "penstock_"

Kind = Literal["counter", "gauge", "histogram"]
# Of several workers: the sum, what each of them knows of all (any value does), or the least.
Joined = Literal["sum", "each", "least"]


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
    # Time.
    "gateway_own_seconds": Metric("histogram", "Time in the gateway before an engine had it.", (), "seconds"),
    "time_to_first_byte_seconds": Metric(
        "histogram", "From a request to the first byte of its answer's body.", _SERVED, "seconds"
    ),
    "chunk_gap_seconds": Metric("histogram", "Between two reads of a stream.", _SERVED, "seconds"),
    "request_seconds": Metric("histogram", "From a request to the end of its answer.", _SERVED, "seconds"),
    # What the controller posts, and what the configuration says.
    "replicas_desired": Metric("gauge", "Replicas that were asked for.", joined="each"),
    "replicas": Metric("gauge", "Replicas, by state.", ("state",), joined="each"),
    "controller_age_seconds": Metric("gauge", "Since the controller's last report.", (), "seconds", joined="each"),
    "slo_target_seconds": Metric("gauge", "Promised latencies.", ("metric",), "seconds", joined="each"),
    "build_info": Metric("gauge", "Always 1.", ("version",), joined="each"),
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
