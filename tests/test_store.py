"""The store on both databases: keys, the ledger, and what a crash leaves."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting.store import (
    FOLD_ROWS,
    SCHEMA_VERSION,
    Limits,
    Row,
    Store,
    check_new_key,
    hash_of,
    new_secret,
    share,
)

NOW = 1_790_000_000.0  # 2026-09-21 in UTC


def row(number: int, **changes: Any) -> Row:
    facts: dict[str, Any] = {
        "number": number,
        "at": NOW,
        "key_id": "k",
        "model": "m",
        "replica": "0",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "is_estimate": 0,
        "ttft_ms": None,
        "duration_ms": 1.5,
        "state": "complete",
        "status": 200,
        "cost_usd": None,
        "request_id": "r'\"\\",
    }
    return Row(**(facts | changes))


def postgres_programs() -> Path | None:
    found = shutil.which("pg_ctl")
    places = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return places[-1] if places else None


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server of this test's own, on a Unix socket."""
    pytest.importorskip("psycopg", reason="pip install 'penstock[postgres]'")
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: make postgres")
    folder = Path(f"/tmp/penstock-test-postgres-{os.getpid()}")  # short, for the socket's path
    folder.mkdir()
    as_user: list[str] = []
    if os.geteuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        as_user = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"]

    def run(program: str, *arguments: str) -> None:
        line = [*as_user, str(programs / program), *arguments]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", timeout=60)

    data = str(folder / "data")
    try:
        run("initdb", "-D", data, "-A", "trust", "-U", "penstock", "--no-sync")
        run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", f"-k {folder} -c listen_addresses=''", "start")
        yield f"postgresql://penstock@/postgres?host={folder}"
    finally:
        subprocess.run(
            [*as_user, str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "stop"], check=False, cwd="/"
        )
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        opened = Store(str(tmp_path / "store.sqlite"))
    else:
        opened = Store(request.getfixturevalue("postgres"))
        for table in ("api_keys", "api_secrets", "requests", "daily_usage", "spend"):
            opened._execute(f"DELETE FROM {table}", ())
    yield opened
    opened.close()


def test_key_is_kept_by_its_hash_and_ending(store: Store) -> None:
    limits = Limits(("m", "größe"), 10, 2**40, 3, 1.5, NOW + 60)
    key, secret = store.create_key("alice", limits, NOW)
    (kept,) = store.all_keys()
    assert kept == key
    assert (kept.name, kept.limits, kept.created_at, kept.revoked_at) == ("alice", limits, NOW, None)
    assert [(one.hash, one.ending) for one in kept.secrets] == [(hash_of(secret), secret[-4:])]
    assert secret.startswith("sk-")
    assert len({new_secret() for _ in range(50)}) == 50
    assert len(secret) >= 46  # 256 bits


def test_living_names_are_unique_and_a_revoked_one_is_free(store: Store) -> None:
    first, _ = store.create_key("alice", Limits(), NOW)
    with pytest.raises(UserError, match="there is one of that name"):
        store.create_key("alice", Limits(), NOW)
    assert store.revoke_key("alice", NOW + 1).revoked_at == NOW + 1
    again, _ = store.create_key("alice", Limits(), NOW + 2)
    assert [key.id for key in store.all_keys()] == [first.id, again.id]
    assert store.find_key("alice").id == again.id
    with pytest.raises(UserError, match='cannot find key "alce"') as caught:
        store.find_key("alce")
    assert caught.value.hint == 'Did you mean "alice"?'


def test_rotation_leaves_the_old_secret_its_grace(store: Store) -> None:
    key, _ = store.create_key("alice", Limits(), NOW)
    _, second = store.rotate_key(key.id, 60.0, NOW)
    _, third = store.rotate_key("alice", 10.0, NOW)
    untils = {one.hash: one.expires_at for one in store.find_key("alice").secrets}
    assert sorted(untils.values(), key=lambda until: until or 0) == [None, NOW + 10, NOW + 10]
    assert (untils[hash_of(second)], untils[hash_of(third)]) == (NOW + 10, None)


def test_revision_changes_with_keys_and_not_with_rows(store: Store) -> None:
    before = store.keys_revision()
    store.add_rows("w", [row(1)])
    assert store.keys_revision() == before
    store.create_key("a", Limits(), NOW)
    store.rotate_key("a", 0.0, NOW)
    store.revoke_key("a", NOW)
    assert store.keys_revision() == before + 3


def test_usage_is_summed_by_what_is_asked(store: Store) -> None:
    key, _ = store.create_key("alice", Limits(), NOW)
    rows = [row(number, key_id=key.id if number % 2 else "gone", cost_usd=0.5) for number in range(100)]
    store.add_rows("w", [*rows, row(100, at=NOW + 86400, model="n", is_estimate=1, ttft_ms=3.25)])
    by_key = {line.group: line for line in store.usage(("key", "model"))}
    assert set(by_key) == {("alice", "m"), ("gone", "m"), ("k", "n")}
    alice = by_key["alice", "m"]
    assert (alice.n_requests, alice.prompt_tokens, alice.cached_tokens, alice.output_tokens) == (50, 500, 200, 250)
    assert (alice.cost_usd, by_key["k", "n"].cost_usd, by_key["k", "n"].n_estimates) == (25.0, None, 1)
    assert [line.group for line in store.usage(("day",))] == [("2026-09-21",), ("2026-09-22",)]
    assert [line.n_requests for line in store.usage((), since=NOW + 1)] == [1]
    assert store.usage(("state", "replica"))[0].group == ("complete", "0")
    assert store.usage((), since=NOW + 1e6) == []
    assert store.spend("2026-09") == {key.id: 25.0, "gone": 25.0}
    assert store.spend("2026-10") == {}


