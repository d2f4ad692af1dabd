"""The objects of gateway, controller and chat page, and the anchor that all others belong to. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from penstock.engines.vllm import images
from penstock.planner import Plan
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import monitoring, objects, pods, traffic
from penstock.targets.kubernetes.objects import ADMIN_PORT, GATEWAY_PORT, STORE_FOLDER, UI_PORT, Object, block_of, build
from penstock.targets.kubernetes.pods import Pod
from penstock.text import MIB

TLS_FOLDER = "/etc/penstock/tls"
_TLS_MOUNT: Object = {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}
_UNIT = ("-m", "penstock.deployment.placed_unit")
# Between SIGTERM and the end of its drain a gateway accepts no connection; every node of the cluster must have heard by
# then that this pod gets none. https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination-flow
_LEAVE_S = 5
_EXIT_S = 30  # to cut what did not end within drain_s, and to write the ledger
# A Python process with 60 MiB, and per worker the bodies of requests that wait (gateway.queue.body_bytes).
_WORKER_MIB, _WORKER_CPU = 512, 500
_CONTROLLER = {"cpu": "100m", "memory": "256Mi"}
_CONTROLLER_LIMITS = {"memory": "512Mi"}
# Gradio has 142 MB when it idles; pip needs 172 MB and 16 CPU-seconds to install it (measured).
_PAGE, _PAGE_LIMITS = {"cpu": "250m", "memory": "512Mi"}, {"memory": "1Gi"}
_PAGE_EXIT_S = 10
_RBAC = "rbac.authorization.k8s.io/v1"
_SPARE_NAMES = 16  # of replicas in the controller's Role
_PACKAGES = f"{objects.HOME}/packages"
_PIP_VARIABLES = re.compile(r"PIP_\w+|(?:https?|no|all)_proxy", re.IGNORECASE)
# A lost node: both go elsewhere after half a minute, where pods wait five by default.
_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for state in ("not-ready", "unreachable")
]
_HOST, _ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"


def anchor(deployment: Deployment, data: Mapping[str, str]) -> Object:
    """The ConfigMap that owns all other objects of a deployment; `data` is read by gateway and controller."""
    return build("v1/ConfigMap", objects.anchor(deployment.name), deployment, data=dict(data))


def gateway(deployment: Deployment, plan: Plan, monitors: monitoring.Kinds = "none") -> list[Object]:
    """The gateway's pods, the Services by which clients and nodes reach them, the claim of their keys and usage."""
    block, name = block_of(deployment), deployment.name
    pods_of = objects.labels(name, "gateway")
    spec = {
        "replicas": block.gateways,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": pods_of},
        "template": _gateway_template(deployment, plan, monitors),
    }
    entries = [
        _service(deployment, objects.gateway(name), {"ports": [traffic.service_port(deployment)]}),
        _service(
            deployment,
            objects.gateway_pods(name),
            # Nodes must reach a gateway that is not ready: it becomes so when it listens, with or without a replica.
            {"clusterIP": "None", "publishNotReadyAddresses": True, "ports": [_port("admin", ADMIN_PORT)]},
        ),
        build("apps/v1/Deployment", objects.gateway(name), deployment, "gateway", spec=spec),
    ]
    if not traffic.has_postgres(deployment):
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        entries.insert(0, build("v1/PersistentVolumeClaim", objects.store(name), deployment, "gateway", spec=claim))
    if block.gateways > 1:
        budget = {
            "maxUnavailable": 1,
            "selector": {"matchLabels": pods_of},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        kind = "policy/v1/PodDisruptionBudget"
        entries.append(build(kind, objects.gateway(name), deployment, "gateway", spec=budget))
    return entries


def controller(deployment: Deployment, plan: Plan, namespace: str | None = None) -> list[Object]:
    """The controller's pod and its rights. `namespace`: where it is applied; that of the file, or "default"."""
    name = objects.controller(deployment.name)
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two would place the same replicas
        "selector": {"matchLabels": objects.labels(deployment.name, "controller")},
        "template": _controller_template(deployment, plan),
    }
    subject = {"kind": "ServiceAccount", "name": name, "namespace": _namespace(deployment, namespace)}
    reference = {"apiGroup": _RBAC.partition("/")[0], "kind": "Role", "name": name}
    return [
        build("v1/ServiceAccount", name, deployment, "controller"),
        role(deployment, 0),
        build(f"{_RBAC}/RoleBinding", name, deployment, "controller", roleRef=reference, subjects=[subject]),
        build("apps/v1/Deployment", name, deployment, "controller", spec=spec),
    ]


def page(deployment: Deployment, plan: Plan) -> list[Object]:
    """The chat page's pod and its Service; none without `ui`. One pod, since who is logged in is in its folder."""
    if deployment.chat_page is None:
        return []
    name, pods_of = objects.ui(deployment.name), objects.labels(deployment.name, "ui")
    port = {**_port("http", deployment.chat_page.port), "targetPort": "page", "appProtocol": "http"}
    service = {"type": "ClusterIP", "selector": pods_of, "ports": [port]}
    spec = {
        "replicas": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": pods_of},
        "template": _page_template(deployment, plan),
    }
    return [
        build("v1/Service", name, deployment, "ui", spec=service),
        build("apps/v1/Deployment", name, deployment, "ui", spec=spec),
    ]


