"""What breaks in a cluster comes back by itself, `status` says why, and requests elsewhere go on.

Each test prints its rows of the kill table: the fault, seconds until all is ready again, requests that failed (-s).
"""

# ruff: noqa: F811 - fixtures of test_kubernetes_target
from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes_cluster import Namespace, Pod
from launching import PROMPT, Place, call, now, wait_ready
from store_rig import postgres_server
from test_kubernetes_target import file_for, place, up  # noqa: F401 - fixtures
from waiting import until

from penstock import targets
from penstock.errors import PenstockError
from penstock.run_folder import Run
from penstock.testing.fake_engine.requests import expected_text
from penstock.wire.client import Client

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]
N_TOKENS = 8


class Requests:
    """Short requests through the gateway, one after the other in two threads, until `end`."""

    def __init__(self, run: Run, key: str, timeout_s: float = 60.0) -> None:
        self.failures: list[str] = []
        self.ended_at: list[float] = []
        self._over = threading.Event()
        clients = [Client(run.url, key, timeout_s) for _ in range(2)]
        self._threads = [threading.Thread(target=self._ask, args=(client,), daemon=True) for client in clients]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: Client) -> None:
        while not self._over.wait(0.1):
            try:
                text = client.chat([{"role": "user", "content": PROMPT}], max_tokens=N_TOKENS).text
                assert text == expected_text(PROMPT, N_TOKENS), text
                self.ended_at.append(time.monotonic())
            except (PenstockError, AssertionError) as error:
                self.failures.append(str(error))

    def end(self) -> list[str]:
        """What failed."""
        self._over.set()
        for thread in self._threads:
            thread.join(70.0)
        return self.failures


class Deployment:
    """One deployment of a test, and what its faults do to it."""

    def __init__(self, place: Place, space: Namespace, file: Path) -> None:
        self.run, self.key = up(place, file)
        self.space, self.file = space, file

    def pod(self, part: str) -> Pod:
        """The youngest pod of "gateway", "controller", "r0"."""
        pods = [pod for pod in self.space.pods() if pod.name.startswith(f"one-{part}-")]
        assert pods, f"no pod of {part}"
        return max(pods, key=lambda pod: str(pod.object and pod.object["metadata"]["creationTimestamp"]))

    def replica_pods(self) -> dict[str, str]:
        """Name -> uid."""
        rows = self.space.objects("pods", labels="app.kubernetes.io/component=replica")
        return {row["metadata"]["name"]: row["metadata"]["uid"] for row in rows}

    def far_from_others(self, *pods: Pod) -> Pod:
        """The pod without the gateway on its node, and without the controller where that can be."""
        gateway, controller = self.pod("gateway").node, self.pod("controller").node
        return max(pods, key=lambda pod: (pod.node != gateway, pod.node != controller))

    def restarts(self) -> str:
        return "\n".join(row.reason for replica in now(self.run).replicas for row in replica.restarts)

    def wait_for_another_restart(self) -> None:
        """What is told of a replica within 3 s of a restart counts with it."""
        newest = max(row.at for replica in now(self.run).replicas for row in replica.restarts)
        until(lambda: time.time() > newest + 3.0, "another restart counts")

    @contextmanager
    def fault(self, what: str, is_repaired: Callable[[], object], loses: bool = False) -> Iterator[None]:
        """The block does it; then until it is repaired, while requests go on, none of which may fail unless it `loses`
        what serves them."""
        requests, started = Requests(self.run, self.key), time.monotonic()
        try:
            yield
            self.space.wait(is_repaired, f"repaired after: {what}")
            seconds, n_answers = time.monotonic() - started, len(requests.ended_at)
            until(lambda: len(requests.ended_at) > n_answers, "another request is answered")
        finally:
            failures = requests.end()
        print(f"| {what} | {seconds:.1f} | {len(failures)} of {len(failures) + len(requests.ended_at)} |")
        assert loses or failures == []


def is_ready(run: Run, n_replicas: int) -> bool:
    state = now(run)
    return state.phase == "ready" and [row.state for row in state.replicas] == ["ready"] * n_replicas


@pytest.fixture
def start(place: Place, kubernetes: Namespace) -> Callable[..., Deployment]:
    return lambda **fields: Deployment(place, kubernetes, file_for(place, **fields))


