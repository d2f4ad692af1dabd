"""Nodes of one replica meet on a real board, start together, and all notice when one is lost.

The board is the gateway's, in this process; stand-ins take the place of engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest
from samples import cpu_machine, demo_plan
from waiting import left_s, until

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
from penstock.spec.deployment import Parallel
from penstock.wire.announcement import MachineReading, Post
from penstock.wire.answers import NoAnswer

pytestmark = pytest.mark.loopback

LAN = (Interface("eth0", "0.0.0.0", 0), Interface("eth0", "10.0.0.2", 0))  # rank 0 binds a port
PLAN = demo_plan("fake", n_nodes=2, layout=Parallel(tensor=2), executor="mp", drain_s=2.0)


class Gateway:
    """The gateway's admin address, as a node calls it; `is_down` cuts it off."""

    def __init__(self) -> None:
        self.board = RankBoard(time.monotonic() - 100.0)
        self.is_down = False
        self._lock = threading.Lock()

    def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.is_down:
            raise NoAnswer("the gateway is away")
        with self._lock:
            view = self.board.post(msgspec.convert(body, Post), time.monotonic())
        answer: dict[str, Any] = msgspec.to_builtins(view)
        return answer


class StandIn:
    """What a node runs."""

    tail = ("ERROR: torch.OutOfMemoryError: CUDA out of memory",)

    def __init__(self) -> None:
        self.code: int | None = None
        self.is_ended, self.n_looks, self.engine = False, 0, self

    def exit_code(self) -> int | None:
        return self.code

    def end(self, grace_s: float) -> None:
        self.is_ended = True

    def look(self) -> None:
        self.n_looks += 1


def introduction(host: str, **versions: str) -> Introduction:
    machine = msgspec.structs.replace(cpu_machine(), versions={"vllm": "0.33.0"} | versions)
    return Introduction(NodeFacts(host, machine, (LAN[host == "beta"],), 1 << 30))


class Second:
    """The second node, in a thread. `vanish` is power loss."""

    def __init__(self, gateway: Gateway, **versions: str) -> None:
        self.started: list[StandIn] = []
        self.board, self.is_told_ready = board_client(gateway, 1), threading.Event()

        def start(_: Formation) -> Any:
            self.started.append(StandIn())
            return self.started[-1]

        self.member = GroupMember(
            *(PLAN, self.board, engines.load("vllm"), lambda _: introduction("beta", **versions), start),
            *(self.is_told_ready.set, ReadyFile()),
        )
        self.thread = threading.Thread(target=self.member.run, daemon=True)
        self.thread.start()

    def vanish(self) -> None:
        self.board.post = lambda epoch, **content: None  # type: ignore[method-assign]
        cut_off(self.board)
        self.member.stops = 2

    def left(self) -> bool:
        return not self.thread.is_alive()


def cut_off(board: BoardClient) -> None:
    down = Gateway()
    down.is_down = True
    connect(board, down)


def connect(board: BoardClient, gateway: Any) -> None:
    board._admin = gateway


