"""What keeps a deployment from being placed as a run or a service: in the file, and as VESSL answers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from penstock.engines.vllm.images import versions_of
from penstock.errors import PenstockError, Problem, UserError, nearest
from penstock.hardware import Machine, catalog
from penstock.spec.deployment import Deployment
from penstock.targets.assumed import gpus_of
from penstock.targets.vessl import run_yaml
from penstock.targets.vessl.api import Api, Preset
from penstock.targets.vessl.run_yaml import block_of
from penstock.targets.vessl.service_api import ServiceApi
from penstock.wire.container import SECRET_VARIABLE

_SHOWN = 6
# VESSL's own ports: https://docs.vessl.ai "Run YAML", ports
_TAKEN_PORTS = (22, 8888)
_SOURCE = re.compile(r"[a-z0-9-]+://\S+\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SIZE = re.compile(r"([0-9.]+)\s*([KMGT]i?)?B?\Z")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# GPU words of presets by the catalogue's ids. Seen in presets and YAML files of VESSL's examples.
_GPUS = {
    "L4": "l4",
    "NVIDIA-L4": "l4",
    "Tesla-T4": "t4",
    "Tesla-V100-SXM2-16GB": "v100-sxm2-16",
    "Tesla-V100-SXM2-32GB": "v100-sxm2-32",
    "Tesla-A100-40GB": "a100-sxm4-40",
    "Tesla-A100-80GB": "a100-sxm4-80",
    "A100-80GB-SXM": "a100-sxm4-80",
    "NVIDIA-A100-80GB": "a100-sxm4-80",
    "H100-80GB-SXM": "h100-sxm",
    "NVIDIA-H100-80GB": "h100-sxm",
}


# ---- the file alone --------------------------------------------------------------------------------------------------


def file_problems(deployment: Deployment) -> list[Problem]:
    """What is wrong in the file, without asking VESSL."""
    return [*_block_problems(deployment), *_source_problems(deployment), *_own_problems(deployment)]


def _block_problems(deployment: Deployment) -> Iterator[Problem]:
    block = block_of(deployment)
    if block.product == "cloud":
        message = (
            "VESSL Cloud (workspaces, vesslctl) has other calls than VESSL Run, and penstock does not make them yet"
        )
        yield Problem("vessl.product", message, "docs/how-to/vessl.md tells the two apart; set product: run")
    for field, example in (("cluster", "vessl-gcp-oregon"), ("preset", "gpu-l4-small")):
        if not getattr(block, field):
            yield Problem(f"vessl.{field}", "is missing", f"`vessl resource list` shows them; example: {example}")
    for name, secret in block.secrets.items():
        if not _VARIABLE.match(name) or not secret.strip():
            yield Problem(
                f"vessl.secrets.{name}", "needs a variable and the name of a secret", "HF_TOKEN: my-hub-token"
            )
        if name == SECRET_VARIABLE:
            yield Problem(f"vessl.secrets.{name}", "penstock makes that secret itself", "remove it")


def _source_problems(deployment: Deployment) -> Iterator[Problem]:
    block, weights = block_of(deployment), deployment.cache.weights
    given = {"vessl.code": block.code} if block.code is not None else {}
    for field in ("mounts", "imports", "exports"):
        given |= {f"vessl.{field}.{path}": source for path, source in getattr(block, field).items()}
        for path in getattr(block, field):
            if not path.startswith("/"):
                yield Problem(f"vessl.{field}.{path}", "is no absolute path", f"example: /{path}")
    for field, source in given.items():
        if not _SOURCE.match(source):
            yield Problem(field, f'"{source}" is no source', "example: volume://vessl-storage/penstock")
    if weights is not None and deployment.cache.folder is None and run_yaml.weights_folder(deployment) is None:
        hint = "volume://STORAGE/NAME, vessl-artifact://ORG/PROJECT/NAME, or a folder of the container"
        if weights.startswith("hf://"):
            hint = "volume://STORAGE/NAME, which penstock fills from the hub once; VESSL copies hf:// at each start"
        yield Problem("cache.weights", f'"{weights}" is nothing that a run can have', hint)
    if block.kind == "service":
        yield from _service_problems(deployment)
    elif block.max_hours is not None and block.max_hours <= 0:
        yield Problem("vessl.max_hours", f"{block.max_hours:g} is no time", "example: 12")
    if deployment.model.startswith(("/", "~")) and not (block.mounts or block.imports):
        message = f'"{deployment.model}" is a folder, and the container has none of this machine'
        yield Problem("model", message, "give a hub id, or mount the folder: vessl.mounts: {/models: volume://...}")


def _service_problems(deployment: Deployment) -> Iterator[Problem]:
    """What a service lacks: an end of its own, a second port, and workers that can be told apart."""
    block, replicas = block_of(deployment), deployment.replicas
    if block.exports or (deployment.cache.weights or "").startswith("vessl-artifact://"):
        field = "vessl.exports" if block.exports else "cache.weights"
        yield Problem(field, "a service exports nothing", "use a volume")
    if block.max_hours is not None:
        yield Problem("vessl.max_hours", "VESSL replaces a worker that ends", "remove it")
    if deployment.chat_page is not None:
        message = "a service exposes one port, which is the gateway's"
        yield Problem("ui", message, "remove it, and serve the page here: penstock ui --url ADDRESS")
    if replicas.min < 1:
        yield Problem("replicas.min", "0, but VESSL keeps a worker of a service", "set replicas.min: 1")
    if replicas.max > 1 and not run_yaml.shares_keys(deployment):
        message = "no worker of a service would know the keys of the others"
        yield Problem("gateway.store", message, "a PostgreSQL that the workers reach: postgresql://...")


def _own_problems(deployment: Deployment) -> Iterator[Problem]:
    gateway = deployment.gateway
    if deployment.hardware.nodes > 1:
        message = f"{deployment.hardware.nodes} nodes, but a VESSL run is one container"
        yield Problem("hardware.nodes", message, "take a preset with more GPUs, and hardware.nodes: 1")
    if gateway.auth == "none":
        yield Problem("gateway.auth", "none, but the address of a run is public", "remove it: keys is the default")
    if gateway.on == "job":
        yield Problem("gateway.on", '"job", but the gateway is in the run', "remove it")
    for field in ("tls_cert", "tls_key", "access_log"):
        if getattr(gateway, field) not in (None, "stderr"):
            hint = "remove it; VESSL's address speaks TLS" if field != "access_log" else "use stderr"
            yield Problem(f"gateway.{field}", "is a file of this machine", hint)
    ports = {"gateway.port": gateway.port, "the control port (gateway.port + 1)": run_yaml.control_port(deployment)}
    if deployment.chat_page is not None:
        ports["ui.port"] = deployment.chat_page.port
        if deployment.chat_page.login == "none":
            yield Problem("ui.login", "none, but the page's address is public", "remove it")
    for field, port in ports.items():
        if port in _TAKEN_PORTS or port in (0, 1):
            yield Problem(field, f"{port} is no port that a run can publish", "choose another, such as 8000")
    if len(set(ports.values())) < len(ports):
        yield Problem("ui.port", "is the gateway's control port (gateway.port + 1)", "choose another, such as 7860")
    if deployment.hardware.gpus_per_node == 0 and deployment.engine.kind == "vllm":
        yield Problem("hardware.gpus_per_node", "0, but the public image of vLLM is for GPUs", "remove it")


# ---- as VESSL answers ------------------------------------------------------------------------------------------------


def problems(api: Api, deployment: Deployment) -> tuple[list[Problem], Preset | None]:
    """All that VESSL says against it, and the preset that it would get. Never raises: no answer is a problem too."""
    found: list[Problem] = []
    try:
        api.me()
        found += [*_organization_problems(api), *_project_problems(api)]
    except PenstockError as exc:
        return [Problem("vessl", exc.message, exc.hint)], None
    preset = None
    for check in (_secret_problems, _name_problems, _dry_problems):
        try:
            found += check(api, deployment)
        except PenstockError as exc:
            found.append(Problem("vessl", exc.message, exc.hint))
    try:
        more, preset = _preset_problems(api, deployment)
        found += more
    except PenstockError as exc:
        found.append(Problem("vessl.cluster", exc.message, exc.hint))
    return list(dict.fromkeys(found)), preset


def _organization_problems(api: Api) -> list[Problem]:
    balance = api.organization().get("credit_balance")
    if isinstance(balance, int | float) and balance <= 0:
        name = api.account.organization
        return [
            Problem("vessl.organization", f'"{name}" has no credit left ({balance:g})', "add credit at app.vessl.ai")
        ]
    return []


def _project_problems(api: Api) -> list[Problem]:
    return _absent("vessl.project", api.account.project, api.projects(), "project")


def _secret_problems(api: Api, deployment: Deployment) -> list[Problem]:
    wanted, known = block_of(deployment).secrets, api.secrets()
    found: list[Problem] = []
    for variable, secret in wanted.items():
        found += _absent(f"vessl.secrets.{variable}", secret, known, "secret")
    return found


def _name_problems(api: Api, deployment: Deployment) -> list[Problem]:
    """A service is found by its name, which may be taken; runs may share one."""
    if block_of(deployment).kind == "run":
        return []
    service = ServiceApi(api).read(deployment.name)
    if service is None or service.description == run_yaml.tag_of(service.name):
        return []
    message = f'VESSL has a service "{service.name}" that penstock did not make'
    return [
        Problem("name", message, f"take another name, or delete that service: {ServiceApi(api).page_of(service.name)}")
    ]


def _dry_problems(api: Api, deployment: Deployment) -> list[Problem]:
    """VESSL's own check of the YAML, whose plan and image are not known yet."""
    text = run_yaml.to_yaml(run_yaml.unplanned(deployment))
    is_service = block_of(deployment).kind == "service"
    said = ServiceApi(api).judged(deployment.name, text) if is_service else api.judged(text)
    return [Problem(f"vessl ({attribute})" if attribute else "vessl", words) for attribute, words in said]


