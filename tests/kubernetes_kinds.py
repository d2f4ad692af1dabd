"""Custom kinds in a test cluster, from the definitions that projects publish.

They are stored, watched and collected as garbage (within 30 s, which is how often the collector looks for new kinds).
Nobody acts on them, and their fields are not checked: 1.20 refuses rules that today's schemas contain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Definition = dict[str, Any]
ANY = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
# https://github.com/kubernetes/enhancements/pull/1111: needed in groups that end so.
APPROVAL = {"api-approved.kubernetes.io": "unapproved, for tests"}


def definition(group: str, names: dict[str, Any], scope: str, versions: list[dict[str, Any]]) -> Definition:
    """A CustomResourceDefinition whose objects may hold anything."""
    kept = ("name", "served", "storage", "subresources")
    plain = [{**{key: version[key] for key in kept if key in version}, "schema": ANY} for version in versions]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{group}", "annotations": APPROVAL},
        "spec": {"group": group, "names": names, "scope": scope, "versions": plain},
    }


def definitions_in(folder: Path) -> list[Definition]:
    """The definitions in a folder's YAML files, without their schemas."""
    import yaml

    documents = [
        each for file in sorted(folder.rglob("*.yaml")) for each in yaml.safe_load_all(file.read_text("utf-8"))
    ]
    specs = [each["spec"] for each in documents if each and each.get("kind") == "CustomResourceDefinition"]
    return [definition(spec["group"], spec["names"], spec["scope"], spec["versions"]) for spec in specs]
