"""Checks before anything is sent: the port, the engine, what this version cannot do, doctor's list."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from samples import cpu_machine, deployment, gpu_machine

from penstock import targets
from penstock.deployment import planning, preflight
from penstock.errors import SpecError, UserError
from penstock.hardware import Gpu, Machine, catalog, network
from penstock.spec.deployment import GatewaySpec
from penstock.spec.gateway import Upstream
from penstock.text import GIB


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this very process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_a_port_in_use_names_who_holds_it(taken: int) -> None:
    with pytest.raises(UserError) as caught:
        network.check_port("127.0.0.1", taken)
    error = caught.value
    assert error.message == f"cannot listen on 127.0.0.1:{taken}: address already in use"
    assert error.detail is not None
    assert error.detail.startswith(f"Process {os.getpid()} listens there: ")
    assert error.hint == "End that process, or choose another port: --set gateway.port=PORT (0 takes any free one)."


def test_without_the_right_to_look_the_holder_stays_unnamed(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(kind: str) -> list[object]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", deny)
    with pytest.raises(UserError) as caught:
        network.check_port("127.0.0.1", taken)
    assert caught.value.detail is None


def test_any_free_port_is_free() -> None:
    network.check_port("127.0.0.1", 0)


def test_a_free_port_is_left_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    network.check_port("127.0.0.1", port)
    network.check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:8000: cannot assign requested address"):
        network.check_port("192.0.2.1", 8000)


@pytest.mark.parametrize(
    ("kind", "has_gpus", "forms", "expected"),
    [
        ("auto", False, ("gguf",), "llamacpp"),
        ("auto", False, ("safetensors", "gguf"), "llamacpp"),
        ("auto", False, ("safetensors",), "vllm"),
        ("auto", False, (), "llamacpp"),
        ("auto", True, ("safetensors", "gguf"), "vllm"),
        ("vllm", False, ("gguf",), "vllm"),
        ("fake", True, (), "fake"),
    ],
)
def test_the_engine_follows_machine_and_model(kind: str, has_gpus: bool, forms: tuple[str, ...], expected: str) -> None:
    assert preflight.choose_engine(kind, has_gpus, forms) == expected


def test_what_this_version_does_not_do_is_refused_together() -> None:
    wanted = deployment(
        ui=True,
        observe={"prometheus": True, "grafana": True},
        replicas={"min": 1, "max": 3},
    )
    assert [str(problem) for problem in preflight.unsupported(wanted, targets.load("local"))] == [
        "ui: this version has no browser chat yet (use: penstock chat)",
        "observe.prometheus: this version does not set it up yet (scrape the gateway's /metrics yourself)",
        "observe.grafana: this version does not set it up yet (scrape the gateway's /metrics yourself)",
        "replicas.max: this version has no autoscaling yet "
        "(set replicas to a number, and change it with `penstock scale`)",
    ]


def test_a_gateway_in_a_job_needs_a_target_that_places_it() -> None:
    wanted = deployment(gateway={"on": "job", "auth": "keys"})
    (problem,) = preflight.unsupported(wanted, targets.load("local"))
    assert str(problem) == 'gateway.on: "job", but target local places no gateway (remove it)'
    assert preflight.unsupported(wanted, targets.load("slurm")) == []


@pytest.mark.parametrize("replicas", [0, 1, 3, {"min": 0, "max": 1}])
def test_a_fixed_number_of_replicas_is_supported(replicas: object) -> None:
    assert preflight.unsupported(deployment(replicas=replicas), targets.load("local")) == []


H100X2 = gpu_machine(2)


@pytest.mark.parametrize(
    "hardware",
    [{}, {"gpu": "h100-sxm"}, {"gpu": "NVIDIA H100 80GB HBM3", "gpus_per_node": 2}, {"gpus_per_node": 1}],
    ids=str,
)
def test_a_machine_that_has_what_the_file_says_is_taken(hardware: dict[str, object]) -> None:
    assert preflight.as_named(deployment(hardware=hardware), H100X2, is_rehearsal=False) == H100X2


@pytest.mark.parametrize(
    ("hardware", "machine", "problems"),
    [
        ({"gpu": "l4"}, H100X2, ['hardware.gpu: "l4", but box has NVIDIA H100 80GB HBM3']),
        ({"gpus_per_node": 8}, H100X2, ["hardware.gpus_per_node: 8, but box has 2"]),
        (
            {"gpu": "h100-sxm", "gpus_per_node": 2},
            cpu_machine(),
            ['hardware.gpu: "h100-sxm", but desk has no GPU', "hardware.gpus_per_node: 2, but desk has 0"],
        ),
    ],
)
def test_a_machine_that_has_not_is_refused(hardware: dict[str, object], machine: Machine, problems: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        preflight.as_named(deployment(hardware=hardware), machine, is_rehearsal=False)
    assert [f"{problem.path}: {problem.message}" for problem in caught.value.problems] == problems


def test_a_file_may_leave_the_gpus_alone() -> None:
    assert preflight.as_named(deployment(hardware={"gpus_per_node": 0}), H100X2, is_rehearsal=False).gpus == ()


def test_a_rehearsal_without_gpus_takes_those_of_the_file() -> None:
    wanted = deployment(hardware={"gpu": "l4", "gpus_per_node": 4})
    machine = preflight.as_named(wanted, cpu_machine(), is_rehearsal=True)
    assert [gpu.index for gpu in machine.gpus] == [0, 1, 2, 3]
    assert planning.card_of(machine.gpus) == catalog.gpu("l4")


def test_a_card_that_nobody_knows_is_taken_by_its_drivers_name() -> None:
    odd = msgspec.structs.replace(H100X2, gpus=(Gpu(0, "NVIDIA X900", 48 * GIB, 48 * GIB),))
    assert preflight.as_named(deployment(hardware={"gpu": "NVIDIA X900"}), odd, is_rehearsal=False) == odd
    with pytest.raises(UserError, match='no GPU "h1000" in the catalogue'):
        preflight.as_named(deployment(hardware={"gpu": "h1000"}), odd, is_rehearsal=False)


class NoSuchHost(socket.socket):
    """A socket on a machine whose name service does not know the host."""

    def bind(self, address: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("port", [0, 8000])
def test_a_host_that_nobody_knows_is_refused_and_the_host_is_to_blame(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """With port 0 it was not looked at: `up --replace` ended the old deployment, and then failed."""
    monkeypatch.setattr(socket, "socket", NoSuchHost)
    with pytest.raises(UserError) as caught:
        network.check_port("no.such.invalid", port)
    assert caught.value.message == f"cannot listen on no.such.invalid:{port}: name or service not known"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Set gateway.host")
    assert caught.value.detail is None


@pytest.mark.parametrize("host", ["192.0.2.1", "a" * 70])
def test_a_host_that_is_not_this_machine_is_told_by_its_field(host: str) -> None:
    with pytest.raises(UserError) as caught:
        network.check_port(host, 0)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Set gateway.host")


def test_files_and_variables_of_the_gateway_are_checked_before_anything_starts() -> None:
    upstreams = (Upstream("http://h:1", key_env="NO_SUCH_KEY"), Upstream("http://h:2", key_file=__file__))
    wanted = GatewaySpec(tls_cert="/no/cert.pem", tls_key=__file__, upstreams=upstreams)
    assert [str(problem) for problem in preflight.unreadable_files(wanted)] == [
        "gateway.upstreams[0].key_env: NO_SUCH_KEY is not set",
        'gateway.tls_cert: cannot read "/no/cert.pem" (check the path)',
    ]
