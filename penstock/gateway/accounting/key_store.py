"""API keys in the store. Every call blocks.

Secrets are 256 random bits, so one SHA-256 is the right hash: a slow hash would cost every request milliseconds.
The revision in table meta grows with every change of a key: a gateway reads one row to know whether to read all keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.errors import PenstockError, UserError, nearest
from penstock.gateway.accounting.store import Database
from penstock.paths import read_token, write_atomically

MAX_SECRETS = 16  # of one key: a script that rotates must not fill the store
_KEY_BYTES = 32
_KEY_NAME = re.compile(r"(?!key_)[A-Za-z0-9._@:][A-Za-z0-9._@:\-]{0,63}")
_models = msgspec.json.Decoder(tuple[str, ...]).decode
_FAR_FUTURE = 2.0**40  # seconds; years that calendars of programs still write


class Limits(msgspec.Struct, frozen=True):
    """Limits of a key; None is no limit. `models` empty: every model. `budget_usd` is for a calendar month (UTC)."""

    models: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    budget_usd: float | None = None
    expires_at: float | None = None


class Secret(msgspec.Struct, frozen=True):
    """One secret of a key: its SHA-256 in lower-case hex and its last four characters."""

    hash: str
    ending: str
    expires_at: float | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """A stored key; times are Unix seconds."""

    id: str
    name: str
    limits: Limits
    created_at: float
    revoked_at: float | None = None
    secrets: tuple[Secret, ...] = ()


def new_secret() -> str:
    return f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def check_new_key(name: str, limits: Limits, now: float) -> None:
    """Raises UserError with all problems of a new key."""
    problems = []
    if not _KEY_NAME.fullmatch(name):
        problems.append("name: 1 to 64 of letters, digits and . _ @ : -, not beginning with - or key_")
    for field in ("rpm", "tpm", "concurrency"):
        value = getattr(limits, field)
        if value is not None and not 0 < value < 2**53:
            problems.append(f"{field}: {value} is not a count above 0")
    if limits.budget_usd is not None and not 0 <= limits.budget_usd < math.inf:
        problems.append(f"budget: {limits.budget_usd} is not an amount of dollars")
    if limits.expires_at is not None and not now < limits.expires_at < _FAR_FUTURE:
        problems.append("expires: it is not in the future, or too far in it")
    if any(not model for model in limits.models):
        problems.append("models: one is empty")
    if problems:
        raise UserError(f'cannot create key "{name[:80]}"', detail="\n".join(problems))


class KeyStore:
    """The keys of an open database; errors are those of `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, limits: Limits, now: float) -> tuple[ApiKey, str]:
        """A new key and its secret, which is not stored. Raises UserError for a name that is taken."""
        secret = new_secret()
        with self._writing_keys():
            if any(key.name == name and key.revoked_at is None for key in self.all()):
                raise UserError(f'cannot create key "{name}": there is one of that name', hint="Revoke or rotate it.")
            key_id = self._add_key(name, limits, now)
            self._add_secret(key_id, hash_of(secret), secret[-4:], now)
            return self.find(key_id), secret

    def introduce(self, name: str, digest: str, now: float) -> None:
        """A key whose secret only its owner has: `digest` is its hash. Once: it may be rotated or revoked since.

        Its name has the beginning of the hash behind it where another key ever had that name: an earlier launch's.
        """
        key_id = f"key_{digest[:12]}"
        with self._writing_keys():
            keys = self.all()
            if all(key.id != key_id and digest not in [s.hash for s in key.secrets] for key in keys):
                name = f"{name}-{digest[:6]}" if any(key.name == name for key in keys) else name
                self._add_secret(self._add_key(name, Limits(), now, key_id), digest, "", now)

    def rotate(self, name_or_id: str, grace_s: float, now: float) -> tuple[ApiKey, str]:
        """A new secret for a key; the newest of the old ones, MAX_SECRETS with it, stay valid for `grace_s`."""
        secret = new_secret()
        with self._writing_keys():
            key = self.find(name_or_id)
            self._database.execute("DELETE FROM api_secrets WHERE key_id = ? AND expires_at <= ?", (key.id, now))
            self._database.execute(
                "UPDATE api_secrets SET expires_at = ? WHERE key_id = ? AND (expires_at IS NULL OR expires_at > ?)",
                (now + grace_s, key.id, now + grace_s),
            )
            self._database.execute(
                "DELETE FROM api_secrets WHERE key_id = ? AND hash NOT IN"
                " (SELECT hash FROM api_secrets WHERE key_id = ? ORDER BY created_at DESC LIMIT ?)",
                (key.id, key.id, MAX_SECRETS - 1),
            )
            self._add_secret(key.id, hash_of(secret), secret[-4:], now)
            return self.find(key.id), secret

    def renew(self, name: str, grace_s: float, now: float) -> str:
        """A new secret for the key of that name, which is made where there is none."""
        if any(key.name == name and key.revoked_at is None for key in self.all()):
            return self.rotate(name, grace_s, now)[1]
        return self.create(name, Limits(), now)[1]

    def keep(self, name: str, file: Path, life_s: float | None, now: float) -> tuple[str, bool]:
        """The secret in `file` while it is one of that key and younger than `life_s`, else a new one, written there.

        Returns whether it is new; the old ones stay valid for `life_s` more, or not without it. Raises OSError.
        """
        with contextlib.suppress(PenstockError):
            secret = read_token(file, "key")
            made = self._database.all(
                "SELECT s.created_at FROM api_secrets s JOIN api_keys k ON k.id = s.key_id"
                " WHERE s.hash = ? AND s.expires_at IS NULL AND k.name = ? AND k.revoked_at IS NULL",
                (hash_of(secret), name),
            )
            if made and (life_s is None or now - made[0][0] < life_s):
                return secret, False
        secret = self.renew(name, life_s or 0.0, now)
        write_atomically(file, secret.encode(), mode=0o600)
        return secret, True

    def revoke(self, name_or_id: str, now: float) -> ApiKey:
        """Ends a key at once; its usage stays."""
        with self._writing_keys():
            key = self.find(name_or_id)
            self._database.execute("UPDATE api_keys SET revoked_at = ? WHERE id = ?", (now, key.id))
        return msgspec.structs.replace(key, revoked_at=now)

    def find(self, name_or_id: str) -> ApiKey:
        """The valid key of that name or id. Raises UserError with the nearest name."""
        living = [key for key in self.all() if key.revoked_at is None]
        for key in living:
            if name_or_id in (key.name, key.id):
                return key
        close = nearest(name_or_id, [key.name for key in living])
        message = f'cannot find key "{name_or_id[:80]}"'
        raise UserError(message, hint=f'Did you mean "{close}"?' if close else "penstock keys list shows them.")

    def all(self) -> list[ApiKey]:
        """All keys, revoked ones too, oldest first."""
        secrets_of: defaultdict[str, list[Secret]] = defaultdict(list)
        for key_id, digest, ending, until in self._database.all(
            "SELECT key_id, hash, ending, expires_at FROM api_secrets ORDER BY created_at", ()
        ):
            secrets_of[key_id].append(Secret(digest, ending, until))
        rows = self._database.all(
            "SELECT id, name, models, rpm, tpm, concurrency, budget_usd, expires_at, created_at, revoked_at"
            " FROM api_keys ORDER BY created_at, id"
        )
        return [
            ApiKey(row[0], row[1], Limits(_models(row[2]), *row[3:8]), row[8], row[9], tuple(secrets_of[row[0]]))
            for row in rows
        ]

    def revision(self) -> int:
        return int(self._database.all("SELECT value FROM meta WHERE name = 'keys_revision'")[0][0])

    def _add_key(self, name: str, limits: Limits, now: float, key_id: str | None = None) -> str:
        key = ApiKey(key_id or f"key_{secrets.token_hex(6)}", name, limits, now)
        self._database.execute(
            f"INSERT INTO api_keys VALUES ({', '.join('?' * 10)})",
            (key.id, name, msgspec.json.encode(limits.models).decode(), limits.rpm, limits.tpm)
            + (limits.concurrency, limits.budget_usd, now, limits.expires_at, None),
        )
        return key.id

    def _add_secret(self, key_id: str, digest: str, ending: str, now: float) -> None:
        values = (digest, key_id, ending, now, None)
        self._database.execute("INSERT INTO api_secrets VALUES (?, ?, ?, ?, ?)", values)

    @contextlib.contextmanager
    def _writing_keys(self) -> Iterator[None]:
        with self._database.writing(locks=True):
            yield
            self._database.execute("UPDATE meta SET value = value + 1 WHERE name = 'keys_revision'")