@pytest.mark.nightly
def test_a_controller_that_dies_places_nothing_twice_also_while_it_rolls(start: Callable[..., Deployment]) -> None:
    one = start(replicas=2)
    pods, first = one.replica_pods(), one.pod("controller")
    with one.fault("controller killed", lambda: now(one.run).controller.n_restarts == 1 and is_ready(one.run, 2)):
        first.kill_process()
    with one.fault("controller's pod deleted", lambda: one.pod("controller").name != first.name):
        one.space.kubectl("delete", "pod", first.name, "--wait=false")
    one.space.wait(lambda: one.pod("controller").is_ready, "the next controller")
    assert one.replica_pods() == pods
    one.file.write_text(one.file.read_text().replace("drain_s: 10", "drain_s: 9"))
    with one.fault("controller killed while it rolls", lambda: not pods.keys() & one.replica_pods().keys()):
        done = call("up", one.file, "--replace", "--no-wait", "--json")
        assert (done.code, done.events[0]["key"]) == (0, None), "its clients keep their key"
        one.space.wait(lambda: len(one.replica_pods()) > 2, "a successor")
        one.pod("controller").kill_process()
    wait_ready(one.run, 2)
    assert len(one.replica_pods()) == 2
    assert "it is of an earlier revision: the next is placed" in call("logs", "one", "--part", "events").out


def test_a_replica_that_ends_comes_back_and_status_says_why(start: Callable[..., Deployment]) -> None:
    one = start(replicas=2)
    pod = one.pod("r0")

    def says(words: str) -> Callable[[], bool]:
        return lambda: words in one.restarts() and is_ready(one.run, 2)

    with one.fault("node killed", says("container node was killed (code 137)")):
        pod.kill_process("node")
    one.wait_for_another_restart()
    with one.fault("out of memory", says("container node was ended by the kernel: out of memory (limit 1Gi)")):
        pod.oom("node")
    one.wait_for_another_restart()
    with one.fault("pod evicted", says("The node was low on resource: ephemeral-storage.")):
        pod.evict()
    status = call("status", "one").out
    assert "out of memory" in status and "low on resource" in status, status


@pytest.mark.nightly
def test_a_replica_of_a_lost_node_has_a_successor_and_nothing_runs_twice(start: Callable[..., Deployment]) -> None:
    one = start(replicas=2)
    lost = one.far_from_others(one.pod("r0"), one.pod("r1"))
    node = one.space.cluster.node(lost.node)
    name = lost.name.split("-")[1][1:]

    def has_successor() -> bool:
        ready = [row.replica for row in now(one.run).replicas if row.state == "ready"]
        return now(one.run).phase == "ready" and len([row for row in ready if row != name]) == 2

    with one.fault("node lost", has_successor):
        node.lose()
    one.space.wait(lambda: not node.is_ready, "the cluster knows")
    events = call("logs", "one", "--part", "events").out
    assert f"replica leaving [replica {name}]: its machines may be lost, it does not report" in events, events
    one.space.wait(lambda: lost.object is None, "the pod on it is deleted by force")
    pods = one.replica_pods()
    node.come_back()
    one.space.wait(lambda: node.is_ready, "the node is back")
    time.sleep(2.0)
    assert one.replica_pods() == pods and len(pods) == 2
    assert not [run for run in one.space.cluster.kubelet.pods.values() if run.name == lost.name]


@pytest.mark.nightly
def test_a_gateway_that_ends_comes_back_on_any_node(start: Callable[..., Deployment]) -> None:
    one = start()
    first = one.pod("gateway")

    def is_back(lost: str = "") -> bool:
        pods = one.space.pods("app.kubernetes.io/component=gateway")
        return any(pod.is_ready for pod in pods if pod.name != lost) and is_ready(one.run, 1)

    with one.fault("gateway killed", lambda: now(one.run).gateway.n_restarts and is_back(), loses=True):
        first.kill_process("gateway")
    node = one.space.cluster.node(first.node)
    with one.fault("gateway's node lost", lambda: is_back(first.name), loses=True):
        node.lose()
    node.come_back()
    one.space.wait(lambda: first.object is None and node.is_ready, "nothing of the first is left")
    assert "gateway restarted" in call("logs", "one", "--part", "events").out


