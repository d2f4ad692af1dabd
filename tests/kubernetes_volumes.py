"""What a pod of the test cluster mounts, and the environment of its containers."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path
from typing import Any

from kubernetes_api import Api, ApiError, Object
from kubernetes_rules import quantity
from kubernetes_sandbox import HOME, IMAGE, PATH, Mount


class NotYet(Exception):
    """A volume or a variable names an object that is not there; (reason of the event, words)."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


def memory_volumes(pod: Object, folder: Path) -> dict[Path, int | None]:
    """Folders of the pod's memory volumes, with their limits in bytes."""
    found: dict[Path, int | None] = {}
    for volume in pod["spec"].get("volumes", []):
        if (volume.get("emptyDir") or {}).get("medium") == "Memory":
            limit = volume["emptyDir"].get("sizeLimit")
            path = folder / "volumes" / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            found[path] = int(quantity(limit)) if limit else None
    return found


async def prepare_volumes(api: Api, pod: Object, folder: Path, claims: Path) -> dict[str, Path]:
    """Volume -> its folder on this machine, filled. NotYet where an object is absent."""
    return {
        volume["name"]: await _prepare(api, pod, volume, folder / "volumes" / volume["name"], claims)
        for volume in pod["spec"].get("volumes", [])
    }


async def _prepare(api: Api, pod: Object, volume: Object, own: Path, claims: Path) -> Path:
    own.mkdir(parents=True, exist_ok=True)
    if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
        return await _claim(api, pod, claim, claims)
    if "configMap" in volume or "secret" in volume:
        kind = "configMap" if "configMap" in volume else "secret"
        source = volume[kind]
        name = source.get("name") or source.get("secretName")
        data = await _data(api, pod, kind, name, volume["name"], source.get("optional", False))
        write_files(own, _chosen(data, source), source.get("defaultMode", 0o644))
    elif "projected" in volume:
        files: dict[str, bytes] = {}
        for source in volume["projected"]["sources"]:
            files |= await _projected(api, pod, source, volume["name"])
        write_files(own, files, 0o644)
    return own


async def _claim(api: Api, pod: Object, claim: str, claims: Path) -> Path:
    space = pod["metadata"]["namespace"]
    try:
        found = await api.insist("GET", f"/api/v1/namespaces/{space}/persistentvolumeclaims/{claim}")
    except ApiError as error:
        raise NotYet("FailedMount", f'persistentvolumeclaim "{claim}" not found') from error
    if found.get("status", {}).get("phase") != "Bound":
        raise NotYet("FailedMount", f'persistentvolumeclaim "{claim}" is not bound')
    path = claims / str(found["spec"]["volumeName"])
    path.mkdir(parents=True, exist_ok=True)
    return path


async def _data(api: Api, pod: Object, kind: str, name: str, volume: str, optional: bool) -> dict[str, bytes]:
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/{kind.lower()}s/{name}"
    try:
        found = await api.insist("GET", path)
    except ApiError as error:
        if optional:
            return {}
        words = f'MountVolume.SetUp failed for volume "{volume}" : {kind.lower()} "{name}" not found'
        raise NotYet("FailedMount", words) from error
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}
    plain = {key: value.encode() for key, value in found.get("data", {}).items()}
    return plain | {key: base64.b64decode(value) for key, value in found.get("binaryData", {}).items()}


def _chosen(data: dict[str, bytes], source: Object) -> dict[str, bytes]:
    if "items" not in source:
        return data
    return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}


async def _projected(api: Api, pod: Object, source: Object, volume: str) -> dict[str, bytes]:
    meta = pod["metadata"]
    if wanted := source.get("serviceAccountToken"):
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{pod['spec']['serviceAccountName']}/token"
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        spec: Object = {"expirationSeconds": wanted.get("expirationSeconds", 3600), "boundObjectRef": bound}
        spec["audiences"] = [wanted["audience"]] if "audience" in wanted else []
        answer = await api.insist("POST", path, {"spec": spec})
        return {wanted["path"]: str(answer["status"]["token"]).encode()}
    if "downwardAPI" in source:
        fields = source["downwardAPI"].get("items", [])
        return {item["path"]: field_of(pod, item["fieldRef"]["fieldPath"]).encode() for item in fields}
    kind = "configMap" if "configMap" in source else "secret"
    inner = source[kind]
    data = await _data(api, pod, kind, inner["name"], volume, inner.get("optional", False))
    return _chosen(data, inner)


def write_files(folder: Path, files: dict[str, bytes], mode: int) -> None:
    """As the kubelet writes them: each name is a link into ..data, which is a link to the folder of this version."""
    version = folder / "..2026"
    shutil.rmtree(version, ignore_errors=True)
    version.mkdir(parents=True)
    link = folder / "..data"
    link.unlink(missing_ok=True)
    link.symlink_to(version.name)
    for name, content in files.items():
        path = version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
        top = folder / name.partition("/")[0]
        if not top.is_symlink():
            top.symlink_to(f"..data/{top.name}")


def mounts_of(container: Object, volumes: dict[str, Path]) -> list[Mount]:
    rows = container.get("volumeMounts", [])
    return [Mount(volumes[row["name"]], row["mountPath"].rstrip("/"), row.get("readOnly", False)) for row in rows]


async def environment_of(api: Api, pod: Object, container: Object, cluster: dict[str, str]) -> dict[str, str]:
    """The variables of a container. NotYet where one names a Secret that is not there."""
    own = {"PATH": f"{IMAGE}/bin:{PATH}", "HOME": HOME, "LANG": "C.UTF-8", "HOSTNAME": pod["metadata"]["name"]}
    env = own | cluster
    for variable in container.get("env", []):
        source = variable.get("valueFrom")
        value = str(variable.get("value", "")) if source is None else await _secret(api, pod, source["secretKeyRef"])
        if value is not None:
            env[variable["name"]] = expand(value, env)
    return env


async def _secret(api: Api, pod: Object, reference: Object) -> str | None:
    name, key, is_optional = reference["name"], reference["key"], reference.get("optional", False)
    try:
        data = await _data(api, pod, "secret", name, "", is_optional)
    except NotYet as error:
        raise NotYet("Failed", f'secret "{name}" not found') from error
    if key in data:
        return data[key].decode()
    if is_optional:
        return None
    raise NotYet("Failed", f"couldn't find key {key} in secret {pod['metadata']['namespace']}/{name}")


def field_of(pod: Object, path: str) -> str:
    """The value of a field path of the downward API."""
    found: Any = pod
    for part in path.split("."):
        found = found.get(part, "") if isinstance(found, dict) else ""
    return str(found)


def expand(text: str, env: dict[str, str]) -> str:
    """$(NAME) replaced by its value, where it has one; $$(NAME) is an escape."""
    return re.sub(
        r"\$(\$)?\(([A-Za-z0-9_.-]+)\)",
        lambda match: f"$({match[2]})" if match[1] else env.get(match[2], match[0]),
        text,
    )
