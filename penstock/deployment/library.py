"""The functions of `import penstock`: the verbs of the command line for a Python program.

They block, print nothing and raise PenstockError. A deployment belongs to its name and outlives the program: any
process of the same user can look at it, scale it and end it, as can the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from penstock import run_folder, targets
from penstock.deployment import live, observe, orders, planning, start, stop
from penstock.deployment import logs as deployment_logs
from penstock.deployment.replace import undo
from penstock.errors import UserError
from penstock.planner.request import Sizing
from penstock.run_folder import Run, State
from penstock.spec import reading
from penstock.spec.deployment import DEMO_MODEL, Deployment
from penstock.wire.client import Client
from penstock.wire.live import Snapshot

Source = Deployment | Mapping[str, Any] | Path | str
OnState = Callable[[State], None]


class PlanOptions(TypedDict, total=False):
    """Further facts for `plan`, named as in `penstock plan --help`."""

    nodes: int
    network: str
    tensor: int
    pipeline: int
    data: int
    max_model_len: int
    max_num_seqs: int
    quantization: str
    kv_cache_dtype: str
    engine_version: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float


class RunningDeployment(msgspec.Struct, frozen=True):
    """A deployment that `up` started or found. `url` is None while its gateway waits in a queue.

    `key` is the client's API key, known to the `up` that created it alone.
    """

    name: str
    url: str | None
    key: str | None = None
    was_running: bool = False

    def client(self, key: str | None = None) -> Client:
        """Raises UserError for a gateway inside a cluster, which this machine reaches by a tunnel only."""
        run = run_folder.find(self.name)
        if run.public_url is None and "tunnels" in targets.load(run.record().target).capabilities:
            hint = f"Open a tunnel (penstock tunnel {self.name} --port 8000) and give its address to penstock.Client."
            raise UserError(f'cannot reach the gateway of "{self.name}" from here: it is in a cluster', hint=hint)
        return Client(run.url, key or self.key)

    def status(self) -> State:
        return status(self.name)

    def live(self) -> Snapshot:
        """Load, speed, GPUs and cost now, as its gateways measure them. Raises PenstockError when none answers."""
        return live.snapshot(run_folder.find(self.name))

    def logs(self, follow: bool = False) -> Iterator[str]:
        return logs(self.name, follow=follow)

    def scale(self, n_replicas: int, wait: bool = True) -> State:
        return scale(self.name, n_replicas, wait=wait)

    def sleep(self, wait: bool = True) -> State:
        return sleep(self.name, wait=wait)

    def wake(self, wait: bool = True) -> State:
        return wake(self.name, wait=wait)

    def down(self, now: bool = False) -> None:
        down(self.name, now=now)


def plan(source: Source, gpu: str | None = None, gpus: int | None = None, **options: Unpack[PlanOptions]) -> Sizing:
    """What fits, how to split the model and how fast it will be, without starting anything.

    `source` is a model (folder, catalogue name, hub id) or a deployment (file, mapping, Deployment). `gpu` is a
    catalogue id such as "h100-sxm", `gpus` their number in each node; default: those of the deployment, or else of this
    machine.  Raises UserError for what cannot be read, NotModelled for a model whose memory cannot be computed.
    """
    fields: dict[str, Any] = {"gpu": gpu, "gpus_per_node": gpus, **options}
    asked = {field: value for field, value in fields.items() if value is not None}
    is_model = isinstance(source, str) and not reading.is_yaml(source)
    request, card = planning.request_for(str(source) if is_model else deployment_of(source), asked)
    return planning.solve(request, card)


def up(
    source: Source = DEMO_MODEL,
    *,
    replace: bool = False,
    wait: bool = True,
    timeout_s: float | None = None,
    on_state: OnState | None = None,
) -> RunningDeployment:
    """Start a deployment, or find it running with the same settings. With `wait`, block until every replica is ready.

    `replace` ends a deployment of that name that runs with other settings, and starts it again when this start fails.
    `on_state` is called with each new state. Raises UserError, PlanError, or EngineError for a start that failed, of
    which nothing stays. After `timeout_s` it
    raises PenstockError and the start continues; Ctrl-C ends a start of ours.
    """
    started = start.up(deployment_of(source), replace)
    run = run_folder.find(started.name)
    try:
        if wait:
            start.wait_ready(run, on_state or _ignore, timeout_s, started.is_alone)
        else:
            start.wait_listening(run)
    except KeyboardInterrupt:
        if started.is_alone:
            undo(run)
        raise
    return RunningDeployment(started.name, live.shown(run).url, started.key, started.was_running)


def status(name: str | None = None) -> State:
    """The deployment's state now. Without a name, the only deployment that runs."""
    return observe.now_state(_chosen(name), time.time())


def logs(
    name: str | None = None,
    *,
    part: Literal["replicas", "gateway", "controller", "events"] = "replicas",
    replica: str | None = None,
    last: int | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """Lines of the log of one part, the `last` of each; with `follow`, new lines until the deployment ends."""
    wanted = deployment_logs.Selection(replica, last, follow, with_ended=True)
    return deployment_logs.lines(_chosen(name), part, wanted)


def scale(
    name: str | None,
    n_replicas: int | None,
    *,
    wait: bool = True,
    timeout_s: float | None = None,
    on_state: OnState | None = None,
) -> State:
    """Change the number of replicas, None: as many as the load needs. With `wait`, block until that many are ready and
    the others have drained."""
    run = _chosen(name)
    orders.scale(run, n_replicas)
    if not wait or n_replicas is None:
        return observe.now_state(run, time.time())
    return orders.wait_scaled(run, n_replicas, on_state or _ignore, timeout_s)


def sleep(
    name: str | None = None, *, wait: bool = True, timeout_s: float | None = None, on_state: OnState | None = None
) -> State:
    """Let every replica sleep when no request runs on it; a request wakes it. With `wait`, block until all sleep.

    Raises UserError for a deployment without `engine.sleep`, PenstockError for a replica that does not sleep.
    """
    return _order(name, "sleep", wait, timeout_s, on_state)


def wake(
    name: str | None = None, *, wait: bool = True, timeout_s: float | None = None, on_state: OnState | None = None
) -> State:
    """Wake every replica that sleeps. With `wait`, block until all are awake."""
    return _order(name, "wake", wait, timeout_s, on_state)


def _order(
    name: str | None,
    word: Literal["sleep", "wake"],
    wait: bool,
    timeout_s: float | None,
    on_state: OnState | None,
) -> State:
    run = _chosen(name)
    asked = orders.order(run, word)
    if not wait:
        return observe.now_state(run, time.time())
    return orders.wait_ordered(run, word, asked, on_state or _ignore, timeout_s)


def down(name: str | None = None, *, now: bool = False) -> None:
    """End a deployment: requests in flight finish first, unless `now`. Safe to repeat."""
    stop.down(_chosen(name), now)


def deployment_of(source: Source, settings: Sequence[str] = ()) -> Deployment:
    if isinstance(source, Mapping | Deployment):  # which may have been made without the rules of a file
        return reading.from_mapping(msgspec.to_builtins(source), "this deployment", settings)
    return reading.read(source, settings)


def _chosen(name: str | None) -> Run:
    """The deployment's run; one that another machine started gets a folder here."""
    if name is not None:
        targets.discover(name)
    return run_folder.choose(name)


def _ignore(_: State) -> None:
    return None
