"""Who may ask: API keys by their hash, and the admin token. Pure."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from penstock.gateway.accounting.key_store import ApiKey, Limits
from penstock.gateway.accounting.quota import Quota
from penstock.gateway.accounting.running_totals import Totals
from penstock.wire.http1 import RequestHead

_HALF: Final = 16  # bytes
_NO_HASH: Final = bytes(32)
_MAX_KNOWN: Final = 1024  # headers


def bearer(authorization: bytes | None) -> bytes | None:
    if authorization is not None and authorization[:7] == b"Bearer ":  # nearly always
        return authorization[7:].strip(b" ") or None
    scheme, _, credential = (authorization or b"").partition(b" ")
    return credential.strip(b" ") if scheme.lower() == b"bearer" and credential else None


def credential(head: RequestHead) -> bytes | None:
    """The client's key as an Authorization header's value: that of x-api-key when there is one, since a proxy in front
    of the gateway may have Authorization for its own key."""
    key = head.get(b"x-api-key")
    return head.get(b"authorization") if key is None else b"Bearer " + key


class KeyHolder(msgspec.Struct, frozen=True):
    """The key of a request. `secret_until` is when the secret that was sent expires."""

    id: str
    name: str
    quota: Quota
    models: frozenset[str]  # empty: every model
    secret_until: float
    is_stored: bool  # in the store, which may revoke it; others are in the config

    def may_use(self, *names: str | None) -> bool:
        return not self.models or not self.models.isdisjoint(names)


class Keyring:
    """All valid keys, in memory, found by the SHA-256 of what was sent.

    The index is the first half of that hash; the whole hash is then compared in constant time. Lookup time leaks only
    bits of the hash of the submitted key, which an attacker cannot choose. Headers that were valid are found again
    without hashing (3.4 us of a busy gateway's request), until any key changes.
    """

    def __init__(self, key_hashes: Sequence[str], totals: Totals) -> None:
        self._totals = totals
        self._fixed = tuple(key_hashes)
        self._quotas: dict[str, tuple[Limits, Quota]] = {}
        self._by_half: dict[bytes, tuple[bytes, KeyHolder]] = {}
        self._known: dict[bytes, KeyHolder] = {}
        self.replace((), 0.0)

    def replace(self, keys: Sequence[ApiKey], now: float) -> None:
        """Replaces all keys but those of the config. `now` is monotonic. A key whose limits stay keeps its buckets."""
        by_half: dict[bytes, tuple[bytes, KeyHolder]] = {}
        quotas: dict[str, tuple[Limits, Quota]] = {}
        for key in keys:
            if key.revoked_at is None:
                known = self._quotas.get(key.id)
                if known is None or known[0] != key.limits:
                    known = (key.limits, Quota(key.id, key.limits, self._totals, now))
                quotas[key.id] = known
                for secret in key.secrets:
                    until = min(secret.expires_at or math.inf, key.limits.expires_at or math.inf)
                    holder = KeyHolder(key.id, key.name, known[1], frozenset(key.limits.models), until, is_stored=True)
                    key_hash = bytes.fromhex(secret.hash)
                    by_half[key_hash[:_HALF]] = (key_hash, holder)
        for index, fixed in enumerate(self._fixed):
            key_hash = bytes.fromhex(fixed)
            name = "first" if index == 0 else f"first-{index + 1}"
            unlimited = Quota(name, Limits(), self._totals, now)
            holder = KeyHolder(name, name, unlimited, frozenset(), math.inf, is_stored=False)
            by_half[key_hash[:_HALF]] = (key_hash, holder)
        self._by_half, self._quotas, self._known = by_half, quotas, {}

    def find(self, authorization: bytes | None, now: float) -> KeyHolder | None:
        """The holder of the header's key, if it is valid at `now` (Unix seconds)."""
        if authorization is None:
            return None
        holder = self._known.get(authorization) or self._look_up(authorization)
        return holder if holder is not None and now < holder.secret_until else None

    def quotas(self) -> Mapping[str, Quota]:
        """By key id, without the keys of the config, which have no limits."""
        return {key_id: quota for key_id, (_, quota) in self._quotas.items()}

    def _look_up(self, authorization: bytes) -> KeyHolder | None:
        if (key := bearer(authorization)) is None:
            return None
        digest = hashlib.sha256(key).digest()
        key_hash, holder = self._by_half.get(digest[:_HALF], (_NO_HASH, None))
        if holder is None or not hmac.compare_digest(digest, key_hash):
            return None
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[authorization] = holder
        return holder


def has_token(authorization: bytes | None, token: str) -> bool:
    return hmac.compare_digest(bearer(authorization) or b"", token.encode())
