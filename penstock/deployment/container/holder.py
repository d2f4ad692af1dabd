"""The deployment inside a container: started, shown to its control port, changed by it, and ended."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil

from penstock import __version__, paths, processes, run_folder, targets
from penstock.deployment import start
from penstock.deployment.doctor import nodes
from penstock.deployment.place import bind, launch
from penstock.deployment.prepare import Fetching, prepare
from penstock.deployment.stop import end_run
from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore
from penstock.gateway.connections.listener import open_socket
from penstock.log_lines import LogReader
from penstock.models.fetch import Progress
from penstock.paths import write_atomically
from penstock.run_folder import Desired, Run, replica
from penstock.spec.deployment import Deployment
from penstock.targets import inside
from penstock.wire.command import Done, Verb
from penstock.wire.container import STATE_FILES, ContainerView, End, Named

_MAX_EVENTS, _EVENTS_BYTES = 200, 200_000
_WATCHERS_GRACE_S = 3.0
_ANSWER_S = 90.0  # to wait for a start or a change, before the answer is that it is busy
_SHOWN_EVERY_S = 5.0


class Settings(msgspec.Struct, frozen=True):
    """`token`: of gateway and control port. `key_hash`: of the first client's key."""

    token: str
    key_hash: str | None = None


class Holder:
    """Thread-safe: the control port calls it from its own threads."""

    def __init__(self, deployment: Deployment, settings: Settings, stop: threading.Event) -> None:
        self.deployment, self._settings, self._stop = deployment, settings, stop
        self.run: Run | None = None
        self._stage, self._refusal, self._is_now = "starting", "", False
        self._changing = threading.Lock()
        self._shown_at = 0.0

    # ---- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring the deployment up as `up` on one machine does; what keeps it from that is the refusal."""
        try:
            with self._changing, run_folder.locked(self.deployment.name):
                self._start()
        except PenstockError as exc:
            self._refusal = " ".join(filter(None, [exc.message, exc.detail, exc.hint]))
            print(f"penstock: could not start: {self._refusal}", flush=True)

    def _start(self) -> None:
        deployment, token = self.deployment, self._settings.token
        before = Run(paths.home() / "runs" / deployment.name)
        if before.exists():  # the platform started this container again
            end_run(before, now=True, on_step=None)
        with bind("127.0.0.1") as admin:
            admin_port = admin.getsockname()[1]
            prepared = prepare(deployment, admin_port, fetching=Fetching(self._show, self._say))
            for warning in [*prepared.plan.warnings, *_shared_memory(prepared.plan.layout.n_ranks)]:
                print(f"penstock: warning: {warning}", flush=True)
            with open_socket((deployment.gateway.host, deployment.gateway.port)) as public:
                run = start.write_run(prepared, [public.getsockname()[1], admin_port])
                write_atomically(run.admin_token_file, token.encode(), mode=0o600)
                self._introduce_key(run)
                self._say("placing the replicas")
                launch(run, (public, admin))
        self.run = run

    def _introduce_key(self, run: Run) -> None:
        place = run.gateway_file().store
        if self._settings.key_hash is not None and place is not None:
            with contextlib.closing(store.connect(place)) as database:
                KeyStore(database).introduce("first", self._settings.key_hash, time.time())

    def _show(self, progress: Progress) -> None:
        self._stage = f"fetching the model: {progress.line}"
        now = time.monotonic()
        if now - self._shown_at > _SHOWN_EVERY_S:
            self._shown_at = now
            print(f"penstock: {self._stage}", flush=True)

    def _say(self, text: str) -> None:
        self._stage = text
        print(f"penstock: {text}", flush=True)

    @property
    def has_failed(self) -> bool:
        """Whether nothing will serve as it is: the start was refused, or no replica could start."""
        if self._refusal:
            return True
        state = self.run.state() if self.run is not None else None
        return state is not None and state.phase == "failed"

    def keep_up(self) -> None:
        """Start the controller again when it and its watchdog are gone."""
        if self.run is not None and self._changing.acquire(blocking=False):
            with contextlib.suppress(PenstockError):
                start.revive(self.run)
            self._changing.release()

    def finish(self) -> None:
        """End everything, after the requests in flight unless the order said now. Blocks."""
        run = Run(paths.home() / "runs" / self.deployment.name)
        if run.exists():  # also where a start was broken off in the middle
            end_run(run, now=self._is_now, on_step=lambda text: print(f"penstock: {text}", flush=True))

    # ---- what the control port asks ----------------------------------------------------------------------------------

    def view(self) -> ContainerView:
        run = self.run
        if run is None:
            return ContainerView(__version__, self._stage, self._refusal or None)
        units: dict[str, str | None] = {}
        for unit, place in targets.load(self.deployment.target).status(run).items():
            units[unit.key] = None if place.state == "placed" else place.reason or place.state
        return ContainerView(__version__, units=units, files=dict(_files(run)))

    def place(self, wanted: Named) -> ContainerView:
        """Exactly these replicas: their names count, which the controller does not know to choose."""
        with self._change() as run:
            if set(wanted.replicas) != set(run.handle().replicas):
                watchers = [p for p in processes.find_marked(str(run.path)) if p.role in ("watchdog", "controller")]
                processes.end(watchers, _WATCHERS_GRACE_S)
                target = targets.load(self.deployment.target)
                run.write_desired(msgspec.structs.replace(run.desired(), replicas=len(wanted.replicas)))
                run.write_handle(target.place(run, [replica(name) for name in wanted.replicas]))
            start.revive(run)
        return self.view()

    def order(self, desired: Desired) -> None:
        with self._change() as run:
            run.write_desired(desired)

    def end(self, order: End) -> None:
        self._is_now = order.now
        self._stop.set()

    def run_verb(self, verb: Verb) -> Done:
        if self.run is None:
            raise PenstockError("the deployment has not started", is_retryable=True)
        return inside.run([*verb.words, "--deployment", self.deployment.name], os.environ)

    @contextlib.contextmanager
    def _change(self) -> Iterator[Run]:
        if not self._changing.acquire(timeout=_ANSWER_S):
            raise PenstockError("the deployment is starting or changing", is_retryable=True)
        try:
            if self.run is None:
                raise PenstockError(self._refusal or "the deployment has not started", is_retryable=True)
            yield self.run
        finally:
            self._changing.release()


def _shared_memory(n_ranks: int) -> Iterator[str]:
    """Warnings of a platform that gives its containers little.  Raises UserError where ranks would end with SIGBUS."""
    size = psutil.disk_usage("/dev/shm")
    finding = nodes.shared_memory(size.free, size.total, n_ranks)
    if n_ranks > 1 and finding.state == "bad":
        raise UserError(
            f"cannot start {n_ranks} ranks in this container: /dev/shm has {finding.found}",
            hint="Take a machine whose one GPU holds the model; only the platform can give a container more.",
        )
    if n_ranks > 1 and finding.state == "warning":
        yield f"/dev/shm has {finding.found}"


def _files(run: Run) -> Iterator[tuple[str, str]]:
    for name in STATE_FILES:
        with contextlib.suppress(OSError):
            text = (run.path / name).read_text("utf-8", "replace")
            if name == run.events_file.name:
                kept = [*LogReader(run.events_file, _EVENTS_BYTES).lines()][-_MAX_EVENTS:]
                text = "".join(line.decode("utf-8", "replace") + "\n" for line in kept)
            yield name, text
