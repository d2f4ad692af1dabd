"""Tells every gateway what only the controller knows, for those who watch: at a change, and every few seconds."""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.deployment.observe import gateways
from penstock.errors import PenstockError
from penstock.run_folder import Run, State
from penstock.wire.gateways import post_each
from penstock.wire.live import DeploymentNews, Event
from penstock.world import REAL, Thread, World

EVERY_S = 5.0
AGAIN_S = 1.0  # after a failure
MAX_EVENTS = 100


def make_news(name: str, state: State, events: tuple[Event, ...], now: float) -> DeploymentNews:
    """`now` in Unix seconds."""
    scaling = state.scaling
    ready_at = scaling.ready_at if scaling is not None else None
    return DeploymentNews(
        deployment=name,
        phase=state.phase,
        desired_replicas=state.desired_replicas if scaling is None or scaling.published is None else scaling.published,
        states=dict(Counter(row.state for row in state.replicas)),
        n_restarts=sum(row.n_restarts for row in state.replicas),
        reason=state.reason,
        events=events,
        ready_in_s=None if ready_at is None else round(max(0.0, ready_at - now), 1),
        failure=scaling.failure if scaling is not None else None,
    )


def _without_time(news: DeploymentNews) -> DeploymentNews:
    return news if news.ready_in_s is None else msgspec.structs.replace(news, ready_in_s=0.0)


class NewsPoster:
    """Posts in a thread, one at a time: a gateway that does not answer delays no tick."""

    def __init__(self, run: Run, world: World = REAL) -> None:
        self._run, self._world = run, world
        self._posted: DeploymentNews | None = None
        self._tried_at = -EVERY_S
        self._thread: Thread | None = None
        self._events: tuple[Event, ...] = ()
        self._events_version: tuple[int, ...] = ()

    def post(self, state: State) -> None:
        """Does not block. What changes while a post is under way goes with the next."""
        if state.gateway.state != "running" or (self._thread is not None and self._thread.is_alive()):
            return
        news = make_news(self._run.name, state, self._read_events(), self._world.unix())
        now = self._world.now()
        is_change = self._posted is not None and _without_time(news) != _without_time(self._posted)
        if not is_change and now - self._tried_at < (EVERY_S if self._posted is not None else AGAIN_S):
            return
        self._tried_at = now
        self._thread = self._world.thread(lambda: self._send(news), "news")

    def _send(self, news: DeploymentNews) -> None:
        try:
            post_each(gateways(self._run), "/admin/news", news)
            self._posted = news
        except PenstockError:  # nothing is lost: the next one says it all again
            self._posted = None

    def _read_events(self) -> tuple[Event, ...]:
        """The newest, read only when the file has changed: verbs write to it too."""
        try:
            status = self._run.events_file.stat()
            version = (status.st_ino, status.st_size, status.st_mtime_ns)
            if version != self._events_version:
                self._events = tuple(self._run.events(recent=True)[-MAX_EVENTS:])
                self._events_version = version
        except OSError:  # a folder that is being removed
            pass
        return self._events
