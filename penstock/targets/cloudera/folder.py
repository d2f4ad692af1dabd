"""A run folder in two places: on the machine of a verb, and in the project, where gateway, controller and nodes are.

The project's is the one that counts: a verb on a laptop copies what it needs by the API's files.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from penstock import paths
from penstock.errors import PenstockError
from penstock.paths import write_atomically
from penstock.run_folder import Desired, Run, State, is_locked
from penstock.spec import reading
from penstock.spec.blocks import Cloudera
from penstock.targets.cloudera import amp, names
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.code_archive import CodeArchive

_FETCH_EVERY_S = 1.5
_STATE, _DESIRED = "state.json", "desired.json"
# Of the controller; state.json is asked first, and the others only with a new one.
_WITH_STATE = ("handle.json", "gateway/address.json", "gateway.json")
_SENT = (
    "run.json",
    "spec.yaml",
    "plan.json",
    "artifact.json",
    _DESIRED,
    "secrets/admin-token",
    "secrets/first-key-hash",
)
_MOST_DEPTH = 6
_WAY = ("workbench", "project", "key_file", "ca_file")  # of the block: how a machine reaches the project


class Place(msgspec.Struct, frozen=True):
    """workbench.json: where a run lives, whatever file or variables say by now."""

    workbench: str
    project_id: str
    project: str | None = None
    key_file: str | None = None
    ca_file: str | None = None


def place_of(run: Run) -> Place | None:
    try:
        return msgspec.json.decode((run.path / "workbench.json").read_bytes(), type=Place)
    except (OSError, msgspec.MsgspecError):
        return None


def note_place(run: Run, place: Place) -> None:
    if place_of(run) != place:
        write_atomically(run.path / "workbench.json", msgspec.json.encode(place))


def _there(run_name: str, file: str = "") -> str:
    folder = names.in_project(names.run_path(run_name))
    return f"{folder}/{file}" if file else folder


# ---- on the machine of a verb ----------------------------------------------------------------------------------------


def send(workbench: Workbench, run: Run) -> None:
    """Bring the run folder into the project."""
    for file in _SENT:
        if (run.path / file).exists():
            workbench.upload(_there(run.name, file), (run.path / file).read_bytes())
    for file, text in run.artifact().files.items():
        if not file.startswith(amp.PREFIX):  # for a catalogue, not for this run
            workbench.upload(_there(run.name, f"artifact/{file}"), text.encode())
    if workbench.ca_file is not None:
        workbench.upload(_there(run.name, "ca.pem"), Path(workbench.ca_file).read_bytes())
    (run.path / "logs").mkdir(exist_ok=True)


def send_code(workbench: Workbench, code: CodeArchive) -> None:
    """penstock's code, unless this version is there: 2 MB."""
    path = names.in_project(f"{names.HOME}/code/{code.hash}.zip")
    present = {str(row.get("path", "")).rpartition("/")[2] for row in workbench.files(path.rpartition("/")[0])}
    if path.rpartition("/")[2] not in present:
        workbench.upload(path, code.data)


def send_file(workbench: Workbench, run: Run, file: str) -> None:
    workbench.upload(_there(run.name, file), (run.path / file).read_bytes())


def fetch(workbench: Workbench, run: Run) -> None:
    """Write the last orders and the controller's last words into the folder.  Raises PenstockError."""
    state = workbench.download(_there(run.name, _STATE))
    desired = workbench.download(_there(run.name, _DESIRED))
    if desired is None:
        if not is_locked(run) and run.handle().units:
            run.write_desired(Desired("down", 0))
            run.write_state(State(time.time(), "down", 0, reason="another machine took it down"))
        return
    is_ending = run.desired().state == "down" and is_locked(run)  # a `down` of this machine has not reached the project
    if not is_ending:
        _write(run, _DESIRED, desired)
    if state is None:
        return
    if _write(run, _STATE, state):
        for file in _WITH_STATE:
            _write(run, file, workbench.download(_there(run.name, file)))
        _write(run, run.fetched_events_file.name, workbench.download(_there(run.name, run.events_file.name)))


