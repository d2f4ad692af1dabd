"""`up --replace` with real processes and the fake engine: what served is back whatever becomes of its successor."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launching import PROMPT, Place, ask, call, engine_pid, interrupt, kill, now, started
from waiting import left_s, until

from penstock import processes
from penstock.errors import PenstockError
from penstock.hardware.network import free_port
from penstock.run_folder import Run
from penstock.testing.fake_engine.requests import expected_text
from penstock.wire.client import Client

pytestmark = pytest.mark.processes

BROKEN = {"crash-at-start": "ValueError: this model does not load"}


class Service:
    """A deployment that serves with keys, and the file of its successor."""

    def __init__(self, place: Place) -> None:
        self.place, self.gateway = place, {"port": free_port("127.0.0.1"), "auth": "keys", "hold_s": 3}
        done = call("up", place.write("one", gateway=self.gateway), "--json")
        assert done.code == 0, done
        self.key, self.run = done.events[0]["key"], place.run("one")
        self.launch = self.run.launch

    def successor(self, **args: object) -> object:
        return self.place.write("one", args={"load-s": 1, **args}, gateway=self.gateway)

    def check_is_back(self) -> None:
        until(lambda: self.run.launch == self.launch and now(self.run).phase == "ready", "the former one serves")
        self.place.note(self.run)
        ask(self.run, key=self.key)
        assert not self.run.previous_folder.exists()
        assert "does not load" in (self.run.failed_folder / "logs" / "replica-0.log").read_text("utf-8")


@pytest.fixture
def service(place: Place) -> Service:
    return Service(place)


@contextmanager
def clients(run: Run, key: str) -> Iterator[Counter[str]]:
    """Six that ask one after the other: how many were answered right, and the errors."""
    outcomes, is_over = Counter[str](), threading.Event()
    client = Client(run.url, api_key=key, timeout_s=left_s())

    def ask_on() -> None:
        while not is_over.is_set():
            try:
                reply = client.chat([{"role": "user", "content": PROMPT}], max_tokens=4)
                outcomes["whole" if reply.text == expected_text(PROMPT, 4) else reply.text] += 1
            except PenstockError as error:
                outcomes[error.message] += 1

    threads = [threading.Thread(target=ask_on, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        is_over.set()
        for thread in threads:
            thread.join(left_s())


def test_a_successor_that_loads_longer_than_hold_s_loses_no_request_and_no_key(service: Service) -> None:
    with clients(service.run, service.key) as outcomes:
        done = call("up", service.successor(**{"load-s": 6, "reply-tokens": 5}), "--replace", "--json")
        assert done.code == 0 and done.events[0]["key"] is None, "the clients' key is still good"
        n_before = outcomes["whole"]
        until(lambda: outcomes["whole"] > n_before + 10, "the new one answers")
    assert set(outcomes) == {"whole"}
    new = service.place.run("one")
    assert new.launch != service.launch and not new.previous_folder.exists()
    assert {process.run_id for process in processes.find_marked(str(new.path))} == {new.launch}
    ask(new, 5, service.key)


def test_what_served_is_back_when_its_successor_does_not_start(service: Service) -> None:
    with clients(service.run, service.key) as outcomes:
        done = call("up", service.successor(**BROKEN), "--replace")
        assert done.code == 1 and "this model does not load" in done.err and "is started again" in done.err, done.err
        service.check_is_back()
        n_before = outcomes["whole"]
        until(lambda: outcomes["whole"] > n_before + 10, "the former one answers")
    assert sum(outcomes.values()) - outcomes["whole"] <= 6, "those that the failed one held"
    assert not [why for why in outcomes if why != "whole" and "503" not in why], outcomes


def test_it_is_back_also_when_nobody_waits(service: Service) -> None:
    call("up", service.successor(**BROKEN), "--replace", "--no-wait")  # 1 where it sees the failure, before it listens
    service.check_is_back()
    with started("up", service.successor(**BROKEN), "--replace") as child:
        until(lambda: service.run.launch not in (service.launch, None), "the successor is written")
        until(lambda: service.run.state() is not None, "its controller runs")
        kill(child.pid)
    service.check_is_back()


def test_it_is_back_after_ctrl_c(service: Service) -> None:
    file = service.successor(**{"load-s": 3600})
    done = interrupt("up", file, "--replace", when=lambda: service.run.launch not in (service.launch, None))
    assert done.code == 130 and "as it ran before" in done.err, done
    until(lambda: now(service.run).phase == "ready", "the former one serves")
    assert service.run.launch == service.launch
    ask(service.run, key=service.key)


@pytest.mark.vllm
def test_what_can_be_known_before_ends_nothing(place: Place) -> None:
    run = place.up(place.write("one"))
    before = engine_pid(run)
    for setting, why in (
        ("engine.args.dtype=float99", "invalid choice: 'float99'"),
        ("engine.args.no-such-flag=3", "unrecognized arguments: --no-such-flag"),
        ("gateway.store=postgresql://127.0.0.1:1/none", "gateway.store: could not use store"),
    ):
        done = call("up", "--name", "one", "--engine", "vllm", "--replace", "--set", setting)
        assert done.code == 2 and why in done.err, done
    assert engine_pid(run) == before
