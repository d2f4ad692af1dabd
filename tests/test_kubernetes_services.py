"""Target kubernetes: what is no replica: gateway, controller, traffic, monitoring."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from samples import deployment, gpu_plan, run_folder

from penstock.chat.page.config import PageConfig
from penstock.deployment import placed_unit
from penstock.gateway.config import load_config
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import checks, monitoring, packages, services, traffic
from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.target import Kubernetes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("kubernetes", "gke", "eks", "on-prem")]
POSTGRES = {"store": "postgresql://penstock@db/penstock"}


def cluster(gateway: Any = None, hardware: Any = None, **block: Any) -> Deployment:
    return deployment(name="llm", target="kubernetes", kubernetes=block, gateway=gateway or {}, hardware=hardware or {})


def watched(**block: Any) -> Deployment:
    return deployment(name="llm", target="kubernetes", kubernetes=block, observe={"prometheus": True})


def with_page(ui: Any = True, env: dict[str, str] | None = None, **block: Any) -> Deployment:
    engine = {"env": env or {}}
    return deployment(name="llm", target="kubernetes", kubernetes=block, gateway={"auth": "keys"}, ui=ui, engine=engine)


def only(entries: list[Object], kind: str) -> Object:
    [entry] = [entry for entry in entries if entry["kind"] == kind]
    return entry


def kinds(entries: list[Object]) -> list[str]:
    return [f"{entry['kind']} {entry['metadata']['name']}" for entry in entries]


def gateway_pod(wanted: Deployment) -> Object:
    template: Object = only(services.gateway(wanted, gpu_plan()), "Deployment")["spec"]["template"]
    return template


def test_the_anchor_holds_what_gateway_and_controller_read() -> None:
    anchor = services.anchor(cluster(), {"spec.yaml": "model: x\n"})
    assert (anchor["kind"], anchor["metadata"]["name"]) == ("ConfigMap", "llm-run")
    assert anchor["data"] == {"spec.yaml": "model: x\n"}


def test_one_gateway_has_a_claim_and_its_successor_starts_next_to_it() -> None:
    entries = services.gateway(cluster(), gpu_plan())
    assert kinds(entries) == [
        "PersistentVolumeClaim llm-store",
        "Service llm-gateway",
        "Service llm-gateway-pods",
        "Deployment llm-gateway",
    ]
    spec = only(entries, "Deployment")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    [term] = spec["template"]["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_several_gateways_share_postgresql_over_zones_and_one_at_a_time_is_evicted() -> None:
    wanted = cluster(POSTGRES, gateways=3, postgres_secret="db")
    entries = services.gateway(wanted, gpu_plan())
    assert kinds(entries)[-1] == "PodDisruptionBudget llm-gateway"
    assert "PersistentVolumeClaim" not in str(entries)
    deployed = only(entries, "Deployment")["spec"]
    pod = deployed["template"]["spec"]
    assert deployed["replicas"] == 3
    assert "affinity" not in pod
    places = [entry["topologyKey"] for entry in pod["topologySpreadConstraints"]]
    assert places == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    password = next(entry for entry in pod["containers"][0]["env"] if entry["name"] == "PGPASSWORD")
    assert password["valueFrom"] == {"secretKeyRef": {"name": "db", "key": "password"}}


def test_nodes_reach_every_gateway_pod_by_the_headless_service_also_before_it_is_ready() -> None:
    clients, admin = (
        entry["spec"] for entry in services.gateway(cluster({"port": 80}), gpu_plan()) if entry["kind"] == "Service"
    )
    assert clients["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    ]
    assert (admin["clusterIP"], admin["publishNotReadyAddresses"]) == ("None", True)
    assert admin["ports"] == [{"name": "admin", "port": 8001, "targetPort": "admin", "protocol": "TCP"}]
    [container] = gateway_pod(cluster({"port": 80}))["spec"]["containers"]
    assert {entry["name"]: entry["containerPort"] for entry in container["ports"]} == {"http": 8000, "admin": 8001}


def test_a_gateway_has_left_every_endpoint_list_before_it_drains_and_time_to_drain() -> None:
    spec = gateway_pod(cluster({"drain_s": 300}))["spec"]
    [container] = spec["containers"]
    assert "sleep(5)" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert spec["terminationGracePeriodSeconds"] == 335
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTP"}
    assert "livenessProbe" not in container


def test_the_gateway_speaks_tls_where_a_load_balancer_does_not() -> None:
    spec = gateway_pod(cluster(expose="LoadBalancer", tls_secret="cert"))["spec"]
    [container] = spec["containers"]
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert container["command"][-2:] == ["--tls", "/etc/penstock/tls"]
    assert {"name": "tls", "mountPath": "/etc/penstock/tls", "readOnly": True} in container["volumeMounts"]
    assert {"name": "tls", "secret": {"secretName": "cert", "defaultMode": 0o440}} in spec["volumes"]


def test_a_gateways_memory_holds_the_bodies_that_wait_in_each_worker() -> None:
    [container] = gateway_pod(cluster({"workers": 2, "queue": {"body_bytes": 2**30}}))["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "1000m", "memory": "1024Mi"},
        "limits": {"memory": "3072Mi"},
    }


def test_pods_are_replaced_when_what_they_read_changes_and_only_then() -> None:
    def notes(wanted: Deployment) -> tuple[str, str]:
        rows = (services.gateway(wanted, gpu_plan()), services.controller(wanted, gpu_plan()))
        gateway, controller = (only(entries, "Deployment")["spec"]["template"] for entries in rows)
        return tuple(each["metadata"]["annotations"]["penstock.dev/config"] for each in (gateway, controller))

    before, held, more = notes(cluster()), notes(cluster({"hold_s": 5})), notes(cluster(cpus_per_node=8))
    assert before == notes(cluster())
    assert before[0] != held[0] and before[1] != held[1]
    assert before[0] == more[0] and before[1] != more[1]


def test_one_controller_runs_with_the_rights_of_its_role_and_no_secrets() -> None:
    entries = services.controller(cluster(), gpu_plan(), "serving")
    assert kinds(entries) == [
        *("ServiceAccount llm-controller", "Role llm-controller"),
        *("RoleBinding llm-controller", "Deployment llm-controller"),
    ]
    spec = only(entries, "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert spec["template"]["spec"]["automountServiceAccountToken"] is True
    assert spec["template"]["spec"]["serviceAccountName"] == "llm-controller"
    assert only(entries, "RoleBinding")["subjects"][0]["namespace"] == "serving"
    rights = {resource: rule["verbs"] for rule in services.rules(cluster()) for resource in rule["resources"]}
    assert rights["pods"] == ["get", "list", "delete"]
    assert {"secrets", "nodes"} & rights.keys() == set()
    sets = {resource for rule in services.rules(cluster(shape="lws")) for resource in rule["resources"]}
    assert "leaderworkersets" in sets and "statefulsets" not in sets


def test_only_the_controller_has_a_token_and_both_leave_a_lost_node_within_half_a_minute() -> None:
    gateway = gateway_pod(cluster())["spec"]
    controller = only(services.controller(cluster(), gpu_plan()), "Deployment")["spec"]["template"]["spec"]
    assert gateway["automountServiceAccountToken"] is False
    for pod in (gateway, controller):
        waits = {entry["key"]: entry["tolerationSeconds"] for entry in pod["tolerations"]}
        assert waits == {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}


def test_a_small_image_may_run_gateway_and_controller() -> None:
    image = "registry.example/penstock:1"
    wanted = cluster(gateway_image=image)
    for entries in (services.gateway(wanted, gpu_plan()), services.controller(wanted, gpu_plan())):
        pod = only(entries, "Deployment")["spec"]["template"]["spec"]
        assert {entry["image"] for entry in [*pod["containers"], *pod["initContainers"]]} == {image}


def test_a_chat_page_is_one_pod_without_secrets_that_installs_what_its_image_lacks() -> None:
    wanted = with_page({"port": 80}, {"PIP_INDEX_URL": "https://pypi.example/simple", "VLLM_USE_V2": "1"})
    entries = services.page(wanted, gpu_plan())
    assert kinds(entries) == ["Service llm-ui", "Deployment llm-ui"]
    [port] = only(entries, "Service")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "page")
    spec = only(entries, "Deployment")["spec"]
    pod = spec["template"]["spec"]
    [container], [_, packages] = pod["containers"], pod["initContainers"]
    assert (spec["replicas"], pod["automountServiceAccountToken"]) == (1, False)
    assert "secret" not in str(pod["volumes"]).lower()
    assert container["command"][-2:] == ["--gateway", "http://llm-gateway:8000"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert {"name": "PYTHONPATH", "value": f"/penstock/code:{packages['command'][-1]}"} in container["env"]
    assert {"name": "PIP_INDEX_URL", "value": "https://pypi.example/simple"} in packages["env"]
    assert "VLLM_USE_V2" not in str(pod)


def test_an_image_with_gradio_installs_nothing_and_without_ui_there_is_no_page() -> None:
    pod = only(services.page(with_page(ui_image="registry.example/page:1"), gpu_plan()), "Deployment")["spec"][
        "template"
    ]
    assert [row["name"] for row in pod["spec"]["initContainers"]] == ["prepare"]
    assert services.page(cluster(), gpu_plan()) == []
    assert Kubernetes().placed(cluster()) == ("replica", "gateway", "controller")
    assert Kubernetes().placed(with_page()) == ("replica", "gateway", "controller", "ui")


def test_a_chat_page_knows_the_certificate_of_a_gateway_that_speaks_tls_and_not_its_key() -> None:
    entries = services.page(with_page(expose="LoadBalancer", tls_secret="cert"), gpu_plan())
    pod = only(entries, "Deployment")["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][-3:] == ["https://llm-gateway:8000", "--tls", "/etc/penstock/tls"]
    [tls] = [row["secret"] for row in pod["volumes"] if row["name"] == "tls"]
    assert tls["items"] == [{"key": "tls.crt", "path": "tls.crt"}]


def test_clients_outside_have_the_chat_page_below_a_path_of_the_gateways_host() -> None:
    ingress = traffic.exposed(with_page(expose="Ingress", host="a.example"))
    paths = only(ingress, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    assert [(row["path"], row["backend"]["service"]["name"]) for row in paths] == [
        ("/ui", "llm-ui"),
        ("/", "llm-gateway"),
    ]
    wanted = with_page({"root_path": "/chat"}, expose="HTTPRoute", route_parent="infra/web", inference_pool=True)
    rules = only(traffic.exposed(wanted), "HTTPRoute")["spec"]["rules"]
    assert [row["matches"][0]["path"]["value"] for row in rules] == ["/chat", "/"]
    assert rules[0]["backendRefs"] == [{"name": "llm-ui", "port": 7860}]
    assert rules[0]["timeouts"]["request"] == "3600s"
    on_gke = traffic.exposed(wanted, is_gke=True)
    assert "HealthCheckPolicy llm-ui" in kinds(on_gke) and "GCPBackendPolicy llm-ui" in kinds(on_gke)
    [policy] = [row for row in on_gke if row["metadata"]["name"] == "llm-ui" and row["kind"] == "NetworkPolicy"]
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 7860}]}]


@pytest.mark.parametrize(
    ("ui", "block", "path", "words"),
    [
        ({"login": "none"}, {}, "ui.login", "everyone who reaches the page"),
        ({"host": "0.0.0.0"}, {}, "ui.host", "listens in its pod"),
        ({"port": 0}, {}, "ui.port", "0 is not the port of a Service"),
        ({"root_path": "/"}, {"expose": "Ingress", "host": "a.example"}, "ui.root_path", "clients have the gateway"),
        (False, {"ui_image": "page:1"}, "kubernetes.ui_image", "there is no chat page"),
    ],
)
def test_what_a_chat_page_cannot_have_is_a_problem_with_its_field(
    ui: Any, block: dict[str, Any], path: str, words: str
) -> None:
    problems = [row for row in checks.file_problems(with_page(ui, **block)) if "ui" in row.path]
    assert [problem.path for problem in problems] == [path]
    assert words in problems[0].message


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


def test_a_placed_page_asks_for_keys_and_knows_its_gateway(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda path, argv, env: started.append(argv))
    run = run_folder(with_page({"title": "Llama"}, expose="Ingress", host="a.example"))
    words = ["--listen", "0.0.0.0:7860", "--gateway", "https://llm-gateway:8000", "--tls", "/tls"]
    run.gateway_config.unlink()
    placed_unit.main(["ui", str(run.path), *words])
    config = msgspec.json.decode(Path(started[0][-1]).read_bytes(), type=PageConfig)
    assert (config.gateway, config.host, config.port) == ("https://llm-gateway:8000", "0.0.0.0", 7860)
    assert config.certificate == "/tls/tls.crt"
    assert (config.has_login, config.title, config.root_path) == (True, "Llama", "/ui")


POLICIES = ["NetworkPolicy llm-gateway", "NetworkPolicy llm-nodes"]


@pytest.mark.parametrize(
    ("block", "names"),
    [
        ({}, []),
        ({"expose": "LoadBalancer"}, ["Service llm-public"]),
        ({"expose": "Ingress", "host": "llm.example.org"}, ["Ingress llm-public"]),
        ({"expose": "HTTPRoute", "route_parent": "infra/web"}, ["HTTPRoute llm-public"]),
        ({"inference_pool": True}, ["InferencePool llm-gateway"]),
    ],
)
def test_what_is_exposed_is_what_the_file_asks_for_and_policies_are_always_there(
    block: dict[str, Any], names: list[str]
) -> None:
    assert kinds(traffic.exposed(cluster(**block))) == [*names, *POLICIES]


def test_a_load_balancer_ends_no_tls_so_the_gateway_does() -> None:
    plain, safe = cluster(expose="LoadBalancer"), cluster(expose="LoadBalancer", tls_secret="cert")
    assert [traffic.has_tls_in_pod(wanted) for wanted in (plain, safe)] == [False, True]
    service = only(traffic.exposed(cluster({"port": 443}, expose="LoadBalancer", tls_secret="cert")), "Service")
    port = {"name": "http", "port": 443, "targetPort": "http", "protocol": "TCP", "appProtocol": "https"}
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"] == [port]
    ingress = cluster(expose="Ingress", host="a.example", tls_secret="cert")
    assert not traffic.has_tls_in_pod(ingress)


def test_an_ingress_has_its_certificate_by_secret_or_from_cert_manager() -> None:
    by_secret = only(traffic.exposed(cluster(expose="Ingress", host="a.example", tls_secret="cert")), "Ingress")
    assert by_secret["spec"]["tls"] == [{"hosts": ["a.example"], "secretName": "cert"}]
    issued = cluster(expose="Ingress", host="a.example", issuer="letsencrypt", ingress_class="nginx")
    by_manager = only(traffic.exposed(issued), "Ingress")
    assert by_manager["spec"]["tls"] == [{"hosts": ["a.example"], "secretName": "llm-tls"}]
    assert by_manager["spec"]["ingressClassName"] == "nginx"
    assert by_manager["metadata"]["annotations"]["cert-manager.io/cluster-issuer"] == "letsencrypt"
    plain = only(traffic.exposed(cluster(expose="Ingress", host="a.example")), "Ingress")
    assert "tls" not in plain["spec"]


def test_streams_are_not_buffered_and_bodies_are_as_large_as_the_gateway_takes() -> None:
    limits = {"limits": {"body_bytes": 40_000_000}}
    notes = only(traffic.exposed(cluster(limits, expose="Ingress", host="a.example")), "Ingress")["metadata"]
    assert notes["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert notes["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"] == "39m"
    assert notes["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "3600"


def test_a_route_names_its_timeout_except_on_gke_which_rejects_one() -> None:
    wanted = cluster(expose="HTTPRoute", route_parent="infra/web", host="a.example")
    route = only(traffic.exposed(wanted), "HTTPRoute")["spec"]
    assert route["parentRefs"] == [{"namespace": "infra", "name": "web"}]
    assert route["hostnames"] == ["a.example"]
    assert route["rules"][0]["backendRefs"] == [{"name": "llm-gateway", "port": 8000}]
    assert route["rules"][0]["timeouts"]["request"] == "3600s"
    on_gke = traffic.exposed(wanted, is_gke=True)
    assert "timeouts" not in only(on_gke, "HTTPRoute")["spec"]["rules"][0]
    policy = only(on_gke, "GCPBackendPolicy")["spec"]
    assert policy["default"] == {"timeoutSec": 3600}
    assert policy["targetRef"]["name"] == "llm-gateway"


def test_a_route_leads_to_the_inference_pool_where_there_is_one() -> None:
    wanted = cluster(expose="HTTPRoute", route_parent="infra/web", inference_pool=True)
    entries = traffic.exposed(wanted)
    [backend] = only(entries, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    pool = only(entries, "InferencePool")
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert pool["spec"]["endpointPickerRef"]["name"] == "llm-epp"


def test_engines_are_reached_by_gateways_ranks_and_prometheus_and_the_admin_port_by_our_pods() -> None:
    gateway, nodes = (entry["spec"] for entry in traffic.exposed(cluster()))
    assert gateway["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    clients, admin = gateway["ingress"]
    assert clients == {"ports": [{"protocol": "TCP", "port": 8000}]}
    [ours] = admin["from"]
    assert ours["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "llm"
    assert admin["ports"] == [{"protocol": "TCP", "port": 8001}]
    engines, ranks = nodes["ingress"]
    assert engines["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert engines["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert "ports" not in ranks
    assert ranks["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "replica"


@pytest.mark.parametrize(
    ("gateway", "block", "path", "words"),
    [
        ({"auth": "none"}, {}, "gateway.auth", "every pod"),
        ({"port": 0}, {}, "gateway.port", "0 is not the port of a Service"),
        ({"store": "/data/keys.db"}, {}, "gateway.store", "a file of this machine"),
        (POSTGRES, {}, "kubernetes.gateway_image", "the engine's image has no psycopg"),
        ({}, {"gateways": 2}, "kubernetes.gateways", "2 gateways cannot share"),
        ({}, {"gateways": 0}, "kubernetes.gateways", "0 is less than 1"),
        ({}, {"postgres_secret": "db"}, "kubernetes.postgres_secret", "gateway.store is no"),
        ({}, {"expose": "Ingress"}, "kubernetes.host", "is missing"),
        ({}, {"expose": "HTTPRoute"}, "kubernetes.route_parent", "is missing"),
        ({}, {"expose": "HTTPRoute", "route_parent": "web"}, "kubernetes.route_parent", '"web" is not NAMESPACE/NAME'),
        ({}, {"host": "a.example"}, "kubernetes.host", "is for expose: Ingress and HTTPRoute, and expose is none"),
        (
            {},
            {"expose": "HTTPRoute", "route_parent": "infra/web", "tls_secret": "cert"},
            "kubernetes.tls_secret",
            "is for expose: LoadBalancer and Ingress",
        ),
    ],
)
def test_what_cannot_work_is_a_problem_with_its_field(
    gateway: dict[str, Any], block: dict[str, Any], path: str, words: str
) -> None:
    problems = traffic.problems(cluster(gateway, **block))
    assert [problem.path for problem in problems] == [path]
    assert words in problems[0].message


@pytest.mark.parametrize(
    ("gateway", "block"),
    [
        ({}, {}),
        (POSTGRES, {"gateways": 3, "postgres_secret": "db", "gateway_image": "registry.example/penstock:1"}),
        ({}, {"expose": "LoadBalancer", "tls_secret": "cert"}),
        ({}, {"expose": "Ingress", "host": "a.example", "issuer": "letsencrypt", "ingress_class": "nginx"}),
        ({}, {"expose": "HTTPRoute", "route_parent": "infra/web", "host": "a.example", "inference_pool": True}),
    ],
)
def test_what_works_is_no_problem(gateway: dict[str, Any], block: dict[str, Any]) -> None:
    assert traffic.problems(cluster(gateway, **block)) == []


@pytest.mark.parametrize(
    ("flavour", "names"),
    [
        (
            "google",
            ["PodMonitoring llm-gateway", "PodMonitoring llm-replica", "Role llm-scrape", "RoleBinding llm-scrape"],
        ),
        ("operator", ["PodMonitor llm-gateway", "PodMonitor llm-replica"]),
        ("annotations", []),
        ("none", []),
    ],
)
def test_monitors_are_those_of_the_clusters_prometheus(flavour: monitoring.Kinds, names: list[str]) -> None:
    assert kinds(monitoring.monitors(cluster(), flavour)) == names
    assert bool(monitoring.scrape_annotations(flavour)) == (flavour == "annotations")


@pytest.mark.parametrize(("flavour", "kind"), [("google", "Rules"), ("operator", "PrometheusRule"), ("none", None)])
def test_rules_come_with_the_monitors_where_they_are_asked_for(flavour: monitoring.Kinds, kind: str | None) -> None:
    wanted = watched(labels={"release": "prometheus"})
    found = [row for row in monitoring.monitors(wanted, flavour) if row["metadata"]["name"] == "llm-rules"]
    assert [row["kind"] for row in found] == ([] if kind is None else [kind])
    for row in found:
        assert row["metadata"]["labels"]["release"] == "prometheus"
        assert "PenstockNoReplica" in str(row["spec"]["groups"])


@pytest.mark.parametrize("flavour", ["google", "operator"])
def test_pages_are_scraped_with_the_scrape_key_and_series_name_their_replica(flavour: monitoring.Kinds) -> None:
    wanted = cluster(labels={"release": "prometheus"})
    gateway, replica = monitoring.monitors(wanted, flavour)[:2]
    assert gateway["metadata"]["labels"]["release"] == "prometheus"
    text = str(replica["spec"])
    assert "llm-scrape" in text and "llm-secrets" not in text
    assert "'replica'" in text and "'deployment'" in text


def test_only_the_first_node_of_a_replica_has_a_page() -> None:
    for shape, label in (
        ("statefulset", "apps.kubernetes.io/pod-index"),
        ("lws", "leaderworkerset.sigs.k8s.io/worker-index"),
    ):
        wanted = cluster(hardware={"nodes": 2}, shape=shape)
        gateway, replica = monitoring.monitors(wanted, "operator")
        assert replica["spec"]["selector"]["matchLabels"][label] == "0"
        assert label not in gateway["spec"]["selector"]["matchLabels"]


SHAPES: dict[str, Deployment] = {
    "inside": cluster(),
    "load balancer": cluster({"port": 443}, expose="LoadBalancer", tls_secret="cert"),
    "ingress": cluster(expose="Ingress", host="a.example", issuer="letsencrypt", ingress_class="nginx"),
    "route": cluster(expose="HTTPRoute", route_parent="infra/web", host="a.example", inference_pool=True),
    "three gateways": cluster(POSTGRES, gateways=3, postgres_secret="db"),
    "two nodes": cluster(shape="lws", hardware={"nodes": 2}),
    "chat page with TLS": with_page(expose="LoadBalancer", tls_secret="cert"),
    "chat page": with_page(expose="Ingress", host="a.example", issuer="letsencrypt"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_objects_are_legal_in_the_oldest_and_the_newest_kubernetes(shape: str) -> None:
    schemas = pytest.importorskip("kubernetes_schemas")
    wanted, plan = SHAPES[shape], gpu_plan()
    rows = [
        services.anchor(wanted, {"spec.yaml": "x"}),
        *services.gateway(wanted, plan, "annotations"),
        *services.controller(wanted, plan),
        *services.page(wanted, plan),
        *traffic.exposed(wanted),
        *monitoring.monitors(wanted, "google"),
        *monitoring.monitors(wanted, "operator"),
    ]
    if shape == "inside":
        both = [*monitoring.monitors(watched(), "google"), *monitoring.monitors(watched(), "operator")]
        rows += [row for row in both if row["metadata"]["name"] == "llm-rules"]
    assert schemas.problems_of(rows) == []


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


def test_a_placed_gateway_has_its_certificate_and_store_where_the_pod_mounts_them(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda path, argv, env: started.append(argv))
    run = run_folder(deployment(name="llm", gateway={"auth": "keys"}))
    addresses = ["--listen", "0.0.0.0:8000", "--admin", "0.0.0.0:8001"]
    placed_unit.main(["gateway", str(run.path), *addresses, "--store", "/store/keys.db", "--tls", "/tls"])
    config = load_config(run.gateway_config)
    assert started[0][-2:] == ["penstock.gateway", str(run.gateway_config)]
    assert (config.tls_cert, config.tls_key, config.store) == ("/tls/tls.crt", "/tls/tls.key", "/store/keys.db")
    assert (config.listen, config.admin) == ("0.0.0.0:8000", "0.0.0.0:8001")


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
        labels = {"app.kubernetes.io/component": "gateway"}
        return {"metadata": {"name": name, "labels": labels, **more}, "spec": {"nodeName": "node-1"}, "status": {}}

    pods = [pod("lost", deletionTimestamp="2026-01-01T00:00:00Z"), pod("next")]
    target, run = Kubernetes(), run_folder(cluster())
    monkeypatch.setattr(target, "_api_of", lambda run: Cluster())
    monkeypatch.setattr(target._publisher, "exchange", lambda *_: None)
    monkeypatch.setattr("penstock.targets.kubernetes.folder.is_inside", lambda run: True)
    target.keep_up(run)
    assert deleted == [("lost", 0)]
