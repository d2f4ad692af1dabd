"""What is released: bounds that agree, a lock that names all, a wheel with its bill of materials."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.targets.cloudera import workloads

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]
LOCKED = dict(line.split("==") for line in (ROOT / "tools" / "dev.lock").read_text().splitlines())


def test_the_lock_has_a_fitting_version_of_all_that_is_asked_for() -> None:
    asked = [*NEEDED, *map(Requirement, PROJECT["optional-dependencies"]["dev"])]
    asked = [need for need in asked if need.marker is None or need.marker.evaluate()]
    wrong = [str(need) for need in asked if not need.specifier.contains(LOCKED.get(canonicalize_name(need.name), "0"))]
    assert wrong == []
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in LOCKED), "names alone: no address of an index"


def test_pods_of_a_workbench_get_what_the_package_allows() -> None:
    bounds = {need.name: need.specifier for need in NEEDED}
    for need in map(Requirement, workloads._REQUIREMENTS):
        assert bounds[need.name] == need.specifier, need


@pytest.mark.processes
@pytest.mark.nightly
def test_a_release_has_a_bill_of_materials_with_all_that_the_wheel_needs(tmp_path: Path) -> None:
    """Of a clone, since it writes into its folder; the packages come from the index."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    subprocess.run(["make", "-C", str(tmp_path / "clone"), "release"], check=True, capture_output=True)
    bill = json.loads((tmp_path / "clone" / "dist" / "penstock.cdx.json").read_text())
    parts = {canonicalize_name(part["name"]): part["version"] for part in bill["components"]}
    needed = {canonicalize_name(need.name) for need in NEEDED if need.marker is None or need.marker.evaluate()}
    assert needed <= parts.keys() and parts == {name: LOCKED[name] for name in parts}
    assert bill["metadata"]["component"]["name"] == "penstock" and all(
        part.get("licenses") for part in bill["components"]
    )
    (wheel,) = (tmp_path / "clone" / "dist").glob("*.whl")
    assert wheel.name.startswith(f"penstock-{bill['metadata']['component']['version']}-")
