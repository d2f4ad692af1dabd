"""Answers of OpenAI's API, read: JSON or the bytes of a stream in, pieces and one reply out. Pure: no socket, no clock.

Failures are exceptions with the server's words (`ServerWords`), the same for all that talk to a server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.wire.sse import DONE, Parser
from penstock.wire.waiting import PROMPT_STAGE, Waiting, read_comment

RETRYABLE: Final = frozenset({429, 502, 503, 504})
_BODY_SHOWN_CHARS = 500
_BURSTS, _BURST_TOKENS = 3, 16  # a speed is not measured over so few reads with so many tokens each


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for. `arguments`: JSON as the model wrote it, perhaps not whole, perhaps not valid."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Chunk:
    """A piece of the answer, `at_s` seconds after the request was sent. May hold many tokens.

    `tool_calls`: all of the answer's calls as they stand now, when this piece is one of theirs (`text` is empty then).
    """

    text: str
    at_s: float
    is_reasoning: bool = False
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Reply:
    """The whole answer. Counts come from the server's usage, never from chunks; None where it did not say.

    `ttft_s`: to the first piece, only when streamed. `tokens_per_s`: (output_tokens - 1) / (time from the first piece
    to the last). 11 tokens, first at 0.5 s, last at 1.0 s: 10 / 0.5 = 20. None for fewer than two pieces, and where all
    came in a burst or two, as after a stall: their distance says nothing about the engine.
    `cached_tokens`: of the prompt, those that the engine did not compute again. `reasoning_s`: from the first piece of
    reasoning to the first of the answer, else to the last of reasoning; only when streamed.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_s: float | None
    duration_s: float
    tokens_per_s: float | None
    replica: str | None
    request_id: str | None
    model: str | None = None
    cached_tokens: int | None = None
    reasoning: str = ""
    reasoning_s: float | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ServerWords:
    """An error as the server said it. `code`: its machine word ("queue_full"), a number as text where that is all.

    `source`: "gateway" when a penstock gateway spoke. `prompt_tokens`, `context_tokens`: llama.cpp's figures when a
    prompt is too long; vLLM has them in its message.
    """

    message: str
    code: str | None = None
    kind: str | None = None
    param: str | None = None
    source: str | None = None
    prompt_tokens: int | None = None
    context_tokens: int | None = None


class HttpError(PenstockError):
    """The server answered with an error status; the message carries the server's words."""

    def __init__(
        self,
        message: str,
        status: int,
        *,
        hint: str | None = None,
        retry_after_s: float | None = None,
        words: ServerWords | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, is_retryable=status in RETRYABLE)
        self.status = status
        self.retry_after_s = retry_after_s
        self.words = words or ServerWords(message)
        self.request_id = request_id


class NoAnswer(PenstockError):
    """The server took the request and sent nothing for `timeout_s`."""


class BrokenAnswer(PenstockError):
    """The answer began and did not end: an error event (`words`), or a stream without a finish reason (None)."""

    def __init__(self, message: str, *, detail: str | None = None, words: ServerWords | None = None) -> None:
        super().__init__(message, detail=detail, is_retryable=True)
        self.words = words


