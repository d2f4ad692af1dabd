"""Nodes of one replica find each other over a real board, go together, and all notice when one is lost.

The board is the gateway's own, in this process; the parts that a node would run are stand-ins, as no engine is needed
to see who waits for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from samples import cpu_machine, demo_plan

from penstock import engines
from penstock.engines import Diagnosis
from penstock.gateway.board import FORGET_AFTER_S, RankBoard
from penstock.hardware import Interface, NodeFacts
from penstock.node.group import member, rendezvous
from penstock.node.group.addresses import Formation, Introduction
from penstock.node.group.leader import GroupLeader
from penstock.node.group.member import GroupMember
from penstock.node.group.rendezvous import BoardClient
from penstock.node.ready_file import ReadyFile
from penstock.planner import Plan
from penstock.spec.deployment import Parallel
from penstock.wire.announcement import NodeView, Post
from penstock.wire.client import NoAnswer

LAN = (Interface("eth0", "0.0.0.0", 0), Interface("eth0", "10.0.0.2", 0))  # rank 0 binds a port on its own
PLAN = demo_plan("fake", n_nodes=2, layout=Parallel(tensor=2), executor="mp", drain_s=2.0)


class Desk:
    """The gateway's admin address, as a node calls it; `is_down` cuts it off."""

    def __init__(self) -> None:
        self.board = RankBoard(time.monotonic() - 100.0)
        self.is_down = False
        self._lock = threading.Lock()

    def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert path == "/admin/board"
        if self.is_down:
            raise NoAnswer("the gateway is away")
        with self._lock:
            view = self.board.post(msgspec.convert(body, Post), time.monotonic())
        told: dict[str, Any] = msgspec.to_builtins(view)
        return told


class StandIn:
    """What a node runs."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.is_ended = False
        self.engine = self
        self.tail = ["ERROR: torch.OutOfMemoryError: CUDA out of memory"]

    def exit_code(self) -> int | None:
        return self.code

    def end(self, grace_s: float) -> None:
        self.is_ended = True

    def look(self) -> tuple[()]:
        return ()


def introduction(host: str, **versions: str) -> Introduction:
    machine = msgspec.structs.replace(cpu_machine(), versions={"vllm": "0.33.0"} | versions)
    return Introduction(NodeFacts(host, machine, (LAN[host == "beta"],), 1 << 30))


class Second:
    """The second node: a follower in a thread. `vanish` is power loss: no word any more."""

    def __init__(self, desk: Desk, plan: Plan = PLAN, **versions: str) -> None:
        self.started: list[StandIn] = []
        self.board = a_board(desk, 1)

        def start(made: Formation) -> Any:
            self.started.append(StandIn())
            return self.started[-1]

        self.member = GroupMember(
            plan, self.board, engines.load("vllm"), lambda: introduction("beta", **versions), start, ReadyFile()
        )
        self.thread = threading.Thread(target=self.member.run, daemon=True)
        self.thread.start()

    def vanish(self) -> None:
        self.board.post = lambda epoch, **content: None  # type: ignore[method-assign]
        self.board._admin = no_power()
        self.member.stops = 2


def no_power() -> Any:
    desk = Desk()
    desk.is_down = True
    return desk


def a_board(desk: Desk, rank: int) -> BoardClient:
    board = BoardClient(desk, "0", rank, lambda: None)  # type: ignore[arg-type]
    board.start()
    return board


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is silent for one second is gone, so that the tests need not wait for six."""
    monkeypatch.setattr(rendezvous, "_GONE_AFTER_S", 1.0)
    monkeypatch.setattr(rendezvous, "_POST_EVERY_S", 0.1)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def seconds(desk: Desk) -> Iterator[Callable[..., Second]]:
    made: list[Second] = []

    def make(**more: Any) -> Second:
        made.append(Second(desk, **more))
        return made[-1]

    yield make
    for second in made:
        second.member.stops = 2
        second.thread.join(5)
        assert not second.thread.is_alive()


def a_leader(desk: Desk, plan: Plan = PLAN) -> GroupLeader:
    return GroupLeader(plan, a_board(desk, 0), ("alpha", "beta"), lambda: False)


def nothing(what: str, nodes: tuple[NodeView, ...]) -> None:
    pass


def formed(leader: GroupLeader, patience_s: float | None = 10.0) -> Formation:
    made = leader.form(introduction("alpha"), patience_s, nothing)
    assert isinstance(made, Formation), made
    assert leader.go(made) is None
    return made


