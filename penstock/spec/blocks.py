"""The blocks of the deployment file that belong to one kind of target each: `ssh`, `ray`, `slurm`, `kubernetes`,
`cloudera`, `vessl`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# Targets whose gateway runs where others may reach it: on a login node, in a cluster's network, at a public address.
SHARED = ("ssh", "slurm", "kubernetes", "cloudera", "vessl")

# Who chooses the GPUs of a replica, where the file does not.
GPUS_FROM = {"ray": "Ray", "slurm": "Slurm", "kubernetes": "Kubernetes", "cloudera": "Cloudera AI", "vessl": "VESSL"}

# How an engine's variable gets a secret there, which the file does not hold.
SECRETS_FROM = {
    "local": "export {name} before `penstock up`: engines inherit its environment",
    "ssh": "set {name} in /etc/environment of each host",
    "ray": "set {name} where `ray start` runs on each machine",
    "slurm": "keep it in a file of mode 600, and set slurm: {{prologue: ['export {name}=$(cat ~/.{name})']}}",
    "kubernetes": "put it into a Secret, and name it in kubernetes.hub_token_secret or kubernetes.patch (secretKeyRef)",
    "cloudera": "set {name} in the environment variables of the project",
    "vessl": "make a VESSL secret, then vessl.secrets: {{{name}: ITS_NAME}}",
}


class Ssh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bare machines by OpenSSH. A replica takes `hardware.nodes` of the hosts, in their order.

    `hosts`: `user@host`, or names of ~/.ssh/config. `config`: another file in its place. `python`: the interpreter on
    the hosts; an engine that is installed there is used. `folder`: where penstock keeps its things on the hosts.
    """

    hosts: tuple[str, ...] = ()
    config: str | None = None
    python: str = "python3"
    folder: str = "~/.penstock"


class RayCluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Ray cluster that runs already. `address`: its Jobs API, http://host:8265. `runtime_env` is Ray's own. `python`:
    the interpreter on its machines that has penstock and the engine; Ray's own when absent.
    """

    address: str = "http://127.0.0.1:8265"
    python: str | None = None
    runtime_env: dict[str, Any] = {}


class Slurm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs of Slurm: one for each replica, of `hardware.nodes` nodes. Words are sbatch's own.

    `login`: the login node by ssh, when penstock does not run there itself; `ssh_config` in place of ~/.ssh/config.
    `directives`: further #SBATCH lines, as they follow `--`. `modules` (`cuda/12.4`, `use /modules`, `--force purge`),
    `conda`, `venv`: loaded in this order, then the lines of `prologue`. `container`: an image with the engine, which
    gets penstock: a file or URI for Apptainer, [REGISTRY#]NAME:TAG or a squashfs file for Pyxis, a name for Podman-HPC.
    `container_flags`: more flags of `apptainer exec`, srun or `podman-hpc run`. `python`: the interpreter on the nodes
    that has penstock and the engine, or the image's; that of the login node when absent. `successor_s`: so long before
    the time limit the next job is submitted; twice the time that a start took when absent. `gateway_partition`: for the
    gateway's job (gateway.on: job), which needs no GPU; without it that is `partition`, with `qos` and `directives`
    too. `controller: job` puts the controller into a job like the gateway's, so that nothing of the deployment stays on
    the login node.
    """

    login: str | None = None
    ssh_config: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    time: str | None = None
    exclusive: bool = False
    cpus_per_node: int | None = None
    memory: str | None = None
    nodelist: str | None = None
    directives: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    conda: str | None = None
    venv: str | None = None
    container: str | None = None
    container_runtime: Literal["apptainer", "pyxis", "podman-hpc"] = "apptainer"
    container_flags: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    python: str | None = None
    successor_s: float | None = None
    gateway_partition: str | None = None
    controller: Literal["login", "job"] = "login"


