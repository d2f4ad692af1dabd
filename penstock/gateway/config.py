"""The gateway's own file as frozen types, and its checks before anything listens."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from penstock.errors import Problem, SpecError, UserError, nearest
from penstock.paths import read_token
from penstock.spec.gateway import (
    GatewaySettings,
    Limits,
    Price,
    QueueBounds,
    Traces,
    Upstream,
    is_loopback,
    setting_problems,
)

# ("unix:/run/a.sock", 0) is a Unix socket.
Address = tuple[str, int]

UNIX = "unix:"

_SHA256_HEX = re.compile(r"[0-9a-f]{64}\Z")
# 107 bytes is what sun_path of sockaddr_un holds before its final NUL: https://man7.org/linux/man-pages/man7/unix.7.html
_UNIX_PATH = re.compile(r"unix:/[^\x00-\x1f\x7f]{1,106}\Z")
_UNKNOWN_FIELD = re.compile(r"unknown field `(\w+)`")


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that exists because it is declared, with or without a replica. Aliases are other names for it."""

    name: str
    aliases: tuple[str, ...] = ()


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Promised latencies in milliseconds: to the first token, and for each further one."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class GatewayConfig(GatewaySettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`listen` and `admin` are "host:port" or "unix:/path"; `key_hashes` are SHA-256 of keys, in lower-case hex.

    `store`: a file or a postgresql:// URL. `ledger_days`: days that a request keeps its row. `prices`: by model.
    `engines_need_key`: engines ask for the key that nodes and gateway derive from the admin token. `deployment`: its
    name, in labels and on the page. `slo`: the promised latencies. `gpu_hour_usd`: the price of one GPU for an hour,
    `gpus_per_replica` how many a replica has. `engine_families`: how the names of engines' metrics begin; `renamed`:
    their old names -> the present ones. `holds_while_loading`: requests wait for the first replica while one is on
    its way, also longer than `hold_s`.
    """

    listen: str
    admin: str
    admin_token_file: str
    models: tuple[ServedModel, ...]
    auth: Literal["none", "keys"]
    drain_s: float = 30.0
    key_hashes: tuple[str, ...] = ()
    engines_need_key: bool = False
    prices: dict[str, Price] = msgspec.field(default_factory=dict)
    deployment: str = ""
    slo: Slo = Slo()
    gpu_hour_usd: float | None = None
    gpus_per_replica: int = 0
    engine_families: tuple[str, ...] = ()
    renamed: dict[str, str] = msgspec.field(default_factory=dict)
    holds_while_loading: bool = False


def load_config(path: Path) -> GatewayConfig:
    """The checked config in `path`. Raises UserError when it cannot be read, SpecError with all problems."""
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
    check(config, source)
    return config


def check(config: GatewayConfig, source: str) -> None:
    """Raises SpecError with all problems; `source` names the config."""
    problems = list(find_problems(config))
    if problems:
        raise SpecError(source, problems)


def _read_problem(message: str) -> Problem:
    unknown = _UNKNOWN_FIELD.search(message)
    structs = (GatewayConfig, ServedModel, Upstream, Limits, QueueBounds, Price, Slo, Traces)
    legal = [field for struct in structs for field in struct.__struct_fields__]
    guess = nearest(unknown.group(1), legal) if unknown else None
    where, _, path = message.partition(" - at `$")
    return Problem(path.strip("`").lstrip("."), where, f"did you mean {guess}?" if guess else None)


def find_problems(config: GatewayConfig) -> Iterator[Problem]:
    """Problems that types do not catch."""
    yield from setting_problems(config, config.auth == "keys")
    for path, text in (("listen", config.listen), ("admin", config.admin)):
        if parse_address(text) is None:
            yield Problem(path, f"{text!r} is neither host:port nor unix:/path")
    if config.auth == "none" and not is_local_address(config.listen):
        yield Problem("auth", f"none is refused beyond loopback, and listen is {config.listen!r}", "auth: keys")
    if config.auth == "keys" and not config.key_hashes and config.store is None:
        yield Problem("key_hashes", "empty, so no request could pass with auth: keys", "or name a store")
    for index, key_hash in enumerate(config.key_hashes):
        if not _SHA256_HEX.match(key_hash):
            yield Problem(f"key_hashes[{index}]", "not 64 lower-case hex digits")
    if config.hold_s < 0 or config.drain_s < 0:
        yield Problem("hold_s, drain_s", "must not be negative")
    if config.keys_stale_s < 1:
        yield Problem("keys_stale_s", "must be at least 1")
    if config.ledger_days is not None and config.ledger_days < 1:
        yield Problem("ledger_days", "must be at least 1, or null for ever")
    if not config.models:
        yield Problem("models", "empty: the gateway serves the models that are declared here")
    names = [name for model in config.models for name in (model.name, *model.aliases)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("models", f"name {name!r} is declared twice")
    declared = {model.name for model in config.models}
    for index, upstream in enumerate(config.upstreams):
        if upstream.model is None and len(declared) > 1:
            yield Problem(f"upstreams[{index}].model", "is missing, and several models are declared")
        elif upstream.model is not None and upstream.model not in declared:
            yield Problem(f"upstreams[{index}].model", f"{upstream.model!r} is not declared in models")
        if parse_url(upstream.url) is None:
            yield Problem(f"upstreams[{index}].url", f"{upstream.url!r} is not http://host:port or unix:/path")
    for name, price in config.prices.items():
        if name not in declared:
            yield Problem("prices", f"{name!r} is not declared in models")
        if not all(0 <= value < math.inf for value in (price.input, price.output, price.cached or 0.0)):
            yield Problem(f"prices.{name}", "a price is below 0 or not finite")


def parse_address(text: str) -> Address | None:
    """("127.0.0.1", 8000) for "127.0.0.1:8000", ("::1", 8000) for "[::1]:8000", ("unix:/a.sock", 0); None otherwise."""
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
    host, port = address
    if host.startswith(UNIX):
        return b"localhost"
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()


def is_local_address(text: str) -> bool:
    """Whether only this machine can reach the address. Names are not resolved."""
    address = parse_address(text)
    return address is not None and (address[0].startswith(UNIX) or is_loopback(address[0]))


def upstream_keys(config: GatewayConfig) -> dict[Address, str]:
    """The keys of upstreams by address, from their files and variables. Raises UserError."""
    keys: dict[Address, str] = {}
    for upstream in config.upstreams:
        address = parse_url(upstream.url)
        assert address is not None
        if upstream.key_file is not None:
            keys[address] = read_token(Path(upstream.key_file), "upstream key")
        elif upstream.key_env is not None:
            key = os.environ.get(upstream.key_env, "").strip()
            if not key:
                raise UserError(f"no key for upstream {upstream.url!r}: variable {upstream.key_env} is not set")
            keys[address] = key
        key = keys.setdefault(address, "")  # never that of the deployment's engines
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"the key of upstream {upstream.url!r} holds characters that no header may")
    return keys
