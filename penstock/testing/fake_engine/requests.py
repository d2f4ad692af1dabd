"""Request bodies of the fake engine: bytes in, an `Ask` or vLLM's own refusal out. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.testing.fake_engine import answers
from penstock.testing.fake_engine.answers import Answer, Delta
from penstock.testing.fake_engine.options import Options

COMPLETION_TOKENS = 16  # vLLM's default max_tokens for /v1/completions
TOKENS_PER_MESSAGE = 4  # what a chat template adds around one message
TOKENS_PER_IMAGE = 256
_WORD_CHARS_MAX = 24
_DIGEST_PIECES = 8


class Request(NamedTuple):
    """One request as it arrived. Header names are in lower case, `path` has no query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    query: str = ""


@dataclass(frozen=True)
class Ask:
    """A generation to do: `words` are echoed in `n_tokens` numbered tokens, or `digest` (--echo-body) in pieces.

    With `ends_itself` the last token is the end-of-text token: counted, without text.
    """

    is_chat: bool
    words: tuple[str, ...]
    n_prompt_tokens: int
    n_tokens: int
    ends_itself: bool = False
    streams: bool = False
    includes_usage: bool = False
    continues_usage: bool = False
    digest: str | None = None
    chosen: Answer | None = None
    deltas: tuple[Delta, ...] = ()  # of `chosen`
    prefixes: tuple[tuple[bytes, int], ...] = ()  # each beginning of the chat that may be cached, and its tokens
    n_cached_tokens: int | None = None

    @property
    def finish_reason(self) -> str:
        if not self.ends_itself:
            return "length"
        return "tool_calls" if self.chosen is not None and self.chosen.tool_calls else "stop"

    def text(self, first: int, end: int) -> str:
        """The text of tokens `first` .. `end` - 1, counted from 0: (0, 2) of "tell me" -> "1:tell 2:me"."""
        if self.chosen is not None:
            return "".join(str(delta.get("content", "")) for delta in self.deltas[first:end])
        if self.digest is not None:
            size = len(self.digest) // _DIGEST_PIECES
            return self.digest[first * size : end * size]
        last = self.n_tokens - 1 if self.ends_itself else self.n_tokens
        return "".join(_piece(self.words, i) for i in range(first, min(end, last)))


class Refusal(Exception):
    def __init__(self, status: int, payload: dict[str, object]) -> None:
        super().__init__(str(payload))
        self.status = status
        self.payload = payload


def expected_text(prompt: str, n_tokens: int) -> str:
    """What the fake engine answers to `prompt` (the last message of a chat) with max_tokens = `n_tokens`."""
    return "".join(_piece(_words(prompt), i) for i in range(n_tokens))


def read_generation(body: bytes, headers: dict[str, str], is_chat: bool, options: Options) -> Ask:
    asked = read_object(body, headers)
    prompt, n_prompt_tokens = _chat_prompt(asked, options) if is_chat else _completion_prompt(asked, options)
    chosen = answers.choose(answers.load(options.answers), prompt) if options.answers is not None else None
    if chosen is not None and chosen.status >= 400:
        raise Refusal(chosen.status, error(chosen.text, "BadRequestError", None, chosen.status))
    deltas = chosen.deltas() if chosen is not None else ()
    max_tokens = _max_tokens(asked, options)
    if n_prompt_tokens >= options.max_model_len:
        raise _too_long(options.max_model_len)
    n_room = options.max_model_len - n_prompt_tokens
    stream_options = asked.get("stream_options") or {}
    if stream_options and not asked.get("stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    ends_itself = max_tokens is None and is_chat and not asked.get("ignore_eos")
    n_tokens = options.reply_tokens + 1 if ends_itself else (max_tokens or COMPLETION_TOKENS)
    if chosen is not None:
        n_tokens = min(len(deltas) + 1, max_tokens or n_room)
        ends_itself = n_tokens == len(deltas) + 1
    if max_tokens is None and asked.get("ignore_eos") and is_chat:
        n_tokens = n_room
    return Ask(
        is_chat=is_chat,
        words=_words(prompt),
        n_prompt_tokens=n_prompt_tokens,
        n_tokens=_DIGEST_PIECES if options.echo_body else min(n_tokens, n_room),
        ends_itself=ends_itself and n_tokens <= n_room and not options.echo_body,
        streams=bool(asked.get("stream")),
        includes_usage=bool(stream_options.get("include_usage")),
        continues_usage=bool(stream_options.get("include_usage") and stream_options.get("continuous_usage_stats")),
        digest=hashlib.sha256(body).hexdigest() if options.echo_body else None,
        chosen=chosen,
        deltas=deltas,
        prefixes=_prefixes(asked["messages"]) if is_chat and options.enable_prompt_tokens_details else (),
    )


def read_tokenize(body: bytes, headers: dict[str, str], options: Options) -> list[int]:
    """Stable made-up ids, one for each token of the prompt."""
    asked = read_object(body, headers)
    prompt, n_tokens = _chat_prompt(asked, options) if "messages" in asked else _completion_prompt(asked, options)
    words = _words(prompt)
    return [int.from_bytes(hashlib.sha256(_word(words, i).encode()).digest()[:2], "big") for i in range(n_tokens)]


def read_object(body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    if not headers.get("content-type", "").startswith("application/json"):
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refusal(400, error(message, "Bad Request", None, 400))
    try:
        asked = json.loads(body)
    except json.JSONDecodeError as exc:
        facts = {"error": exc.msg}
        raise _invalid(f"body.{exc.pos}", "json_invalid", "JSON decode error", "<dict of 0 items>", facts) from exc
    except UnicodeDecodeError as exc:
        raise Refusal(400, error("There was an error parsing the body", "Bad Request", None, 400)) from exc
    if not isinstance(asked, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        shown = f"<list of {len(asked)} items>" if isinstance(asked, list) else asked
        raise _invalid("body", "model_attributes_type", message, shown)
    return asked


def error(message: str, kind: str, param: str | None, code: int) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None, value: object = None) -> Refusal:
    parameter = f" (parameter={param}" + (f", value={value})" if value is not None else ")") if param else ""
    return Refusal(400, error(message + parameter, "BadRequestError", param, 400))


def _invalid(where: str, kind: str, message: str, value: object, context: object = None) -> Refusal:
    """A refusal by the schema, in the words of FastAPI as vLLM prints them."""
    facts: dict[str, object] = {"type": kind, "loc": where, "msg": message, "input": value}
    if context is not None:
        facts["ctx"] = context
    return Refusal(400, error(f"1 validation error:\n  {facts}", "Bad Request", where, 400))


def _too_long(max_model_len: int) -> Refusal:
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
        f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce "
        "the length of the input prompt."
    )
    return bad_request(message, "input_tokens", max_model_len + 1)


def _check_model(asked: dict[str, Any], options: Options) -> None:
    model = asked.get("model")
    if model and model not in options.names:
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(options.names)}."
        raise Refusal(404, error(message, "NotFoundError", "model", 404))


