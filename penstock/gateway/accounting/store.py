"""The database of keys and usage: SQLite (a file, WAL mode) or PostgreSQL (a URL). Every call blocks."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting.store_schema import MIGRATIONS

BUSY_S, _LONG_S = 1.0, 30.0  # how long the gateway, and a verb, wait for another process's write
CONNECT_S = 3
SCHEMA_VERSION = len(MIGRATIONS)

_POSTGRES = ("postgresql://", "postgres://")
# A server that vanished without a word ends a call after 15 s, not after two hours.
_ALIVE = {"keepalives_idle": 5, "keepalives_interval": 3, "keepalives_count": 3, "tcp_user_timeout": 15_000}
_LOCK_NUMBER = 7_361_884  # of PostgreSQL's advisory lock that serialises migrations and changes of keys


def is_postgres(place: str) -> bool:
    return place.startswith(_POSTGRES)


def connect(place: str, busy_s: float = _LONG_S) -> Database:
    """Opens a file or a URL and brings its tables up to date; statements wait so long for locks. Raises UserError."""
    database = _Postgres(place, busy_s) if is_postgres(place) else Database(place, busy_s)
    try:
        _migrate(database)
    except BaseException:
        database.close()
        raise
    return database


def check(place: str) -> None:
    """Tries what `connect` does in a PostgreSQL, and takes it back. Raises UserError."""
    with contextlib.closing(_Postgres(place, BUSY_S)) as opened, opened._connection.transaction(force_rollback=True):
        _migrate(opened)


def share(place: str) -> None:
    """Makes a store usable from several machines: SQLite's write-ahead log needs shared memory, its journal not.

    https://www.sqlite.org/wal.html: "All processes using a database must be on the same host computer".
    """
    connect(place).close()
    if not is_postgres(place):
        with _explaining(place, UserError), contextlib.closing(sqlite3.connect(place, _LONG_S)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchall()


class Database:
    """An open database, for one thread at a time: SQLite here. Statements have "?" for values.

    UserError: it cannot be opened, or the request is wrong. PenstockError with `is_retryable`: it is locked, full or
    away, and nothing of the call was written, except that a PostgreSQL which went away may have committed; without:
    these values can never be stored.
    """

    is_postgres = False
    _connection: Any
    _file: tuple[int, int] | None = None  # device and inode of what is open
    _n_bytes = 0  # its size when it was last whole

    def __init__(self, place: str, busy_s: float) -> None:
        self.place, self._busy_s = place, busy_s
        with _explaining(place, UserError):
            self._connect()

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def writing(self, *, locks: bool = False) -> Iterator[None]:
        """One transaction, all or nothing. `locks`: no other such transaction runs between its reads and its writes."""
        with _explaining(self.place, PenstockError), self._transaction(locks):
            yield

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Within `writing`; returns the number of changed rows."""
        return int(self._execute(sql, values).rowcount)

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with _explaining(self.place, PenstockError):
            return cast(list[tuple[Any, ...]], self._execute(sql, values).fetchall())

    def refresh(self) -> bool:
        """Opens the store again when another file has its place, and returns whether.

        Raises PenstockError when its file is gone or cut short. It only looks: opening and closing the file here would
        drop the locks of this process (https://www.sqlite.org/howtocorrupt.html, 2.2).
        """
        with _explaining(self.place, PenstockError):
            stat = Path(self.place).stat()
            file, before = (stat.st_dev, stat.st_ino), self._file
            needed = 1
            if file == before and stat.st_size < self._n_bytes:  # as after `compact`, or cut short
                needed = self.all("PRAGMA page_count")[0][0] * self.all("PRAGMA page_size")[0][0]
            if stat.st_size < needed:
                raise PenstockError(f'could not use store "{self.place}": its file was cut short', is_retryable=True)
            if file != before:
                self.close()
                self._connect()
                _migrate(self)
            elif self._connection.in_transaction:  # a rollback has failed: reads would stay in its snapshot
                self._connection.execute("ROLLBACK")
            self._file, self._n_bytes = file, stat.st_size
        return file != before

    def compact(self) -> None:
        """Returns unused space to the disk. SQLite copies the file and blocks writers; PostgreSQL needs nothing."""
        self.all("VACUUM")
        self.all("PRAGMA wal_checkpoint(TRUNCATE)")

    def _connect(self) -> None:
        path = Path(self.place)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # usage is private
        stat = path.stat()
        self._file, is_new = self._file or (stat.st_dev, stat.st_ino), stat.st_size == 0
        self._connection = sqlite3.connect(path, timeout=self._busy_s, isolation_level=None, check_same_thread=False)
        try:
            if is_new:  # a store for several machines keeps its journal
                self._execute("PRAGMA journal_mode=WAL", ()).fetchall()
            # A commit is on the disk: two a second cost nothing here, and a power cut loses the last one at most.
            self._execute("PRAGMA synchronous=FULL", ())
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _transaction(self, locks: bool) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")  # which locks
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _execute(self, sql: str, values: Sequence[Any]) -> Any:
        return self._connection.execute(sql, values)


