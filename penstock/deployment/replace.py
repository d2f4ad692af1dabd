"""`up --replace`: a start that fails is taken down again, and what it was to replace is started again.

The folder of that one stays in the new one as `previous`, until the new one is ready. A controller starts this module,
with a run folder and the id of a launch: nobody else may be there to give a failed start up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from penstock import engines, run_folder
from penstock.deployment.observe import has_failed
from penstock.deployment.place import launch, sockets
from penstock.deployment.prepare import Prepared
from penstock.deployment.stop import OnStep, ctrl_c_ignored, end_run
from penstock.errors import PenstockError, UserError
from penstock.gateway.config import GatewayConfig, parse_address
from penstock.paths import write_atomically
from penstock.processes import MARK_RUN
from penstock.run_folder import Desired, Handle, Run, State
from penstock.targets import Target
from penstock.world import Processes

_TRIAL_S = 120.0
_WHY_LINES = 6


def try_engine(prepared: Prepared, target: Target) -> None:
    """Ask the engine itself about its settings, on the machines, while what it replaces serves.  Raises UserError."""
    name, engine = prepared.deployment.name, engines.load(prepared.plan.engine)
    words = engine.trial(prepared.plan) if engine.package and "survey" in target.capabilities else ()
    answers = target.survey(prepared.deployment, words, _TRIAL_S) if words else []
    for answer in answers:
        if answer.exit_code == 2:
            lines = answer.err.strip().splitlines()
            why = "\n".join(lines[next((i for i, line in enumerate(lines) if "error:" in line), 0) :][:_WHY_LINES])
            hint = "Correct engine.args; what runs was not touched."
            raise UserError(f'cannot replace "{name}": {engine.name} refuses its settings', detail=why, hint=hint)


@contextlib.contextmanager
def undone(run: Run, replaced: Desired | None, on_step: OnStep | None, is_roll: bool) -> Iterator[None]:
    """A start that fails in this block is taken down again, and what it was to replace is started again."""
    before = run.launch
    try:
        yield
    except BaseException:
        is_new = run.exists() and run.launch != before
        if not is_roll and (is_new or replaced is not None):  # of a roll, what served before still does
            with ctrl_c_ignored():
                give_up(run, on_step, ended=None if is_new else replaced)
        raise


def settle(run: Run, state: State, of: Processes) -> bool:
    """Whether the start of a run that is to replace another is over, for its controller, which may be the only one that
    waits. Ready, the run has. Failed, it is given up by a process without its marks, which it would end with."""
    if state.phase == "ready":
        shutil.rmtree(run.previous_folder, ignore_errors=True)
        return True
    if has_failed(state):
        argv = [sys.executable, "-m", "penstock.deployment.replace", str(run.path), run.record().id]
        environment = {name: value for name, value in os.environ.items() if name != MARK_RUN}
        of.start_detached(argv, {}, run.log("controller"), environment)
        return True
    return False


def keep(replaced: Desired, old: Run, new: Run) -> None:
    """Move the folder of an ended run into that of its successor, ready for another start: for `run_folder.create`.

    One that was never ready itself goes, and the one that it was to replace stays.
    """
    kept = old.previous_folder
    if not kept.exists():
        _rewind(old, replaced)
    (kept if kept.exists() else old.path).rename(new.previous_folder)


def _rewind(run: Run, desired: Desired) -> None:
    run.write_desired(desired)
    run.write_handle(Handle(run.record().target))
    for path in (run.path / "state.json", run.gateway_address_file):
        path.unlink(missing_ok=True)
    shutil.rmtree(run.failed_folder, ignore_errors=True)


def _restore(run: Run) -> None:
    """Put what an ended run was to replace in its place; the ended one stays in it as `failed`."""
    old = Run(run.previous_folder)
    for path in (old.events_file, *old.path.glob(f"{old.store_file.name}*")):  # those of its successor go on from them
        path.unlink(missing_ok=True)
    run_folder.carry_over(run, old)
    failed = run.path.rename(run.path.with_name(f".{run.name}.old.{secrets.token_hex(4)}"))
    (failed / old.path.name).rename(run.path)
    failed.rename(run.failed_folder)


def give_up(
    run: Run, on_step: OnStep | None = None, failure: State | None = None, ended: Desired | None = None
) -> str | None:
    """End a start that failed, and start again what it was to replace: what became of that, None where there is none.

    `failure`: as in `end_run`. `ended`: this is what was to be replaced; its successor has no folder yet.
    """
    say, end = on_step or (lambda _: None), partial(end_run, run, now=True, on_step=None, failure=failure)
    say(f"ending {run.name} ...")
    old = run if ended is not None else Run(run.previous_folder)
    if not old.exists():
        end()
        return None
    say(f"starting {run.name} as it ran before ...")
    try:
        config = msgspec.json.decode(old.gateway_config.read_bytes(), type=GatewayConfig)
        public, admin = parse_address(config.listen), parse_address(config.admin)
        addresses = None if public is None or admin is None or old.places("gateway") else (public, admin)
        config = msgspec.structs.replace(config, holds_while_loading=True)
        with sockets(end, addresses) as held:
            if ended is not None:
                _rewind(run, ended)
            else:
                _restore(run)
            write_atomically(run.gateway_config, msgspec.json.encode(config), mode=0o600)
            launch(run, held, is_again=True)
    except (PenstockError, OSError) as exc:
        end()
        run.add_event("failed", f"could not start again what was to be replaced: {exc}")
        return f"What it was to replace could not be started again: {exc}"
    run.add_event("up", f"started again: its successor failed, see {run.failed_folder}")
    return "What it was to replace is started again."


def undo(
    run: Run, on_step: OnStep | None = None, failure: State | None = None, launch: str | None = None
) -> str | None:
    """`give_up`, unless it has ended, is another launch by now, or another command changes it."""
    with contextlib.suppress(UserError), ctrl_c_ignored(), run_folder.locked(run.name):
        if not run.is_ended() and launch in (None, run.launch):
            return give_up(run, on_step, failure)
    return None


if __name__ == "__main__":
    given_up, its_launch = Run(Path(sys.argv[1])), sys.argv[2]
    while given_up.launch == its_launch and not given_up.is_ended():
        undo(given_up, None, given_up.state(), its_launch)
        time.sleep(1.0)  # where another command changes it
