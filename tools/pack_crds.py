"""Pack the custom resource definitions that tests judge by: `python tools/pack_crds.py FOLDER`.

FOLDER has a subfolder for each project with its definitions as published (GROUP_PLURAL.yaml), SOURCE.txt (repository,
tag, licence) and a NOTICE where the project has one. Writes tests/golden/crds.json.xz, the schemas of the kinds below
without descriptions, and tests/golden/crds.txt, where they come from.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
# What penstock renders, in the version that it names.
KINDS = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
    ("inference.networking.k8s.io/v1", "InferencePool"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("monitoring.googleapis.com/v1", "PodMonitoring"),
    ("monitoring.googleapis.com/v1", "Rules"),
}
HEAD = """crds.json.xz: OpenAPI schemas of custom resources, to judge what penstock renders.

Cut to the kinds and versions that it renders and stripped of descriptions by tools/pack_crds.py. They are data of these
projects:
"""


def without_descriptions(schema: Any) -> Any:
    """A schema without the texts for people; a property that is called "description" stays."""
    if isinstance(schema, list):
        return [without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "description" or not isinstance(value, str)}
    return {key: without_descriptions(value) for key, value in kept.items()}


def main(folder: Path) -> None:
    schemas: dict[str, Any] = {}
    sources = []
    for path in sorted(folder.glob("*/*.yaml")):
        spec = yaml.load(path.read_text("utf-8"), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            api_version, kind = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            if (api_version, kind) in KINDS:
                schemas[f"{api_version} {kind}"] = without_descriptions(version["schema"]["openAPIV3Schema"])
                sources.append(path.parent)
    missing = KINDS - {tuple(name.split()) for name in schemas}
    if missing:
        raise SystemExit(f"no definition of {sorted(missing)} in {folder}")
    texts = [
        (project / name).read_text("utf-8").strip().replace("Files (unchanged)", "Files")
        for project in dict.fromkeys(sources)
        for name in ("SOURCE.txt", "NOTICE")
        if (project / name).exists()
    ]
    data = json.dumps(schemas, sort_keys=True, separators=(",", ":")).encode()
    (GOLDEN / "crds.json.xz").write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    (GOLDEN / "crds.txt").write_text(HEAD + "".join(f"\n{text}\n" for text in texts), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