def test_batch_that_was_written_is_not_written_again(store: Store) -> None:
    rows = [row(number, cost_usd=1.0) for number in range(73)]
    store.add_rows("w", rows)
    store.add_rows("w", rows, is_again=True)
    store.add_rows("v", rows, is_again=True)
    assert store.usage(())[0].n_requests == 146
    assert store.spend("2026-09") == {"k": 146.0}


def test_many_rows_are_folded_and_unfolded_once(tmp_path: Path) -> None:
    place = str(tmp_path / "store.sqlite")
    opened = Store(place)
    rows = [row(number, cost_usd=1.0, request_id="\xe9") for number in range(FOLD_ROWS)]
    later = [row(FOLD_ROWS + number, ttft_ms=0.5) for number in range(FOLD_ROWS)]
    for is_again in (False, True):
        opened.add_rows("w", rows, is_again=is_again)
    assert opened.spend("2026-09") == {"k": float(FOLD_ROWS)}
    assert opened._all("SELECT count(*) FROM requests", ()) == [(0,)]
    assert opened.unfold_rows() == FOLD_ROWS
    opened.add_rows("w", rows, is_again=True)
    opened.add_rows("w", later)
    assert opened.usage(())[0].n_requests == 2 * FOLD_ROWS
    assert opened.spend("2026-09") == {"k": float(FOLD_ROWS)}
    found = opened._all("SELECT * FROM requests ORDER BY number", ())
    assert found == [("w", *msgspec.to_builtins(one)) for one in rows + later]
    assert opened.unfold_rows() == 0
    opened.close()


def test_batch_goes_in_whole_or_not_at_all(store: Store) -> None:
    with pytest.raises(PenstockError) as caught:
        store.add_rows("w", [*(row(number) for number in range(70)), row(0)])
    assert caught.value.is_retryable
    assert store.usage(()) == []
    store.add_rows("w", [row(0)])


def test_two_stores_see_each_other(store: Store) -> None:
    other = Store(store.place)
    key, _ = other.create_key("alice", Limits(), NOW)
    assert store.find_key("alice") == key
    other.close()


@pytest.mark.postgres
def test_postgres_that_went_away_is_found_again(postgres: str) -> None:
    opened, other = Store(postgres), Store(postgres)
    pid = opened._all("SELECT pg_backend_pid()", ())[0][0]
    other._all("SELECT pg_terminate_backend(%s)", (pid,))
    with pytest.raises(PenstockError):
        opened.add_rows("again", [row(1)])
    opened.add_rows("again", [row(1)], is_again=True)
    assert opened.keys_revision() == other.keys_revision()
    opened.close()
    other.close()


def test_file_is_private_and_newer_schemas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    opened = Store(str(path))
    opened.create_key("a", Limits(), NOW)
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    opened._execute("UPDATE meta SET value = ? WHERE name = 'schema'", (SCHEMA_VERSION + 1,))
    opened.close()
    with pytest.raises(UserError, match=f"schema is version {SCHEMA_VERSION + 1}"):
        Store(str(path))


@pytest.mark.parametrize("content", [None, b"not a database" * 100])
def test_what_is_no_store_is_said(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ("absent/store" if content is None else "store")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="could not use store"):
        Store(str(path))


def test_password_of_a_place_is_not_told() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(UserError) as caught:
        Store("postgresql://me:secret@127.0.0.1:1/x")
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
from test_store import row
from penstock.gateway.accounting.ledger import Ledger

async def main():
    ledger = Ledger({place!r})
    ledger.start(lambda news: None)
    while True:
        for _ in range(50):
            number = ledger.next_number()
            ledger.add(row(number))
        print(time.monotonic(), number, flush=True)
        await asyncio.sleep(0.005)

asyncio.run(main())
"""


@pytest.mark.processes
def test_kill_loses_at_most_the_last_second_and_breaks_nothing(tmp_path: Path) -> None:
    place = str(tmp_path / "store.sqlite")
    code = textwrap.dedent(_WRITER).format(place=place, tests=str(Path(__file__).parent))
    n_before = 0
    for after_s in (0.9, 1.3, 1.77):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        said = [writer.stdout.readline().split()]
        time.sleep(after_s)
        writer.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        said += [line.split() for line in writer.stdout.read().splitlines() if line.count(" ") == 1]
        writer.wait()
        connection = sqlite3.connect(place)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        opened = Store(place)
        n_rows = opened.usage(())[0].n_requests
        opened.close()
        n_safe = max((int(number) for at, number in said if float(at) < killed_at - 1.0), default=0)
        assert n_safe <= n_rows - n_before <= int(said[-1][1])
        n_before = n_rows
    assert n_before > 1000


def test_a_shared_store_keeps_no_log_that_machines_cannot_share(tmp_path: Path) -> None:
    place = str(tmp_path / "s.sqlite")
    share(place)
    for _ in range(2):  # whoever opens it later leaves it so
        opened = Store(place)
        assert opened._connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
        opened.close()
