"""A small synchronous client for OpenAI's API and for our own JSON. One connection per call, no proxies."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock import __version__
from penstock.errors import PenstockError, UserError
from penstock.text import show_seconds
from penstock.wire.sse import DONE, Event, Parser

RETRYABLE = frozenset({429, 502, 503, 504})
_PIECE_BYTES = 65536
_BODY_SHOWN_CHARS = 500
Message = Mapping[str, object]  # {"role": "user", "content": "..."}, as OpenAI's API takes it


@dataclass(frozen=True)
class Chunk:
    """A piece of the answer, `at_s` seconds after the request was sent. May hold many tokens."""

    text: str
    at_s: float
    is_reasoning: bool = False


@dataclass(frozen=True)
class Reply:
    """The whole answer. Counts come from the server's usage, never from chunks; None where it did not say.

    `ttft_s`: to the first piece, only when streamed. `tokens_per_s`: (output_tokens - 1) / (time from the first piece
    to the last); None for fewer than two pieces. 11 tokens, first at 0.5 s, last at 1.0 s: 10 / 0.5 = 20.
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


@dataclass(frozen=True)
class ModelCard:
    """One row of /v1/models; `state` and `aliases` are what a penstock gateway adds."""

    name: str
    state: str | None = None
    aliases: tuple[str, ...] = ()


Stream = Generator[Chunk | Reply, None, None]  # chunks, then one reply


class HttpError(PenstockError):
    """The server answered with an error status; the message carries the server's words."""

    def __init__(
        self, message: str, status: int, *, hint: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, hint=hint, is_retryable=status in RETRYABLE)
        self.status = status
        self.retry_after_s = retry_after_s


class NoAnswer(PenstockError):
    """The server took the request and sent nothing for `timeout_s`."""


