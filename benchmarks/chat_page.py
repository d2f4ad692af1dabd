"""What the chat page costs: `python benchmarks/chat_page.py [load] [users] [long]`; without words, all three.

load: seconds until the page can be used, in Chromium with an empty cache, once its process is up.
users: 100 people at once through one page process. A browser asks one question; its requests are replayed for each of
    them with a session of their own, by a client that costs little.
long: an answer of 30,000 tokens in Chromium, plain and as heavy Markdown, next to a short one: gaps in the browser's
    event loop (a click waits that long) and CPU.

Gateway and page are processes; the engine streams one event a token, from the benchmark's own process.
Exit codes: 0 every bar holds, 1 one does not (with --check; else always 0).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from gateway import free_port, running
from gateway_load import cpu_s, process_tree, rss_mb
from playwright.sync_api import Browser, Page, sync_playwright

from penstock.chat.page.config import PageConfig

USABLE_S_MAX = 1.5
USERS_GAP_S_MAX = 1.0
LONG_GAP_MS_MAX = 500.0
TRIES = 7
MESSAGE = "#penstock-message textarea"
WIDE = {"width": 1280, "height": 800}

CODE = "".join(f"    total += weights[{i}] * inputs[{i}]  # term {i}\n" for i in range(16))
ROWS = "".join(f"| layer {i} | {i * 128} | ${i}.50 | `f{i}()` |\n" for i in range(10))
SECTION = (
    "## A section with *all* kinds\n\nSome **bold** words, a [link](https://example.com/a), `code`, and $e^{i\\pi}"
    f"+1=0$ inside a sentence that is long enough to wrap.\n\n```python\ndef forward(weights, inputs):\n{CODE}```\n\n"
    f"| name | size | price | call |\n|---|---:|---:|---|\n{ROWS}\n"
    "$$\\int_0^1 \\frac{x^2}{1+x}\\,dx = \\sum_{k=0}^\\infty a_k$$\n\n1. one\n2. two\n   - inner\n\n"
)
PLAIN = "The quick brown fox jumps over the lazy dog, again and again, until the evening comes.\n\n"
CHARS_PER_TOKEN = 4


@dataclass
class StreamEngine:
    """An engine in a thread. The question "TOKENS RATE KIND" says what it streams. `most_open`: streams at once."""

    n_open: int = 0
    most_open: int = 0
    port: int = 0
    n_cut: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=uvloop.new_event_loop)

    def start(self) -> None:
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        started = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        server = asyncio.run_coroutine_threadsafe(started, self._loop).result(5)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"content-length:" not in head:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = json.loads(await reader.readexactly(size))
                content = body["messages"][-1]["content"]
                question = content if isinstance(content, str) else content[0]["text"]
                await self._stream(question, writer)

    async def _stream(self, question: str, writer: asyncio.StreamWriter) -> None:
        n_tokens, rate, kind = question.split()
        text = SECTION if kind == "heavy" else PLAIN
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            begun, n_sent = time.monotonic(), 0
            while n_sent < int(n_tokens):
                due = min(int(n_tokens), 1 + int((time.monotonic() - begun) * float(rate)))
                writer.write(b"".join(_event(_token(text, i)) for i in range(n_sent, due)))
                n_sent = due
                await writer.drain()
                # At least a tick: pace, not bursts, is what an engine does.
                await asyncio.sleep(max(0.005, (n_sent + 1) / float(rate) - (time.monotonic() - begun)))
            writer.write(_event("", '"stop"') + _usage(n_sent) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()
        except OSError:
            self.n_cut += 1
            raise
        finally:
            self.n_open -= 1


def _token(text: str, i: int) -> str:
    start = i * CHARS_PER_TOKEN % len(text)
    return text[start : start + CHARS_PER_TOKEN] + text[: max(0, start + CHARS_PER_TOKEN - len(text))]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(text: str, finish: str = "null") -> bytes:
    choice = f'{{"index":0,"delta":{{"content":{json.dumps(text)}}},"logprobs":null,"finish_reason":{finish}}}'
    head = 'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m"'
    return _chunk(f'{head},"choices":[{choice}]}}\n\n'.encode())


def _usage(n_tokens: int) -> bytes:
    usage = f'{{"prompt_tokens":12,"completion_tokens":{n_tokens},"total_tokens":{n_tokens + 12}}}'
    return _chunk(f'data: {{"id":"chatcmpl-1","model":"m","choices":[],"usage":{usage}}}\n\n'.encode())


@dataclass
class Bench:
    """`url` and `pid` of the page. `misses`: bars that do not hold."""

    engine: StreamEngine
    browser: Browser
    url: str
    pid: int
    gateway_pid: int
    misses: list[str] = field(default_factory=list)

    def open(self) -> Page:
        page = self.browser.new_context(viewport=WIDE).new_page()
        page.goto(self.url)
        page.locator(MESSAGE).wait_for()
        return page

    def bar(self, what: str, value: float, most: float) -> None:
        if value > most:
            self.misses.append(f"{what}: {value:.3g}, allowed {most:.3g}")


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = StreamEngine()
        engine.start()
        gateway_port, port = free_port(), free_port()
        argv = [sys.executable, "-m", "penstock", "gateway", "--listen", f"127.0.0.1:{gateway_port}"]
        argv += ["--upstream", f"m=http://127.0.0.1:{engine.port}"]
        gateway_pid = stack.enter_context(running(argv, gateway_port, folder))
        private = folder / "page"
        private.mkdir(mode=0o700)
        config = PageConfig(f"http://127.0.0.1:{gateway_port}", "127.0.0.1", port, str(private), has_login=False)
        path = folder / "ui.json"
        path.write_bytes(msgspec.json.encode(config))
        begun = time.monotonic()
        pid = stack.enter_context(running([sys.executable, "-m", "penstock.chat.page", str(path)], port, folder))
        while not _is_up(f"http://127.0.0.1:{port}/health"):  # it takes the port first
            time.sleep(0.05)
        print(f"process up after {time.monotonic() - begun:.1f} s, {cpu_s(pid):.1f} s of CPU, {rss_mb(pid):.0f} MB")
        playwright = stack.enter_context(sync_playwright())
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--lang=en"]
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        stack.callback(browser.close)
        yield Bench(engine, browser, f"http://127.0.0.1:{port}/", pid, gateway_pid)


def _is_up(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(url, timeout=60).status == 200)
    return False


def measure_load(bench: Bench, options: argparse.Namespace) -> None:
    seconds, sizes = [], []
    for _ in range(options.tries):
        page = bench.browser.new_context(viewport=WIDE).new_page()
        begun = time.monotonic()
        page.goto(bench.url, wait_until="commit")
        page.locator(MESSAGE).wait_for()
        seconds.append(time.monotonic() - begun)
        sizes.append(page.evaluate("performance.getEntriesByType('resource').length"))
        page.context.close()
    median, worst = statistics.median(seconds), max(seconds)
    shown = " ".join(f"{value:.2f}" for value in seconds)
    print(f"load: usable after median {median:.2f} s, worst {worst:.2f} s ({shown}), {max(sizes)} requests")
    bench.bar("load, median seconds", median, USABLE_S_MAX)


def measure_users(bench: Bench, options: argparse.Namespace) -> None:
    question = f"{options.seconds * options.rate} {options.rate} plain"
    joins = _recorded(bench, question)
    before, gateway_before, begun = cpu_s(bench.pid), cpu_s(bench.gateway_pid), time.monotonic()
    bench.engine.most_open = 0
    with ThreadPoolExecutor(1) as thread:  # Playwright has an event loop in this one
        users = thread.submit(uvloop.run, _all_users(bench, joins, options.users)).result()
    wall_s = time.monotonic() - begun
    gaps = sorted(gap for user in users for gap in user.gaps)
    firsts = sorted(user.first_s for user in users if user.first_s is not None)
    n_lost = sum(not user.is_whole for user in users)
    share = (cpu_s(bench.pid) - before) / wall_s
    gateway = (cpu_s(bench.gateway_pid) - gateway_before) / wall_s
    if not gaps:
        bench.misses.append("users: no updates")
        return
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    print(
        f"users: {options.users} at once at {options.rate} tokens/s for {wall_s:.1f} s: {bench.engine.most_open} open "
        f"at the engine, {n_lost} lost; gap between updates p50 {p50:.3f} p99 {p99:.3f} max {gaps[-1]:.3f} s; first "
        f"text p50 {firsts[len(firsts) // 2]:.2f} max {firsts[-1]:.2f} s; {len(gaps) / wall_s / options.users:.1f} "
        f"updates/s each; page {share:.2f} of a core, {rss_mb(bench.pid):.0f} MB; gateway {gateway:.2f} of a core"
    )
    bench.bar("users, lost", n_lost, 0)
    bench.bar("users, not at once", options.users - bench.engine.most_open, 0)
    bench.bar("users, p99 gap in seconds", p99, USERS_GAP_S_MAX)


def _recorded(bench: Bench, question: str) -> list[dict[str, Any]]:
    """What a browser posts to Gradio's queue from Enter to the end of the answer."""
    page, joins = bench.open(), list[dict[str, Any]]()
    page.wait_for_timeout(1500)  # what the page asks for itself when it opens
    page.on("request", lambda request: joins.append(request.post_data_json) if "queue/join" in request.url else None)
    page.locator(MESSAGE).fill(question)
    page.keyboard.press("Enter")
    while not bench.engine.n_open:
        page.wait_for_timeout(50)
    page.wait_for_timeout(200)
    page.context.close()
    end = time.monotonic() + 5
    while bench.engine.n_open and time.monotonic() < end:
        time.sleep(0.05)
    if bench.engine.n_open:
        bench.misses.append("users: a closed tab did not end its stream at the engine")
    return joins


