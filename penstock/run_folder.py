"""One readable folder per deployment: what was asked, planned and sent, what lives, what happened.

    ~/.penstock/runs/NAME/         (PENSTOCK_HOME moves ~/.penstock)
      run.json                     id, time, version, target
      spec.yaml  plan.json         the resolved file and the plan
      artifact/                    exactly what was sent to the target
      gateway.json secrets/        the gateway's settings; the admin token, mode 0600
      prometheus/                  only with observe.prometheus: its configuration, rules and data
      ui.json ui/                  only with ui: the chat page's settings; its sessions and uploads, mode 0700
      gateway/                     only where the target places the gateway: address.json says where it is
      handle.json                  what the target needs to find its work again
      desired.json state.json      what should be, and what the controller last saw
      scaling.json samples.jsonl   what the autoscaler remembers, and what it saw, one JSON a second
      events.jsonl logs/           what happened, one JSON a line; the output of every part
      previous/  failed/           the run that this one replaces, until it is ready; the one that could not replace it

A folder appears whole, by one rename. Every file is replaced by rename, so a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from penstock import __version__
from penstock.errors import PenstockError, UserError, nearest
from penstock.log_lines import LogReader, append, file_lines, older
from penstock.paths import folder, home, is_full, write_atomically
from penstock.planner import Plan
from penstock.spec import reading
from penstock.spec.deployment import Cache, Deployment, is_legal_name
from penstock.text import KIB, MIB
from penstock.wire.announcement import Announcement, GatewayAddress, Process, Restart, engine_key, scrape_key
from penstock.wire.live import Event
from penstock.wire.scaling import Scaling

Phase = Literal["starting", "ready", "degraded", "failed", "stopping", "down"]
Kind = Literal["replica", "gateway", "controller", "ui"]
Listen = Literal["loopback", "network"]
T = TypeVar("T")
KEPT_RESTARTS = 10
_EVENTS_BYTES = 2 * MIB  # of events.jsonl, and of events.jsonl.1 before it
_EVENT_CHARACTERS = 1000
_RECENT_BYTES = 64 * KIB


class Unit(NamedTuple):
    """What a target places. `name` is unique among the units of its kind; `key` names it in a handle: "replica/0"."""

    kind: Kind
    name: str

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


def unit_of(key: str) -> Unit:
    kind, _, name = key.partition("/")
    return Unit(cast(Kind, kind), name)


def order(unit: Unit) -> tuple[str, int, str]:
    """Sorts units by kind, and by number within a kind: 2 before 10."""
    return unit.kind, len(unit.name), unit.name


def replica(name: str) -> Unit:
    return Unit("replica", name)


class Record(msgspec.Struct, frozen=True):
    """run.json: which launch this folder is of. `placed`: the kinds of units that its target places."""

    id: str
    name: str
    target: str
    created_at: float
    penstock_version: str
    placed: tuple[Kind, ...] = ("replica",)


class Artifact(msgspec.Struct, frozen=True):
    """What a target sends for each replica: files (relative to the run's artifact folder), and the command.

    In `argv` and in file texts "{run}" is the run folder and "{replica}" the replica's number. `document`: the file
    that holds all that is sent, for a target that sends one.
    """

    argv: tuple[str, ...]
    files: dict[str, str]
    document: str | None = None


class Handle(msgspec.Struct, frozen=True):
    """handle.json: by the key of each unit, what its target needs to find it again (a process, a job id, ...).
    `ordered`: replicas not in it that a controller began to start, and has not noted yet."""

    target: str
    units: dict[str, dict[str, Any]] = {}
    ordered: tuple[str, ...] = ()

    @property
    def replicas(self) -> dict[str, dict[str, Any]]:
        return {unit_of(key).name: facts for key, facts in self.units.items() if unit_of(key).kind == "replica"}


class Order(msgspec.Struct, frozen=True):
    """What all replicas shall do once, from the user, at that time (Unix seconds)."""

    word: Literal["sleep", "wake"]
    at: float


class Desired(msgspec.Struct, frozen=True):
    """desired.json: what the user last asked for. Where the load decides, `replicas` counts while it `is_pinned`."""

    state: Literal["up", "down"]
    replicas: int
    order: Order | None = None
    is_pinned: bool = False


class Part(msgspec.Struct, frozen=True):
    """The controller, the gateway, Prometheus or the chat page, as last seen. A placed one has a `unit` and its
    target's `note`, no process. `url`: where Prometheus or the page answers, on loopback of the machine in `note`, or
    of this one; of a placed page, for clients outside."""

    state: Literal["running", "queued", "starting", "gone"]
    process: Process | None = None
    n_restarts: int = 0
    restarts: tuple[Restart, ...] = ()
    unit: str | None = None
    note: str | None = None
    url: str | None = None

    def restarted(self, reason: str) -> Part:
        restarts = (*self.restarts, Restart(round(time.time(), 2), reason))[-KEPT_RESTARTS:]
        return msgspec.structs.replace(self, n_restarts=self.n_restarts + 1, restarts=restarts)


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica as last seen: its announcement, its placement, and what the gateway adds. `restarts` joins the
    engine's (announced by the node) and the node's own (seen by the controller), newest last. `starts_at` is a queue's
    estimate, `ends_at` when its machines are taken away (Unix seconds), by the limit `ends_by`."""

    replica: str
    state: str
    placement: str
    announcement: Announcement | None = None
    in_flight: int = 0
    is_draining: bool = False
    n_restarts: int = 0
    restarts: tuple[Restart, ...] = ()
    reason: str | None = None
    starts_at: float | None = None
    ends_at: float | None = None
    ends_by: str | None = None


class State(msgspec.Struct, frozen=True):
    """state.json: the controller's last observation (`observed_at` in Unix seconds)."""

    observed_at: float
    phase: Phase
    desired_replicas: int
    replicas: tuple[ReplicaStatus, ...] = ()
    controller: Part = Part("gone")
    gateway: Part = Part("gone")
    requests_total: int = 0
    reason: str | None = None
    prometheus: Part | None = None
    ui: Part | None = None
    scaling: Scaling | None = None
    upstreams: tuple[ReplicaStatus, ...] = ()


class Run:
    """A run folder, with typed access to its files. Methods block on the disk; writes are atomic.

    An absent or damaged file is a PenstockError; for `down`, `handle`, `desired` and `state` have safe defaults.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.artifact_path = path / "artifact"
        self.gateway_config = path / "gateway.json"
        self.events_file = path / "events.jsonl"
        self.fetched_events_file = path / "fetched-events.jsonl"  # of a controller whose folder is elsewhere
        self.store_file = path / "store.sqlite"  # keys and usage, when the file names no other place
        self.admin_token_file, self.owner_key_file = (path / "secrets" / name for name in ("admin-token", "owner-key"))
        self.first_key_file = path / "secrets" / "first-key-hash"  # only where the target brings it to the gateway
        self.gateway_folder = path / "gateway"  # only where the target places the gateway, which may then move
        self.gateway_address_file = self.gateway_folder / "address.json"
        self.prometheus_folder = path / "prometheus"  # its configuration and its data, with `observe.prometheus`
        self.scaling_file, self.samples_file = path / "scaling.json", path / "samples.jsonl"
        self.ui_config, self.ui_folder = path / "ui.json", path / "ui"  # with `ui`
        self.previous_folder, self.failed_folder = path / "previous", path / "failed"  # of `up --replace`

    def places(self, kind: Kind) -> bool:
        """Whether its target places units of this kind; the others live next to `up`."""
        try:
            return kind in self.record().placed
        except PenstockError:  # a damaged folder
            return kind == "replica"

    def gateway_address(self) -> GatewayAddress:
        """Where the gateway is that the target placed.  Raises PenstockError before the first has started."""
        if not self.gateway_address_file.exists():
            raise no_address(self.name)
        return self._read("gateway/address.json", GatewayAddress)

    def log(self, part: str) -> Path:
        return self.path / "logs" / f"{part}.log"

    def log_lines(self, part: str, follow: bool, last: int | None = None) -> Iterator[str]:
        """Lines of the log of one part, as `file_lines` has them; with `follow` until the deployment has ended."""
        return file_lines(self.log(part), follow, last, self.is_ended)

    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    def record(self) -> Record:
        return self._read("run.json", Record)

    @property
    def launch(self) -> str | None:
        """The id of its launch; None while a folder takes the place of another, and of a damaged one."""
        with contextlib.suppress(PenstockError):
            return self.record().id
        return None

    def deployment(self) -> Deployment:
        try:
            return reading.load(self.path / "spec.yaml")
        except UserError as exc:
            raise self._unreadable("spec.yaml", exc.detail) from exc

    def plan(self) -> Plan:
        return self._read("plan.json", Plan)

    def artifact(self) -> Artifact:
        return self._read("artifact.json", Artifact)

    def handle(self) -> Handle:
        with contextlib.suppress(PenstockError):
            return self._read("handle.json", Handle)
        with contextlib.suppress(PenstockError):  # a damaged folder: `down` must still work
            return Handle(self.record().target)
        return Handle(Deployment("").target)

    def write_handle(self, handle: Handle) -> None:
        self._write("handle.json", handle)

    def desired(self) -> Desired:
        try:
            return self._read("desired.json", Desired)
        except PenstockError:  # a damaged folder: not ended, for all we know, and as many as are placed
            return Desired("up", len(self.handle().replicas))

    def write_desired(self, desired: Desired) -> None:
        self._write_also_when_full("desired.json", desired)

    def state(self) -> State | None:
        """The controller's last observation; None before the first, or when it cannot be read."""
        with contextlib.suppress(PenstockError):
            return self._read("state.json", State)
        return None

    def is_ended(self) -> bool:
        """Whether its end was asked for and is complete. A `down` that broke off leaves a run that is not."""
        state = self.state()
        # "failed" is also what a living controller says of replicas that would not start: that is no end.
        is_over = state is not None and state.phase in ("down", "failed") and state.controller.process is None
        return is_over and self.desired().state == "down"

    def write_state(self, state: State) -> None:
        self._write_also_when_full("state.json", state)

    def gateway_file(self) -> GatewayFile:
        return self._read("gateway.json", GatewayFile)

    @property
    def listen(self) -> str:
        """The gateway's own address, "host:port"."""
        return self.gateway_address().listen if self.places("gateway") else self.gateway_file().listen

    @property
    def url(self) -> str:
        if self.places("gateway") and (url := self.gateway_address().public_url) is not None:
            return url
        settings = self.gateway_file()
        scheme = "https" if settings.tls_cert else "http"
        return f"{scheme}://{reachable(self.listen)}{settings.path_prefix or ''}"

    @property
    def public_url(self) -> str | None:
        """Where clients outside its network reach a gateway that the target placed; None where they do not."""
        has_address = self.places("gateway") and self.gateway_address_file.exists()
        return self.gateway_address().public_url if has_address else None

    @property
    def public_page_url(self) -> str | None:
        """Where clients outside its network reach a chat page that the target placed; None where they do not."""
        has_address = self.places("ui") and self.gateway_address_file.exists()
        return self.gateway_address().public_page_url if has_address else None

    @property
    def known_url(self) -> str | None:
        return None if self.places("gateway") and not self.gateway_address_file.exists() else self.url

    @property
    def admin_url(self) -> str:
        return "http://" + (self.gateway_address().best if self.places("gateway") else self.gateway_file().admin)

    def admin_token(self) -> str:
        try:
            return self.admin_token_file.read_text("utf-8").strip()
        except (OSError, ValueError) as exc:
            raise self._unreadable("secrets/admin-token", str(exc)) from exc

    def scrape_key(self) -> str:
        """What opens /metrics and /dashboard of its gateways, and nothing else.  Raises PenstockError."""
        return scrape_key(engine_key(self.admin_token()))

    def add_event(
        self, kind: str, text: str, replica: str | None = None, who: str | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Append one line to events.jsonl; it is lost when the disk is full. No secret belongs in `text`."""
        text = text[:_EVENT_CHARACTERS]
        event = Event(round(time.time(), 3), kind, text, replica, who, dict(seconds or {}))
        try:
            append(self.events_file, msgspec.json.encode(event) + b"\n", _EVENTS_BYTES)
        except OSError as exc:
            if not is_full(exc):
                raise

    def events(self, recent: bool = False) -> list[Event]:
        """What happened, the newest last, also to earlier launches of that name; `recent`: some hundreds of them."""
        own, fetched = (
            list(_decoded((LogReader(file, _RECENT_BYTES) if recent else LogReader(file)).lines()))
            for file in (self.events_file, self.fetched_events_file)
        )
        return sorted([*own, *fetched], key=lambda event: event.at) if fetched else own

    def _read(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except (OSError, ValueError, msgspec.MsgspecError) as exc:
            raise self._unreadable(name, str(exc)) from exc

    def _unreadable(self, name: str, why: str | None) -> PenstockError:
        hint = f"The run folder is damaged; what is left of the deployment ends with: penstock down {self.name}"
        return PenstockError(f'could not read "{self.path / name}"', detail=why, hint=hint)

    def _write_also_when_full(self, name: str, value: object) -> None:
        try:
            self._write(name, value)
        except OSError as exc:
            if not is_full(exc):
                raise
            data, path = msgspec.json.encode(value), self.path / name
            if len(data) > path.stat().st_size:  # in place: a shorter text needs no new block
                raise
            with path.open("r+b") as stream:
                stream.write(data.ljust(path.stat().st_size))

    def _write(self, name: str, value: object, mode: int = 0o644) -> None:
        write_atomically(self.path / name, msgspec.json.format(msgspec.json.encode(value), indent=2), mode)


def _decoded(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):  # cut off by a full disk
            yield msgspec.json.decode(line, type=Event)


def reachable(listen: str) -> str:
    """An address that a client on this machine can use: 0.0.0.0:80 becomes 127.0.0.1:80, ::1:80 becomes [::1]:80."""
    host, _, port = listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a deployment's name against another `up`, `down` or `scale` of ours.  Raises UserError when it is held."""
    with (folder() / f".{name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise UserError(
                f'cannot change deployment "{name}": another penstock command is changing it',
                hint="Wait until that command ends.",
            ) from exc
        yield


def is_locked(run: Run) -> bool:
    """Whether some command is changing that run now, also one of another PENSTOCK_HOME."""
    try:
        with (run.path.parent / f".{run.name}.lock").open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such lock, or it is not ours to look at
        return False
    return False


class GatewayFile(msgspec.Struct, frozen=True):
    """The fields of gateway.json that others than the gateway read."""

    listen: str
    admin: str
    store: str | None = None
    tls_cert: str | None = None
    path_prefix: str | None = None


class Draft(msgspec.Struct, frozen=True):
    """All that a new run folder holds at first. `gateway`: its whole config."""

    deployment: Deployment
    plan: Plan
    artifact: Artifact
    gateway: msgspec.Struct
    admin_token: str
    placed: tuple[Kind, ...] = ("replica",)


def create(draft: Draft, now: float, keep: Callable[[Run, Run], None] | None = None) -> Run:
    """A new folder, whole, in place of the ended one of that name, which `keep` may move into it."""
    parent, name = folder(), draft.deployment.name
    new = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name}.new."))
    try:
        _fill(Run(new), draft, now)
        final = parent / name
        if final.exists():
            carry_over(Run(final), Run(new))
            old = final.rename(parent / f".{name}.old.{secrets.token_hex(4)}")
            if keep is not None:
                keep(Run(old), Run(new))
            shutil.rmtree(old, ignore_errors=True)
        new.rename(final)
    except BaseException as exc:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(exc, OSError):
            raise UserError(f'cannot write run folder "{parent / name}": {exc.strerror}') from exc
        raise
    return Run(final)


def carry_over(old: Run, new: Run) -> None:
    """What outlives a launch: keys and usage, events, what Prometheus has stored, logins to the chat page."""
    for ending in ("-wal", ""):  # the write-ahead log belongs to the file: it goes first, and never without
        path = old.store_file.with_name(old.store_file.name + ending)
        if path.is_file():
            shutil.copy2(path, new.store_file.with_name(path.name))
    older(new.events_file).write_bytes(b"\n".join([*LogReader(old.events_file, _EVENTS_BYTES).lines(), b""]))
    for kept, place in ((old.prometheus_folder, new.prometheus_folder), (old.ui_folder, new.ui_folder)):
        with contextlib.suppress(OSError):
            kept.rename(place)


def _fill(run: Run, draft: Draft, now: float) -> None:
    for sub in ("artifact", "logs"):
        (run.path / sub).mkdir()
    (run.path / "secrets").mkdir(mode=0o700)
    if "gateway" in draft.placed:
        run.gateway_folder.mkdir()
    write_atomically(run.admin_token_file, draft.admin_token.encode(), mode=0o600)
    deployment = draft.deployment
    record = Record(secrets.token_hex(6), deployment.name, deployment.target, now, __version__, draft.placed)
    run._write("run.json", record)
    write_atomically(run.path / "spec.yaml", reading.to_yaml(deployment).encode())
    run._write("plan.json", draft.plan)
    run._write("artifact.json", draft.artifact)
    for name, text in draft.artifact.files.items():
        write_atomically(run.artifact_path / name, text.encode())
    run._write("gateway.json", draft.gateway, mode=0o600)
    run.write_desired(Desired("up", deployment.replicas.first))
    run.write_handle(Handle(deployment.target))
    run.events_file.touch()


def find(name: str) -> Run:
    """The run of that name.  Raises UserError with the nearest name."""
    run = Run(home() / "runs" / name)
    # "b/../b" is a path to the folder of "b", but its processes do not carry that path: half of it would be found.
    if not is_legal_name(name) or not run.exists():
        names = [other.name for other in every()]
        close = nearest(name, names)
        known = f"Known: {', '.join(names)}." if names else "There is none on this machine yet; start one: penstock up"
        raise UserError(f'cannot find deployment "{name}"', hint=f'Did you mean "{close}"?' if close else known)
    return run


def choose(name: str | None) -> Run:
    """The run of that name, or the only one that is not ended.  Raises UserError."""
    if name is not None:
        return find(name)
    live = living()
    if len(live) == 1:
        return live[0]
    names = ", ".join(run.name for run in live)
    if not live:
        hint = "Start one: penstock up. Ended ones: penstock ls -a."
        raise UserError("cannot choose a deployment: none runs", hint=hint)
    raise UserError(f"cannot choose a deployment: {len(live)} run", hint=f"Name one of: {names}.")


def living() -> list[Run]:
    return [run for run in every() if not run.is_ended()]


def no_address(name: str) -> PenstockError:
    message = f'the gateway of "{name}" has no address yet: its job has not started'
    return PenstockError(message, hint=f"Watch it with: penstock status {name}", is_retryable=True)


def every() -> list[Run]:
    parent = home() / "runs"
    if not parent.is_dir():
        return []
    runs = [Run(path) for path in sorted(parent.iterdir()) if is_legal_name(path.name)]
    return [run for run in runs if run.exists()]


class Left(msgspec.Struct, frozen=True):
    """What a `down` could not reach, kept next to the runs until it is ended. `facts` are for the target's `finish`."""

    target: str
    run_id: str
    place: str
    what: str
    facts: dict[str, Any]


def note_left(left: Left) -> None:
    path = _left_path(left.run_id, left.place)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomically(path, msgspec.json.encode(left), mode=0o600)


def forget_left(run_id: str, place: str) -> None:
    _left_path(run_id, place).unlink(missing_ok=True)


def forget_every_left(run: Run) -> None:
    for left in every_left():
        if left.run_id == run.record().id:
            forget_left(left.run_id, left.place)


def every_left() -> list[Left]:
    notes = []
    for path in sorted((home() / "left-behind").glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            notes.append(msgspec.json.decode(path.read_bytes(), type=Left))
    return notes


def _left_path(run_id: str, place: str) -> Path:
    return home() / "left-behind" / f"{run_id}-{hashlib.sha256(place.encode()).hexdigest()[:12]}.json"


class Launch(msgspec.Struct, frozen=True):
    """The instructions of a node: launch.json of the artifact. The token stays in its own file or variable.

    `announce_urls`: the gateway's admin address as a node may reach it; the first that answers is used.
    `announce_file`: where a placed gateway, which can move, writes that address (GatewayAddress); nodes read it again.
    `listen`: whether the engine listens on loopback, or on the address that the gateway reaches.
    `cache`: as in the file. `is_spread`: other machines may bring the same model.
    """

    deployment: str
    plan: Plan
    announce_urls: tuple[str, ...]
    token_file: str
    lease_s: float = 6.0
    listen: Listen = "loopback"
    announce_file: str | None = None
    cache: Cache = Cache()
    is_spread: bool = False
