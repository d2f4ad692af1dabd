"""What a run's status means for its units, and how its log becomes theirs; no process, no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from penstock.errors import PenstockError
from penstock.run_folder import Unit, replica
from penstock.targets.vessl import log_lines
from penstock.targets.vessl.api import Api, Endpoint, Endpoints, Execution, LogLine
from penstock.targets.vessl.words import Silence, ended, placement
from penstock.wire.container import ContainerView

VIEW = ContainerView("0", units={"replica/0": None, "replica/1": "its node process 7 is gone"})


def facts(
    status: str, view: ContainerView | None = None, silence: Silence | None = None, **more: Any
) -> tuple[Any, ...]:
    place = placement(more.pop("unit", "replica/0"), Execution(7, status, **more), view, False, silence)
    return place.state, place.reason, place.is_final


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("queued", ("queued", "waits for a machine", False)),
        ("pending", ("queued", "waits for a machine", False)),
        ("initializing", ("queued", "pulls the image and what it imports (charged)", False)),
        ("running", ("queued", "its container starts", False)),
        ("stopping", ("queued", "its container starts", False)),
        ("idle", ("gone", "run 7 is idle and still charged: terminate it", False)),
        ("failed", ("gone", "VESSL ended run 7 as failed", False)),
        ("terminated", ("gone", "VESSL ended run 7 as terminated", True)),
        ("hibernating", ("queued", "VESSL calls its run hibernating; its container starts", False)),
    ],
)
def test_each_status_of_vessl_has_a_meaning(status: str, expected: tuple[Any, ...]) -> None:
    assert facts(status) == expected


def test_the_reason_of_vessl_is_shown_and_what_the_container_tells_counts_while_it_runs() -> None:
    assert facts("pending", status_reason="no L4 in this region")[1] == "waits for a machine: no L4 in this region"
    assert facts("failed", status_reason="exit code 1")[1] == "VESSL ended run 7 as failed: exit code 1"
    assert placement("replica/0", None, None, False).state == "gone"
    assert facts("running", VIEW) == facts("running", VIEW, unit="gateway/0") == ("placed", None, False)
    assert facts("running", VIEW, unit="replica/1") == ("gone", "its node process 7 is gone", False)
    assert facts("running", VIEW, unit="replica/2") == ("gone", "it was ended", False)
    fetching = ContainerView("0", stage="fetching the model: 40 %")
    assert facts("running", fetching) == ("queued", "fetching the model: 40 %", False)
    refused = ContainerView("0", stage="starting", refusal="no GPU here")
    assert facts("running", refused) == ("queued", "no GPU here", True)
    silence = Silence("no answer within 5 s", was_heard=True)
    assert facts("running", None, silence) == ("placed", "no answer within 5 s", False)
    assert facts("running", None, Silence("refused", was_heard=False))[0] == "queued"


def test_a_spot_machine_that_was_taken_away_is_called_a_reclaim() -> None:
    assert "most likely a reclaim" in ended(Execution(7, "failed", "node was preempted"), True)
    assert "reclaim" not in ended(Execution(7, "failed", "exit code 1"), False)
    assert "vessl.max_hours" in ended(Execution(7, "completed"), True)


def test_an_address_counts_once_its_port_is_open() -> None:
    def address(**more: Any) -> str | None:
        return Execution(7, endpoints=Endpoints((Endpoint("gateway", 8000, "http", **more),))).address("gateway")

    assert address() is None and address(endpoint="") is None and Execution(7).address("gateway") is None
    assert address(endpoint="https://x.example.org/", is_port_opened=False) is None
    assert address(endpoint="https://x.example.org/") == "https://x.example.org"
    assert address(endpoint="x.example.org", is_port_opened=True) == "https://x.example.org"


# ---- logs ------------------------------------------------------------------------------------------------------------


class LogApi:
    """Lines that are there by the clock of the test; each look is one call."""

    def __init__(self, lines: Sequence[tuple[float, float, str]]) -> None:
        self.lines, self.now, self.n_errors = lines, 100.0, 0

    def logs(self, execution_id: int, since: float) -> list[LogLine]:
        assert execution_id == 7
        if since and self.n_errors:
            self.n_errors -= 1
            raise PenstockError("away", is_retryable=True)
        rows = [LogLine(text, at) for at, seen_at, text in self.lines if at >= since and seen_at <= self.now]
        return sorted(rows, key=lambda row: row.timestamp)


def test_a_units_lines_are_those_with_its_part_in_front() -> None:
    rows = [(1.0, 0.0, "[replica-0] a\n[gateway] g"), (2.0, 0.0, "penstock: x"), (3.0, 0.0, "[replica-0] b")]
    rows += [(4.0, 0.0, "[replica-01] no")]
    api = cast(Api, LogApi(rows))

    def lines(unit: Unit, last: int | None = None) -> list[str]:
        return list(log_lines.lines(lambda since: api.logs(7, since), unit, False, last, lambda: True))

    assert lines(replica("0")) == ["a", "b"] and lines(replica("0"), 1) == ["b"] and lines(replica("0"), 0) == []
    assert lines(Unit("gateway", "0")) == ["g"] and lines(replica("0"), 9) == ["a", "b"]


def test_a_followed_log_waits_for_late_lines_and_keeps_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of 98 s can be read after that of 99 s."""
    api = LogApi([(90.0, 0.0, "[replica-0] a"), (99.0, 99.0, "[replica-0] c"), (98.0, 102.0, "[replica-0] b")])
    api.n_errors = 2
    looks = iter(range(100))

    def has_ended() -> bool:
        api.now += 2.0
        return next(looks) > 5

    monkeypatch.setattr(log_lines, "_clock", lambda: api.now)
    monkeypatch.setattr(log_lines, "_sleep", lambda _: None)
    ask = cast(Api, api).logs
    lines = log_lines.lines(lambda since: ask(7, since), replica("0"), True, None, has_ended)
    assert list(lines) == ["a", "b", "c"]