def board_client(gateway: Gateway, rank: int) -> BoardClient:
    board = BoardClient(gateway, "0", rank, lambda: None)  # type: ignore[arg-type]
    board.start()
    return board


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is silent for one second, not six, is gone."""
    monkeypatch.setattr(rendezvous, "GONE_AFTER_S", 1.0)
    monkeypatch.setattr(rendezvous, "_POST_EVERY_S", 0.1)
    monkeypatch.setattr(member, "_LOOK_EVERY_S", 0.1)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def second_of(gateway: Gateway) -> Iterator[Callable[..., Second]]:
    nodes: list[Second] = []

    def start(**versions: str) -> Second:
        nodes.append(Second(gateway, **versions))
        return nodes[-1]

    yield start
    for node in nodes:
        node.member.stops = 2
        node.thread.join(5)
        assert node.left()


class Group(NamedTuple):
    gateway: Gateway
    leader: GroupLeader
    second: Second


@pytest.fixture
def group(gateway: Gateway, second_of: Callable[..., Second]) -> Group:
    """Two nodes that have formed."""
    group = Group(gateway, leader_of(gateway), second_of())
    formed(group.leader)
    return group


def leader_of(gateway: Gateway) -> GroupLeader:
    return GroupLeader(PLAN, board_client(gateway, 0), ("alpha", "beta"), lambda: False)


def formed(leader: GroupLeader, patience_s: float | None = 10.0) -> None:
    formation = leader.form(introduction("alpha"), patience_s, lambda what, nodes: None)
    assert isinstance(formation, Formation), formation
    assert leader.go(formation) is None


def trouble(leader: GroupLeader) -> str:
    """The reason, once there is one."""
    return until(leader.trouble, "trouble").reason  # type: ignore[union-attr]


def test_two_nodes_form_and_go_hear_that_the_engine_serves_and_form_again_in_the_next_epoch(group: Group) -> None:
    _, leader, second = group
    assert leader.trouble() is None
    views = [(view.host, view.address, view.interface, view.state, view.ranks) for view in leader.views()]
    assert views == [("alpha", "0.0.0.0", "eth0", "here", (0,)), ("beta", "10.0.0.2", "eth0", "here", (1,))]
    assert not second.is_told_ready.is_set()
    leader.post_ready()
    assert second.is_told_ready.wait(left_s())
    assert leader.trouble() is None and len(second.started) == 1
    leader.over()
    until(lambda: second.started[0].is_ended, "the end of the epoch ends its engine")
    formed(leader)
    assert [engine.is_ended for engine in second.started] == [True, False]


def test_a_missing_node_is_named_and_awaited_only_so_long(gateway: Gateway) -> None:
    stages: list[tuple[str, list[str]]] = []
    diagnosis = leader_of(gateway).form(
        introduction("alpha"), 0.5, lambda what, nodes: stages.append((what, [node.state for node in nodes]))
    )
    assert isinstance(diagnosis, Diagnosis) and diagnosis.is_final
    assert diagnosis.reason.startswith("beta (node 1) did not join within")
    assert stages[0] == ("waiting for beta (node 1)", ["here", "waiting"])


def test_a_node_that_vanishes_is_named_and_can_come_back(group: Group, second_of: Callable[..., Second]) -> None:
    _, leader, second = group
    second.vanish()
    assert trouble(leader) == "node 1 beta (10.0.0.2) does not answer any more"
    assert [view.state for view in leader.views()] == ["here", "gone"]
    again = second_of()
    formed(leader, patience_s=None)
    assert len(again.started) == 1


def test_a_node_that_was_started_again_ends_the_epoch_at_once(group: Group, second_of: Callable[..., Second]) -> None:
    group.second.vanish()
    again = second_of()
    assert trouble(group.leader) == "node 1 beta (10.0.0.2) was started again"
    assert again.started == [], "it does not join what runs already"


def test_a_part_that_dies_tells_why(group: Group) -> None:
    group.second.started[0].code = 1
    reason = trouble(group.leader)
    assert reason.startswith("node 1 beta: vLLM exited with code 1")
    assert "out of memory" in reason.lower()


def test_a_leader_that_was_silent_while_they_form_goes_on_with_its_epoch(gateway: Gateway, second_of: Any) -> None:
    leader, second, has_model = leader_of(gateway), second_of(), threading.Event()

    def introduce(_: object) -> Introduction:
        has_model.wait()
        return introduction("beta")

    second.member._introduce = introduce
    forming = threading.Thread(target=formed, args=(leader, None))
    forming.start()
    until(lambda: second.board.posts() and leader._board.posts()[1].post.epoch, "the second prepares")
    cut_off(leader._board)
    until(lambda: leader._epoch not in second.member._last, "the first is gone for the second")
    connect(leader._board, gateway)
    has_model.set()
    forming.join(left_s())
    assert not forming.is_alive() and len(second.started) == 1


def test_a_node_that_leaves_a_group_that_formed_ends_the_epoch(group: Group) -> None:
    cut_off(group.leader._board)
    until(lambda: group.second.started[0].is_ended, "the part of a vanished leader is ended")
    connect(group.leader._board, group.gateway)
    assert trouble(group.leader) == "node 1 beta (10.0.0.2) has left the group"


def test_versions_that_differ_are_refused_before_anything_starts(
    gateway: Gateway, second_of: Callable[..., Second]
) -> None:
    second = second_of(vllm="0.32.0")
    diagnosis = leader_of(gateway).form(introduction("alpha"), 10.0, lambda what, nodes: None)
    assert isinstance(diagnosis, Diagnosis) and diagnosis.is_final
    assert diagnosis.reason == "vllm is 0.32.0 on beta (rank 1), 0.33.0 on alpha (rank 0)"
    assert second.started == []


def test_a_gateway_that_is_away_is_no_loss_of_a_node(group: Group) -> None:
    gateway, leader, second = group
    gateway.is_down = True
    until(lambda: leader._board.silence_s() > 2.0, "a silence that is too long for a node")
    assert leader.trouble() is None
    gateway.board = RankBoard(time.monotonic())  # another process: it knows no node
    gateway.is_down = False
    until(lambda: len(leader._board.posts()) == 1, "the other has posted again")
    until(leader._board.can_judge, "who is missing from this board is gone")
    assert leader.trouble() is None
    assert not second.started[0].is_ended


def test_a_leader_that_vanishes_ends_the_part_and_another_takes_over(group: Group) -> None:
    cut_off(group.leader._board)
    until(lambda: group.second.started[0].is_ended, "the part of a vanished leader is ended")
    formed(leader_of(group.gateway))
    assert len(group.second.started) == 2


def test_a_node_that_is_stopped_when_the_gateway_is_gone_too_leaves(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_GATEWAY_GONE_S", 0.5)
    gateway, _, second = group
    gateway.is_down = True
    until(lambda: second.board.silence_s() > 1.0, "the gateway is gone")
    assert not second.started[0].is_ended, "it was not stopped"
    second.member.stop()
    until(second.left, "it does not wait for a post that cannot come")
    assert second.started[0].is_ended


@pytest.mark.parametrize("ends", [True, False])
def test_a_node_that_is_stopped_keeps_its_part_until_the_first_has_drained_or_the_drain_is_over(
    group: Group, ends: bool
) -> None:
    part = group.second.started[0]
    group.second.member.stop()
    n_looks = part.n_looks
    until(lambda: part.n_looks > n_looks + 2 or part.is_ended, "it looks after its part")
    assert not part.is_ended
    if ends:
        group.leader.over("stopping")
    until(group.second.left, "it leaves with the first, or after drain_s")
    assert part.is_ended


def test_the_board_forgets_what_is_not_renewed() -> None:
    board = RankBoard(0.0)
    for post, at in ((Post("0", 0, "a", "e"), 0.0), (Post("1", 0, "b", "e"), 1.0)):
        board.post(post, at)
    view = board.post(Post("0", 1, "c", "e"), FORGET_AFTER_S + 2.0)
    assert [row.post.rank for row in view.posts] == [1]
    assert view.age_s == FORGET_AFTER_S + 2.0


def test_an_order_to_leave_is_not_for_the_process_that_replaces_one_that_left() -> None:
    board = RankBoard(0.0)
    looks = [
        (1, "old", False, False),
        (1, "old", True, True),
        (1, "new", True, False),
        (1, "new", True, False),
        (2, "late", True, True),
        (1, "new", False, False),
        (1, "new", True, True),  # the next order
    ]
    for now, (rank, instance, must_leave, leaves) in enumerate(looks):
        assert board.post(Post("0", rank, instance, ""), float(now), must_leave=must_leave).leave is leaves


def test_the_leader_has_the_readings_of_the_other_nodes(gateway: Gateway) -> None:
    leader = leader_of(gateway)
    second = BoardClient(gateway, "0", 1, lambda: None, lambda: MachineReading("beta", cpu_use=0.5))  # type: ignore[arg-type]
    second.start()
    leader._board.post("e", phase="gather")
    second.post("", phase="here")
    until(lambda: leader.machines() == (MachineReading("beta", cpu_use=0.5),), "the readings of beta")
