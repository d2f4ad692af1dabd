"""The live page in a real Chromium, over a stream that the test writes. One browser for all tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import live_samples as samples
import msgspec
import pytest
from chat_page_driver import browser_fixture, violations  # noqa: F401
from chromium import WAIT_S
from launching import Place, ask
from page_server import PageServer, Script
from playwright.sync_api import Browser, Page, Request, expect

from penstock.cli import main
from penstock.cli.dashboard import address_of
from penstock.cli.keys import address_and_key
from penstock.wire.announcement import GpuReading, MachineReading, Progress
from penstock.wire.live import Event, KeyUse, ReplicaLive, SlowRequest, Snapshot

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

HOSTILE = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e{{script}}'
WIDE, PHONE = {"width": 1360, "height": 900}, {"width": 360, "height": 780}
Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a page; at the end of the test it has asked no other host and, without `may_complain`, logged nothing.

    With `has_clock` its time is what the test makes of it; `today`: what its calendar says (Unix seconds).
    """
    contexts, complaints, hosts, origins = [], list[str](), set[str](), set[str]()

    def note(request: Request) -> None:
        hosts.add(request.url.split("/")[2] if "//" in request.url else "")

    def open_page(
        url: str, *, may_complain: bool = False, has_clock: bool = False, today: float | None = None, **options: Any
    ) -> Page:
        context = browser.new_context(**{"viewport": WIDE, "timezone_id": "UTC", **options})
        context.set_default_timeout(1000 * WAIT_S)
        contexts.append(context)
        page = context.new_page()
        page.on("request", note)
        if not may_complain:
            page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        origins.update((url.split("/")[2], ""))
        if has_clock:
            page.clock.install()
        if today is not None:
            page.clock.set_fixed_time(today)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # Of a page that asks its server again, which has ended before the page was closed.
    assert [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text] == []
    assert hosts <= origins


def playing(*snapshots: Snapshot, with_history: bool = True) -> Script:
    def script() -> Iterator[Any]:
        if with_history:
            yield samples.history(snapshots[0].at)
        yield from snapshots

    return script


def test_page_draws_every_part(open_page: Open) -> None:
    with PageServer(playing(samples.snapshot(), samples.snapshot(samples.AT + 1)), prefix="/some/prefix") as server:
        page = open_page(server.url, today=samples.AT)  # events of another day show their date
        expect(page.locator("h1")).to_have_text("qwen3-235b")
        expect(page.locator("#clock")).to_have_text("22:00:01")
        expect(page).to_have_title("qwen3-235b 3/4 ready")
        expect(page.locator(".tile")).to_have_count(11)
        expect(page.locator(".chart canvas")).to_have_count(3)
        loading = page.locator("#replicas tr").nth(3)
        expect(loading).to_contain_text("loading weights, 3 of 30 shards, 2.4 GB/s, 1m48s left")
        expect(loading).to_contain_text("the engine died: CUDA out of memory")
        expect(page.locator(".gpu")).to_have_count(24)
        expect(page.locator("#machines")).to_contain_text("throttled: sw thermal slowdown")
        expect(page.locator("#machines")).to_contain_text("XID 94")
        expect(page.locator("#slo")).to_contain_text("First token within 1.00\u00a0s99.34% of requests")
        expect(page.locator("#cost")).to_contain_text("$2.31")
        expect(page.locator("#slow tr").first).to_contain_text("held 9.10 s · first byte 900 ms · answer 14.8 s")
        expect(page.locator("#keys tr").first).to_contain_text("$6,402.18")
        expect(page.locator("#events li").first).to_have_text(
            re.compile("^21:53:20engine restartedreplica 3: the engine died")
        )
        expect(page.locator(".plot").first).to_have_attribute("aria-label", re.compile("Tokens, last hour: output now"))
        expect(page.locator(".tile svg").first).to_have_attribute("aria-label", re.compile("Requests: now .*/s, least"))
        assert violations(page) == []
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        assert violations(page) == []


@pytest.mark.nightly
def test_what_was_not_measured_is_left_out(open_page: Open) -> None:
    now = msgspec.structs.replace(
        samples.rates(samples.AT), gpu_use=None, power_watts=None, ttft_s_p50=None, ttft_s_p99=None
    )
    bare = Snapshot("demo", samples.AT, "0.1.0", now, replicas=(ReplicaLive("0", "demo", "queued"),))
    with PageServer(playing(bare, with_history=False)) as server:
        page = open_page(server.url)
        expect(page.locator(".tile")).to_have_count(8)
        expect(page.locator(".chart h3")).to_have_text(["Tokens/s", "Requests"])
        expect(page.locator("#replicas td").nth(4)).to_have_text("-")
        for section in ("slo", "cost", "machines", "slow", "keys", "events"):
            expect(page.locator(f"#{section}-section")).to_be_hidden()


