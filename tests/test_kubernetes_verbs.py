"""Verbs of a deployment that its target holds whole, from any machine: by a target that only notes what it is asked."""

# ruff: noqa: F811 - fixtures of test_cli
from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from samples import NOW, cpu_machine, demo_plan, deployment, draft, end, gpu_machine
from test_cli import Shell, shell  # noqa: F401 - fixtures

from penstock import processes, run_folder, targets
from penstock.cli import chat, lifecycle, remote
from penstock.deployment import leftovers, start
from penstock.deployment.doctor import examine
from penstock.deployment.library import RunningDeployment
from penstock.deployment.prepare import Prepared
from penstock.errors import PenstockError, Problem, UserError
from penstock.hardware import Machine
from penstock.paths import write_atomically
from penstock.run_folder import Artifact, Handle, Kind, Launch, Left, Run, State, Unit
from penstock.spec.deployment import Deployment
from penstock.targets import Adopted, Placement, Target
from penstock.targets.kubernetes import folder
from penstock.targets.kubernetes import target as kubernetes
from penstock.wire.announcement import GatewayAddress

pytestmark = pytest.mark.loopback

KINDS: tuple[Kind, ...] = ("replica", "gateway", "controller", "ui")


class Cluster(Target):
    """Notes what it is asked, in `asked`; has the deployments in `others`, which another machine started."""

    name = "kubernetes"
    capabilities = frozenset({"places-gateway", "tunnels", "keeps-weights"})

    def __init__(self) -> None:
        self.asked, self.others = list[str](), list[str]()
        self.silence: PenstockError | None = None
        self.placements: dict[Unit, Placement] = {}

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        return []

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        return [gpu_machine(4), gpu_machine(4)]

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        raise NotImplementedError

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        raise NotImplementedError

    def status(self, run: Run) -> dict[Unit, Placement]:
        return self.placements

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        yield f"a line of {unit.key}"

    def end(self, run: Run, grace_s: float) -> None:
        self.asked.append("end")

    def adopt(self, name: str, deployment: Deployment | None = None) -> Adopted | None:
        self.asked.append(f"adopt {name}")
        if self.silence is not None:
            raise self.silence
        return Adopted(started(name), "context far, namespace default") if name in self.others else None

    @contextlib.contextmanager
    def tunnel(self, run: Run, port: int, kind: Kind = "gateway") -> Iterator[Any]:
        self.asked.append(f"tunnel {run.name}" + (" to its page" if kind == "ui" else ""))
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", last_words=lambda: "error: lost connection to pod")

    def inside(self, run: Run, words: Sequence[str], is_terminal: bool) -> list[str]:
        return ["exec", run.name, *words]

    def leftovers(self) -> list[Left]:
        if self.silence is not None:
            raise self.silence
        return [Left(self.name, "u1", "far/default", "Service one-gateway", {})] if self.others else []

    def end_weights(self, run: Run) -> None:
        self.asked.append("end weights")


def finish(left: Left) -> None:
    """What targets call for `clean --yes`, by the name of this module."""
    cluster = targets.load(left.target)
    assert isinstance(cluster, Cluster)
    cluster.others.clear()


def announce(run: Run, *outside: str) -> None:
    """The gateway serves in its cluster, and outside at these addresses: its own and its page's."""
    address = GatewayAddress("0", f"{run.name}-gateway.default:8000", (), *outside)
    write_atomically(run.gateway_address_file, msgspec.json.encode(address))


