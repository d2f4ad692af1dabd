"""What the controller posted last, and what the configuration says, as metrics. Without a controller there is none."""

from __future__ import annotations

import msgspec

from penstock import __version__
from penstock.gateway.config import GatewayConfig
from penstock.gateway.metrics.counters import Family, Labels
from penstock.text import show_seconds
from penstock.wire.live import DeploymentNews

SILENT_S = 60.0  # the controller posts every 5 s


class DatedNews(msgspec.Struct, frozen=True):
    """As workers pass it on. `at`: when it came, by the monotonic clock, which all processes of a machine share."""

    at: float
    news: DeploymentNews


class NewsBoard:
    """The newest news. Times are monotonic."""

    def __init__(self, config: GatewayConfig) -> None:
        self._newest: DatedNews | None = None
        self._models = tuple(model.name for model in config.models)
        promises = (("ttft", config.slo.ttft_ms), ("tpot", config.slo.tpot_ms))
        self._slo: dict[Labels, float] = {(("metric", name),): ms / 1000 for name, ms in promises if ms is not None}

    def take(self, dated: DatedNews) -> None:
        if self._newest is None or dated.at >= self._newest.at:
            self._newest = dated

    def read(self, now: float) -> DeploymentNews | None:
        """None before the first. Old news say in their reason how old they are."""
        if self._newest is None:
            return None
        news, age_s = self._newest.news, now - self._newest.at
        if age_s <= SILENT_S:
            return news
        reason = f"the controller has not reported for {show_seconds(age_s)}: what dies is not started again"
        return msgspec.structs.replace(news, reason=reason)

    def families(self, now: float) -> list[Family]:
        families: list[Family] = [
            ("build_info", {(("version", __version__),): 1}),
            ("slo_target_seconds", self._slo),
        ]
        if self._newest is not None:
            news = self._newest.news
            by_model: dict[Labels, float] = {
                (("deployment", news.deployment), ("model", model)): news.desired_replicas for model in self._models
            }
            families += [
                ("replicas_desired", {(): news.desired_replicas}),
                ("desired_replicas", by_model),
                ("replicas", {(("state", state),): n for state, n in news.states.items()}),
                ("controller_age_seconds", {(): round(max(0.0, now - self._newest.at), 3)}),
            ]
        return families


def dated(body: bytes, now: float) -> bytes:
    """The body of POST /admin/news with the monotonic time at which it came. Raises msgspec.DecodeError."""
    return msgspec.json.encode(DatedNews(now, msgspec.json.decode(body, type=DeploymentNews)))
