"""A real engine and a real chat page in the pods of the fake workbench."""

from __future__ import annotations

import http.client

import pytest
from cloudera_rig import SUBDOMAINS, file_for
from launching import Place, call, now, started, wait_ready
from waiting import until

from penstock.testing.demo_prompts import DEMO_PROMPTS
from penstock.testing.fake_workbench.server import Workbench
from penstock.wire.client import Client

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


@pytest.mark.nightly
@pytest.mark.llamacpp
def test_the_bundled_model_answers_from_a_pod(place: Place, workbench: Workbench) -> None:
    """By the real engine; penstock's code and the model come by the API's files."""
    file = file_for(place, workbench, engine={"kind": "llamacpp"}, cloudera={"public": True})
    done = call("up", file, "--json")
    assert done.code == 0, done
    run = place.run()
    wait_ready(run)
    assert run.url == f"http://{SUBDOMAINS[0]}.{workbench.domain}", "clients need no login of the workbench"
    row = next(row for row in DEMO_PROMPTS if row.kind == "chat")
    done = call("chat", "one", "-m", row.prompt, "--max-tokens", 12, "--temperature", 0)
    assert done.code == 0 and done.out.strip(), done
    assert call("down", "one").code == 0


@pytest.mark.nightly
def test_the_chat_page_is_an_application(place: Place, workbench: Workbench) -> None:
    done = call("up", file_for(place, workbench, ui=True), "--json")
    assert done.code == 0, done
    run = place.run()
    wait_ready(run)
    pages = [row for row in workbench.workloads.applications.values() if row.record["name"].endswith("-ui")]
    assert [row.record["subdomain"] for row in pages] == [SUBDOMAINS[1]]
    until(lambda: pages[0].status == "RUNNING", "the workbench shows the page as running")

    def state() -> str | None:
        part = now(run).ui
        return None if part is None else part.state

    until(lambda: state() == "running", "the page's part is running")
    assert _get(workbench, SUBDOMAINS[1], key=None) == 302, "without a key the workbench asks for a login"
    assert _get(workbench, SUBDOMAINS[1], key=workbench.key) == 200
    assert call("down", "one").code == 0


def _get(workbench: Workbench, subdomain: str, key: str | None, path: str = "/health") -> int:
    host, _, port = workbench.domain.partition(":")
    connection = http.client.HTTPConnection(f"{subdomain}.{host}", int(port), timeout=20.0)
    headers = {"host": f"{subdomain}.{workbench.domain}", **({"authorization": f"Bearer {key}"} if key else {})}
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.nightly
def test_the_live_page_is_at_the_application_and_through_a_relay(place: Place, workbench: Workbench) -> None:
    """The application serves it: a browser that is logged in to the workbench, or `penstock dashboard` here."""
    assert call("up", file_for(place, workbench), "--json").code == 0
    run = place.run()
    wait_ready(run)
    assert _get(workbench, SUBDOMAINS[0], key=workbench.key, path="/dashboard") == 200
    with started("dashboard", "one", "--no-open") as child:
        assert child.stdout is not None
        url, _, key = child.stdout.readline().strip().partition("#key=")
        page = Client(url.removesuffix("/dashboard"), timeout_s=20.0)
        assert b"<html" in page.send("GET", "/dashboard")
        live = Client(url.removesuffix("/dashboard"), key, timeout_s=20.0)
        assert next(iter(live.get_events("/dashboard/live")))
    assert call("down", "one").code == 0
