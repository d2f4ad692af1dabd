"""A run folder on the machine of a verb: which run or service of VESSL it is, and what the container tells of it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from penstock import __version__, paths
from penstock.errors import PenstockError
from penstock.paths import write_atomically
from penstock.planner import Plan
from penstock.run_folder import Desired, Handle, Kind, Part, Record, Run, State, is_locked, unit_of
from penstock.spec.deployment import Deployment
from penstock.targets.vessl import run_yaml
from penstock.targets.vessl.api import Account
from penstock.wire.announcement import GatewayAddress
from penstock.wire.container import ContainerView

_NOTE = "vessl.json"
_OWN = Part("running", unit="0")
GATEWAY_UNIT = "0"


class Note(msgspec.Struct, frozen=True):
    """vessl.json: where the deployment is, whatever the configuration says by now. `id`: of the run, or the number of
    the service's revision; None before it was created."""

    host: str
    organization: str
    project: str
    id: int | None = None
    kind: Literal["run", "service"] = "run"


class Found(NamedTuple):
    """What VESSL has of a deployment that another machine started: `what`, for people, and its YAML."""

    what: str
    file: str
    yaml_spec: str


def note_of(run: Run) -> Note | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((run.path / _NOTE).read_bytes(), type=Note)
    return None


def note(run: Run, account: Account, number: int | None, kind: Literal["run", "service"] = "run") -> None:
    content = Note(account.host, account.organization, account.project, number, kind)
    if note_of(run) != content:
        write_atomically(run.path / _NOTE, msgspec.json.encode(content))


def secret_value(run: Run) -> str:
    """Of the deployment's own secret: the admin token, and the hash of the key that `up` has just made."""
    key_hash = run.first_key_file.read_text("utf-8").strip() if run.first_key_file.exists() else None
    return ":".join(filter(None, [run.admin_token(), key_hash]))


def note_addresses(run: Run, url: str | None, page_url: str | None = None) -> None:
    """Where clients reach the gateway and the chat page, once VESSL has told."""
    if url is None:
        return
    address = GatewayAddress(GATEWAY_UNIT, f"{run.name}:{run.deployment().gateway.port}", (), url, page_url)
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
        handle = Handle(run.handle().target, {key: {} for key in [*replicas, *others(run.record().placed)]})
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


def write_end(run: Run, phase: Literal["failed", "down"], reason: str) -> None:
    """VESSL has ended it, and nothing outside would start it again: so has the deployment."""
    run.write_desired(Desired("down", 0))
    run.write_state(State(time.time(), phase, 0, reason=reason))
    run.add_event("ended", reason)


def adopt(name: str, found: Found, placed_of: Callable[[Deployment], tuple[Kind, ...]]) -> Run:
    """Write the folder of a deployment that another machine started. `placed_of`: the kinds of units inside.

    Without an admin token, which is on that machine alone: VESSL shows no secret.  Raises PenstockError for one that
    penstock did not render.
    """
    run = Run(paths.folder() / name)
    try:
        file, plan = run_yaml.embedded(found.yaml_spec)
        msgspec.json.decode(plan, type=Plan)
    except (ValueError, msgspec.MsgspecError) as exc:
        message = f'cannot read {found.what}, which calls itself "{run_yaml.tag_of(name)}"'
        raise PenstockError(message, detail=str(exc), hint="Another version of penstock may have started it.") from exc
    for part in ("artifact", "logs", "gateway"):
        (run.path / part).mkdir(parents=True, exist_ok=True)
    (run.path / "secrets").mkdir(mode=0o700, exist_ok=True)
    _write(run, {"spec.yaml": file, "plan.json": plan, f"artifact/{found.file}": found.yaml_spec})
    deployment = run.deployment()
    placed = placed_of(deployment)
    run.write_desired(Desired("up", deployment.replicas.first))
    names = [f"replica/{number}" for number in range(run.desired().replicas)]
    run.write_handle(Handle(deployment.target, {key: {} for key in [*names, *others(placed)]}))
    (run.path / "events.jsonl").touch()
    record = Record(secrets.token_hex(6), name, deployment.target, time.time(), __version__, placed)
    write_atomically(run.path / "run.json", msgspec.json.encode(record))
    return run


def others(placed: tuple[Kind, ...]) -> list[str]:
    return [f"{kind}/0" for kind in placed if kind != "replica"]
