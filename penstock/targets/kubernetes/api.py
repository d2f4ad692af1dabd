"""The API of a Kubernetes cluster over HTTP: from outside through `kubectl proxy`, in a pod as its service account.

A call takes 10 ms, a process of kubectl half a second; lists once a second are cheap enough, so there is no watch.
https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from penstock import __version__
from penstock.errors import PenstockError
from penstock.processes import Backoff
from penstock.targets.kubernetes import access
from penstock.targets.kubernetes.objects import MANAGER, Object, selector
from penstock.targets.kubernetes.refusals import UNREACHABLE, ApiError, decoded, refusal, unreachable

__all__ = ["Api", "ApiError", "connect"]

_CALL_S = 10.0
_TRIES, _AGAIN_S = 3, 0.05  # a proxy that dies takes a moment
_PAGE = 500
_BEAT_S = 1.0  # how often a stream without lines asks whether to go on
_AWAY_S = 300.0  # so long a log waits for an API server that went away
_PIECE_BYTES = 65536
_TOKEN_S = 60.0
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_JSON, _MERGE = "application/json", "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"  # JSON is YAML
T = TypeVar("T")
_sleep = time.sleep  # tests replace it
_IDEMPOTENT = ("GET", "PUT", "PATCH", "DELETE")

# apiVersion -> kinds, as of Kubernetes 1.29 and the CRDs named; "!": not in a namespace.
# https://kubernetes.io/docs/reference/kubernetes-api/
_KINDS = {
    "v1": "Namespace! Node! PersistentVolume! Pod Service ConfigMap Secret PersistentVolumeClaim ServiceAccount Event "
    "ResourceQuota LimitRange Endpoints",
    "apps/v1": "StatefulSet Deployment ReplicaSet",
    "batch/v1": "Job",
    "policy/v1": "PodDisruptionBudget",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding",
    "networking.k8s.io/v1": "Ingress NetworkPolicy",
    "storage.k8s.io/v1": "StorageClass!",
    "scheduling.k8s.io/v1": "PriorityClass!",
    "authorization.k8s.io/v1": "SelfSubjectAccessReview! SelfSubjectRulesReview!",
    "coordination.k8s.io/v1": "Lease",
    "leaderworkerset.x-k8s.io/v1": "LeaderWorkerSet",
    "gateway.networking.k8s.io/v1": "HTTPRoute Gateway",
    "inference.networking.k8s.io/v1": "InferencePool",
    "networking.gke.io/v1": "GCPBackendPolicy HealthCheckPolicy",
    "monitoring.googleapis.com/v1": "PodMonitoring Rules",
    "monitoring.coreos.com/v1": "ServiceMonitor PodMonitor PrometheusRule",
    "autoscaling/v1": "HorizontalPodAutoscaler",
    "keda.sh/v1alpha1": "ScaledObject",
}


class Kind(NamedTuple):
    """Where objects of a kind are. `api_version`: "apps/v1"."""

    api_version: str
    plural: str
    is_namespaced: bool


def _plural(kind: str) -> str:
    """ "Ingress" -> "ingresses", "NetworkPolicy" -> "networkpolicies", "Endpoints" -> "endpoints"."""
    word = kind.lower()
    if word in ("endpoints", "rules"):
        return word
    return word[:-1] + "ies" if word.endswith("cy") else word + ("es" if word.endswith("ss") else "s")


KINDS = {
    word.rstrip("!"): Kind(api_version, _plural(word.rstrip("!")), not word.endswith("!"))
    for api_version, words in _KINDS.items()
    for word in words.split()
}


class Way(Protocol):
    """How requests reach the API server. `where` names the cluster in messages."""

    where: str

    def connection(self, timeout_s: float) -> http.client.HTTPConnection: ...
    def headers(self) -> Mapping[str, str]: ...
    def complaint(self) -> str | None: ...


class PodAccount:
    """As the service account of the pod that this process runs in.

    https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
    """

    where = "this pod's cluster"

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self._folder, self._host, self._port = folder, host, port
        self._token, self._read_at = "", -_TOKEN_S

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cafile=str(self._folder / "ca.crt"))
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=context)

    def headers(self) -> Mapping[str, str]:
        now = time.monotonic()
        if now - self._read_at >= _TOKEN_S:  # kubelet writes a new one before this one expires
            self._token, self._read_at = (self._folder / "token").read_text("ascii").strip(), now
        return {"authorization": f"Bearer {self._token}"}

    def complaint(self) -> str | None:
        return None


class Api:
    """The API of one cluster. Calls block, at most 10 s for each wait for bytes, and raise ApiError. Threads may share
    it: each keeps a connection.

    `kind` of a call is one of KINDS, or "GROUP/VERSION/Kind" for others. `namespace`: of calls that name none.
    `context`: None in a pod.
    """

    def __init__(self, way: Way, namespace: str, context: str | None = None) -> None:
        self.namespace, self.context = namespace, context
        self.where = way.where
        self._way = way
        self._kept = threading.local()
        self._known: dict[str, dict[str, Kind]] = {}

    # ---- objects -----------------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """Raises ApiError with status 404 when it is not there."""
        return self._object("GET", self._path(self.kind(kind), namespace, name))

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """As `get`; None when it is not there."""
        return _if_there(lambda: self.get(kind, name, namespace))

    def list(
        self,
        kind: str,
        labels: Mapping[str, str] | None = None,
        namespace: str | None = None,
        all_namespaces: bool = False,
        fields: str | None = None,
    ) -> list[Object]:
        """All objects with these labels and fields ("spec.nodeName=a"); none where the cluster has no such kind."""
        where = self.kind(kind)
        path = self._path(where._replace(is_namespaced=False) if all_namespaces else where, namespace)
        query: dict[str, object] = {"labelSelector": selector(labels or {}) or None, "fieldSelector": fields}
        try:
            pages = list(self._pages(path, query | {"limit": _PAGE}))
        except ApiError as exc:
            if exc.status == 404:
                return []
            if exc.status != 410:
                raise
            pages = list(self._pages(path, query))  # reading the pages took too long: all in one
        front = {"apiVersion": where.api_version, "kind": kind.rpartition("/")[2]}
        return [front | item for page in pages for item in page.get("items") or []]

    def apply(self, obj: Object, force: bool = False, dry_run: bool = False, manager: str = MANAGER) -> Object:
        """Server-side apply; the object as it then is.

        Raises ApiError 409 that names fields and their managers, unless `force` takes those fields over.
        https://kubernetes.io/docs/reference/using-api/server-side-apply/
        """
        query = {"fieldManager": manager, "force": force, "fieldValidation": "Strict", "dryRun": dry_run and "All"}
        return self._object("PATCH", self._path_of(obj, obj["metadata"]["name"]), obj, query, _APPLY)

    def create(self, obj: Object) -> Object:
        """Raises ApiError 409 "AlreadyExists"."""
        return self._object("POST", self._path_of(obj), obj, {"fieldManager": MANAGER})

    def patch(
        self, kind: str, name: str, merge: Object, namespace: str | None = None, subresource: str | None = None
    ) -> Object:
        """A JSON merge patch. With metadata.resourceVersion in it: 409 when the object has changed since.

        An `apply` that gives these fields other values conflicts with it, and needs `force`.
        """
        path = self._path(self.kind(kind), namespace, name, subresource)
        return self._object("PATCH", path, merge, {"fieldManager": MANAGER}, _MERGE)

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str | None = None,
        grace_s: float | None = None,
        propagation: str = "Background",
    ) -> bool:
        """Whether it was there. Pods go after `grace_s` (their own when None), at once and unasked with 0."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = round(grace_s)
        path = self._path(self.kind(kind), namespace, name)
        return _if_there(lambda: self.raw("DELETE", path, options)) is not None

    def delete_all(
        self, kind: str, labels: Mapping[str, str], namespace: str | None = None, grace_s: float | None = None
    ) -> None:
        """One by one: not every kind has the verb deletecollection, nor every account."""
        for item in self.list(kind, labels, namespace):
            self.delete(kind, item["metadata"]["name"], namespace, grace_s)

    # ---- the cluster -------------------------------------------------------------------------------------------------

    def version(self) -> tuple[int, int] | None:
        """Of the API server: (1, 34). None where it was built without one."""
        facts = self._object("GET", "/version")
        numbers = [re.sub(r"\D.*", "", str(facts.get(part))) for part in ("major", "minor")]  # GKE has "34+"
        return (int(numbers[0]), int(numbers[1])) if all(numbers) else None

    def knows(self, api_version: str, kind: str) -> bool:
        """Whether the cluster has such a kind. Asked once for each `api_version`."""
        return kind in self._kinds_of(api_version)

    def kind(self, name: str, api_version: str | None = None) -> Kind:
        """Raises ApiError 404 when neither we nor the cluster know it."""
        front, _, word = name.rpartition("/")
        wanted = api_version or front or None
        if word in KINDS and wanted in (None, KINDS[word].api_version):
            return KINDS[word]
        kinds = self._kinds_of(wanted) if wanted else {}
        if word not in kinds:
            raise ApiError(f"{self.where} has no kind {wanted or ''} {word}", 404, "NotFound")
        return kinds[word]

    def _kinds_of(self, api_version: str) -> dict[str, Kind]:
        if api_version not in self._known:
            found = _if_there(lambda: self._object("GET", _root(api_version)))
            rows = found["resources"] if found is not None else []
            self._known[api_version] = {
                row["kind"]: Kind(api_version, row["name"], row["namespaced"]) for row in rows if "/" not in row["name"]
            }
        return self._known[api_version]

    # ---- logs --------------------------------------------------------------------------------------------------------

    def logs(
        self,
        pod: str,
        container: str = "node",
        follow: bool = False,
        last: int | None = None,
        since: str | None = None,
        previous: bool = False,
        timestamps: bool = False,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """Lines of a container until it ends; with `timestamps` each after "2026-11-22T18:23:26.388079000Z ".

        `since`: only lines after such a time. `previous`: of the container before its last restart. With `follow` it
        waits for more until `is_over`, and goes on when the connection breaks. ApiError 400: not yet started.
        """
        path = self._path(KINDS["Pod"], None, pod, "log")
        query = {"container": container, "follow": follow, "tailLines": last, "sinceTime": since, "previous": previous}
        stamp, broken_since = since or "", 0.0
        backoff = Backoff(0.5, 5.0, 30.0)
        while True:
            resumes_after = stamp
            try:
                for line in self._lines(path, query | {"timestamps": True}, is_over if follow else None):
                    time_of, _, words = line.partition(" ")
                    if resumes_after and time_of <= resumes_after:
                        continue  # sinceTime counts whole seconds
                    stamp, broken_since = time_of, 0.0
                    yield line if timestamps else words
                return
            except ApiError as exc:
                now = time.monotonic()
                broken_since = broken_since or now
                if not follow or not exc.is_retryable or now - broken_since > _AWAY_S or is_over():
                    raise
                _sleep(backoff.next(now))
            if stamp:
                query |= {"sinceTime": stamp, "tailLines": None}

    def _lines(self, path: str, query: Mapping[str, object], is_over: Callable[[], bool] | None) -> Iterator[str]:
        connection = self._way.connection(_CALL_S)
        with contextlib.closing(connection), self._explained(_CALL_S):
            connection.request("GET", _target(path, query), headers=self._headers(None))
            sock = connection.sock
            # For a container that has printed nothing no headers come either.
            if not _await_bytes(sock, None, is_over):
                return
            with connection.getresponse() as response:
                if response.status >= 400:
                    raise self._refusal(response.status, response.read(), path)
                yield from _split(response, sock, is_over)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def raw(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, object] | None = None,
        content_type: str = _JSON,
        timeout_s: float = _CALL_S,
    ) -> Any:
        """One request: its JSON, or its text where that is none. False and None in `query` are left out."""
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers(content_type if data is not None else None)
        status, answer = self._exchange(method, _target(path, query or {}), data, headers, timeout_s)
        if status >= 400:
            raise self._refusal(status, answer, path)
        return decoded(answer)

    def _object(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, object] | None = None,
        content_type: str = _JSON,
    ) -> Object:
        answer = self.raw(method, path, body, query, content_type)
        if not isinstance(answer, dict):
            raise PenstockError(f"{self.where} is no API of Kubernetes", detail=str(answer)[:300])
        return answer

    def _pages(self, path: str, query: Mapping[str, object]) -> Iterator[Object]:
        token: str | None = None
        while True:
            page = self._object("GET", path, query=dict(query) | {"continue": token})
            yield page
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return

    def _exchange(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        with self._explained(timeout_s):
            for n_left in range(_TRIES - 1, -1, -1):
                connection = self._connection(timeout_s)
                try:
                    connection.request(method, target, data, headers)
                    with connection.getresponse() as response:
                        answer = response.read()
                        if not response.will_close:
                            self._kept.connection = connection
                        return response.status, answer
                except (OSError, http.client.HTTPException) as exc:
                    # The proxy ended, or the server closed an idle connection; a POST may have been done.
                    was_not_sent = isinstance(exc, ConnectionRefusedError | FileNotFoundError)
                    was_closed = isinstance(exc, ConnectionError | http.client.HTTPException)
                    if not n_left or not (was_not_sent or (was_closed and method in _IDEMPOTENT)):
                        raise
                finally:
                    if getattr(self._kept, "connection", None) is not connection:
                        connection.close()
                _sleep(_AGAIN_S)
        raise AssertionError("unreachable")

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """This thread's connection when it is still open, or a new one."""
        kept: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        self._kept.connection = None
        if kept is not None and kept.sock is not None:
            if not _is_readable(kept.sock, 0.0):  # an idle connection has nothing to read but its end
                kept.sock.settimeout(timeout_s)
                return kept
            kept.close()
        return self._way.connection(timeout_s)

    def _headers(self, content_type: str | None) -> dict[str, str]:
        headers = {"accept": _JSON, "user-agent": f"penstock/{__version__}", **self._way.headers()}
        return headers | ({"content-type": content_type} if content_type else {})

    @contextlib.contextmanager
    def _explained(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except access.ProxyError as exc:
            raise ApiError(exc.message, 503, UNREACHABLE, detail=exc.detail) from exc
        except TimeoutError as exc:
            raise unreachable(self.where, f"no answer within {timeout_s:g} s", self._way.complaint()) from exc
        except ssl.SSLError as exc:
            raise unreachable(self.where, str(getattr(exc, "verify_message", None) or exc)) from exc
        except (http.client.HTTPException, ConnectionResetError, BrokenPipeError) as exc:
            raise unreachable(self.where, "it closed the connection", self._way.complaint()) from exc
        except OSError as exc:
            raise unreachable(self.where, (exc.strerror or str(exc)).lower(), self._way.complaint()) from exc

    def _refusal(self, status: int, answer: bytes, path: str) -> ApiError:
        return refusal(status, decoded(answer), self.where, path, self._way.complaint())

    def _path_of(self, obj: Object, name: str | None = None) -> str:
        namespace = (obj.get("metadata") or {}).get("namespace")  # reviews have no metadata
        return self._path(self.kind(obj["kind"], obj["apiVersion"]), namespace, name)

    def _path(self, kind: Kind, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        place = f"/namespaces/{namespace or self.namespace}" if kind.is_namespaced else ""
        end = "".join(f"/{quote(part, safe='')}" for part in (name, subresource) if part)
        return f"{_root(kind.api_version)}{place}/{kind.plural}{end}"


def connect(context: str | None = None, namespace: str | None = None) -> Api:
    """The API of the cluster whose pod this is, or else of a context of the kubeconfig (the current one when None).

    Asks nothing of the cluster.  Raises UserError: kubectl is absent, no such context.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if context is None and host and (_ACCOUNT / "token").is_file():
        own = (_ACCOUNT / "namespace").read_text("ascii").strip()
        port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
        return Api(PodAccount(_ACCOUNT, host, port), namespace or own)
    chosen = access.context_of(context)
    return Api(access.proxy_of(chosen.name), namespace or chosen.namespace, chosen.name)


def _if_there(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except ApiError as exc:
        if exc.status == 404:
            return None
        raise


def _root(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _target(path: str, query: Mapping[str, object]) -> str:
    values = {name: "true" if value is True else value for name, value in query.items() if value not in (None, False)}
    return path + (f"?{urlencode(values)}" if values else "")


def _is_readable(sock: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _await_bytes(
    sock: socket.socket, response: http.client.HTTPResponse | None, is_over: Callable[[], bool] | None
) -> bool:
    """Wait until a read has something; False when `is_over`. With None the read waits itself, for the call's time."""
    while is_over is not None:
        if is_over():
            return False
        if response is not None and _has_buffered(sock, response):
            return True
        if _is_readable(sock, _BEAT_S):
            return True
    return True


def _has_buffered(sock: socket.socket, response: http.client.HTTPResponse) -> bool:
    timeout_s = sock.gettimeout()
    sock.settimeout(0.0)
    try:
        return bool(response.fp.peek(1))
    except ssl.SSLWantReadError:
        return False
    finally:
        sock.settimeout(timeout_s)


def _split(
    response: http.client.HTTPResponse, sock: socket.socket, is_over: Callable[[], bool] | None
) -> Iterator[str]:
    """The lines of a body as they come."""
    begun = b""
    while _await_bytes(sock, response, is_over):
        piece = response.read1(_PIECE_BYTES)
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")
        if not piece:
            if begun:
                yield begun.decode("utf-8", "replace")
            return
