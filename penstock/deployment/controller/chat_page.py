"""The chat page of a deployment, as a child of its controller."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from penstock.deployment import ui
from penstock.deployment.controller.child import Command, lasting_port
from penstock.hardware import network
from penstock.run_folder import Run, reachable


class ChatPage:
    """A `Service`: its own process, which imports gradio for seconds. `is_placed`: the target placed the controller, so
    that people come from other machines."""

    role = "ui"
    health = "/health"
    start_s = 120.0

    def __init__(self, run: Run, is_placed: bool = False) -> None:
        self._run, self._page, self._is_placed = run, ui.page_of(run.deployment()), is_placed

    def prepare(self) -> None:
        """All that it reads is written when it starts."""

    def command(self, url: str | None) -> Command | str:
        gateway = self._run.url
        host = "0.0.0.0" if self._is_placed else self._page.host
        port = self._page.port or lasting_port(url)
        absence = ui.why_absent(host, port)
        if absence is not None and self._is_placed and ui.is_installed():
            port, absence = network.free_port(host), None  # as a placed gateway, which shares its machine
        if absence is not None:
            return absence
        near = reachable(f"{host}:{port}")
        if self._is_placed:
            near = f"{network.own_addresses([urlsplit(gateway).hostname or ''])[0]}:{port}"
        config = ui.write_config(self._run, gateway, host, port)
        return Command([sys.executable, "-m", "penstock.chat.page", str(config)], f"http://{near}")

    def outdated(self) -> str | None:
        """A gateway in a job has its node's address."""
        url = self._run.known_url
        return None if url in (None, ui.gateway_of(self._run)) else f"its gateway moved to {url}"