def role(deployment: Deployment, n_replicas: int) -> Object:
    """What the controller may do in its namespace: place and end replicas, see their pods, keep its state.

    It changes objects of its own names only; lists and creations have no name for RBAC, and those of pods are drawn by
    Kubernetes. `n_replicas`: what a user asked for beyond the file's number; while all of them are replaced there are
    twice as many. No Secrets, no Nodes: a lost node shows in its pods, which is enough to replace them.
    """
    name, lws = deployment.name, ("leaderworkerset.x-k8s.io", "leaderworkersets")
    sets = lws if block_of(deployment).shape == "lws" else ("apps", "statefulsets")
    numbers = range(2 * max(deployment.replicas.max, n_replicas) + _SPARE_NAMES)
    programs = [objects.gateway(name), objects.controller(name), objects.ui(name)]
    rules = [
        _rule(*sets, "list create"),
        _rule(*sets, "get patch delete", [objects.replica_set(name, str(number)) for number in numbers]),
        _rule("apps", "deployments", "list"),
        _rule("apps", "deployments", "get patch", programs),
        _rule("", "configmaps", "create"),
        _rule("", "configmaps", "get patch", [objects.anchor(name), objects.desired(name), objects.state(name)]),
        _rule("", "services", "get", [objects.public(name)]),
        _rule("", "pods", "get list delete"),
        _rule("", "pods/log", "get"),
        _rule("", "events", "list"),
        _rule("batch", "jobs", "list"),
    ]
    return build(f"{_RBAC}/Role", objects.controller(name), deployment, "controller", rules=rules)


def _rule(group: str, resource: str, verbs: str, names: Sequence[str] = ()) -> Object:
    rule = {"apiGroups": [group], "resources": [resource], "verbs": verbs.split()}
    return rule | ({"resourceNames": list(names)} if names else {})


def _namespace(deployment: Deployment, namespace: str | None) -> str:
    return namespace or block_of(deployment).namespace or "default"


def _service(deployment: Deployment, name: str, spec: Object) -> Object:
    spec = {"type": "ClusterIP", "selector": objects.labels(deployment.name, "gateway")} | spec
    return build("v1/Service", name, deployment, "gateway", spec=spec)


def _port(name: str, port: int) -> Object:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}


# ---- pods ------------------------------------------------------------------------------------------------------------


