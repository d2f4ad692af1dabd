"""The hosts that other tests run on (hosts.py) are what they claim to be, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Hosts
from hosts_fixtures import require_hosts
from hosts_janitor import started_at
from hosts_slots import SLOTS

pytestmark = pytest.mark.hosts

HERE = Path(__file__).parent
# Makes hosts, says where they are, and waits to be killed.
SESSION = """
import sys, time
sys.path.insert(0, {here!r})
from hosts import Hosts
hosts = Hosts(2, login=True)
hosts[0].popen(["sleep", "1000"])
hosts["node2"].kill()
hosts["node2"].start()
print(hosts.base, hosts.slot, *(host.pid for host in [hosts.login, *hosts]), hosts._janitor.pid, flush=True)
time.sleep(1000)
"""


def until(is_so: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"expected within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


def traces(base: Path | str, slot: int | str) -> list[str]:
    """What a set of hosts has left on this machine."""
    words = [["ip", "-o", "link", "show", "type", "veth"], ["ip", "-4", "route"], ["cat", "/proc/mounts"]]
    seen = "".join(subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in words)
    found = [line for line in seen.splitlines() if str(base) in line]
    # Another session may have taken the slot meanwhile: then its interface and routes are not ours.
    if SLOTS.joinpath(str(slot)).read_text("utf-8") in ("", str(base)):
        found += [line for line in seen.splitlines() if re.search(rf" ph{slot}@|10\.7[78]\.{slot}\.", line)]
    return [*found, *([str(base)] if Path(base).exists() else []), *names_itself_in_argv(str(base))]


def names_itself_in_argv(text: str) -> list[str]:
    """Command lines of living processes that contain the text."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_each_host_has_its_own_name_address_and_process_table(hosts: Hosts) -> None:
    assert hosts.names == ["node1", "node2"]
    for host in hosts:
        assert host.run(["hostname"]).stdout.strip() == host.name
        assert host.address in host.run(["ip", "-4", "addr", "show", "eth0"]).stdout
        assert host.run(["getent", "hosts", "node1"]).stdout.split()[0] == hosts[0].address
    sleeper = hosts[0].popen(["sleep", "77"], env={"COLOUR": "blue"})
    until(lambda: any(p.argv == ["sleep", "77"] for p in hosts[0].processes()), "the process is on node1")
    found = next(p for p in hosts[0].processes() if p.argv == ["sleep", "77"])
    assert found.env["COLOUR"] == "blue" and found.pid != found.outer_pid
    assert not [p for p in hosts[1].processes() if p.argv == ["sleep", "77"]]
    assert 1 in [p.pid for p in hosts[1].processes()]
    sleeper.terminate()
    assert sleeper.wait(5) == -signal.SIGTERM


def test_tmp_shm_home_are_private_and_the_cluster_file_system_is_shared(hosts: Hosts) -> None:
    for place in ("/tmp", "/var/tmp", "/dev/shm", "/root", "/run"):
        hosts[0].run(["touch", f"{place}/penstock-mine"])
        assert hosts[1].run(["ls", f"{place}/penstock-mine"], check=False).returncode != 0
        assert not Path(place, "penstock-mine").exists()
    hosts[0].run(["sh", "-c", f"echo hello >{hosts.shared}/note"])
    assert hosts[1].run(["cat", f"{hosts.shared}/note"]).stdout == "hello\n"
    assert hosts[1].run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]