class Kubernetes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Kubernetes cluster, by the kubeconfig of this machine. Words are those of the API.

    `context`, `namespace`: the kubeconfig's current ones when absent; later verbs keep those of `up`. `image`: with the
    engine (vllm/vllm-openai of the planned version when absent). `gateway_image`: for gateway and controller, any image
    with Python 3.11 and penstock's requirements; `image` when absent. `ui_image`: for the chat page, one with Gradio
    too; when absent the pod installs that, on top of `gateway_image`, from the index of `engine.env.PIP_INDEX_URL`.
    `shape`: one StatefulSet, or one LeaderWorkerSet, for each replica. `node_selector`: in place of the label that the
    nodes have for `hardware.gpu`. `cpus_per_node`, `memory`: requests of a replica's pods (from the plan when absent).
    `gateways`: pods of the gateway; several need a `gateway.store` in PostgreSQL, whose password is `postgres_secret`'s
    key "password".

    `storage_class`, `storage_size`, `storage_access`: of the claim that keeps the weights (`cache.weights` absent). All
    deployments of a model in the namespace share it, and it stays when they end. It has room for the weights and 15 %
    more when no size is given. ReadWriteOnce is for one replica on one node, whose pod then fetches the model itself.
    `expose`: how clients outside reach the gateway. `host`, `tls_secret`, `issuer` (cert-manager's ClusterIssuer),
    `ingress_class` and `route_parent` (NAMESPACE/NAME of a Gateway) are for Ingress and HTTPRoute.
    `monitoring`: which objects tell Prometheus where to scrape; "auto" takes those that the cluster knows.
    `prometheus_url`: that Prometheus, for KEDA (`replicas.actuator: keda`).
    `hub_token_secret`: a Secret whose key "token" is the hub's. `labels`, `annotations`: of every pod. `patch`: a
    strategic merge patch of the pod template of replicas, for all that has no field here.
    """

    context: str | None = None
    namespace: str | None = None
    image: str | None = None
    gateway_image: str | None = None
    ui_image: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    shape: Literal["statefulset", "lws"] = "statefulset"
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    priority_class: str | None = None
    runtime_class: str | None = None
    service_account: str | None = None
    cpus_per_node: int | None = None
    memory: str | None = None
    gateways: int = 1
    postgres_secret: str | None = None
    storage_class: str | None = None
    storage_size: str | None = None
    storage_access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    hub_token_secret: str | None = None
    expose: Literal["none", "LoadBalancer", "Ingress", "HTTPRoute"] = "none"
    host: str | None = None
    tls_secret: str | None = None
    issuer: str | None = None
    ingress_class: str | None = None
    route_parent: str | None = None
    inference_pool: bool = False
    monitoring: Literal["auto", "google", "operator", "annotations", "none"] = "auto"
    prometheus_url: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    patch: dict[str, Any] = {}

    @property
    def has_paths(self) -> bool:
        """Whether clients outside reach other Services than the gateway's at the same host, below a path."""
        return self.expose in ("Ingress", "HTTPRoute")


class Cloudera(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A project of a Cloudera AI workbench, by its API v2. Words are those of the API.

    `workbench`: its URL; `project`: the project's name. In a session of the project both may be absent. `key_file`: the
    API v2 key, when CDSW_APIV2_KEY does not hold it; `ca_file`: the certificates that sign the workbench's own, as PEM.
    `runtime`: the image of all pods (when absent the newest enabled one whose Python fits, with CUDA where it can be).
    `python`: the interpreter in the pods that has the engine and penstock's requirements; when absent the application
    makes an environment once in the project, from the index of `engine.env.PIP_INDEX_URL`.

    `gpu_type`: the label of the GPU's nodes (NVIDIA-L4), when there are several. `cpu`, `memory_gb`: of the pod of a
    node (from the plan when absent); `gateway_cpu`, `gateway_memory_gb`: of the application with gateway and
    controller. `public`: the application asks for no login of the workbench, only for a key of the gateway.
    `shared_memory_mb`: `up` raises the project's limit of /dev/shm to that where it is lower. `nodes`: a node is a job,
    or a worker that the application launches, for a workbench in which pods of jobs do not reach each other; workers
    end with the application.
    """

    workbench: str | None = None
    project: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    runtime: str | None = None
    python: str | None = None
    gpu_type: str | None = None
    cpu: float | None = None
    memory_gb: float | None = None
    gateway_cpu: float = 2.0
    gateway_memory_gb: float = 4.0
    public: bool = False
    shared_memory_mb: int | None = None
    nodes: Literal["jobs", "workers"] = "jobs"


class Vessl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of VESSL: a container that holds the whole deployment. Words are VESSL's own.

    `product`: VESSL Run and Service (run); VESSL Cloud (cloud) has other calls and is not built. `kind: service`: a
    service of VESSL, whose autoscaling starts such containers between `replicas.min` and `replicas.max`.
    `organization`, `project`: those of `vessl configure` when absent. `cluster` and `preset` are required. `spot: true`
    allows a preset of spot machines: a reclaim ends the deployment.

    `image`: with the engine and Python 3.11 (vllm/vllm-openai of the planned version when absent). `code`: a source of
    VESSL's (volume://STORAGE/NAME) that holds penstock's wheel; absent, an image without penstock installs it by pip.
    `secrets`: variables by the names of VESSL secrets ({HF_TOKEN: my-hub-token}). `mounts`, `imports`, `exports`: its
    mount, import and export, {path: source}. `max_hours`: the deployment ends itself after so long.
    """

    product: Literal["run", "cloud"] = "run"
    kind: Literal["run", "service"] = "run"
    organization: str | None = None
    project: str | None = None
    cluster: str | None = None
    preset: str | None = None
    spot: bool = False
    image: str | None = None
    code: str | None = None
    secrets: dict[str, str] = {}
    mounts: dict[str, str] = {}
    imports: dict[str, str] = {}
    exports: dict[str, str] = {}
    max_hours: float | None = None