def _chat_prompt(asked: dict[str, Any], options: Options) -> tuple[str, int]:
    if "messages" not in asked:
        raise _invalid("body.messages", "missing", "Field required", f"<dict of {len(asked)} items>")
    messages = asked["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _invalid("body.messages", "list_type", "Input should be a valid list", messages)
    _check_model(asked, options)
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.", None)
    n_images = sum(_n_images(message.get("content")) for message in messages)
    if n_images and not options.accepts_images:
        raise bad_request(f"{options.names[0]} is not a multimodal model", None)
    texts = [_content(message.get("content")) for message in messages]
    n_tokens = sum(len(text.split()) + TOKENS_PER_MESSAGE for text in texts)
    return texts[-1], n_tokens + n_images * TOKENS_PER_IMAGE


def _content(content: object) -> str:
    """A message's text, given as a string or as OpenAI's list of parts."""
    if isinstance(content, list):
        return " ".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def _n_images(content: object) -> int:
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def _prefixes(messages: list[dict[str, Any]]) -> tuple[tuple[bytes, int], ...]:
    """What a later request may begin with: the first message, the first two, ..., and the tokens of each."""
    digest, n_tokens, prefixes = hashlib.sha256(), 0, []
    for message in messages:
        text = _content(message.get("content"))
        digest.update(f"{message.get('role')}\0{text}\0".encode("utf-8", "replace"))
        n_tokens += len(text.split()) + TOKENS_PER_MESSAGE
        prefixes.append((digest.digest(), n_tokens))
    return tuple(prefixes)


def _completion_prompt(asked: dict[str, Any], options: Options) -> tuple[str, int]:
    _check_model(asked, options)
    prompt = asked.get("prompt")
    if not prompt:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        prompt = " ".join(f"#{token}" for token in prompt)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise bad_request("The fake engine takes one prompt: a string, or a list of token ids.", "prompt")
    return prompt, max(1, len(prompt.split()))


def _max_tokens(asked: dict[str, Any], options: Options) -> int | None:
    name = "max_completion_tokens" if asked.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = asked.get(name)
    if max_tokens is not None and not isinstance(max_tokens, int):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise _invalid(f"body.{name}", "int_parsing", message, max_tokens)
    if max_tokens is not None and max_tokens > options.max_model_len:
        limit = f"cannot be greater than max_model_len={options.max_model_len}"
        raise bad_request(f"{name}={max_tokens} {limit}. Please request fewer output tokens.", name, max_tokens)
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    temperature = asked.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise bad_request(
            f"temperature must be non-negative, got {float(temperature)}.", "temperature", float(temperature)
        )
    if asked.get("n") not in (None, 1):
        raise bad_request("The fake engine makes one choice.", "n", asked["n"])
    return max_tokens


def _words(prompt: str) -> tuple[str, ...]:
    return tuple(word[:_WORD_CHARS_MAX] for word in prompt.split()) or ("_",)


def _word(words: tuple[str, ...], i: int) -> str:
    return words[i % len(words)]


def _piece(words: tuple[str, ...], i: int) -> str:
    return f"{' ' if i else ''}{i + 1}:{_word(words, i)}"
