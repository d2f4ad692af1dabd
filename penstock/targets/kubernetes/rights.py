"""What `up`, `down` and the other verbs need to be allowed in a namespace: one list, for the check and for docs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes.api import Api
from penstock.targets.kubernetes.objects import Object, block_of
from penstock.targets.kubernetes.traffic import has_postgres


class Right(msgspec.Struct, frozen=True):
    """`resource` with its subresource: "pods/log". `group`: "" is the core API."""

    verb: str
    group: str
    resource: str

    def __str__(self) -> str:
        """As kubectl names it: "create deployments.apps"."""
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


_ALL = "get list create patch delete"  # server-side apply is patch, and create for what is new
_ALWAYS = (
    (_ALL, "", "configmaps secrets services serviceaccounts"),
    ("get list delete", "", "pods"),
    ("list", "", "events"),
    ("get", "", "pods/log"),
    ("get create", "", "pods/portforward pods/exec"),  # chat, bench, tunnel; keys, usage; get: by WebSocket
    (_ALL, "apps", "deployments statefulsets"),
    (_ALL, "batch", "jobs"),
    (_ALL, "policy", "poddisruptionbudgets"),
    (_ALL, "networking.k8s.io", "networkpolicies"),
    (_ALL, "rbac.authorization.k8s.io", "roles rolebindings"),
)


def needed(deployment: Deployment) -> list[Right]:
    """All rights that verbs need for this deployment."""
    return [
        Right(verb, group, resource)
        for verbs, group, resources in _rows(deployment)
        for resource in resources.split()
        for verb in verbs.split()
    ]


def policy_rules(deployment: Deployment) -> list[Object]:
    """The same as rules of an RBAC Role."""
    return [
        {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}
        for verbs, group, resources in _rows(deployment)
    ]


def _rows(deployment: Deployment) -> Iterator[tuple[str, str, str]]:
    block, has_rules = block_of(deployment), deployment.observe.prometheus
    yield from _ALWAYS
    if deployment.cache.weights is None or not has_postgres(deployment):
        yield _ALL, "", "persistentvolumeclaims"
    if block.shape == "lws":
        yield _ALL, "leaderworkerset.x-k8s.io", "leaderworkersets"
    if block.expose == "Ingress":
        yield _ALL, "networking.k8s.io", "ingresses"
    if block.expose == "HTTPRoute":
        yield _ALL, "gateway.networking.k8s.io", "httproutes"
    if block.inference_pool:
        yield _ALL, "inference.networking.k8s.io", "inferencepools"
    if deployment.replicas.actuator == "hpa":
        yield _ALL, "autoscaling", "horizontalpodautoscalers"
    if deployment.replicas.actuator == "keda":
        yield _ALL, "keda.sh", "scaledobjects"
    if block.monitoring == "google":
        yield _ALL, "monitoring.googleapis.com", f"podmonitorings{' rules' if has_rules else ''}"
        yield "watch", "", "secrets"  # a Role may only give what its maker has
    if block.monitoring == "operator":
        yield _ALL, "monitoring.coreos.com", f"podmonitors servicemonitors{' prometheusrules' if has_rules else ''}"


def missing(api: Api, rights: Iterable[Right]) -> list[Right]:
    """Those of `rights` that we do not have in the API's namespace.

    The rules answer for all at once, but not for authorizers such as IAM of a cloud: those are asked one by one.
    https://kubernetes.io/docs/reference/kubernetes-api/authorization-resources/self-subject-rules-review-v1/
    """
    review = _review(api, "SelfSubjectRulesReview", {"namespace": api.namespace})
    rules = review.get("resourceRules") or []
    return [right for right in rights if not _is_in(rules, right) and not _is_allowed(api, right)]


def _is_in(rules: Sequence[Object], right: Right) -> bool:
    base, _, sub = right.resource.partition("/")
    names = {right.resource, "*", f"*/{sub}"} if sub else {base, "*"}
    return any(
        not rule.get("resourceNames")
        and {right.verb, "*"} & set(rule.get("verbs") or ())
        and {right.group, "*"} & set(rule.get("apiGroups") or ())
        and names & set(rule.get("resources") or ())
        for rule in rules
    )


def _is_allowed(api: Api, right: Right) -> bool:
    base, _, sub = right.resource.partition("/")
    words = {"namespace": api.namespace, "verb": right.verb, "group": right.group, "resource": base, "subresource": sub}
    answer = _review(
        api, "SelfSubjectAccessReview", {"resourceAttributes": {key: word for key, word in words.items() if word}}
    )
    return answer.get("allowed") is True


def _review(api: Api, kind: str, spec: Object) -> Object:
    answer = api.create({"apiVersion": "authorization.k8s.io/v1", "kind": kind, "metadata": {}, "spec": spec})
    status: Object = answer.get("status") or {}
    return status
