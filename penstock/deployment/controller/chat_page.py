"""The chat page of a deployment, as a child of its controller."""

from __future__ import annotations

import sys

from penstock.deployment import ui
from penstock.deployment.controller.child import Command, lasting_port
from penstock.run_folder import Run, reachable


class ChatPage:
    """A `Service`: its own process, which imports gradio for seconds."""

    role = "ui"
    health = "/health"
    start_s = 120.0

    def __init__(self, run: Run) -> None:
        self._run, self._page = run, ui.page_of(run.deployment())

    def prepare(self) -> None:
        """All that it reads is written when it starts."""

    def command(self, url: str | None) -> Command | str:
        port = self._page.port or lasting_port(url)
        absence = ui.why_absent(self._page.host, port)
        if absence is not None:
            return absence
        config = ui.write_config(self._run, self._run.url, self._page.host, port)
        argv = [sys.executable, "-m", "penstock.chat.page", str(config)]
        return Command(argv, f"http://{reachable(f'{self._page.host}:{port}')}")

    def began(self, url: str) -> None:
        """Nothing else hangs on it."""
