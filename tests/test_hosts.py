"""The hosts that other tests run on (hosts.py) are apart from each other and this machine, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts
from hosts_fixtures import require_hosts
from hosts_janitor import started_at
from hosts_slots import SLOTS
from waiting import until

pytestmark = pytest.mark.hosts

# Makes hosts, says where they are, and waits to be killed.
SESSION = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from hosts import Hosts
hosts = Hosts(2, login=True)
hosts[0].popen(["sleep", "1000"])
print(hosts.base, hosts.slot, *(host.pid for host in [hosts.login, *hosts]), hosts._janitor.pid, flush=True)
time.sleep(1000)
"""


def traces(base: Path | str, slot: int | str) -> list[str]:
    """What a set of hosts has left on this machine."""
    words = [["ip", "-o", "link", "show", "type", "veth"], ["ip", "-4", "route"], ["cat", "/proc/mounts"]]
    lines = "".join(subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in words)
    left = [line for line in lines.splitlines() if str(base) in line]
    # When another session has taken the slot, its interface and routes are not ours.
    if SLOTS.joinpath(str(slot)).read_text("utf-8") in ("", str(base)):
        left += [line for line in lines.splitlines() if re.search(rf" ph{slot}@|10\.7[78]\.{slot}\.", line)]
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [*left, *([str(base)] if Path(base).exists() else []), *(line for line in commands if str(base) in line)]


@pytest.mark.parametrize("with_janitor", [False, True], ids=["session", "session-and-janitor"])
@pytest.mark.nightly
def test_a_killed_session_leaves_nothing(with_janitor: bool) -> None:
    require_hosts()
    session = subprocess.Popen([sys.executable, "-c", SESSION], stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    base, slot, *pids, janitor = session.stdout.readline().split()
    assert len(traces(base, slot)) > 3  # so an empty list means something
    if with_janitor:
        os.kill(int(janitor), signal.SIGKILL)
    session.kill()
    session.wait()
    until(lambda: not any(started_at(int(pid)) for pid in pids), "the hosts are gone, with or without their janitor")
    if with_janitor:
        with Hosts(1) as others:  # clears away what it finds
            assert others[0].run(["hostname"]).stdout == "node1\n"
        assert not traces(others.base, others.slot)
    until(lambda: not traces(base, slot), "nothing is left")
