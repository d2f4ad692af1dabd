"""Settings of a gateway: the deployment file's `gateway` block and the gateway's own file both inherit them. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from penstock.errors import Problem
from penstock.text import GIB, KIB, MIB

PolicyName = Literal["least-load", "prefix", "sticky", "round-robin"]

STDERR = "stderr"  # as the place of the access log

# RFC 6454: a scheme and a host, perhaps a port. https://www.rfc-editor.org/rfc/rfc6454#section-6.2
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?\Z")
_ENDPOINT = re.compile(r"(?i)https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(\d{1,5}))?(/[^?#\s]*[^/?#\s])?\Z")
_PATH_PREFIX = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9_.~-]*)+\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """US dollars per million tokens; `cached`: prompt tokens from the cache, as `input` when absent."""

    input: float
    output: float
    cached: float | None = None

    def cost_usd(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """1000 prompt tokens, 200 of them cached, and 500 output tokens at 2/6/1: 0.0048."""
        cached = self.input if self.cached is None else self.cached
        input_usd = (prompt_tokens - cached_tokens) * self.input + cached_tokens * cached
        return (input_usd + output_tokens * self.output) / 1e6


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one client. `n_connections` is per worker; those of an address are half of that where none are given.

    `idle_s`: between requests; `head_s`: for a request's head; `body_s`: between two pieces of its body; `stall_s`: a
    client that reads nothing; `total_s`: from a request's first byte to the end of its answer.
    """

    head_bytes: int = 32 * KIB
    n_headers: int = 100
    body_bytes: int = 32 * MIB
    n_connections: int = 16_384
    n_connections_per_address: int | None = None
    idle_s: float = 120.0
    head_s: float = 20.0
    body_s: float = 30.0
    stall_s: float = 300.0
    total_s: float | None = None


class QueueBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the queue in which requests wait for a replica, per worker; a request beyond them gets 429.

    `key_share`: the part of the queue that requests of one key may fill.
    """

    n_requests: int = 4096
    body_bytes: int = GIB
    key_share: float = 0.5


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A running engine that penstock did not start: `url` is http://HOST:PORT or unix:/path.

    `model` may be absent where one model is served. The engine's key comes from `key_file` (mode 600) or from the
    environment variable `key_env` of the gateway. Silent for `health_s` at `GET /health`, it is busy: it gets requests
    where no other is ready. After `hung_s` without that answer or a byte of a stream it has hung, and gets none.
    """

    url: str
    model: str | None = None
    key_file: str | None = None
    key_env: str | None = None
    health_s: float = 2.0
    hung_s: float = 120.0


class Traces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where spans of requests go: `endpoint` is that of OTLP over HTTP, http://HOST:4318. `sample`: share of the
    requests without a sampling decision of their client, 0 to 1."""

    endpoint: str
    sample: float = 1.0


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    hold_s: float = 60.0
    drain_s: float = 120.0
    store: str | None = None
    ledger_days: int | None = 90
    keys_stale_s: float = 60.0
    workers: int = 1
    policy: PolicyName = "least-load"
    max_in_flight: int | None = None
    queue: QueueBounds = QueueBounds()
    limits: Limits = Limits()
    upstreams: tuple[Upstream, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    path_prefix: str | None = None
    engine_routes: tuple[str, ...] = ()
    access_log: str | None = None
    traces: Traces | None = None


def setting_problems(settings: GatewaySettings, needs_key: bool) -> Iterator[Problem]:
    """Problems that types do not catch, with paths inside the block."""
    yield from out_of_bounds("workers", settings.workers, 1, 64)
    if settings.max_in_flight is not None and settings.max_in_flight < 1:
        yield Problem("max_in_flight", "must be at least 1, or absent")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "tls_cert" if settings.tls_cert is None else "tls_key"
        yield Problem(missing, "is missing", "TLS needs a certificate and its key")
    if settings.path_prefix is not None and not _PATH_PREFIX.match(settings.path_prefix):
        yield Problem("path_prefix", f'"{settings.path_prefix}" is not a path', "example: /penstock")
    for index, route in enumerate(settings.engine_routes):
        if not _PATH_PREFIX.match(route):
            yield Problem(f"engine_routes[{index}]", f'"{route}" is not a path', "example: /v1/load_lora_adapter")
    for block in ("limits", "queue"):
        for field, value in msgspec.structs.asdict(getattr(settings, block)).items():
            if value is not None and not 0 < value < math.inf:
                yield Problem(f"{block}.{field}", f"{value} is not above 0")
    yield from out_of_bounds("queue.key_share", settings.queue.key_share, 0, 1)
    if settings.access_log is not None and not settings.access_log.strip():
        yield Problem("access_log", "is empty", f"a file, or {STDERR}")
    traces = settings.traces
    endpoint = _ENDPOINT.match(traces.endpoint) if traces is not None else None
    if traces is not None and (endpoint is None or not 0 < int(endpoint[2] or 4318) <= 65535):
        hint = "the address of OTLP over HTTP, without /v1/traces: http://127.0.0.1:4318"
        yield Problem("traces.endpoint", f'"{traces.endpoint}" is not http://HOST:PORT', hint)
    yield from out_of_bounds("traces.sample", traces.sample if traces else None, 0, 1)
    for index, origin in enumerate(settings.allowed_origins):
        if origin == "*" and not needs_key:
            hint = "name the origins, or set auth: keys"
            yield Problem(f"allowed_origins[{index}]", '"*" without keys lets every web page use the engines', hint)
        elif origin != "*" and not _ORIGIN.match(origin):
            yield Problem(f"allowed_origins[{index}]", f'"{origin}" is not an origin', "example: https://chat.example")
    for index, upstream in enumerate(settings.upstreams):
        if not 0 < upstream.health_s < upstream.hung_s < math.inf:
            yield Problem(f"upstreams[{index}]", "needs 0 < health_s < hung_s")
        if upstream.key_file is not None and upstream.key_env is not None:
            yield Problem(f"upstreams[{index}]", "has key_file and key_env", "keep one of them")
        if upstream.key_env is not None and not _VARIABLE.match(upstream.key_env):
            hint = "it names a variable; the key itself does not belong into the file"
            yield Problem(f"upstreams[{index}].key_env", "is not the name of an environment variable", hint)


def out_of_bounds(path: str, value: float | None, least: float, most: float) -> Iterator[Problem]:
    if value is not None and not least <= value <= most:
        yield Problem(path, f"{value:g} is not from {least:g} to {most:g}")


LOOPBACK = ("127.0.0.0/8", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. Names are not resolved."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
