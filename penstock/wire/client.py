"""A small synchronous client for OpenAI's API and for our own JSON. One connection per call, no proxies."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.errors import PenstockError, UserError
from penstock.text import show_seconds
from penstock.wire.answers import (
    AnswerReader,
    Chunk,
    HttpError,
    NoAnswer,
    Reply,
    StreamReader,
    decode_json,
    http_error,
)
from penstock.wire.model_list import ModelCard, read_models
from penstock.wire.sse import Event, Parser
from penstock.wire.waiting import PROGRESS_HEADER, Waiting

_PEM_END = "-----END CERTIFICATE-----"
_PIECE_BYTES = 65536
Message = Mapping[str, object]  # {"role": "user", "content": "..."}, as OpenAI's API takes it
Stream = Generator[Chunk | Reply, None, None]  # chunks, then one reply


def tls_context(is_insecure: bool = False, pinned: str | None = None, ca_file: str | None = None) -> ssl.SSLContext:
    """Certificates as OpenSSL finds them (`SSL_CERT_FILE`), or none checked.

    `pinned`: the server must have the first certificate of that PEM file, whatever name it is reached by. `ca_file`:
    its certificate is signed by one of that PEM file.
    """
    if pinned is not None:
        try:
            first, end, _ = Path(pinned).read_text("ascii").partition(_PEM_END)
            context = ssl.create_default_context(cadata=first + end)
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            raise UserError(f'cannot read certificate "{pinned}": {exc}') from exc
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as exc:
        raise UserError(f'cannot read certificates "{ca_file}": {exc.strerror or exc}') from exc
    if is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Client:
    """Talks to one base URL, with or without "/v1" at its end. Safe to share between threads: it holds no connection.

    `timeout_s` bounds the connect and each wait for more bytes, not the whole answer. `clock` gives seconds.
    `is_insecure`: the server's certificate is not checked; `pinned`: a PEM file with the one that it has; `ca_file`: a
    PEM file with those that sign it.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
        is_insecure: bool = False,
        pinned: str | None = None,
        ca_file: str | None = None,
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
        self._root = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        self.base_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._root}"
        self.api_key = api_key
        self.timeout_s = timeout_s
        self._clock = clock
        self._host, self._port = parts.hostname, port
        self._is_tls = parts.scheme == "https"
        self._is_insecure, self._pinned, self._ca_file = is_insecure, pinned, ca_file

    def models(self) -> tuple[ModelCard, ...]:
        return read_models(self.get_json("/v1/models"), self.base_url)

    def chat(self, messages: Sequence[Message], model: str | None = None, **fields: object) -> Reply:
        """One answer to a conversation, not streamed. Without `model` the server takes its only one.

        `fields`: others of the API's (max_tokens, temperature, ...); None is left to the server.
        """
        return self._whole("/v1/chat/completions", {"messages": [*messages], "model": model} | fields)

    def complete(self, prompt: str, model: str | None = None, **fields: object) -> Reply:
        return self._whole("/v1/completions", {"prompt": prompt, "model": model} | fields)

    def stream_chat(
        self,
        messages: Sequence[Message],
        model: str | None = None,
        on_wait: Callable[[Waiting], object] | None = None,
        **fields: object,
    ) -> Stream:
        """Chunks as they come, then one Reply. Closing the iterator early closes the connection: the engine stops.

        `on_wait` hears what the answer waits for, each second, until a replica has the request.
        """
        return self._stream("/v1/chat/completions", {"messages": [*messages], "model": model} | fields, on_wait)

    def stream_complete(
        self,
        prompt: str,
        model: str | None = None,
        on_wait: Callable[[Waiting], object] | None = None,
        **fields: object,
    ) -> Stream:
        """As `stream_chat`, for a raw prompt."""
        return self._stream("/v1/completions", {"prompt": prompt, "model": model} | fields, on_wait)

    def get_json(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON behind GET `path` ("/admin/replicas"). Raises HttpError, NoAnswer or PenstockError."""
        return self._json("GET", path, None, headers)

    def get_text(self, path: str) -> str:
        """As `get_json`, as text ("/metrics", "/health")."""
        return self.send("GET", path).decode("utf-8", "replace")

    def post_json(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that answers POST `path`. `body` may be anything msgspec encodes, our structs included."""
        return self._json("POST", path, msgspec.json.encode(body), headers)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        with self._exchange(method, path, body, headers) as response:
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
            return decode_json(response.read(), f"{method} {self.base_url}{path}")

    def _whole(self, path: str, fields: Mapping[str, object]) -> Reply:
        sent_at = self._clock()
        with self._exchange("POST", path, _encode(fields)) as response:
            answer = decode_json(response.read(), f"POST {self.base_url}{path}")
            reader = AnswerReader(response.getheader("x-penstock-replica"), response.getheader("x-request-id"))
        reader.take(answer, 0.0)
        return replace(reader.reply(self._clock() - sent_at), ttft_s=None, reasoning_s=None)

    def _stream(
        self, path: str, fields: Mapping[str, object], on_wait: Callable[[Waiting], object] | None = None
    ) -> Stream:
        sent_at = self._clock()
        body = _encode({**fields, "stream": True, "stream_options": {"include_usage": True}})
        headers = {PROGRESS_HEADER: "1"} if on_wait is not None else {}
        with self._exchange("POST", path, body, headers) as response:
            reader = StreamReader(response.getheader("x-penstock-replica"), response.getheader("x-request-id"))
            if on_wait is not None:
                for waiting in reader.begin():
                    on_wait(waiting)
            while not reader.is_done:
                data = response.read1(_PIECE_BYTES)
                for piece in reader.feed(data, self._clock() - sent_at):
                    if isinstance(piece, Chunk):
                        yield piece
                    elif on_wait is not None:
                        on_wait(piece)
            reply = reader.reply(self._clock() - sent_at)
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
            context = tls_context(self._is_insecure, self._pinned, self._ca_file)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self.timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout_s)
        doing, answered_at = "could not connect to", None
        try:
            with contextlib.closing(connection):
                connection.connect()
                doing = "lost the connection to"
                connection.request(method, self._root + path, body, lines | dict(headers or {}))
                # Closed too: a response that ends with its connection has taken the socket over.
                with connection.getresponse() as response:
                    if response.status >= 400:
                        raise self._http_error(path, response)
                    answered_at = time.monotonic()
                    yield response
        except (OSError, http.client.HTTPException) as exc:
            answered_s = None if answered_at is None else time.monotonic() - answered_at
            raise self._explain(exc, doing, answered_s) from exc

    def _http_error(self, path: str, response: http.client.HTTPResponse) -> HttpError:
        body, header = response.read(_PIECE_BYTES), response.getheader
        return http_error(
            *(f"{self.base_url}{path}", response.status, response.reason, body),
            *(header("retry-after"), header("x-request-id")),
        )

    def _explain(self, exc: OSError | http.client.HTTPException, doing: str, answered_s: float | None) -> PenstockError:
        """A connection's failure in words, and whether to try again. `answered_s`: how long the answer had lasted."""
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
        if answered_s is None:
            return PenstockError(f"{doing} {where}: {what}", is_retryable=True)
        # Proxies of rented places end answers after 30 or 60 s, also those that stream.
        hint = "If answers end after the same time again, a proxy in between limits them: raise its limit."
        message = f"{doing} {where}: {what} {show_seconds(answered_s)} after the answer began"
        return PenstockError(message, hint=hint, is_retryable=True)


def _encode(fields: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
