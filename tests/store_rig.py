"""What tests of the store share: an open one on either database, and rows."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import waiting

from penstock.gateway.accounting.key_store import KeyStore
from penstock.gateway.accounting.ledger import Ledger
from penstock.gateway.accounting.record import Record
from penstock.gateway.accounting.running_totals import Totals, new_totals
from penstock.gateway.accounting.store import connect
from penstock.gateway.accounting.store_writer import StoreWriter
from penstock.gateway.accounting.usage_store import Row, UsageStore
from penstock.gateway.config import GatewayConfig
from penstock.gateway.request import RequestFacts
from penstock.wire.http1 import parse_request

NOW = 1_790_000_000.0  # 2026-09-21 in UTC


class Store:
    """An open database with both of its stores."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.database = connect(place)
        self.keys, self.usage = KeyStore(self.database), UsageStore(self.database)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def writer_of(ledger: Ledger | None) -> StoreWriter:
    assert ledger is not None
    assert ledger.store is not None
    return ledger.store


ROW = Row(0, NOW, "k", "m", "0", 10, 4, 5, 0, None, 1.5, "complete", 200, None, "r'\"\\")


def row(number: int, **changes: Any) -> Row:
    return msgspec.structs.replace(ROW, number=number, **changes)


HEAD = parse_request(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a")


def record(**changes: Any) -> Record:
    """A whole answer of 4 cached and 6 other tokens to 5, without its times."""
    made = Record(HEAD, RequestFacts(b"/v1/chat/completions", b"r", 10.0, 10), "m", "10.0.0.9", NOW)
    made.prompt_tokens, made.cached_tokens, made.output_tokens = 10, 4, 5
    made.outcome, made.state, made.status, made.replica = "complete", "complete", 200, "0"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def ledger_at(place: str, totals: Totals | None = None) -> Ledger:
    config = GatewayConfig(listen="", admin="", admin_token_file="", models=(), auth="none", store=place)
    return Ledger(config, new_totals() if totals is None else totals)


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A PostgreSQL server of this test's own, on a Unix socket."""
    with postgres_server() as folder:
        yield f"postgresql://penstock@/postgres?host={folder}"


@contextlib.contextmanager
def postgres_server(address: str = "") -> Iterator[Path]:
    """The folder of its socket. With an address it listens there too, on port 5432, and asks for no password."""
    pytest.importorskip("psycopg", reason="pip install 'penstock[postgres]'")
    pg_ctl = shutil.which("pg_ctl")
    folders = [Path(pg_ctl).resolve().parent] if pg_ctl else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders:
        pytest.skip("PostgreSQL is not installed: make postgres")
    folder = Path(f"/tmp/penstock-test-postgres-{os.getpid()}")  # short, for the socket's path
    folder.mkdir()
    as_user: list[str] = []
    if os.geteuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        as_user = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"]

    def run(program: str, *arguments: str) -> None:
        line = [*as_user, str(folders[-1] / program), *arguments]
        quiet = subprocess.DEVNULL
        subprocess.run(line, check=True, stdout=quiet, stderr=quiet, cwd="/", timeout=waiting.left_s())

    data = str(folder / "data")
    try:
        run("initdb", "-D", data, "-A", "trust", "-U", "penstock", "--no-sync")
        if address:
            with Path(data, "pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet trust\n")
        options = f"-k {folder} -c listen_addresses='{address}'"
        run("pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
        yield folder
    finally:
        stop = [*as_user, str(folders[-1] / "pg_ctl"), "-D", data, "-m", "immediate", "stop"]
        subprocess.run(stop, check=False, cwd="/")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "store.sqlite")) as opened:
        yield opened


def empty(place: str) -> Store:
    """The store of a server, as new."""
    opened = Store(place)
    for table in ("api_keys", "api_secrets", "requests", "daily_usage", "spend", "gateway_counts", "gpu_time"):
        opened.database.execute(f"DELETE FROM {table}")
    return opened
