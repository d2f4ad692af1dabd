"""The file the gateway is started with, as frozen types, and what must hold before anything listens."""

from __future__ import annotations

import ipaddress
import math
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from penstock.errors import Problem, SpecError, UserError, nearest
from penstock.gateway.routing.policies import PolicyName
from penstock.text import KIB, MIB

# ("unix:/run/a.sock", 0) is a Unix socket.
Address = tuple[str, int]

UNIX = "unix:"
MAX_WORKERS = 64

_SHA256_HEX = re.compile(r"[0-9a-f]{64}\Z")
# 107 bytes is what sun_path of sockaddr_un holds beside its final NUL: https://man7.org/linux/man-pages/man7/unix.7.html
_UNIX_PATH = re.compile(r"unix:/[^\x00-\x1f\x7f]{1,106}\Z")
_UNKNOWN_FIELD = re.compile(r"unknown field `(\w+)`")


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that exists because it is declared, with or without a replica. Aliases are other names for it."""

    name: str
    aliases: tuple[str, ...] = ()


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that runs already: `url` is http://host:port or unix:/path."""

    model: str
    url: str


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may take. `total_s` None: a request may last as long as its engine works.

    `idle_s`: between requests; `head_s`: for a request's head; `body_s`: between two pieces of its body; `stall_s`: a
    client that reads nothing of a response that is there; `total_s`: from a request's first byte to its answer's end.
    """

    head_bytes: int = 32 * KIB
    n_headers: int = 100
    body_bytes: int = 32 * MIB
    n_connections: int = 16_384
    idle_s: float = 120.0
    head_s: float = 20.0
    body_s: float = 30.0
    stall_s: float = 300.0
    total_s: float | None = None


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """US dollars per million tokens; `cached` (prompt tokens from the cache) is as `input` when absent."""

    input: float
    output: float
    cached: float | None = None

    def cost_usd(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """1000 prompt tokens, 200 of them cached, and 500 output tokens at 2/6/1: 0.0048."""
        cached = self.input if self.cached is None else self.cached
        fresh_tokens = prompt_tokens - cached_tokens
        return (fresh_tokens * self.input + cached_tokens * cached + output_tokens * self.output) / 1e6


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`listen` and `admin` are "host:port" or "unix:/path"; `key_hashes` are SHA-256 of keys, in lower-case hex.

    `hold_s`: how long a request waits for a replica. `drain_s`: how long requests may finish after SIGTERM. `store`:
    the file or postgresql:// URL of keys and usage. `ledger_days`: how many days a request has a row; then it is part
    of its day's sums. `prices`: by model. `upstreams`: engines that nobody announces, asked for their health instead.
    `policy`: how a replica is chosen. `max_in_flight`: requests on one replica at a time; more of them wait in the
    gateway, where the queue is fair between keys; None leaves that to the engine. `engines_need_key`: engines ask for
    the key that nodes and gateway make from the admin token.
    """

    listen: str
    admin: str
    admin_token_file: str
    models: tuple[ServedModel, ...]
    auth: Literal["none", "keys"]
    key_hashes: tuple[str, ...] = ()
    hold_s: float = 60.0
    drain_s: float = 30.0
    store: str | None = None
    ledger_days: int | None = 90
    policy: PolicyName = "least-load"
    upstreams: tuple[Upstream, ...] = ()
    workers: int = 1
    tls_cert: str | None = None
    tls_key: str | None = None
    limits: Limits = Limits()
    max_in_flight: int | None = None
    engines_need_key: bool = False
    prices: dict[str, Price] = {}


