"""A run folder in two places: on the machine of a verb, and where the controller is. The API keeps what both need.

ConfigMap NAME-run      spec.yaml, plan.json, artifact.json      written by `up`
ConfigMap NAME-desired  desired.json                             written by `up` and `scale`
ConfigMap NAME-state    state.json, handle.json, scaling.json, events.jsonl, address.json    written by the controller
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import time
from collections.abc import Mapping

import msgspec

from penstock import paths
from penstock.errors import PenstockError
from penstock.log_lines import LogReader
from penstock.paths import write_atomically
from penstock.run_folder import Desired, Record, Run, State, is_locked
from penstock.targets.kubernetes import objects, traffic
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object
from penstock.wire.announcement import GatewayAddress

_STATE_FILES = {
    "state.json": "state.json",
    "handle.json": "handle.json",
    "events.jsonl": "events.jsonl",
    "address.json": "gateway/address.json",
    "gateway.json": "gateway.json",  # of it, what others than the gateway read
    "scaling.json": "scaling.json",  # for the controller of another pod
}
# etcd keeps every version for minutes; a state without news is written for its time alone.
_ASK_EVERY_S, _WRITE_EVERY_S, _WRITE_AT_LEAST_EVERY_S = 1.0, 2.0, 20.0
_MAX_EVENTS, _EVENTS_BYTES = 200, 200_000  # the last ones; a ConfigMap holds 1 MiB
_MANAGER = f"{objects.MANAGER}-controller"
ADMIN_TOKEN, FIRST_KEY = "admin-token", "first-key-hash"


class Cluster(msgspec.Struct, frozen=True):
    """cluster.json: where a run lives, whatever the kubeconfig's current context is by now."""

    context: str | None
    namespace: str


def cluster_of(run: Run) -> Cluster | None:
    try:
        return msgspec.json.decode((run.path / "cluster.json").read_bytes(), type=Cluster)
    except (OSError, msgspec.MsgspecError):
        return None


def note_cluster(run: Run, api: Api) -> None:
    note = Cluster(api.context, api.namespace)
    if cluster_of(run) != note:
        write_atomically(run.path / "cluster.json", msgspec.json.encode(note))


def config_of(run: Run) -> str:
    """Of what `up` wrote: a state that the controller of another `up` wrote has another."""
    return run.artifact().files[objects.CONFIG_FILE]


# ---- on the machine of a verb ----------------------------------------------------------------------------------------


def fetch(api: Api, run: Run) -> None:
    """Write the last orders and the controller's last words into the folder; of the controller of another `up` only
    its events. Raises ApiError."""
    state, desired = api.find("ConfigMap", objects.state(run.name)), api.find("ConfigMap", objects.desired(run.name))
    is_ending = run.desired().state == "down" and is_locked(run)  # a `down` of this machine has not reached the API
    if desired is not None and not is_ending:
        _write(run, desired, {"desired.json": "desired.json"})
    has_later = is_inside(run) and run.state() is not None  # a container that was started again: not all is published
    if state is not None and not has_later:
        is_same = _config_in(state) == config_of(run)
        # Elsewhere than in its pod the verbs of that machine have events too.
        events = {"events.jsonl": (run.events_file if is_inside(run) else run.fetched_events_file).name}
        _write(run, state, (_STATE_FILES if is_same else {}) | events)


def _why_gone(api: Api) -> str:
    with contextlib.suppress(ApiError):  # not everyone may read namespaces
        namespace = api.find("Namespace", api.namespace)
        if namespace is None or "deletionTimestamp" in namespace["metadata"]:
            return f'its namespace "{api.namespace}" was deleted'
    return "another machine took it down"


def follow(api: Api, run: Run) -> None:
    """Take over what another machine did since: its `up --replace`, or its `down`.  Raises ApiError."""
    anchor = api.find("ConfigMap", objects.anchor(run.name))
    if anchor is None:
        run.write_desired(Desired("down", 0))
        run.write_state(State(time.time(), "down", 0, reason=_why_gone(api)))
    elif _config_in(anchor) != config_of(run):
        _write(run, anchor, {key: key for key in anchor["data"]})


def _config_in(config_map: Object) -> str | None:
    annotations: dict[str, str] = config_map["metadata"].get("annotations", {})
    return annotations.get(objects.CONFIG)


def _write(run: Run, config_map: Object, files: Mapping[str, str]) -> None:
    for key, file in files.items():
        content = (config_map.get("data") or {}).get(key)
        if content is None:
            continue
        path = run.path / file
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            if path.read_text("utf-8") == content:
                continue
        write_atomically(path, content.encode())


def order(api: Api, run: Run, desired: Desired) -> None:
    """Write down what the user asked for. Raises ApiError."""
    data = {"desired.json": msgspec.json.encode(desired).decode()}
    api.apply(_config_map(api, run.name, objects.desired(run.name), data), force=True)
    run.write_desired(desired)


