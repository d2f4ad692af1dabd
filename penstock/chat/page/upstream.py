"""The gateway, or any server with OpenAI's API, asked by all visitors of the page at once: httpx, async, streaming.

Closing a stream early closes its connection, which ends the engine's work.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import httpx
import msgspec

from penstock import __version__
from penstock.errors import PenstockError
from penstock.text import show_seconds
from penstock.wire.answers import BrokenAnswer, Chunk, NoAnswer, Reply, StreamReader, decode_json, http_error
from penstock.wire.client import Message, tls_context
from penstock.wire.model_list import ModelCard, read_models
from penstock.wire.waiting import PROGRESS_HEADER, Waiting

Piece = Chunk | Waiting | Reply
Answer = AsyncGenerator[Piece, None]
_TIMEOUT_S = 600.0  # between two pieces: a gateway that holds a stream sends comments far more often
_CONNECT_S = 10.0
_ERROR_BYTES = 65536


class Upstream:
    """One server at `base_url`, with or without "/v1" at its end. `certificate`: the certificate that it has.

    `transport`: what a test puts in the place of sockets.
    """

    def __init__(
        self, base_url: str, certificate: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._http = httpx.AsyncClient(
            verify=tls_context(pinned=certificate),
            trust_env=False,
            transport=transport,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            headers={"user-agent": f"penstock/{__version__}", "accept": "application/json, text/event-stream"},
        )

    async def models(self, key: str | None) -> tuple[ModelCard, ...]:
        """Those of /v1/models. Raises HttpError, NoAnswer or PenstockError."""
        url = f"{self.base_url}/v1/models"
        try:
            response = await self._http.get(url, headers=_authorization(key), timeout=_CONNECT_S)
        except httpx.HTTPError as exc:
            raise self._explain(exc) from exc
        if response.status_code >= 400:
            raise http_error(url, response.status_code, response.reason_phrase, response.content)
        return read_models(decode_json(response.content, url), self.base_url)

    async def known_models(self, key: str | None) -> tuple[ModelCard, ...]:
        """As `models`; none while they cannot be asked for, which the chip at the top of the page explains."""
        try:
            return await self.models(key)
        except PenstockError:
            return ()

    def stream_chat(self, key: str | None, messages: Sequence[Message], fields: Mapping[str, object]) -> Answer:
        """What is waited for, pieces as they come, then one Reply; `fields`: `settings.fields`.

        Raises what `wire.client.Client.stream_chat` raises. Before BrokenAnswer, the answer so far comes as a Reply
        without a finish reason.
        """
        return self._stream("/v1/chat/completions", key, {"messages": [*messages], **fields})

    def stream_complete(self, key: str | None, prompt: str, fields: Mapping[str, object]) -> Answer:
        """As `stream_chat`, for a raw prompt."""
        return self._stream("/v1/completions", key, {"prompt": prompt, **fields})

    async def count(self, key: str | None, messages: Sequence[Message], model: str | None) -> object:
        """What POST /tokenize answers, for `failures.counted`; None where the server does not count."""
        body = msgspec.json.encode({"model": model, "messages": [*messages]})
        headers = {"content-type": "application/json", **_authorization(key)}
        try:
            response = await self._http.post(
                f"{self.base_url}/tokenize", content=body, headers=headers, timeout=_CONNECT_S
            )
            return decode_json(response.content, "the count") if response.is_success else None
        except (httpx.HTTPError, PenstockError):
            return None

    async def _stream(self, path: str, key: str | None, fields: Mapping[str, object]) -> Answer:
        sent_at, url, reader = time.perf_counter(), self.base_url + path, None
        body = msgspec.json.encode({**fields, "stream": True, "stream_options": {"include_usage": True}})
        headers = {"content-type": "application/json", PROGRESS_HEADER: "1", **_authorization(key)}
        try:
            async with self._http.stream("POST", url, content=body, headers=headers) as response:
                request_id = response.headers.get("x-request-id")
                if response.status_code >= 400:
                    after = response.headers.get("retry-after")
                    words = await anext(response.aiter_bytes(_ERROR_BYTES), b"")
                    raise http_error(url, response.status_code, response.reason_phrase, words, after, request_id)
                reader = StreamReader(response.headers.get("x-penstock-replica"), request_id)
                for waiting in reader.begin():
                    yield waiting
                async for data in response.aiter_bytes():
                    for piece in reader.feed(data, time.perf_counter() - sent_at):
                        yield piece
                    if reader.is_done:
                        break
                for piece in reader.feed(b"", time.perf_counter() - sent_at) if not reader.is_done else ():
                    yield piece
            yield reader.reply(time.perf_counter() - sent_at)
        except httpx.HTTPError as exc:
            if reader is None:
                raise self._explain(exc) from exc
            yield reader.answer.reply(time.perf_counter() - sent_at)
            raise BrokenAnswer(f"the answer broke off: lost the connection to {self.base_url}") from exc
        except BrokenAnswer:
            if reader is not None:
                yield reader.answer.reply(time.perf_counter() - sent_at)
            raise

    def _explain(self, exc: httpx.HTTPError) -> PenstockError:
        """A connection's failure in words, and whether to try again."""
        where, words = self.base_url, str(exc) or type(exc).__name__
        if isinstance(exc, httpx.ReadTimeout):
            return NoAnswer(f"no answer from {where} within {show_seconds(_TIMEOUT_S)}", is_retryable=True)
        if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
            return PenstockError(f"could not connect to {where}: {words}", is_retryable=True)
        return PenstockError(f"lost the connection to {where}: {words}", is_retryable=True)


def _authorization(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