def started(name: str, **fields: Any) -> Run:
    wanted = deployment(name=name, target="kubernetes", gateway={"auth": "keys"}, **fields)
    run = run_folder.create(msgspec.structs.replace(draft(wanted), placed=KINDS), NOW)
    run.write_handle(Handle("kubernetes", {"replica/0": {}, "gateway/0": {}, "controller/0": {}, "ui/0": {}}))
    return run


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> Iterator[Cluster]:
    monkeypatch.setattr(targets, "TABLE", {"kubernetes": f"{__name__}:Cluster"})
    targets.load.cache_clear()
    target = targets.load("kubernetes")
    assert isinstance(target, Cluster)
    yield target
    targets.load.cache_clear()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; the first of each pair of them to make a key fails."""
    noted: list[list[str]] = []

    def call(words: list[str], **_: Any) -> Any:
        noted.append(words)
        is_new = "create" in words
        return subprocess.CompletedProcess(words, 0 if is_new else 2, '{"key": "sk-1"}' if is_new else "", "no key")

    monkeypatch.setattr(subprocess, "run", call)
    monkeypatch.setattr(subprocess, "call", lambda words: call(words).returncode)
    return noted


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A held tunnel ends soon; what it does to signals is taken back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(remote, "_LOOK_S", 0.01)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Address and key of each chat."""
    noted: list[tuple[str, str | None]] = []

    def talk(client: Any, *_: object, **__: object) -> int:
        noted.append((client.base_url, client.api_key))
        return 0

    monkeypatch.setattr(chat, "chat", talk)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return noted


