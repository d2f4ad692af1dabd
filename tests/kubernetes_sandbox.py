"""A pod of the test cluster as processes: one set of namespaces for the pod, and one more for each container.

The network, host name, IPC and mounts of memory volumes belong to the pod's first process, which only sleeps. Each
container has a process table and a root of its own: an overlay over the root of this machine, so a pod may write
anywhere and mount anything, and nothing of it stays. The command is pid 1 there, as in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = "/opt/packages"  # in containers, since a volume at /tmp may hide where they are here
IMAGE = "/opt/image"  # in containers: the Python that images bring
HOME = "/home/container"
SPACES = ["--net", "--uts", "--ipc", "--mount"]
LOG_CHUNK = 65536
INIT = Path(__file__).with_name("kubernetes_init.py")

PAUSE = """\
set -e
hostname {name}
ip link set lo up
{memory}
echo ready
exec sleep infinity
"""
# `pivot_root . .`: https://man7.org/linux/man-pages/man2/pivot_root.2.html
CONTAINER = Path(__file__).with_name("machines").joinpath("container.sh").read_text()


@dataclass(frozen=True)
class Mount:
    """A folder or file of this machine at a path in a container."""

    source: Path
    target: str
    is_read_only: bool = False


@dataclass
class ContainerProcess:
    """A container's process; `pid` is its pid 1 as this machine numbers it, None before it has one."""

    process: asyncio.subprocess.Process
    log: Path
    copying: asyncio.Task[None]  # of its output to the log; done when all is there
    started_at: str = field(default_factory=lambda: now())
    killed_for_memory: bool = False

    @property
    def pid(self) -> int | None:
        try:
            words = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text("utf-8").split()
        except OSError:
            return None
        return int(words[0]) if words else None

    def send(self, number: signal.Signals) -> None:
        target = self.pid or (self.process.pid if number == signal.SIGKILL else None)
        if target is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)

    async def wait(self) -> int:
        """The exit code as a kubelet reports it: 137 after SIGKILL."""
        code = await self.process.wait()
        return code if code >= 0 else 128 - code


