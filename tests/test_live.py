"""The controller's news to the gateways, and what `top` and load tests read of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from manual_world import ManualWorld
from samples import NOW, run_folder

from penstock.deployment import live
from penstock.deployment.controller import news
from penstock.deployment.controller.news import MAX_EVENTS, NewsPoster
from penstock.errors import PenstockError
from penstock.run_folder import Part, ReplicaStatus, Run, State
from penstock.wire.client import Client
from penstock.wire.live import DeploymentNews, History, Rates, ReplicaLive, Snapshot
from penstock.wire.sse import Event

STATE = State(
    NOW, "degraded", 3,
    (ReplicaStatus("0", "ready", "placed", n_restarts=2), ReplicaStatus("1", "failed", "gone", n_restarts=1)),
    gateway=Part("running"), controller=Part("running"), reason="out of memory",
)  # fmt: skip


class Posts:
    """What the gateways got, and a clock. `error`: they do not answer."""

    def __init__(self, run: Run) -> None:
        self.world = ManualWorld(100.0)
        self.error: PenstockError | None = None
        self.got: list[DeploymentNews] = []
        self.n_tries = 0
        self.poster = NewsPoster(run, self.world)

    def take(self, gateways: object, path: str, body: Any) -> None:
        assert path == "/admin/news"
        self.n_tries += 1
        if self.error is not None:
            raise self.error
        self.got.append(body)

    def tick(self, seconds: float = 0.4, state: State = STATE) -> None:
        self.world.time_s += seconds
        self.poster.post(state)


@pytest.fixture
def run() -> Run:
    return run_folder()


@pytest.fixture
def posts(run: Run, monkeypatch: pytest.MonkeyPatch) -> Posts:
    posts = Posts(run)
    monkeypatch.setattr(news, "post_each", posts.take)
    return posts


def test_news_of_what_only_the_controller_knows_are_posted_at_a_change_and_every_five_seconds(
    run: Run, posts: Posts
) -> None:
    posts.error = PenstockError("could not connect")  # one that does not answer gets them soon again
    for _ in range(10):
        posts.tick()
    assert (posts.n_tries in (3, 4), posts.got) == (True, [])
    posts.error = None
    posts.tick(1.0)
    for _ in range(12):
        posts.tick()
    assert len(posts.got) == 1
    posts.tick()
    assert len(posts.got) == 2
    posts.tick(state=msgspec.structs.replace(STATE, phase="ready"))
    run.add_event("scaled", "to 3 replicas", who="me@desk")
    posts.tick(state=msgspec.structs.replace(STATE, phase="ready"))
    assert [got.phase for got in posts.got[2:]] == ["ready", "ready"]
    assert posts.got[-1].events[-1].who == "me@desk"
    for n in range(MAX_EVENTS + 5):
        run.add_event("replica restarted", f"reason {n}", replica="0")
    posts.tick()
    got = posts.got[-1]
    assert (got.deployment, got.phase, got.desired_replicas, got.reason) == (run.name, "degraded", 3, "out of memory")
    assert (got.states, got.n_restarts) == ({"ready": 1, "failed": 1}, 3)
    assert len(got.events) == MAX_EVENTS and got.events[-1].text == f"reason {MAX_EVENTS + 4}"
    n_posts = len(posts.got)
    posts.tick(5.0, msgspec.structs.replace(STATE, gateway=Part("gone")))
    assert len(posts.got) == n_posts


# ---- who reads -------------------------------------------------------------------------------------------------------


def made(**now: Any) -> Snapshot:
    return Snapshot("d", 1.0, "1", Rates(1.0, **now))


def test_several_gateways_make_one_snapshot() -> None:
    first = msgspec.structs.replace(
        made(requests_per_s=1.0, in_flight=2, ttft_s_p99=0.5, output_tokens_per_s=50.0),
        replicas=(ReplicaLive("0", "m", "ready", in_flight=2), ReplicaLive("1", "m", "ready")),
    )
    second = msgspec.structs.replace(
        made(requests_per_s=2.0, in_flight=1, ttft_s_p99=0.7, output_tokens_per_s=50.0, itl_s_p50=0.01),
        replicas=(ReplicaLive("0", "m", "ready", in_flight=1, ttft_s_p50=0.1),),
    )
    both = live.joined([first, second])
    assert (both.now.requests_per_s, both.now.in_flight, both.now.output_tokens_per_s) == (3.0, 3, 50.0)
    assert (both.now.ttft_s_p99, both.now.itl_s_p50, both.now.itl_s_p99) == (0.7, 0.01, None)
    assert [(row.replica, row.in_flight, row.ttft_s_p50) for row in both.replicas] == [("0", 3, 0.1), ("1", 0, None)]
    assert live.joined([first]) is first


def test_a_gateway_that_ends_its_stream_is_asked_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    history = msgspec.json.encode(History(5.0, {"at": []})).decode()
    streams: list[list[Event]] = [
        [Event(history, "history"), Event(msgspec.json.encode(made()).decode(), "snapshot"), Event("?", "other")],
        [Event(history, "history")],
    ]

    def answer(client: Client, path: str) -> Iterator[Event]:
        if not streams:
            raise PenstockError("could not connect: connection refused")
        yield from streams.pop(0)

    monkeypatch.setattr(live, "gateways", lambda run, timeout_s: [Client("http://127.0.0.1:1")])
    monkeypatch.setattr(Client, "get_events", answer)
    slept: list[float] = []
    items = live.follow(run, slept.append)
    kinds = [type(next(items)) for _ in range(3)]
    assert (kinds, slept) == ([History, Snapshot, History], [1.0])
    with pytest.raises(PenstockError, match=f'no gateway of "{run.name}" answers') as caught:
        next(items)
    assert caught.value.is_retryable and caught.value.hint == f"See what it does: penstock status {run.name}"


@pytest.mark.loopback
def test_a_run_without_a_gateway_has_no_snapshot(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "gateways", lambda run, timeout_s: [Client("http://127.0.0.1:1", timeout_s=1)])
    with pytest.raises(PenstockError, match="no gateway") as caught:
        live.snapshot(run)
    assert "connection refused" in (caught.value.detail or "")
    monkeypatch.setattr(Client, "get_json", lambda client, path: {"now": 1})
    with pytest.raises(PenstockError, match="another version"):
        live.snapshot(run)
