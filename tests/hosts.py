"""Machines to test on: each "host" is a set of namespaces on this machine, with a real sshd, on a network of its own.

    with Hosts(2) as hosts:
        hosts["node1"].run(["hostname"]).stdout          # as root on node1
        hosts["node2"].kill()                            # power loss: peers hear nothing more
        hosts["node2"].start()

Every host has its own address, name, process table, /tmp, /var/tmp, /run, /dev/shm and home of root. At the same path
everywhere are the repository, the Python that runs the tests, and `hosts.shared`, the cluster's file system.

    without login:  this process (10.77.S.1) -- bridge -- node1 (10.77.S.11), node2 (10.77.S.12) ...
    with login:     this process (10.78.S.1) -- login (10.78.S.2, 10.77.S.1) -- bridge -- node1, node2 ...
                    and this process, a laptop, cannot reach the nodes except through login.

S is a slot that one set of hosts holds by a file lock, so that several test sessions can run at the same time.

Pid 1 of a host is a shell that reads a pipe, the lifeline, whose other end only this process holds. When this process
ends, killed or not, every pid 1 reads the end of the pipe and ends, and the kernel ends its processes and its network.
hosts_janitor.py, which reads the same pipe, removes the rest.

OpenSSH finds ~/.ssh/config by the password file, not by $HOME: from this process use `ssh -F hosts.ssh_config`. On a
host plain `ssh node2` works.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hosts_janitor import bury, note, note_pid
from hosts_slots import SLOTS, take_slot
from waiting import end, left_s, until

ROOT = Path(__file__).resolve().parent.parent
MACHINES = Path(__file__).parent / "machines"  # what runs in them, as they read it
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen", "bash")
UNSHARE = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
ENTER = ["--net", "--mount", "--uts", "--ipc", "--pid"]

# Pid 1 of a host. A shell, because it must reap orphans: with a daemon as pid 1, `ray stop` waited 16 s for zombies.
INIT = (MACHINES / "host_init.sh").read_text()

SSHD_CONFIG = (MACHINES / "sshd_config").read_text()

SSH_CONFIG = (MACHINES / "ssh_config").read_text()


@functools.cache
def missing() -> str | None:
    """Why no hosts can be made on this machine; None where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are made of namespaces: they need Linux and root"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    if absent:
        return f"not installed: {', '.join(absent)} (`make hosts` installs openssh-server and iproute2)"
    probe = "ip link add ve0 type veth peer name ve1 && ip link add br0 type bridge && mount -t tmpfs t /dev/shm"
    tried = subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, text=True)
    return f"no namespaces, veth or mounts here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class HostProcess:
    """A process on a host, as seen at one moment."""

    pid: int  # on the host
    outer_pid: int  # on the machine that runs the tests
    argv: list[str]
    env: dict[str, str]


