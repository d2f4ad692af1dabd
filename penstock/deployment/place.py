"""Place the units of a run whose folder is written, and start its controller, with the sockets of its gateway."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock import processes, targets
from penstock.errors import PenstockError, UserError
from penstock.gateway.config import Address
from penstock.gateway.connections.listener import open_socket
from penstock.run_folder import Run, Unit
from penstock.targets import Target

_RETRY_S = 0.005


def bind(host: str, port: int = 0) -> socket.socket:
    """The admin socket of a gateway that starts later: until it listens, others of ours may bind the port too."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.bind((host, port))
    return sock


@contextlib.contextmanager
def sockets(end: Callable[[], object], addresses: tuple[Address, Address] | None) -> Iterator[list[socket.socket]]:
    """`end` ends a run; the public and the admin socket of its successor, unless its target places the gateway.

    The public one listens from the moment on in which the gateway before it does not: clients wait.
    """
    if addresses is None:
        end()
        yield []
        return
    is_over = threading.Event()

    def listen() -> socket.socket:
        while not is_over.is_set():
            with contextlib.suppress(UserError):
                return open_socket(addresses[0])
            is_over.wait(_RETRY_S)
        return open_socket(addresses[0])

    with bind(*addresses[1]) as admin, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen)
        try:
            end()
        finally:
            is_over.set()
        with listening.result() as public:
            yield [public, admin]


def launch(run: Run, held: Sequence[socket.socket], is_again: bool = False) -> None:
    """Place its units and start its controller; `held`: from `sockets`.  Raises PenstockError when not all could be
    placed, unless it `is_again`: what could be once can be later, and its controller tries on."""
    try:
        place_units(run, targets.load(run.record().target))
    except PenstockError as error:
        if not is_again or run.places("controller"):
            raise
        run.add_event("placing failed", error.message)
    if not run.places("controller"):
        start_controller(run, held)


def place_units(run: Run, target: Target) -> None:
    """Place every unit of a new run.  Raises PenstockError when not all could be."""
    units = {Unit("replica", str(number)) for number in range(run.desired().replicas)}
    units |= {Unit(kind, "0") for kind in run.record().placed if kind != "replica"}
    run.write_handle(target.place(run, units))
    if run.handle().units.keys() != {unit.key for unit in units}:
        run.write_handle(target.place(run, units))  # raises what kept it from placing the others


def start_controller(run: Run, sockets: Sequence[socket.socket] = ()) -> None:
    """Start the controller of a run, detached. A second one leaves at once. `sockets` are for its gateway."""
    marks = processes.marks(str(run.path), run.record().id, "controller")
    files = [sock.fileno() for sock in sockets]
    argv = [sys.executable, "-m", "penstock.deployment.controller", str(run.path)]
    argv += ["--sockets", ",".join(map(str, files))] if files else []
    processes.start_detached(argv, marks, run.log("controller"), files=files)