@pytest.mark.nightly
def test_hostile_names_and_reasons_stay_text(open_page: Open) -> None:
    gpu, bad = GpuReading(0, HOSTILE, HOSTILE, throttle=(HOSTILE,)), HOSTILE
    odd = ReplicaLive("__proto__", "constructor", "toString", machines=(MachineReading(HOSTILE, gpus=(gpu,)),))
    request = SlowRequest(samples.AT, bad, bad, bad, bad, bad, 200, 1.0, 0.5, 0.1, None, None, trace_id=bad)
    snapshot = msgspec.structs.replace(
        samples.snapshot(),
        **dict.fromkeys(("deployment", "version", "phase", "reason"), HOSTILE),
        replicas=(ReplicaLive(bad, bad, bad, bad, bad, bad, Progress(bad, 1, 2)), odd),
        keys=(KeyUse(bad, bad, 1, 1, 1),),
        slow=(request, request),
        events=(Event(samples.AT, bad, "text", bad, bad, {bad: 1.0, "__proto__": 2.0}),),
    )
    with PageServer(playing(snapshot)) as server:
        page = open_page(server.url, viewport=PHONE)
        expect(page.locator("h1")).to_have_text(HOSTILE)
        expect(page.locator("#replicas b").last).to_contain_text(HOSTILE)
        expect(page.locator("#slow tr")).to_have_count(2)
        expect(page.locator("#machines summary")).to_contain_text(HOSTILE)
        expect(page.locator("#events small")).to_contain_text(HOSTILE)
        assert page.evaluate("[window.hacked ?? null, document.images.length, document.scripts.length]") == [None, 0, 1]
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.nightly
def test_key_is_asked_for_kept_in_the_tab_and_not_in_the_address(open_page: Open) -> None:
    with PageServer(playing(samples.snapshot()), key="right") as server:
        page = open_page(server.url, may_complain=True)  # Chromium logs each 401
        expect(page.get_by_label("Scrape key")).to_be_focused()
        assert violations(page) == []
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-problem")).to_have_text("The gateway refused this key.")
        page.get_by_label("Scrape key").fill("right")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("h1")).to_have_text("qwen3-235b")
        expect(page.locator("#key-form")).to_be_hidden()
        page.reload()
        expect(page.locator("h1")).to_have_text("qwen3-235b")
        other = open_page(f"{server.url}#key=right")
        expect(other.locator("h1")).to_have_text("qwen3-235b")
        assert other.url == server.url
        other.get_by_role("link", name="Metrics").click()
        expect(other.locator("#metrics-text")).to_have_text("penstock_replicas_ready 3\n")