class AnswerReader:
    """Adds up one answer: `take` each JSON object of it, then ask for the `reply`, which may be partial."""

    def __init__(self, replica: str | None = None, request_id: str | None = None) -> None:
        self.replica = replica
        self.request_id = request_id
        self.finish_reason: str | None = None
        self.cached_tokens: int | None = None
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._calls: dict[object, _Call] = {}
        self._model: str | None = None
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._first_at_s: float | None = None
        self._last_at_s = -1.0
        self._n_moments = 0  # at which pieces came
        self._reasoning_at_s: tuple[float, float] | None = None  # the first piece, and what ended it so far
        self._is_answering = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasonings)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(call.whole() for call in self._calls.values())

    def take(self, answer: object, at_s: float) -> list[Chunk]:
        """Adds one JSON answer or event, which came at `at_s`. Raises BrokenAnswer for an error, PenstockError for what
        is no object."""
        if not isinstance(answer, dict):
            raise PenstockError("cannot read the answer: not a JSON object")
        if answer.get("error"):
            words = read_words(answer)
            raise BrokenAnswer(f"the answer broke off: {words.message}", words=words)
        model = answer.get("model")
        self._model = model if isinstance(model, str) and model else self._model
        self._take_counts(answer)
        choices = answer.get("choices")
        choice = _object(choices[0] if isinstance(choices, list) and choices else None)
        reason = choice.get("finish_reason")
        self.finish_reason = reason if isinstance(reason, str) and reason else self.finish_reason
        part = _object(choice.get("delta") or choice.get("message"))
        return self._take_pieces(choice, part, at_s)

    def reply(self, duration_s: float) -> Reply:
        seconds = self._last_at_s - (self._first_at_s or 0.0)
        n_later, n_reads = (self._output_tokens or 0) - 1, self._n_moments - 1
        has_speed = seconds > 0 and n_later > 0 and (n_reads > _BURSTS or n_later <= n_reads * _BURST_TOKENS)
        began_s, ended_s = self._reasoning_at_s or (0.0, 0.0)
        return Reply(
            text=self.text,
            finish_reason=self.finish_reason,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            ttft_s=self._first_at_s,
            duration_s=duration_s,
            tokens_per_s=n_later / seconds if has_speed else None,
            replica=self.replica,
            request_id=self.request_id,
            model=self._model,
            cached_tokens=self.cached_tokens,
            reasoning=self.reasoning,
            reasoning_s=ended_s - began_s if self._reasoning_at_s else None,
            tool_calls=self.tool_calls,
        )

    def _take_counts(self, answer: dict[str, Any]) -> None:
        usage, timings = _object(answer.get("usage")), _object(answer.get("timings"))
        details = _object(usage.get("prompt_tokens_details"))
        self._prompt_tokens = _count(usage.get("prompt_tokens"), self._prompt_tokens)
        self._output_tokens = _count(usage.get("completion_tokens"), self._output_tokens)
        self.cached_tokens = _count(timings.get("cache_n"), self.cached_tokens)  # llama.cpp's
        self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)

    def _take_pieces(self, choice: dict[str, Any], part: dict[str, Any], at_s: float) -> list[Chunk]:
        reasoning = part.get("reasoning") or part.get("reasoning_content")  # vLLM's old name, llama.cpp's only one
        text = part.get("content") or choice.get("text")
        chunks = []
        if isinstance(reasoning, str) and reasoning:
            reasoning = _without_halves(reasoning)
            self._reasonings.append(reasoning)
            chunks.append(Chunk(reasoning, at_s, is_reasoning=True))
        if isinstance(text, str) and text:
            text = _without_halves(text)
            self._texts.append(text)
            chunks.append(Chunk(text, at_s))
        calls = part.get("tool_calls")
        if isinstance(calls, list) and calls:
            for at, call in enumerate(calls):
                self._take_call(_object(call), at)
            chunks.append(Chunk("", at_s, tool_calls=self.tool_calls))
        for chunk in chunks:
            self._mark(at_s, chunk.is_reasoning)
        return chunks

    def _take_call(self, call: dict[str, Any], at: int) -> None:
        """A whole call, or a piece of the one with its index: the name comes first, the arguments grow."""
        index = call.get("index")
        row = self._calls.setdefault(index if isinstance(index, int) else at, _Call())
        function = _object(call.get("function"))
        name, arguments = function.get("name"), function.get("arguments")
        if isinstance(name, str) and name:
            row.name = _without_halves(name)
        if arguments is not None:
            row.arguments.append(_without_halves(arguments) if isinstance(arguments, str) else json.dumps(arguments))

    def _mark(self, at_s: float, is_reasoning: bool) -> None:
        self._first_at_s = at_s if self._first_at_s is None else self._first_at_s
        self._n_moments += at_s != self._last_at_s
        self._last_at_s = at_s
        if is_reasoning or (self._reasoning_at_s and not self._is_answering):
            self._reasoning_at_s = (self._reasoning_at_s or (at_s, at_s))[0], at_s
        self._is_answering = self._is_answering or not is_reasoning


