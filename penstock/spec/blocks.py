"""The blocks of the deployment file that belong to one kind of target each: `ssh`, `ray`, `slurm`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# Blocks of targets that this version does not have: any field is taken.
UNTYPED = ("kubernetes", "cloudera", "vessl")
# Targets whose gateway runs on a machine that others may log in to: loopback keeps nobody out there.
SHARED = ("ssh", "slurm")


class Ssh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bare machines by OpenSSH. A replica takes `hardware.nodes` of the hosts, in their order.

    `hosts`: `user@host`, or names of ~/.ssh/config. `config`: another file in its place. `python`: the interpreter on
    the hosts; an engine that is installed there is used. `folder`: where penstock keeps its things on the hosts.
    """

    hosts: tuple[str, ...] = ()
    config: str | None = None
    python: str = "python3"
    folder: str = "~/.penstock"


class RayCluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Ray cluster that runs already. `address`: its Jobs API, http://host:8265.

    `runtime_env` is Ray's own. `python`: the interpreter on its machines that has penstock and the engine; Ray's own
    when absent.
    """

    address: str = "http://127.0.0.1:8265"
    python: str | None = None
    runtime_env: dict[str, Any] = {}


class Slurm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs of Slurm: one for each replica, of `hardware.nodes` nodes. Words are sbatch's own.

    `login`: the login node by ssh, when penstock does not run there itself; `ssh_config` in place of ~/.ssh/config.
    `directives`: further #SBATCH lines, as they follow `--`. `modules`, `conda`, `venv`: loaded in this order, then the
    lines of `prologue`. `container`: an Apptainer image that node and engine run in. `python`: the interpreter on the
    nodes that has penstock and the engine; that of the login node when absent. `successor_s`: so long before the time
    limit the next job is submitted; twice the time that a start took when absent. `gateway_partition`: for the
    gateway's job (gateway.on: job), which needs no GPU; without it that is `partition`, with `qos` and `directives`
    too. `controller: job` puts the controller into a job like the gateway's, so that nothing of the deployment stays on
    the login node.
    """

    login: str | None = None
    ssh_config: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    time: str | None = None
    exclusive: bool = False
    cpus_per_node: int | None = None
    memory: str | None = None
    nodelist: str | None = None
    directives: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    conda: str | None = None
    venv: str | None = None
    container: str | None = None
    prologue: tuple[str, ...] = ()
    python: str | None = None
    successor_s: float | None = None
    gateway_partition: str | None = None
    controller: Literal["login", "job"] = "login"
