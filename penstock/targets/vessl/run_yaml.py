"""The YAML of a run (`vessl run create -f`) and of a service revision (`vessl service create -f`). Pure.

https://docs.vessl.ai "Run YAML", "Serve YAML"; names as in the forms of VESSL's SDK, SDK_VERSION.
"""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from penstock import __version__
from penstock.engines.vllm import images
from penstock.planner import Plan
from penstock.planner.engine_versions import NEWEST
from penstock.spec import reading
from penstock.spec.blocks import Vessl
from penstock.spec.deployment import Deployment, Replicas
from penstock.wire.container import SECRET_VARIABLE

Object = dict[str, Any]
SDK_VERSION = "0.1.199"
RUN_FILE, SERVICE_FILE = "run.yaml", "service.yaml"
TAG = "penstock"
GATEWAY, CONTROL, PAGE = "gateway", "control", "chat"
# Not below /penstock: in a container whose commands run in "/" Python would take that folder for the package.
WEIGHTS, CODE = "/penstock-weights", "/penstock-code"
_VOLUME, _ARTIFACT = "volume://", "vessl-artifact://"
_FILE, _PLAN = '"$HOME/penstock.yaml"', '"$HOME/penstock-plan.json"'
_END = "END_OF_PENSTOCK_FILE"
# Every replica of a service gets the GPUs of one worker; VESSL's own default target.
# https://docs.vessl.ai "Serve YAML", autoscaling
_METRIC, _TARGET = "nvidia.com/gpu", 60


def block_of(deployment: Deployment) -> Vessl:
    return deployment.vessl or Vessl()


def tag_of(name: str) -> str:
    """What finds the run of a deployment, from any machine."""
    return f"{TAG}-{name}"


def secret_of(name: str) -> str:
    """The VESSL secret with the deployment's admin token; the tag's name."""
    return tag_of(name)


def control_port(deployment: Deployment) -> int:
    return deployment.gateway.port + 1


def weights_folder(deployment: Deployment) -> str | None:
    """Where the container keeps models from a hub; None: in its own cache, which ends with it."""
    weights = deployment.cache.weights
    return WEIGHTS if weights is not None and weights.startswith((_VOLUME, _ARTIFACT)) else deployment.cache.folder


def form(deployment: Deployment, plan: Plan) -> Object:
    """Of a run or of a revision, fields in VESSL's own order.  Raises UserError as `images.image` does."""
    return _form(deployment, images.image(deployment, plan), _plan_text(plan))


def unplanned(deployment: Deployment) -> Object:
    """As `form`, before the plan, for VESSL to judge."""
    public = images.public_image(images.named_version(deployment) or NEWEST)
    return _form(deployment, block_of(deployment).image or public, "{}")


def _form(deployment: Deployment, image: str, plan: str) -> Object:
    make = _service if block_of(deployment).kind == "service" else _run
    return {key: value for key, value in make(deployment, image, plan).items() if value not in ({}, [])}


def _run(deployment: Deployment, image: str, plan: str) -> Object:
    block, name = block_of(deployment), deployment.name
    ports = [_port(GATEWAY, deployment.gateway.port), _port(CONTROL, control_port(deployment))]
    if deployment.chat_page is not None:
        ports.append(_port(PAGE, deployment.chat_page.port))
    return {
        "name": name,
        "description": f"{deployment.model} by penstock {__version__} (forms of VESSL's SDK {SDK_VERSION})",
        "tags": [TAG, tag_of(name)],
        **_worker(deployment, {"cluster": block.cluster, "preset": block.preset}, image, plan),
        "export": _exports(deployment),
        "ports": ports,
    }


def _service(deployment: Deployment, image: str, plan: str) -> Object:
    """A revision of VESSL Service: each worker is a whole deployment with one replica."""
    block, port = block_of(deployment), deployment.gateway.port
    resources: Object = {"cluster": block.cluster, "preset": block.preset}
    if block.spot:
        resources["spot"] = "SpotFirst"
    one = msgspec.structs.replace(deployment, replicas=Replicas())
    return {
        "name": deployment.name,
        "message": f"{deployment.model} by penstock {__version__} (forms of VESSL's SDK {SDK_VERSION})",
        **_worker(one, resources, image, plan),
        "ports": [_port(GATEWAY, port)],
        "service": {
            "autoscaling": autoscaling(deployment.replicas),
            "expose": str(port),
            # A worker gets requests while this succeeds: not before its replica is ready, while /health is 200 early.
            # Without `monitoring`: it scrapes without a key, which the gateway refuses.
            "healthcheck": {"type": "exec", "port": str(port), "exec": ["python3", "-c", _is_ready(port)]},
        },
    }


