"""The chat page of a run: its settings, its key where it needs one, and why it cannot start."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from pathlib import Path

import msgspec

from penstock.chat.page.__main__ import EXTRA
from penstock.chat.page.config import PageConfig
from penstock.errors import UserError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore
from penstock.hardware import network
from penstock.paths import write_atomically
from penstock.run_folder import Run
from penstock.spec.deployment import Deployment, Ui

KEY = "chat-page"  # the name of the key that people share who need no login


def is_installed() -> bool:
    importlib.invalidate_caches()  # it may come while the controller runs
    return importlib.util.find_spec("gradio") is not None


def page_of(deployment: Deployment) -> Ui:
    return deployment.chat_page or Ui()


def why_absent(host: str, port: int) -> str | None:
    """Why a page cannot start here; None when it can."""
    if not is_installed():
        return f"the chat page is not installed: {EXTRA}"
    try:
        network.check_port(host, port, "ui.port")
    except UserError as error:
        return f"the chat page {'; '.join(filter(None, (error.message, error.detail)))}; set ui.port"
    return None


def warning(deployment: Deployment, existing: Run | None) -> str | None:
    """Why the page next to a controller on this machine will not start; `existing`: a run that this one replaces."""
    page, before = deployment.chat_page, None if existing is None else existing.deployment().chat_page
    if page is None:
        return None
    reason = why_absent(page.host, 0 if before is not None and before.port == page.port else page.port)
    return None if reason is None else f"ui: {reason}"


def write_config(run: Run, gateway: str, host: str, port: int, certificate: str | None = None) -> Path:
    """Writes what the page's process reads, ui.json; its path. `gateway`: the base URL that it asks; `certificate`: the
    file with the gateway's, where it is not that of the run folder.

    Raises OSError, and PenstockError where the store cannot be opened.
    """
    deployment, model = run.deployment(), run.plan().served_names[0]
    page, price = page_of(deployment), deployment.gateway.price
    run.ui_folder.mkdir(mode=0o700, exist_ok=True)
    has_login, is_tls = page.login != "none", gateway.startswith("https")
    key_file = _shared_key(run) if deployment.gateway.auth == "keys" and not has_login else None
    config = PageConfig(
        gateway, host, port, str(run.ui_folder), has_login, None if key_file is None else str(key_file),
        certificate=run.gateway_file().tls_cert if is_tls and run.gateway_config.exists() else certificate,
        deployment=run.name, title=page.title or run.name, model=model, system=page.system, examples=page.examples,
        root_path=page.root_path or "", trusted_proxies=page.trusted_proxies,
        prices={} if price is None else {model: price},
    )  # fmt: skip
    write_atomically(run.ui_config, msgspec.json.format(msgspec.json.encode(config), indent=2), mode=0o600)
    return run.ui_config


def gateway_of(run: Run) -> str | None:
    """The base URL that its page was started with."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(run.ui_config.read_bytes(), type=PageConfig).gateway
    return None


def _shared_key(run: Run) -> Path | None:
    """A file with the key of everyone at the page: the one from before while the store has it, else a new one."""
    file, place = run.ui_folder / "key", run.gateway_file().store
    if place is None:
        return None
    with contextlib.closing(store.connect(place)) as database:
        _, is_new = KeyStore(database).keep(KEY, file, None, time.time())
    if is_new:
        run.add_event("key created", f"{KEY}, of everyone at the chat page")
    return file
