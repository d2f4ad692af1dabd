"""Which variables probably hold a secret, by their names; copies of settings without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)(?:_|$)"
)


def secret_names(names: Iterable[str]) -> list[str]:
    """Those whose values are probably secret, so that nothing that is sent in clear may show them."""
    return [name for name in names if _SECRET_NAME.search(name.upper())]


HIDDEN = "***"
_VARIABLES = {"env", "env_vars"}  # of an engine, of Ray's runtime_env
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
T = TypeVar("T", bound=msgspec.Struct)


def hide_secrets(settings: T) -> T:
    """A copy to share: all values of variables, texts with a secret's name and logins in addresses become "***"."""
    return msgspec.convert(without_secrets(msgspec.to_builtins(settings)), type(settings))


def without_secrets(value: Any, is_secret: bool = False) -> Any:
    """`hide_secrets` of plain data; names stay."""
    if isinstance(value, Mapping):
        return {
            name: without_secrets(item, is_secret or name in _VARIABLES or bool(secret_names([name.replace("-", "_")])))
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item, is_secret) for item in value]
    if isinstance(value, str):
        return HIDDEN if is_secret else _LOGIN.sub(HIDDEN, value)
    return value