class _Postgres(Database):
    is_postgres = True

    def refresh(self) -> bool:
        return False

    def compact(self) -> None:
        pass

    def _connect(self) -> None:
        try:
            import psycopg
        except ImportError as exc:
            message = "cannot use a PostgreSQL store: psycopg is not installed"
            raise UserError(message, hint="pip install 'penstock[postgres]'") from exc
        options: dict[str, Any] = {"connect_timeout": CONNECT_S, "options": "-c statement_timeout=10000", **_ALIVE}
        self._connection = psycopg.connect(self.place, autocommit=True, **options)

    @contextlib.contextmanager
    def _transaction(self, locks: bool) -> Iterator[None]:
        if self._connection.closed:
            self._connect()
        with self._connection.transaction():
            if locks:
                self._execute(f"SELECT pg_advisory_xact_lock({_LOCK_NUMBER})", ())
            yield

    def _execute(self, sql: str, values: Sequence[Any]) -> Any:
        if self._connection.closed:
            self._connect()
        return self._connection.execute(sql.replace("?", "%s"), values)


def _migrate(database: Database) -> None:
    with database.writing(locks=True):
        database.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BIGINT NOT NULL)")
        rows = database.all("SELECT value FROM meta WHERE name = 'schema'")
        version = int(rows[0][0]) if rows else 0
        if version > SCHEMA_VERSION:
            versions = f"its schema is version {version}, this penstock knows {SCHEMA_VERSION}"
            message = f'cannot use store "{_without_password(database.place)}": {versions}'
            raise UserError(message, hint="Use the newer penstock that wrote it.")
        if version == SCHEMA_VERSION:
            return
        for statement in (line for step in MIGRATIONS[version:] for line in step):
            database.execute(statement)
        database.execute(
            "INSERT INTO meta (name, value) VALUES ('schema', ?) ON CONFLICT (name) DO UPDATE SET value = ?",
            (SCHEMA_VERSION, SCHEMA_VERSION),
        )


def _without_password(place: str) -> str:
    before, at, after = place.rpartition("@")
    return f"{place.partition('://')[0]}://...@{after}" if is_postgres(place) and at and before else place


@contextlib.contextmanager
def _explaining(place: str, kind: type[PenstockError]) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as exc:
        # psycopg's errors without importing it; their messages name the host and never the password.
        if not isinstance(exc, sqlite3.Error | OSError) and not type(exc).__module__.startswith("psycopg"):
            raise
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        # Values that the tables can never hold; both databases have errors of these names.
        is_retryable = not {"DataError", "IntegrityError"} & {base.__name__ for base in type(exc).__mro__}
        raise kind(f'could not use store "{_without_password(place)}": {reason}', is_retryable=is_retryable) from exc
