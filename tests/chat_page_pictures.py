"""Draws docs/img/chat-*.png, the chat page over a scripted engine: python tests/chat_page_pictures.py"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from chat_page_driver import Chat, log_in
from chat_page_rig import Answer, ChatPage, chat_page
from chromium import chromium
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, expect

FOLDER = Path(__file__).parent.parent / "docs" / "img"
WIDE = ViewportSize(width=1280, height=720)
EARLIER = (
    "A haiku about pipes",
    "Which GPU for a 70B model?",
    "Translate this into French",
    "Plan a talk of ten minutes",
)
QUESTION = "Why does the KV cache of a longer prompt take more memory?"
REASONING = "Keys and values of every token stay in memory. I should give the formula and a worked number."
ANSWER = r"""Each token keeps its **keys and values** in every layer, so the cache grows with the length of the prompt:

$$\text{bytes} = 2 \cdot n_\text{layers} \cdot n_\text{kv heads} \cdot d_\text{head} \cdot b \cdot n_\text{tokens}$$

```python
def kv_cache_bytes(n_tokens: int) -> int:
    return 2 * 80 * 8 * 128 * 2 * n_tokens  # Llama 3.1 70B, bf16
```

| tokens | KV cache |
|---:|---:|
| 1,000 | 0.3 GiB |
| 100,000 | 30.5 GiB |

A shared beginning is computed once: its $n$ cached tokens cost no time."""
USAGE = {"prompt_tokens": 812, "completion_tokens": 214, "prompt_tokens_details": {"cached_tokens": 768}}


def script(rig: ChatPage) -> None:
    for question in EARLIER:
        rig.answers[question] = Answer(("Gladly.",))
    pieces = ANSWER.splitlines(keepends=True)
    steps = [step for piece in pieces for step in (0.17, piece)]
    rig.answers[QUESTION] = Answer((0.21, {"reasoning": REASONING}, 1.2, *steps), usage=USAGE)


def draw(page: Page, name: str) -> None:
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    few = picture.quantize(250, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(FOLDER / f"chat-{name}.png", optimize=True)


def converse(browser: Browser, rig: ChatPage, is_dark: bool) -> None:
    scheme = "dark" if is_dark else "light"
    context = browser.new_context(viewport=WIDE, color_scheme=scheme, timezone_id="UTC", reduced_motion="reduce")
    context.add_cookies(log_in(browser, rig, f"drawer-{scheme}"))
    chat = Chat(context.new_page(), rig)
    chat.page.goto(rig.url + ("?__theme=dark" if is_dark else ""))
    for question in EARLIER:
        chat.ask_and_wait(question, "Gladly.")
        chat.new()
        expect(chat.figures).to_have_count(0)
    chat.ask_and_wait(QUESTION, "cost no time")
    draw(chat.page, scheme)
    context.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chat_page(Path(folder), title="qwen") as rig, chromium() as browser:
        script(rig)
        for is_dark in (False, True):
            converse(browser, rig, is_dark)


if __name__ == "__main__":
    main()
