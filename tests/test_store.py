"""The store on both databases: keys, the ledger, what it keeps of old requests, and what a crash leaves."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import test_gateway_quota
from store_rig import NOW, Store, empty, ledger_at, postgres, record, row, store, writer_of

from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting.key_store import Limits, check_new_key, hash_of, new_secret
from penstock.gateway.accounting.running_totals import new_totals
from penstock.gateway.accounting.store import BUSY_S, SCHEMA_VERSION, check, connect, share
from penstock.gateway.accounting.usage_store import DAY_S, FOLD_ROWS, GpuUse, Grouping, Row, UsageStore, day_of
from penstock.gateway.metrics.gpu_time import SLOT_S

__all__ = ["postgres", "store"]  # the fixtures


def test_key_is_kept_by_its_hash_and_ending(store: Store) -> None:
    limits = Limits(("m", "größe"), 10, 2**40, 3, 1.5, NOW + 60)
    key, secret = store.keys.create("alice", limits, NOW)
    (kept,) = store.keys.all()
    assert kept == key
    assert (kept.name, kept.limits, kept.created_at, kept.revoked_at) == ("alice", limits, NOW, None)
    assert [(one.hash, one.ending) for one in kept.secrets] == [(hash_of(secret), secret[-4:])]
    assert secret.startswith("sk-")
    assert len({new_secret() for _ in range(50)}) == 50
    assert len(secret) >= 46  # 256 bits


def test_names_of_valid_keys_are_unique_and_a_revoked_one_is_free(store: Store) -> None:
    first, _ = store.keys.create("alice", Limits(), NOW)
    with pytest.raises(UserError, match="there is one of that name"):
        store.keys.create("alice", Limits(), NOW)
    assert store.keys.revoke("alice", NOW + 1).revoked_at == NOW + 1
    with Store(store.place) as other:  # another process, which sees what this one wrote
        again, _ = other.keys.create("alice", Limits(), NOW + 2)
    assert [key.id for key in store.keys.all()] == [first.id, again.id]
    assert store.keys.find("alice") == again
    with pytest.raises(UserError, match='cannot find key "alce"') as caught:
        store.keys.find("alce")
    assert caught.value.hint == 'Did you mean "alice"?'


def test_a_key_that_is_known_by_its_hash_alone_is_introduced_once(store: Store) -> None:
    for digest in (hash_of("sk-of-a-client"), hash_of("sk-of-another")) * 2:  # a gateway does so at each start
        store.keys.introduce("first", digest, NOW)
    assert [secret.hash for secret in store.keys.find("first").secrets] == [hash_of("sk-of-a-client")]
    assert [key.name for key in store.keys.all()] == ["first", f"first-{hash_of('sk-of-another')[:6]}"]
    store.keys.rotate("first", 0.0, NOW)
    store.keys.introduce("first", hash_of("sk-of-a-client"), NOW)
    assert len(store.keys.all()) == 2
    store.keys.revoke("first", NOW)
    store.keys.introduce("first", hash_of("sk-of-a-client"), NOW)
    with pytest.raises(UserError, match="cannot find key"):
        store.keys.find("first")


def test_rotation_leaves_the_old_secret_its_grace_and_changes_the_revision(store: Store) -> None:
    key, _ = store.keys.create("alice", Limits(), NOW)
    before = store.keys.revision()
    _, second = store.keys.rotate(key.id, 60.0, NOW)
    _, third = store.keys.rotate("alice", 10.0, NOW)
    untils = {secret.hash: secret.expires_at for secret in store.keys.find("alice").secrets}
    assert sorted(untils.values(), key=lambda until: until or 0) == [None, NOW + 10, NOW + 10]
    assert (untils[hash_of(second)], untils[hash_of(third)]) == (NOW + 10, None)
    store.usage.add_rows("w", [row(1)])
    assert store.keys.revision() == before + 2
    store.keys.revoke("alice", NOW)
    assert store.keys.revision() == before + 3


def test_usage_is_summed_by_what_is_asked(store: Store) -> None:
    key, _ = store.keys.create("alice", Limits(), NOW)
    rows = [row(number, key_id=key.id if number % 2 else "gone", cost_usd=0.5) for number in range(100)]
    store.usage.add_rows("w", [*rows, row(100, at=NOW + 86400, model="n", is_estimate=1, ttft_ms=3.25)])
    by_key = {line.group: line for line in store.usage.usage(("key", "model"))}
    assert set(by_key) == {("alice", "m"), ("gone", "m"), ("k", "n")}
    alice = by_key["alice", "m"]
    assert (alice.n_requests, alice.prompt_tokens, alice.cached_tokens, alice.output_tokens) == (50, 500, 200, 250)
    assert (alice.cost_usd, by_key["k", "n"].cost_usd, by_key["k", "n"].n_estimates) == (25.0, None, 1)
    assert [line.group for line in store.usage.usage(("day",))] == [("2026-09-21",), ("2026-09-22",)]
    assert [line.n_requests for line in store.usage.usage((), since=NOW + 1)] == [1]
    assert store.usage.usage(("state", "replica"))[0].group == ("complete", "0")
    assert store.usage.usage((), since=NOW + 1e6) == []
    assert store.usage.spend("2026-09") == {key.id: 25.0, "gone": 25.0}
    assert store.usage.spend("2026-10") == {}


def test_batch_goes_in_whole_and_once_or_not_at_all(store: Store) -> None:
    with pytest.raises(PenstockError) as caught:
        store.usage.add_rows("w", [*(row(number) for number in range(70)), row(0)])
    assert not caught.value.is_retryable
    assert store.usage.usage(()) == []
    rows = [row(number, cost_usd=1.0) for number in range(73)]
    store.usage.add_rows("w", rows)
    for writer in ("w", "v"):
        store.usage.add_rows(writer, rows, is_again=True)
    assert store.usage.usage(())[0].n_requests == 146
    assert store.usage.spend("2026-09") == {"k": 146.0}


def test_many_rows_are_folded_and_unfolded_once(tmp_path: Path) -> None:
    rows = [row(number, cost_usd=1.0, request_id="\xe9") for number in range(FOLD_ROWS)]
    later = [row(FOLD_ROWS + number, ttft_ms=0.5) for number in range(FOLD_ROWS)]
    with Store(str(tmp_path / "store.sqlite")) as opened:
        for is_again in (False, True):
            opened.usage.add_rows("w", rows, is_again=is_again)
        assert opened.usage.spend("2026-09") == {"k": float(FOLD_ROWS)}
        assert opened.database.all("SELECT count(*) FROM requests", ()) == [(0,)]
        assert opened.usage.unfold_rows() == FOLD_ROWS
        opened.usage.add_rows("w", rows, is_again=True)
        opened.usage.add_rows("w", later)
        assert opened.usage.usage(())[0].n_requests == 2 * FOLD_ROWS
        assert opened.usage.spend("2026-09") == {"k": float(FOLD_ROWS)}
        kept = opened.database.all("SELECT * FROM requests ORDER BY number")
        assert kept == [("w", *msgspec.to_builtins(line)) for line in rows + later]
        assert opened.usage.unfold_rows() == 0


@pytest.mark.postgres
def test_postgres_keeps_what_sqlite_keeps_and_is_found_again(postgres: str) -> None:
    """All that is tested on a store, on one server."""
    check(postgres)
    with pytest.importorskip("psycopg").connect(postgres) as bare:
        assert bare.execute("SELECT to_regclass('meta')").fetchone() == (None,), "a check leaves nothing"
    for name, test in globals().copy().items():
        if name.startswith("test_") and "store" in getattr(test, "__annotations__", ()):
            with empty(postgres) as opened:
                test(opened)
    empty(postgres).close()
    prune_at_once(postgres)
    empty(postgres).close()
    test_gateway_quota.test_two_ledgers_sync_totals_by_their_store(postgres)
    totals = new_totals()
    ledger, pid = ledger_at(postgres, totals), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    totals["key:k:requests"].own = 1
    ledger._turn()
    with Store(postgres) as opened, Store(postgres) as other:
        other.database.all(f"{pid} WHERE pid <> pg_backend_pid() AND datname IS NOT NULL")
        failures = []
        for _ in range(2):
            ledger._turn()
            failures.append(writer_of(ledger).is_failing)
        assert failures == [True, False]
        ledger.close()
        with pytest.raises(PenstockError):
            opened.usage.add_rows("again", [row(1)])
        opened.usage.add_rows("again", [row(1)], is_again=True)
        assert opened.keys.revision() == other.keys.revision()


def test_file_is_private_and_newer_schemas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with Store(str(path)) as opened:
        opened.keys.create("a", Limits(), NOW)
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
        opened.database.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (SCHEMA_VERSION + 1,))
    with pytest.raises(UserError, match=f"schema is version {SCHEMA_VERSION + 1}"):
        Store(str(path))


def test_a_verb_waits_for_writes_of_others_longer_than_the_gateway(tmp_path: Path) -> None:
    place = str(tmp_path / "keys.db")
    for database, wait_ms in ((connect(place), 30_000), (connect(place, BUSY_S), 1000)):
        assert database.all("PRAGMA busy_timeout") == [(wait_ms,)]
        database.close()


def test_what_is_no_store_is_refused_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    (tmp_path / "store").write_bytes(b"not a database" * 100)
    for place in (str(tmp_path / "store"), str(tmp_path / "absent/store"), "postgresql://me:secret@127.0.0.1:1/x"):
        with pytest.raises(UserError, match="could not use store") as caught:
            Store(place)
        assert "secret" not in caught.value.message


def test_all_that_is_wrong_with_a_key_is_told_together() -> None:
    check_new_key("alice@example.org", Limits(), NOW)
    with pytest.raises(UserError) as caught:
        check_new_key("-x", Limits(("",), 0, -1, None, -0.5, NOW - 1), NOW)
    assert [line.partition(":")[0] for line in str(caught.value.detail).splitlines()] == [
        *("name", "rpm", "tpm", "budget", "expires", "models")
    ]


_WRITER = """
import asyncio, sys, time
sys.path.insert(0, {tests!r})
from store_rig import ledger_at, record

