"""What the public address serves: health, models and what watchers read from here, all else from an engine."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qs, unquote

from penstock import __version__
from penstock.gateway.accounting.entry import Accounting
from penstock.gateway.accounting.keys import KeyHolder
from penstock.gateway.accounting.record import Record
from penstock.gateway.body_fields import ModelRow
from penstock.gateway.config import UNIX, GatewayConfig, ServedModel, parse_address
from penstock.gateway.connections.client import BodyOwner, ClientConnection
from penstock.gateway.context import GatewayContext
from penstock.gateway.live.page import landing_answer
from penstock.gateway.metrics.monitoring import MONITORING_METHODS, MONITORING_PATHS, Monitoring
from penstock.gateway.origins import SITE_HEADERS, SiteRule, origin_headers, preflight_headers
from penstock.gateway.request import BODY_ERRORS, Request, RequestFacts, UnreadableError, read_facts, rename_model
from penstock.gateway.requests.forwarded import ForwardedRequest
from penstock.gateway.requests.sending import forward
from penstock.gateway.responses import Answer, error_answer, json_answer
from penstock.gateway.routing.replicas import NO_HINTS, RoutingHints
from penstock.wire.http1 import Headers, RequestHead
from penstock.wire.model_list import ReplicaCount

_KEYLESS_PATHS: Final = frozenset((b"/", b"/health", b"/ping", b"/version"))
_OWN_PATHS: Final = _KEYLESS_PATHS | MONITORING_PATHS | {b"/load", b"/v1/models"}
_MODEL_PATH: Final = b"/v1/models/"
# No segment begins with a dot: no ".." reaches an engine.
_ENGINE_PATH: Final = re.compile(rb"(?:/v1(?:/[A-Za-z0-9_\-][A-Za-z0-9_.:\-]*)+|/tokenize|/detokenize)/?")
# By their first segment after /v1 or /: what changes an engine for everyone.
_ADMIN_ROUTE: Final = re.compile(
    rb"/v1/(?:(?:un)?load_|reset_|update_|init_|start_|stop_|sleep|wake_up|is_sleeping|pause|resume|shutdown|admin"
    rb"|collective_rpc|scale_|server_info|abort_)"
)
_RESPONSE_PATH: Final = re.compile(rb"/v1/responses/(resp_[A-Za-z0-9_\-]{1,128})(?:/.*)?")
_ENGINE_METHODS: Final = (b"POST", b"GET", b"HEAD", b"DELETE")
_POST_PATHS: Final = frozenset(
    (b"/tokenize", b"/detokenize", b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings")
    + (b"/v1/rerank", b"/v1/score", b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/v1/audio/speech")
)
_SHOWN: Final = 200  # characters of an unknown name: it may be as long as a body
_SITE_AND_VIA: Final = SITE_HEADERS | {b"via"}


class Public:
    def __init__(
        self, config: GatewayConfig, accounting: Accounting, context: GatewayContext, monitoring: Monitoring
    ) -> None:
        self._accounting, self._context, self._monitoring = accounting, context, monitoring
        self._replicas = context.replicas
        self._policy = config.policy
        self._names = {model.name: (model.name, *model.aliases) for model in context.replicas.models}
        self._created = int(context.unix())
        self._engine_routes = frozenset([route.encode() for route in config.engine_routes])
        listen = parse_address(config.listen)
        assert listen is not None
        # No web page reaches a Unix socket.
        has_rule = not context.needs_key and not listen[0].startswith(UNIX)
        self._site_rule = SiteRule(listen[0], context.allowed_origins) if has_rule else None
        # Engines that penstock did not start know a model by one name.
        served = {upstream.model or config.models[0].name for upstream in config.upstreams}
        self._foreign_aliases = {
            alias: model.name for model in config.models if model.name in served for alias in model.aliases
        }

    def refuse(self, head: RequestHead, *, is_whole: bool) -> Answer | None:
        """Preflights, missing keys, unknown paths and wrong methods. `handle` checks the key of a whole request."""
        if head.method == b"OPTIONS":
            return Answer(204, headers=preflight_headers(head.get(b"access-control-request-headers")))
        refusal = self._refuse_path(head)
        if is_whole and refusal is None:
            return None
        if (site_refusal := self._refuse_site(head)) is not None:
            return site_refusal
        if not self._context.needs_key or head.path in _KEYLESS_PATHS:
            return refusal
        if head.path in MONITORING_PATHS:
            return self._monitoring.refuse(head) or refusal
        holder = self._accounting.find(head)
        if holder is None:
            return self._refuse_key()
        limit = holder.quota.refuse_body() if refusal is None else None
        return refusal if limit is None else self._accounting.over_limit(limit, holder, self._context.now())

    def _refuse_site(self, head: RequestHead) -> Answer | None:
        """Refuses requests that went through this gateway before, and those that another site's page may have sent."""
        headers = head.pick(_SITE_AND_VIA)
        if b"via" in headers:
            names = b",".join([value for name, value in head.headers if name == b"via"])
            if self._context.pool.via in names:
                message = "the request came back to this gateway: it is an upstream of itself"
                return error_answer(508, message, "loop_detected")
        reason = self._site_rule.refuse(head.method, headers) if self._site_rule is not None else None
        return None if reason is None else error_answer(403, reason, "site_not_allowed")

    def body_owner(self, head: RequestHead) -> BodyOwner | None:
        holder = self._holder(head)
        return holder.quota if holder is not None else None

    def _holder(self, head: RequestHead) -> KeyHolder | None:
        return self._accounting.find(head) if self._context.needs_key else None

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        path = request.head.path
        if (refusal := self._refuse_site(request.head)) is not None:
            return refusal
        if path in _KEYLESS_PATHS:
            return self._answer_anyone(path)
        if path in MONITORING_PATHS:
            refusal = self._monitoring.refuse(request.head) if self._context.needs_key else None
            return refusal or self._monitoring.handle(request, client)
        holder = self._holder(request.head)
        if holder is None and self._context.needs_key:
            # Also of a body that took its time, while its key ended. From here on None means: no keys needed.
            return self._refuse_key()
        if path not in _OWN_PATHS and not path.startswith(_MODEL_PATH):
            return self._forward(request, client, holder)
        if path == b"/load":
            return json_answer({"server_load": self._replicas.in_flight_total + self._context.queue.waiting})
        if path == b"/v1/models":
            data = [self._row(model) for model in self._replicas.models if self._may_use(holder, model)]
            return json_answer({"object": "list", "data": data})
        return self._answer_model(holder, unquote(path.removeprefix(_MODEL_PATH).decode("latin-1")))

    def _answer_anyone(self, path: bytes) -> Answer:
        if path == b"/":
            return landing_answer()
        if path == b"/version":
            return json_answer({"version": __version__})
        n_ready = sum(len(self._replicas.ready(model.name, self._context.now())) for model in self._replicas.models)
        return json_answer({"status": "ok", "ready_replicas": n_ready})

    def origin_headers(self, head: RequestHead) -> Headers:
        return origin_headers(head.get(b"origin"), self._context.needs_key, self._context.allowed_origins)

    def _refuse_path(self, head: RequestHead) -> Answer | None:
        path = head.path
        if path in _POST_PATHS and head.method == b"POST":
            return None
        is_own = path in _OWN_PATHS or path.startswith(_MODEL_PATH)
        if not is_own and path not in self._engine_routes:
            if not _ENGINE_PATH.fullmatch(path):
                return error_answer(404, f"there is nothing at {path.decode('latin-1')!r}", "not_found")
            if _ADMIN_ROUTE.match(path):
                message = f"{path.decode()} administers an engine: gateway.engine_routes does not open it"
                return error_answer(403, message, "route_closed")
        allowed = MONITORING_METHODS if is_own else (b"POST",) if path in _POST_PATHS else _ENGINE_METHODS
        if head.method not in allowed and not (path == b"/ping" and head.method == b"POST"):
            method = head.method.decode("latin-1")
            headers = ((b"allow", b", ".join(allowed)),)
            return error_answer(405, f"not with {method}", "method_not_allowed", headers=headers)
        return None

    def _refuse_key(self) -> Answer:
        if self._accounting.are_keys_stale:
            message = f"keys cannot be confirmed: the store was last read {self._accounting.keys_age_s:.0f} s ago"
            return error_answer(503, message, "keys_unconfirmed", headers=((b"retry-after", b"5"),))
        self._accounting.n_unknown_keys += 1
        message = "a valid key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        return error_answer(401, message, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))

    def _forward(self, request: Request, client: ClientConnection, holder: KeyHolder | None) -> Answer | None:
        head = request.head
        try:
            if request.body or head.path not in self._engine_routes:
                facts = read_facts(request, wants_prefix=self._policy == "prefix")
            else:
                facts = RequestFacts(head.path, request.request_id, request.received_at, 0)
        except UnreadableError as error:
            return error_answer(400, str(error), "invalid_body")
        name = facts.model
        if name is None and head.method != b"POST":
            name = next(iter(parse_qs(head.target.partition(b"?")[2].decode("latin-1")).get("model", ())), None)
        match = _RESPONSE_PATH.fullmatch(head.path) if head.path.startswith(b"/v1/responses/") else None
        response_id = facts.response_id or (match.group(1) if match else b"")
        place = self._context.response_owners.find(response_id) if response_id else None
        model = place[0] if place is not None and name is None else self._replicas.resolve(name)
        if model is None:
            if name is None:
                return error_answer(400, "the request names no model, and several are served", "model_missing", "model")
            return _unknown_model(name)
        record = Record(head, facts, model, client.address, self._context.unix())
        if holder is not None and not holder.may_use(name or model, *self._names[model]):
            self._accounting.refuse(record, holder)
            return _forbidden_model(name or model)
        try:
            if name in self._foreign_aliases and request.body:
                request.body = rename_model(request, self._foreign_aliases[name])
            entry = self._accounting.open(record, holder, request.body)
        except BODY_ERRORS as problem:  # compiled, a name has the type of its first `except` in the function
            return error_answer(400, f"the request body cannot be read: {problem}", "invalid_body")
        forwarded = ForwardedRequest(self._context, record, request.body, client)
        forward(forwarded, self._hints(facts, name, place), entry)
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
        model = next((model for model in self._replicas.models if model.name == known), None)
        if model is None:
            return _unknown_model(name)
        return json_answer(self._row(model)) if self._may_use(holder, model) else _forbidden_model(name)

    def _row(self, model: ServedModel) -> ModelRow:
        now, name, table = self._context.now(), model.name, self._replicas
        state, n_ready = table.model_state(name, now), len(table.ready(name, now))
        announced = [row.announcement for row in table.announced(name, now)]
        lengths = [each.max_model_len for each in announced if each.max_model_len is not None]
        nearest = table.nearest(name, now) if state in ("loading", "sleeping") else None
        return ModelRow(
            *(name, "model", self._created, "penstock", model.aliases, state, ReplicaCount(n_ready, len(announced))),
            max_model_len=min(lengths) if lengths else None,
            progress=nearest.announcement.progress if nearest is not None else None,
            input_modalities=announced[0].input_modalities if announced else (),
        )


def _unknown_model(name: str) -> Answer:
    return error_answer(404, f"the model {name[:_SHOWN]!r} does not exist", "model_not_found", "model")


def _forbidden_model(name: str) -> Answer:
    return error_answer(403, f"this key may not use the model {name!r}", "model_not_allowed", "model")
