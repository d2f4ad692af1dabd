"""Objects of replicas on target kubernetes: what they depend on, their code and their init container.

What they look like is in golden/kubernetes (test_kubernetes_render.py).
"""

from __future__ import annotations

import ast
import base64
import bz2
import io
import json
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubernetes_volumes import write_files
from samples import LLAMA_70B, demo_plan, deployment

from penstock.engines.vllm import images
from penstock.errors import UserError
from penstock.hardware import catalog
from penstock.planner import Need, Plan
from penstock.run_folder import Launch
from penstock.spec.deployment import Deployment, Parallel
from penstock.targets.kubernetes import gpus, pods, replicas
from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.pods import merged
from penstock.text import GIB

H100 = {"gpu": "h100-sxm", "gpus_per_node": 8}


def file(name: str = "llama", **fields: Any) -> Deployment:
    return deployment("meta-llama/Llama-3.1-70B-Instruct", name=name, target="kubernetes", **fields)


def plan(n_ranks: int = 1, n_nodes: int = 1, **changes: Any) -> Plan:
    layout = Parallel(tensor=n_ranks // n_nodes, pipeline=n_nodes)
    whole = demo_plan("vllm", device="cuda", model=LLAMA_70B, engine_version="0.33.0", layout=layout, n_nodes=n_nodes)
    return msgspec.structs.replace(whole, **{"drain_s": 120.0, **changes})


def launch(whole: Plan | None = None) -> Launch:
    return Launch("llama", whole or plan(), ("http://10.0.0.1:9",), "/tmp/token", listen="network", announce_file="x")


def the_set(wanted: Deployment, whole: Plan | None = None) -> Object:
    (only,) = replicas.replica(launch(whole), wanted)
    return only


def template(wanted: Deployment, whole: Plan | None = None) -> Object:
    return the_set(wanted, whole)["spec"]["template"]  # type: ignore[no-any-return]


# ---- one replica -----------------------------------------------------------------------------------------------------


def test_the_image_is_that_of_the_planned_version() -> None:
    assert images.image(file(), plan(engine_version="0.32.1+cu129")) == "vllm/vllm-openai:v0.32.1"
    assert images.image(file(kubernetes={"image": "mine@sha256:0"}), plan()) == "mine@sha256:0"


def test_a_replica_without_gpus_needs_an_image_and_asks_for_none() -> None:
    whole = plan(device="cpu", need=Need(GIB, 2 * GIB, GIB), n_threads=6)
    with pytest.raises(UserError, match="vllm on the CPU"):
        images.image(file(), whole)
    spec = template(file(hardware=H100, kubernetes={"image": "registry/vllm-cpu:1"}), whole)["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"cpu": "6", "memory": f"{(5 + 1 + 1) * 1024}Mi"}
    assert "tolerations" not in spec and "affinity" not in spec


def test_nodes_of_a_replica_share_hosts_where_they_do_not_take_whole_ones() -> None:
    whole, half = (template(file(hardware=H100), plan(n_ranks, 2))["spec"]["affinity"] for n_ranks in (16, 8))
    assert "podAntiAffinity" in whole and "podAntiAffinity" not in half


def test_a_launch_in_pods_has_their_paths_and_the_gateways_service() -> None:
    written = json.loads(replicas.shared_objects(launch(), file())[0]["data"]["launch.json"])
    assert written["announce_urls"] == ["http://llama-gateway-pods:8001"]
    assert written["token_file"] == "/penstock/runs/llama/secrets/admin-token" and written["announce_file"] is None


def test_the_revision_changes_with_what_pods_run_and_only_then() -> None:
    def revision(wanted: Deployment, whole: Plan | None = None) -> str:
        return replicas.revision(launch(whole), wanted)

    first = revision(file())
    assert first == revision(file()) == revision(file(replicas={"min": 3, "max": 3}, workload={"concurrency": 9}))
    assert first == template(file())["metadata"]["labels"]["penstock.dev/revision"]
    others = [
        revision(file(engine={"env": {"A": "1"}})),
        revision(file(), plan(max_model_len=77)),
        revision(file(kubernetes={"patch": {"spec": {"hostNetwork": False}}})),
    ]
    assert len({first, *others}) == 4


def test_a_disruption_budget_counts_first_pods_and_never_blocks_every_drain() -> None:
    def budget(n: int, whole: Plan | None = None, **block: Any) -> Object | None:
        made = replicas.shared_objects(launch(whole), file(replicas=n, kubernetes=block))
        return next((one["spec"] for one in made if one["kind"] == "PodDisruptionBudget"), None)

    assert budget(1) is None
    # maxUnavailable is taken of the pods of whole sets: 3 sets of 2 pods less 1 are more than the 3 first pods.
    spec = budget(3, plan(16, 2))
    assert spec is not None and spec["minAvailable"] == 2 and "maxUnavailable" not in spec
    spec = budget(3, plan(16, 2), shape="lws")
    assert spec is not None and spec["maxUnavailable"] == 1


def test_names_of_a_deployment_with_forty_characters_are_legal() -> None:
    wanted = file("a" * 40, replicas=2)
    made = [pods.code_map(wanted, pods.archive()), *replicas.shared_objects(launch(), wanted), the_set(wanted)]
    names = [one["metadata"]["name"].replace("{replica}", "9999") for one in made]
    assert max(map(len, names)) <= 63
    # A StatefulSet's name and a hash of ten characters are a label of its pods, and "-15" ends a pod's name.
    assert len(names[-1]) + 11 <= 63


# ---- patch -----------------------------------------------------------------------------------------------------------


def test_directives_of_a_patch_delete_and_replace() -> None:
    original = {"volumes": [{"name": "a"}, {"name": "b"}], "tolerations": [{"key": "x"}], "nodeSelector": {"a": "1"}}
    assert merged(original, {"volumes": [{"name": "a", "$patch": "delete"}]})["volumes"] == [{"name": "b"}]
    assert merged(original, {"volumes": [{"$patch": "replace"}, {"name": "c"}]})["volumes"] == [{"name": "c"}]
    assert merged(original, {"nodeSelector": {"$patch": "replace", "b": "2"}})["nodeSelector"] == {"b": "2"}
    assert merged(original, {"nodeSelector": None}) == {k: original[k] for k in ("volumes", "tolerations")}
    # The API has no key there.
    assert merged(original, {"tolerations": [{"key": "y"}]})["tolerations"] == [{"key": "y"}]
    assert original["volumes"] == [{"name": "a"}, {"name": "b"}]
    with pytest.raises(UserError, match='"volumes" has no name'):
        merged(original, {"volumes": [{"emptyDir": {}}]})


# ---- GPUs by place ---------------------------------------------------------------------------------------------------


def test_a_card_is_selected_by_the_labels_of_every_place_and_read_back_from_each() -> None:
    """So no label means two cards."""
    rows = [(gpu_id, row) for gpu_id in catalog.gpu_ids() for term in gpus.node_terms(gpu_id) for row in term.values()]
    for gpu_id, (expression,) in rows:
        for value in expression["values"]:
            card = gpus.gpu_of({expression["key"]: value})
            assert card is not None and card.name == catalog.gpu(gpu_id).names[0], (expression["key"], value)


def test_cards_outside_the_table_are_read_from_what_feature_discovery_says() -> None:
    labels = {gpus.PRODUCT: "NVIDIA-A100-PCIE-40GB", gpus.MEMORY: "40960"}
    assert gpus.gpu_of(labels) == gpus.NodeGpu("NVIDIA-A100-PCIE-40GB", 40 * GIB)
    shared = gpus.gpu_of({gpus.PRODUCT: "NVIDIA-L4-SHARED", gpus.MEMORY: "23034"})
    assert shared is not None and shared.name == "NVIDIA L4"
    for product in (
        "NVIDIA-H20",
        "NVIDIA-L40",
        "NVIDIA-A10",
        "NVIDIA-GH200-480GB",
        "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb",
    ):
        assert gpus.gpu_of({gpus.PRODUCT: product, gpus.MEMORY: "46068"}) == gpus.NodeGpu(product, 46068 * 2**20)
    with pytest.raises(UserError, match='no GPU "h20" in the catalogue'):
        gpus.node_terms("h20")
    assert gpus.gpu_of({"kubernetes.io/hostname": "a"}) is None
    assert len(gpus.node_terms("rtx-3090")) == 1  # no cloud has it


# ---- the code --------------------------------------------------------------------------------------------------------


def test_the_archive_is_small_whole_and_the_same_each_time() -> None:
    code = pods.archive()
    assert len(code.data) + len(code.prepare) < pods.MOST_BYTES
    names = zipfile.ZipFile(io.BytesIO(bz2.decompress(code.data))).namelist()
    assert {"penstock/node/__main__.py", "penstock/hardware/data/gpus.yaml"} <= {*names}
    assert not [name for name in names if "demo_model" in name or name.endswith((".so", ".pyc"))]
    config_map = pods.code_map(file(), code)
    assert base64.b64decode(config_map["binaryData"]["penstock.zip.bz2"]) == code.data
    assert config_map["metadata"]["name"] == f"llama-code-{code.hash}"


# ---- the init container ----------------------------------------------------------------------------------------------


@pytest.fixture
def script() -> Any:
    """prepare.py as a module, from the text that the ConfigMap has."""
    module = types.ModuleType("prepare")
    exec(compile(pods.archive().prepare, "prepare.py", "exec"), module.__dict__)
    return module


def test_prepare_unpacks_the_code_and_makes_a_run_folder_with_safe_modes(script: Any, tmp_path: Path) -> None:
    stream, package = io.BytesIO(), tmp_path / pods.FILE
    with zipfile.ZipFile(stream, "w") as whole:
        whole.writestr("penstock/node/__main__.py", "")
    package.write_bytes(bz2.compress(stream.getvalue()))
    config, secret = tmp_path / "config", tmp_path / "secret"
    write_files(config, {"launch.json": b"{}", "spec.yaml": b"a: 1"}, 0o644)
    write_files(secret, {"admin-token": b"t", "any-key": b"h"}, 0o440)
    code, run = tmp_path / "code", tmp_path / "runs" / "llama"
    words = [*map(str, (package, code, run, config, secret))]
    for _ in range(2):  # a container that starts again finds what the first left
        assert script.main(words) == 0
    assert (code / "penstock" / "node" / "__main__.py").exists()
    files = {path.relative_to(run).as_posix(): path for path in run.rglob("*") if path.is_file()}
    assert {*files} == {"artifact/launch.json", "spec.yaml", "secrets/admin-token", "secrets/any-key"}
    assert files["secrets/admin-token"].stat().st_mode & 0o777 == 0o600
    assert (run / "secrets").stat().st_mode & 0o777 == 0o700
    assert files["spec.yaml"].read_text() == "a: 1" and not files["spec.yaml"].is_symlink()


def test_prepare_says_what_an_image_lacks(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "is_there", lambda name: name not in ("msgspec", "yaml", "rich"))
    assert script.main(["zip", "code", "run"]) == 1
    output = capsys.readouterr().out
    assert (
        "cannot use this image: it has no msgspec (pip install msgspec); it has no yaml (pip install pyyaml)" in output
    )
    assert "no rich" in output
    monkeypatch.setattr(script, "OLDEST", (4, 0))
    assert "penstock needs 4.0" in script.problems()[0]


def test_prepare_needs_only_the_standard_library() -> None:
    tree = ast.parse(pods.archive().prepare)
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names}