async def main():
    ledger, number = ledger_at({place!r}), 0
    ledger.start(lambda news: None)
    while True:
        for _ in range(50):
            number += 1
            ledger.add(record())
        print(time.monotonic(), number, flush=True)
        await asyncio.sleep(0.005)

asyncio.run(main())
"""


@pytest.mark.processes
def test_kill_loses_at_most_the_last_second_and_breaks_nothing(tmp_path: Path) -> None:
    place = str(tmp_path / "store.sqlite")
    code = textwrap.dedent(_WRITER).format(place=place, tests=str(Path(__file__).parent))
    n_before = 0
    for n_lines in (150, 220, 290):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        first = "".join(writer.stdout.readline() for _ in range(n_lines))
        writer.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        lines = [line.split() for line in (first + writer.communicate()[0]).splitlines() if line.count(" ") == 1]
        with contextlib.closing(sqlite3.connect(place)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with Store(place) as opened:
            n_rows = opened.usage.usage(())[0].n_requests
        n_safe = max((int(number) for at, number in lines if float(at) < killed_at - 1.0), default=0)
        assert n_safe <= n_rows - n_before <= int(lines[-1][1])
        n_before = n_rows
    assert n_before > 1000


def test_a_shared_store_keeps_no_log_that_machines_cannot_share(tmp_path: Path) -> None:
    place = str(tmp_path / "s.sqlite")
    share(place)
    for _ in range(2):  # whoever opens it later leaves it so
        with Store(place) as opened:
            assert opened.database._connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete"


def test_the_store_keeps_the_longest_count_of_a_slot(store: Store) -> None:
    at = int(NOW) // SLOT_S * SLOT_S
    for gpu_s in (100.0, 50.0, 200.0):  # another gateway, and the same one a minute later
        store.usage.put_gpu_time({(at, "m"): (gpu_s, gpu_s / 2), (at + SLOT_S, "m"): (10.0, 0.0)}, 3600.0)
    store.usage.put_gpu_time({(at, "n"): (1.0, 1.0)}, None)
    assert store.usage.gpu_time() == {"m": GpuUse(210.0, 100.0, 210.0), "n": GpuUse(1.0, 1.0, None)}
    assert store.usage.gpu_time(at + 1) == {"m": GpuUse(10.0, 0.0, 10.0)}


# Old requests: their sums, day for day.


MIDNIGHT = NOW // DAY_S * DAY_S
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
GROUPED: tuple[tuple[Grouping, ...], ...] = ((), ("key",), ("model", "day"), GROUPINGS)


def old_rows(n_rows: int) -> list[Row]:
    """Of three days before MIDNIGHT, of two keys and all kinds; one in three has a price."""
    return [
        row(
            number,
            at=MIDNIGHT - 3 * DAY_S + number * 3 * DAY_S / n_rows,
            key_id=f"k{number % 2}",
            replica=str(number % 5 % 2),
            state="complete" if number % 7 else "refused",
            cost_usd=None if number % 3 else 0.25,
            is_estimate=int(number % 4 == 0),
        )
        for number in range(n_rows)
    ]


def test_pruning_changes_no_sum_and_no_budget(store: Store) -> None:
    key, _ = store.keys.create("alice", Limits(), NOW)
    store.usage.add_rows("w", old_rows(200))
    young = [row(0, at=MIDNIGHT, key_id=key.id, cost_usd=1.0), row(1, at=MIDNIGHT - 1, key_id=key.id)]
    store.usage.add_rows("v", young)
    usage, spent = [store.usage.usage(by) for by in GROUPED], store.usage.spend("2026-09")
    assert spent == {"k0": 8.5, "k1": 8.25, key.id: 1.0}
    # Not whole days: 201 rows are older than the midnight before.
    assert [store.usage.prune(MIDNIGHT + 3600, n_rows_max=64) for _ in range(5)] == [64, 64, 64, 9, 0]
    assert store.database.all("SELECT count(*) FROM requests") == [(1,)]
    assert ([store.usage.usage(by) for by in GROUPED], store.usage.spend("2026-09")) == (usage, spent)
    # Late rows of a day that was pruned are added to it.
    store.usage.add_rows("late", [row(0, at=MIDNIGHT - 5, key_id="k0", cost_usd=0.5)])
    n_before = {line.group: line.n_requests for line in store.usage.usage(("day",))}
    assert store.usage.prune(MIDNIGHT) == 1
    assert {line.group: line.n_requests for line in store.usage.usage(("day",))} == n_before
    assert store.usage.spend("2026-09")["k0"] == 9.0
    assert sum(line.cost_usd or 0 for line in store.usage.usage(("key",))) == 18.25


def test_pruned_days_are_told_whole_or_not_at_all(store: Store) -> None:
    store.usage.add_rows("w", old_rows(300))
    assert store.usage.prune(MIDNIGHT) == 300
    day = MIDNIGHT - 2 * DAY_S
    for since, n_requests in ((0.0, [300]), (-1e15, [300]), (day, [200]), (day + 1, [100]), (MIDNIGHT, [])):
        assert [line.n_requests for line in store.usage.usage((), since)] == n_requests
    assert [line.group for line in store.usage.usage(("day",))] == [(day_of(MIDNIGHT - n * DAY_S),) for n in (3, 2, 1)]


def test_costs_nobody_knows_stay_unknown(store: Store) -> None:
    store.usage.add_rows("w", [row(number, at=MIDNIGHT - 10 - number) for number in range(4)])
    for _ in range(2):
        assert store.usage.prune(MIDNIGHT, n_rows_max=2) == 2
        assert store.usage.usage(())[0].cost_usd is None
    store.usage.add_rows("w", [row(9, at=MIDNIGHT - 10, cost_usd=0.5)])
    store.usage.prune(MIDNIGHT)
    assert (store.usage.usage(())[0].cost_usd, store.usage.usage(())[0].n_requests) == (0.5, 5)


def test_folded_batches_are_pruned_too_and_young_ones_stay_folded(tmp_path: Path) -> None:
    with Store(str(tmp_path / "store.sqlite")) as opened:
        opened.usage.add_rows("w", old_rows(FOLD_ROWS))
        opened.usage.add_rows("w", [row(number, at=MIDNIGHT) for number in range(FOLD_ROWS, 2 * FOLD_ROWS)])
        assert [opened.usage.prune(MIDNIGHT) for _ in range(2)] == [FOLD_ROWS, 0]
        count = "SELECT (SELECT count(*) FROM requests), (SELECT count(*) FROM folded_requests)"
        assert opened.database.all(count) == [(0, 1)]
        assert opened.usage.usage(())[0].n_requests == 2 * FOLD_ROWS


def test_pruned_space_is_used_again_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    opened, other = Store(str(path)), Store(str(path))
    sizes = []
    for turn in range(3):
        opened.usage.add_rows(f"w{turn}", old_rows(FOLD_ROWS * 8))
        while opened.usage.prune(MIDNIGHT):
            pass
        opened.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sizes.append(path.stat().st_size)
    assert sizes[2] <= sizes[0] * 1.2
    opened.database.compact()
    assert path.stat().st_size < sizes[2] / 4
    assert other.usage.usage(())[0].n_requests == 3 * FOLD_ROWS * 8  # another one sees no seam
    opened.close()
    other.close()


def prune_at_once(postgres: str) -> None:
    """Two gateways prune, and every row is counted once."""
    opened, other = Store(postgres), Store(postgres)
    opened.usage.add_rows("w", old_rows(3000))
    usage, counts = opened.usage.usage(GROUPINGS), {opened: 0, other: 0}

    def prune(mine: Store) -> None:
        while mine.database.all("SELECT count(*) FROM requests") != [(0,)]:
            counts[mine] += mine.usage.prune(MIDNIGHT, n_rows_max=50)

    threads = [threading.Thread(target=prune, args=(mine,), daemon=True) for mine in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts.values()) == 3000
    assert opened.usage.usage(GROUPINGS) == usage
    opened.close()
    other.close()


def test_pruning_that_breaks_off_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(str(tmp_path / "store.sqlite")) as opened, Store(str(tmp_path / "store.sqlite")) as other:
        opened.usage.add_rows("w", old_rows(200))
        usage, execute = other.usage.usage(GROUPINGS), opened.database.execute

        def die(sql: str, values: Sequence[Any] = ()) -> int:
            if sql.startswith("DELETE FROM requests"):  # the sums are written, and the rows are still there
                raise KeyboardInterrupt
            return execute(sql, values)

        for _ in range(2):
            assert opened.usage.prune(MIDNIGHT, n_rows_max=20) == 20
            with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
                dying.setattr(opened.database, "execute", die)
                opened.usage.prune(MIDNIGHT, n_rows_max=20)
            assert other.usage.usage(GROUPINGS) == usage
        assert other.database.all("SELECT count(*) FROM requests") == [(160,)]


# ---- turns of the ledger ------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store.sqlite")


@pytest.mark.parametrize("n_rows", [3, FOLD_ROWS + 3])
def test_row_that_can_never_be_stored_is_dropped_and_counted(place: str, n_rows: int) -> None:
    kept = ledger_at(place)
    for number in range(n_rows):
        kept.add(record(prompt_tokens=2**70 if number == 1 else 5))
    kept._turn()
    writer = writer_of(kept)
    assert (writer.is_failing, writer.n_lost, writer.n_written, writer.n_waiting) == (False, 1, n_rows - 1, 0)
    assert UsageStore(writer._database).usage(())[0].n_requests == n_rows - 1
    kept.close()


def test_rows_that_come_while_a_turn_writes_are_the_next_turns(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy gateway's turn never ends, writes a few rows at a time, and each time takes the loop's lock."""
    kept = ledger_at(place)
    add_rows = UsageStore.add_rows
    writes: list[list[int]] = []

    def busy(store: UsageStore, writer: str, batch: list[Row], *, is_again: bool) -> None:
        assert len(writes) < 5
        writes.append([line.number for line in batch])
        add_rows(store, writer, batch, is_again=is_again)
        kept.add(record())

    monkeypatch.setattr(UsageStore, "add_rows", busy)
    kept.add(record())
    for n_turns in (1, 2):
        kept._turn()
        assert (writer_of(kept).n_written, kept.n_waiting) == (n_turns, 1)
    assert writes == [[1], [2]]
    kept.close()


def test_ledger_prunes_only_when_asked_and_every_ten_minutes(place: str) -> None:
    store = Store(place)
    kept = ledger_at(place)
    for number, (keep_days, n_rows) in enumerate([(None, 1), (1, 0), (1, 1)]):
        store.usage.add_rows("old", [row(number, at=5.0)] if number != 1 else [])
        writer_of(kept).keep_days = keep_days
        kept._turn()
        assert store.database.all("SELECT count(*) FROM requests") == [(n_rows,)]
    kept.close()
    store.close()
