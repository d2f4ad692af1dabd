"""The tab that leads out of the page: the conversation as curl and as Python, and what other programs need."""

from __future__ import annotations

from typing import Any

import gradio

from penstock.chat import conversation as tree
from penstock.chat import files
from penstock.chat import settings as parameters
from penstock.chat.conversation import Conversation
from penstock.chat.page.config import PageConfig
from penstock.chat.page.sessions import visitor
from penstock.chat.page.upstream import Upstream
from penstock.chat.snippets import api, as_curl, as_python, elsewhere
from penstock.errors import UserError

_EXAMPLE = {"role": "user", "content": "Hello"}
_ASKED_AGAIN = "This conversation, whose last question is asked again."
_NOTE = "The key is read from `PENSTOCK_KEY`; it is in none of these texts."


def build(config: PageConfig, upstream: Upstream) -> None:
    """Adds the tab; called in `gradio.Blocks`. The conversation comes from the browser."""

    async def write(current: str | None, address: str, request: gradio.Request) -> list[object]:
        conversation, key = _read(current), visitor(request).key
        cards = await upstream.known_models(key)
        asked = conversation.settings.model if conversation else config.model
        card = next((card for card in cards if asked in (card.name, *card.aliases)), cards[0] if cards else None)
        model = asked or (card.name if card else "MODEL")
        body = _body(conversation, model)
        others = elsewhere(address, model, card.max_model_len if card else None, key is not None)
        texts = [as_curl(address, body, key is not None), as_python(address, body, key is not None)]
        return [*texts, *(snippet.text for snippet in others)]

    with gradio.Tab("Use it elsewhere", elem_id="penstock-elsewhere") as tab:
        info = "As this page reaches the server; change it where your machine uses another."
        address = gradio.Textbox(label="Address", value=api(config.gateway), info=info)
        gradio.Markdown(_NOTE)
        with gradio.Tabs():
            places = [(name, _ASKED_AGAIN) for name in ("curl", "Python")]
            places += [(snippet.name, snippet.place) for snippet in elsewhere(config.gateway, "")]
            outputs = [_code(*place) for place in places]
        current = gradio.Textbox(visible=False)
    for event in (tab.select, address.change):
        event(
            write, [current, address], outputs, js="(_, address) => [window.penstock?.current() ?? null, address]",
            show_progress="hidden", api_visibility="private",
        )  # fmt: skip


def _code(name: str, place: str) -> Any:
    """In a plain box: Gradio's editor for code is a third of all scripts that the page would load."""
    with gradio.Tab(name):
        gradio.Markdown(place)
        return gradio.Textbox(
            label=name, interactive=False, buttons=["copy"], lines=8, max_lines=40, elem_classes="penstock-code"
        )


def _read(current: str | None) -> Conversation | None:
    """What the browser sent; None for what cannot be read, and before the first question."""
    try:
        conversation = files.from_json(current)[0] if current else None
    except (UserError, IndexError):
        return None
    return conversation if conversation and conversation.leaf else None


def _body(conversation: Conversation | None, model: str) -> dict[str, object]:
    if conversation is None:
        return {"model": model, "messages": [_EXAMPLE], "stream": True}
    messages = tree.messages(conversation)
    if messages[-1]["role"] == "assistant":  # the last question is asked again
        messages.pop()
    return {"model": model, "messages": messages, **parameters.fields(conversation.settings), "stream": True}
