"""Makes, lists, rotates and revokes keys through the admin address; docs/reference/gateway.md has the calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting.ledger import Ledger
from penstock.gateway.accounting.store import ApiKey, Limits, Store, check_new_key
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.request import Request
from penstock.gateway.responses import Answer, error_answer, json_answer

PATH = b"/admin/keys"
METHODS = (b"GET", b"POST", b"DELETE")


class _New(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    models: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    budget_usd: float | None = None
    expires_s: float | None = None


class _Rotation(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    grace_s: float = 0.0


def is_path(path: bytes) -> bool:
    return path == PATH or path.startswith(PATH + b"/")


def key_facts(key: ApiKey, secret: str | None = None) -> dict[str, Any]:
    """A key as shown: never its hash; `key` is the secret, when it has just been made."""
    facts: dict[str, Any] = {"id": key.id, "name": key.name}
    if secret is not None:
        facts["key"] = secret
    facts["endings"] = [f"sk-...{kept.ending}" for kept in key.secrets]
    facts |= msgspec.structs.asdict(key.limits)
    return facts | {"created_at": key.created_at, "revoked_at": key.revoked_at}


def begin(request: Request, client: ClientConnection, ledger: Ledger | None) -> Answer | None:
    """Does the call, and answers it when the store has. Raises msgspec.DecodeError and UserError for a bad one."""
    if ledger is None:
        return error_answer(409, "this gateway has no store: its keys are those of its config", "no_store")
    job = _job(request)

    async def work() -> None:
        client.respond(await _answer(ledger, job))

    client.work = asyncio.get_running_loop().create_task(work())
    return None


async def _answer(ledger: Ledger, job: Callable[[Store], Any]) -> Answer:
    try:
        return json_answer(await ledger.call(job))
    except UserError as error:
        return error_answer(400, error.message, "bad_request")
    except PenstockError as error:
        return error_answer(503, error.message, "store_unavailable", headers=((b"retry-after", b"1"),))


def _job(request: Request) -> Callable[[Store], Any]:
    head, now = request.head, time.time()
    name = unquote(head.path[len(PATH) + 1 :].decode("latin-1"))
    if head.method == b"GET" and not name:
        return lambda store: [key_facts(key) for key in store.all_keys()]
    if head.method == b"DELETE" and name:
        return lambda store: key_facts(store.revoke_key(name, now))
    if head.method == b"POST" and name == "rotate":
        asked = msgspec.json.decode(request.body, type=_Rotation)
        return lambda store: key_facts(*store.rotate_key(asked.key, asked.grace_s, now))
    if head.method == b"POST" and not name:
        new = msgspec.json.decode(request.body, type=_New)
        expires_at = None if new.expires_s is None else now + new.expires_s
        limits = Limits(new.models, new.rpm, new.tpm, new.concurrency, new.budget_usd, expires_at)
        check_new_key(new.name, limits, now)
        return lambda store: key_facts(*store.create_key(new.name, limits, now))
    raise UserError("there is no such call: GET or POST /admin/keys, POST /admin/keys/rotate, DELETE /admin/keys/NAME")
