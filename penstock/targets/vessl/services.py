"""The life of a deployment that is a service of VESSL: workers behind VESSL's own gateway, each a whole deployment.

VESSL chooses how many there are. No port but the gateway's leads to a worker, and to any of them, so what is known here
is what VESSL says of them and what they print.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.run_folder import (
    Desired,
    Handle,
    Kind,
    Part,
    Phase,
    ReplicaStatus,
    Run,
    State,
    Unit,
    is_locked,
    order,
    unit_of,
)  # fmt: skip
from penstock.spec.deployment import Deployment
from penstock.targets import Adopted, Placement
from penstock.targets.vessl import folder, log_lines, run_yaml
from penstock.targets.vessl.api import Api
from penstock.targets.vessl.connections import Connections
from penstock.targets.vessl.service_api import Autoscaling, Revision, Service, ServiceApi, Worker
from penstock.targets.waiting import wait
from penstock.wire.answers import HttpError

_FRESH_S = 1.0
_ENDED_S = 120.0  # VESSL's own grace is not documented
_REFUSED = "penstock: could not start: "  # so the container begins that line (deployment/container)


class Look(msgspec.Struct, frozen=True):
    """What VESSL said at a moment of the monotonic clock. `words`: by pod, the last that a worker said of its start."""

    at: float
    service: Service | None = None
    revision: Revision | None = None
    workers: tuple[Worker, ...] = ()
    words: dict[str, str] = {}

    @property
    def n_ready(self) -> int:
        return sum(worker.ready is True for worker in self.workers)

    @property
    def refusal(self) -> str | None:
        """Why no worker will ever serve."""
        said = [words for words in self.words.values() if words.startswith(_REFUSED)]
        return said[0].removeprefix(_REFUSED) if said and not self.n_ready else None


class Services:
    """What `Target` asks of a service. Its methods keep the contract of those there."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._looks: dict[str, Look] = {}

    def _services(self, run: Run) -> ServiceApi:
        return ServiceApi(self._connections.of_run(run))

    # ---- placing -----------------------------------------------------------------------------------------------------

    def place(self, run: Run, units: Collection[Unit]) -> None:
        """Which replicas there are is VESSL's to choose."""
        asked = self._connections.of_run(run)
        services = ServiceApi(asked)
        service = services.read(run.name)
        living = _living(services, service)
        if living is None:
            living = self._create(asked, run, service)
        folder.note(run, asked.account, living.number, "service")
        self._looks.pop(str(run.path), None)

    def _create(self, asked: Api, run: Run, service: Service | None) -> Revision:
        services = ServiceApi(asked)
        folder.note(run, asked.account, None, "service")
        asked.write_secret(run_yaml.secret_of(run.name), folder.secret_value(run))
        if service is None:
            cluster = asked.clusters()[run_yaml.block_of(run.deployment()).cluster or ""]
            with _unless(lambda: services.read(run.name) is not None):
                services.create(run.name, cluster.id, run_yaml.tag_of(run.name))
        with _unless(lambda: _living(services, services.read(run.name)) is not None):
            services.create_revision(run.name, run.artifact().files[run_yaml.SERVICE_FILE])
        revision = services.revisions(run.name)[0]
        with _unless(lambda: _is_rolling(services.read(run.name))):
            services.activate(run.name, revision.number)
        return revision

    # ---- looking -----------------------------------------------------------------------------------------------------

    def status(self, run: Run) -> dict[Unit, Placement]:
        units = sorted(map(unit_of, run.handle().units), key=order)
        try:
            look = self._look(run)
        except PenstockError as exc:  # what VESSL does not tell has not changed
            return {unit: Placement("placed", exc.message) for unit in units}
        return {unit: placement(unit, look) for unit in units}

    def _look(self, run: Run) -> Look:
        known = self._looks.get(str(run.path))
        if known is not None and time.monotonic() - known.at < _FRESH_S:
            return known
        services, note = self._services(run), folder.note_of(run)
        service = services.read(run.name)
        rows = services.revisions(run.name) if service is not None and _is_ours(service) else []
        revision = next((row for row in rows if note is None or note.id in (None, row.number)), None)
        workers = () if revision is None else tuple(services.workers(run.name, revision.number))
        said = dict[str, str]()
        for worker in (worker for worker in workers if not worker.ready):
            lines = log_lines.own_lines(_reader(services, run, worker.revision_number, worker.pod_name))
            said |= {worker.pod_name: lines[-1]} if lines else {}
        look = self._looks[str(run.path)] = Look(time.monotonic(), service, revision, workers, said)
        return look

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        look = self._look(run)
        if look.revision is None:
            raise PenstockError(f'the service of "{run.name}" has no log yet', is_retryable=True)
        pods = [worker.pod_name for worker in look.workers]
        is_one = unit.kind == "replica" and int(unit.name) < len(pods)
        read = _reader(self._services(run), run, look.revision.number, pods[int(unit.name)] if is_one else None)

        def has_ended() -> bool:
            self._looks.pop(str(run.path), None)
            revision = self._look(run).revision
            return revision is None or revision.has_ended

        # Each worker has one replica, which calls itself 0.
        own = Unit("replica", "0") if unit.kind == "replica" else unit
        return log_lines.lines(read, own, follow, last, has_ended)

    # ---- the run folder ----------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> None:
        look = self._look(run)
        if run.is_ended() or (is_locked(run) and run.desired().state == "down"):
            return
        if look.revision is None or look.revision.has_ended:
            if folder.note_of(run) is not None and not is_locked(run):
                self._write_end(run, look)
            return
        if look.service is not None:
            folder.note_addresses(run, look.service.address)
        keys = [f"replica/{number}" for number in range(max(1, len(look.workers)))]
        handle = Handle(run.handle().target, {key: {} for key in [*keys, *folder.others(run.record().placed)]})
        if handle != run.handle():
            run.write_handle(handle)
        run.write_state(state(run, look, time.time()))

    def _write_end(self, run: Run, look: Look) -> None:
        revision = look.revision
        is_failed = revision is not None and revision.status == "failed"
        what = f'has no service "{run.name}" any more'
        if revision is not None:
            what = f"calls revision {revision.number} {revision.status}"
        folder.write_end(run, "failed" if is_failed else "down", f"VESSL {what}")
        with contextlib.suppress(PenstockError):  # else `down` removes it
            self._connections.of_run(run).delete_secret(run_yaml.secret_of(run.name))

    def order(self, run: Run, desired: Desired) -> None:
        """Hand the number to VESSL's autoscaling."""
        services, deployment = self._services(run), run.deployment()
        living = _living(services, services.read(run.name))
        if living is None:
            raise PenstockError(f'could not change "{run.name}": VESSL has no service of it')
        if desired.order != run.desired().order:
            hint = "A deployment that is one run can: vessl.kind: run."
            raise UserError(f'cannot reach the workers of "{run.name}": VESSL leads to no certain one', hint=hint)
        wanted = deployment.replicas
        if desired.is_pinned or not wanted.follows_load:
            wanted = msgspec.structs.replace(wanted, min=desired.replicas, max=desired.replicas)
        if wanted.min < 1:
            raise UserError(f'cannot scale "{run.name}" to 0: a service of VESSL has a worker', hint="penstock down")
        if wanted.max > 1 and not run_yaml.shares_keys(deployment):
            hint = "Set gateway.store to a PostgreSQL that the workers reach, and: penstock up --replace"
            raise UserError(f'cannot scale "{run.name}": its workers would not share their keys', hint=hint)
        services.scale(run.name, living.number, msgspec.convert(run_yaml.autoscaling(wanted), Autoscaling))
        run.write_desired(desired)
        self._looks.pop(str(run.path), None)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, run: Run, grace_s: float) -> None:
        """VESSL ends the workers, which drain as long as it lets them; then the service goes, and the secret."""
        asked = self._connections.of_run(run)
        services = ServiceApi(asked)
        service = services.read(run.name)
        if service is not None and _is_ours(service):
            if service.active_rollout is not None:
                services.abort_rollout(run.name)
            for row in services.revisions(run.name):
                if not row.has_ended:
                    services.terminate(run.name, row.number)
            if not wait(lambda: all(row.has_ended for row in services.revisions(run.name)), grace_s + _ENDED_S):
                hint = f"It may still be charged; see {services.page_of(run.name)}, then: penstock down {run.name}"
                message = f'could not end service "{run.name}": its workers have not ended'
                raise PenstockError(message, hint=hint, is_retryable=True)
            services.delete(run.name)
        asked.delete_secret(run_yaml.secret_of(run.name))
        self._looks.pop(str(run.path), None)

    # ---- from any machine --------------------------------------------------------------------------------------------

    def adopt(self, name: str, asked: Api, placed_of: Callable[[Deployment], tuple[Kind, ...]]) -> Adopted | None:
        services = ServiceApi(asked)
        try:
            service = services.read(name)
            living = _living(services, service) if service is not None and _is_ours(service) else None
        except HttpError as exc:
            if exc.status == 403:  # an account without services
                return None
            raise
        if living is None:
            return None
        found = folder.Found(f"service {name}", run_yaml.SERVICE_FILE, living.yaml_spec or "")
        run = folder.adopt(name, found, placed_of)
        folder.note(run, asked.account, living.number, "service")
        return Adopted(run, f'VESSL, organization "{asked.account.organization}", service {name}')

    def inside(self, run: Run, words: Sequence[str], is_terminal: bool) -> list[str]:
        """With a store that its workers share, the verb runs here on that."""
        deployment = run.deployment()
        if not run_yaml.shares_keys(deployment):
            raise UserError(
                f'cannot reach the keys of "{run.name}": they are inside its worker, and a service opens no port to it',
                hint="Set OPENAI_API_KEY to the key that `penstock up` printed, or gateway.store to a PostgreSQL.",
            )
        return [sys.executable, "-m", "penstock", *words, "--store", deployment.gateway.store or ""]