def _gateway_template(deployment: Deployment, plan: Plan, monitors: monitoring.Kinds) -> Object:
    spec = deployment.gateway
    words = ["gateway", objects.run_path(deployment), "--listen", f"0.0.0.0:{GATEWAY_PORT}"]
    words += ["--admin", f"0.0.0.0:{ADMIN_PORT}"]
    words += [] if traffic.has_postgres(deployment) else ["--store", f"{STORE_FOLDER}/store.sqlite"]
    words += ["--tls", TLS_FOLDER] if traffic.has_tls_in_pod(deployment) else []
    scheme = "HTTPS" if traffic.has_tls_in_pod(deployment) else "HTTP"
    volumes = _gateway_volumes(deployment)
    pod = Pod(
        component="gateway",
        container="gateway",
        image=_image(deployment, plan),
        argv=(*_UNIT, *words),
        config_maps=(objects.anchor(deployment.name),),
        resources={"cpu": f"{_WORKER_CPU * spec.workers}m", "memory": f"{_WORKER_MIB * spec.workers}Mi"},
        grace_s=_LEAVE_S + spec.drain_s + _EXIT_S,
        # Not the whole file: a change of the engine must not restart the gateway.
        annotations=_config(spec, plan.served_names) | monitoring.scrape_annotations(monitors),
        env=_gateway_env(deployment),
        volumes=tuple(volume for volume, _ in volumes),
        mounts=tuple(mount for _, mount in volumes),
        ports={"http": GATEWAY_PORT, "admin": ADMIN_PORT},
        readiness={"httpGet": {"path": "/health", "port": "http", "scheme": scheme}, "periodSeconds": 2},
        spec=_gateway_place(deployment),
    )
    template = _with_tolerations(pods.pod_template(deployment, pod))
    [container] = template["spec"]["containers"]
    container["lifecycle"] = {
        "preStop": {"exec": {"command": ["python3", "-c", f"import time; time.sleep({_LEAVE_S})"]}}
    }
    # No limit of CPUs: throttled in the middle of a burst, every stream would stall.
    most_mib = spec.workers * (_WORKER_MIB + -(-spec.queue.body_bytes // MIB))
    container["resources"]["limits"] = {"memory": f"{most_mib}Mi"}
    return template


def _gateway_env(deployment: Deployment) -> tuple[Object, ...]:
    """https://www.postgresql.org/docs/current/libpq-envars.html"""
    secret = block_of(deployment).postgres_secret
    if secret is None:
        return ()
    reference = {"secretKeyRef": {"name": secret, "key": "password"}}
    return ({"name": "PGPASSWORD", "valueFrom": reference},)


def _gateway_volumes(deployment: Deployment) -> list[tuple[Object, Object]]:
    """Volumes with their mounts."""
    volumes: list[tuple[Object, Object]] = []
    if not traffic.has_postgres(deployment):
        claim = {"claimName": objects.store(deployment.name)}
        store = {"name": "store", "persistentVolumeClaim": claim}
        volumes.append((store, {"name": "store", "mountPath": STORE_FOLDER}))
    if traffic.has_tls_in_pod(deployment):
        volumes.append(({"name": "tls", "secret": _tls(deployment)}, _TLS_MOUNT))
    return volumes


def _tls(deployment: Deployment) -> Object:
    return {"secretName": block_of(deployment).tls_secret, "defaultMode": 0o440}


def _gateway_place(deployment: Deployment) -> Object:
    """Where the pods go: over zones and hosts; with a claim that one node mounts, a successor next to its
    predecessor, also because SQLite's write-ahead log is for processes of one machine."""
    selector = objects.labels(deployment.name, "gateway")
    if traffic.has_postgres(deployment):
        several = block_of(deployment).gateways > 1
        return {"topologySpreadConstraints": pods.spread(selector, (_ZONE, _HOST))} if several else {}
    term = pods.same_hosts(selector, _HOST)
    return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}


def _controller_template(deployment: Deployment, plan: Plan) -> Object:
    name = deployment.name
    words = ["controller", objects.run_path(deployment), "--unit", "0"]
    words += ["--listen", f"{objects.gateway(name)}:{deployment.gateway.port}"]
    words += ["--admin", f"{objects.gateway_pods(name)}:{ADMIN_PORT}"]
    pod = Pod(
        component="controller",
        container="controller",
        image=_image(deployment, plan),
        argv=(*_UNIT, *words),
        config_maps=(objects.anchor(name),),
        resources=_CONTROLLER,
        grace_s=_EXIT_S,
        annotations=_config(deployment, plan),
        service_account=objects.controller(name),
        has_token=True,
    )
    template = _with_tolerations(pods.pod_template(deployment, pod))
    template["spec"]["containers"][0]["resources"]["limits"] = _CONTROLLER_LIMITS
    return template


def _page_template(deployment: Deployment, plan: Plan) -> Object:
    """It gets no secret of ours: who opens the page brings a key. Of the gateway's certificate it has the public part,
    which names another host than the Service."""
    is_tls = traffic.has_tls_in_pod(deployment)
    words = ["ui", objects.run_path(deployment), "--listen", f"0.0.0.0:{UI_PORT}", "--gateway"]
    words += [f"http{'s' if is_tls else ''}://{objects.gateway(deployment.name)}:{deployment.gateway.port}"]
    words += ["--tls", TLS_FOLDER] if is_tls else []
    tls = _tls(deployment) | {"items": [{"key": "tls.crt", "path": "tls.crt"}]}
    own_image = block_of(deployment).ui_image
    pod = Pod(
        component="ui",
        container="ui",
        image=own_image or _image(deployment, plan),
        argv=(*_UNIT, *words),
        config_maps=(objects.anchor(deployment.name),),
        resources=_PAGE,
        grace_s=_PAGE_EXIT_S,
        annotations=_config(deployment.chat_page, deployment.gateway.price, plan.served_names),
        env=() if own_image else tuple(pods.plain_env({"PYTHONPATH": f"{objects.CODE}:{_PACKAGES}"})),
        volumes=({"name": "tls", "secret": tls},) if is_tls else (),
        mounts=(_TLS_MOUNT,) if is_tls else (),
        ports={"page": UI_PORT},  # another name than the gateway's, which Prometheus finds by it
        readiness={"httpGet": {"path": "/health", "port": "page", "scheme": "HTTP"}, "periodSeconds": 2},
        init=() if own_image else (_packages(deployment, plan),),
        has_secrets=False,
    )
    template = _with_tolerations(pods.pod_template(deployment, pod))
    template["spec"]["containers"][0]["resources"]["limits"] = _PAGE_LIMITS
    return template


def _packages(deployment: Deployment, plan: Plan) -> Object:
    """Installs Gradio next to the image's packages: few images have it."""
    given = {name: value for name, value in deployment.engine.variables.items() if _PIP_VARIABLES.fullmatch(name)}
    words, needs = ("-m", "penstock.targets.kubernetes.packages", _PACKAGES), {"cpu": "500m", "memory": "512Mi"}
    return pods.init_container("packages", _image(deployment, plan), words, needs, pods.plain_env(given), ())


def _with_tolerations(template: Object) -> Object:
    template["spec"]["tolerations"] = [*template["spec"].get("tolerations", []), *_TOLERATIONS]
    return template


def _image(deployment: Deployment, plan: Plan) -> str:
    return block_of(deployment).gateway_image or images.image(deployment, plan)


def _config(*read: object) -> dict[str, str]:
    """A hash of what a pod reads, which it does once: another one is another template, so the pods are replaced."""
    return {objects.CONFIG: hashlib.sha256(msgspec.json.encode(read)).hexdigest()[:16]}
