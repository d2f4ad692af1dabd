"""Draws docs/img/dashboard-*.png from sample snapshots: python tests/page_pictures.py"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import live_samples as samples
from page_server import PageServer
from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

from penstock.wire.live import History, Snapshot

FOLDER = Path(__file__).parent.parent / "docs" / "img"
WIDE, PHONE = ViewportSize(width=1360, height=1640), ViewportSize(width=360, height=1500)


def script() -> Iterator[History | Snapshot | float]:
    yield samples.history()
    for second in range(3):  # the network's rates are differences
        yield samples.snapshot(samples.AT + second)
        yield 0.2


def main() -> None:
    with sync_playwright() as playwright, PageServer(script) as server:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--lang=en"])
        for name, size, is_dark in (("light", WIDE, False), ("dark", WIDE, True), ("phone", PHONE, False)):
            context = browser.new_context(
                viewport=size, color_scheme="dark" if is_dark else "light", timezone_id="UTC", reduced_motion="reduce"
            )
            page = context.new_page()
            page.goto(server.url)
            page.get_by_text("22:00:02").first.wait_for()
            page.evaluate("document.getElementById('address').textContent = '127.0.0.1:8000'")
            picture = page.screenshot()
            few = (
                Image.open(io.BytesIO(picture))
                .convert("RGB")
                .quantize(220, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            )
            few.save(FOLDER / f"dashboard-{name}.png", optimize=True)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
