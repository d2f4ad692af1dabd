"""The hosts that other tests run on (hosts.py) are apart from each other and this machine, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts
from hosts_fixtures import require_hosts
from hosts_janitor import started_at
from hosts_slots import SLOTS
from waiting import end, until

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


@pytest.mark.nightly
def test_hosts_share_only_the_cluster_file_system_and_a_reset_makes_them_new(hosts: Hosts) -> None:
    for place in ("/tmp", "/var/tmp", "/dev/shm", "/root", "/run"):
        hosts[0].run(["touch", f"{place}/penstock-mine"])
        assert hosts[1].run(["ls", f"{place}/penstock-mine"], check=False).returncode != 0
        assert not Path(place, "penstock-mine").exists()
    hosts[0].run(["sh", "-c", f"echo hello >{hosts.shared}/note"])
    assert hosts[1].run(["cat", f"{hosts.shared}/note"]).stdout == "hello\n"
    sleeper = hosts[0].popen(["sleep", "77"], env={"COLOUR": "blue"})
    until(lambda: any(process.argv == ["sleep", "77"] for process in hosts[0].processes()), "the process is on node1")
    there = next(process for process in hosts[0].processes() if process.argv == ["sleep", "77"])
    assert there.env["COLOUR"] == "blue" and there.pid != there.outer_pid
    assert not [process for process in hosts[1].processes() if process.argv == ["sleep", "77"]]
    sleeper.terminate()
    assert end(sleeper) == -signal.SIGTERM
    hosts.reset()
    assert not hosts[0].run(["ls", "/tmp/penstock-mine", "/root/penstock-mine"], check=False).stdout


@pytest.mark.nightly
def test_power_loss_tells_no_peer_and_the_disks_survive(hosts: Hosts) -> None:
    code = "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept(); c.send(b'x'); c.recv(1)"
    hosts[1].popen([sys.executable, "-c", code])
    until(lambda: hosts[1].listens(7000), "node2 listens")
    hosts[1].run(["touch", "/tmp/kept", "/dev/shm/lost"])
    with socket.create_connection((hosts[1].address, 7000), timeout=5) as connection:
        assert connection.recv(1) == b"x"
        hosts[1].kill()
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):  # neither an end nor a reset
            connection.recv(1)
    assert hosts.ssh("node2", "-o", "ConnectTimeout=1", "true", check=False).returncode == 255
    hosts[1].start()
    assert hosts.ssh("node2", "ls", "/tmp/kept", "/dev/shm").stdout == "/tmp/kept\n\n/dev/shm:\n"


@pytest.mark.nightly
def test_a_laptop_reaches_the_nodes_only_through_login(hosts: Hosts) -> None:
    hosts.cut_direct()
    by_jump = ["ssh", "-F", str(hosts.jump_config), "node1", "hostname"]
    with pytest.raises(OSError, match=r"unreachable|No route"):
        socket.create_connection((hosts["node1"].address, 22), timeout=2)
    assert subprocess.run(by_jump, capture_output=True, text=True).stdout == "node1\n"
    hosts.login.cut()
    assert hosts.ssh("login", "-o", "ConnectTimeout=1", "true", check=False).returncode == 255
    assert hosts.login.run(["ssh", "node2", "hostname"]).stdout == "node2\n"


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
            assert others.ssh("node1", "hostname").stdout == "node1\n"
        assert not traces(others.base, others.slot)
    until(lambda: not traces(base, slot), "nothing is left")
