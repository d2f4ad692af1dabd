"""A fake VESSL, a home of penstock's own that is configured for it, and deployment files for one of its presets."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Place, a_place, call
from waiting import until

from penstock.run_folder import Run, find
from penstock.targets import load, waiting
from penstock.targets.vessl import runs, services
from penstock.testing.fake_vessl.account import CLUSTER
from penstock.testing.fake_vessl.server import FakeVessl

PAIRS = (5_500, 7_500)  # halves of ports


class Rented:
    """`place` is the machine of the verbs, `vessl` the rented place."""

    def __init__(self, place: Place, vessl: FakeVessl) -> None:
        self.place, self.vessl, self.world = place, vessl, vessl.world

    def write(self, name: str = "one", vessl: dict[str, Any] | None = None, **fields: Any) -> Path:
        block = {"cluster": CLUSTER, "preset": "cpu-medium", "image": "penstock/fake:1", **(vessl or {})}
        gateway = {"port": two_ports(), "auth": "keys", **fields.pop("gateway", {})}
        return self.place.write(name, target="vessl", vessl=block, gateway=gateway, **fields)

    def leftovers(self) -> list[str]:
        """What VESSL still has of it, and what still runs of a container."""
        runs = [f"run {run.id} is {run.status}" for run in self.world.living]
        runs += [f"service {name}" for name in self.world.services]
        containers = [*self.world.runs.values(), *self.world.workers]
        pids = [f"process {pid} of {each.folder.name}" for each in containers for pid in each.processes()]
        secrets = [f"secret {name}" for name in self.world.secrets if name.startswith("penstock-")]
        return [*runs, *pids, *secrets]


def two_ports() -> int:
    """A free port, after which the next is free too: the control port's. The kernel gives neither to a connection of
    another test: both are below those (net.ipv4.ip_local_port_range)."""
    while True:
        port = 2 * random.randrange(*PAIRS)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("0.0.0.0", port))
            second.bind(("0.0.0.0", port + 1))
            return port


@contextlib.contextmanager
def rented(folder: Path) -> Iterator[Rented]:
    """All that was started there is gone at the end."""
    with pytest.MonkeyPatch.context() as patch, FakeVessl(folder / "vessl") as vessl:
        for name, value in vessl.variables.items():
            patch.setenv(name, value)
        for life in (runs, services):
            patch.setattr(life, "_FRESH_S", 0.2)
        patch.setattr(waiting, "LOOK_S", 0.1)
        load.cache_clear()  # it remembers where it looked
        with a_place(folder) as place:
            ours = Rented(place, vessl)
            yield ours
        until(lambda: not ours.leftovers(), f"nothing is left: {ours.leftovers()}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Rented]:
    with rented(tmp_path) as ours:
        yield ours


def up(file: Path) -> tuple[Run, str]:
    """The run and the client's key."""
    done = call("up", file, "--json")
    assert done.code == 0, done
    return find(done.events[0]["name"]), next(str(event["key"]) for event in done.events if event.get("key"))