class StreamReader:
    """One streamed answer: `feed` the bytes of the response's body as they come.

    Give `replica` and `request_id` from its headers x-penstock-replica and x-request-id. A gateway that held the stream
    names the replica later, in a comment.
    """

    def __init__(self, replica: str | None, request_id: str | None) -> None:
        self._has_replica = replica not in (None, "none")
        self.answer = AnswerReader(replica if self._has_replica else None, request_id)
        self.is_done = False  # what follows means nothing
        self._comments: list[str] = []
        self._parser = Parser(on_comment=self._comments.append)

    def begin(self) -> list[Waiting]:
        """What the headers tell already: a replica has the request, unless the gateway holds it."""
        return [Waiting(PROMPT_STAGE, replica=self.answer.replica)] if self._has_replica else []

    def feed(self, data: bytes, at_s: float) -> Iterator[Chunk | Waiting]:
        """What these bytes complete, read as it is iterated; empty `data` is the end of the body. Raises BrokenAnswer
        and PenstockError, after the pieces that came before the error."""
        events = self._parser.feed(data) if data else self._parser.close()
        for comment in self._comments:
            waiting = read_comment(comment)
            if waiting is not None:
                self.answer.replica = waiting.replica or self.answer.replica
                yield waiting
        self._comments.clear()
        for event in events:
            if event.data.strip() == DONE:
                self.is_done = True
                break
            yield from self.answer.take(decode_json(event.data.encode(), "the stream"), at_s)
        self.is_done = self.is_done or not data

    def reply(self, duration_s: float) -> Reply:
        """The whole answer. Raises BrokenAnswer when the server ended it without a finish reason."""
        reply = self.answer.reply(duration_s)
        if reply.finish_reason is None:
            detail = f"The stream ended without a finish reason after {len(reply.text)} characters."
            raise BrokenAnswer("the answer broke off: the server ended the stream early", detail=detail)
        return reply


def http_error(
    url: str, status: int, reason: str, body: bytes, retry_after: str | None = None, request_id: str | None = None
) -> HttpError:
    """The error of a response with this `status`; `retry_after` and `request_id` are headers."""
    words = read_body_words(body)
    after = retry_after or ""
    return HttpError(
        f"{url} answered {status}: {words.message or reason}",
        status,
        hint="Check the API key." if status == 401 else None,
        retry_after_s=float(after) if after.isascii() and after.isdigit() else None,
        words=words,
        request_id=request_id,
    )


def decode_json(body: bytes, source: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as exc:
        shown = body[:_BODY_SHOWN_CHARS].decode("utf-8", "replace")
        raise PenstockError(f"cannot read {source}: not JSON", detail=shown or None) from exc


def read_body_words(body: bytes) -> ServerWords:
    """The words of an error body: OpenAI's object, a bare string, {"detail": ...} or plain text."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return ServerWords(" ".join(body[:_BODY_SHOWN_CHARS].decode("utf-8", "replace").split()))
    return read_words(answer) if isinstance(answer, dict) else ServerWords(str(answer)[:_BODY_SHOWN_CHARS])


def read_words(answer: dict[str, Any]) -> ServerWords:
    error = answer.get("error") or answer.get("detail") or answer.get("message") or ""
    if not isinstance(error, dict):
        return ServerWords(_line(error))
    code = error.get("code")
    return ServerWords(
        message=_line(error.get("message") or error),
        code=str(code) if isinstance(code, str | int) else None,
        kind=_word(error.get("type")),
        param=_word(error.get("param")),
        source=_word(error.get("source")),
        prompt_tokens=_count(error.get("n_prompt_tokens"), None),
        context_tokens=_count(error.get("n_ctx"), None),
    )


class _Call:
    def __init__(self) -> None:
        self.name = ""
        self.arguments: list[str] = []

    def whole(self) -> ToolCall:
        text = "".join(self.arguments)
        self.arguments = [text]
        return ToolCall(self.name, text)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object, otherwise: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else otherwise


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _line(value: object) -> str:
    return _without_halves(" ".join(str(value).split()))


def _without_halves(text: str) -> str:
    """JSON can hold half of a surrogate pair, which no file, terminal or other JSON takes: it becomes U+FFFD."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