@dataclass
class User:
    gaps: list[float] = field(default_factory=list)
    first_s: float | None = None
    is_whole: bool = False


async def _all_users(bench: Bench, joins: list[dict[str, Any]], n_users: int) -> list[User]:
    port = int(bench.url.rsplit(":", 1)[1].strip("/"))
    return list(await asyncio.gather(*(_user(port, joins, f"user{i}-{time.time_ns()}") for i in range(n_users))))


async def _user(port: int, joins: list[dict[str, Any]], session: str) -> User:
    """One person's streams: posts what the browser posted, reads the events until the session's stream closes."""
    user, begun = User(), time.monotonic()
    for join in joins:
        await _post(port, "/gradio_api/queue/join", json.dumps(join | {"session_hash": session}).encode())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    path = f"/gradio_api/queue/data?session_hash={session}"
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n\r\n".encode())
    last_at, tail, failed = None, b"", False
    with contextlib.closing(writer):
        while data := await reader.read(1 << 18):
            now = time.monotonic()
            both, tail = tail + data, data[-19:]  # shorter than the mark: none is counted twice
            failed = failed or b'"success":false' in both
            if b'"process_generating"' in both:
                if last_at is None:
                    user.first_s = now - begun
                else:
                    user.gaps.append(now - last_at)
                last_at = now
            if b'"close_stream"' in both:
                user.is_whole = not failed and last_at is not None
                break
    return user


