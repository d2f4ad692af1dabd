"""What watchers read, on both addresses: /metrics, /metrics/engines and the live page.

It shows the use of all clients. So it wants the admin token or the scrape key, which opens nothing else.
"""

from __future__ import annotations

from typing import Final

from penstock.gateway.accounting.entry import Accounting
from penstock.gateway.accounting.keys import credential, has_token
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.live.page import page_answer
from penstock.gateway.live.stream import LiveFeed
from penstock.gateway.metrics.engine_metrics import EngineMetrics
from penstock.gateway.request import Request
from penstock.gateway.responses import Answer, error_answer
from penstock.gateway.workers.reports import Reporter, metrics_answer
from penstock.wire.announcement import engine_key, scrape_key
from penstock.wire.http1 import RequestHead

# The page holds no secret: it asks for the key itself, and reads the others with it.
KEYLESS_PATHS: Final = frozenset((b"/dashboard",))
MONITORING_PATHS: Final = KEYLESS_PATHS | {b"/metrics", b"/metrics/engines", b"/dashboard/live"}
MONITORING_METHODS: Final = (b"GET", b"HEAD")


class Monitoring:
    def __init__(
        self, accounting: Accounting, reporter: Reporter, engines: EngineMetrics, live: LiveFeed, token: str
    ) -> None:
        self._accounting, self._reporter, self._engines, self._live = accounting, reporter, engines, live
        self._tokens = (token, scrape_key(engine_key(token)))

    def refuse(self, head: RequestHead) -> Answer | None:
        """401 or 403 to a request for one of MONITORING_PATHS without the admin token or the scrape key."""
        if head.path in KEYLESS_PATHS:
            return None
        if any(has_token(credential(head), token) for token in self._tokens):
            return None
        path, wanted = head.path.decode("latin-1"), "the admin token or the scrape key"
        if self._accounting.find(head) is not None:
            message = f"{path} shows the use of all keys, so a client's key does not open it: send {wanted}"
            return error_answer(403, message, "monitoring_not_allowed")
        self._accounting.n_unknown_keys += 1
        message = f"{path} needs {wanted}: Authorization: Bearer KEY"
        return error_answer(401, message, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        """The answer to a request for one of MONITORING_PATHS that `refuse` let pass; None when it is written later."""
        path = request.head.path
        if path == b"/dashboard":
            return page_answer(request.head.get(b"if-none-match"))
        if path == b"/metrics":
            return self._reporter.respond(client, metrics_answer)
        if path == b"/metrics/engines":
            self._engines.respond(request, client)
            return None
        return self._live.handle(request, client)
