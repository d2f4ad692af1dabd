"""Counters of the gateway and their Prometheus text, version 0.0.4. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from penstock.announce import GatewayView

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Outcome = Literal["complete", "client_gone", "broken", "no_replica"]
Labels = tuple[tuple[str, str], ...]


class Counters(msgspec.Struct):
    """Counts since the gateway started; every routed request ends in exactly one outcome.

    `own_s`: time that requests spent in the gateway itself, without waiting for a replica and without the engine.
    """

    n_requests: int = 0
    outcomes: Counter[tuple[str, Outcome]] = msgspec.field(default_factory=Counter)
    responses: Counter[tuple[str, int]] = msgspec.field(default_factory=Counter)
    n_retries: int = 0
    n_connect_failures: int = 0
    n_sent: int = 0
    own_s: float = 0.0


def write_metrics(view: GatewayView, counters: Counters, waiting: Mapping[str, int], ready: Mapping[str, int]) -> bytes:
    """The text of GET /metrics; `waiting` requests and `ready` replicas are by model."""
    requests: dict[Labels, float] = {(("model", m), ("outcome", o)): n for (m, o), n in counters.outcomes.items()}
    responses: dict[Labels, float] = {
        (("model", m), ("code", str(code))): n for (m, code), n in counters.responses.items()
    }
    in_flight: dict[Labels, float] = {
        (("model", row.announcement.model), ("replica", row.announcement.replica)): row.in_flight
        for row in view.replicas
    }
    families: list[tuple[str, str, str, Mapping[Labels, float]]] = [
        ("penstock_requests_total", "counter", "Requests ended, by outcome.", requests),
        ("penstock_responses_total", "counter", "Responses begun, by status code.", responses),
        ("penstock_requests_in_flight", "gauge", "Requests on a replica now.", in_flight),
        ("penstock_requests_waiting", "gauge", "Requests held for a replica now.", _by_model(waiting)),
        ("penstock_replicas_ready", "gauge", "Replicas that get traffic now.", _by_model(ready)),
        ("penstock_retries_total", "counter", "Requests sent to an engine again.", {(): counters.n_retries}),
        (
            "penstock_connect_failures_total",
            "counter",
            "Connections an engine refused.",
            {(): counters.n_connect_failures},
        ),
        (
            "penstock_gateway_own_seconds_sum",
            "counter",
            "Time spent in the gateway before an engine had the request.",
            {(): counters.own_s},
        ),
        ("penstock_gateway_own_seconds_count", "counter", "Requests sent to an engine.", {(): counters.n_sent}),
    ]
    return "".join(line for family in families for line in _write_family(*family)).encode()


def _by_model(values: Mapping[str, int]) -> dict[Labels, float]:
    return {(("model", model),): value for model, value in values.items()}


def _write_family(name: str, kind: str, about: str, samples: Mapping[Labels, float]) -> Iterable[str]:
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in samples.items():
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
        yield f"{name}{{{pairs}}} {value}\n" if pairs else f"{name} {value}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
