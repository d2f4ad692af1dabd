"""What is written of each request when it has ended: a line of the access log, and a span. On the ledger's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.gateway.accounting.access_log import AccessLog, write_lines
from penstock.gateway.accounting.exchange import Record
from penstock.gateway.accounting.span_export import SpanExporter
from penstock.gateway.accounting.spans import SpanWriter
from penstock.gateway.config import GatewayConfig
from penstock.gateway.metrics.counters import Family
from penstock.world import REAL, World

# Between two pieces the event loop gets Python's lock, which it would otherwise wait 5 ms for. A busy loop gives it
# back after 5 ms, so there may not be too many of them in a turn of 0.5 s.
PIECE: Final = 32
MAX_PIECES: Final = 50


class RequestLog:
    """The access log and the spans of a gateway, as far as its config asks for them. Raises UserError."""

    def __init__(self, config: GatewayConfig, world: World = REAL) -> None:
        self._world = world
        self.access_log = AccessLog(config.access_log) if config.access_log is not None else None
        traces = config.traces
        self._spans = SpanWriter(config.deployment)
        self.exporter = SpanExporter(traces.endpoint, self._spans, now=world.now) if traces is not None else None

    def write(self, records: Sequence[Record]) -> None:
        unix_offset_s = self._world.unix() - self._world.now()  # anew each time: the clock may be set
        piece = max(PIECE, len(records) // MAX_PIECES)
        for at in range(0, len(records), piece):
            written = records[at : at + piece]
            if self.access_log is not None:
                self.access_log.write(write_lines(written))
            if self.exporter is not None:
                sampled = [record for record in written if record[1].trace is not None and record[1].trace.is_sampled]
                self.exporter.add([self._spans.span(record, unix_offset_s) for record in sampled])
            self._world.sleep(0)
        if self.exporter is not None:
            self.exporter.send(self._world.now())

    def families(self) -> list[Family]:
        named = (("access_log_lost_total", self.access_log), ("spans_lost_total", self.exporter))
        return [(name, {(): part.n_lost}) for name, part in named if part is not None]

    def lose(self, n_records: int) -> None:
        """Counts requests that could not be written."""
        for part in (self.access_log, self.exporter):
            if part is not None:
                part.n_lost += n_records

    def close(self) -> None:
        for part in (self.exporter, self.access_log):
            if part is not None:
                part.close()