def _preset_problems(api: Api, deployment: Deployment) -> tuple[list[Problem], Preset | None]:
    block, clusters = block_of(deployment), api.clusters()
    found = _absent("vessl.cluster", block.cluster or "", clusters, "cluster")
    if found:
        return found, None
    cluster = clusters[block.cluster or ""]
    if block.kind == "service" and cluster.vessl_service_enabled is False:
        found = [Problem("vessl.cluster", f'"{cluster.name}" takes no services', "another cluster, or vessl.kind: run")]
    presets = {preset.name: preset for preset in api.presets(cluster.id)}
    absent = _absent("vessl.preset", block.preset or "", presets, "preset")
    if absent:
        return [*found, *absent], None
    preset = presets[block.preset or ""]
    if preset.spot and not block.spot:
        message = f'"{preset.name}" is of spot machines, and a reclaim ends the deployment'
        found.append(Problem("vessl.preset", message, "set vessl.spot: true, or take a preset without spot"))
    n_gpus, wanted = preset.gpu_limit or 0, deployment.hardware.gpu
    if n_gpus and card_of(preset) is None:
        message = f'penstock does not know the GPU "{preset.gpu_type}" of preset "{preset.name}"'
        found.append(Problem("vessl.preset", message, f"known: {', '.join(sorted(_GPUS))}"))
    elif wanted is not None and deployment.hardware.gpus_per_node != 0:
        found += _card_problems(preset, wanted)
    return found, preset