@pytest.mark.nightly
def test_hidden_page_closes_its_stream(open_page: Open) -> None:
    with PageServer(playing(samples.snapshot())) as server:
        page = open_page(server.url)
        expect(page.locator("#link-text")).to_have_text("live")
        # Playwright emulates the focus of every page, so a second tab in front of it hides none.
        turn = """hidden => {
          Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.evaluate(turn, True)
        server.wait_for_streams(0)
        page.evaluate(turn, False)
        server.wait_for_streams(1)
        assert server.n_asked == 2


@pytest.mark.nightly
def test_lost_connection_is_said_and_tried_again(open_page: Open) -> None:
    with PageServer(playing(samples.snapshot())) as server:
        page = open_page(server.url, may_complain=True, has_clock=True)
        expect(page.locator("#link-text")).to_have_text("live")
        expect(page.locator("#replicas tr")).to_have_count(4)
        # From here on time stands still, so that no try comes before the test looks; 15 s of silence end a stream.
        page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 10)
        server.is_down = True
        server.end_streams()
        expect(page.locator("#link-text")).to_have_text("connection lost, trying again in 1 s")
        expect(page.locator("#said")).to_have_text("Connection lost, trying again.")
        expect(page.locator("#replicas tr")).to_have_count(4)  # the last numbers stay
        page.clock.fast_forward(1100)
        expect(page.locator("#link-text")).to_have_text("the gateway answered 503, trying again in 2 s")
        server.is_down = False
        page.clock.fast_forward(2100)
        expect(page.locator("#link-text")).to_have_text("live")
        expect(page.locator("#said")).to_have_text("Connected again.")


@pytest.mark.nightly
def test_proxy_that_holds_streams_back_is_polled(open_page: Open) -> None:
    with PageServer(playing(samples.snapshot())) as server:
        server.holds_streams = True
        page = open_page(server.url, has_clock=True)
        server.wait_for_streams(1)
        page.clock.fast_forward(8100)
        expect(page.locator("#link-text")).to_contain_text("trying again")
        page.clock.fast_forward(1100)
        expect(page.locator("h1")).to_have_text("qwen3-235b")
        assert server.n_asked == 1


@pytest.mark.nightly
def test_many_replicas_are_sorted_and_filtered_by_keyboard(open_page: Open) -> None:
    with PageServer(playing(samples.many())) as server:
        page = open_page(server.url)
        rows = page.locator("#replicas tr")
        expect(rows).to_have_count(24)
        expect(page.locator("#states")).to_have_text("20 ready1 stalled1 restarting1 queued1 stopping")
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the numbers")).to_be_focused()
        page.get_by_role("button", name="KV cache").press("Enter")
        expect(page.locator("th[aria-sort=descending]")).to_have_text("KV cache")
        shares = [
            int(text.removesuffix("%")) for text in page.locator("#replicas .gauge .number").all_inner_texts()[:20]
        ]
        assert shares == sorted(shares, reverse=True)
        page.keyboard.press("/")
        page.keyboard.type("GPU-03 draining")
        expect(rows).to_have_count(1)
        expect(page.locator("#replicas-count")).to_have_text("1 of 24")
        page.keyboard.press("Tab")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="What is on this page")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()


@pytest.mark.nightly
def test_phone_shows_all_without_scrolling_sideways(open_page: Open) -> None:
    with PageServer(playing(samples.many(n=12))) as server:
        page = open_page(server.url, viewport=PHONE, has_touch=True, is_mobile=True)
        expect(page.locator("#replicas tr")).to_have_count(12)
        page.locator("summary").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert violations(page) == []


@pytest.mark.nightly
def test_a_day_of_snapshots_takes_the_memory_of_an_hour(open_page: Open) -> None:
    n, step_s = 2000, 40.0

    def script() -> Iterator[Any]:
        yield samples.history()
        for i in range(n):
            at = samples.AT + step_s * i
            replicas = (ReplicaLive(f"r{i}", "demo", "ready", machines=(MachineReading(f"host{i}"),)),)
            event = Event(at, "ready", f"replica r{i}")
            yield Snapshot("demo", at, "0.1.0", samples.rates(at), replicas=replicas, events=(event,) * (i % 300))

    with PageServer(script) as server:
        page = open_page(server.url)
        expect(page.locator("#replicas b")).to_have_text(f"r{n - 1}")
        kept = page.evaluate("[hour.rows.length, network.size, $('replicas').kept.size]")
        assert kept == [91, 1, 1]
        assert page.evaluate("seenStates.size") <= 3
        assert page.evaluate("document.querySelectorAll('#events li').length") == 199
        assert page.evaluate("document.querySelectorAll('*').length") < 1800
        devtools = page.context.new_cdp_session(page)
        devtools.send("HeapProfiler.collectGarbage")
        usage = devtools.send("Runtime.getHeapUsage")
        assert usage["usedSize"] < 12e6, usage


def test_page_of_a_real_deployment(place: Place, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    file = place.write(gateway={"auth": "keys"}, workload={"ttft_ms": 500}, replicas=2)
    run = place.up(file)
    page = open_page(address_of(run).url, may_complain=True)  # Chromium logs the 401
    expect(page.get_by_label("Scrape key")).to_be_visible()
    monkeypatch.setattr("webbrowser.open", lambda uri: page.goto(uri) is not None or True)
    monkeypatch.setenv("DISPLAY", ":0")
    assert main.run(["dashboard"]) == 0
    expect(page.locator("h1")).to_have_text("one")
    assert page.url == address_of(run).url
    expect(page.locator("#ready")).to_have_text("2 of 2 ready")
    _, key = address_and_key(run)
    ask(run, 64, key=key)
    # "now" is over again after 5 s, which a busy machine may not look at.
    expect(page.locator(".tile svg").first).to_have_attribute("aria-label", re.compile("Requests: .*most [0.]*[1-9]"))
    expect(page.locator("#slo")).to_contain_text("First token within 500\u00a0ms")
    expect(page.locator("#phase")).to_have_text("ready")
    expect(page.locator("#events li").last).to_contain_text("penstock-demo")
    expect(page.locator("#replicas tr")).to_have_count(2)
    page.get_by_role("link", name="Metrics").click()
    expect(page.locator("#metrics-text")).to_contain_text("penstock_replicas_ready")
