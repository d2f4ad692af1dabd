"""The file the gateway is started with, as frozen types, and what must hold before anything listens."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import Problem, SpecError, UserError, nearest

Address = tuple[str, int]

_SHA256_HEX = re.compile(r"[0-9a-f]{64}\Z")
_UNKNOWN_FIELD = re.compile(r"unknown field `(\w+)`")


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that exists because it is declared, with or without a replica. Aliases are other names for it."""

    name: str
    aliases: tuple[str, ...] = ()


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`listen` and `admin` are "host:port"; `key_hashes` are SHA-256 of keys, in lower-case hex.

    `hold_s`: how long a request waits for a replica. `drain_s`: how long requests may finish after SIGTERM.
    """

    listen: str
    admin: str
    admin_token_file: str
    models: tuple[ServedModel, ...]
    auth: Literal["none", "keys"]
    key_hashes: tuple[str, ...] = ()
    hold_s: float = 60.0
    drain_s: float = 30.0


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
    legal = GatewayConfig.__struct_fields__ + ServedModel.__struct_fields__
    guess = nearest(unknown.group(1), legal) if unknown else None
    where, _, path = message.partition(" - at `$")
    return Problem(path.strip("`").lstrip("."), where, f"did you mean {guess}?" if guess else None)


def find_problems(config: GatewayConfig) -> list[Problem]:
    """All that types do not catch."""
    problems = []
    for path, text in (("listen", config.listen), ("admin", config.admin)):
        if parse_address(text) is None:
            problems.append(Problem(path, f"{text!r} is not host:port"))
    if config.auth == "none" and not is_loopback(config.listen):
        problems.append(
            Problem("auth", f"none is refused beyond loopback, and listen is {config.listen!r}", "auth: keys")
        )
    if config.auth == "keys" and not config.key_hashes:
        problems.append(Problem("key_hashes", "empty, so no request could pass with auth: keys"))
    for index, key_hash in enumerate(config.key_hashes):
        if not _SHA256_HEX.match(key_hash):
            problems.append(Problem(f"key_hashes[{index}]", "not 64 lower-case hex digits"))
    if config.hold_s < 0 or config.drain_s < 0:
        problems.append(Problem("hold_s, drain_s", "must not be negative"))
    return problems + _find_name_problems(config.models)


def _find_name_problems(models: tuple[ServedModel, ...]) -> list[Problem]:
    if not models:
        return [Problem("models", "empty: the gateway serves the models that are declared here")]
    names = [name for model in models for name in (model.name, *model.aliases)]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [Problem("models", f"name {name!r} is declared twice") for name in twice]


def parse_address(text: str) -> Address | None:
    """("127.0.0.1", 8000) for "127.0.0.1:8000", ("::1", 8000) for "[::1]:8000"; None for anything else."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        return None
    return host, int(port)


def is_loopback(text: str) -> bool:
    """Whether the address in "host:port" can be reached from this machine only. Names are not resolved."""
    address = parse_address(text)
    if address is None:
        return False
    if address[0] == "localhost":
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
