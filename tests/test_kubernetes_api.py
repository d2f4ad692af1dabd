"""The client of the Kubernetes API: requests as they are sent, and every failure in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_goldens import kept, sections
from kubernetes_stub import Answer, Hangup, Stub, status

from penstock.run_folder import Run, Unit
from penstock.targets.kubernetes import api as api_module
from penstock.targets.kubernetes import pod_logs
from penstock.targets.kubernetes.api import Api, ApiError

pytestmark = pytest.mark.loopback

PODS = "/api/v1/namespaces/team/pods"
MAPS = "/api/v1/namespaces/team/configmaps"
MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    stub = Stub(tmp_path)
    yield stub
    stub.end()


@pytest.fixture
def api(stub: Stub) -> Api:
    return stub.api()


def test_find_and_delete_know_what_is_not_there(stub: Stub, api: Api) -> None:
    stub.on("GET", f"{PODS}/here", {"metadata": {"name": "here"}})
    stub.on("DELETE", f"{PODS}/here", {})
    stub.on("GET", f"{PODS}/gone", status(404, "NotFound", 'pods "gone" not found', name="gone", kind="pods"))
    assert api.find("Pod", "here") == {"metadata": {"name": "here"}}
    assert api.find("Pod", "gone") is None
    assert api.delete("Pod", "here", grace_s=0) and not api.delete("Pod", "gone")
    body = next(request.body for request in stub.requests if request.method == "DELETE")
    assert body["gracePeriodSeconds"] == 0 and body["propagationPolicy"] == "Background"


def test_list_follows_pages_and_gives_items_their_kind(stub: Stub, api: Api) -> None:
    page = {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]}
    stub.on("GET", PODS, page, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]})
    pods = api.list("Pod", {"a": "b", "c": "d"}, fields="spec.nodeName=n")
    assert [pod["metadata"]["name"] for pod in pods] == ["a", "b"]
    assert pods[0]["kind"] == "Pod" and pods[0]["apiVersion"] == "v1"
    first, second = stub.requests
    assert first.query == {"labelSelector": "a=b,c=d", "fieldSelector": "spec.nodeName=n", "limit": "500"}
    assert second.query["continue"] == "more"


def test_list_starts_again_when_its_pages_expired(stub: Stub, api: Api) -> None:
    page = {"metadata": {"continue": "more"}, "items": [{}]}
    expired = status(410, "Expired", "The provided continue parameter is too old")
    stub.on("GET", PODS, page, expired, {"items": [{}, {}]})
    assert len(api.list("Pod")) == 2
    assert "limit" not in stub.requests[-1].query


def test_list_of_a_kind_that_the_cluster_lacks_is_empty(stub: Stub, api: Api) -> None:
    assert api.list("ServiceMonitor") == []
    stub.on("GET", "/api/v1/pods", {"items": []})
    assert api.list("Pod", all_namespaces=True) == []


def test_apply_sends_a_server_side_apply(stub: Stub, api: Api) -> None:
    stub.on("PATCH", f"{MAPS}/a", {"kind": "ConfigMap"})
    api.apply(MAP)
    api.apply(MAP, force=True, dry_run=True)
    api.patch("ConfigMap", "a", {"data": None})
    first, second, third = stub.requests
    assert (third.headers["content-type"], third.body) == ("application/merge-patch+json", {"data": None})
    assert first.headers["content-type"] == "application/apply-patch+yaml" and first.body == MAP
    assert first.query == {"fieldManager": "penstock", "fieldValidation": "Strict"}
    assert second.query["force"] == "true" and second.query["dryRun"] == "All"


def test_an_object_keeps_its_own_api_version(stub: Stub, api: Api) -> None:
    row = {"kind": "PodDisruptionBudget", "name": "poddisruptionbudgets", "namespaced": True}
    stub.on("GET", "/apis/policy/v1beta1", {"resources": [row, row | {"name": "poddisruptionbudgets/status"}]})
    stub.on("PATCH", "/apis/policy/v1beta1/namespaces/other/poddisruptionbudgets/a", {})
    obj = {"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget"}
    api.apply(obj | {"metadata": {"name": "a", "namespace": "other"}})
    assert api.knows("policy/v1beta1", "PodDisruptionBudget") and not api.knows("policy/v1", "PodDisruptionBudget")
    assert not api.knows("policy/v1", "PodDisruptionBudget")
    assert [request.path for request in stub.requests].count("/apis/policy/v1") == 1  # a second look is free


def test_version_reads_what_clouds_append(stub: Stub, api: Api) -> None:
    stub.on("GET", "/version", {"major": "1", "minor": "34+"}, {"major": "", "minor": "", "gitVersion": "v0.0.0"})
    assert api.version() == (1, 34)
    assert api.version() is None


def test_a_review_has_no_name(stub: Stub, api: Api) -> None:
    stub.on("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {"status": {"allowed": True}})
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {}}
    assert api.create(review)["status"]["allowed"]


# ---- connections -----------------------------------------------------------------------------------------------------


def test_a_thread_keeps_its_connection(stub: Stub, api: Api) -> None:
    stub.on("GET", f"{PODS}/a", {})
    api.get("Pod", "a")
    api.get("Pod", "a")
    other = threading.Thread(target=api.get, args=("Pod", "a"), daemon=True)
    other.start()
    other.join()
    first, second, third = (request.peer for request in stub.requests)
    assert first is second and second is not third


def test_a_kept_connection_that_was_closed_is_opened_again(stub: Stub, api: Api) -> None:
    stub.on("GET", f"{PODS}/a", {})
    stub.on("POST", MAPS, {})
    api.get("Pod", "a")
    stub.close_connections()
    api.create(MAP)
    stub.close_connections()
    api.get("Pod", "a")
    assert len({request.peer for request in stub.requests}) == 3


def test_a_request_is_sent_twice_only_when_that_is_safe(stub: Stub, api: Api) -> None:
    stub.on("GET", f"{PODS}/a", {}, Hangup(), {})
    stub.on("POST", MAPS, Hangup())
    api.get("Pod", "a")
    api.get("Pod", "a")
    with pytest.raises(ApiError, match="closed the connection"):
        api.create(MAP)
    assert [request.method for request in stub.requests].count("POST") == 1


def test_a_server_that_does_not_answer_is_given_up(stub: Stub, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def late(_: object) -> Answer:
        answers.wait(5.0)
        return Answer(200, {})

    stub.on("GET", "/version", late)
    with pytest.raises(ApiError, match=r"could not reach .* no answer within 0.05 s") as caught:
        api.raw("GET", "/version", timeout_s=0.05)
    answers.set()
    assert caught.value.is_retryable and caught.value.reason == "Unreachable"


def test_a_server_that_is_away_is_unreachable(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    stub.end()
    with pytest.raises(
        ApiError, match='could not reach the API server of context "test": connection refused'
    ) as caught:
        stub.api().get("Pod", "x")
    assert caught.value.is_retryable and caught.value.status == 503


# ---- refusals --------------------------------------------------------------------------------------------------------


LOGIN = "getting credentials: exec: executable"
QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8'
WEBHOOK = 'Internal error occurred: failed calling webhook "x": connection refused'
CONFLICTS = [
    {"reason": "FieldManagerConflict", "message": f'conflict with "{who}" using apps/v1', "field": field}
    for who, field in (("helm", ".spec.replicas"), ("kubectl-edit", ".spec.template"))
]
INVALID = [{"reason": "FieldValueInvalid", "message": 'Invalid value: "2x"', "field": "spec.memory"}]
NO_RIGHT = (
    'statefulsets.apps "x" is forbidden: User "jane" cannot get resource "statefulsets" in API group "apps" in the '
    'namespace "team"'
)
OF_SET = {"name": "a", "kind": "statefulsets"}
# golden/kubernetes/refusals.txt has what is said of each.
REFUSALS = {
    "an error of kubectl": Answer(500, "dial tcp 10.0.0.1:443: connect: no route to host\n"),
    "no login program": Answer(500, f"{LOGIN} kubelogin not found\n\nIt looks like you are trying to use"),
    "expired credentials": status(401, "Unauthorized", "Unauthorized"),
    "expired credentials of a program": Answer(500, f"{LOGIN} gke-gcloud-auth-plugin failed with exit code 1\n"),
    "no right": status(403, "Forbidden", NO_RIGHT),
    "a quota is no missing right": status(403, "Forbidden", QUOTA),
    "no namespace": status(404, "NotFound", 'namespaces "team" not found', name="team", kind="namespaces"),
    "a conflict": status(409, "Conflict", "Apply failed with 2 conflicts", causes=CONFLICTS, **OF_SET),
    "an invalid object": status(422, "Invalid", "Pod a is invalid", name="a", kind="Pod", causes=INVALID),
    "a webhook": status(500, "InternalError", WEBHOOK, causes=[{"message": WEBHOOK}]),
    "too many requests": status(429, "TooManyRequests", "the server has received too many requests"),
}


def test_refusals_are_told_in_words(stub: Stub, api: Api) -> None:
    def told(name: str, answer: Answer) -> list[str]:
        api._way.said = "Please run: gcloud auth login" if "credentials" in name else None  # type: ignore[attr-defined]
        stub.on("PATCH", f"{MAPS}/a", answer)
        with pytest.raises(ApiError) as caught:
            api.apply(MAP)
        error = caught.value
        detail = " / ".join((error.detail or "").splitlines())
        facts = {"detail": detail, "hint": error.hint, "may be tried again": error.is_retryable or None}
        return [f"{error.status} {error.message}", *(f"{name}: {fact}" for name, fact in facts.items() if fact)]

    text = sections({name: told(name, answer) for name, answer in REFUSALS.items()})
    assert text == kept("refusals.txt", text)


# ---- logs ------------------------------------------------------------------------------------------------------------


def stamped(n: int) -> bytes:
    return b"2026-11-22T18:23:26.%09dZ line %d\n" % (n, n)


def test_logs_are_lines_whatever_the_pieces(stub: Stub, api: Api) -> None:
    data = stamped(1) + stamped(2) + stamped(3)
    stub.on("GET", f"{PODS}/a/log", Answer(200, iter([data[:7], data[7:50], data[50:]])))
    assert list(api.logs("a", last=3, previous=True)) == ["line 1", "line 2", "line 3"]
    query = stub.requests[0].query
    assert query == {"container": "node", "tailLines": "3", "previous": "true", "timestamps": "true"}


def test_followed_logs_go_on_after_a_broken_connection(stub: Stub, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_sleep", lambda _: None)
    first, second = iter([stamped(1), stamped(2)]), iter([stamped(1), stamped(2), stamped(3)])
    stub.on("GET", f"{PODS}/a/log", Answer(200, first, cut=True), Answer(500, "dial tcp: refused"), Answer(200, second))
    assert list(api.logs("a", follow=True, last=5)) == ["line 1", "line 2", "line 3"]
    assert stub.requests[-1].query["sinceTime"] == "2026-11-22T18:23:26.000000002Z"
    assert "tailLines" not in stub.requests[-1].query


def test_a_silent_log_can_be_left(stub: Stub, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_BEAT_S", 0.01)
    is_over = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield stamped(1) + stamped(2)
        is_over.wait(5.0)

    stub.on("GET", f"{PODS}/a/log", Answer(200, pieces()))
    lines = api.logs("a", follow=True, is_over=is_over.is_set)
    assert [next(lines), next(lines)] == ["line 1", "line 2"]
    threading.Timer(0.03, is_over.set).start()
    assert list(lines) == []


def test_a_container_that_has_not_started_has_no_log(stub: Stub, api: Api) -> None:
    text = 'container "node" in pod "a" is waiting to start: ContainerCreating'
    stub.on("GET", f"{PODS}/a/log", status(400, "BadRequest", text))
    with pytest.raises(ApiError, match="waiting to start") as caught:
        list(api.logs("a", follow=True))
    assert caught.value.status == 400


def test_a_followed_container_that_ended_is_not_printed_again(
    stub: Stub, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API gives the log of the old container until the next one starts."""
    monkeypatch.setattr(pod_logs, "_AGAIN_S", 0.0)
    stub.on("GET", PODS, {"items": [{"metadata": {"name": "a"}}]})
    logs = [[stamped(1), stamped(2)], [stamped(2)], [stamped(2), stamped(3)], [stamped(3)]]
    stub.on("GET", f"{PODS}/a/log", *(Answer(200, iter(lines)) for lines in logs))
    lines = pod_logs.lines(api, Run(tmp_path / "x"), Unit("replica", "0"), follow=True, last=None)
    assert [next(lines) for _ in range(3)] == ["line 1", "line 2", "line 3"]
    assert [request.query.get("sinceTime", "")[-3:] for request in stub.requests[1:]] == ["", "02Z", "02Z"]


def test_followed_logs_go_on_with_the_pod_that_takes_the_place(
    stub: Stub, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "_AGAIN_S", 0.0)
    gone = status(404, "NotFound", 'pods "a" not found', name="a", kind="pods")
    rows = [{"items": [{"metadata": {"name": name}}]} for name in ("a", "b")]
    run = Run(tmp_path / "x")
    stub.on("GET", PODS, *rows)
    stub.on("GET", f"{PODS}/a/log", Answer(200, iter([stamped(8)])), gone)
    stub.on("GET", f"{PODS}/b/log", Answer(200, iter([stamped(1)])))
    stub.on("GET", f"{PODS.rpartition('/')[0]}/configmaps/x-run", {"metadata": {"name": "x-run"}})
    lines = pod_logs.lines(api, run, Unit("gateway", "0"), follow=True, last=None)
    assert [next(lines), next(lines)] == ["line 8", "line 1"]
    stub.on("GET", PODS, rows[0])
    stub.on("GET", f"{PODS}/a/log", Answer(200, iter([stamped(8)])), gone, Answer(200, iter([stamped(1)])))
    lines = pod_logs.lines(api, run, Unit("replica", "0"), follow=True, last=None)
    assert [next(lines), next(lines)] == ["line 8", "line 1"]
