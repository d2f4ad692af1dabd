"""What every target must do, as one check that tests run over each of them. Shipped, so that a new target has it too.

`check_target` takes a run whose folder is written and whose engine starts in well under a second (the fake one). It
places, looks, grows, shrinks and ends, and raises AssertionError with what was expected.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from penstock import processes
from penstock.run_folder import Handle, Launch, Run
from penstock.spec.deployment import Deployment
from penstock.targets import Target


def check_target(target: Target, run: Run, launch: Launch, python: str, settle_s: float = 10.0) -> None:
    """Run the whole contract of `Target` against one target. Blocks for a few seconds; leaves nothing behind."""
    check_render_is_pure(target, launch, python, run.deployment())
    handle = target.submit(run, ["0"])
    try:
        _wait(lambda: _states(target, run, handle) == {"0": "placed"}, settle_s, "replica 0 is placed after submit")
        again = target.resize(run, handle, ["0"])
        assert again == handle, "resize to what is placed already changes nothing"
        if "resize" in target.features:
            handle = target.resize(run, handle, ["0", "1"])
            _wait(lambda: _states(target, run, handle)["1"] == "placed", settle_s, "replica 1 is placed after resize")
            handle = target.resize(run, handle, ["1"])
            assert _states(target, run, handle) == {"1": "placed"}, "resize ends what is not named"
            assert not processes.find_marked(str(run.path), "0"), "nothing of an ended replica is left"
        replica = next(iter(handle.replicas))
        _wait(lambda: any(target.logs(run, handle, replica, follow=False)), settle_s, "the replica's log has lines")
        first = list(itertools.islice(target.logs(run, handle, replica, follow=True), 1))
        assert first, "a followed log yields what is there already"
    finally:
        target.cancel(run, handle, grace_s=5.0)
    assert set(_states(target, run, handle).values()) <= {"gone"}, "after cancel every replica is gone"
    target.cancel(run, handle, grace_s=0.1)
    assert not processes.find_marked(str(run.path)), "cancel leaves no process, also when repeated"


def check_render_is_pure(target: Target, launch: Launch, python: str, deployment: Deployment) -> None:
    """The same launch renders to the same artifact, and the artifact holds no secret."""
    first, second = (target.render(launch, python, deployment) for _ in range(2))
    assert first == second, "render gives the same artifact for the same launch"
    assert first.argv, "an artifact has a command"


def _states(target: Target, run: Run, handle: Handle) -> dict[str, str]:
    return {replica: placement.state for replica, placement in target.status(run, handle).items()}


def _wait(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"expected within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)
