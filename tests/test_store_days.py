"""What the ledger keeps of old requests: their sums, day for day, on both databases."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args

import pytest
from store_rig import NOW, Store, row, store

from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.accounting.usage_store import DAY_S, FOLD_ROWS, Grouping, Row, Usage, day_of

__all__ = ["store"]  # the fixtures

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


def all_usage(store: Store) -> list[list[Usage]]:
    return [store.usage.usage(by) for by in GROUPED]


def test_pruning_changes_no_sum_and_no_budget(store: Store) -> None:
    key, _ = store.keys.create("alice", Limits(), NOW)
    store.usage.add_rows("w", old_rows(200))
    store.usage.add_rows(
        "v", [row(0, at=MIDNIGHT, key_id=key.id, cost_usd=1.0), row(1, at=MIDNIGHT - 1, key_id=key.id)]
    )
    usage, spent = all_usage(store), store.usage.spend("2026-09")
    assert spent == {"k0": 8.5, "k1": 8.25, key.id: 1.0}
    # Not whole days: 201 rows are older than the midnight before.
    assert [store.usage.prune(MIDNIGHT + 3600, n_rows_max=64) for _ in range(5)] == [64, 64, 64, 9, 0]
    assert store.database.all("SELECT count(*) FROM requests") == [(1,)]
    assert (all_usage(store), store.usage.spend("2026-09")) == (usage, spent)
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
    counts = [
        sum(line.n_requests for line in store.usage.usage((), since)) for since in (0.0, -1e15, MIDNIGHT - 2 * DAY_S)
    ]
    assert counts == [300, 300, 200]
    assert sum(line.n_requests for line in store.usage.usage((), MIDNIGHT - 2 * DAY_S + 1)) == 100
    assert store.usage.usage((), MIDNIGHT) == []
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
    opened = Store(str(tmp_path / "store.sqlite"))
    opened.usage.add_rows("w", old_rows(FOLD_ROWS))
    opened.usage.add_rows("w", [row(number, at=MIDNIGHT) for number in range(FOLD_ROWS, 2 * FOLD_ROWS)])
    assert opened.usage.prune(MIDNIGHT) == FOLD_ROWS
    assert opened.usage.prune(MIDNIGHT) == 0
    count = "SELECT (SELECT count(*) FROM requests), (SELECT count(*) FROM folded_requests)"
    assert opened.database.all(count) == [(0, 1)]
    assert opened.usage.usage(())[0].n_requests == 2 * FOLD_ROWS
    opened.close()


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

    threads = [threading.Thread(target=prune, args=(mine,)) for mine in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts.values()) == 3000
    assert opened.usage.usage(GROUPINGS) == usage
    opened.close()
    other.close()


_PRUNER = f"""
import sys
from penstock.gateway.accounting.store import connect
from penstock.gateway.accounting.usage_store import UsageStore
store = UsageStore(connect(sys.argv[1]))
while store.prune({MIDNIGHT}, n_rows_max=20):
    print("go", flush=True)
"""


@pytest.mark.processes
@pytest.mark.nightly
def test_killed_pruning_loses_and_doubles_nothing(tmp_path: Path) -> None:
    place = str(tmp_path / "store.sqlite")
    opened = Store(place)
    opened.usage.add_rows("w", old_rows(20_000))
    usage = opened.usage.usage(GROUPINGS)
    left = [20_000]
    for n_steps in (1, 5, 20):
        pruner = subprocess.Popen([sys.executable, "-c", _PRUNER, place], stdout=subprocess.PIPE, text=True)
        assert pruner.stdout is not None
        for _ in range(n_steps):
            assert pruner.stdout.readline() == "go\n"
        pruner.send_signal(signal.SIGKILL)
        pruner.communicate()
        left.append(opened.database.all("SELECT count(*) FROM requests")[0][0])
        assert opened.usage.usage(GROUPINGS) == usage
    assert 0 < left[-1] < left[0]
    opened.close()
