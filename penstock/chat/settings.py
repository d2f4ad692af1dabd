"""What a conversation asks of the model: parameters of sampling, the system message, and their bounds."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import msgspec

from penstock.errors import Problem, UserError, nearest

# Of a request, never of its settings: fields() leaves them out of `extra`.
_RESERVED = ("messages", "prompt", "stream", "stream_options", "n")
_STOPS_MAX = 16


class Settings(msgspec.Struct, frozen=True):
    """None is the server's own default. `has_system`: whether the system message is sent; some models refuse one.

    `thinking`: of models whose template can turn it on or off. `extra`: more fields of the request, as JSON.
    """

    model: str | None = None
    system: str | None = None
    has_system: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = 512
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_mode: bool = False
    thinking: Literal["default", "on", "off"] = "default"
    extra: dict[str, Any] = {}


class Bound(NamedTuple):
    """The range of a number, both ends allowed; `step` is that of a slider."""

    label: str
    low: float
    high: float
    step: float
    text: str

    @property
    def is_whole(self) -> bool:
        return self.step == 1


class Limits(NamedTuple):
    """What the server says of a model; None where it does not."""

    max_model_len: int | None = None


_UNKNOWN = Limits()

# The ranges of https://platform.openai.com/docs/api-reference/chat/create, and for top_k and min_p those of
# https://docs.vllm.ai/en/stable/api/vllm/sampling_params.html. A seed is a whole number that a browser holds exactly.
BOUNDS = {
    "temperature": Bound("Temperature", 0.0, 2.0, 0.05, "of sampling; 0 is greedy"),
    "top_p": Bound("Top p", 0.01, 1.0, 0.01, "sample from the likeliest tokens that have this probability together"),
    "top_k": Bound("Top k", 1, 1000, 1, "sample from this many of the likeliest tokens"),
    "min_p": Bound("Min p", 0.0, 1.0, 0.01, "leave out tokens below this share of the likeliest one's probability"),
    "max_tokens": Bound("Max tokens", 1, 1_048_576, 1, "tokens of an answer, at most"),
    "seed": Bound(
        "Seed", 0, 2**53 - 1, 1, "of the random numbers: the same seed repeats an answer, as far as the engine can"
    ),
}


def bound(name: str, limits: Limits = _UNKNOWN) -> Bound:
    """The range of one number of Settings; that of max_tokens ends at the length of the model's context."""
    if name == "max_tokens" and limits.max_model_len:
        return BOUNDS[name]._replace(high=limits.max_model_len)
    return BOUNDS[name]


def fields(settings: Settings, is_chat: bool = True) -> dict[str, Any]:
    """The fields of a request, its model included and what the server decides left out.
    Without `is_chat` those of a raw prompt, which has no template that could think."""
    asked: dict[str, Any] = {
        "model": settings.model,
        **{name: getattr(settings, name) for name in BOUNDS},
        "stop": list(settings.stop) or None,
        "response_format": {"type": "json_object"} if settings.json_mode else None,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    extra = {name: value for name, value in settings.extra.items() if name not in _RESERVED}
    if is_chat and settings.thinking != "default":
        # Templates differ in the name (Qwen3: enable_thinking, DeepSeek V3.1: thinking); each ignores the other's.
        is_on = settings.thinking == "on"
        given = extra.get("chat_template_kwargs")
        switches = {"enable_thinking": is_on, "thinking": is_on}
        extra["chat_template_kwargs"] = {**switches, **(given if isinstance(given, dict) else {})}
    return asked | extra


def problems(settings: Settings, limits: Limits = _UNKNOWN) -> tuple[Problem, ...]:
    """What the server would refuse, by the field's name; empty for good settings."""
    wrong = []
    for name in BOUNDS:
        value, (label, low, high, _, _) = getattr(settings, name), bound(name, limits)
        if value is not None and not low <= value <= high:
            wrong.append(Problem(name, f"{label} is {value:g}", f"From {low:g} to {high:,.15g}."))
    if len(settings.stop) > _STOPS_MAX or not all(settings.stop):
        wrong.append(Problem("stop", "cannot use the stop texts", f"At most {_STOPS_MAX}, none of them empty."))
    if taken := [name for name in _RESERVED if name in settings.extra]:
        wrong.append(Problem("extra", f"cannot set {', '.join(taken)}", "The conversation sets them."))
    return tuple(wrong)


# What a person may type, beyond the numbers of BOUNDS.
_WORDS: Final[dict[str, dict[str, object]]] = {
    "json_mode": {"on": True, "off": False},
    "thinking": {"default": "default", "on": "on", "off": "off"},
}
_TYPED: Final = (*BOUNDS, "stop", *_WORDS)
_LISTED: Final = f"There are: {', '.join(_TYPED)}."
SERVER_DEFAULTS: Final = Settings(max_tokens=None)


def number(name: str, text: str) -> float | int | None:
    """A number of BOUNDS as a person types it; None for an empty text. Raises UserError for what is no number."""
    text, is_whole = text.strip(), BOUNDS[name].is_whole
    try:
        value = None if not text else int(text) if is_whole else float(text.replace(",", "."))
        float(value or 0)  # a whole number may be longer than any bound can be compared with in words
        return value
    except (ValueError, OverflowError):
        kind = "a whole number" if is_whole else "a number"
        raise UserError(f'cannot set {name} to "{text[:40]}"', hint=f"It is {kind}.") from None


def changed(settings: Settings, name: str, text: str, limits: Limits = _UNKNOWN) -> Settings:
    """One setting as a person types it: ("temperature", "0.2"), ("stop", "END"), ("json_mode", "on"). An empty text is
    the server's default.

    Raises UserError for another name, and for what the server would refuse.
    """
    name = name.replace("-", "_")
    if name not in _TYPED:
        close = nearest(name, _TYPED)
        raise UserError(f'unknown setting "{name}"', hint=f"Did you mean {close}?" if close else _LISTED)
    value: object = (text,) if name == "stop" and text else getattr(SERVER_DEFAULTS, name)
    if name in BOUNDS:
        value = number(name, text)
    elif text and name in _WORDS:
        if text not in _WORDS[name]:
            raise UserError(f'cannot set {name} to "{text}"', hint=f"One of {', '.join(_WORDS[name])}.")
        value = _WORDS[name][text]
    new = msgspec.structs.replace(settings, **{name: value})
    for problem in problems(new, limits):
        if problem.path == name:
            raise UserError(f"cannot set {name}: {problem.message}", hint=problem.hint)
    return new


def shown(settings: Settings, name: str = "") -> tuple[str, ...]:
    """ "temperature: 0.2", "top_p: the server's default", ...: all, or the one of that name."""
    lines = []
    for each in [name.replace("-", "_")] if name else _TYPED:
        value = getattr(settings, each)
        if isinstance(value, bool):
            value = "on" if value else "off"
        elif isinstance(value, tuple):
            value = " ".join(value) or "none"
        lines.append(f"{each}: {'the default of the server' if value is None else value}")
    return tuple(lines)