def test_power_loss_tells_no_peer_and_the_disks_survive(hosts: Hosts) -> None:
    code = "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept(); c.send(b'x'); c.recv(1)"
    hosts[1].popen([sys.executable, "-c", code])
    until(lambda: hosts[1].listens(7000), "node2 listens")
    hosts[1].run(["touch", "/tmp/kept", "/dev/shm/lost"])
    with socket.create_connection((hosts[1].address, 7000), timeout=5) as connection:
        assert connection.recv(1) == b"x"
        gone = hosts[1].pid
        hosts[1].kill()
        assert not hosts[1].is_on and not Path(f"/proc/{gone}").exists()
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):  # neither an end nor a reset
            connection.recv(1)
    assert hosts.ssh("node2", "-o", "ConnectTimeout=1", "true", check=False).returncode == 255
    hosts[1].start()
    assert hosts.ssh("node2", "ls", "/tmp/kept").stdout == "/tmp/kept\n"
    assert hosts.ssh("node2", "ls", "/dev/shm").stdout == ""


def test_a_laptop_reaches_the_nodes_only_through_login(login_hosts: Hosts) -> None:
    node = login_hosts["node1"]
    with pytest.raises(OSError, match=r"unreachable|No route"):
        socket.create_connection((node.address, 22), timeout=2)
    assert login_hosts.ssh("login", "hostname").stdout == "login\n"
    assert login_hosts.ssh("node1", "hostname").stdout == "node1\n"  # by ProxyJump
    assert node.run(["ssh", "login", "hostname"]).stdout == "login\n"
    login_hosts.login.cut()
    assert login_hosts.ssh("login", "-o", "ConnectTimeout=1", "true", check=False).returncode == 255
    assert login_hosts.login.run(["ssh", "node2", "hostname"]).stdout == "node2\n"
    login_hosts.login.mend()
    login_hosts.login.kill()
    login_hosts.login.start()
    assert login_hosts.ssh("node2", "hostname").stdout == "node2\n"


def test_every_test_gets_hosts_as_new(hosts: Hosts) -> None:
    hosts[0].popen(["sleep", "99"])
    hosts[0].run(["touch", "/tmp/a", "/root/b", "/dev/shm/c", f"{hosts.shared}/d"])
    hosts[1].kill()
    hosts.reset()
    assert hosts[1].is_on
    places = ["/tmp/a", "/root/b", "/dev/shm/c", f"{hosts.shared}/d"]
    assert not hosts[0].run(["ls", *places], check=False).stdout
    assert not [p for p in hosts[0].processes() if p.argv[0] == "sleep"]


def test_sets_of_hosts_live_beside_each_other_and_leave_nothing(hosts: Hosts) -> None:
    with Hosts(1) as first, Hosts(1, login=True) as second:
        assert len({hosts.slot, first.slot, second.slot}) == 3
        assert first.ssh("node1", "hostname").stdout == second.ssh("node1", "hostname").stdout == "node1\n"
        made = [first, second]
        assert all(len(traces(one.base, one.slot)) > 3 for one in made)  # so an empty list means something
    assert [trace for one in made for trace in traces(one.base, one.slot)] == []
    first.close()  # again, harmless


@pytest.mark.parametrize("with_janitor", [False, True], ids=["session", "session-and-janitor"])
def test_a_killed_session_leaves_nothing(with_janitor: bool) -> None:
    require_hosts()
    code = SESSION.format(here=str(HERE))
    session = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    base, slot, *pids, janitor = session.stdout.readline().split()
    assert traces(base, slot)
    if with_janitor:
        os.kill(int(janitor), signal.SIGKILL)
    session.kill()
    session.wait()
    # The hosts die with the session, whoever else does.
    until(lambda: not any(started_at(int(pid)) for pid in pids), "the hosts are gone")
    if with_janitor:
        with Hosts(1):  # clears away what it finds
            pass
    until(lambda: not traces(base, slot), "nothing is left")


def test_a_host_that_cannot_boot_says_why() -> None:
    require_hosts()
    with pytest.raises(AssertionError, match=r"did not manage to boot.*no-such-folder") as caught:
        Hosts(1, keep=[Path("/tmp/no-such-folder")])
    base = re.search(r"/tmp/penstock-hosts-\w+", str(caught.value))
    assert base is not None and not Path(base[0]).exists() and not names_itself_in_argv(base[0])