class Sandbox:
    """The namespaces of one pod, on a bridge."""

    def __init__(self, base: Path, folder: Path, name: str, note: Callable[[int], None]) -> None:
        self.base, self.folder, self.name, self._note = base, folder, name, note
        self.leg = ""
        self._pause: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._pause is not None
        return self._pause.pid

    async def start(self, bridge: str, address: str, memory: Mapping[Path, int | None]) -> None:
        """`memory`: folders that become memory volumes, with their limits in bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {path: "" if size is None else f",size={size}" for path, size in memory.items()}
        lines = [f"mount -t tmpfs -o mode=1777{more} tmpfs {shlex.quote(str(at))}" for at, more in options.items()]
        script = PAUSE.format(name=self.name, memory="\n".join(lines))
        unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "bash", "-c", script]
        self._pause = await _spawn(unshare)
        self._note(self.pid)
        assert self._pause.stdout is not None
        said = await self._pause.stdout.readline()
        assert said == b"ready\n", f"no sandbox: {said + await self._pause.stdout.read()!r}"
        # The gateway's address is this machine's, where the cluster IPs are.
        network, _, number = address.rpartition(".")
        self.leg = f"{bridge}-{number}"
        mac = f"02:70:6b:{int(network.split('.')[2]):02x}:00:{int(number):02x}"
        outside = [f"link add {self.leg} type veth peer name eth0 address {mac} netns {self.pid}"]
        inside = [f"addr add {address}/24 dev eth0", "link set eth0 up", f"route add default via {network}.1"]
        await ip([*outside, f"link set {self.leg} master {bridge} up"])
        await ip(inside, enter=self.pid)

    async def unplug(self) -> None:
        """Its network cable."""
        await ip([f"link set {self.leg} down"], check=False)

    async def stop(self) -> None:
        """The cable goes now: the kernel takes its time with namespaces."""
        if self._pause is None:
            return
        if self.leg:
            await ip([f"link del {self.leg}"], check=False)
        with contextlib.suppress(ProcessLookupError):
            self._pause.kill()
        await self._pause.wait()
        self._pause = None

    async def run(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        mounts: Sequence[Mount],
        log: Path,
        *,
        is_root_read_only: bool = False,
    ) -> ContainerProcess:
        """Start a container; its output goes to `log`, each line after its time."""
        script = CONTAINER.format(
            root=f"{self.folder}/root",
            image=IMAGE,
            packages=PACKAGES,
            site=_site(),
            home=HOME,
            kept="\n".join(f"mkdir -p .{path} && mount --rbind {path} .{path}" for path in other_disks()),
            folder=self.folder,
            base=self.base,
            mounts="\n".join(map(_mount_line, sorted(mounts, key=lambda mount: mount.target.count("/")))),
            read_only="mount -o remount,bind,ro ." if is_root_read_only else "",
            env=shlex.join(f"{name}={value}" for name, value in env.items()),
            command=shlex.join(words),
        )
        file = log.with_suffix(".sh")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script, "utf-8")
        argv = ["nsenter", "-t", str(self.pid), *SPACES, "--", "unshare", "--mount", sys.executable, "-IS", str(INIT)]
        process = await _spawn([*argv, "bash", str(file)])
        self._note(process.pid)
        assert process.stdout is not None
        log.touch()
        return ContainerProcess(process, log, asyncio.create_task(_copy(process.stdout, log)))


async def _spawn(argv: Sequence[str]) -> asyncio.subprocess.Process:
    """A process in a session of its own, whose output and errors are one pipe."""
    null, pipe, output = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    env = {"PATH": PATH}
    return await asyncio.create_subprocess_exec(
        *argv, stdin=null, stdout=pipe, stderr=output, env=env, start_new_session=True
    )


async def execute(container: ContainerProcess, words: Sequence[str], timeout_s: float) -> bool:
    """Whether a command in a container exits 0 in time, as an exec probe asks."""
    if (pid := container.pid) is None:
        return False
    argv = enter(pid, words)
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*argv, stdin=null, stdout=null, stderr=null, env=environment(pid))
    try:
        return await asyncio.wait_for(process.wait(), timeout_s) == 0
    except TimeoutError:
        process.kill()
        return False


def enter(pid: int, words: Sequence[str]) -> list[str]:
    return ["nsenter", "-t", str(pid), *SPACES, "--pid", "--", *words]


def environment(pid: int) -> dict[str, str]:
    """The environment a process was started with."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {"PATH": PATH}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_image(folder: Path) -> None:
    """What every image holds: python3 with the packages of the Python that runs the tests, but not penstock."""
    site = _site()
    own = folder / site.relative_to(sys.prefix)
    own.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "bin" / "python3").symlink_to("python")
    (folder / "pyvenv.cfg").write_bytes((Path(sys.prefix) / "pyvenv.cfg").read_bytes())
    for entry in site.iterdir():
        if not re.match(r"_editable|penstock|.*\.pth$", entry.name):
            (own / entry.name).symlink_to(f"{PACKAGES}/{entry.name}")


def _site() -> Path:
    return next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))


def other_disks() -> list[Path]:
    """Folders that the tests' Python needs and that an overlay over the root does not show."""
    needed = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent}
    root = Path("/").stat().st_dev
    return sorted(path for path in needed if path.stat().st_dev != root)


async def ip(lines: Sequence[str], *, enter: int | None = None, check: bool = True) -> None:
    argv = ["nsenter", "-t", str(enter), "--net"] if enter is not None else []
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, "ip", "-batch", "-", stdin=pipe, stdout=pipe, stderr=pipe, env={"PATH": PATH}
    )
    _, errors = await process.communicate(("\n".join(lines) + "\n").encode())
    assert process.returncode == 0 or not check, f"ip {lines}: {errors.decode()}"


def _mount_line(mount: Mount) -> str:
    # Resolved here: a link of the root, such as /var/run, would lead out of the container's root.
    at, source = shlex.quote(f".{Path(mount.target).resolve()}"), shlex.quote(str(mount.source))
    file = f"mkdir -p $(dirname {at}) && [ -e {at} ] || : >{at}"
    make = file if mount.source.is_file() else f"mkdir -p {at}"
    line = f"{make}\nmount --rbind {source} {at}"
    return f"{line}\nmount -o remount,bind,ro {at}" if mount.is_read_only else line


async def _copy(stream: asyncio.StreamReader, log: Path) -> None:
    """Lines of a container to its log, each after its time as the kubelet writes it."""
    rest = b""
    with log.open("ab", buffering=0) as file:
        while chunk := await stream.read(LOG_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            stamp = _stamp()
            file.write(b"".join(stamp + line + b"\n" for line in lines))
        if rest:
            file.write(_stamp() + rest + b"\n")


def _stamp() -> bytes:
    nanoseconds = time.time_ns()
    whole = datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{nanoseconds % 10**9:09d}Z ".encode()
