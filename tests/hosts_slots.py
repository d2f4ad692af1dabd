"""Slots: a number that one set of hosts (hosts.py) holds, from which its addresses and interfaces are named."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

from hosts_janitor import bury

SLOTS = Path("/run/penstock-hosts")
MAX_SLOTS = 64


def take_slot() -> tuple[int, int]:
    """(slot, descriptor of its lock): a slot nobody holds; what a dead holder left in it is removed first."""
    SLOTS.mkdir(exist_ok=True)
    chosen: tuple[int, int] | None = None
    for slot in range(1, MAX_SLOTS):
        path = SLOTS / str(slot)
        if chosen is not None and not path.exists():
            continue
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        left = path.read_text("utf-8")
        if left.startswith("/tmp/penstock-hosts-"):
            bury(Path(left))
        os.truncate(lock, 0)
        if chosen is None and _is_free(slot):
            chosen = slot, lock
        else:
            os.close(lock)
    assert chosen is not None, f"all {MAX_SLOTS} slots for hosts are taken: {SLOTS}"
    return chosen


def _is_free(slot: int) -> bool:
    """Whether no route of this machine is more precise than the slot's networks: then nothing of it is hidden."""
    routes = [
        subprocess.run(["ip", "-4", "route", "show", "root", f"10.{net}.{slot}.0/24"], capture_output=True, text=True)
        for net in (77, 78)
    ]
    return not any(found.stdout.strip() for found in routes)
