"""penstock's own code as a ConfigMap: an image with the engine alone is enough for a replica.

The init container (`prepare.py`) unpacks it. Compressed as a whole, since each file alone would come to more than the
1 MiB that a ConfigMap may have.
"""

from __future__ import annotations

import base64
import bz2
import functools
from pathlib import Path

import msgspec

from penstock.spec.deployment import Deployment
from penstock.targets.code_archive import code_archive
from penstock.targets.kubernetes.objects import Object, build

FILE, SCRIPT = "penstock.zip.bz2", "prepare.py"
# A ConfigMap has at most 1 MiB in all: https://kubernetes.io/docs/concepts/configuration/configmap/
MOST_BYTES = 900_000


class Archive(msgspec.Struct, frozen=True):
    """`hash`: of all names and bytes inside, so it does not depend on the compressor. `data`: a zip in bzip2.
    `prepare`: the script's text."""

    hash: str
    data: bytes
    prepare: str


@functools.cache
def archive() -> Archive:
    code = code_archive()
    return Archive(code.hash, bz2.compress(code.data), Path(__file__).with_name(SCRIPT).read_text("utf-8"))


def config_map_name(name: str, code: Archive) -> str:
    """At most 56 characters: another version of penstock has another ConfigMap, so none is ever changed."""
    return f"{name}-code-{code.hash}"


def config_map(deployment: Deployment, code: Archive) -> Object:
    data = base64.b64encode(code.data).decode()
    parts: Object = {"immutable": True, "data": {SCRIPT: code.prepare}, "binaryData": {FILE: data}}
    return build("v1/ConfigMap", config_map_name(deployment.name, code), deployment, **parts)
