"""What the controller posted last, and what the configuration says, as metrics. Without a controller there is none."""

from __future__ import annotations

import time

import msgspec

from penstock import __version__
from penstock.gateway.config import GatewayConfig
from penstock.gateway.metrics import Family, Labels
from penstock.wire.live import DeploymentNews


class DatedNews(msgspec.Struct, frozen=True):
    """As workers pass it on. `at`: when it came, by the monotonic clock, which all processes of a machine share."""

    at: float
    news: DeploymentNews


class NewsBoard:
    """The newest news. `at` is None before the first."""

    def __init__(self, config: GatewayConfig) -> None:
        self.news: DeploymentNews | None = None
        self._at: float | None = None
        promises = (("ttft", config.slo.ttft_ms), ("tpot", config.slo.tpot_ms))
        self._slo: dict[Labels, float] = {(("metric", name),): ms / 1000 for name, ms in promises if ms is not None}

    def take(self, dated: DatedNews) -> None:
        if self._at is None or dated.at >= self._at:
            self.news, self._at = dated.news, dated.at

    def families(self, now: float) -> list[Family]:
        families: list[Family] = [
            ("build_info", {(("version", __version__),): 1}),
            ("slo_target_seconds", self._slo),
        ]
        if self.news is not None and self._at is not None:
            families += [
                ("replicas_desired", {(): self.news.desired_replicas}),
                ("replicas", {(("state", state),): n for state, n in self.news.states.items()}),
                ("controller_age_seconds", {(): round(max(0.0, now - self._at), 3)}),
            ]
        return families


def dated(body: bytes) -> bytes:
    """The body of POST /admin/news with the time of now. Raises msgspec.DecodeError."""
    return msgspec.json.encode(DatedNews(time.monotonic(), msgspec.json.decode(body, type=DeploymentNews)))
