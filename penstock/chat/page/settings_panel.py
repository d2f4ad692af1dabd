"""The settings next to the chat: one component for each, in the order of `Panel.components`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import gradio
from msgspec.structs import replace

from penstock.chat import settings as parameters
from penstock.chat.page.config import PageConfig
from penstock.chat.page.sessions import visitor
from penstock.chat.page.upstream import Upstream
from penstock.chat.settings import Settings
from penstock.errors import UserError
from penstock.wire.model_list import ModelCard

_MAX_TOKENS = 32768  # the end of the slider where the server does not say how long the context is
_LIST_S = 1.0  # a gateway that is silent must not keep a conversation from being drawn
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed")


class Panel:
    """Makes the components where it is called. `changes` and `settings` go from one to the other."""

    def __init__(self, config: PageConfig, upstream: Upstream) -> None:
        self._config, self._upstream = config, upstream
        first = self.first()
        known = [config.model] if config.model else []
        self.model = gradio.Dropdown(
            known,
            value=config.model,
            label="Model",
            allow_custom_value=True,
            interactive=True,
            elem_id="penstock-model",
        )
        self.system = gradio.Textbox(
            first.system, label="System message", lines=3, max_lines=12, interactive=True, elem_id="penstock-system"
        )
        self.has_system = gradio.Checkbox(
            first.has_system, label="Send the system message", info="Off for models that refuse one.",
            elem_id="penstock-has-system",
        )  # fmt: skip
        bound = parameters.bound("max_tokens")
        # Its end is what a page that was open before a restart may send; `_choices` lowers it.
        self.max_tokens = gradio.Slider(
            bound.low, bound.high, 512, step=1, label=bound.label, info=bound.text, interactive=True,
            elem_id="penstock-max-tokens",
        )  # fmt: skip
        # Text boxes, since Gradio's box for numbers has no empty state: it sends 0.
        self.numbers = [
            gradio.Textbox("", label=bound.label, info=bound.text, placeholder="the server's default", max_lines=1)
            for bound in map(parameters.bound, _NUMBERS)
        ]
        self.stop = gradio.Textbox("", label="Stop", info="The answer ends before these, one a line.", max_lines=8)
        self.thinking = gradio.Radio(
            ["default", "on", "off"], value="default", label="Thinking", info="Where it can be set."
        )
        self.json_mode = gradio.Checkbox(False, label="JSON mode", info="The answer is one JSON object.")
        self.components = [
            *(self.model, self.system, self.has_system, self.max_tokens),
            *(*self.numbers, self.stop, self.thinking, self.json_mode),
        ]

    def listen(self) -> None:
        """The list of models is read again when the picker is opened, and the longest answer with each choice."""
        both = [self.model, self.max_tokens]
        for event in (self.model.focus, self.model.input):
            event(self._refresh, both, both, show_progress="hidden", queue=False, api_visibility="private")

    async def _refresh(self, request: gradio.Request, chosen: str | None, max_tokens: int) -> list[Any]:
        return self._choices(await self._upstream.known_models(visitor(request).key), chosen, max_tokens)

    def _choices(self, cards: tuple[ModelCard, ...], chosen: str | None, max_tokens: int) -> list[Any]:
        """The picker and the slider. A model that is not there any more gives way to the first that is."""
        names = [name for card in cards for name in (card.name, *card.aliases)]
        if chosen not in names:
            chosen = self._config.model if self._config.model in names else next(iter(names), chosen)
        lengths = [card.max_model_len for card in cards if chosen in (card.name, *card.aliases)]
        longest = next(filter(None, lengths), max(_MAX_TOKENS, max_tokens))
        listed = [(_label(card), card.name) for card in cards] or [(chosen or "", chosen or "")]
        picker = gradio.update(choices=listed, value=chosen)
        return [picker, gradio.update(maximum=longest, value=min(max_tokens, longest))]

    def first(self) -> Settings:
        """Of a new conversation."""
        return Settings(model=self._config.model, system=self._config.system, has_system=self._config.has_system)

    async def changes(self, request: gradio.Request, settings: Settings, shown: list[Any]) -> list[Any]:
        """What the components, which show `shown`, are to show. One that shows it is left alone: an update would undo
        what is typed there meanwhile."""
        return [_unless(old, new) for old, new in zip(shown, await self._values(request, settings), strict=True)]

    async def _values(self, request: gradio.Request, settings: Settings) -> list[Any]:
        cards: tuple[ModelCard, ...] = ()
        with contextlib.suppress(TimeoutError):
            cards = await asyncio.wait_for(self._upstream.known_models(visitor(request).key), _LIST_S)
        model, max_tokens = self._choices(cards, settings.model or self._config.model, settings.max_tokens or 512)
        figures = [getattr(settings, name) for name in _NUMBERS]
        numbers = ["" if figure is None else f"{figure:.15g}" for figure in figures]
        stop = "\n".join(text.replace("\n", "\\n") for text in settings.stop)
        return [
            *(model, settings.system or "", settings.has_system, max_tokens),
            *(*numbers, stop, settings.thinking, settings.json_mode),
        ]

    def settings(self, before: Settings, values: list[Any]) -> Settings:
        """What the components say; `before` keeps what has no component. Raises UserError."""
        model, system, has_system, max_tokens, *numbers, stop, thinking, json_mode = values
        figures = {name: parameters.number(name, text or "") for name, text in zip(_NUMBERS, numbers, strict=True)}
        stops = tuple(line.replace("\\n", "\n") for line in (stop or "").splitlines() if line)
        settings = replace(
            before, model=model or None, system=system or None, has_system=bool(has_system), max_tokens=int(max_tokens),
            stop=stops, thinking=thinking or "default", json_mode=bool(json_mode), **figures,
        )  # fmt: skip
        for problem in parameters.problems(settings):
            raise UserError(problem.message, hint=problem.hint)
        return settings


def _unless(old: Any, new: Any) -> Any:
    if isinstance(new, dict):  # an update of more than the value
        return {name: part for name, part in new.items() if name != "value" or part != old}
    return gradio.skip() if new == old else new


def _label(card: ModelCard) -> str:
    """ "demo", "demo (loading 45 %)", "demo (ready, 2 of 3)"."""
    words = []
    if card.state not in (None, "ready"):
        share = card.progress.fraction if card.progress else None
        words.append(f"{card.state} {share:.0%}" if share is not None else str(card.state))
    if card.replicas and card.replicas.total > 1:
        words.append(f"{card.replicas.ready} of {card.replicas.total} ready")
    return f"{card.name} ({', '.join(words)})" if words else card.name
