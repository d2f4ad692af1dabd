"""The tab for a raw prompt, without roles or template: /v1/completions, as base models want it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import gradio

from penstock.chat import settings as parameters
from penstock.chat.page.config import PageConfig
from penstock.chat.page.pacing import StopButton
from penstock.chat.page.plain_answer import PlainAnswer, grow
from penstock.chat.page.sessions import visitor
from penstock.chat.page.upstream import Upstream
from penstock.chat.settings import Settings


def build(config: PageConfig, upstream: Upstream) -> None:
    """Adds the tab; called in `gradio.Blocks`."""
    button = StopButton()

    async def complete(
        prompt: str, model: str | None, max_tokens: int, temperature: float, stop: str, request: gradio.Request
    ) -> AsyncGenerator[PlainAnswer, None]:
        stops = tuple(line for line in stop.splitlines() if line)
        settings = Settings(model, max_tokens=max_tokens, temperature=temperature, stop=stops)
        pieces = upstream.stream_complete(visitor(request).key, prompt, parameters.fields(settings, is_chat=False))
        with button.armed(request) as stopped:
            growing = grow(pieces, config.prices.get(model or ""), request, stopped)
            async with contextlib.aclosing(growing):
                async for answer in growing:
                    yield answer

    async def press(request: gradio.Request) -> None:
        button.press(request)

    async def models(chosen: str | None, request: gradio.Request) -> object:
        names = [card.name for card in await upstream.known_models(visitor(request).key)]
        return gradio.Dropdown(choices=names, value=chosen if chosen in names or not names else names[0])

    with gradio.Tab("Completion", elem_id="penstock-completion") as tab:
        with gradio.Row():
            with gradio.Column(scale=3):
                prompt = gradio.Textbox(
                    label="Prompt", lines=5, max_lines=20, placeholder="Once upon a time", elem_id="penstock-prompt"
                )
                with gradio.Row():
                    submit, stop = gradio.Button("Submit", variant="primary"), gradio.Button("Stop")
                text = gradio.Textbox(label="Answer", lines=10, max_lines=30, interactive=False)
                below = gradio.HTML()
            with gradio.Column(scale=1, min_width=220):
                model = gradio.Dropdown(
                    label="Model", value=config.model, choices=[config.model] if config.model else []
                )
                max_tokens = gradio.Slider(10, 512, value=50, step=1, label="Max tokens")
                temperature = gradio.Slider(0, 2, value=0, step=0.05, label="Temperature")
                stops = gradio.Textbox(label="Stop texts, one a line", lines=2)
        inputs = [prompt, model, max_tokens, temperature, stops]
        submit.click(
            complete, inputs, [text, below], show_progress="hidden", concurrency_limit=None, api_visibility="private"
        )
        stop.click(press, queue=False, show_progress="hidden", api_visibility="private")
    tab.select(models, model, model, show_progress="hidden", api_visibility="private")
