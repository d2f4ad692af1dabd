"""The settings of a chat page: ui.json in the run folder, which its process reads."""

from __future__ import annotations

import msgspec

from penstock.spec.gateway import LOOPBACK, Price


class PageConfig(msgspec.Struct, frozen=True):
    """`gateway`: the base URL that is asked, any with OpenAI's API; `certificate`: a PEM file with the one
    that it has, where its name may be another than that of the URL.

    `key_file`: a file with the key that all use, mode 600, which with `has_login` is asked for; None where each gives
    their own, and where none is needed. `folder`: for sessions and uploads, mode 700. `prices`: by model, for the cost
    of an answer. `trusted_proxies`: as in the file.
    """

    gateway: str
    host: str
    port: int
    folder: str
    has_login: bool
    key_file: str | None = None
    certificate: str | None = None
    deployment: str | None = None
    title: str = "penstock"
    model: str | None = None
    system: str | None = None
    has_system: bool = True
    examples: tuple[str, ...] = ()
    root_path: str = ""
    trusted_proxies: tuple[str, ...] = LOOPBACK
    prices: dict[str, Price] = {}