@pytest.mark.nightly
def test_an_api_server_that_hangs_or_is_away_stops_nothing(start: Callable[..., Deployment]) -> None:
    one = start()
    with one.fault("API server hangs for 10 s", lambda: is_ready(one.run, 1)):
        one.space.cluster.api_away(hangs=True)
        done = call("status", "one")  # it is given 10 s
        one.space.cluster.api_back()
        assert done.code == 0 and "this is what was seen at" in done.out, done
    with one.fault("API server away for a minute", lambda: is_ready(one.run, 2)):
        one.space.cluster.api_away()
        time.sleep(60.0)  # after 10 s the nodes count as lost
        assert "this is what was seen at" in call("status", "one").out
        for verb in (["scale", "one", 2], ["down", "one"], ["up", one.file]):
            done = call(*verb)
            assert done.code == 1 and "could not reach the API server" in done.err, done
        one.space.cluster.api_back()
        assert call("scale", "one", 2, "--no-wait").code == 0


@pytest.mark.nightly
def test_without_rights_nothing_changes_and_a_deleted_namespace_is_the_end(
    start: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    good = one.space.kubeconfig
    # Two users: kubectl's proxy keeps the file of that name that it started with.
    for user, token, words in (("alice", "expired", "are not accepted (expired?)"), ("bob", None, "no right ")):
        config = one.space.cluster.kubeconfig(user, one.space.name, token)
        monkeypatch.setenv("KUBECONFIG", str(config))
        targets.load.cache_clear()
        for verb in (["scale", "one", 2], ["down", "one"], ["up", one.file]):
            done = call(*verb)
            assert done.code in (1, 2) and words in done.err, done
        assert words in call("status", "one").out
    monkeypatch.setenv("KUBECONFIG", str(good))
    targets.load.cache_clear()
    assert is_ready(one.run, 1) and now(one.run).desired_replicas == 1
    one.space.kubectl("delete", "namespace", one.space.name, "--wait=false")
    until(lambda: call("status", "one").out.startswith("one is down"), "status says that it is gone")
    assert f'its namespace "{one.space.name}" was deleted' in call("status", "one").out
    assert call("down", "one").code == 0


@pytest.mark.nightly
def test_of_two_gateways_over_postgresql_one_may_end(place: Place, kubernetes: Namespace) -> None:
    with postgres_server(kubernetes.cluster.address):
        store = f"postgresql://penstock@{kubernetes.cluster.address}/postgres"
        file = file_for(place, replicas=2, kubernetes={"gateways": 2}, gateway={"store": store})
        one = Deployment(place, kubernetes, file)
        first, second = (pod for pod in kubernetes.pods() if pod.name.startswith("one-gateway-"))

        def admits(key: str) -> list[bool]:
            return [_answers(f"http://{pod.address}:8000", key) for pod in (first, second)]

        penstock = [sys.executable, "-m", "penstock", "keys"]
        done = subprocess.run([*penstock, "create", "alice", "--deployment", "one"], capture_output=True, text=True)
        until(lambda: admits(done.stdout.strip()) == [True, True], "a new key is valid in both")
        subprocess.run([*penstock, "revoke", "alice", "--deployment", "one"], check=True, capture_output=True)
        until(lambda: admits(done.stdout.strip()) == [False, False], "and is valid in none")
        for n_replicas in (1, 2):
            with one.fault(f"two gateways, {n_replicas} replicas", lambda n=n_replicas: is_ready(one.run, n)):  # type: ignore[misc]
                assert call("scale", "one", n_replicas).code == 0
            assert admits(one.key) == [True, True]
        with one.fault("one of two gateways killed", lambda: now(one.run).gateway.n_restarts, loses=True):
            first.kill_process("gateway")
        one.space.wait(lambda: first.is_ready and second.is_ready, "both")
        with one.fault("one of two gateways' pods deleted", lambda: first.object is None):
            one.space.kubectl("delete", "pod", first.name, "--wait=false")
        assert call("down", "one").code == 0


def _answers(url: str, key: str) -> bool:
    try:
        return Client(url, key, 10.0).chat([{"role": "user", "content": PROMPT}], max_tokens=1).text == "1:tell"
    except PenstockError:
        return False
