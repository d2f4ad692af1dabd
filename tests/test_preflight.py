"""Checks before anything is sent: the port, the engine, what this version cannot do, doctor's list."""

from __future__ import annotations

import os
import socket
from typing import Any

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


def refused(host: str, port: int) -> UserError:
    with pytest.raises(UserError) as caught:
        network.check_port(host, port)
    return caught.value


@pytest.mark.processes
def test_a_port_in_use_names_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(kind: str) -> list[object]:
        raise psutil.AccessDenied

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = refused("127.0.0.1", port)
        assert error.message == f"cannot listen on 127.0.0.1:{port}: address already in use"
        assert (error.detail or "").startswith(f"Process {os.getpid()} listens there: ")
        assert error.hint == "End that process, or choose another port: --set gateway.port=PORT (0 takes any free one)."
        monkeypatch.setattr(psutil, "net_connections", deny)
        assert refused("127.0.0.1", port).detail is None, "without the right to look"
    for number in (port, port, 0):  # a free one is left free
        network.check_port("127.0.0.1", number)


@pytest.mark.processes
def test_a_host_that_is_not_this_machine_is_refused_with_the_field_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """With port 0 it was not looked at: `up --replace` ended the old deployment, and then failed."""
    error = refused("192.0.2.1", 8000)
    assert error.message == "cannot listen on 192.0.2.1:8000: cannot assign requested address"
    for host in ("192.0.2.1", "a" * 70):
        assert (refused(host, 0).hint or "").startswith("Set gateway.host")

    class NoSuchHost(socket.socket):
        def bind(self, address: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "socket", NoSuchHost)
    for port in (0, 8000):
        error = refused("no.such.invalid", port)
        assert error.message == f"cannot listen on no.such.invalid:{port}: name or service not known"
        assert (error.hint or "").startswith("Set gateway.host")
        assert error.detail is None


def test_the_engine_follows_machine_and_model() -> None:
    for kind, has_gpus, forms, expected in (
        ("auto", False, ("gguf",), "llamacpp"),
        ("auto", False, ("safetensors", "gguf"), "llamacpp"),
        ("auto", False, ("safetensors",), "vllm"),
        ("auto", False, (), "llamacpp"),
        ("auto", True, ("safetensors", "gguf"), "vllm"),
        ("vllm", False, ("gguf",), "vllm"),
        ("fake", True, (), "fake"),
    ):
        assert preflight.choose_engine(kind, has_gpus, forms) == expected, (kind, has_gpus, forms)


def test_what_this_version_or_its_target_does_not_do_is_refused_together() -> None:
    wanted = deployment(ui=True, replicas={"min": 1, "max": 3}, gateway={"on": "job", "auth": "keys"})
    local, slurm = targets.load("local"), targets.load("slurm")
    assert [*preflight.unsupported(wanted, slurm)] == []
    on_job = 'gateway.on: "job", but target local places no gateway (remove it)'
    assert list(map(str, preflight.unsupported(wanted, local))) == [on_job]
    for replicas in (0, 1, 3, {"min": 0, "max": 1}, {"min": 1, "max": 3}):
        assert [*preflight.unsupported(deployment(replicas=replicas), local)] == []


H100X2 = gpu_machine(2)


def named(machine: Machine, is_rehearsal: bool = False, **hardware: Any) -> Machine:
    return preflight.as_named(deployment(hardware=hardware), machine, is_rehearsal)


def test_a_machine_that_has_what_the_file_says_is_taken() -> None:
    named_by_driver: dict[str, Any] = {"gpu": "NVIDIA H100 80GB HBM3", "gpus_per_node": 2}
    for hardware in ({}, {"gpu": "h100-sxm"}, named_by_driver, {"gpus_per_node": 1}):
        assert named(H100X2, **hardware) == H100X2
    assert named(H100X2, gpus_per_node=0).gpus == ()
    rehearsed = named(cpu_machine(), is_rehearsal=True, gpu="l4", gpus_per_node=4)
    assert [gpu.index for gpu in rehearsed.gpus] == [0, 1, 2, 3]
    assert planning.card_of(rehearsed.gpus) == catalog.gpu("l4")
    odd = msgspec.structs.replace(H100X2, gpus=(Gpu(0, "NVIDIA X900", 48 * GIB, 48 * GIB),))
    assert named(odd, gpu="NVIDIA X900") == odd
    with pytest.raises(UserError, match='no GPU "h1000" in the catalogue'):
        named(odd, gpu="h1000")


def test_a_machine_whose_gpus_are_not_understood_is_never_taken_for_one_without() -> None:
    unread = "GPU 0 (NVIDIA GB10): nvidia-smi prints [N/A] for its memory, [N/A] for what is free"
    odd = msgspec.structs.replace(cpu_machine(), unread=(unread,))
    for fields in ({}, {"engine": {"kind": "vllm"}}, {"hardware": {"gpu": "h200"}}, {"hardware": {"gpus_per_node": 1}}):
        with pytest.raises(UserError, match="cannot use the GPUs of desk") as refused:
            preflight.as_named(deployment(**fields), preflight.least([H100X2, odd]), is_rehearsal=False)
        assert (refused.value.exit_code, refused.value.detail) == (2, unread)
        assert "--set hardware.gpus_per_node=0" in str(refused.value.hint)
    for fields in ({"hardware": {"gpus_per_node": 0}}, {"engine": {"kind": "llamacpp"}}, {"engine": {"kind": "fake"}}):
        assert preflight.as_named(deployment(**fields), odd, is_rehearsal=False) == odd
    mixed = msgspec.structs.replace(H100X2, unread=(unread,))
    assert preflight.as_named(deployment(), mixed, is_rehearsal=False) == mixed, "the others are used"


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
def test_a_machine_that_has_not_is_refused(hardware: dict[str, Any], machine: Machine, problems: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        named(machine, **hardware)
    assert [f"{problem.path}: {problem.message}" for problem in caught.value.problems] == problems


def test_files_and_variables_of_the_gateway_are_checked_before_anything_starts() -> None:
    upstreams = (Upstream("http://h:1", key_env="NO_SUCH_KEY"), Upstream("http://h:2", key_file=__file__))
    wanted = GatewaySpec(tls_cert="/no/cert.pem", tls_key=__file__, upstreams=upstreams)
    assert [str(problem) for problem in preflight.gateway_problems(wanted)] == [
        "gateway.upstreams[0].key_env: NO_SUCH_KEY is not set",
        'gateway.tls_cert: cannot read "/no/cert.pem" (check the path)',
    ]
    spoilt = GatewaySpec(tls_cert=__file__, tls_key=__file__)
    assert "cannot use certificate" in str(preflight.gateway_problems(spoilt)[0])
    for log, is_fine in (("/no/access.log", False), ("/tmp", False), ("/tmp/access.log", True), ("stderr", True)):
        assert (preflight.gateway_problems(GatewaySpec(access_log=log)) == []) is is_fine
