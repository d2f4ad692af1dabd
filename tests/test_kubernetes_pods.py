"""Objects of replicas on target kubernetes: what each pod asks for, runs and may do."""

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
from samples import LLAMA_70B, demo_plan, deployment

from penstock.errors import UserError
from penstock.planner import Need, Plan
from penstock.run_folder import Launch
from penstock.spec.deployment import Deployment, Parallel
from penstock.spec.secret_names import secret_names
from penstock.targets.kubernetes import archive, gpus, pods, replicas
from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.strategic_merge import merged
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


def node(wanted: Deployment, whole: Plan | None = None) -> Object:
    (container,) = template(wanted, whole)["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def variables(container: Object) -> dict[str, Any]:
    return {row["name"]: row.get("value", row.get("valueFrom")) for row in container["env"]}


# ---- one replica -----------------------------------------------------------------------------------------------------


def test_a_pod_asks_for_its_ranks_and_has_what_it_asks_for() -> None:
    for whole, n_each in ((plan(), 1), (plan(4), 4), (plan(16, 2), 8)):
        resources = node(file(hardware=H100), whole)["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"]["nvidia.com/gpu"] == str(n_each)
        assert resources["limits"]["cpu"] == str(4 * n_each)
        # 8 GiB a node and 16 GiB a rank, and /dev/shm with 4 GiB and 1 GiB a rank.
        assert resources["limits"]["memory"] == f"{(8 + 16 * n_each + 4 + n_each) * 1024}Mi"
        shm = next(volume for volume in template(file(), whole)["spec"]["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{(4 + n_each) * 1024}Mi"}


def test_fields_of_the_file_replace_what_the_plan_says() -> None:
    block = {"cpus_per_node": 24, "memory": "200Gi"}
    assert node(file(kubernetes=block))["resources"]["limits"] == {
        "cpu": "24",
        "memory": "200Gi",
        "nvidia.com/gpu": "1",
    }


def test_a_replica_without_gpus_needs_an_image_and_asks_for_none() -> None:
    whole = plan(device="cpu", need=Need(GIB, 2 * GIB, GIB), n_threads=6)
    with pytest.raises(UserError, match="vllm on the CPU"):
        pods.image(file(), whole)
    wanted = file(kubernetes={"image": "registry/vllm-cpu:1"})
    container = node(wanted, whole)
    assert container["image"] == "registry/vllm-cpu:1"
    assert container["resources"]["limits"] == {"cpu": "6", "memory": f"{(5 + 1 + 1) * 1024}Mi"}
    assert "tolerations" not in template(wanted, whole)["spec"]
    assert "affinity" not in template(file(hardware=H100, kubernetes={"image": "i"}), whole)["spec"]


def test_the_image_is_that_of_the_planned_version() -> None:
    assert pods.image(file(), plan()) == "vllm/vllm-openai:v0.33.0"
    assert pods.image(file(), plan(engine_version="0.32.1+cu129")) == "vllm/vllm-openai:v0.32.1"
    assert pods.image(file(kubernetes={"image": "mine@sha256:0"}), plan()) == "mine@sha256:0"


def test_the_node_runs_as_the_contract_of_pods_says() -> None:
    container = node(file())
    command = (
        "python3 -m penstock.node /penstock/runs/llama/artifact/launch.json --replica {replica} --rank-from-hostname"
        " --port 8000 --ready-file /penstock/ready --kill-after 140"
    )
    assert " ".join(container["command"]) == command
    spec = template(file())["spec"]
    assert spec["terminationGracePeriodSeconds"] == 150
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", "/penstock/ready"]
    assert "livenessProbe" not in container and "startupProbe" not in container
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False


def test_every_container_is_restricted_and_writes_only_to_volumes() -> None:
    spec = template(file())["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        folders = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert {"/penstock", "/tmp"} <= folders
        written = [value for name, value in variables(container).items() if name.endswith(("HOME", "_DIR", "_ROOT"))]
        assert len(written) == 7 and all(value.startswith("/penstock") for value in written)


def test_variables_of_the_file_reach_the_container_as_they_are() -> None:
    env = {"NCCL_DEBUG": "INFO", "ODD": "$(HOME) $HOME"}
    wanted = file(engine={"env": env}, kubernetes={"hub_token_secret": "hf"})
    values = variables(node(wanted))
    assert values["NCCL_DEBUG"] == "INFO" and values["ODD"] == "$$(HOME) $HOME"
    assert values["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}
    own = node(file(engine={"env": {"VLLM_CACHE_ROOT": "/mine", "PYTHONPATH": "/mine"}}))
    assert variables(own)["VLLM_CACHE_ROOT"] == "/mine" and variables(own)["PYTHONPATH"] == "/penstock/code"
    assert len(variables(own)) == len(own["env"])  # server-side apply refuses two of one name
    names = ["HF_TOKEN", "MY_API_KEY", "DB_PASSWORD", "VLLM_USE_V1", "TOKENIZERS_PARALLELISM", "KEYBOARD"]
    assert secret_names(names) == names[:3]


def test_weights_on_the_nodes_disk_are_asked_for() -> None:
    storage = replicas.Storage(disk_bytes=130 * GIB, annotations={"a": "b"})
    (only,) = replicas.replica(launch(), file(), storage)
    spec = only["spec"]["template"]
    assert spec["spec"]["containers"][0]["resources"]["limits"]["ephemeral-storage"] == "140Gi"
    assert spec["metadata"]["annotations"] == {"a": "b"}


# ---- sets ------------------------------------------------------------------------------------------------------------


def test_one_set_for_a_replica_of_any_shape_with_matching_labels() -> None:
    stateful, lws = the_set(file(), plan(16, 2)), the_set(file(kubernetes={"shape": "lws"}), plan(16, 2))
    assert stateful["metadata"]["name"] == lws["metadata"]["name"] == "llama-r{replica}"
    assert stateful["spec"]["replicas"] == lws["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert stateful["spec"]["updateStrategy"] == {"type": "OnDelete"}
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert lws["spec"]["leaderWorkerTemplate"]["workerTemplate"] == stateful["spec"]["template"]
    assert lws["spec"]["replicas"] == 1 and lws["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_nodes_of_a_replica_have_hosts_of_their_own_where_they_take_whole_ones() -> None:
    affinity = template(file(hardware=H100), plan(16, 2))["spec"]["affinity"]
    (apart,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"]["penstock.dev/replica"] == "{replica}"
    assert "podAntiAffinity" not in template(file(hardware=H100), plan(8, 2))["spec"]["affinity"]
    assert "podAntiAffinity" not in template(file(hardware=H100), plan(4))["spec"]["affinity"]


def test_a_launch_in_pods_has_their_paths_and_the_gateways_service() -> None:
    config_map, service = replicas.shared_objects(launch(), file())
    written = json.loads(config_map["data"]["launch.json"])
    assert written["announce_urls"] == ["http://llama-gateway-pods:8001"]
    assert written["token_file"] == "/penstock/runs/llama/secrets/admin-token" and written["announce_file"] is None
    assert service["spec"]["publishNotReadyAddresses"] and service["spec"]["clusterIP"] == "None"
    (source,) = [v for v in template(file())["spec"]["volumes"] if v["name"] == "config"]
    assert source["projected"]["sources"] == [{"configMap": {"name": config_map["metadata"]["name"]}}]


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
    spec = budget(3)
    assert spec is not None and spec["maxUnavailable"] == 1
    assert spec["selector"]["matchLabels"]["apps.kubernetes.io/pod-index"] == "0"
    # maxUnavailable is taken of the pods of whole sets: 3 sets of 2 pods less 1 are more than the 3 first pods.
    spec = budget(3, plan(16, 2))
    assert spec is not None and spec["minAvailable"] == 2 and "maxUnavailable" not in spec
    spec = budget(3, plan(16, 2), shape="lws")
    assert spec is not None and spec["maxUnavailable"] == 1


def test_names_of_a_deployment_with_forty_characters_are_legal() -> None:
    wanted = file("a" * 40, replicas=2)
    made = [archive.config_map(wanted, archive.archive()), *replicas.shared_objects(launch(), wanted), the_set(wanted)]
    names = [one["metadata"]["name"].replace("{replica}", "9999") for one in made]
    assert max(map(len, names)) <= 63
    # A StatefulSet's name and a hash of ten characters are a label of its pods, and "-15" ends a pod's name.
    assert len(names[-1]) + 11 <= 63


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 GPU": ({}, {}),
    "4 GPUs of a node": ({"hardware": H100}, {"n_ranks": 4}),
    "2 nodes of 8": ({"hardware": H100, "replicas": 3}, {"n_ranks": 16, "n_nodes": 2}),
    "lws": ({"hardware": H100, "kubernetes": {"shape": "lws"}, "replicas": 3}, {"n_ranks": 16, "n_nodes": 2}),
    "CPU": ({"kubernetes": {"image": "mine:1"}}, {"device": "cpu", "n_threads": 4}),
    "all fields": (
        {
            "name": "a" * 40,
            "kubernetes": {
                "image_pull_secrets": ["a"],
                "node_selector": {"pool": "b"},
                "priority_class": "c",
                "tolerations": [{"key": "sku", "value": "gpu", "effect": "NoSchedule"}],
                "runtime_class": "nvidia",
                "service_account": "d",
                "labels": {"team": "e"},
                "annotations": {"f": "g"},
                "memory": "64Gi",
            },
        },
        {},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_legal_on_the_oldest_and_the_newest_kubernetes(shape: str) -> None:
    problems_of = pytest.importorskip("kubernetes_schemas").problems_of
    fields, ranks = SHAPES[shape]
    wanted, whole = file(**fields), plan(**ranks)
    code = archive.config_map(wanted, archive.archive())
    made = [code, *replicas.shared_objects(launch(whole), wanted), the_set(wanted, whole)]
    assert problems_of(json.loads(json.dumps(made).replace("{replica}", "0")), is_whole=True) == []


# ---- patch -----------------------------------------------------------------------------------------------------------


def test_a_patch_merges_lists_by_their_keys_and_leaves_the_rest() -> None:
    patch: Object = {
        "metadata": {"annotations": {"networking.gke.io/default-interface": "eth0"}},
        "spec": {
            "schedulerName": "volcano",
            "containers": [
                {
                    "name": "node",
                    "env": [{"name": "NCCL_NET", "value": "gIB"}, {"name": "USER", "value": "me"}],
                    "resources": {"limits": {"rdma/ib": "1"}},
                    "volumeMounts": [{"mountPath": "/gib", "name": "gib"}],
                },
                {"name": "side", "image": "tcpx"},
            ],
            "volumes": [{"name": "gib", "hostPath": {"path": "/home/kubernetes/bin/gib"}}],
        },
    }
    plain, patched = template(file()), template(file(kubernetes={"patch": patch}))
    assert patched["metadata"]["annotations"] == patch["metadata"]["annotations"]
    assert patched["spec"]["schedulerName"] == "volcano"
    container, side = patched["spec"]["containers"]
    assert side == {"name": "side", "image": "tcpx"}
    assert container["command"] == plain["spec"]["containers"][0]["command"]
    assert variables(container)["USER"] == "me" and variables(container)["NCCL_NET"] == "gIB"
    assert container["resources"]["limits"]["rdma/ib"] == "1" and container["resources"]["limits"]["nvidia.com/gpu"]
    assert len(container["volumeMounts"]) == len(plain["spec"]["containers"][0]["volumeMounts"]) + 1


def test_directives_of_a_patch_delete_and_replace() -> None:
    original = {"volumes": [{"name": "a"}, {"name": "b"}], "tolerations": [{"key": "x"}], "nodeSelector": {"a": "1"}}
    assert merged(original, {"volumes": [{"name": "a", "$patch": "delete"}]})["volumes"] == [{"name": "b"}]
    assert merged(original, {"volumes": [{"$patch": "replace"}, {"name": "c"}]})["volumes"] == [{"name": "c"}]
    assert merged(original, {"nodeSelector": {"$patch": "replace", "b": "2"}})["nodeSelector"] == {"b": "2"}
    assert merged(original, {"nodeSelector": None}) == {k: original[k] for k in ("volumes", "tolerations")}
    assert merged(original, {"tolerations": [{"key": "y"}]})["tolerations"] == [
        {"key": "y"}
    ]  # the API has no key there
    assert original["volumes"] == [{"name": "a"}, {"name": "b"}]
    with pytest.raises(UserError, match='"volumes" has no name'):
        merged(original, {"volumes": [{"emptyDir": {}}]})


# ---- GPUs by place ---------------------------------------------------------------------------------------------------


def test_a_card_is_selected_by_the_labels_of_every_place_and_read_back_from_each() -> None:
    keys = {}
    for term in gpus.node_terms("h100-sxm"):
        (expression,) = term["matchExpressions"]
        keys[expression["key"]] = expression["values"]
    assert keys[gpus.GKE] == ["nvidia-h100-80gb", "nvidia-h100-mega-80gb"]
    assert keys[gpus.PRODUCT] == ["NVIDIA-H100-80GB-HBM3"]
    assert {"p5.48xlarge", "Standard_ND96isr_H100_v5"} <= {*keys[gpus.INSTANCE_TYPE]}
    for key, values in keys.items():
        for value in values:
            card = gpus.gpu_of({key: value})
            assert card is not None and card.name == "NVIDIA H100 80GB HBM3"


def test_no_label_means_two_cards() -> None:
    from penstock.hardware import catalog

    seen: dict[tuple[str, str], str] = {}
    for gpu_id in catalog.gpu_ids():
        for term in gpus.node_terms(gpu_id):
            for expression in term["matchExpressions"]:
                for value in expression["values"]:
                    assert seen.setdefault((expression["key"], value), gpu_id) == gpu_id


def test_cards_outside_the_table_are_read_from_what_feature_discovery_says() -> None:
    labels = {gpus.PRODUCT: "NVIDIA-A100-PCIE-40GB", gpus.MEMORY: "40960"}
    assert gpus.gpu_of(labels) == gpus.NodeGpu("NVIDIA-A100-PCIE-40GB", 40 * GIB)
    shared = gpus.gpu_of({gpus.PRODUCT: "NVIDIA-L4-SHARED", gpus.MEMORY: "23034"})
    assert shared is not None and shared.name == "NVIDIA L4"
    assert gpus.gpu_of({"kubernetes.io/hostname": "a"}) is None
    assert len(gpus.node_terms("rtx-3090")) == 1  # no cloud has it


def test_a_selector_of_the_file_takes_the_place_of_the_cards_labels() -> None:
    selector = {"pool": "big"}
    spec = template(file(hardware=H100, kubernetes={"node_selector": selector}))["spec"]
    assert spec["nodeSelector"] == selector and "affinity" not in spec


# ---- the code --------------------------------------------------------------------------------------------------------


def test_the_archive_is_small_whole_and_the_same_each_time() -> None:
    code = archive.archive()
    assert len(code.data) + len(code.prepare) < archive.MOST_BYTES
    names = zipfile.ZipFile(io.BytesIO(bz2.decompress(code.data))).namelist()
    assert {"penstock/node/__main__.py", "penstock/hardware/data/gpus.yaml"} <= {*names}
    assert not [name for name in names if "demo_model" in name or name.endswith((".so", ".pyc"))]
    config_map = archive.config_map(file(), code)
    assert config_map["immutable"] and base64.b64decode(config_map["binaryData"]["penstock.zip.bz2"]) == code.data
    assert config_map["metadata"]["name"] == f"llama-code-{code.hash}"
    (volume,) = [v for v in template(file())["spec"]["volumes"] if v["name"] == "code"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]


# ---- the init container ----------------------------------------------------------------------------------------------


@pytest.fixture
def script() -> Any:
    """prepare.py as a module, from the text that the ConfigMap has."""
    module = types.ModuleType("prepare")
    exec(compile(archive.archive().prepare, "prepare.py", "exec"), module.__dict__)
    return module


def mounted(folder: Path, files: dict[str, str]) -> Path:
    """A folder as the kubelet mounts a ConfigMap: names are links through ..data."""
    data = folder / "..2026_11_22"
    data.mkdir(parents=True)
    (folder / "..data").symlink_to(data.name)
    for name, text in files.items():
        (data / name).write_text(text)
        (folder / name).symlink_to(f"..data/{name}")
    return folder


def test_prepare_unpacks_the_code_and_makes_a_run_folder_with_safe_modes(script: Any, tmp_path: Path) -> None:
    stream, package = io.BytesIO(), tmp_path / archive.FILE
    with zipfile.ZipFile(stream, "w") as whole:
        whole.writestr("penstock/node/__main__.py", "")
    package.write_bytes(bz2.compress(stream.getvalue()))
    config = mounted(tmp_path / "config", {"launch.json": "{}", "spec.yaml": "a: 1"})
    secret = mounted(tmp_path / "secret", {"admin-token": "t", "any-key": "h"})
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
    tree = ast.parse(archive.archive().prepare)
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names}