# ---- pure ------------------------------------------------------------------------------------------------------------


def placement(unit: Unit, look: Look) -> Placement:
    """What VESSL's words mean for a unit."""
    revision = look.revision
    if revision is None:
        return Placement("gone", "VESSL has no service of it: it was not created, or was deleted")
    if revision.has_ended:
        return Placement("gone", f"VESSL calls revision {revision.number} {revision.status}", is_final=True)
    if unit.kind != "replica":
        if look.refusal is not None:
            return Placement("queued", look.refusal, is_final=True)
        return Placement("placed")
    index = int(unit.name)
    if index >= len(look.workers):
        return Placement("queued", f"VESSL calls revision {revision.number} {revision.status}, and has no worker yet")
    worker = look.workers[index]
    if worker.status == "running" and worker.ready:
        return Placement("placed", where=worker.pod_name)
    said = look.words.get(worker.pod_name)
    return Placement("queued", f"worker {worker.pod_name} is {worker.status}{f': {said}' if said else ''}")


def state(run: Run, look: Look, now: float) -> State:
    """As the controller of a deployment elsewhere writes it. `now` in Unix seconds."""
    desired, last = run.desired(), run.state()
    n_least = desired.replicas if desired.is_pinned else run.deployment().replicas.first
    was_ready = last is not None and last.phase in ("ready", "degraded")
    address = look.service.address if look.service is not None else None
    phase: Phase = "degraded" if was_ready else "starting"
    if look.refusal is not None and not was_ready:
        phase = "failed"
    elif address is not None and look.n_ready >= n_least:
        phase = "ready"
    replicas = []
    for number in range(max(1, len(look.workers))):
        place = placement(Unit("replica", str(number)), look)
        words = "ready" if place.state == "placed" else "queued"
        replicas.append(ReplicaStatus(str(number), words, place.state, reason=place.reason))
    gateway = look.service.gateway_config if look.service is not None else None
    note = "VESSL's own leads to the workers' gateways" if address else "it waits for its address"
    note = (gateway.last_error if gateway is not None else None) or note
    return State(
        round(now, 3), phase, n_least, tuple(replicas), Part("running", unit="0", note="each worker has one"),
        Part("running" if address else "starting", unit=folder.GATEWAY_UNIT, note=note),
        reason=look.refusal if phase == "failed" else None,
    )  # fmt: skip


# ---- calls -----------------------------------------------------------------------------------------------------------


def _is_ours(service: Service) -> bool:
    return service.description == run_yaml.tag_of(service.name)


def _is_rolling(service: Service | None) -> bool:
    return service is not None and service.active_rollout is not None


def _living(services: ServiceApi, service: Service | None) -> Revision | None:
    """The newest revision that has not ended; None also for a service that penstock did not make."""
    if service is None or not _is_ours(service):
        return None
    return next((row for row in services.revisions(service.name) if not row.has_ended), None)


def _reader(services: ServiceApi, run: Run, number: int, pod_name: str | None) -> log_lines.Read:
    return lambda since: services.logs(run.name, number, pod_name, since)


@contextlib.contextmanager
def _unless(is_done: Callable[[], bool]) -> Iterator[None]:
    """A call whose answer was lost may have been heard."""
    try:
        yield
    except PenstockError as exc:
        if not exc.is_retryable or not is_done():
            raise