def autoscaling(replicas: Replicas) -> Object:
    return {"min": replicas.min, "max": replicas.max, "metric": _METRIC, "target": _TARGET}


def shares_keys(deployment: Deployment) -> bool:
    """Whether several workers of a service would know the same keys."""
    return deployment.gateway.store is not None and "://" in deployment.gateway.store


def _worker(deployment: Deployment, resources: Object, image: str, plan: str) -> Object:
    block = block_of(deployment)
    secrets = {SECRET_VARIABLE: secret_of(deployment.name), **block.secrets}
    return {
        "resources": resources,
        "image": image,
        "import": _imports(deployment),
        "mount": _mounts(deployment),
        "run": [{"command": command(deployment, plan)}],
        "env": {name: {"source": "secret", "secret": secret} for name, secret in secrets.items()},
    }


def _is_ready(port: int) -> str:
    ask = f"u.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    return f"import json, sys, urllib.request as u; sys.exit(json.load({ask})['ready_replicas'] < 1)"


def _plan_text(plan: Plan) -> str:
    """Without what depends on this machine and on what VESSL said: `render` shows what `up` sends."""
    model = msgspec.structs.replace(plan.model, path=plan.model.reference)
    return msgspec.json.encode(msgspec.structs.replace(plan, model=model, n_threads=1, warnings=())).decode()


def _port(name: str, port: int) -> Object:
    return {"name": name, "type": "http", "port": port}


def _mounts(deployment: Deployment) -> dict[str, str]:
    weights = deployment.cache.weights or ""
    own = {WEIGHTS: weights} if weights.startswith(_VOLUME) else {}
    return own | block_of(deployment).mounts


def _imports(deployment: Deployment) -> dict[str, str]:
    weights, code = deployment.cache.weights or "", block_of(deployment).code
    own = {} if code is None else {CODE: code}
    if weights.startswith(_ARTIFACT):
        own[WEIGHTS] = weights
    return own | block_of(deployment).imports


def _exports(deployment: Deployment) -> dict[str, str]:
    weights = deployment.cache.weights or ""
    own = {WEIGHTS: weights} if weights.startswith(_ARTIFACT) else {}
    return own | block_of(deployment).exports


def command(deployment: Deployment, plan: str) -> str:
    """What the container runs: it gets penstock where the image has none, writes the file, and becomes penstock, so
    that TERM reaches that and not a shell."""
    block = block_of(deployment)
    what = f"{CODE}/*.whl" if block.code is not None else shlex.quote(f"penstock=={__version__}")
    words = ["--target", "local", "--control", str(control_port(deployment))]
    folder = weights_folder(deployment)
    words += [] if folder is None else ["--weights", folder]
    words += [] if block.max_hours is None else ["--max-hours", f"{block.max_hours:g}"]
    return "\n".join([
        "set -e",
        f"python3 -c 'import penstock.deployment.container' 2>/dev/null || python3 -m pip install --quiet {what}",
        f"cat >{_PLAN} <<'{_END}'",
        plan,
        _END,
        f"cat >{_FILE} <<'{_END}'",
        reading.to_yaml(deployment).rstrip(),
        _END,
        f"exec python3 -m penstock.deployment.container {_FILE} {shlex.join(words)}",
    ])  # fmt: skip


def embedded(yaml_spec: str) -> tuple[str, str]:
    """The deployment file and the plan of a YAML that penstock rendered.  Raises ValueError for another."""
    form = from_yaml(yaml_spec)
    parts = str(form["run"][0]["command"]).split(f"<<'{_END}'\n")
    if len(parts) != 3:
        raise ValueError("penstock did not render it")
    plan, file = (part.partition(f"\n{_END}")[0] for part in parts[1:])
    if "service" in form:  # each worker has a file for one replica
        scaling = form["service"]["autoscaling"]
        replicas = Replicas(min=scaling["min"], max=scaling["max"])
        file = reading.to_yaml(msgspec.structs.replace(reading.parse(file), replicas=replicas)).rstrip()
    return file + "\n", plan + "\n"


def to_yaml(form: Object) -> str:
    """Fields in our order, texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """With a representer of its own."""

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return yaml.dump(form, Dumper=Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def from_yaml(text: str) -> Object:
    """Raises ValueError."""
    import yaml

    try:
        form = yaml.safe_load(text)
        form["run"][0]["command"]
    except (yaml.YAMLError, TypeError, KeyError, IndexError) as exc:
        raise ValueError(str(exc)) from exc
    assert isinstance(form, dict)
    return form
