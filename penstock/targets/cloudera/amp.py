"""The files of an AMP (Accelerator for ML Projects): with them an administrator offers a deployment in the catalogue.

A project that is made from a repository with these three files starts the deployment by itself.
https://docs.cloudera.com/machine-learning/cloud/applied-ml-prototypes/topics/ml-amp-project-spec.html
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.targets.cloudera import names
from penstock.text import KIB

PREFIX = "amp:"
METADATA, FILE, SCRIPT = ".project-metadata.yaml", "deployment.yaml", "penstock_up.py"
_SHARED_MEMORY_GB = 2.0
_UP = '''"""Starts the deployment of deployment.yaml in this project; its key is printed once."""

import importlib.util
import subprocess
import sys

if importlib.util.find_spec("penstock") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "penstock"], check=True)
done = subprocess.run([sys.executable, "-m", "penstock", "up", "deployment.yaml", "--no-wait"], check=False)
if done.returncode:
    raise RuntimeError("penstock up failed: its words are above")
'''


def files(deployment: Deployment) -> dict[str, str]:
    """Texts by name, with "amp:" in front. Workbench and project are those in which the AMP is used."""
    block = msgspec.structs.replace(names.block_of(deployment), workbench=None, project=None, key_file=None)
    there = msgspec.structs.replace(deployment, cloudera=block)
    texts = {METADATA: _metadata(deployment), FILE: reading.to_yaml(there), SCRIPT: _UP}
    return {f"{PREFIX}{name}": text for name, text in texts.items()}


def _metadata(deployment: Deployment) -> str:
    import yaml

    limit_mb = names.block_of(deployment).shared_memory_mb
    facts: dict[str, Any] = {
        "name": f"penstock: {deployment.name}",
        "description": f"{deployment.model} behind an OpenAI-compatible gateway, started by penstock.",
        "author": "penstock",
        "specification_version": 1.0,
        "prototype_version": 1.0,
        "shared_memory_limit": limit_mb / KIB if limit_mb is not None else _SHARED_MEMORY_GB,
        "environment_variables": {
            "HF_TOKEN": {"default": "", "description": "a token of the hub, for gated models", "required": False}
        },
        "runtimes": [{"editor": "PBJ Workbench", "kernel": "Python 3.11", "edition": "Nvidia GPU"}],
        "tasks": [
            {"type": "run_session", "name": "Start the deployment", "script": SCRIPT, "kernel": "python3",
             "cpu": 1, "memory": 2}
        ],
    }  # fmt: skip
    text: str = yaml.safe_dump(facts, sort_keys=False, width=110)
    return text
