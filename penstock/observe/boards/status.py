"""For users: does it answer, and how fast. Pure."""

from __future__ import annotations

from penstock.observe.boards.expressions import READY, TPOT, TTFT, share_failed, stat
from penstock.observe.panels import PLAIN, RANGE, Board, Panel, Query, high, low, mean, quantile, quantiles, rate

_UP = f"clamp_max({READY}, 1)"
_PER_MINUTE = f"60 * {rate('penstock_requests_total')}"
_SUCCESS = f"1 - ({share_failed()})"
_SPEED = f"1 / ({mean(TPOT)} > 0)"

_NOW = (
    stat("Service", "Up when a replica takes requests.", "up", _UP, ((None, "red"), (1, "green")), 4),
    stat(
        "Available", "Share of the shown time in which a replica took requests.", "share",
        f"avg_over_time(({READY} > bool 0)[{RANGE}:1m])", low(0.99, 0.999), 4,
    ),
    stat("First token", "Median time to the first token.", "s", quantile(0.5, TTFT), high(1, 3), 4),
    stat("Speed", "Tokens per second of one answer.", "tokens/s", _SPEED, low(10, 20), 4),
    stat("Success", "Requests that did not fail.", "share", _SUCCESS, low(0.95, 0.99), 4),
    stat("Requests", "Requests per minute.", "requests/min", _PER_MINUTE, PLAIN, 4),
)  # fmt: skip

_HISTORY = (
    Panel("First token", "Median and 95th percentile.", "s", "graph", quantiles(TTFT)[:2], high(1, 3), 12),
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

# Gateways count the same replicas.