async def _post(port: int, path: str, body: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    with contextlib.closing(writer):
        answer = await reader.read()
        if not answer.startswith(b"HTTP/1.1 200"):
            sys.exit(f"{path} answered {answer[:300]!r}")


# A gap is how late a timer of 5 ms came: a click would have waited as long.
GAPS_JS = """() => {
  window.gaps = [];
  let last = performance.now();
  const tick = () => { const now = performance.now(); window.gaps.push(now - last); last = now; setTimeout(tick, 5); };
  tick();
}"""


def measure_long(bench: Bench, options: argparse.Namespace) -> None:
    for kind, n_tokens in (("plain", 500), ("plain", options.tokens), ("heavy", 500), ("heavy", options.tokens)):
        page = bench.open()
        page.evaluate(GAPS_JS)
        before, page_before, begun = _chromium_cpu_s(), cpu_s(bench.pid), time.monotonic()
        page.locator(MESSAGE).fill(f"{n_tokens} {options.long_rate} {kind}")
        page.keyboard.press("Enter")
        page.locator(".penstock-figures").wait_for(timeout=240_000)
        wall_s = time.monotonic() - begun
        gaps = sorted(page.evaluate("window.gaps"))
        spent_s, page_s = _chromium_cpu_s() - before, cpu_s(bench.pid) - page_before
        p99, longest = gaps[int(len(gaps) * 0.99)], gaps[-1]
        blocked = sum(gap for gap in gaps if gap > 100) / 1000 / wall_s
        print(
            f"long: {kind} {n_tokens} tokens in {wall_s:.1f} s (engine {n_tokens / options.long_rate:.1f}): gaps p99 "
            f"{p99:.0f} ms, longest {longest:.0f} ms, {blocked:.0%} of the time in gaps over 100 ms; CPU of Chromium "
            f"{spent_s:.1f} s, of the page's process {page_s:.1f} s"
        )
        bench.bar(f"long {kind} {n_tokens}, longest gap in ms", longest, LONG_GAP_MS_MAX)
        if options.pictures:
            page.screenshot(path=f"{options.pictures}/{kind}-{n_tokens}.png")
        page.context.close()


def _chromium_cpu_s() -> float:
    """CPU of the browser that this process started, children that ended left out."""
    total = 0.0
    for pid in process_tree(os.getpid()):
        with contextlib.suppress(OSError):
            if "chrom" in Path(f"/proc/{pid}/comm").read_text():
                ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
                total += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return total


MEASURES = {"load": measure_load, "users": measure_users, "long": measure_long}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*MEASURES, []], help="load, users, long")
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--rate", type=int, default=25, help="tokens/s of each user's answer")
    parser.add_argument("--seconds", type=int, default=20, help="of each user's answer")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--long-rate", type=int, default=600, help="tokens/s of the long answers")
    parser.add_argument("--pictures", help="a folder for screenshots")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar does not hold")
    options = parser.parse_args()
    with bench() as started:
        for what in options.what or MEASURES:
            MEASURES[what](started, options)
    for miss in started.misses:
        print(f"bar missed: {miss}")
    return 1 if options.check and started.misses else 0


if __name__ == "__main__":
    sys.exit(main())
