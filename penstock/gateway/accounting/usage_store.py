"""The usage ledger in the store: rows of requests, their sums, and the counts that gateways share. Every call blocks.

One statement inserts many rows: `executemany` takes Python's lock back for every row, and a busy event loop may hold it
for 5 ms each time. It is cheaper too: 2.2 us a row (3.1 by `executemany`, 5.8 as one JSON value).

SQLite gets a large batch folded: one MessagePack value, 0.2 us a row; its rows cost a busy gateway ten times that.
`unfold_rows` makes rows of it when there is time, and before `usage` reads. Money is not folded.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from time import gmtime, strftime
from typing import Any, Literal

import msgspec

from penstock.gateway.accounting.store import Database

State = Literal["complete", "client-cancelled", "engine-failed", "refused"]
Grouping = Literal["key", "model", "day", "state", "replica"]
OthersCount = tuple[str, str, int, bool]  # gateway, name, count, whether it is fresh

FOLD_ROWS = 256  # a batch of so many is folded
PRUNE_ROWS = 4096  # of one `prune`: 10 ms in which nobody else writes
DAY_S = 86_400


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request in the ledger; `number` counts within its writer. The fields are the table's columns, in order."""

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
_HAS_ROW = " UNION ALL ".join(
    f"SELECT 1 FROM {table} WHERE writer = ? AND number = ?" for table in ("requests", "folded_requests")
)
_FOLDED = msgspec.msgpack.Decoder(list[Row])


class Usage(msgspec.Struct, frozen=True):
    """One line of `penstock usage`: the values it is grouped by, and sums over those requests."""

    group: tuple[str, ...]
    n_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    n_estimates: int
    n_refused: int  # among `n_requests`
    cost_usd: float | None

    @property
    def tokens(self) -> tuple[int, int, int]:
        return self.prompt_tokens, self.cached_tokens, self.output_tokens


class GpuUse(msgspec.Struct, frozen=True):
    """GPU seconds of ready replicas, those in which a request ran, and US dollars where the price was known."""

    gpu_s: float
    busy_s: float
    usd: float | None