def tls_context(is_insecure: bool) -> ssl.SSLContext:
    """Certificates as OpenSSL finds them (`SSL_CERT_FILE`), or none checked."""
    context = ssl.create_default_context()
    if is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Client:
    """Talks to one base URL, with or without "/v1" at its end. Safe to share between threads: it holds no connection.

    `timeout_s` bounds the connect and each wait for more bytes, not the whole answer. `clock` gives seconds.
    `is_insecure`: the server's certificate is not checked.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
        is_insecure: bool = False,
    ) -> None:
        try:
            parts = urllib.parse.urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            port = parts.port
        except ValueError:
            is_usable = False
        if not is_usable or parts.hostname is None:
            raise UserError(f'cannot use base URL "{base_url}"', hint="Give http://HOST:PORT or https://HOST.")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UserError(
                "cannot use the API key: it holds characters that no header may", hint="Check OPENAI_API_KEY."
            )
        self.base_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{_root(parts.path)}"
        self.api_key = api_key
        self.timeout_s = timeout_s
        self._clock = clock
        self._host, self._port = parts.hostname, port
        self._is_tls = parts.scheme == "https"
        self._is_insecure = is_insecure
        self._root = _root(parts.path)

    def models(self) -> tuple[ModelCard, ...]:
        answer = self.get_json("/v1/models")
        rows = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            raise PenstockError(f"cannot read the models of {self.base_url}: no list in its answer")
        return tuple(
            ModelCard(str(row.get("id")), row.get("state"), tuple(row.get("aliases") or ()))
            for row in rows
            if isinstance(row, dict)
        )

    def chat(self, messages: Sequence[Message], model: str | None = None, **fields: object) -> Reply:
        """One answer to a conversation, not streamed. Without `model` the server takes its only one.

        `fields`: others of the API's (max_tokens, temperature, ...); None is left to the server.
        """
        return self._whole("/v1/chat/completions", {"messages": [*messages], "model": model} | fields)

    def complete(self, prompt: str, model: str | None = None, **fields: object) -> Reply:
        return self._whole("/v1/completions", {"prompt": prompt, "model": model} | fields)

    def stream_chat(self, messages: Sequence[Message], model: str | None = None, **fields: object) -> Stream:
        """Chunks as they come, then one Reply. Closing the iterator early closes the connection: the engine stops."""
        return self._stream("/v1/chat/completions", {"messages": [*messages], "model": model} | fields)

    def stream_complete(self, prompt: str, model: str | None = None, **fields: object) -> Stream:
        """As `stream_chat`, for a raw prompt."""
        return self._stream("/v1/completions", {"prompt": prompt, "model": model} | fields)

    def get_json(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON behind GET `path` ("/admin/replicas"). Raises HttpError, NoAnswer or PenstockError."""
        return self._json("GET", path, None, headers)

    def get_text(self, path: str) -> str:
        """As `get_json`, as text ("/metrics", "/health")."""
        return self.send("GET", path).decode("utf-8", "replace")

    def post_json(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that answers POST `path`. `body` may be anything msgspec encodes, our structs included."""
        return self._json("POST", path, msgspec.json.encode(body), headers)

    def send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        with self._exchange(method, path, body) as response:
            return response.read()

    def get_events(self, path: str) -> Generator[Event, None, None]:
        """The server-sent events behind GET `path`, until the server ends them. Closing the iterator closes the
        connection."""
        parser = Parser()
        with self._exchange("GET", path, None) as response:
            while piece := response.read1(_PIECE_BYTES):
                yield from parser.feed(piece)

    def _json(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None) -> Any:
        with self._exchange(method, path, body, headers) as response:
            return _decode(response.read(), f"{method} {self.base_url}{path}")

    def _whole(self, path: str, fields: Mapping[str, object]) -> Reply:
        sent_at = self._clock()
        with self._exchange("POST", path, _encode(fields)) as response:
            answer = _decode(response.read(), f"POST {self.base_url}{path}")
            tally = _Tally(response)
        tally.take(answer)
        return tally.reply(self._clock() - sent_at)

    def _stream(self, path: str, fields: Mapping[str, object]) -> Stream:
        sent_at = self._clock()
        body = _encode({**fields, "stream": True, "stream_options": {"include_usage": True}})
        with self._exchange("POST", path, body) as response:
            tally = _Tally(response)
            for event in _events(response):
                for text, is_reasoning in tally.take(event):
                    chunk = Chunk(text, self._clock() - sent_at, is_reasoning)
                    tally.mark(chunk.at_s)
                    yield chunk
            reply = tally.reply(self._clock() - sent_at)
        if reply.finish_reason is None:
            detail = f"The stream ended without a finish reason after {len(reply.text)} characters."
            message = "the answer broke off: the server ended the stream early"
            raise PenstockError(message, detail=detail, is_retryable=True)
        yield reply

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """One request and its response: every failure inside becomes a PenstockError, every exit closes."""
        lines = {"accept": "application/json, text/event-stream", "user-agent": f"penstock/{__version__}"}
        if body is not None:
            lines["content-type"] = "application/json"
        if self.api_key:
            lines["authorization"] = f"Bearer {self.api_key}"
        if self._is_tls:
            context = tls_context(self._is_insecure)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self.timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout_s)
        doing = "could not connect to"
        try:
            with contextlib.closing(connection):
                connection.connect()
                doing = "lost the connection to"
                connection.request(method, self._root + path, body, lines | dict(headers or {}))
                # Closed too: a response that ends with its connection has taken the socket over.
                with connection.getresponse() as response:
                    if response.status >= 400:
                        raise self._http_error(path, response)
                    yield response
        except (OSError, http.client.HTTPException) as exc:
            raise self._explain(exc, doing) from exc

    def _http_error(self, path: str, response: http.client.HTTPResponse) -> HttpError:
        words = _server_message(response.read(_PIECE_BYTES)) or response.reason
        after = response.getheader("retry-after", "")
        return HttpError(
            f"{self.base_url}{path} answered {response.status}: {words}",
            response.status,
            hint="Check the API key." if response.status == 401 else None,
            retry_after_s=float(after) if after.isdigit() else None,
        )

    def _explain(self, exc: OSError | http.client.HTTPException, doing: str) -> PenstockError:
        """A connection's failure in words, and whether to try again."""
        where = self.base_url
        if isinstance(exc, TimeoutError):
            return NoAnswer(f"no answer from {where} within {show_seconds(self.timeout_s)}", is_retryable=True)
        if isinstance(exc, ConnectionRefusedError):
            hint = "Nothing listens there: is it running?"
            return PenstockError(f"could not connect to {where}: connection refused", hint=hint, is_retryable=True)
        if isinstance(exc, socket.gaierror):
            return PenstockError(f"cannot find the host of {where}: {exc.strerror}")
        if isinstance(exc, ssl.SSLError):
            hint = "For your own certificate: SSL_CERT_FILE=cert.pem, and a host name that the certificate names."
            reason = getattr(exc, "verify_message", None) or exc.reason or exc
            return PenstockError(f"cannot make a secure connection to {where}: {reason}", hint=hint)
        what = "the connection was closed" if isinstance(exc, http.client.IncompleteRead) else str(exc) or repr(exc)
        return PenstockError(f"{doing} {where}: {what}", is_retryable=True)


class _Tally:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._replica = response.getheader("x-penstock-replica")
        self._request_id = response.getheader("x-request-id")
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._model: str | None = None
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._first_at_s: float | None = None
        self._last_at_s = 0.0

    def take(self, answer: Any) -> list[tuple[str, bool]]:
        """Adds one JSON answer or chunk; returns its pieces of text, and whether each is reasoning."""
        if not isinstance(answer, dict):
            raise PenstockError("cannot read the answer: not a JSON object")
        if answer.get("error"):
            raise PenstockError(f"the answer broke off: {_message_of(answer)}", is_retryable=True)
        self._model = answer.get("model") or self._model
        usage = _object(answer.get("usage"))
        self._prompt_tokens = usage.get("prompt_tokens", self._prompt_tokens)
        self._output_tokens = usage.get("completion_tokens", self._output_tokens)
        choices = answer.get("choices")
        choice = _object(choices[0] if isinstance(choices, list) and choices else None)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        part = _object(choice.get("delta") or choice.get("message"))
        reasoning = part.get("reasoning") or part.get("reasoning_content")  # vLLM's old name
        text = part.get("content") or choice.get("text")
        if text:
            self._texts.append(text)
        return [(piece, piece is reasoning) for piece in (reasoning, text) if piece]

    def mark(self, at_s: float) -> None:
        self._first_at_s = at_s if self._first_at_s is None else self._first_at_s
        self._last_at_s = at_s

    def reply(self, duration_s: float) -> Reply:
        seconds = self._last_at_s - (self._first_at_s or 0.0)
        has_speed = seconds > 0 and self._output_tokens is not None and self._output_tokens > 1
        return Reply(
            text="".join(self._texts),
            finish_reason=self._finish_reason,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            ttft_s=self._first_at_s,
            duration_s=duration_s,
            tokens_per_s=((self._output_tokens or 0) - 1) / seconds if has_speed else None,
            replica=self._replica,
            request_id=self._request_id,
            model=self._model,
        )


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    parser = Parser()
    while True:
        piece = response.read1(_PIECE_BYTES)
        for event in parser.feed(piece) if piece else parser.close():
            if event.data.strip() == DONE:
                return
            yield _decode(event.data.encode(), "the stream")
        if not piece:
            return


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _encode(fields: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


def _decode(body: bytes, source: str) -> Any:
    try:
        return json.loads(body)
    except ValueError as exc:
        shown = body[:_BODY_SHOWN_CHARS].decode("utf-8", "replace")
        raise PenstockError(f"cannot read {source}: not JSON", detail=shown or None) from exc


def _server_message(body: bytes) -> str:
    """The message in an error body: OpenAI's object, a bare string, {"detail": ...} or plain text."""
    try:
        answer = json.loads(body)
    except ValueError:
        return " ".join(body[:_BODY_SHOWN_CHARS].decode("utf-8", "replace").split())
    return _message_of(answer) if isinstance(answer, dict) else str(answer)[:_BODY_SHOWN_CHARS]


def _message_of(answer: dict[str, Any]) -> str:
    error = answer.get("error") or answer.get("detail") or answer.get("message") or ""
    if isinstance(error, dict):
        error = error.get("message") or error
    return " ".join(str(error).split())


def _root(path: str) -> str:
    return path.rstrip("/").removesuffix("/v1").rstrip("/")
