"""Keys and the usage ledger on disk: SQLite (a file, WAL mode) or PostgreSQL (a URL). Every call blocks.

Secrets are 256 random bits, so one SHA-256 is the right hash: nobody can try them all, and a slow hash (made for words
that people choose) would cost every request its milliseconds. What is kept besides the hash is the last four letters.

Ledger rows go in many to a statement: Python's lock is free while the database works, and `executemany` takes it back
for every row, when a busy event loop may hold it for 5 ms each time. It is cheaper too: 2.2 us a row (3.1 by
`executemany`, 5.8 as one JSON value).

Into SQLite a batch of many goes folded: one value, MessagePack, 0.2 us a row and one step of the database, where the
rows themselves cost a busy gateway ten times that and as much again for the lock. `unfold_rows` makes rows of it when
there is time, and `usage` before it reads. Money is not folded: `spend` is right with every batch.

`keys_revision` in the table meta grows with every change of a key: whoever keeps the keys in memory reads one row to
know whether they are still the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from penstock.errors import PenstockError, UserError, nearest
from penstock.gateway.accounting.store_schema import MIGRATIONS

State = Literal["complete", "client-cancelled", "engine-failed", "refused"]
Grouping = Literal["key", "model", "day", "state", "replica"]
GROUPINGS: tuple[Grouping, ...] = ("key", "model", "day", "state", "replica")

FOLD_ROWS = 256  # a batch of so many is folded
PRUNE_ROWS = 4096  # of one `prune`: 10 ms in which nobody else writes
DAY_S = 86_400
BUSY_S = 1.0  # how long a statement waits for another process's write
CONNECT_S = 3

_POSTGRES = ("postgresql://", "postgres://")
_LOCK_NUMBER = 7_361_884  # of PostgreSQL's advisory lock that serialises migrations and changes of keys
_KEY_BYTES = 32
_KEY_NAME = re.compile(r"(?!key_)[A-Za-z0-9._@:][A-Za-z0-9._@:\-]{0,63}")
_FAR_FUTURE = 2.0**40  # seconds; years that calendars of programs still write

SCHEMA_VERSION = len(MIGRATIONS)


class Limits(msgspec.Struct, frozen=True):
    """What a key may do; None is no limit. `models` empty: every model. `budget_usd` is for a calendar month (UTC)."""

    models: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    budget_usd: float | None = None
    expires_at: float | None = None


class Secret(msgspec.Struct, frozen=True):
    """One secret of a key: its SHA-256 (lower-case hex), how it ends, and until when it is good."""

    hash: str
    ending: str
    expires_at: float | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """A key as kept; times are Unix seconds."""

    id: str
    name: str
    limits: Limits
    created_at: float
    revoked_at: float | None = None
    secrets: tuple[Secret, ...] = ()


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request in the ledger; `number` counts within its writer. The order is that of `_COLUMNS`."""

    number: int
    at: float
    key_id: str
    model: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    is_estimate: int
    ttft_ms: float | None
    duration_ms: float
    state: State
    status: int
    cost_usd: float | None
    request_id: str


_COLUMNS = Row.__struct_fields__
_FOLDED = msgspec.msgpack.Decoder(list[Row])


class Usage(msgspec.Struct, frozen=True):
    """One line of `penstock usage`: the values of what it is grouped by, and sums over those requests."""

    group: tuple[str, ...]
    n_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    n_estimates: int
    cost_usd: float | None


def is_postgres(place: str) -> bool:
    return place.startswith(_POSTGRES)


def new_secret() -> str:
    """A new API key."""
    return f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def check_new_key(name: str, limits: Limits, now: float) -> None:
    """Raises UserError with all that is wrong with a key to be made."""
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


