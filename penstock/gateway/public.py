"""What the public address serves: health, models and metrics from here, everything else from an engine."""

from __future__ import annotations

import re
import time
from urllib.parse import unquote

import msgspec

from penstock.gateway.access import has_key, origin_headers, preflight_headers
from penstock.gateway.answer import Answer, error_answer, json_answer
from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.gateway.exposition import CONTENT_TYPE, write_metrics
from penstock.gateway.fleet import ModelState
from penstock.gateway.forward import Desk, Passage
from penstock.gateway.http1 import Headers, RequestHead
from penstock.gateway.server import ClientConnection, Request, Work

_OWN_PATHS = (b"/health", b"/metrics", b"/v1/models")
_MODEL_PATH = b"/v1/models/"
_ENGINE_PATH = re.compile(rb"(?:/v1(?:/[A-Za-z0-9_\-]+)+|/tokenize|/detokenize)/?")


class _Addressee(msgspec.Struct):
    """The one field of a request body that the gateway reads."""

    model: str | None = None


class _ModelFacts(msgspec.Struct, frozen=True):
    id: str
    created: int
    aliases: tuple[str, ...]
    state: ModelState
    object: str = "model"
    owned_by: str = "penstock"


class Public:
    """The handler of the public listener."""

    def __init__(self, config: GatewayConfig, desk: Desk) -> None:
        self._key_hashes = config.key_hashes
        self._desk = desk
        self._fleet = desk.fleet
        self._created = int(time.time())

    def refuse(self, head: RequestHead) -> Answer | None:
        """Preflights, missing keys, unknown paths and wrong methods."""
        path = head.path
        if head.method == b"OPTIONS":
            asked = head.get(b"access-control-request-headers")
            return Answer(204, headers=preflight_headers(asked))
        if path != b"/health" and not self._may_ask(head):
            message = "a valid key is needed: Authorization: Bearer KEY"
            return error_answer(401, message, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))
        is_own = path in _OWN_PATHS or path.startswith(_MODEL_PATH)
        if not is_own and not _ENGINE_PATH.fullmatch(path):
            return error_answer(404, f"there is nothing at {path.decode('latin-1')!r}", "not_found")
        allowed = (b"GET", b"HEAD") if is_own else (b"POST",)
        if head.method not in allowed:
            method = head.method.decode("latin-1")
            return error_answer(
                405, f"not with {method}", "method_not_allowed", headers=((b"allow", b", ".join(allowed)),)
            )
        return None

    def handle(self, request: Request, client: ClientConnection) -> Answer | Work:
        if request.head.method == b"POST":
            return self._forward(request, client)
        path = request.head.path
        if path == b"/health":
            n_ready = sum(self._count_ready().values())
            return json_answer({"status": "ok", "ready_replicas": n_ready})
        if path == b"/metrics":
            return self._answer_metrics()
        if path == b"/v1/models":
            data = [self._facts(model) for model in self._fleet.models]
            return json_answer({"object": "list", "data": data})
        return self._answer_model(unquote(path.removeprefix(_MODEL_PATH).decode("latin-1")))

    def origin_headers(self, head: RequestHead) -> Headers:
        return origin_headers(head.get(b"origin"), self._desk.needs_key)

    def _may_ask(self, head: RequestHead) -> bool:
        return not self._desk.needs_key or has_key(head.get(b"authorization"), self._key_hashes)

    def _forward(self, request: Request, client: ClientConnection) -> Answer | Work:
        try:
            name = _read_model(request)
        except msgspec.DecodeError as error:
            return error_answer(400, f"the request body cannot be routed: {error}", "invalid_body")
        model = self._fleet.resolve(name)
        if model is not None:
            return Passage(self._desk, request, client, model).run
        if name is None:
            return error_answer(400, "the request names no model, and several are served", "model_missing", "model")
        return _unknown_model(name)

    def _answer_model(self, name: str) -> Answer:
        known = self._fleet.resolve(name)
        for model in self._fleet.models:
            if model.name == known:
                return json_answer(self._facts(model))
        return _unknown_model(name)

    def _answer_metrics(self) -> Answer:
        desk = self._desk
        view = self._fleet.view(time.monotonic(), desk.hold.waiting, desk.counters.n_requests)
        waiting = {model.name: desk.hold.waiting_for(model.name) for model in self._fleet.models}
        return Answer(200, write_metrics(view, desk.counters, waiting, self._count_ready()), CONTENT_TYPE)

    def _count_ready(self) -> dict[str, int]:
        now = time.monotonic()
        return {model.name: len(self._fleet.ready(model.name, now)) for model in self._fleet.models}

    def _facts(self, model: ServedModel) -> _ModelFacts:
        state = self._fleet.model_state(model.name, time.monotonic())
        return _ModelFacts(model.name, self._created, model.aliases, state)


def _read_model(request: Request) -> str | None:
    """The body's "model". Raises msgspec.DecodeError when the body is not a JSON object.

    Form bodies (audio uploads) have theirs in a part that the gateway does not read: None.
    """
    if (request.head.get(b"content-type") or b"").lower().startswith(b"multipart/"):
        return None
    return msgspec.json.decode(request.body, type=_Addressee).model


def _unknown_model(name: str) -> Answer:
    return error_answer(404, f"the model {name!r} does not exist", "model_not_found", "model")