class Inside(subprocess.Popen[str]):
    """A process on a host: signals reach it, not the nsenter in front of it, which then ends in the same way."""

    def send_signal(self, sig: int) -> None:
        until(lambda: _children(self.pid) or self.poll() is not None, "the process is on its host")
        for pid in _children(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


class Host:
    """One machine. Made by Hosts."""

    def __init__(self, hosts: Hosts, name: str, address: str) -> None:
        self.hosts, self.name, self.address = hosts, name, address
        self.env = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "LANG": "C.UTF-8"}
        self.services: list[list[str]] = []
        self._unshare: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Its pid 1, as the machine outside numbers it."""
        assert self._pid is not None, f"{self.name} is off"
        return self._pid

    @property
    def is_on(self) -> bool:
        return self._unshare is not None and self._unshare.poll() is None

    @property
    def home(self) -> Path:
        """Root's home on this host, as seen from outside."""
        return self.hosts.base / "hosts" / self.name / "root"

    def log(self, what: str) -> Path:
        """The log of its "sshd", its "init" or its "services"."""
        return self.hosts.base / "log" / f"{self.name}.{what}"

    def argv(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.pid), *ENTER, "--", *words]

    def popen(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = "/root", **options: Any
    ) -> Inside:
        """Start a program on this host as root. Its environment is the host's (`self.env`) and `env`, not ours."""
        options.setdefault("start_new_session", True)
        argv = self.argv(["env", f"--chdir={cwd}", *words])
        return Inside(argv, env={**self.env, **(env or {})}, text=True, **options)

    def run(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float | None = None,
        stdin: str = "",
        cwd: str = "/root",
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host to its end. With `check`, AssertionError with its output unless it exits 0."""
        pipe = subprocess.PIPE
        process = self.popen(words, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe)
        with process:
            try:
                out, err = process.communicate(stdin, timeout=left_s() if timeout_s is None else timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{list(words)} on {self.name} did not end in time: {out}{err}") from None
        if check and process.returncode:
            raise AssertionError(f"{list(words)} on {self.name} exited {process.returncode}: {out}{err}")
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)

    def service(self, words: Sequence[str]) -> None:
        """Start a daemon that stays in the foreground, now and at every later start of the host."""
        self.services.append(list(words))
        self._serve(words)

    def _serve(self, words: Sequence[str]) -> None:
        with self.log("services").open("a") as log:
            self.popen(["setsid", "--fork", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log).wait(left_s())

    def processes(self) -> list[HostProcess]:
        """All that run on this host, pid 1 included."""
        space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [process for entry in entries if (process := _process(entry, space)) is not None]

    def cut(self) -> None:
        """Pull the network cable. Of login: the one to this process."""
        self.hosts._cable(self, "down")

    def mend(self) -> None:
        self.hosts._cable(self, "up")

    def kill(self) -> None:
        """Power loss: the network falls silent first, so no peer is told; then every process is killed. Idempotent."""
        if not self.is_on:
            return
        self.hosts._unplug(self)
        os.kill(self.pid, signal.SIGKILL)
        assert self._unshare is not None
        end(self._unshare)
        self._unshare = self._pid = None

    def start(self) -> None:
        """Power on, and wait until sshd listens; services start again. What was on its disks is still there."""
        if not self.is_on:
            self._boot()
            self._await()

    def _boot(self) -> None:
        base = self.hosts.base
        (base / "run" / f"{self.name}.ready").unlink(missing_ok=True)
        lifeline = self.hosts._lifeline
        script = ["bash", str(base / "init.sh"), str(base), self.name, str(lifeline), *map(str, self.hosts.kept)]
        with self.log("init").open("a") as log:
            self._unshare = subprocess.Popen(
                [*UNSHARE, *script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lifeline],
                start_new_session=True,
                env=self.env,
            )
        note_pid(self.hosts.base, self._unshare.pid)

    def _await(self) -> None:
        assert self._unshare is not None
        ready, unshare = self.hosts.base / "run" / f"{self.name}.ready", self._unshare.pid
        self._wait(ready.exists, "to boot")
        self._pid = _children(unshare)[0]
        note_pid(self.hosts.base, self._pid)
        self.hosts._plug(self)
        if (self.hosts.base / "keys" / self.name).exists():
            self._wait(lambda: self.listens(22), "to start sshd")
        for words in self.services:
            self._serve(words)

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        until(lambda: is_so() or not self.is_on, f"{self.name} {what}")
        assert self.is_on, f"{self.name} did not manage {what}: {self.log('init').read_text('utf-8')}"

    def listens(self, port: int) -> bool:
        """Whether a process on this host accepts TCP on the port."""
        tables = [Path(f"/proc/{self.pid}/net/{name}") for name in ("tcp", "tcp6")]
        rows = [row.split() for table in tables if table.exists() for row in table.read_text("utf-8").splitlines()[1:]]
        return any(row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)


class Hosts:
    """`count` hosts named node1, node2 ..., with `login` one more. Started by the constructor, ended by close()."""

    def __init__(self, count: int, *, login: bool = False, shared_home: bool = False) -> None:
        """`shared_home`: root has one home on all hosts, as users of clusters do."""
        reason = missing()
        assert reason is None, reason
        self.slot, self._lock = take_slot()
        self.base = Path(tempfile.mkdtemp(prefix="penstock-hosts-", dir="/tmp"))
        self.base.chmod(0o755)
        self.shared = self.base / "shared"
        self.ssh_config = self.base / "keys" / "ssh_config"
        python = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent]
        self.kept = sorted({ROOT, *python, self.base}, key=lambda path: len(path.parts))
        net = f"10.77.{self.slot}"
        self._hosts = {f"node{i}": Host(self, f"node{i}", f"{net}.{10 + i}") for i in range(1, count + 1)}
        self._has_login, self._shared_home = login, shared_home
        self._switch = Host(self, "login" if login else "switch", f"{net}.1")
        # The address of this process: the hosts (with a login: only login) see its connections come from there.
        self.own_address = f"10.78.{self.slot}.1" if login else f"{net}.1"
        self._leg = f"ph{self.slot}"
        self._lifeline, self._life = os.pipe()
        try:
            self._prepare()
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Of the nodes, in order; without login."""
        return list(self._hosts)

    @property
    def login(self) -> Host:
        assert self._has_login, "these hosts have no login"
        return self._switch

    def __getitem__(self, which: int | str) -> Host:
        if which == "login":
            return self.login
        return self._hosts[which if isinstance(which, str) else self.names[which]]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def heal(self) -> None:
        """All on, all connected: what a test may expect to find."""
        self._start()
        for host in [self._switch, *self]:
            host.mend()

    def reset(self) -> None:
        """All nodes as new: powered on, connected, with empty disks and no process but their services; 0.1 s."""
        self._switch.start()
        self._switch.mend()
        for host in self:
            host.kill()
            shutil.rmtree(self.base / "hosts" / host.name)
            self._furnish(host)
        self.clear_disks()
        self._start()

    def clear_disks(self, *stays: str) -> None:
        """Empty the cluster's file system, every /tmp, /var/tmp and home, but for ssh's settings and names in `stays`.

        From outside, where folders that are mounts on the hosts are empty: from inside it would delete what we test.
        """
        mounted = {part for path in self.kept for part in (path.relative_to("/").parts[:3])}
        own = [self.base / "hosts" / host.name for host in [self._switch, *self]]
        places = {(folder / place).resolve() for folder in own for place in ("tmp", "var/tmp", "root")}
        for entry in [*self.shared.iterdir(), *(entry for place in places for entry in place.iterdir())]:
            if entry.parent == self.shared or entry.name not in {".ssh", *mounted, *stays}:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def close(self) -> None:
        """End all hosts and leave nothing behind. Idempotent."""
        if self._life < 0:
            return
        os.close(self._life)
        os.close(self._lifeline)
        self._life = self._lifeline = -1
        with contextlib.suppress(AttributeError):  # the janitor is the last thing to be prepared
            end(self._janitor)
        bury(self.base)
        for host in [self._switch, *self]:
            if host._unshare is not None:
                end(host._unshare)
        os.close(self._lock)

    # --- making them

    def _prepare(self) -> None:
        base = self.base
        for name in ("etc/system", "keys", "log", "run", "shared", "root"):
            (base / name).mkdir(parents=True)
        (base / "init.sh").write_text(INIT)
        (base / "etc" / "sshd_config").write_text(SSHD_CONFIG.format(base=base))
        self._write_system_files()
        self._write_keys()
        for host in [self._switch, *self]:
            self._furnish(host)
        SLOTS.joinpath(str(self.slot)).write_text(str(base))
        janitor = [sys.executable, "-I", str(Path(__file__).with_name("hosts_janitor.py")), str(base)]
        self._janitor = subprocess.Popen(
            [*janitor, str(self._lifeline)],
            pass_fds=[self._lifeline, self._lock],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _furnish(self, host: Host) -> None:
        """The host's disks as they are before its first start."""
        modes = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "root/.ssh": 0o700, "cgroup": 0o755}
        for place, mode in modes.items():
            folder = self.base / "hosts" / host.name / place
            if place == "root" and self._shared_home:
                folder.symlink_to(self.base / "root")
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
        shutil.copy(self.base / "keys" / "ssh_config_of_hosts", host.home / ".ssh" / "config")

    def _write_system_files(self) -> None:
        """Files that every host has in /etc. Writing to them later in place is seen on all hosts."""
        folder = self.base / "etc" / "system"
        named = [f"{host.address} {host.name}" for host in [self._switch, *self]]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *named, ""]))
        # Files only: a lookup that asks DNS waits in a network which has none.
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        # Without PAM sshd refuses a user whose password field begins with "!".
        shadow = Path("/etc/shadow").read_text("utf-8").splitlines()
        (folder / "shadow").write_text("\n".join(line.replace(":!", ":*", 1) for line in shadow) + "\n")
        (folder / "shadow").chmod(0o600)

    def _write_keys(self) -> None:
        keys = self.base / "keys"
        sshed = [host for host in [self._switch, *self] if host.name != "switch"]
        makers = [
            subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(keys / name)])
            for name in ["user", *(host.name for host in sshed)]
        ]
        for maker in makers:
            assert end(maker) == 0
        shutil.copy(keys / "user.pub", keys / "authorized_keys")
        outer = {"login": f"10.78.{self.slot}.2"}
        known = ""
        for host in sshed:
            names = ",".join(sorted({host.name, host.address, outer.get(host.name, host.address)}))
            known += f"{names} {(keys / f'{host.name}.pub').read_text('utf-8')}"
        (keys / "known_hosts").write_text(known)
        outside = inside = SSH_CONFIG.format(base=self.base)
        for host in sshed:
            jump = "  ProxyJump login\n" if self._has_login and host.name != "login" else ""
            outside += f"Host {host.name}\n  HostName {outer.get(host.name, host.address)}\n{jump}"
            inside += f"Host {host.name}\n  HostName {host.address}\n"
        self.ssh_config.write_text(outside)
        (keys / "ssh_config_of_hosts").write_text(inside)

    def _start(self) -> None:
        off = [host for host in [self._switch, *self] if not host.is_on]
        for host in off:
            host._boot()
        for host in off:
            host._await()

    # --- the network

    def _plug(self, host: Host) -> None:
        """Connect a host that has just booted; the switch brings its bridge, the leg to us, and all that run."""
        if host is self._switch:
            self._wire_switch()
            for other in self:
                if other._pid is not None and other.is_on:
                    self._plug(other)
            return
        if self._switch._pid is None:
            return
        # The namespace of a killed host goes some time later, and with it what was plugged into it: the port on the
        # bridge of a node, the eth0 of every node when the switch was killed. Ask for both first.
        self._ip(f"link del {host.name}", within=self._switch, check=False)
        self._ip("link del eth0", within=host, check=False)
        # Always the same hardware address: with a new one, whoever knew the old one sent to it for 8 s and longer.
        mac = f"02:70:68:{self.slot:02x}:00:{int(host.address.rpartition('.')[2]):02x}"
        self._ip(
            f"link add {host.name} type veth peer name eth0 address {mac} netns {host.pid}",
            f"link set {host.name} master br0 up",
            within=self._switch,
        )
        self._ip(f"addr add {host.address}/24 dev eth0", "link set eth0 up", within=host)

    def _wire_switch(self) -> None:
        switch, net = self._switch, f"10.77.{self.slot}"
        note(self.base, f"ip link del {self._leg}")
        self._ip(f"link del {self._leg}", check=False)
        mac = f"02:70:68:{self.slot:02x}:01:01"
        self._ip(f"link add {self._leg} type veth peer name leg address {mac} netns {switch.pid}")
        address = f"10.78.{self.slot}.1/30" if self._has_login else f"{self.own_address}/24"
        self._ip(f"addr add {address} dev {self._leg}")
        self._ip(f"link set {self._leg} up")
        bridge = [f"link add br0 address 02:70:68:{self.slot:02x}:01:00 type bridge"]
        bridge += ["link set br0 up", "link set leg up"]
        if not self._has_login:
            self._ip(*bridge, "link set leg master br0", within=switch)
            return
        self._ip(*bridge, f"addr add {net}.1/24 dev br0", f"addr add 10.78.{self.slot}.2/30 dev leg", within=switch)
        # Else packets for the nodes would leave by the default route, towards whoever has these addresses there.
        note(self.base, f"ip route del unreachable {net}.0/24 metric 1000")
        self._ip(f"route replace unreachable {net}.0/24 metric 1000")

    def _cable(self, host: Host, state: str) -> None:
        if host is self._switch:
            self._ip(f"link set {self._leg} {state}")
        else:
            self._ip(f"link set {host.name} {state}", within=self._switch)

    def _unplug(self, host: Host) -> None:
        if host is self._switch:
            self._ip(f"link del {self._leg}", check=False)
        else:
            self._ip(f"link del {host.name}", within=self._switch, check=False)

    def _ip(self, *lines: str, within: Host | None = None, check: bool = True) -> None:
        enter = ["nsenter", "-t", str(within.pid), "--net"] if within is not None else []
        argv = [*enter, "ip", "-batch", "-"]
        done = subprocess.run(argv, input="\n".join(lines) + "\n", capture_output=True, text=True)
        assert done.returncode == 0 or not check, f"ip {lines}: {done.stderr}"


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()]
    except OSError:
        return []


def _process(entry: Path, space: Path) -> HostProcess | None:
    """The process of a folder in /proc, if it belongs to the pid namespace `space` and has not ended meanwhile."""
    try:
        if (entry / "ns" / "pid").readlink() != space:
            return None
        argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        status = (entry / "status").read_text("utf-8").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    if fields["State"].startswith(("Z", "X")):
        return None
    env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return HostProcess(int(fields["NSpid"].split()[-1]), int(entry.name), argv, env)