def until(is_so: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"expected: {what}"
        time.sleep(0.02)


def test_two_nodes_form_and_go(desk: Desk, seconds: Callable[..., Second]) -> None:
    leader, second = a_leader(desk), seconds()
    made = formed(leader)
    assert [(node.host, node.address, node.interface) for node in made.nodes] == [
        ("alpha", "0.0.0.0", "eth0"),
        ("beta", "10.0.0.2", "eth0"),
    ]
    assert len(second.started) == 1
    assert leader.trouble() is None
    assert [(view.host, view.state, view.ranks) for view in leader.views()] == [
        ("alpha", "here", (0,)),
        ("beta", "here", (1,)),
    ]


def test_the_end_of_an_epoch_ends_the_part_and_the_next_one_starts_it_again(
    desk: Desk, seconds: Callable[..., Second]
) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    leader.over()
    until(lambda: second.started[0].is_ended, "the part has ended")
    formed(leader)
    assert len(second.started) == 2
    assert not second.started[1].is_ended


def test_who_is_missing_is_said_by_name_and_only_so_long(desk: Desk) -> None:
    said: list[tuple[str, list[str]]] = []
    found = a_leader(desk).form(
        introduction("alpha"), 0.5, lambda what, nodes: said.append((what, [node.state for node in nodes]))
    )
    assert isinstance(found, Diagnosis)
    assert found.reason.startswith("beta (node 1) did not join within")
    assert found.is_final
    assert said[0] == ("waiting for beta (node 1)", ["here", "waiting"])


def test_a_node_that_vanishes_is_named_and_can_come_back(desk: Desk, seconds: Callable[..., Second]) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    second.vanish()
    until(lambda: leader.trouble() is not None, "the loss is noticed")
    trouble = leader.trouble()
    assert trouble is not None
    assert trouble.reason == "node 1 beta (10.0.0.2) does not answer any more"
    assert [view.state for view in leader.views()] == ["here", "gone"]
    again = seconds()
    formed(leader, patience_s=None)
    assert len(again.started) == 1


def test_a_node_that_was_started_again_ends_the_epoch_at_once(desk: Desk, seconds: Callable[..., Second]) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    second.vanish()
    again = seconds()
    until(lambda: leader.trouble() is not None, "another instance is noticed")
    trouble = leader.trouble()
    assert trouble is not None and trouble.reason == "node 1 beta (10.0.0.2) was started again"
    assert again.started == [], "it does not join what runs already"


def test_a_part_that_dies_tells_why(desk: Desk, seconds: Callable[..., Second]) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    second.started[0].code = 1
    until(lambda: leader.trouble() is not None, "the death is told")
    trouble = leader.trouble()
    assert trouble is not None and trouble.reason.startswith("node 1 beta: vLLM exited with code 1")
    assert "out of memory" in trouble.reason.lower()


def test_versions_that_differ_are_refused_before_anything_starts(desk: Desk, seconds: Callable[..., Second]) -> None:
    second = seconds(vllm="0.32.0")
    found = a_leader(desk).form(introduction("alpha"), 10.0, nothing)
    assert isinstance(found, Diagnosis) and found.is_final
    assert found.reason == "vllm is 0.32.0 on beta (rank 1), 0.33.0 on alpha (rank 0)"
    assert second.started == []


def test_a_gateway_that_is_away_is_no_loss_of_a_node(desk: Desk, seconds: Callable[..., Second]) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    desk.is_down = True
    time.sleep(2.0)
    assert leader.trouble() is None
    desk.board = RankBoard(time.monotonic())  # another process: it knows nobody
    desk.is_down = False
    until(lambda: len(leader._board.posts()) == 1, "the other has spoken again")
    time.sleep(1.5)
    assert leader.trouble() is None
    assert not second.started[0].is_ended


def test_a_lead_that_vanishes_ends_the_part_and_another_lead_takes_over(
    desk: Desk, seconds: Callable[..., Second]
) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    leader._board._admin = no_power()
    until(lambda: second.started[0].is_ended, "the part of a vanished leader is ended")
    formed(a_leader(desk))
    assert len(second.started) == 2


def test_told_to_stop_when_the_gateway_is_gone_too_a_node_leaves(
    desk: Desk, seconds: Callable[..., Second], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_GATEWAY_GONE_S", 0.5)
    leader, second = a_leader(desk), seconds()
    formed(leader)
    desk.is_down = True
    time.sleep(1.0)
    assert not second.started[0].is_ended, "nobody told it to stop"
    second.member.stop()
    until(lambda: not second.thread.is_alive(), "it does not wait for a word that cannot come")
    assert second.started[0].is_ended


def test_told_to_stop_a_node_keeps_its_part_until_the_first_has_drained(
    desk: Desk, seconds: Callable[..., Second]
) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    second.member.stop()
    time.sleep(0.6)
    assert not second.started[0].is_ended
    leader.over("stopping")
    until(lambda: not second.thread.is_alive(), "it leaves with the first")
    assert second.started[0].is_ended


def test_told_to_stop_it_waits_no_longer_than_a_drain(desk: Desk, seconds: Callable[..., Second]) -> None:
    leader, second = a_leader(desk), seconds()
    formed(leader)
    second.member.stop()
    until(lambda: not second.thread.is_alive(), "the time of the drain is over", timeout_s=5.0)


def test_the_board_forgets_what_nobody_renews() -> None:
    board = RankBoard(0.0)
    board.post(Post("0", 0, "a", "e"), 0.0)
    board.post(Post("1", 0, "b", "e"), 1.0)
    view = board.post(Post("0", 1, "c", "e"), FORGET_AFTER_S + 2.0)
    assert [row.post.rank for row in view.posts] == [1]
    assert view.age_s == FORGET_AFTER_S + 2.0


def test_an_order_to_leave_is_not_for_the_process_that_replaces_one_that_left() -> None:
    board = RankBoard(0.0)
    assert board.post(Post("0", 1, "old", ""), 0.0).leave is False
    assert board.post(Post("0", 1, "old", ""), 1.0, must_leave=True).leave is True
    assert board.post(Post("0", 1, "new", ""), 2.0, must_leave=True).leave is False
    assert board.post(Post("0", 1, "new", ""), 3.0, must_leave=True).leave is False
    assert board.post(Post("0", 2, "late", ""), 3.0, must_leave=True).leave is True
    board.post(Post("0", 1, "new", ""), 4.0)
    assert board.post(Post("0", 1, "new", ""), 5.0, must_leave=True).leave is True, "the next order"