def test_a_chat_goes_through_a_tunnel_with_a_key_made_next_to_the_gateway(
    shell: Shell, cluster: Cluster, commands: list[list[str]], chats: list[tuple[str, str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = started("one")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0")
    assert shell("chat", "one")[0] == 0
    assert commands == [] and chats[0][1] == "sk-0"
    monkeypatch.delenv("OPENAI_API_KEY")
    assert shell("chat")[0] == 0, "the only deployment needs no name"
    assert cluster.asked == ["tunnel one", "tunnel one"]
    assert chats[1][0].startswith("http://127.0.0.1:") and chats[1][1] == "sk-1"
    assert [words[3:5] for words in commands] == [["rotate", "owner"], ["create", "owner"]]
    announce(run, "https://llm.example.org")
    assert shell("chat", "one")[0] == 0
    assert chats[2][0] == "https://llm.example.org" and len(cluster.asked) == 2, "an exposed one needs no tunnel"


def test_a_chat_page_is_opened_through_a_tunnel_at_the_same_port_each_time(
    shell: Shell, cluster: Cluster, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, ends: None
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    run = started("one", ui=True)
    cluster.placements = {Unit("ui", "0"): Placement("placed")}
    links = [shell("ui", *name, "--no-open") for name in (["one"], [])]
    assert [(code, "lost the tunnel" in err) for code, _, err in links] == [(1, True)] * 2
    assert re.fullmatch(r"http://127.0.0.1:2\d{4}/login#key=sk-1\n", links[0][1]) and links[0][1] == links[1][1]
    assert cluster.asked == ["tunnel one to its page"] * 2
    announce(run, "https://llm.example", "https://llm.example/ui/")
    assert shell("ui", "one", "--no-open")[:2] == (0, "https://llm.example/ui/login#key=sk-1\n")
    cluster.placements = {Unit("ui", "0"): Placement("gone", "its Deployment is not in the cluster")}
    assert 'could not open the chat page of "one": its Deployment is not in the cluster' in shell("ui", "one")[2]


def test_a_deployment_without_a_chat_page_gets_one_here(
    shell: Shell, cluster: Cluster, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = list[Any]()
    monkeypatch.setattr("penstock.chat.page.__main__.serve", lambda config, _: pages.append(config))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    started("one")
    assert shell("ui", "one", "--port", "0", "--no-open")[0] == 0
    assert cluster.asked == ["tunnel one"]
    assert (pages[0].title, pages[0].gateway.startswith("http://127.0.0.1:")) == ("one", True)


def test_keys_and_usage_run_next_to_the_gateway(shell: Shell, cluster: Cluster, commands: list[list[str]]) -> None:
    started("one")
    assert shell("keys", "create", "alice", "--rpm", "60", "--deployment", "one")[0] == 0
    assert shell("usage", "--json")[0] == 2, "its exit code is passed on"
    assert commands == [["exec", "one", "keys", "create", "alice", "--rpm", "60"], ["exec", "one", "usage", "--json"]]
    shell("dashboard", "one", "--ray", "0", "--json")
    assert commands.pop() == ["exec", "one", "dashboard", "one", "--ray", "0", "--inside", "--json"]
    assert "cannot find store" in shell("keys", "list", "--store", "/nowhere")[2]
    assert len(commands) == 2


def test_a_tunnel_that_breaks_is_an_error(shell: Shell, cluster: Cluster, ends: None) -> None:
    started("one")
    code, out, err = shell("tunnel", "one", "--port", "0")
    assert (code, out.split(":")[0]) == (1, "one is at http")
    assert 'lost the tunnel to the gateway of "one"' in err and "lost connection to pod" in err


def test_a_deployment_that_another_machine_started_is_found(
    shell: Shell, cluster: Cluster, chats: list[tuple[str, str | None]], commands: list[list[str]]
) -> None:
    cluster.others.append("llama")
    code, _, err = shell("chat", "llama")
    assert (code, err) == (0, 'penstock: found "llama" in context far, namespace default\n')
    assert len(chats) == 1
    assert shell("chat", "llama")[2] == "", "it has a folder here now"
    assert cluster.asked.count("adopt llama") == 1
    code, _, err = shell("status", "lama")
    assert (code, cluster.asked[-1]) == (2, "adopt lama")
    assert 'Did you mean "llama"?' in err
    cluster.silence = PenstockError("the API server of context far does not answer", is_retryable=True)
    assert shell("status", "other")[2].splitlines()[:2] == [
        'penstock: could not look for "other" elsewhere: the API server of context far does not answer',
        'error: cannot find deployment "other"',
    ]


def test_one_that_ended_here_may_have_been_started_again_elsewhere(shell: Shell, cluster: Cluster) -> None:
    run = started("one")
    end(run)
    assert "it is down" in shell("tunnel", "one")[2]
    assert shell("status", "one")[1].startswith("one is down")
    cluster.others.append("one")
    assert 'found "one"' in shell("status", "one")[2]
    assert not run.is_ended()


def test_down_with_weights_is_for_targets_that_keep_them(shell: Shell, cluster: Cluster) -> None:
    started("one")
    assert shell("down", "one")[0] == 0
    assert cluster.asked == ["end"]
    assert shell("down", "one", "--weights")[0] == 0
    assert cluster.asked[-2:] == ["end", "end weights"]
    cluster.capabilities -= {"keeps-weights"}  # type: ignore[misc]
    assert "keeps none for a deployment" in shell("down", "one", "--weights")[2]


def test_a_start_ends_with_the_reason_when_a_unit_can_never_start(cluster: Cluster) -> None:
    run, states = started("one"), list[State]()
    waits = Placement("queued", "Pending: 0/2 nodes have 4 nvidia.com/gpu free")
    wrong = Placement("queued", "cannot pull image a/b:c: not found", is_final=True)
    cluster.placements = {Unit("replica", "0"): waits, Unit("gateway", "0"): waits, Unit("controller", "0"): wrong}
    with pytest.raises(PenstockError) as caught:
        start.wait_ready(run, states.append)
    assert caught.value.message == 'could not start the controller of "one": cannot pull image a/b:c: not found'
    assert cluster.asked == ["end"] and run.is_ended()
    (shown,) = states
    assert (shown.controller.state, shown.controller.note) == ("queued", wrong.reason)
    assert (shown.gateway.state, shown.gateway.note) == ("queued", waits.reason)
    assert (shown.replicas[0].state, shown.replicas[0].reason) == ("queued", waits.reason)
    state = run.state()
    assert state is not None and (state.phase, state.reason) == ("failed", caught.value.message)


def test_a_page_that_cannot_start_fails_no_start_and_status_says_why_or_where_it_is(
    cluster: Cluster, shell: Shell
) -> None:
    run, page = started("one"), Unit("ui", "0")
    why = "container packages ended with code 1: cannot install the chat page's packages / this image has no pip"
    cluster.placements = {page: Placement("queued", why, is_final=True)}
    assert start._refusal(run) is None
    assert f"chat page  {why}" in shell("status", "one")[1]
    cluster.placements = {page: Placement("placed")}
    out = shell("status", "one")[1]
    assert re.search(r"chat page +in its cluster; here: \S+ ui one\n", out) and re.search(r"\nui +running", out)
    announce(run, "https://llm.example", "https://llm.example/ui/")
    assert re.search(r"chat page +https://llm.example/ui/\n", shell("status", "one")[1])


def test_what_is_sent_as_one_document_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    plan = demo_plan(warnings=("its context is cut",))
    artifact = Artifact(
        ("kubectl", "apply"), {"all.yaml": "---\nkind: Service\n", "one.yaml": "kind: Pod\n"}, "all.yaml"
    )
    lifecycle._print_prepared(Prepared(deployment(), cpu_machine(), plan, artifact), as_json=False)
    assert capsys.readouterr() == ("---\nkind: Service\n", "warning: its context is cut\n")


def test_clean_shows_what_targets_still_have_and_removes_it_when_told(
    shell: Shell, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "every_temporary", dict)  # of other tests of this machine
    monkeypatch.setattr(processes, "find_marked", lambda *_: [])
    cluster.others.append("one")
    assert shell("clean")[1].splitlines()[0].split() == ["kubernetes", "far/default", "Service", "one-gateway"]
    assert shell("clean", "--yes")[1].splitlines()[-1] == "removed"
    assert shell("clean")[1] == "nothing is left behind\n"
    cluster.silence = PenstockError("the API server of context far does not answer")
    code, out, err = shell("clean")
    assert (code, out) == (0, "nothing is left behind\n")
    assert err == "warning: the API server of context far does not answer\n"


def test_logs_and_status_of_placed_units_come_from_their_target(shell: Shell, cluster: Cluster) -> None:
    run = started("one")
    for part in ("gateway", "controller", "ui"):
        assert shell("logs", "one", "--part", part)[1] == f"a line of {part}/0\n"
    assert shell("logs", "one")[1] == "a line of replica/0\n"
    announce(run)
    out = shell("status", "one")[1]
    assert "http://one-gateway.default:8000/v1 (in its cluster; here: " in out and "tunnel one)" in out


def test_doctor_names_the_machines_that_a_target_knows(cluster: Cluster) -> None:
    finding = examine._known_machines(cluster, deployment(target="kubernetes"))
    machines = "2 machines with 8 x NVIDIA H100 80GB HBM3"
    assert finding.found == f"target kubernetes knows {machines}; no program was run on them"


def test_up_stays_where_the_deployment_runs_whatever_the_kubeconfig_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(context: str | None, namespace: str | None) -> SimpleNamespace:
        return SimpleNamespace(context=context or "current", namespace=namespace or "default")

    monkeypatch.setattr(kubernetes, "connect", connect)
    target, run = kubernetes.Kubernetes(), started("one")
    (run.path / "cluster.json").write_bytes(msgspec.json.encode(folder.Cluster("far", "llm")))
    same = deployment(name="one", target="kubernetes", gateway={"auth": "keys"})
    other = deployment(name="one", target="kubernetes", kubernetes={"context": "near"})
    assert target.rolls(run, same)
    assert not target.rolls(run, other), "the old one is ended where it is"
    run = started("one")  # `up` replaces the folder
    assert (target._api_of(run).context, target._api_of(run).namespace) == ("far", "llm")
    end(run)
    assert target._api(same).context == "current"


def test_a_program_is_told_that_it_needs_a_tunnel(cluster: Cluster) -> None:
    run = started("one")
    with pytest.raises(UserError) as caught:
        RunningDeployment("one", None).client()
    assert caught.value.hint is not None and "penstock tunnel one --port 8000" in caught.value.hint
    announce(run, "https://llm.example.org")
    assert RunningDeployment("one", None).client().base_url == "https://llm.example.org"
