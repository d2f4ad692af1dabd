"""Strategic merge patches, as `kubectl patch` applies them: lists of named things merge by their key. Pure.

https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import UserError

# The patchMergeKey of each list in a pod template; all other lists are replaced whole, tolerations too.
# https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ ("Patch strategy: merge on key")
_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name"),
    **dict.fromkeys(("resourceClaims", "schedulingGates"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_DIRECTIVE = "$patch"  # "delete" or "replace"


def merged(original: Any, patch: Any, field: str = "") -> Any:
    """`original` with `patch` over it, both left as they are. null deletes a key, and `$patch: delete | replace` an
    element of a list or the whole of a mapping.  Raises UserError for an element without its list's key."""
    if isinstance(patch, dict):
        return _merged_mapping(original if isinstance(original, dict) else {}, patch)
    if isinstance(patch, list) and field in _KEYS:
        return _merged_list(original if isinstance(original, list) else [], patch, field)
    return patch


def _merged_mapping(original: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    directive = patch.get(_DIRECTIVE)
    rest = {key: value for key, value in patch.items() if key != _DIRECTIVE}
    kept = (
        {} if directive in ("replace", "delete") else {k: v for k, v in original.items() if rest.get(k, v) is not None}
    )
    return kept | {key: merged(kept.get(key), value, key) for key, value in rest.items() if value is not None}


def _merged_list(original: Sequence[Any], patch: Sequence[Any], field: str) -> list[Any]:
    key = _KEYS[field]
    is_replaced = any(item == {_DIRECTIVE: "replace"} for item in patch)
    items = [] if is_replaced else list(original)
    for item in patch:
        if item == {_DIRECTIVE: "replace"}:
            continue
        if not isinstance(item, dict) or key not in item:
            hint = f"Elements of {field} merge by their {key}: give it in each."
            raise UserError(f'cannot use kubernetes.patch: an element of "{field}" has no {key}', hint=hint)
        at = next((index for index, old in enumerate(items) if old.get(key) == item[key]), None)
        if item.get(_DIRECTIVE) == "delete":
            items = [old for old in items if old.get(key) != item[key]]
        elif at is None:
            items.append(merged({}, item))
        else:
            items[at] = merged(items[at], item)
    return items