def load_config(path: Path) -> GatewayConfig:
    """The checked config in `path`. Raises UserError when it cannot be read, SpecError with all that is wrong."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read gateway config {str(path)!r}: {error.strerror}") from error
    return parse_config(content, str(path))


def parse_config(content: bytes, source: str) -> GatewayConfig:
    """The checked config in `content`; `source` names it in errors. Raises SpecError."""
    try:
        config = msgspec.json.decode(content, type=GatewayConfig)
    except msgspec.DecodeError as error:
        raise SpecError(source, [_read_problem(str(error))]) from error
    problems = find_problems(config)
    if problems:
        raise SpecError(source, problems)
    return config


def _read_problem(message: str) -> Problem:
    unknown = _UNKNOWN_FIELD.search(message)
    structs = (GatewayConfig, ServedModel, Upstream, Limits, Price)
    legal = [field for struct in structs for field in struct.__struct_fields__]
    guess = nearest(unknown.group(1), legal) if unknown else None
    where, _, path = message.partition(" - at `$")
    return Problem(path.strip("`").lstrip("."), where, f"did you mean {guess}?" if guess else None)


def find_problems(config: GatewayConfig) -> list[Problem]:
    """All that types do not catch."""
    problems = []
    for path, text in (("listen", config.listen), ("admin", config.admin)):
        if parse_address(text) is None:
            problems.append(Problem(path, f"{text!r} is neither host:port nor unix:/path"))
    if config.auth == "none" and not is_loopback(config.listen):
        problems.append(
            Problem("auth", f"none is refused beyond loopback, and listen is {config.listen!r}", "auth: keys")
        )
    if config.auth == "keys" and not config.key_hashes and config.store is None:
        problems.append(Problem("key_hashes", "empty, so no request could pass with auth: keys", "or name a store"))
    for index, key_hash in enumerate(config.key_hashes):
        if not _SHA256_HEX.match(key_hash):
            problems.append(Problem(f"key_hashes[{index}]", "not 64 lower-case hex digits"))
    if config.hold_s < 0 or config.drain_s < 0:
        problems.append(Problem("hold_s, drain_s", "must not be negative"))
    if config.ledger_days is not None and config.ledger_days < 1:
        problems.append(Problem("ledger_days", "must be at least 1, or null for ever"))
    if config.max_in_flight is not None and config.max_in_flight < 1:
        problems.append(Problem("max_in_flight", "must be at least 1, or absent"))
    return problems + _find_wire_problems(config) + _find_price_problems(config) + _find_name_problems(config.models)


def _find_wire_problems(config: GatewayConfig) -> list[Problem]:
    problems = []
    if (config.tls_cert is None) != (config.tls_key is None):
        problems.append(Problem("tls_cert, tls_key", "one without the other"))
    if not 1 <= config.workers <= MAX_WORKERS:
        problems.append(Problem("workers", f"{config.workers} is not from 1 to {MAX_WORKERS}"))
    for field, value in msgspec.structs.asdict(config.limits).items():
        if value is not None and value <= 0:
            problems.append(Problem(f"limits.{field}", f"{value} is not above 0"))
    declared = {model.name for model in config.models}
    for index, upstream in enumerate(config.upstreams):
        if upstream.model not in declared:
            problems.append(Problem(f"upstreams[{index}].model", f"{upstream.model!r} is not declared in models"))
        if parse_url(upstream.url) is None:
            problems.append(
                Problem(f"upstreams[{index}].url", f"{upstream.url!r} is not http://host:port or unix:/path")
            )
    return problems


def _find_price_problems(config: GatewayConfig) -> list[Problem]:
    problems = []
    for name, price in config.prices.items():
        if name not in {model.name for model in config.models}:
            problems.append(Problem("prices", f"{name!r} is not declared in models"))
        if not all(0 <= value < math.inf for value in (price.input, price.output, price.cached or 0.0)):
            problems.append(Problem(f"prices.{name}", "a price is below 0 or not finite"))
    return problems


def _find_name_problems(models: tuple[ServedModel, ...]) -> list[Problem]:
    if not models:
        return [Problem("models", "empty: the gateway serves the models that are declared here")]
    names = [name for model in models for name in (model.name, *model.aliases)]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [Problem("models", f"name {name!r} is declared twice") for name in twice]


def parse_address(text: str) -> Address | None:
    """("127.0.0.1", 8000) for "127.0.0.1:8000", ("::1", 8000) for "[::1]:8000"; None for anything else.

    "unix:/run/a.sock" gives ("unix:/run/a.sock", 0).
    """
    if text.startswith(UNIX):
        return (text, 0) if _UNIX_PATH.match(text) else None
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        return None
    return host, int(port)


def parse_url(url: str) -> Address | None:
    """The address in http://host:port or unix:/path; None for anything else."""
    if url.startswith(UNIX):
        return parse_address(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if host is None or parts.scheme != "http" or parts.path not in ("", "/") or parts.query or "@" in parts.netloc:
        return None
    return host, port or 80


def host_header(address: Address) -> bytes:
    """What a request to `address` says in Host."""
    host, port = address
    if host.startswith(UNIX):
        return b"localhost"
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()


def is_loopback(text: str) -> bool:
    """Whether the address can be reached from this machine only. Names are not resolved."""
    address = parse_address(text)
    if address is None:
        return False
    if address[0] == "localhost" or address[0].startswith(UNIX):
        return True
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The admin token. Raises UserError for a file that others can read, or that holds nothing."""
    try:
        is_shared = bool(path.stat().st_mode & 0o077)
        token = path.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read admin token file {str(path)!r}: {error.strerror}") from error
    if is_shared:
        raise UserError(f"admin token file {str(path)!r} can be read by others", hint=f"chmod 600 {path}")
    if not token:
        raise UserError(f"admin token file {str(path)!r} is empty")
    return token