def _card_problems(preset: Preset, wanted: str) -> list[Problem]:
    card = card_of(preset) if preset.gpu_limit else None
    try:
        if card == catalog.gpu(wanted).id:
            return []
    except UserError as exc:
        return [Problem("hardware.gpu", exc.message, exc.hint)]
    has = f"{preset.gpu_limit} x {preset.gpu_type}" if preset.gpu_limit else "no GPU"
    return [
        Problem("hardware.gpu", f'"{wanted}", but preset "{preset.name}" has {has}', "remove it, or change the preset")
    ]


def _absent(field: str, wanted: str, known: Collection[str], what: str) -> list[Problem]:
    names = list(known)
    if wanted in names:
        return []
    close = nearest(wanted, names)
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    hint = f'did you mean "{close}"?' if close else f"there are: {listed}" if names else f"there is no {what} yet"
    return [Problem(field, f'there is no {what} "{wanted}"', hint)]


def card_of(preset: Preset) -> str | None:
    """The catalogue's id of its GPU; None for one that is not known."""
    plain = {name.lower(): card for name, card in _GPUS.items()}
    return plain.get((preset.gpu_type or "").lower())


def machine(deployment: Deployment, preset: Preset) -> Machine:
    """What a run with that preset has, as VESSL describes it, with the engine of its image."""
    memory, card = n_bytes(preset.memory_limit or ""), card_of(preset)
    gpus = gpus_of(card, preset.gpu_limit or 0) if card is not None else ()
    n_cpus = max(1, int(preset.cpu_limit or 1))
    return Machine(preset.name, n_cpus, memory, memory, gpus, versions=versions_of(deployment))


def n_bytes(text: str) -> int:
    """ "48Gi" -> 51539607552; 0 for what is no size."""
    found = _SIZE.match(text.strip())
    return int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0


def price(preset: Preset) -> str | None:
    credit = preset.default_hourly_credit
    return None if credit is None else f'preset "{preset.name}" costs {credit:g} credits an hour until `penstock down`'
