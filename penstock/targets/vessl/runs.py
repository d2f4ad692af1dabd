"""The life of a deployment that is one run of VESSL: a container, which its control port shows and changes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Desired, Kind, Run, Unit, is_locked, no_address, order, unit_of
from penstock.spec.deployment import Deployment
from penstock.targets import Adopted, Placement
from penstock.targets.vessl import api, folder, log_lines, run_yaml, words
from penstock.targets.vessl.api import Api, Execution
from penstock.targets.vessl.connections import Connections
from penstock.targets.vessl.run_yaml import block_of
from penstock.targets.waiting import wait
from penstock.wire.client import Client
from penstock.wire.container import PATH, ContainerView, End, Named

_FRESH_S = 1.0
_CONTROL_S, _CHANGE_S = 5.0, 120.0
_ENDED_S = 120.0  # VESSL's own grace is not documented
_EXIT_S = 15.0  # after its drain, until VESSL has seen that it is over


class Look(msgspec.Struct, frozen=True):
    """What VESSL and the container said at a moment of the monotonic clock. `silence`: why the container did not."""

    at: float
    execution: Execution | None = None
    view: ContainerView | None = None
    silence: words.Silence | None = None


class Runs:
    """What `Target` asks of a run. Its methods keep the contract of those there."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._looks: dict[str, Look] = {}
        self._last: dict[str, dict[Unit, Placement]] = {}

    # ---- placing -----------------------------------------------------------------------------------------------------

    def place(self, run: Run, units: Collection[Unit]) -> None:
        asked = self._connections.of_run(run)
        execution = self._find(asked, run)
        if execution is None:
            self._create(asked, run)
        else:
            folder.note(run, asked.account, execution.id)
            self._change(run, execution, units)
        self._forget(run)

    def _create(self, asked: Api, run: Run) -> None:
        folder.note(run, asked.account, None)
        asked.write_secret(run_yaml.secret_of(run.name), folder.secret_value(run))
        try:
            made = asked.create(run.artifact().files[run_yaml.RUN_FILE])
        except PenstockError as exc:
            found = self._find(asked, run) if exc.is_retryable else None  # it may have been made
            if found is None:
                raise
            made = found.id
        folder.note(run, asked.account, made)

    def _change(self, run: Run, execution: Execution, units: Collection[Unit]) -> None:
        """Exactly these replicas in a run that is there; not before its container answers."""
        names = tuple(sorted(unit.name for unit in units if unit.kind == "replica"))
        before = {key for key in run.handle().units if unit_of(key).kind == "replica"}
        if not names or before == {f"replica/{name}" for name in names} or not run.handle().units:
            return
        self._control(run, execution, _CHANGE_S).post_json(f"{PATH}/replicas", Named(names))

    # ---- looking -----------------------------------------------------------------------------------------------------

    def status(self, run: Run) -> dict[Unit, Placement]:
        units = sorted(map(unit_of, run.handle().units), key=order)
        before = self._last.get(str(run.path), {})
        try:
            look = self._look(run)
        except PenstockError as exc:
            # What VESSL does not tell has not changed: the run goes on without it.
            unknown = Placement("placed", exc.message)
            return {unit: msgspec.structs.replace(before.get(unit, unknown), reason=exc.message) for unit in units}
        is_spot = block_of(run.deployment()).spot
        placements = {
            unit: words.placement(unit.key, look.execution, look.view, is_spot, look.silence) for unit in units
        }
        self._last[str(run.path)] = placements
        return placements

    def _look(self, run: Run) -> Look:
        known = self._looks.get(str(run.path))
        if known is not None and time.monotonic() - known.at < _FRESH_S:
            return known
        asked, note = self._connections.of_run(run), folder.note_of(run)
        number = None if note is None else note.id
        execution = self._find(asked, run) if number is None else asked.read(number)
        view, silence = None, None
        if execution is not None and execution.status == "running":
            folder.note_addresses(run, execution.address(run_yaml.GATEWAY), execution.address(run_yaml.PAGE))
            try:
                answer = self._control(run, execution, _CONTROL_S).get_json(PATH)
                view = msgspec.convert(answer, ContainerView)
            except (PenstockError, msgspec.ValidationError) as exc:
                is_old = run.state() is not None or not run.admin_token_file.exists()
                silence = words.Silence(str(exc), is_old or _was_heard(known, execution))
        look = self._looks[str(run.path)] = Look(time.monotonic(), execution, view, silence)
        return look

    def _forget(self, run: Run) -> None:
        """The last look is not of now any more."""
        look = self._looks.get(str(run.path))
        if look is not None:
            self._looks[str(run.path)] = msgspec.structs.replace(look, at=float("-inf"))

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        note = folder.note_of(run)
        if note is None or note.id is None:
            raise PenstockError(f'the run of "{run.name}" has no log yet', is_retryable=True)
        number, asked = note.id, self._connections.of_run(run)

        def has_ended() -> bool:
            execution = asked.read(number)
            return execution is None or execution.has_ended

        return log_lines.lines(lambda since: asked.logs(number, since), unit, follow, last, has_ended)

    # ---- the run folder ----------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> None:
        look = self._look(run)
        if look.view is not None:
            folder.take(run, look.view)
        execution = look.execution
        is_over = execution is not None and execution.has_ended and not run.is_ended()
        if is_over and execution is not None and not is_locked(run):  # a `down` of this machine writes its own end
            asked, number, said = self._connections.of_run(run), execution.id, None
            if execution.status == "failed":
                said = log_lines.own_words(lambda since: asked.logs(number, since))
            reason = "; its log ends with: ".join(
                filter(None, [words.ended(execution, block_of(run.deployment()).spot), said])
            )
            folder.write_end(run, "failed" if execution.status == "failed" else "down", reason)
            with contextlib.suppress(PenstockError):  # else `down` removes it
                if self._find(asked, run) is None:  # another machine may have started it again
                    asked.delete_secret(run_yaml.secret_of(run.name))

    def order(self, run: Run, desired: Desired) -> None:
        execution = self._find(self._connections.of_run(run), run)
        if execution is None:
            raise PenstockError(f'could not change "{run.name}": VESSL has no run of it')
        self._control(run, execution, _CHANGE_S).post_json(f"{PATH}/desired", desired)
        run.write_desired(desired)
        self._forget(run)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, run: Run, grace_s: float) -> None:
        """Its container drains and exits, and what has not ended by then is terminated; the secret goes last."""
        asked = self._connections.of_run(run)
        several = self._all(asked, run)
        deadline = time.monotonic() + grace_s + _EXIT_S
        draining = [row for row in several if self._tell_end(run, row, grace_s)]
        for row in draining:
            _wait_ended(asked, row, deadline - time.monotonic())
        for row in several:
            found = asked.read(row.id)
            if found is not None and not found.has_ended:
                asked.terminate(row.id)
        for row in several:
            if not _wait_ended(asked, row, _ENDED_S):
                message = f"could not end run {row.id}: VESSL has not ended it after {_ENDED_S:.0f} s"
                hint = f"It may still be charged; see {asked.page_of(row.id)}, then: penstock down {run.name}"
                raise PenstockError(message, hint=hint, is_retryable=True)
        asked.delete_secret(run_yaml.secret_of(run.name))
        self._looks.pop(str(run.path), None)
        self._last.pop(str(run.path), None)

    def _tell_end(self, run: Run, execution: Execution, grace_s: float) -> bool:
        """Whether the container heard that it shall end."""
        if execution.status != "running":
            return False
        try:
            self._control(run, execution, _CONTROL_S).post_json(f"{PATH}/end", End(now=grace_s <= 1.0))
        except PenstockError:  # it is gone, or has not come so far: it has nothing to lose then
            return False
        return True

    # ---- from any machine --------------------------------------------------------------------------------------------

    def adopt(self, name: str, asked: Api, placed_of: Callable[[Deployment], tuple[Kind, ...]]) -> Adopted | None:
        execution = next(iter(_tagged(asked.living(), name)), None)
        if execution is None:
            return None
        file = execution.run_spec.yaml_spec if execution.run_spec else ""
        found = folder.Found(f"run {execution.id}", run_yaml.RUN_FILE, file)
        run = folder.adopt(name, found, placed_of)
        folder.note(run, asked.account, execution.id)
        return Adopted(
            run, f'VESSL, project "{asked.account.organization}/{asked.account.project}", run {execution.id}'
        )

    def inside(self, run: Run, words: Sequence[str], is_terminal: bool) -> list[str]:
        execution = self._look(run).execution
        url = execution.address(run_yaml.CONTROL) if execution is not None else None
        if url is None:
            raise no_address(run.name)
        return [sys.executable, "-m", "penstock.targets.vessl.inside", str(run.path), url, *words]

    # ---- the API -----------------------------------------------------------------------------------------------------

    def _control(self, run: Run, execution: Execution, timeout_s: float) -> Client:
        url = execution.address(run_yaml.CONTROL)
        if url is None:
            raise PenstockError("VESSL knows no address of its control port yet", is_retryable=True)
        if not run.admin_token_file.exists():
            hint = f"Copy runs/{run.name}/secrets/admin-token from the machine that started it."
            raise PenstockError("its admin token is on the machine that started it", hint=hint)
        return api.control(url, run.admin_token(), timeout_s)

    def _all(self, asked: Api, run: Run) -> list[Execution]:
        """All runs of the deployment that have not ended."""
        return _tagged(asked.living(), run.name)

    def _find(self, asked: Api, run: Run) -> Execution | None:
        return next(iter(self._all(asked, run)), None)


def _tagged(rows: Sequence[Execution], name: str) -> list[Execution]:
    tag = run_yaml.tag_of(name)
    return [row for row in rows if any(tag == each.name for each in row.tags or ())]


def _was_heard(look: Look | None, execution: Execution) -> bool:
    """Whether the container of that run has answered before."""
    if look is None or look.execution is None or look.execution.id != execution.id:
        return False
    return look.view is not None or (look.silence is not None and look.silence.was_heard)


def _wait_ended(asked: Api, execution: Execution, timeout_s: float) -> bool:
    """Whether it ended in time. Blocks."""

    def has_ended() -> bool:
        found = asked.read(execution.id)
        return found is None or found.has_ended

    return wait(has_ended, timeout_s)
