"""One `Sample` for the autoscaler from one look at a run: what gateways and engines counted since the last one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.deployment.autoscale import ReplicaSample, Sample
from penstock.deployment.observe import Observation
from penstock.wire.announcement import SERVING, GatewayView, LoadCounts, ReplicaView

# JSON and English, before requests of known usage have said it.
_TOKENS_PER_BYTE = 0.25
_KEPT_SHARE = 0.995  # of what was learned, from one sample to the next: half of it in 140 s
_SLACK_S = 2.0
_COUNTED = ("arrivals", "body_bytes", "known_bytes", "known_tokens", "output_tokens", "ttft_good", "ttft_total")


class LoadSampler:
    """Remembers the counters of the look before, by gateway and by engine. `now`: Unix seconds."""

    def __init__(self, now: float) -> None:
        self._gateways: dict[str, LoadCounts] = {}
        self._engines: dict[str, float] = {}
        self._known_bytes = self._known_tokens = 0.0
        self._last_s = now

    def take(
        self, seen: Observation, leaving: Collection[str], ordered_at: Mapping[str, float], now: float
    ) -> Sample | None:
        """The sample of this moment, `now` in Unix seconds; None when no gateway answers.

        `ordered_at`: when the start of each replica that counts was ordered. One in `leaving` counts as draining.
        A prompt's tokens follow from its bytes, since an engine counts them too late: when it has read them.
        """
        view = seen.view
        if view is None:
            return None
        counts = self._count_gateways(view.counts, now)
        self._known_bytes = self._known_bytes * _KEPT_SHARE + counts["known_bytes"]
        self._known_tokens = self._known_tokens * _KEPT_SHARE + counts["known_tokens"]
        per_byte = self._known_tokens / self._known_bytes if self._known_bytes else _TOKENS_PER_BYTE
        generated = self._count_engines(view)
        rows = {row.announcement.replica: row for row in view.replicas}
        self._last_s = now
        return Sample(
            t=round(now, 3),
            arrivals=counts["arrivals"],
            prompt_tokens=round(counts["body_bytes"] * per_byte),
            output_tokens=counts["output_tokens"] if generated is None else generated,
            in_flight=view.in_flight_total + view.waiting,
            held=view.waiting,
            ttft_good=counts["ttft_good"],
            ttft_total=counts["ttft_total"],
            replicas=tuple(
                _replica(name, rows.get(name), name in leaving, max(0.0, now - at)) for name, at in ordered_at.items()
            ),
        )

    def _count_gateways(self, counts: Collection[LoadCounts], now: float) -> dict[str, int]:
        """What was counted since the last look. All that a gateway has counted is new when it has started since; of one
        that was not known before, nothing is."""
        sums = dict.fromkeys(_COUNTED, 0)
        for row in counts:
            before = self._gateways.get(row.gateway)
            is_new = row.age_s <= now - self._last_s + _SLACK_S
            if before is not None and row.age_s < before.age_s:  # it was started again
                before = LoadCounts(row.gateway)
            if before is None:
                before = LoadCounts(row.gateway) if is_new else row
            for name in _COUNTED:
                sums[name] += max(0, getattr(row, name) - getattr(before, name))
            self._gateways[row.gateway] = row
        return sums

    def _count_engines(self, view: GatewayView) -> int | None:
        """Tokens that engines generated since the last look; None where none of them counts."""
        loads = {row.announcement.replica: row.announcement.load for row in view.replicas}
        totals = {name: load.output_tokens for name, load in loads.items() if load is not None and load.output_tokens}
        grown = (total - self._engines.get(name, total) for name, total in totals.items())
        n_tokens = round(sum(max(0.0, tokens) for tokens in grown))
        has_counted = bool(self._engines or totals)
        self._engines.update(totals)
        return n_tokens if has_counted else None


def _replica(name: str, row: ReplicaView | None, is_leaving: bool, age_s: float) -> ReplicaSample:
    announcement = row.announcement if row is not None and row.is_alive else None
    if row is None or announcement is None:
        return ReplicaSample(name, "draining" if is_leaving else "starting", round(age_s, 1))
    load = announcement.load
    is_draining = is_leaving or row.is_draining or announcement.state == "stopping"
    return ReplicaSample(
        id=name,
        state="draining" if is_draining else "ready" if announcement.state in SERVING else "starting",
        age_s=round(age_s, 1),
        running=row.in_flight if load is None else round(load.running),
        waiting=0 if load is None else round(load.waiting),
        kv_use=0.0 if load is None else round(min(max(load.kv_use, 0.0), 1.0), 4),
    )
