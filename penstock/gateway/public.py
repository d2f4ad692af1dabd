"""What the public address serves: health, models and metrics from here, everything else from an engine."""

from __future__ import annotations

import re
import time
from typing import Final
from urllib.parse import parse_qs, unquote

from penstock.gateway.accounting.entry import Accounting
from penstock.gateway.accounting.keys import KeyHolder
from penstock.gateway.body_fields import ModelFacts
from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.gateway.connections.client import BodyOwner, ClientConnection
from penstock.gateway.context import GatewayContext
from penstock.gateway.forwarding import Forwarding
from penstock.gateway.origins import origin_headers, preflight_headers
from penstock.gateway.request import Request, RequestFacts, UnreadableError, read_facts
from penstock.gateway.responses import Answer, error_answer, json_answer
from penstock.gateway.routing.replicas import NO_HINTS, RoutingHints
from penstock.gateway.workers.reports import Reporter, metrics_answer
from penstock.wire.http1 import Headers, RequestHead

_OWN_PATHS: Final = (b"/health", b"/metrics", b"/v1/models")
_MODEL_PATH: Final = b"/v1/models/"
# No segment begins with a dot: no ".." reaches an engine.
_ENGINE_PATH: Final = re.compile(rb"(?:/v1(?:/[A-Za-z0-9_\-][A-Za-z0-9_.:\-]*)+|/tokenize|/detokenize)/?")
_RESPONSE_PATH: Final = re.compile(rb"/v1/responses/(resp_[A-Za-z0-9_\-]{1,128})(?:/.*)?")
_ENGINE_METHODS: Final = (b"POST", b"GET", b"DELETE")
_POST_PATHS: Final = frozenset(
    (b"/tokenize", b"/detokenize", b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings")
    + (b"/v1/rerank", b"/v1/score", b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/v1/audio/speech")
)


class Public:
    def __init__(
        self, config: GatewayConfig, accounting: Accounting, context: GatewayContext, reporter: Reporter
    ) -> None:
        self._accounting = accounting
        self._context = context
        self._reporter = reporter
        self._replicas = context.replicas
        self._policy = config.policy
        self._names = {model.name: (model.name, *model.aliases) for model in context.replicas.models}
        self._created = int(time.time())

    def refuse(self, head: RequestHead, *, is_whole: bool) -> Answer | None:
        """Preflights, missing keys, unknown paths and wrong methods. `handle` checks the key of a whole request."""
        if head.method == b"OPTIONS":
            return Answer(204, headers=preflight_headers(head.get(b"access-control-request-headers")))
        refusal = _refuse_path(head)
        if is_whole and refusal is None:
            return None
        if head.path != b"/health" and self._context.needs_key:
            holder = self._accounting.find(head)
            if holder is None:
                return self._refuse_key()
            limit = holder.quota.refuse_body() if refusal is None else None
            if limit is not None:
                return self._accounting.over_limit(limit, holder, time.monotonic())
        return refusal

    def body_owner(self, head: RequestHead) -> BodyOwner | None:
        holder = self._accounting.find(head) if self._context.needs_key else None
        return holder.quota if holder is not None else None

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        path = request.head.path
        if path == b"/health":
            n_ready = sum(self._count_ready().values())
            return json_answer({"status": "ok", "ready_replicas": n_ready})
        holder = self._accounting.find(request.head) if self._context.needs_key else None
        if holder is None and self._context.needs_key:
            # Also of a body that took its time, while its key ended. From here on None means: no keys needed.
            return self._refuse_key()
        is_own = path in _OWN_PATHS or path.startswith(_MODEL_PATH)
        if not is_own:
            return self._forward(request, client, holder)
        if path == b"/metrics":
            return self._reporter.respond(client, metrics_answer)
        if path == b"/v1/models":
            data = [self._facts(model) for model in self._replicas.models if self._may_use(holder, model)]
            return json_answer({"object": "list", "data": data})
        return self._answer_model(holder, unquote(path.removeprefix(_MODEL_PATH).decode("latin-1")))

    def origin_headers(self, head: RequestHead) -> Headers:
        return origin_headers(head.get(b"origin"), self._context.needs_key, self._context.allowed_origins)

    def _refuse_key(self) -> Answer:
        self._accounting.n_unknown_keys += 1
        message = "a valid key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        return error_answer(401, message, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))

    def _forward(self, request: Request, client: ClientConnection, holder: KeyHolder | None) -> Answer | None:
        head = request.head
        try:
            facts = read_facts(request, wants_prefix=self._policy == "prefix")
        except UnreadableError as error:
            return error_answer(400, str(error), "invalid_body")
        name = facts.model
        if name is None and head.method != b"POST":
            name = _read_query_model(head.target)
        response_id = facts.response_id or _find_response_id(head.path)
        place = self._context.response_owners.find(response_id) if response_id else None
        model = place[0] if place is not None and name is None else self._replicas.resolve(name)
        if model is None and name is None:
            return error_answer(400, "the request names no model, and several are served", "model_missing", "model")
        if model is None:
            assert name is not None
            return _unknown_model(name)
        if holder is not None and not holder.may_use(name or model, *self._names[model]):
            self._accounting.refuse(facts, model, holder, 403)
            return _forbidden_model(name or model)
        forwarding = Forwarding(self._context, request, client, model, facts)
        forwarding.start(self._hints(facts, name, place), self._accounting.open(facts, model, holder, request.body))
        return None

    def _hints(self, facts: RequestFacts, name: str | None, place: tuple[str, str] | None) -> RoutingHints:
        key = facts.session if self._policy == "sticky" else facts.prefix
        replica = place[1] if place is not None else facts.replica
        adapter = name if self._replicas.has_adapter(name) else None
        return RoutingHints(key, adapter, replica) if key or replica or adapter else NO_HINTS

    def _may_use(self, holder: KeyHolder | None, model: ServedModel) -> bool:
        return holder is None or holder.may_use(*self._names[model.name])

    def _answer_model(self, holder: KeyHolder | None, name: str) -> Answer:
        known = self._replicas.resolve(name)
        for model in self._replicas.models:
            if model.name == known:
                if not self._may_use(holder, model):
                    return _forbidden_model(name)
                return json_answer(self._facts(model))
        return _unknown_model(name)

    def _count_ready(self) -> dict[str, int]:
        now = time.monotonic()
        return {model.name: len(self._replicas.ready(model.name, now)) for model in self._replicas.models}

    def _facts(self, model: ServedModel) -> ModelFacts:
        state = self._replicas.model_state(model.name, time.monotonic())
        return ModelFacts(model.name, self._created, model.aliases, state)


def _refuse_path(head: RequestHead) -> Answer | None:
    path = head.path
    if path in _POST_PATHS and head.method == b"POST":
        return None
    is_own = path in _OWN_PATHS or path.startswith(_MODEL_PATH)
    if not is_own and not _ENGINE_PATH.fullmatch(path):
        return error_answer(404, f"there is nothing at {path.decode('latin-1')!r}", "not_found")
    allowed = (b"GET", b"HEAD") if is_own else (b"POST",) if path in _POST_PATHS else _ENGINE_METHODS
    if head.method not in allowed:
        method = head.method.decode("latin-1")
        return error_answer(405, f"not with {method}", "method_not_allowed", headers=((b"allow", b", ".join(allowed)),))
    return None


def _read_query_model(target: bytes) -> str | None:
    names = parse_qs(target.partition(b"?")[2].decode("latin-1")).get("model")
    return names[0] if names else None


def _find_response_id(path: bytes) -> bytes:
    found = _RESPONSE_PATH.fullmatch(path) if path.startswith(b"/v1/responses/") else None
    return found.group(1) if found else b""


def _unknown_model(name: str) -> Answer:
    return error_answer(404, f"the model {name!r} does not exist", "model_not_found", "model")


def _forbidden_model(name: str) -> Answer:
    return error_answer(403, f"this key may not use the model {name!r}", "model_not_allowed", "model")
