"""Target kubernetes: what is no replica: gateway, controller, chat page, traffic, scaling.

What their objects look like is in golden/kubernetes (test_kubernetes_render.py).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from samples import deployment, gpu_plan, run_folder

from penstock.chat.page.config import PageConfig
from penstock.deployment import placed_unit
from penstock.gateway.config import load_config
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import packages, scaling, services, traffic
from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.target import Kubernetes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("kubernetes", "gke", "eks", "on-prem")]


def cluster(gateway: Any = None, ui: Any = False, **block: Any) -> Deployment:
    return deployment(name="llm", target="kubernetes", kubernetes=block, gateway=gateway or {"auth": "keys"}, ui=ui)


def only(entries: list[Object], kind: str) -> Object:
    [entry] = [entry for entry in entries if entry["kind"] == kind]
    return entry


def test_pods_are_replaced_when_what_they_read_changes_and_only_then() -> None:
    def notes(wanted: Deployment) -> tuple[str, str]:
        rows = (services.gateway(wanted, gpu_plan()), services.controller(wanted, gpu_plan()))
        gateway, controller = (only(entries, "Deployment")["spec"]["template"] for entries in rows)
        return tuple(each["metadata"]["annotations"]["penstock.dev/config"] for each in (gateway, controller))

    before, held, more = notes(cluster()), notes(cluster({"hold_s": 5})), notes(cluster(cpus_per_node=8))
    assert before == notes(cluster())
    assert before[0] != held[0] and before[1] != held[1]
    assert before[0] == more[0] and before[1] != more[1]


def test_a_chat_page_is_placed_where_the_file_asks_for_one() -> None:
    assert Kubernetes().placed(cluster()) == ("replica", "gateway", "controller")
    assert Kubernetes().placed(cluster(ui=True)) == ("replica", "gateway", "controller", "ui")


def test_the_controller_changes_objects_of_its_own_names_alone() -> None:
    rules = services.role(cluster(), 0)["rules"]
    unnamed = {(rule["resources"][0], verb) for rule in rules if "resourceNames" not in rule for verb in rule["verbs"]}
    assert {pair for pair in unnamed if pair[1] not in ("list", "create")} == {
        *(("pods", "get"), ("pods", "delete"), ("pods/log", "get")),
    }
    assert all(name.startswith("llm-") for rule in rules for name in rule.get("resourceNames", ()))
    assert "llm-r79" in str(services.role(cluster(), 40)), "all of 40 that drain, and the next 40"


@pytest.mark.parametrize(("monitors", "froms"), [("none", 1), ("annotations", 1), ("google", 2), ("operator", 2)])
def test_engines_take_requests_from_the_gateway_and_from_the_prometheus_that_asks_them(
    monitors: Any, froms: int
) -> None:
    rows = traffic.exposed(cluster(), False, monitors)
    (spec,) = [row["spec"] for row in rows if row["metadata"]["name"] == "llm-nodes"]
    requests, ranks = spec["ingress"]
    assert len(requests["from"]) == froms and [port["port"] for port in requests["ports"]] == [8000]
    assert "replica" in str(ranks["from"]) and len(ranks["from"]) == 1


@pytest.mark.parametrize(
    ("weights", "access", "reaches_out"),
    [(None, "ReadWriteMany", False), (None, "ReadWriteOnce", True), ("pvc:a", "ReadWriteMany", False),
     ("image:a", "ReadWriteMany", False), ("gs://a", "ReadWriteMany", True), ("s3://a/b", "ReadWriteMany", True),
     ("pod", "ReadWriteMany", True)],
)  # fmt: skip
def test_engines_that_need_no_network_for_their_weights_get_none(weights: str, access: str, reaches_out: bool) -> None:
    wanted = deployment(
        name="llm", model="org/model", target="kubernetes", cache={"weights": weights},
        kubernetes={"storage_access": access},
    )  # fmt: skip
    (spec,) = [row["spec"] for row in traffic.exposed(wanted) if row["metadata"]["name"] == "llm-nodes"]
    assert ("egress" in spec, "Egress" in spec["policyTypes"]) == 2 * (not reaches_out,)


@pytest.mark.parametrize("is_google", [False, True])
def test_hpa_reads_the_gauge_from_an_adapter_which_google_has(is_google: bool) -> None:
    wanted = deployment(target="kubernetes", replicas={"min": 1, "max": 4, "actuator": "hpa"})
    dial, hpa, *adapter = scaling.objects_of(wanted, gpu_plan(), "autoscaling/v2beta2", is_google)
    assert scaling.number_of(dial) == 1
    assert hpa["apiVersion"] == "autoscaling/v2beta2"
    [metric] = hpa["spec"]["metrics"]
    name = metric["external"]["metric"]["name"]
    if is_google:
        assert (name, adapter) == ("prometheus.googleapis.com|penstock_desired_replicas|gauge", [])
    else:
        rule = yaml.safe_load(adapter[0]["data"]["prometheus-adapter.yaml"])
        assert rule["rules"]["external"][0]["name"] == {"as": name}


def test_an_ingress_has_its_certificate_by_secret_and_none_that_is_not_asked_for() -> None:
    wanted = cluster(expose="Ingress", host="a.example", tls_secret="cert")
    by_secret = only(traffic.exposed(wanted), "Ingress")
    assert by_secret["spec"]["tls"] == [{"hosts": ["a.example"], "secretName": "cert"}]
    assert not traffic.has_tls_in_pod(wanted), "only a load balancer leaves TLS to the gateway"
    assert "tls" not in only(traffic.exposed(cluster(expose="Ingress", host="a.example")), "Ingress")["spec"]


INGRESS = {"expose": "Ingress", "host": "a.example"}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/usr/bin/python3: No module named pip\n", "this image has no pip"),
        ("WARNING: Retrying after NewConnectionError\nERROR: No matching distribution", "no package index answers at"),
        ("ERROR: No matching distribution found for gradio<7,>=6.20\n", "No matching distribution found for gradio"),
        ("WARNING: The repository at a.example is not a trusted or secure host and", "pip ignores "),
        ("", "pip failed"),
    ],
)
def test_why_packages_were_not_installed_is_one_line(output: str, words: str) -> None:
    assert packages.why(output).startswith(words)


def test_the_page_installs_what_its_extra_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["optional-dependencies"]["ui"] == [packages.REQUIREMENT]


FILES = [
    (page.stem, number, text)
    for page in PAGES
    for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
    if re.search("^model:", text, re.MULTILINE)
]


@pytest.mark.parametrize(("page", "number", "text"), FILES, ids=[f"{page}-{number}" for page, number, _ in FILES])
def test_files_on_the_pages_are_good(page: str, number: int, text: str) -> None:
    wanted = reading.parse(text)
    assert wanted.target == "ray" or traffic.problems(wanted) == []


def test_the_page_of_gke_shows_the_example() -> None:
    example = (ROOT / "examples" / "gke.yaml").read_text("utf-8")
    shown = next(text for page, _, text in FILES if page == "gke")
    assert reading.parse(shown) == reading.parse(example)


@pytest.fixture
def placed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a placed unit of a deployment up to where its program starts; gives the program's words."""
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda path, argv, env: started.append(argv))

    def run(wanted: Deployment, kind: str, *words: str) -> list[str]:
        folder = run_folder(wanted)
        folder.gateway_config.unlink(missing_ok=True)
        placed_unit.main([kind, str(folder.path), *words])
        return started.pop()

    return run


