from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.routing.queue import FairQueue, QueueEntry, WaitingQueue
from penstock.spec.gateway import QueueBounds


def entry(flow: str, arrival: int, priority: int = 0) -> QueueEntry:
    return QueueEntry("m", flow.encode(), (priority, arrival), 0)


def drain(queue: FairQueue, n_tickets: int = 1000) -> str:
    out: list[str] = []
    while len(out) < n_tickets and (popped := queue.pop()) is not None:
        out.append(popped.flow.decode())
    return "".join(out)


def test_newcomer_waits_behind_no_backlog_and_takes_nothing_from_others_by_credit_or_priority() -> None:
    queue = FairQueue()
    for arrival in range(9):
        queue.push(entry("a", arrival))
    assert drain(queue, 4) == "aaaa"
    for arrival in range(9, 12):
        queue.push(entry("b", arrival))
    assert drain(queue, 6) == "bababa"
    first, urgent, other = entry("c", 13), entry("c", 14, priority=-5), entry("d", 15)
    for each in (first, urgent, other):
        queue.push(each)
    served = [queue.pop() for _ in range(8)]
    assert [each for each in served if each in (first, urgent, other)] == [urgent, other, first]
    bounded = WaitingQueue(QueueBounds(n_requests=4))  # which one key cannot fill
    for flow in (b"a", b"b"):
        assert [bounded.enter("m", flow, 0, 0) is not None for _ in range(3)] == [True, True, False]


@settings(max_examples=200)
@given(
    backlog=st.integers(0, 60),
    steps=st.lists(st.sampled_from(["push a", "push b", "push c", "pop", "pop"]), max_size=120),
)
def test_no_key_starves(backlog: int, steps: list[str]) -> None:
    """While a key waits, no other key is served more than twice."""
    queue = FairQueue()
    waiting: dict[bytes, list[QueueEntry]] = {}
    n_passed: Counter[bytes] = Counter()

    for arrival, step in enumerate(["push a"] * backlog + steps):
        if step != "pop":
            new = entry(step[-1], arrival)
            waiting.setdefault(new.flow, []).append(new)
            queue.push(new)
            continue
        popped = queue.pop()
        for flow, rows in waiting.items():
            if popped in rows:
                rows.remove(popped)
                n_passed[flow] = 0
            elif rows:
                n_passed[flow] += 1
                assert n_passed[flow] <= 2 * (len(waiting) - 1)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.sampled_from(["push", "push", "pop", "leave"])))
)
def test_position_is_the_order_in_which_all_go_who_have_not_left(steps: list[tuple[str, int, str]]) -> None:
    queue, waiting = FairQueue(), list[QueueEntry]()
    for arrival, (flow, priority, step) in enumerate(steps):
        if step == "push":
            waiting.append(entry(flow, arrival, priority))
            queue.push(waiting[-1])
        elif step == "leave" and waiting:
            gone = waiting.pop(len(waiting) // 2)
            assert [queue.remove(gone) for _ in range(2)] == [True, False]
        elif (popped := queue.pop()) is not None:
            waiting.remove(popped)
    ahead = {id(each): queue.n_ahead(each) for each in waiting}
    order = list(iter(queue.pop, None))
    assert [ahead[id(each)] for each in order] == list(range(len(waiting)))
    assert [queue.n_ahead(each) for each in order] == [0] * len(order)
    assert queue.n_waiting == 0


async def test_ticket_that_found_nothing_keeps_its_place() -> None:
    queue = WaitingQueue()
    first, second = queue.enter("m", b"a", 0, 5), queue.enter("m", b"a", 0, 5)
    assert first is not None
    assert second is not None
    queue.wake("m", 1)
    assert await queue.wait(first, 0)
    assert queue.waiting == 1
    queue.return_to_queue(first)
    assert not await queue.wait(first, 0)
    queue.wake("m", 1)
    assert await queue.wait(first, 0)
    queue.leave(first)
    queue.leave(second)
    assert (queue.waiting, queue._n_bytes) == (0, 0)
