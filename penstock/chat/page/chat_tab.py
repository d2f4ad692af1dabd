"""The chat: its boxes, and what happens when something is sent, stopped, or another conversation is chosen.

The server keeps no conversation. Each event brings it from the browser, as JSON, and what it becomes goes back into a
hidden box whose change `penstock.took` hears: with the question, then as it grows, and at the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import gradio
import msgspec
from msgspec.structs import replace

from penstock.chat import files
from penstock.chat.conversation import Conversation, Turn
from penstock.chat.failures import failure_of
from penstock.chat.page.answering import Order, Shown, conversation_boxes, obey
from penstock.chat.page.config import PageConfig
from penstock.chat.page.markup import DISPLAY, INLINE
from penstock.chat.page.pacing import StopButton
from penstock.chat.page.sessions import visitor
from penstock.chat.page.settings_panel import Panel
from penstock.chat.page.streaming import Chat, new_id
from penstock.errors import UserError

_LATEX = [
    {"left": DISPLAY[0], "right": DISPLAY[1], "display": True},
    {"left": INLINE[0], "right": INLINE[1], "display": False},
]


class ChatTab:
    """Makes its components where it is called, and their events."""

    def __init__(self, config: PageConfig, chat: Chat, panel: Panel) -> None:
        self._chat, self._panel, self._button = chat, panel, StopButton()
        self.bot = gradio.Chatbot(
            label="Conversation", show_label=False, elem_id="penstock-chat", buttons=[], allow_tags=False,
            sanitize_html=True, latex_delimiters=_LATEX, layout="panel", group_consecutive_messages=False,
            examples=[{"text": text} for text in config.examples] or None, placeholder="Ask something.", height="70vh",
            autoscroll=False,
        )  # fmt: skip
        gradio.HTML('<div id="penstock-above"></div>')
        with gradio.Row(elem_id="penstock-ask"):
            self.message = gradio.Textbox(
                label="Message", show_label=False, placeholder="Message", lines=1, max_lines=12, scale=8,
                elem_id="penstock-message", container=False, autofocus=True,
            )  # fmt: skip
            self.send = gradio.Button("Send", variant="primary", elem_id="penstock-send", scale=0, min_width=80)
            self.stop = gradio.Button("Stop", variant="stop", elem_id="penstock-stop", scale=0, min_width=80)
        self.given = gradio.Textbox(visible="hidden", elem_id="penstock-given", label="conversation")
        self.order = gradio.Textbox(visible="hidden", elem_id="penstock-order", label="order")
        self.news = gradio.Textbox(visible="hidden", elem_id="penstock-news", label="news")
        self.act = gradio.Button("act", visible="hidden", elem_id="penstock-act")
        self.show = gradio.Button("show", visible="hidden", elem_id="penstock-show")

    def listen(self, blocks: Any) -> None:
        answering = gradio.on(
            [self.message.submit, self.send.click, self.act.click], self._obey,
            [self.given, self.order, self.message, *self._panel.components], [self.bot, self.news, self.message],
            js="(...given) => window.penstockChat.orders(...given)",
            show_progress="hidden", concurrency_limit=None, trigger_mode="once", api_visibility="private",
        )  # fmt: skip
        for over, is_error in ((answering.then, "false"), (answering.failure, "true")):  # one of them is heard
            js = f"(news) => window.penstockChat.ended({is_error}, news)"
            over(None, self.news, None, js=js, api_visibility="private")
        self.news.change(
            None, self.news, None, js="(news) => window.penstock.took(news)", show_progress="hidden",
            api_visibility="private",
        )  # fmt: skip
        self.stop.click(self._stop, queue=False, show_progress="hidden", api_visibility="private")
        for event, cancels in ((self.show.click, [answering]), (blocks.load, None)):
            showing = event(
                self._show, [self.given, *self._panel.components], [self.bot, *self._panel.components],
                js="(...given) => window.penstockChat.shown(...given)",
                show_progress="hidden", queue=False, cancels=cancels, api_visibility="private",
            )  # fmt: skip
            for over in (showing.then, showing.failure):
                over(None, None, None, js="() => window.penstockChat.drawn()", api_visibility="private")
        self.bot.example_select(_example, None, self.message, queue=False, api_visibility="private")

    async def _obey(
        self, request: gradio.Request, given: str, order_text: str, text: str, *values: Any
    ) -> AsyncGenerator[Any, None]:
        order = msgspec.json.decode(order_text, type=Order)
        has_text = order.act in ("ask", "edit")
        if has_text and not (text.strip() or order.images):
            yield gradio.skip(), gradio.skip(), gradio.skip()
            return
        with _told():
            conversation = self._read(given)
            if order.act not in ("choose", "delete"):
                settings = self._panel.settings(conversation.settings, [*values])
                conversation = replace(conversation, settings=settings)
            question = Turn(new_id(), None, "user", text.strip(), order.images)
            conversation, turn = obey(conversation, order, question, time.time())
        message = "" if has_text else gradio.skip()
        if turn is None:
            yield _boxes(conversation_boxes(conversation)), _json(conversation), message
            return
        drawn: dict[Shown, Any] = {}
        with self._button.armed(request) as stop:
            answering = self._chat.answer(conversation, turn, visitor(request), stop)
            async with contextlib.aclosing(answering):
                async for boxes, news in answering:
                    yield _boxes(boxes, drawn), gradio.skip() if news is None else _news(conversation, news), message
                    message = gradio.skip()

    async def _stop(self, request: gradio.Request) -> None:
        self._button.press(request)

    async def _show(self, request: gradio.Request, given: str, *values: Any) -> list[Any]:
        with _told():
            conversation = self._read(given)
        return [
            _boxes(conversation_boxes(conversation)),
            *await self._panel.changes(request, conversation.settings, [*values]),
        ]

    def _read(self, given: str) -> Conversation:
        (conversation,) = files.from_json(given)
        is_new = not conversation.turns and not conversation.settings.model
        return replace(conversation, settings=self._panel.first()) if is_new else conversation


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the visitor can correct is told in a corner of the page; nothing else happens."""
    try:
        yield
    except UserError as exc:
        raise gradio.Error(failure_of(exc).text, print_exception=False) from exc


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _news(conversation: Conversation, news: Conversation | Turn) -> str:
    """All of a conversation, or the one turn of it that grows."""
    if isinstance(news, Conversation):
        return _json(news)
    return _json({"id": conversation.id, "updated_at": time.time(), "leaf": news.id, "turn": news})


def _example(example: gradio.SelectData) -> str:
    return str(example.value["text"])


def _boxes(boxes: list[Shown], drawn: dict[Shown, Any] | None = None) -> list[Any]:
    """As Gradio wants them. `drawn`: what does not grow, from one update to the next."""
    drawn = {} if drawn is None else drawn
    return [
        _message(box) if box.is_growing else drawn.get(box) or drawn.setdefault(box, _message(box)) for box in boxes
    ]


def _message(box: Shown) -> Any:
    """A box as Gradio's own type, since it passes what it is given through `inspect.cleandoc`, which changes code."""
    from gradio.components import chatbot

    if box.kind == "footer":
        content: Any = chatbot.ComponentMessage(
            component="html", value=box.text, constructor_args={}, props={"html_template": "${value}"}
        )
    else:
        content = chatbot.TextMessage(text=box.text)
    metadata: dict[str, Any] | None = None
    if box.kind == "fold":
        metadata = {"title": box.title, "status": "pending" if box.is_growing else "done"}
        if box.seconds:
            metadata["duration"] = round(box.seconds, 1)
    return chatbot.Message(role=box.role, content=[content], metadata=metadata)
