"""The tab that asks one question twice at once: two models, or one with two settings, side by side with their times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import gradio

from penstock.chat import settings as parameters
from penstock.chat.page.config import PageConfig
from penstock.chat.page.markup import shown
from penstock.chat.page.pacing import StopButton
from penstock.chat.page.plain_answer import PlainAnswer, grow, together
from penstock.chat.page.sessions import visitor
from penstock.chat.page.upstream import Upstream
from penstock.chat.settings import Settings
from penstock.wire.client import Message

_Side = tuple[str | None, str, float, int]  # model, system message, temperature, max tokens


def build(config: PageConfig, upstream: Upstream, latex: list[dict[str, Any]]) -> None:
    """Adds the tab; called in `gradio.Blocks`. `latex`: the delimiters of formulas."""
    button = StopButton()

    def one(question: str, chosen: _Side, request: Any, stopped: asyncio.Event) -> AsyncGenerator[PlainAnswer, None]:
        model, system, temperature, max_tokens = chosen
        settings = Settings(model, temperature=temperature, max_tokens=max_tokens)
        messages: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
        messages.append({"role": "user", "content": question})
        pieces = upstream.stream_chat(visitor(request).key, messages, parameters.fields(settings))
        return grow(pieces, config.prices.get(model or ""), request, stopped)

    async def ask(question: str, request: gradio.Request, *chosen: Any) -> AsyncGenerator[list[str], None]:
        middle = len(chosen) // 2
        with button.armed(request) as stopped:
            sides = (one(question, side, request, stopped) for side in (chosen[:middle], chosen[middle:]))
            async with contextlib.aclosing(together(*sides)) as growing:
                async for answers in growing:
                    yield [part for answer in answers for part in (shown(answer.text), answer.below)]

    async def press(request: gradio.Request) -> None:
        button.press(request)

    async def models(left: str | None, right: str | None, request: gradio.Request) -> list[object]:
        names = [card.name for card in await upstream.known_models(visitor(request).key)]
        chosen = [(left, names[:1]), (right, names[1:2] or names[:1])]
        return [
            gradio.Dropdown(choices=names, value=name if name in names else (*first, name)[0]) for name, first in chosen
        ]

    with gradio.Tab("Compare", elem_id="penstock-compare") as tab:
        question = gradio.Textbox(label="Question for both", lines=3, max_lines=20, elem_id="penstock-question")
        with gradio.Row():
            submit, stop = gradio.Button("Ask both", variant="primary"), gradio.Button("Stop")
        fields, outputs = [], []
        with gradio.Row():
            for name in ("Left", "Right"):
                with gradio.Column(min_width=300):
                    model = gradio.Dropdown(label=f"{name}: model", choices=[])
                    with gradio.Accordion(f"{name}: settings", open=False):
                        system = gradio.Textbox(label="System message", value=config.system or "", lines=2)
                        temperature = gradio.Slider(0, 2, value=0, step=0.05, label="Temperature")
                        max_tokens = gradio.Slider(1, 4096, value=512, step=1, label="Max tokens")
                    text = gradio.Markdown(latex_delimiters=latex, line_breaks=True, container=True, min_height=120)
                    fields += [model, system, temperature, max_tokens]
                    outputs += [text, gradio.HTML()]
        submit.click(
            ask, [question, *fields], outputs, show_progress="hidden", concurrency_limit=None, api_visibility="private"
        )
        stop.click(press, queue=False, show_progress="hidden", api_visibility="private")
    choices = fields[:: len(fields) // 2]
    tab.select(models, choices, choices, show_progress="hidden", api_visibility="private")