def share(place: str) -> None:
    """Make a store ready for processes on several machines: SQLite's write-ahead log needs memory that they share.

    https://www.sqlite.org/wal.html: "All processes using a database must be on the same host computer". The rollback
    journal needs no more than locks that the file system keeps.
    """
    Store(place).close()
    if not is_postgres(place):
        with _explained(place, UserError), contextlib.closing(sqlite3.connect(place, timeout=BUSY_S)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchall()


class Store:
    """An open database, for one thread at a time.

    UserError: it cannot be opened or what was asked for does not fit. PenstockError with `is_retryable`: it is locked,
    full or away; nothing of the call happened, except that a PostgreSQL which went away may have committed.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._is_postgres = is_postgres(place)
        self._connection: Any = self._connect_postgres() if self._is_postgres else self._connect_sqlite()
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    # Keys.

    def create_key(self, name: str, limits: Limits, now: float) -> tuple[ApiKey, str]:
        """A new key and its secret, which is nowhere else.  Raises UserError for a name that is taken."""
        secret = new_secret()
        with self._writing_keys():
            if any(key.name == name and key.revoked_at is None for key in self.all_keys()):
                raise UserError(f'cannot create key "{name}": there is one of that name', hint="Revoke or rotate it.")
            key = ApiKey(f"key_{secrets.token_hex(6)}", name, limits, now)
            self._execute(
                f"INSERT INTO api_keys VALUES ({', '.join('?' * 10)})",
                (key.id, name, msgspec.json.encode(limits.models).decode(), limits.rpm, limits.tpm)
                + (limits.concurrency, limits.budget_usd, now, limits.expires_at, None),
            )
            self._add_secret(key.id, secret, now)
            return self.find_key(key.id), secret

    def rotate_key(self, name_or_id: str, grace_s: float, now: float) -> tuple[ApiKey, str]:
        """A new secret for a key; the old ones are good for `grace_s` more."""
        secret = new_secret()
        with self._writing_keys():
            key = self.find_key(name_or_id)
            self._execute("DELETE FROM api_secrets WHERE key_id = ? AND expires_at <= ?", (key.id, now))
            self._execute(
                "UPDATE api_secrets SET expires_at = ? WHERE key_id = ? AND (expires_at IS NULL OR expires_at > ?)",
                (now + grace_s, key.id, now + grace_s),
            )
            self._add_secret(key.id, secret, now)
            return self.find_key(key.id), secret

    def revoke_key(self, name_or_id: str, now: float) -> ApiKey:
        """Ends a key at once; its usage stays."""
        with self._writing_keys():
            key = self.find_key(name_or_id)
            self._execute("UPDATE api_keys SET revoked_at = ? WHERE id = ?", (now, key.id))
        return msgspec.structs.replace(key, revoked_at=now)

    def find_key(self, name_or_id: str) -> ApiKey:
        """The living key of that name or id.  Raises UserError with the nearest name."""
        living = [key for key in self.all_keys() if key.revoked_at is None]
        for key in living:
            if name_or_id in (key.name, key.id):
                return key
        close = nearest(name_or_id, [key.name for key in living])
        raise UserError(
            f'cannot find key "{name_or_id[:80]}"',
            hint=f'Did you mean "{close}"?' if close else "penstock keys list shows them.",
        )

    def all_keys(self) -> list[ApiKey]:
        """All keys, revoked ones too, oldest first."""
        found: dict[str, list[Secret]] = {}
        for key_id, digest, ending, until in self._all(
            "SELECT key_id, hash, ending, expires_at FROM api_secrets ORDER BY created_at", ()
        ):
            found.setdefault(key_id, []).append(Secret(digest, ending, until))
        rows = self._all(
            "SELECT id, name, models, rpm, tpm, concurrency, budget_usd, expires_at, created_at, revoked_at"
            " FROM api_keys ORDER BY created_at, id",
            (),
        )
        return [ApiKey(row[0], row[1], _limits(row[2:8]), row[8], row[9], tuple(found.get(row[0], ()))) for row in rows]

    def keys_revision(self) -> int:
        """Another number than before when a key was changed, by whomever."""
        return int(self._all("SELECT value FROM meta WHERE name = 'keys_revision'", ())[0][0])

    # The ledger.

    def add_rows(self, writer: str, rows: Sequence[Row], *, is_again: bool = False) -> None:
        """Adds a batch, all or nothing. `is_again`: it may be there already, from a call whose answer was lost."""
        if not rows:
            return
        with self._writing():
            if is_again and self._has_row(writer, rows[0].number):
                return
            if self._is_postgres:
                self._execute(_INSERT_POSTGRES, (writer, msgspec.json.encode(rows).decode()))
            elif len(rows) >= FOLD_ROWS:
                folded = (writer, rows[0].number, msgspec.msgpack.encode(rows))
                self._execute("INSERT INTO folded_requests VALUES (?, ?, ?)", folded)
            else:
                self._insert(writer, rows)
            for (month, key_id), cost_usd in _spend_of(rows).items():
                self._execute(_SPEND, (month, key_id, cost_usd))

    def unfold_rows(self, before: float = math.inf) -> int:
        """Makes ledger rows of the oldest folded batch, if one of it is from before that time; how many, 0 when none
        is left. A few milliseconds.
        """
        if self._is_postgres or not self._all("SELECT 1 FROM folded_requests LIMIT 1", ()):
            return 0
        with self._writing():
            for at, writer, folded in self._all(
                "SELECT rowid, writer, folded FROM folded_requests ORDER BY rowid LIMIT 1", ()
            ):
                rows = _FOLDED.decode(folded)
                if before < math.inf and all(row.at >= before for row in rows):
                    return 0
                self._insert(writer, rows)
                self._execute("DELETE FROM folded_requests WHERE rowid = ?", (at,))
                return len(rows)
        return 0  # another process was faster

    def prune(self, before: float, n_rows_max: int = PRUNE_ROWS) -> int:
        """Adds up rows from before the day (UTC) of that time, and drops them; how many, 0 when none is left.

        Budgets, and all that `usage` tells, stay what they were.
        """
        midnight = before // DAY_S * DAY_S
        self.unfold_rows(midnight)
        with self._writing():
            if self._is_postgres:
                return int(self._all(_PRUNE_POSTGRES, (midnight, n_rows_max))[0][0])
            self._execute(_ADD_UP, (midnight, n_rows_max))
            pruned = f"DELETE FROM requests WHERE rowid IN (SELECT rowid {_OLDEST}, rowid LIMIT ?)"
            return int(self._connection.execute(pruned, (midnight, n_rows_max)).rowcount)

    def compact(self) -> None:
        """Gives the space of pruned rows back to the disk, which otherwise waits for new ones. SQLite copies the file
        for it, and others cannot write meanwhile; PostgreSQL does it by itself.
        """
        if not self._is_postgres:
            with _explained(self.place, PenstockError):
                self._connection.execute("VACUUM")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def spend(self, month: str) -> dict[str, float]:
        """US dollars by key id, in a month such as "2026-11" (UTC)."""
        return dict(self._all("SELECT key_id, cost_usd FROM spend WHERE month = ?", (month,)))

    def usage(self, by: Sequence[Grouping], since: float = 0.0) -> list[Usage]:
        """Sums over all requests since then, grouped. Keys are told by their names where they have one.

        Of pruned days those count that lie wholly after `since`. What a busy gateway has folded is unfolded first: a
        second for some 300 000 requests.
        """
        while self.unfold_rows():
            pass
        first_day = day_of(math.ceil(max(0.0, since) / DAY_S) * DAY_S)
        days = _DAY_POSTGRES if self._is_postgres else _DAY_SQLITE
        rows = self._sums("requests", by, days, ("count(*)", "sum(is_estimate)"), "at >= ?", since)
        pruned = self._sums("daily_usage", by, "day", ("sum(n_requests)", "sum(n_estimates)"), "day >= ?", first_day)
        found = {line.group: line for line in rows}
        for line in pruned:
            found[line.group] = _plus(found[line.group], line) if line.group in found else line
        return [found[group] for group in sorted(found)]

    def _sums(
        self, table: str, by: Sequence[Grouping], days: str, counts: tuple[str, str], wanted: str, since: float | str
    ) -> list[Usage]:
        columns = {"key": "coalesce(k.name, r.key_id)", "day": days}
        picked = "".join(f"{columns.get(group, group)}, " for group in by)
        sql = (
            f"SELECT {picked}{counts[0]}, sum(prompt_tokens), sum(cached_tokens), sum(output_tokens), {counts[1]},"
            f" sum(cost_usd) FROM {table} r LEFT JOIN api_keys k ON k.id = r.key_id WHERE {wanted}"
        )
        if by:
            sql += f" GROUP BY {', '.join(str(number + 1) for number in range(len(by)))}"
        rows = [row for row in self._all(sql, (since,)) if row[len(by)]]
        return [_usage_of(tuple(map(str, row[: len(by)])), row[len(by) :]) for row in rows]

    # What gateways count in a minute and at once, told to each other. PostgreSQL alone.

    def put_counts(self, gateway: str, counts: Mapping[str, int]) -> None:
        """Replaces what a gateway counted under these names."""
        with self._writing():
            self._execute(_PUT_COUNTS, (gateway, msgspec.json.encode(counts).decode()))

    def others_counts(self, gateway: str, fresh_s: float, *, are_all: bool) -> list[tuple[str, str, int, bool]]:
        """(gateway, name, count, whether it was put in the last `fresh_s`) of the others; `are_all`: old ones too."""
        is_fresh = f"at > {_NOW_POSTGRES} - ?::double precision"
        sql = f"SELECT gateway, name, count, {is_fresh} FROM gateway_counts WHERE gateway <> ?"
        if are_all:
            return self._all(sql, (fresh_s, gateway))
        return self._all(f"{sql} AND {is_fresh}", (fresh_s, gateway, fresh_s))

    def forget_gateways(self, silent_s: float) -> None:
        """Drops the counts of gateways that put none for so long."""
        with self._writing():
            self._execute(
                "DELETE FROM gateway_counts WHERE gateway NOT IN"
                f" (SELECT gateway FROM gateway_counts WHERE at > {_NOW_POSTGRES} - ?::double precision)",
                (silent_s,),
            )

    # Below: the two databases.

    def _connect_sqlite(self) -> sqlite3.Connection:
        path = Path(self.place)
        with _explained(self.place, UserError):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # usage is nobody else's business
            is_new = path.stat().st_size == 0
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                if is_new:  # one that is for several machines stays so, whoever opens it
                    connection.execute("PRAGMA journal_mode=WAL").fetchall()
                # A commit is on the disk: two a second cost nothing here, and a power cut loses the last one at most.
                connection.execute("PRAGMA synchronous=FULL")
            except BaseException:
                connection.close()
                raise
        return connection

    def _connect_postgres(self) -> Any:
        try:
            import psycopg
        except ImportError as exc:
            raise UserError(
                "cannot use a PostgreSQL store: psycopg is not installed", hint="pip install 'penstock[postgres]'"
            ) from exc
        with _explained(self.place, UserError):
            return psycopg.connect(
                self.place, autocommit=True, connect_timeout=CONNECT_S, options="-c statement_timeout=10000"
            )

    def _migrate(self) -> None:
        with self._writing():
            self._lock()
            self._execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BIGINT NOT NULL)", ())
            found = self._all("SELECT value FROM meta WHERE name = 'schema'", ())
            version = int(found[0][0]) if found else 0
            if version > SCHEMA_VERSION:
                raise UserError(
                    f'cannot use store "{_named(self.place)}": its schema is version {version}, this penstock knows '
                    f"{SCHEMA_VERSION}",
                    hint="Use the newer penstock that wrote it.",
                )
            if version == SCHEMA_VERSION:
                return
            for statement in (line for step in MIGRATIONS[version:] for line in step):
                self._execute(statement, ())
            self._execute(
                "INSERT INTO meta (name, value) VALUES ('schema', ?) ON CONFLICT (name) DO UPDATE SET value = ?",
                (SCHEMA_VERSION, SCHEMA_VERSION),
            )

    def _insert(self, writer: str, rows: Sequence[Row]) -> None:
        begin = 0
        for size in _STATEMENT_ROWS:
            while len(rows) - begin >= size:
                values = [value for row in rows[begin : begin + size] for value in (writer, *msgspec.to_builtins(row))]
                self._connection.execute(_INSERT[size], values)
                begin += size

    def _has_row(self, writer: str, number: int) -> bool:
        """Whether a batch that begins with this row is there."""
        tables = ("requests", "folded_requests")
        wanted = "SELECT 1 FROM {} WHERE writer = ? AND number = ?"
        return any(self._all(wanted.format(table), (writer, number)) for table in tables)

    def _add_secret(self, key_id: str, secret: str, now: float) -> None:
        values = (hash_of(secret), key_id, secret[-4:], now, None)
        self._execute("INSERT INTO api_secrets VALUES (?, ?, ?, ?, ?)", values)

    @contextlib.contextmanager
    def _writing_keys(self) -> Iterator[None]:
        with self._writing():
            self._lock()
            yield
            self._execute("UPDATE meta SET value = value + 1 WHERE name = 'keys_revision'", ())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction: whole at the end, nothing after an error."""
        with _explained(self.place, PenstockError):
            if self._is_postgres:
                if self._connection.closed:
                    self._connection = self._connect_postgres()
                with self._connection.transaction():
                    yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _lock(self) -> None:
        """Against another writer between a read and its write; BEGIN IMMEDIATE does it for SQLite."""
        if self._is_postgres:
            self._execute(f"SELECT pg_advisory_xact_lock({_LOCK_NUMBER})", ())

    def _execute(self, sql: str, values: tuple[Any, ...]) -> None:
        self._connection.execute(self._dialect(sql), values)

    def _all(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with _explained(self.place, PenstockError):
            if self._is_postgres and self._connection.closed:
                self._connection = self._connect_postgres()
            return cast(list[tuple[Any, ...]], self._connection.execute(self._dialect(sql), values).fetchall())

    def _dialect(self, sql: str) -> str:
        return sql.replace("?", "%s") if self._is_postgres else sql


def _usage_of(group: tuple[str, ...], sums: Sequence[Any]) -> Usage:
    n_requests, prompt, cached, output, n_estimates = map(int, sums[:5])
    return Usage(group, n_requests, prompt, cached, output, n_estimates, sums[5])


def _plus(one: Usage, other: Usage) -> Usage:
    costs = [cost for cost in (one.cost_usd, other.cost_usd) if cost is not None]
    return Usage(
        one.group,
        one.n_requests + other.n_requests,
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.output_tokens + other.output_tokens,
        one.n_estimates + other.n_estimates,
        sum(costs) if costs else None,
    )


def _limits(row: Sequence[Any]) -> Limits:
    models = msgspec.json.decode(row[0], type=tuple[str, ...])
    return Limits(models, *row[1:])


def _named(place: str) -> str:
    """The place without a password, for messages."""
    before, at, after = place.rpartition("@")
    return f"{place.partition('://')[0]}://...@{after}" if is_postgres(place) and at and before else place


@contextlib.contextmanager
def _explained(place: str, kind: type[PenstockError]) -> Iterator[None]:
    """Errors of a database and of the disk as ours."""
    try:
        yield
    except PenstockError:
        raise
    except (sqlite3.Error, OSError) as exc:
        raise kind(f'could not use store "{_named(place)}": {exc}', is_retryable=True) from exc
    except Exception as exc:
        # psycopg's family, without importing it; its messages tell the host and never the password.
        if not type(exc).__module__.startswith("psycopg"):
            raise
        raise kind(f'could not use store "{_named(place)}": {_first_line(exc)}', is_retryable=True) from exc


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


def _spend_of(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """US dollars by month and key."""
    spent: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.cost_usd:
            entry = (month_of(row.at), row.key_id)
            spent[entry] = spent.get(entry, 0.0) + row.cost_usd
    return spent


def month_of(at: float) -> str:
    """The calendar month (UTC) of a time in Unix seconds, such as "2026-11"."""
    return time.strftime("%Y-%m", time.gmtime(at))


def day_of(at: float) -> str:
    """The day (UTC) of a time in Unix seconds, such as "2026-11-20"."""
    return time.strftime("%Y-%m-%d", time.gmtime(at))


_FIELDS = ", ".join(("writer", *_COLUMNS))
_STATEMENT_ROWS = (64, 8, 1)  # few sizes, so that SQLite keeps them prepared
_INSERT = {
    size: f"INSERT INTO requests ({_FIELDS}) VALUES " + ", ".join([f"({', '.join('?' * (len(_COLUMNS) + 1))})"] * size)
    for size in _STATEMENT_ROWS
}
_TEXTS = ("key_id", "model", "replica", "state", "request_id")
_REALS = ("at", "ttft_ms", "duration_ms", "cost_usd")
_CASTS = {**dict.fromkeys(_TEXTS, "text"), **dict.fromkeys(_REALS, "double precision")}
_VALUES_POSTGRES = ", ".join(f"(value->>{index})::{_CASTS.get(name, 'bigint')}" for index, name in enumerate(_COLUMNS))
_INSERT_POSTGRES = (
    f"INSERT INTO requests ({_FIELDS}) SELECT ?::text, {_VALUES_POSTGRES} FROM jsonb_array_elements(?::jsonb)"
)
_DAY_SQLITE = "date(at, 'unixepoch')"
_DAY_POSTGRES = "to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
_SPEND = (
    "INSERT INTO spend (month, key_id, cost_usd) VALUES (?, ?, ?)"
    " ON CONFLICT (month, key_id) DO UPDATE SET cost_usd = spend.cost_usd + excluded.cost_usd"
)
_OLDEST = "FROM requests WHERE at < ? ORDER BY at"
_SUMMED = ("n_requests", "prompt_tokens", "cached_tokens", "output_tokens", "n_estimates")
_DAYS = (
    f"INSERT INTO daily_usage (day, key_id, model, replica, state, {', '.join(_SUMMED)}, cost_usd)"
    " SELECT {day}, key_id, model, replica, state, count(*), sum(prompt_tokens), sum(cached_tokens),"
    " sum(output_tokens), sum(is_estimate), sum(cost_usd) FROM {rows} WHERE true GROUP BY 1, 2, 3, 4, 5"
    # In one order, so that two who prune at once do not wait for each other.
    " ORDER BY 1, 2, 3, 4, 5"
    " ON CONFLICT (day, key_id, model, replica, state) DO UPDATE SET "
    + ", ".join(f"{name} = daily_usage.{name} + excluded.{name}" for name in _SUMMED)
    + ", cost_usd = coalesce(daily_usage.cost_usd + excluded.cost_usd, daily_usage.cost_usd, excluded.cost_usd)"
)
_ADD_UP = _DAYS.format(day=_DAY_SQLITE, rows=f"(SELECT * {_OLDEST}, rowid LIMIT ?)")
_PRUNE_POSTGRES = (
    f"WITH old AS (SELECT writer, number {_OLDEST} LIMIT ? FOR UPDATE SKIP LOCKED), gone AS (DELETE FROM requests r"
    " USING old WHERE r.writer = old.writer AND r.number = old.number RETURNING r.*),"
    f" days AS ({_DAYS.format(day=_DAY_POSTGRES, rows='gone')}) SELECT count(*) FROM gone"
)
# The database's clock: gateways are on several machines.
_NOW_POSTGRES = "extract(epoch from now())::double precision"
_PUT_COUNTS = (
    f"INSERT INTO gateway_counts (gateway, name, count, at) SELECT ?::text, key, value::bigint, {_NOW_POSTGRES}"
    " FROM jsonb_each_text(?::jsonb) ON CONFLICT (gateway, name) DO UPDATE SET count = excluded.count, at = excluded.at"
)
