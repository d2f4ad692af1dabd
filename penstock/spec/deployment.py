"""The deployment file as frozen types. Every default lives here; `reading` finds the problems of a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from penstock.spec.blocks import Cloudera, Kubernetes, RayCluster, Slurm, Ssh, Vessl
from penstock.spec.gateway import LOOPBACK, GatewaySettings, Price

TARGETS = ("local", "ssh", "ray", "slurm", "kubernetes", "cloudera", "vessl")
DEMO_MODEL = "penstock-demo"

Scalar = str | int | float | bool | None


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the machines must have: `up` rejects one that lacks it, `plan` and `render` assume it without a machine.

    Absent fields are asked of the target. `network` is what joins the nodes: a catalogue id (ib-ndr) for the planner,
    or the network (10.9.0.0/16) whose addresses they use among themselves. `price_per_gpu_hour`: US dollars, or
    `price_file`: a YAML file of such prices by the catalogue's GPU names; with it measured costs are shown. `gpu_ids`:
    which GPUs of each machine replicas may use, as nvidia-smi numbers them ([2, 3]); on targets local and ssh.
    """

    gpu: str | None = None
    gpus_per_node: int | None = None
    nodes: int = 1
    network: str | None = None
    price_per_gpu_hour: float | None = None
    price_file: str | None = None
    gpu_ids: tuple[int, ...] | None = None

    @property
    def n_gpus(self) -> int | None:
        return len(self.gpu_ids) if self.gpus_per_node is None and self.gpu_ids is not None else self.gpus_per_node

    @property
    def link(self) -> str | None:
        return self.network if self.subnet is None else None

    @property
    def subnet(self) -> str | None:
        return self.network if self.network is not None and "/" in self.network else None


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one replica is cut: tensor * pipeline * data ranks; `expert` spreads MoE experts over them."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def n_ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine may sleep: its GPU memory is freed, its process stays, and the next request wakes it. vLLM on GPUs.

    `after_s`: it falls asleep by itself after that time without a request; absent, on `penstock sleep` alone.
    `level`: 1 keeps the weights in the machine's memory; 2 drops them, and waking reads the files again; auto takes 1
    where they fit into 90 % of the free memory.
    """

    after_s: float | None = None
    level: Literal["auto", 1, 2] = "auto"


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value of `engine.env` that looks like a secret; with `secret: false` it is none."""

    value: str
    secret: bool


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine and its own settings. `args` are engine flags without dashes in front, passed through as they are;
    a mapping becomes JSON. `env`: text or numbers; true and false become 1 and 0. What looks like a secret is refused,
    with the way to give it, since files would show it; `NAME: {value: TEXT, secret: false}` is a value that is none.

    `executor` is how the ranks of one replica find each other: Ray, or vLLM's own processes (mp); auto takes mp inside
    one node and ray across nodes. `join_timeout_s`: how long the first node waits for the others. `ray_dashboard_host`:
    by Ray's dashboard one can run code on the nodes. It asks for a token (`penstock dashboard NAME --ray 0`; Ray before
    2.52 does not), which is sent unencrypted, so keep it on loopback. `load`: how vLLM reads the weights, one of its
    load formats (`safetensors` is the plain one); auto measures the disk of each node and chooses. `version`: of vLLM
    in an image whose tag does not tell it, or in the public one.
    """

    kind: Literal["auto", "vllm", "llamacpp", "fake"] = "auto"
    version: str | None = None
    load: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    executor: Literal["auto", "ray", "mp"] = "auto"
    args: dict[str, Scalar | list[Scalar]] = {}
    env: dict[str, str | Variable] = {}
    start_timeout_s: float = 3600.0
    join_timeout_s: float = 300.0
    ray_dashboard_host: str = "127.0.0.1"
    stall_s: float = 60.0
    drain_s: float = 120.0
    sleep: Sleep | None = None

    @property
    def flags(self) -> dict[str, Scalar | list[Scalar]]:
        """`args`, and the flag of `load` where the file names a format."""
        return self.args if self.load == "auto" else {**self.args, "load-format": self.load}

    @property
    def variables(self) -> dict[str, str]:
        """`env` with plain values."""
        return {name: value if isinstance(value, str) else value.value for name, value in self.env.items()}


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the deployment must serve: tokens per request, requests at once, and the latency promised (milliseconds)."""

    input_tokens: int = 1000
    output_tokens: int = 200
    concurrency: int = 8
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class ScalingPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most this change of the number of replicas in a period: so many (`Pods`), or a share of them (`Percent`)."""

    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: int = 60


class ScalingRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """HPA v2's `behavior.scaleUp` or `scaleDown`, in snake case.

    Up, the smallest number wanted within `stabilization_window_seconds` counts; down, the largest. Absent, the window
    is adapted to the start time and to the load. `select_policy`: which of `policies` counts, the one that allows most
    (Max) or least (Min); Disabled: no change in this direction.
    """

    stabilization_window_seconds: int | None = None
    policies: tuple[ScalingPolicy, ...] = ()
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"


class ScheduledMin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At least `min` replicas on these days of the week (none: every day) in these hours of `time_zone`. Hours past
    midnight (`22:00-06:00`) belong to the day on which they begin. Replicas start early enough to be ready then."""

    min: int
    hours: str = "00:00-24:00"
    days: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] = ()
    time_zone: str = "UTC"


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many engines. A bare number in the file means min = max = that number.

    `metric`: what the number follows. slo: as many as `workload.ttft_ms` needs at the load to come; waiting, in_flight
    (requests), kv (share of the cache in use), rate (requests a second): the sum over all replicas divided by `target`,
    absent 10, 64, 0.8; rate has no default. `up`, `down`: limits of changes. `idle_s`: with `min: 0` the last replica
    ends after that time without a request, at the earliest after three start times. `up` starts one in any case.
    `actuator`: who sets the number, on target kubernetes: penstock's controller, or a HorizontalPodAutoscaler, or KEDA,
    which then follow the gauge `penstock_desired_replicas`.
    """

    min: int = 1
    max: int = 1
    metric: Literal["slo", "waiting", "in_flight", "kv", "rate"] = "slo"
    target: float | None = None
    up: ScalingRules | None = None
    down: ScalingRules | None = None
    idle_s: float = 900.0
    schedule: tuple[ScheduledMin, ...] = ()
    actuator: Literal["penstock", "hpa", "keda"] = "penstock"

    @property
    def follows_load(self) -> bool:
        return self.max > self.min

    @property
    def first(self) -> int:
        """How many `up` starts: with `min: 0` one, which proves that it works."""
        return max(self.min, 1) if self.follows_load else self.min


class GatewaySpec(GatewaySettings, frozen=True, forbid_unknown_fields=True):
    """Where clients connect. `port: 0` takes any free port. Beyond loopback `auth: keys` is required; with targets ssh
    and slurm, whose machines others may log in to, and vessl, whose address is public, it is the default.

    `on`: the gateway runs where `up` runs (login), or in a job (job), which only target slurm can do; then `host` is
    that node's address, and `port` any free one if taken. `price` is what the ledger and budgets count. `store` (a
    file, or a postgresql:// URL for several gateways) holds keys and usage; its default is a file in the run's folder.
    After `ledger_days` a request's row becomes part of its day's sums; `null` keeps it for ever. Keys that could not be
    read for `keys_stale_s` are refused. `hold_s`: how long a request waits for a replica; `drain_s`: how long requests
    may finish when the gateway stops. `workers`: processes on the one port. `policy`: which replica gets a request.
    `max_in_flight`: requests on one replica at a time; further ones wait in the gateway, where the queue is fair
    between keys; absent, engines queue.
    `tls_cert` (a certificate chain) and `tls_key` are PEM files: clients then speak TLS. `allowed_origins`: web pages
    that may read answers, `"*"` for all; empty means every page with `auth: keys`, else pages of this machine.
    `path_prefix`: every route is also served below it, for a proxy that passes one path on. `engine_routes`: routes
    that administer engines, closed unless named (`/v1/load_lora_adapter`, `/sleep`); one replica gets such a request.
    `access_log`: a file that gets one JSON line a request, never a prompt or a key's secret, or `stderr`. `traces`: a
    span of each request goes to an OpenTelemetry collector, and the engine's span hangs below it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    auth: Literal["none", "keys"] = "none"
    on: Literal["login", "job"] = "login"
    aliases: tuple[str, ...] = ()
    price: Price | None = None


