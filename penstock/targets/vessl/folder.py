"""A run folder on the machine of a verb: which run of VESSL it is, and what the container tells of it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from penstock import __version__, paths
from penstock.errors import PenstockError
from penstock.paths import write_atomically
from penstock.planner import Plan
from penstock.run_folder import Desired, Handle, Kind, Part, Record, Run, State, is_locked, unit_of
from penstock.spec.deployment import Deployment
from penstock.targets.vessl import run_yaml, words
from penstock.targets.vessl.api import Account, Execution
from penstock.wire.announcement import GatewayAddress
from penstock.wire.container import ContainerView

_NOTE = "vessl.json"
_OWN = Part("running", unit="0")
GATEWAY_UNIT = "0"


class Note(msgspec.Struct, frozen=True):
    """vessl.json: where the run is, whatever the configuration says by now. `id` is None before it was created."""

    host: str
    organization: str
    project: str
    id: int | None = None


def note_of(run: Run) -> Note | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((run.path / _NOTE).read_bytes(), type=Note)
    return None


def note(run: Run, account: Account, execution_id: int | None) -> None:
    content = Note(account.host, account.organization, account.project, execution_id)
    if note_of(run) != content:
        write_atomically(run.path / _NOTE, msgspec.json.encode(content))


def note_addresses(run: Run, execution: Execution) -> None:
    """Where clients reach the gateway and the chat page, once VESSL has told."""
    url = execution.address(run_yaml.GATEWAY)
    if url is None:
        return
    deployment = run.deployment()
    address = GatewayAddress(
        GATEWAY_UNIT, f"{run.name}:{deployment.gateway.port}", (), url, execution.address(run_yaml.PAGE)
    )
    with contextlib.suppress(PenstockError):
        if run.gateway_address() == address:
            return
    run.gateway_folder.mkdir(exist_ok=True)
    write_atomically(run.gateway_address_file, msgspec.json.encode(address))


def take(run: Run, view: ContainerView) -> None:
    """Write what the container tells into the folder."""
    texts = dict(view.files)
    is_ending = run.desired().state == "down" and is_locked(run)  # a `down` of this machine has not reached it
    if is_ending:
        texts.pop("desired.json", None)
    state = texts.pop("state.json", None)
    if _is_ending(view):  # when that is over, VESSL tells it: its run is charged until then
        texts.pop("desired.json", None)
        state = None
    if state is not None:
        with contextlib.suppress(msgspec.MsgspecError):
            texts["state.json"] = _as_seen_here(msgspec.json.decode(state, type=State), run)
    if "events.jsonl" in texts:
        texts[run.fetched_events_file.name] = texts.pop("events.jsonl")
    _write(run, texts)
    if view.stage is None and view.refusal is None:
        replicas = [key for key in view.units if unit_of(key).kind == "replica"]
        handle = Handle(run.handle().target, {key: {} for key in [*replicas, *_others(run.record().placed)]})
        if handle != run.handle():
            run.write_handle(handle)


def _is_ending(view: ContainerView) -> bool:
    """Whether the container ends the deployment, by itself or as another machine ordered."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(view.files.get("desired.json", ""), type=Desired).state == "down"
    return False


def _as_seen_here(state: State, run: Run) -> str:
    """The state without processes, which are those of the container."""
    gateway = msgspec.structs.replace(state.gateway, process=None, unit=GATEWAY_UNIT)
    if gateway.state == "gone" and not gateway.n_restarts:  # its controller has not started it yet
        gateway = msgspec.structs.replace(gateway, state="starting")
    restarts = state.controller.restarts
    controller = msgspec.structs.replace(_OWN, n_restarts=state.controller.n_restarts, restarts=restarts)
    changes: dict[str, Part | None] = {"gateway": gateway, "controller": controller}
    for field in ("prometheus", "ui"):
        part: Part | None = getattr(state, field)
        if part is not None:
            url, note = (run.public_page_url, part.note) if field == "ui" else (part.url, part.note or "its container")
            changes[field] = msgspec.structs.replace(part, process=None, url=url, note=note)
    seen = msgspec.structs.replace(state, **changes)
    return msgspec.json.format(msgspec.json.encode(seen), indent=2).decode()


def _write(run: Run, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        path = run.path / name
        with contextlib.suppress(OSError):
            if path.read_text("utf-8") == text:
                continue
        write_atomically(path, text.encode())


def write_end(run: Run, execution: Execution, is_spot: bool, said: str | None = None) -> None:
    """Its run has ended, and nothing outside would start it again: so has the deployment. `said`: its last words."""
    reason = "; its log ends with: ".join(filter(None, [words.ended(execution, is_spot), said]))
    run.write_desired(Desired("down", 0))
    run.write_state(State(time.time(), "failed" if execution.status == "failed" else "down", 0, reason=reason))
    run.add_event("ended", reason)


def adopt(
    name: str, account: Account, execution: Execution, placed_of: Callable[[Deployment], tuple[Kind, ...]]
) -> Run:
    """Write the folder of a deployment that another machine started. `placed_of`: the kinds of units inside.

    Without an admin token, which is on that machine alone: VESSL shows no secret.  Raises PenstockError for a run that
    penstock did not render.
    """
    run = Run(paths.folder() / name)
    try:
        file, plan = run_yaml.embedded(execution.run_spec.yaml_spec if execution.run_spec else "")
        msgspec.json.decode(plan, type=Plan)
    except (ValueError, msgspec.MsgspecError) as exc:
        message = f'cannot read run {execution.id}, which has the tag "{run_yaml.tag_of(name)}"'
        raise PenstockError(message, detail=str(exc), hint="Another version of penstock may have started it.") from exc
    for part in ("artifact", "logs", "gateway"):
        (run.path / part).mkdir(parents=True, exist_ok=True)
    (run.path / "secrets").mkdir(mode=0o700, exist_ok=True)
    _write(run, {"spec.yaml": file, "plan.json": plan})
    if execution.run_spec is not None:
        write_atomically(run.artifact_path / run_yaml.RUN_FILE, execution.run_spec.yaml_spec.encode())
    deployment = run.deployment()
    placed = placed_of(deployment)
    run.write_desired(Desired("up", deployment.replicas.first))
    names = [f"replica/{number}" for number in range(run.desired().replicas)]
    run.write_handle(Handle(deployment.target, {key: {} for key in [*names, *_others(placed)]}))
    (run.path / "events.jsonl").touch()
    note(run, account, execution.id)
    record = Record(secrets.token_hex(6), name, deployment.target, time.time(), __version__, placed)
    write_atomically(run.path / "run.json", msgspec.json.encode(record))
    return run


def _others(placed: tuple[Kind, ...]) -> list[str]:
    return [f"{kind}/0" for kind in placed if kind != "replica"]