def adopt(api: Api, name: str) -> Run | None:
    """Write the run folder of a deployment that another machine started; None where the namespace has none.

    Without the right to read its Secret the folder has no admin token.
    """
    found = api.find("ConfigMap", objects.anchor(name))
    if found is None or found["metadata"].get("labels", {}).get(objects.MANAGED_BY) != objects.MANAGER:
        return None
    run = Run(paths.folder() / name)
    for folder in ("artifact", "logs", "gateway"):
        (run.path / folder).mkdir(parents=True, exist_ok=True)
    (run.path / "secrets").mkdir(mode=0o700, exist_ok=True)
    _write(run, found, {key: key for key in found["data"]})
    with contextlib.suppress(ApiError):
        token = api.get("Secret", objects.secrets(name))["data"][ADMIN_TOKEN]
        write_atomically(run.admin_token_file, base64.b64decode(token), mode=0o600)
    (run.path / "events.jsonl").touch()
    fetch(api, run)
    note_cluster(run, api)
    deployment, created = run.deployment(), found["metadata"].get("creationTimestamp", "")
    record = Record(secrets.token_hex(6), name, deployment.target, _unix_s(created), "", objects.placed(deployment))
    write_atomically(run.path / "run.json", msgspec.json.encode(record))
    return run


def _unix_s(timestamp: str) -> float:
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    return 0.0


# ---- in the controller's pod -----------------------------------------------------------------------------------------


def is_inside(run: Run) -> bool:
    """Whether this is the folder in the controller's pod."""
    return is_in_pod() and run.path.is_relative_to(objects.HOME)


def is_in_pod() -> bool:
    """Whether this is a pod of ours: there the kubeconfig's contexts do not exist."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and os.environ.get("PENSTOCK_HOME") == objects.HOME


def note_gateway(api: Api, run: Run, unit: str) -> None:
    """Write where the gateway of that name is, once it runs: for clients, and for the controller. Raises ApiError."""
    with contextlib.suppress(PenstockError):
        known = run.gateway_address()
        if known.unit == unit and (known.public_url or objects.block_of(run.deployment()).expose == "none"):
            return
    listen = f"{objects.gateway(run.name)}.{api.namespace}:{run.deployment().gateway.port}"
    admin = f"{objects.gateway_pods(run.name)}:{objects.ADMIN_PORT}"
    url, page = _public_url(api, run), run.deployment().chat_page
    has_page = url is not None and page is not None and objects.block_of(run.deployment()).has_paths
    page_url = f"{url}{traffic.page_path(page)}/" if has_page and page is not None else None
    address = GatewayAddress(unit, listen, (admin,), url, page_url)
    run.gateway_folder.mkdir(exist_ok=True)
    write_atomically(run.gateway_address_file, msgspec.json.encode(address))


def _public_url(api: Api, run: Run) -> str | None:
    """The URL for clients outside; None without one, or before the cluster has given it an address."""
    deployment = run.deployment()
    block = objects.block_of(deployment)
    if block.expose in ("Ingress", "HTTPRoute"):
        return (
            f"https://{block.host}"
            if block.tls_secret or block.issuer or block.expose == "HTTPRoute"
            else f"http://{block.host}"
        )
    if block.expose != "LoadBalancer":
        return None
    service = api.find("Service", objects.public(run.name)) or {}
    ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or [{}]
    host = ingress[0].get("hostname") or ingress[0].get("ip")
    scheme = "https" if block.tls_secret else "http"
    return f"{scheme}://{host}:{deployment.gateway.port}" if host else None


class Publisher:
    """Carries the controller's folder to the API, when it has changed, and orders back."""

    def __init__(self) -> None:
        self._asked_at = self._written_at = float("-inf")
        self._began = time.time()  # a state from before is what an earlier controller saw
        self._written: dict[str, str] = {}

    def exchange(self, api: Api, run: Run, now: float) -> None:
        """Asks once a second, writes at most every two; `now` in monotonic seconds. Raises ApiError."""
        if now - self._asked_at < _ASK_EVERY_S:
            return
        self._asked_at = now
        if (desired := api.find("ConfigMap", objects.desired(run.name))) is not None:
            _write(run, desired, {"desired.json": "desired.json"})
        silent_s = now - self._written_at
        state = run.state()
        if silent_s < _WRITE_EVERY_S or state is None or state.observed_at < self._began:
            return
        data = _content(run)
        if silent_s >= _WRITE_AT_LEAST_EVERY_S or _without_time(data) != _without_time(self._written):
            annotations = {objects.CONFIG: config_of(run)}
            api.apply(
                _config_map(api, run.name, objects.state(run.name), data, annotations), force=True, manager=_MANAGER
            )
            self._written, self._written_at = data, now


def _content(run: Run) -> dict[str, str]:
    data = {}
    for key, file in _STATE_FILES.items():
        with contextlib.suppress(OSError):
            data[key] = (run.path / file).read_text("utf-8", "replace")
    data["gateway.json"] = msgspec.json.encode(run.gateway_file()).decode()
    if "events.jsonl" in data:
        lines = [*LogReader(run.events_file, _EVENTS_BYTES).lines()][-_MAX_EVENTS:]
        data["events.jsonl"] = "".join(line.decode("utf-8", "replace") + "\n" for line in lines)
    return data


def _without_time(data: Mapping[str, str]) -> list[str]:
    """The state without the moment of its observation and without what the autoscaler remembers, new each second."""
    rest = {key: text for key, text in data.items() if key not in ("state.json", "scaling.json")}
    state = [line for line in data.get("state.json", "").splitlines() if '"observed_at"' not in line]
    return [*state, *(f"{key}={text}" for key, text in sorted(rest.items()))]


def _config_map(
    api: Api, name: str, own_name: str, data: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> Object:
    owner = api.find("ConfigMap", objects.anchor(name))
    config_map: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": own_name, "labels": objects.labels(name), "annotations": dict(annotations or {})},
        "data": dict(data),
    }
    return objects.owned(config_map, owner)
