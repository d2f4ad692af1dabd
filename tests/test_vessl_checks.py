"""What keeps a deployment off VESSL, all together, as the file and the fake of its API have it; a run in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from golden_files import cases
from place_stubs import client_of
from samples import demo_plan

from penstock import targets
from penstock.errors import PenstockError
from penstock.hardware import catalog
from penstock.run_folder import Unit, replica
from penstock.spec import reading
from penstock.spec.blocks import Vessl
from penstock.spec.deployment import Deployment
from penstock.targets.vessl import api, checks, log_lines
from penstock.targets.vessl.api import Api, Endpoint, Endpoints, Execution, LogLine, Preset
from penstock.targets.vessl.words import Silence, ended, placement
from penstock.testing.fake_vessl.account import CLUSTER, Fault
from penstock.testing.fake_vessl.containers import Container
from penstock.testing.fake_vessl.server import FakeVessl
from penstock.wire.container import ContainerView

BLOCK = {"cluster": CLUSTER, "preset": "gpu-l4-small"}


def file(**fields: Any) -> Deployment:
    whole = {"name": "one", "model": "meta-llama/Llama-3.1-8B-Instruct", "target": "vessl", "vessl": BLOCK, **fields}
    return reading.parse(yaml.safe_dump(whole))


@pytest.fixture
def vessl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVessl]:
    monkeypatch.setattr(api, "_sleep", lambda _: None)
    targets.load.cache_clear()
    with FakeVessl(tmp_path / "vessl", listens=False) as fake:
        monkeypatch.setattr(api, "Client", client_of(fake.ask))
        for name, value in fake.variables.items():
            monkeypatch.setenv(name, value)
        yield fake


def of_vessl(**fields: Any) -> list[str]:
    return [str(problem) for problem in targets.load("vessl").check(file(**fields))]


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "said"), cases("vessl/mistakes.txt"))
def test_a_problem_of_the_file_is_named_with_its_cure(fields: str, said: str) -> None:
    (problem,) = checks.file_problems(file(**yaml.safe_load(fields)))
    assert str(problem) == said and problem.hint


def test_an_unknown_field_of_the_block_has_the_nearest_name() -> None:
    with pytest.raises(Exception, match="cannot use") as caught:
        file(vessl={**BLOCK, "presett": "x"})
    assert 'vessl.presett: unknown key (did you mean "preset"?)' in str(getattr(caught.value, "detail", ""))


# ---- VESSL -----------------------------------------------------------------------------------------------------------


def test_all_problems_are_named_at_once(vessl: FakeVessl) -> None:
    vessl.world.credit_balance = 0
    found = of_vessl(
        hardware={"nodes": 2},
        vessl={**BLOCK, "preset": "gpu-l4-smal", "secrets": {"HF_TOKEN": "hub"}, "project": "x"},
        gateway={"auth": "none"},
    )
    assert found == [
        "hardware.nodes: 2 nodes, but a VESSL run is one container (take a preset with more GPUs, and "
        "hardware.nodes: 1)",
        "gateway.auth: none, but the address of a run is public (remove it: keys is the default)",
        'vessl.organization: "acme" has no credit left (0) (add credit at app.vessl.ai)',
        'vessl.project: there is no project "x" (there are: serving)',
        'vessl.secrets.HF_TOKEN: there is no secret "hub" (there is no secret yet)',
        'vessl.preset: there is no preset "gpu-l4-smal" (did you mean "gpu-l4-small"?)',
    ]
    assert vessl.world.runs == {} and vessl.world.secrets == {}, "nothing was changed"


def test_a_deployment_that_fits_has_no_problems_and_gets_the_presets_machine(
    vessl: FakeVessl, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_vessl() == [] and checks.file_problems(file()) == []
    assert file().gateway.auth == "keys", "the address is public"
    (machine,) = targets.load("vessl").machines(file())
    assert (machine.host, machine.n_cpus, machine.memory_bytes) == ("gpu-l4-small", 6, 42 * 2**30)
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA L4"]
    assert "credits an hour" in targets.load("vessl").warnings(file(), demo_plan("vllm"))[0]
    assert any("POST /api/v1/organizations/acme/run/spec/sync_yaml" in line for line in vessl.world.calls)
    monkeypatch.setattr("penstock.testing.fake_vessl.forms.run_problems", lambda _: [("image", "cannot be pulled")])
    assert of_vessl() == ["vessl (image): cannot be pulled"], "words of the server's dry check"


@pytest.mark.parametrize(
    ("preset", "fields", "words"),
    [
        ("gpu-l4-small-spot", {}, '"gpu-l4-small-spot" is of spot machines, and a reclaim ends the deployment'),
        ("gpu-new", {}, 'penstock does not know the GPU "X9000" of preset "gpu-new"'),
        ("gpu-l4-small", {"hardware": {"gpu": "h100-sxm"}}, '"h100-sxm", but preset "gpu-l4-small" has 1 x NVIDIA-L4'),
        ("cpu-medium", {"hardware": {"gpu": "l4"}}, '"l4", but preset "cpu-medium" has no GPU'),
    ],
)
def test_a_preset_must_be_what_the_file_says(vessl: FakeVessl, preset: str, fields: dict[str, Any], words: str) -> None:
    (problem,) = targets.load("vessl").check(file(vessl={**BLOCK, "preset": preset}, **fields))
    assert problem.message == words and problem.hint
    if preset.endswith("spot"):
        assert of_vessl(vessl={**BLOCK, "preset": preset, "spot": True}) == []


def test_no_account_is_named_with_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    targets.load.cache_clear()
    for name in ("VESSL_ACCESS_TOKEN", "VESSL_DEFAULT_ORGANIZATION", "VESSL_DEFAULT_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    (problem,) = of_vessl()
    assert problem.startswith("vessl: cannot call VESSL without an access token and an organization and a project")
    assert targets.load("vessl").adopt("one") is None, "a machine without an account looks for nothing there"


def test_the_configuration_of_vessls_cli_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text('[user]\naccess_token = "t"\ndefault_organization = "acme"\ndefault_project = "p"\n', "utf-8")
    monkeypatch.setenv("VESSL_CONFIG_PATH", str(config))
    block = file(vessl={**BLOCK, "project": "other"}).vessl
    assert block is not None
    assert api.account(block) == api.Account(api.HOST, "t", "acme", "other")
    monkeypatch.setenv("VESSL_API_HOST", "http://api.example.org")
    with pytest.raises(Exception, match="it would go in clear text"):
        api.account(block)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "Unauthorized", "the access token is refused (no quota left)"),
        (403, "PermissionDenied", "this is not allowed (no quota left)"),
        (404, "NotFound", "there is no such thing (no quota left)"),
        (402, "PaymentRequired", "it answered 402 (no quota left)"),
    ],
)
def test_a_refusal_of_vessl_is_shown_in_its_words_and_one_that_is_busy_is_asked_again(
    vessl: FakeVessl, status: int, code: str, words: str
) -> None:
    vessl.world.faults.append(Fault("GET .*/clusters", 503, "Unavailable", "restarting", n_times=2))
    vessl.world.faults.append(Fault("GET .*/secrets", 429, "TooMany", "slow down", n_times=1))
    assert of_vessl() == []
    vessl.world.faults.append(Fault("GET .*/accounts/me", status, code, "no quota left", n_times=9))
    (problem,) = targets.load("vessl").check(file())
    assert problem.message == f"could not ask VESSL: {words}" and problem.hint
    assert ("vessl configure" in problem.hint) == (status == 401)


def test_every_page_of_runs_is_read(vessl: FakeVessl, monkeypatch: pytest.MonkeyPatch) -> None:
    many = SimpleNamespace(has_ended=False, status="running", reason="", created_at=0.0, yaml_spec="", command="")
    tags = {"name": "x", "tags": ["penstock-old"]}
    for number in range(120):
        run = SimpleNamespace(**vars(many), id=number, form=tags, endpoints=list)
        vessl.world.runs[number] = cast(Container, run)
    rows = api.Api(api.account(Vessl())).living()
    assert [row.id for row in rows] == list(range(119, -1, -1))
    vessl.world.runs.clear()


def test_a_service_is_judged_by_vessl_and_its_cluster_must_take_services(vessl: FakeVessl) -> None:
    block = {**BLOCK, "kind": "service"}
    assert of_vessl(vessl=block) == []
    assert any("/model_services/revisions/sync_yaml" in line for line in vessl.world.calls)
    vessl.world.cluster["vessl_service_enabled"] = False
    assert of_vessl(vessl=block) == [
        f'vessl.cluster: "{CLUSTER}" takes no services (another cluster, or vessl.kind: run)'
    ]
    vessl.world.cluster.pop("vessl_service_enabled")
    assert of_vessl(vessl=block) == [], "where VESSL does not say, it will"


def test_every_gpu_of_the_table_is_in_the_catalogue_and_sizes_are_read() -> None:
    for name, card in checks._GPUS.items():
        assert catalog.gpu(card).id == card and checks.card_of(Preset(gpu_type=name.lower())) == card
    assert [checks.n_bytes(text) for text in ("42Gi", "16GB", "512Mi", "7", "lots")] == [
        42 * 2**30, 16 * 10**9, 512 * 2**20, 7, 0,
    ]  # fmt: skip


# ---- what a run's status means for its units, and how its log becomes theirs -----------------------------------------


VIEW = ContainerView("0", units={"replica/0": None, "replica/1": "its node process 7 is gone"})


def facts(
    status: str, view: ContainerView | None = None, silence: Silence | None = None, **more: Any
) -> tuple[Any, ...]:
    place = placement(more.pop("unit", "replica/0"), Execution(7, status, **more), view, False, silence)
    return place.state, place.reason, place.is_final


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("queued", ("queued", "waits for a machine", False)),
        ("pending", ("queued", "waits for a machine", False)),
        ("initializing", ("queued", "pulls the image and what it imports (charged)", False)),
        ("running", ("queued", "its container starts", False)),
        ("stopping", ("queued", "its container starts", False)),
        ("idle", ("gone", "run 7 is idle and still charged: terminate it", False)),
        ("failed", ("gone", "VESSL ended run 7 as failed", False)),
        ("terminated", ("gone", "VESSL ended run 7 as terminated", True)),
        ("hibernating", ("queued", "VESSL calls its run hibernating; its container starts", False)),
    ],
)
def test_each_status_of_vessl_has_a_meaning(status: str, expected: tuple[Any, ...]) -> None:
    assert facts(status) == expected


def test_the_reason_of_vessl_is_shown_and_what_the_container_tells_counts_while_it_runs() -> None:
    assert facts("pending", status_reason="no L4 in this region")[1] == "waits for a machine: no L4 in this region"
    assert facts("failed", status_reason="exit code 1")[1] == "VESSL ended run 7 as failed: exit code 1"
    assert placement("replica/0", None, None, False).state == "gone"
    assert facts("running", VIEW) == facts("running", VIEW, unit="gateway/0") == ("placed", None, False)
    assert facts("running", VIEW, unit="replica/1") == ("gone", "its node process 7 is gone", False)
    assert facts("running", VIEW, unit="replica/2") == ("gone", "it was ended", False)
    fetching = ContainerView("0", stage="fetching the model: 40 %")
    assert facts("running", fetching) == ("queued", "fetching the model: 40 %", False)
    refused = ContainerView("0", stage="starting", refusal="no GPU here")
    assert facts("running", refused) == ("queued", "no GPU here", True)
    silence = Silence("no answer within 5 s", was_heard=True)
    assert facts("running", None, silence) == ("placed", "no answer within 5 s", False)
    assert facts("running", None, Silence("refused", was_heard=False))[0] == "queued"


def test_a_spot_machine_that_was_taken_away_is_called_a_reclaim() -> None:
    assert "most likely a reclaim" in ended(Execution(7, "failed", "node was preempted"), True)
    assert "reclaim" not in ended(Execution(7, "failed", "exit code 1"), False)
    assert "vessl.max_hours" in ended(Execution(7, "completed"), True)


def test_an_address_counts_once_its_port_is_open() -> None:
    def address(**more: Any) -> str | None:
        return Execution(7, endpoints=Endpoints((Endpoint("gateway", 8000, "http", **more),))).address("gateway")

    assert address() is None and address(endpoint="") is None and Execution(7).address("gateway") is None
    assert address(endpoint="https://x.example.org/", is_port_opened=False) is None
    assert address(endpoint="https://x.example.org/") == "https://x.example.org"
    assert address(endpoint="x.example.org", is_port_opened=True) == "https://x.example.org"


# ---- logs ------------------------------------------------------------------------------------------------------------


class LogApi:
    """Lines that are there by the clock of the test; each look is one call."""

    def __init__(self, lines: Sequence[tuple[float, float, str]]) -> None:
        self.lines, self.now, self.n_errors = lines, 100.0, 0

    def logs(self, execution_id: int, since: float) -> list[LogLine]:
        assert execution_id == 7
        if since and self.n_errors:
            self.n_errors -= 1
            raise PenstockError("away", is_retryable=True)
        rows = [LogLine(text, at) for at, seen_at, text in self.lines if at >= since and seen_at <= self.now]
        return sorted(rows, key=lambda row: row.timestamp)


def test_a_units_lines_are_those_with_its_part_in_front() -> None:
    rows = [(1.0, 0.0, "[replica-0] a\n[gateway] g"), (2.0, 0.0, "penstock: x"), (3.0, 0.0, "[replica-0] b")]
    rows += [(4.0, 0.0, "[replica-01] no")]
    api = cast(Api, LogApi(rows))

    def lines(unit: Unit, last: int | None = None) -> list[str]:
        return list(log_lines.lines(lambda since: api.logs(7, since), unit, False, last, lambda: True))

    assert lines(replica("0")) == ["a", "b"] and lines(replica("0"), 1) == ["b"] and lines(replica("0"), 0) == []
    assert lines(Unit("gateway", "0")) == ["g"] and lines(replica("0"), 9) == ["a", "b"]


def test_a_followed_log_waits_for_late_lines_and_keeps_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of 98 s can be read after that of 99 s."""
    api = LogApi([(90.0, 0.0, "[replica-0] a"), (99.0, 99.0, "[replica-0] c"), (98.0, 102.0, "[replica-0] b")])
    api.n_errors = 2
    looks = iter(range(100))

    def has_ended() -> bool:
        api.now += 2.0
        return next(looks) > 5

    monkeypatch.setattr(log_lines, "_clock", lambda: api.now)
    monkeypatch.setattr(log_lines, "_sleep", lambda _: None)
    ask = cast(Api, api).logs
    lines = log_lines.lines(lambda since: ask(7, since), replica("0"), True, None, has_ended)
    assert list(lines) == ["a", "b", "c"]