class UsageStore:
    """The ledger of an open database; errors are those of `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_rows(self, writer: str, rows: Sequence[Row], *, is_again: bool = False) -> None:
        """Adds a batch, all or nothing. `is_again`: an earlier call may have written it before its answer was lost."""
        if not rows:
            return
        with self._database.writing():
            if is_again and self._database.all(_HAS_ROW, 2 * (writer, rows[0].number)):
                return
            if self._database.is_postgres:
                self._database.execute(_INSERT_POSTGRES, (writer, msgspec.json.encode(rows).decode()))
            elif len(rows) >= FOLD_ROWS:
                folded = (writer, rows[0].number, msgspec.msgpack.encode(rows))
                self._database.execute("INSERT INTO folded_requests VALUES (?, ?, ?)", folded)
            else:
                self._insert(writer, rows)
            for (month, key_id), cost_usd in _spend_of(rows).items():
                self._database.execute(_SPEND, (month, key_id, cost_usd))

    def unfold_rows(self, before: float = math.inf) -> int:
        """Unfolds the oldest batch, if any of it is older than `before`; returns how many rows. A few milliseconds."""
        if self._database.is_postgres or not self._database.all("SELECT 1 FROM folded_requests LIMIT 1"):
            return 0
        with self._database.writing():
            for at, writer, folded in self._database.all(
                "SELECT rowid, writer, folded FROM folded_requests ORDER BY rowid LIMIT 1", ()
            ):
                rows = _FOLDED.decode(folded)
                if before < math.inf and all(row.at >= before for row in rows):
                    return 0
                self._insert(writer, rows)
                self._database.execute("DELETE FROM folded_requests WHERE rowid = ?", (at,))
                return len(rows)
        return 0  # another process was faster

    def prune(self, before: float, n_rows_max: int = PRUNE_ROWS) -> int:
        """Moves rows from before the day (UTC) of that time into daily sums; returns how many, 0 when none is left.

        Budgets and `usage` stay the same.
        """
        midnight = before // DAY_S * DAY_S
        self.unfold_rows(midnight)
        with self._database.writing():
            if self._database.is_postgres:
                return int(self._database.all(_PRUNE_POSTGRES, (midnight, n_rows_max))[0][0])
            self._database.execute(_ADD_UP, (midnight, n_rows_max))
            pruned = f"DELETE FROM requests WHERE rowid IN (SELECT rowid {_OLDEST}, rowid LIMIT ?)"
            return self._database.execute(pruned, (midnight, n_rows_max))

    def spend(self, month: str) -> dict[str, float]:
        """US dollars by key id, in a month such as "2026-11" (UTC)."""
        return dict(self._database.all("SELECT key_id, cost_usd FROM spend WHERE month = ?", (month,)))

    def usage(self, by: Sequence[Grouping], since: float = 0.0) -> list[Usage]:
        """Sums over all requests since then, grouped; a key goes by its name where it has one.

        Pruned days count that lie wholly after `since`. Unfolds all batches first: a second for some 300 000 requests.
        """
        while self.unfold_rows():
            pass
        first_day = day_of(math.ceil(max(0.0, since) / DAY_S) * DAY_S)
        days = _DAY_POSTGRES if self._database.is_postgres else _DAY_SQLITE
        rows = self._sums("requests", by, days, ("1", "is_estimate"), "at >= ?", since)
        rows += self._sums("daily_usage", by, "day", ("n_requests", "n_estimates"), "day >= ?", first_day)
        return add_usage(rows)

    def _sums(
        self, table: str, by: Sequence[Grouping], days: str, counts: tuple[str, str], wanted: str, since: float | str
    ) -> list[Usage]:
        columns = {"key": "coalesce(k.name, r.key_id)", "day": days}
        picked = [columns.get(group, group) for group in by]
        # A sum of PostgreSQL's is a Decimal without the cast.
        n_refused = f"CASE WHEN state = 'refused' THEN {counts[0]} ELSE 0 END"
        names = (counts[0], "prompt_tokens", "cached_tokens", "output_tokens", counts[1], n_refused)
        picked += [*(f"CAST(sum({name}) AS BIGINT)" for name in names), "sum(cost_usd)"]
        sql = f"SELECT {', '.join(picked)} FROM {table} r LEFT JOIN api_keys k ON k.id = r.key_id WHERE {wanted}"
        n = len(by)
        if by:
            sql += f" GROUP BY {', '.join(str(number + 1) for number in range(n))}"
        return [Usage(tuple(map(str, row[:n])), *row[n:]) for row in self._database.all(sql, (since,)) if row[n]]

    def put_gpu_time(self, slots: Mapping[tuple[int, str], tuple[float, float]], gpu_hour_usd: float | None) -> None:
        """GPU seconds by Unix time and model; of several counts of a slot the longest stays."""
        with self._database.writing():
            for (at, model), (gpu_s, busy_s) in slots.items():
                usd = None if gpu_hour_usd is None else gpu_s / 3600 * gpu_hour_usd
                self._database.execute(_PUT_GPU_TIME, (at, model, gpu_s, busy_s, usd))

    def gpu_time(self, since: float = 0.0) -> dict[str, GpuUse]:
        """By model; of the five minutes around `since` all or nothing."""
        sql = "SELECT model, sum(gpu_s), sum(busy_s), sum(usd) FROM gpu_time WHERE at >= ? GROUP BY model"
        return {row[0]: GpuUse(*row[1:]) for row in self._database.all(sql, (math.floor(since),))}

    # What gateways count in a minute and at once, for each other.

    def put_counts(self, gateway: str, counts: Mapping[str, int]) -> None:
        sql = _PUT_COUNTS_POSTGRES if self._database.is_postgres else _PUT_COUNTS_SQLITE
        with self._database.writing():
            self._database.execute(sql, (gateway, msgspec.json.encode(counts).decode()))

    def others_counts(self, gateway: str, fresh_s: float, *, are_all: bool) -> list[OthersCount]:
        """The counts that other gateways wrote in the last `fresh_s`; `are_all`: old ones too."""
        is_fresh = f"at > {self._now} - CAST(? AS DOUBLE PRECISION)"
        sql = f"SELECT gateway, name, count, {is_fresh} FROM gateway_counts WHERE gateway <> ?"
        values: tuple[float | str, ...] = (fresh_s, gateway)
        if not are_all:
            sql, values = f"{sql} AND {is_fresh}", (*values, fresh_s)
        return [(row[0], row[1], row[2], bool(row[3])) for row in self._database.all(sql, values)]

    def remove_counts(self, gateway: str) -> None:
        with self._database.writing():
            self._database.execute("DELETE FROM gateway_counts WHERE gateway = ?", (gateway,))

    def forget_gateways(self, silent_s: float) -> None:
        """Drops the counts of gateways that have been silent for so long."""
        with self._database.writing():
            self._database.execute(
                "DELETE FROM gateway_counts WHERE gateway NOT IN"
                f" (SELECT gateway FROM gateway_counts WHERE at > {self._now} - CAST(? AS DOUBLE PRECISION))",
                (silent_s,),
            )

    @property
    def _now(self) -> str:
        return _NOW_POSTGRES if self._database.is_postgres else _NOW_SQLITE

    def _insert(self, writer: str, rows: Sequence[Row]) -> None:
        begin = 0
        for size in _STATEMENT_ROWS:
            while len(rows) - begin >= size:
                values = [value for row in rows[begin : begin + size] for value in (writer, *msgspec.to_builtins(row))]
                self._database.execute(_INSERT[size], values)
                begin += size


def add_usage(lines: Iterable[Usage]) -> list[Usage]:
    """One line for each group, in order; the cost is that of the lines whose cost is known."""
    sums: dict[tuple[str, ...], Usage] = {}
    for line in lines:
        before = sums.get(line.group, Usage(line.group, 0, 0, 0, 0, 0, 0, None))
        costs = [cost for cost in (before.cost_usd, line.cost_usd) if cost is not None]
        counts = map(operator.add, msgspec.structs.astuple(before)[1:-1], msgspec.structs.astuple(line)[1:-1])
        values: list[Any] = [line.group, *counts, sum(costs) if costs else None]
        sums[line.group] = Usage(*values)
    return [sums[group] for group in sorted(sums)]


def _spend_of(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        if row.cost_usd:
            spent[month_of(row.at), row.key_id] += row.cost_usd
    return spent


def month_of(at: float) -> str:
    """The calendar month (UTC) of a time in Unix seconds, such as "2026-11"."""
    return strftime("%Y-%m", gmtime(at))


def day_of(at: float) -> str:
    return strftime("%Y-%m-%d", gmtime(at))


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
_PUT_GPU_TIME = (
    "INSERT INTO gpu_time (at, model, gpu_s, busy_s, usd) VALUES (?, ?, ?, ?, ?) ON CONFLICT (at, model) DO UPDATE"
    " SET gpu_s = excluded.gpu_s, busy_s = excluded.busy_s, usd = excluded.usd WHERE excluded.gpu_s > gpu_time.gpu_s"
)
_OLDEST = "FROM requests WHERE at < ? ORDER BY at"
_SUMMED = Usage.__struct_fields__[1:-2]
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
# The database's clock: gateways may be on several machines.
_NOW_SQLITE = "(julianday('now') - 2440587.5) * 86400.0"
_NOW_POSTGRES = "extract(epoch from now())::double precision"
_PUT_COUNTS = (
    "INSERT INTO gateway_counts (gateway, name, count, at) SELECT CAST(? AS TEXT), key, CAST(value AS BIGINT), {now}"
    " FROM {each} WHERE true ON CONFLICT (gateway, name) DO UPDATE SET count = excluded.count, at = excluded.at"
)
_PUT_COUNTS_SQLITE = _PUT_COUNTS.format(now=_NOW_SQLITE, each="json_each(?)")
_PUT_COUNTS_POSTGRES = _PUT_COUNTS.format(now=_NOW_POSTGRES, each="jsonb_each_text(CAST(? AS jsonb))")