def fetch_address(workbench: Workbench, run: Run) -> None:
    """Where the gateway is, which a controller would tell too."""
    _write(run, "gateway/address.json", workbench.download(_there(run.name, "gateway/address.json")))


def _write(run: Run, file: str, content: bytes | None) -> bool:
    """Whether it is new."""
    path = run.path / file
    path.parent.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):
        if content == path.read_bytes():
            return False
    if content is None:
        return False
    is_secret = file.startswith("secrets/") or file == "gateway.json"
    write_atomically(path, content, mode=0o600 if is_secret else 0o644)
    return True


def order(workbench: Workbench, run: Run, desired: Desired) -> None:
    """Write down what the user asked for.  Raises PenstockError."""
    workbench.upload(_there(run.name, _DESIRED), msgspec.json.encode(desired))
    run.write_desired(desired)


def adopt(workbench: Workbench, name: str, block: Cloudera) -> Run | None:
    """Write the run folder of a deployment that another machine started; None where the project has none.

    `block` says how this machine reaches the workbench, as another may not: in a session a file need not say so.
    """
    record = workbench.download(_there(name, "run.json"))
    if record is None:
        return None
    run = Run(paths.folder() / name)
    for folder in ("artifact", "logs", "gateway"):
        (run.path / folder).mkdir(parents=True, exist_ok=True)
    (run.path / "secrets").mkdir(mode=0o700, exist_ok=True)
    for file in (*_SENT[1:], "artifact/launch.json"):
        _write(run, file, workbench.download(_there(name, file)))
    deployment = run.deployment()
    way = {field: getattr(block, field) for field in _WAY}
    there = msgspec.structs.replace(deployment.cloudera or Cloudera(), **way)
    _write(run, "spec.yaml", reading.to_yaml(msgspec.structs.replace(deployment, cloudera=there)).encode())
    (run.path / "events.jsonl").touch()
    note_place(run, Place(workbench.url, workbench.project_id, block.project, block.key_file, block.ca_file))
    _write(run, "run.json", record)  # last: with it the folder counts
    fetch(workbench, run)
    return run


def remove(workbench: Workbench, name: str, with_keys: bool = False) -> None:
    """The run folder in the project, but for keys and usage."""
    remove_folder(workbench, _there(name), keeps=() if with_keys else kept_keys(workbench, name))


def kept_keys(workbench: Workbench, name: str) -> list[str]:
    """The paths of the files with a deployment's keys and usage."""
    paths = [path_of(row, _there(name)) for row in workbench.files(_there(name))]
    return [path for path in paths if path.startswith(_there(name, Run(Path(name)).store_file.name))]


def remove_folder(workbench: Workbench, folder: str, depth: int = _MOST_DEPTH, keeps: Collection[str] = ()) -> None:
    """Files first: whether a folder goes with what is in it is not documented. It stays with what it `keeps`."""
    for row in workbench.files(folder) if depth else ():
        path = path_of(row, folder)
        if row.get("is_dir"):
            remove_folder(workbench, path, depth - 1)
        elif path not in keeps:
            workbench.delete_file(path)
    if not keeps:
        with contextlib.suppress(PenstockError):  # an empty folder may be no file that can be deleted
            workbench.delete_file(folder)


def path_of(row: Object, folder: str) -> str:
    """The path of a row in a list of files, which some versions give in full and others from the folder."""
    path = str(row.get("path", "")).strip("/")
    return path if path.startswith(f"{folder}/") else f"{folder}/{path}"


def log_bytes(workbench: Workbench, run: Run, part: str, ending: str) -> bytes | None:
    """A log in the project, of which the API gives only the whole."""
    return workbench.download(_there(run.name, f"logs/{part}.log{ending}"))


class Fetcher:
    """Fetches at most once in a while: verbs look several times a second."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def is_due(self, run: Run, now: float) -> bool:
        """`now`: monotonic seconds."""
        if now - self._at.get(str(run.path), float("-inf")) < _FETCH_EVERY_S:
            return False
        self._at[str(run.path)] = now
        return True