def test_a_placed_gateway_has_its_certificate_and_store_where_the_pod_mounts_them(placed: Any) -> None:
    words = ["--listen", "0.0.0.0:8000", "--admin", "0.0.0.0:8001", "--store", "/store/keys.db", "--tls", "/tls"]
    module, path = placed(deployment(name="llm", gateway={"auth": "keys"}), "gateway", *words)[-2:]
    config = load_config(Path(path))
    assert module == "penstock.gateway"
    assert (config.tls_cert, config.tls_key, config.store) == ("/tls/tls.crt", "/tls/tls.key", "/store/keys.db")
    assert (config.listen, config.admin) == ("0.0.0.0:8000", "0.0.0.0:8001")


def test_a_placed_page_asks_for_keys_and_knows_its_gateway(placed: Any) -> None:
    words = ["--listen", "0.0.0.0:7860", "--gateway", "https://llm-gateway:8000", "--tls", "/tls"]
    path = placed(cluster(ui={"title": "Llama"}, **INGRESS), "ui", *words)[-1]
    config = msgspec.json.decode(Path(path).read_bytes(), type=PageConfig)
    assert (config.gateway, config.host, config.port) == ("https://llm-gateway:8000", "0.0.0.0", 7860)
    assert config.certificate == "/tls/tls.crt"
    assert (config.has_login, config.title, config.root_path) == (True, "Llama", "/ui")


def test_a_gateway_on_a_lost_node_is_deleted_by_force_so_that_the_next_one_gets_its_claim(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[tuple[str, float]] = []

    class Cluster:
        def list(self, kind: str, labels: object = None) -> list[Object]:
            return {"Pod": pods, "Node": [{"metadata": {"name": "node-1"}, "status": {}}]}.get(kind, [])

        def delete(self, kind: str, name: str, grace_s: float) -> None:
            deleted.append((name, grace_s))

    def pod(name: str, **more: str) -> Object:
        metadata = {"name": name, "uid": name, "labels": {"app.kubernetes.io/component": "gateway"}, **more}
        return {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": {}}

    pods = [pod("lost", deletionTimestamp="2026-01-01T00:00:00Z"), pod("next")]
    target, run = Kubernetes(), run_folder(cluster())
    monkeypatch.setattr(target, "_api_of", lambda run: Cluster())
    monkeypatch.setattr(target._publisher, "exchange", lambda *_: None)
    monkeypatch.setattr("penstock.targets.kubernetes.folder.is_inside", lambda run: True)
    target.keep_up(run)
    assert deleted == [("lost", 0)]