class RemoteWrite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where Prometheus sends all samples too. `token_file`: a bearer token, mode 600."""

    url: str
    token_file: str | None = None


class Observe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`prometheus`: the controller runs a Prometheus of this deployment, on loopback, with rules and alerts. Its
    program is found on PATH, or is `prometheus_binary`. With target kubernetes the cluster's Prometheus gets the rules.
    `grafana`: files that provision Grafana are written into the run's folder. `port`: of Prometheus, any free one when
    0. `retention` and `retention_size` are its own words.
    """

    prometheus: bool = False
    grafana: bool = False
    prometheus_binary: str | None = None
    port: int = 0
    retention: str = "15d"
    retention_size: str = "1GB"
    remote_write: RemoteWrite | None = None


class Ui(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chat page; `ui: true` is one with these defaults. Beyond loopback it needs `login: keys`.

    `login`: who opens the page gives a key of the gateway (keys) and is counted under it, or everyone uses a key of the
    deployment's owner (none); absent: keys where the gateway wants keys. `root_path`: the path at which a proxy serves
    the page. `trusted_proxies`: addresses and networks of proxies whose X-Forwarded headers are believed. `system`: the
    system message of new conversations, which people may change. `examples`: questions shown on an empty page.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    login: Literal["keys", "none"] | None = None
    title: str | None = None
    system: str | None = None
    examples: tuple[str, ...] = ()
    root_path: str | None = None
    trusted_proxies: tuple[str, ...] = LOOPBACK


# cache.weights that is no folder.
_ELSEWHERE = re.compile(r"(pvc|image):|[a-z][a-z0-9-]*://|pod\Z")


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`weights`: the folder where models from a hub are kept (the hub's own cache when absent).

    With target kubernetes it says where the pods find the model. Absent: a claim for each model, which a Job fills from
    the hub once (`kubernetes.storage_class`, `storage_size`, `storage_access`). `pod`: each pod's own disk, filled when
    it starts. The others hold the model's folder and are only read: `pvc:CLAIM/PATH`, `gs://BUCKET/PATH` (Cloud Storage
    FUSE of GKE), `s3://BUCKET/PATH` (vLLM streams it), `image:REFERENCE` (an image volume), and a folder of the nodes.
    With target vessl: `volume://STORAGE/NAME`, which is mounted, or `vessl-artifact://ORG/PROJECT/NAME`, which is
    copied in at the start and saved when the run ends.

    `stage`: where each node keeps a copy of the weights to load from. `none`: nowhere, a model's folder is read where
    it is. A folder of the nodes, with their variables ($SLURM_TMPDIR/models): it stays there for the next start.
    `auto`: on the node's own scratch disk ($SLURM_TMPDIR, $TMPDIR, /tmp) where the weights lie on a file system of
    other machines; it goes with the last node on the machine that uses it. The nodes pass the files on to each other,
    so that the source sends each byte about once.

    `allow_pickle`: fetch weights that are pickled (*.bin, *.pt) where there are no others; loading them can run code.
    """

    weights: str | None = None
    stage: str = "none"
    allow_pickle: bool = False

    @property
    def folder(self) -> str | None:
        """`weights` where it is a folder of a machine."""
        return None if self.weights is None or _ELSEWHERE.match(self.weights) else self.weights


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: what to run, where, and what it must do. `name` is filled from the model when absent."""

    model: str
    name: str = ""
    target: Literal["local", "ssh", "ray", "slurm", "kubernetes", "cloudera", "vessl"] = "local"
    hardware: Hardware = Hardware()
    parallel: Literal["auto"] | Parallel = "auto"
    engine: EngineSpec = EngineSpec()
    workload: Workload = Workload()
    replicas: Replicas = Replicas()
    gateway: GatewaySpec = GatewaySpec()
    ui: bool | Ui = False
    observe: Observe = Observe()
    cache: Cache = Cache()
    ssh: Ssh | None = None
    ray: RayCluster | None = None
    slurm: Slurm | None = None
    kubernetes: Kubernetes | None = None
    cloudera: Cloudera | None = None
    vessl: Vessl | None = None

    @property
    def chat_page(self) -> Ui | None:
        """The settings of the chat page, with `login` and the path behind a cluster's Ingress filled in, if any."""
        if self.ui is False:
            return None
        page = Ui() if self.ui is True else self.ui
        is_below = self.target == "kubernetes" and self.kubernetes is not None and self.kubernetes.has_paths
        path = page.root_path if page.root_path is not None or not is_below else "/ui"
        return msgspec.structs.replace(page, login=page.login or self.gateway.auth, root_path=path)


_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z")


def default_name(model: str) -> str:
    """A legal deployment name from a model: "meta-llama/Llama-3.1-8B" -> "llama-3-1-8b"."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(model.rstrip("/")).name.lower()).strip("-")
    return words[:40].strip("-") or "model"


def is_legal_name(name: str) -> bool:
    """Whether a deployment may have that name, which is also the name of its folder."""
    return _NAME.match(name) is not None
