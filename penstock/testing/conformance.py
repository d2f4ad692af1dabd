"""What every target must do, as one check that tests run over each of them.

`check_target` takes a run whose folder is written and whose engine starts at once (the fake one).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import get_args

from penstock.run_folder import Handle, Launch, Run, Unit, replica
from penstock.spec.deployment import Deployment
from penstock.targets import Capability, Placement, Target

# What is left of a run in the target's own eyes: processes, jobs, folders, in words.
Leftovers = Callable[[], Sequence[str]]

_SURVEY_S = 60.0
_WAIT_S = 60.0  # ends a hang
_ZERO, _ONE, _GATEWAY = replica("0"), replica("1"), Unit("gateway", "0")


def check_target(target: Target, run: Run, launch: Launch, python: str, leftovers: Leftovers) -> None:
    """Run the whole contract of `Target` against one target. Blocks for a few seconds; leaves nothing behind."""
    check_render_is_pure(target, launch, python, run.deployment())
    assert target.capabilities <= set(get_args(Capability)), "every capability is one that penstock knows"
    assert target.check(run.deployment()) == [], "a deployment that can be placed has no problems"
    assert target.machines(run.deployment()), "a target has machines"
    check_survey(target, run.deployment())
    try:
        handle = _place(target, run, _ZERO)
        _wait(lambda: _states(target, run) == {_ZERO: "placed"}, "replica 0 is placed")
        assert _place(target, run, _ZERO) == handle, "placing what is placed changes nothing"
        _place(target, run, _ZERO, _ONE)
        _wait(lambda: _states(target, run).get(_ONE) == "placed", "replica 1 is placed too")
        _place(target, run, _ONE)
        assert _states(target, run) == {_ONE: "placed"}, "what is not named is ended"
        if "places-gateway" in target.capabilities:
            _check_gateway(target, run)
        _check_logs(target, run)
        target.keep_up(run)
    finally:
        target.end(run, grace_s=5.0)
    assert set(_states(target, run).values()) <= {"gone"}, "after the end every unit is gone"
    target.end(run, grace_s=0.1)
    _wait(lambda: not leftovers(), f"an end leaves nothing, also when repeated: {leftovers()}")
    check_damaged_run_ends(target, run, leftovers)


def check_render_is_pure(target: Target, launch: Launch, python: str, deployment: Deployment) -> None:
    first, second = (target.render(launch, python, deployment) for _ in range(2))
    assert first == second, "render gives the same artifact for the same launch"
    assert first.files, "an artifact has files"


def check_survey(target: Target, deployment: Deployment) -> None:
    """The capability "survey": a program runs on every node, and says what it printed there."""
    if "survey" not in target.capabilities:
        return
    rows = target.survey(deployment, ["-c", "import sys; print(6 * 7, sys.argv[1])", "{rank}"], _SURVEY_S)
    answers = [(row.exit_code, row.out.split()) for row in rows]
    assert answers == [(0, ["42", str(rank)]) for rank in range(len(rows))], f"every node answers: {rows}"


def check_damaged_run_ends(target: Target, run: Run, leftovers: Leftovers) -> None:
    run.write_handle(Handle(target.name))
    try:
        _place(target, run, _ZERO)
        _wait(lambda: _states(target, run) == {_ZERO: "placed"}, "replica 0 is placed after an end")
        assert leftovers(), "what runs is seen by `leftovers`"
        (run.path / "handle.json").write_text('{"target": ')
    finally:
        target.end(run, grace_s=5.0)
    _wait(lambda: not leftovers(), f"an end without a handle leaves nothing: {leftovers()}")


def _check_logs(target: Target, run: Run) -> None:
    _wait(lambda: any(target.logs(run, _ONE, follow=False)), "the replica's log has lines")
    first = list(itertools.islice(target.logs(run, _ONE, follow=True), 1))
    assert first, "a followed log yields what is there already"


def _check_gateway(target: Target, run: Run) -> None:
    """The capability "places-gateway": it runs, has written its address, and is ended when it is not named."""
    _place(target, run, _ONE, _GATEWAY)
    _wait(lambda: _states(target, run).get(_GATEWAY) == "placed", "the gateway is placed")
    _wait(run.gateway_address_file.exists, "the gateway has written its address")
    assert run.gateway_address().unit == _GATEWAY.name, "the address tells which gateway it is of"
    _check_logs(target, run)  # a node may wait for the gateway before it starts its engine
    _place(target, run, _ONE)
    assert _GATEWAY not in _states(target, run), "a gateway that is not named is ended"


def _place(target: Target, run: Run, *units: Unit) -> Handle:
    handle = target.place(run, units)
    run.write_handle(handle)
    return handle


def _states(target: Target, run: Run) -> dict[Unit, str]:
    placements: dict[Unit, Placement] = target.status(run)
    return {unit: placement.state for unit, placement in placements.items()}


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"expected within {_WAIT_S:.0f} s: {what}"
        time.sleep(0.05)
