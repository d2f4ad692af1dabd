"""Nodes of one replica meet on a real board, start together, and all notice when one is lost.

The board is the gateway's, without its wire; stand-ins take the place of engines. Threads run in virtual time, in an
order that a seed decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest
from samples import cpu_machine, demo_plan
from simulation_world import Machine

from penstock import engines
from penstock.engines import Diagnosis
from penstock.gateway.board import FORGET_AFTER_S, RankBoard
from penstock.hardware import Interface, NodeFacts
from penstock.node.group import leader as group_leader
from penstock.node.group.addresses import Formation, Introduction
from penstock.node.group.leader import GroupLeader
from penstock.node.group.member import GroupMember
from penstock.node.group.rendezvous import GONE_AFTER_S, BoardClient
from penstock.node.ready_file import ReadyFile
from penstock.spec.deployment import Parallel
from penstock.wire.announcement import MachineReading, Post
from penstock.wire.answers import NoAnswer

T = TypeVar("T")

LAN = (Interface("eth0", "0.0.0.0", 0), Interface("eth0", "10.0.0.2", 0))
PLAN = demo_plan("fake", n_nodes=2, layout=Parallel(tensor=2), executor="mp", drain_s=20.0)
LIMIT_S = 600.0


class Gateway:
    """The gateway's admin address, as a node calls it; `is_down` cuts it off."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.world = machine, machine.init.world
        self.board = RankBoard(machine.time_s - 100.0)
        self.is_down = False

    def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.machine.step(0.002)
        if self.is_down:
            raise NoAnswer("the gateway is away")
        view = self.board.post(msgspec.convert(body, Post), self.machine.time_s)
        answer: dict[str, Any] = msgspec.to_builtins(view)
        return answer

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Let time pass until the condition is true; its value."""
        ends_at = self.machine.time_s + LIMIT_S
        while not (value := condition()):
            assert self.machine.time_s < ends_at, what
            self.machine.run(self.machine.time_s + 0.01, lambda: None)
        return value

    def call(self, blocking: Callable[[], T]) -> T:
        """What a call that blocks returns."""
        results: list[T] = []
        task = self.machine.task(self.machine.init, lambda: results.append(blocking()), "test")
        self.until(lambda: task.is_over, "the call ends")
        return results[0]


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
    """The second node. `vanish` is power loss."""

    def __init__(self, gateway: Gateway, **versions: str) -> None:
        self.started: list[StandIn] = []
        self.board, self.is_told_ready = board_client(gateway, 1), gateway.world.event()
        self._exit_codes: list[int] = []

        def start(_: Formation) -> Any:
            self.started.append(StandIn())
            return self.started[-1]

        self.member = GroupMember(
            *(PLAN, self.board, engines.load("vllm"), lambda _: introduction("beta", **versions), start),
            *(self.is_told_ready.set, ReadyFile()),
        )
        gateway.world.thread(lambda: self._exit_codes.append(self.member.run()), "member")

    def vanish(self) -> None:
        self.board.post = lambda epoch, **content: None  # type: ignore[method-assign]
        cut_off(self.board)
        self.member.stops = 2

    def left(self) -> bool:
        return self._exit_codes == [0]


class NoGateway:
    def post_json(self, path: str, body: object) -> Any:
        raise NoAnswer("the gateway is away")


def cut_off(board: BoardClient) -> None:
    connect(board, NoGateway())


def connect(board: BoardClient, gateway: Any) -> None:
    board._admin = gateway


def board_client(gateway: Gateway, rank: int) -> BoardClient:
    board = BoardClient(gateway, "0", rank, lambda: None, world=gateway.world)  # type: ignore[arg-type]
    board.start()
    return board


@pytest.fixture(params=range(5))
def gateway(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(group_leader, "free_port", lambda host, taken=(): 29500)
    machine = Machine(seed=request.param)
    yield Gateway(machine)
    machine.discard()


class Group(NamedTuple):
    gateway: Gateway
    leader: GroupLeader
    second: Second


@pytest.fixture
def group(gateway: Gateway) -> Group:
    """Two nodes that have formed."""
    group = Group(gateway, leader_of(gateway), Second(gateway))
    gateway.call(lambda: formed(group.leader))
    return group


def leader_of(gateway: Gateway) -> GroupLeader:
    return GroupLeader(PLAN, board_client(gateway, 0), ("alpha", "beta"), lambda: False)


def formed(leader: GroupLeader, patience_s: float | None = 10.0) -> None:
    formation = leader.form(introduction("alpha"), patience_s, lambda what, nodes: None)
    assert isinstance(formation, Formation), formation
    assert leader.go(formation) is None


def trouble(group: Group) -> str:
    """The reason, once there is one."""
    return group.gateway.until(group.leader.trouble, "trouble").reason  # type: ignore[union-attr]


def test_two_nodes_form_and_go_hear_that_the_engine_serves_and_form_again_in_the_next_epoch(group: Group) -> None:
    gateway, leader, second = group
    assert leader.trouble() is None
    views = [(view.host, view.address, view.interface, view.state, view.ranks) for view in leader.views()]
    assert views == [("alpha", "0.0.0.0", "eth0", "here", (0,)), ("beta", "10.0.0.2", "eth0", "here", (1,))]
    assert not second.is_told_ready.is_set()
    leader.post_ready()
    gateway.until(second.is_told_ready.is_set, "the second hears that the engine serves")
    assert leader.trouble() is None and len(second.started) == 1
    leader.over()
    gateway.until(lambda: second.started[0].is_ended, "the end of the epoch ends its engine")
    gateway.call(lambda: formed(leader))
    assert [engine.is_ended for engine in second.started] == [True, False]


def test_a_missing_node_is_named_and_awaited_only_so_long(gateway: Gateway) -> None:
    stages: list[tuple[str, list[str]]] = []
    leader = leader_of(gateway)
    diagnosis = gateway.call(
        lambda: leader.form(
            introduction("alpha"), 30.0, lambda what, nodes: stages.append((what, [node.state for node in nodes]))
        )
    )
    assert isinstance(diagnosis, Diagnosis) and diagnosis.is_final
    assert diagnosis.reason.startswith("beta (node 1) did not join within 30 s")
    assert stages[0] == ("waiting for beta (node 1)", ["here", "waiting"])


def test_a_node_that_vanishes_is_named_and_can_come_back(group: Group) -> None:
    gateway, leader, second = group
    second.vanish()
    assert trouble(group) == "node 1 beta (10.0.0.2) does not answer any more"
    assert [view.state for view in leader.views()] == ["here", "gone"]
    again = Second(gateway)
    gateway.call(lambda: formed(leader, patience_s=None))
    assert len(again.started) == 1


def test_a_node_that_was_started_again_ends_the_epoch_at_once(group: Group) -> None:
    group.second.vanish()
    again = Second(group.gateway)
    assert trouble(group) == "node 1 beta (10.0.0.2) was started again"
    assert again.started == [], "it does not join what runs already"


def test_a_part_that_dies_tells_why(group: Group) -> None:
    group.second.started[0].code = 1
    reason = trouble(group)
    assert reason.startswith("node 1 beta: vLLM exited with code 1")
    assert "out of memory" in reason.lower()


def test_a_leader_that_was_silent_while_they_form_goes_on_with_its_epoch(gateway: Gateway) -> None:
    leader, second, has_model = leader_of(gateway), Second(gateway), gateway.world.event()

    def introduce(_: object) -> Introduction:
        has_model.wait()
        return introduction("beta")

    second.member._introduce = introduce
    forming = gateway.world.thread(lambda: formed(leader, None), "forming")
    gateway.until(lambda: any(row.post.epoch for row in leader._board.posts().values()), "the second prepares")
    cut_off(leader._board)
    gateway.until(lambda: leader._epoch not in second.member._last, "the first is gone for the second")
    connect(leader._board, gateway)
    has_model.set()
    gateway.until(lambda: not forming.is_alive(), "the group has formed")
    assert len(second.started) == 1


@pytest.mark.parametrize("returns", ["while the part ends", "later"])
def test_a_node_that_leaves_a_group_that_formed_ends_the_epoch(group: Group, returns: str) -> None:
    gateway, leader, second = group
    part = second.started[0]

    def come_back(grace_s: float) -> None:
        connect(leader._board, gateway)
        gateway.world.sleep(3.0)

    if returns == "while the part ends":
        part.end = come_back  # type: ignore[method-assign]
    cut_off(leader._board)
    if returns == "later":
        gateway.until(lambda: part.is_ended, "the part of a vanished leader is ended")
        connect(leader._board, gateway)
    assert trouble(group) == "node 1 beta (10.0.0.2) has left the group"


def test_versions_that_differ_are_refused_before_anything_starts(gateway: Gateway) -> None:
    leader, second = leader_of(gateway), Second(gateway, vllm="0.32.0")
    diagnosis = gateway.call(lambda: leader.form(introduction("alpha"), 10.0, lambda what, nodes: None))
    assert isinstance(diagnosis, Diagnosis) and diagnosis.is_final
    assert diagnosis.reason == "vllm is 0.32.0 on beta (rank 1), 0.33.0 on alpha (rank 0)"
    assert second.started == []


def test_a_gateway_that_is_away_is_no_loss_of_a_node(group: Group) -> None:
    gateway, leader, second = group
    gateway.is_down = True
    gateway.until(lambda: leader._board.silence_s() > 2 * GONE_AFTER_S, "a silence that is too long for a node")
    assert leader.trouble() is None
    gateway.board = RankBoard(gateway.world.now())  # another process: it knows no node
    gateway.is_down = False
    gateway.until(lambda: len(leader._board.posts()) == 1, "the other has posted again")
    gateway.until(leader._board.can_judge, "who is missing from this board is gone")
    assert leader.trouble() is None
    assert not second.started[0].is_ended


def test_a_leader_that_vanishes_ends_the_part_and_another_takes_over(group: Group) -> None:
    gateway, leader, second = group
    cut_off(leader._board)
    gateway.until(lambda: second.started[0].is_ended, "the part of a vanished leader is ended")
    another = leader_of(gateway)
    gateway.call(lambda: formed(another))
    assert len(second.started) == 2


def test_a_node_that_is_stopped_when_the_gateway_is_gone_too_leaves(group: Group) -> None:
    gateway, _, second = group
    gateway.is_down = True
    gateway.until(lambda: second.board.silence_s() > 60.0, "the gateway is gone")
    assert not second.started[0].is_ended, "it was not stopped"
    second.member.stop()
    gateway.until(second.left, "it does not wait for a post that cannot come")
    assert second.started[0].is_ended


@pytest.mark.parametrize("ends", [True, False])
def test_a_node_that_is_stopped_keeps_its_part_until_the_first_has_drained_or_the_drain_is_over(
    group: Group, ends: bool
) -> None:
    gateway, leader, second = group
    part = second.started[0]
    second.member.stop()
    n_looks = part.n_looks
    gateway.until(lambda: part.n_looks > n_looks + 2 or part.is_ended, "it looks after its part")
    assert not part.is_ended
    if ends:
        leader.over("stopping")
    gateway.until(second.left, "it leaves with the first, or after drain_s")
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
    leader, readings = leader_of(gateway), (MachineReading("beta", cpu_use=0.5),)
    second = BoardClient(gateway, "0", 1, lambda: None, lambda: readings[0], gateway.world)  # type: ignore[arg-type]
    second.start()
    leader._board.post("e", phase="gather")
    second.post("", phase="here")
    gateway.until(lambda: leader.machines() == readings, "the readings of beta")
