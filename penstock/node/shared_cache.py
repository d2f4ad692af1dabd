"""What an engine compiled goes from node to node: a node whose cache has nothing of a plan takes it from one that has.

A node whose engine is ready gives its folder (`engine_cache`) to the nodes of the same run, by the same server as the
files of models. On the gateway's board, where only nodes of the run post, are its addresses and the SHA-256 of its
listing; the listing has those of all files. The board's name has what must be the same on both: plan, engine, GPU,
driver, CPU, Python, rank. What comes is code that is executed: files that differ from these hashes are not kept.

It never fails a start, and holds one for some seconds at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import importlib.metadata
import os
import platform
import random
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from penstock import paths
from penstock.errors import PenstockError
from penstock.models import manifest, sources
from penstock.models.fetch_files import Layout
from penstock.models.sources import Listing, RemoteFile, Source
from penstock.node import peers
from penstock.node.announcer import AdminClient
from penstock.node.file_server import FileServer
from penstock.node.group.rendezvous import BoardClient
from penstock.planner import Plan
from penstock.run_folder import Launch
from penstock.text import GIB, show_bytes, show_seconds

MOST_S = 8.0  # that a start waits, once it has all else
_LOOK_S = 3.0  # for the gateway
_MOST_BYTES, _MOST_FILES = GIB, 50_000  # 43 MB of an 8B model on an H100
_PIECE_BYTES = 1 << 20
_POLL_S = 0.1
_INCOMING = ".incoming"
_READY = ".ready-"  # begins the names of files for the plans that started from a folder
_PACKAGES = ("torch", "triton")


class Holder(msgspec.Struct, frozen=True):
    """A node that gives its cache: its name, its addresses ("host:port") and the SHA-256 of its listing."""

    host: str
    addresses: tuple[str, ...]
    digest: str


class _TooLateError(Exception):
    """The engine has started, or the node is stopped."""


class SharedCache:
    """This node's folder of compiled code. `begin`, `wait` before the engine's first start, `give` when it is ready."""

    def __init__(self, launch: Launch, rank: int, admin: AdminClient, is_stopped: Callable[[], bool]) -> None:
        self._launch, self._rank, self._admin, self._is_stopped = launch, rank, admin, is_stopped
        self._gate, self._is_over = threading.Lock(), False
        self._thread: threading.Thread | None = None
        self._board: BoardClient | None = None
        self.text = ""  # what came, or why nothing did; for people

    def begin(self, folder: str | None) -> None:
        """Look for the cache of another node, unless this folder has it. Does not block. None: there is no cache."""
        if folder is None or self._board is not None or not self._launch.is_spread:
            return
        self._folder, self._key = Path(folder), key(self._launch.plan, self._rank, folder)
        self._board = BoardClient(self._admin, f"compiled {self._key}", secrets.randbelow(2**31), lambda: None)
        if not (self._folder / f"{_READY}{self._key}").exists():
            self._thread = threading.Thread(target=self._bring, name="shared-cache", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until it is here, at most `MOST_S`; from then on nothing of another node comes into the folder."""
        if self._thread is None:
            return
        deadline = time.monotonic() + MOST_S
        while self._thread.is_alive() and time.monotonic() < deadline and not self._is_stopped():
            self._thread.join(_POLL_S)
        with self._gate:
            self._is_over = True
        if self._thread.is_alive() and not self.text:
            self.text = f"compiled code of another node was not used: it took longer than {show_seconds(MOST_S)}"
        if self.text:
            print(f"penstock: {self.text}", flush=True)

    def give(self) -> None:
        """The engine is ready: give the folder to the other nodes. Does not block; once."""
        board, self._board = self._board, None
        if board is not None:
            threading.Thread(target=self._give, args=(board,), name="shared-cache", daemon=True).start()

    def _give(self, board: BoardClient) -> None:
        try:
            listing = list_folder(self._folder, self._key)
            (self._folder / f"{_READY}{self._key}").touch(mode=0o600)
        except (OSError, PenstockError) as exc:
            print(f"penstock: the compiled code is not given to other nodes: {exc}", flush=True)
            return
        if not listing.files:
            return
        server = FileServer(self._admin.engine_key)
        server.give(listing, Layout(self._folder))
        server.start()
        addresses = peers.addresses_of(server, self._admin)
        board.start()
        _post(board, Holder(socket.gethostname(), addresses, _digest(msgspec.json.encode(listing))))

    def _bring(self) -> None:
        holders = self._holders()
        for holder in random.sample(holders, len(holders)):
            try:
                self.text = self._bring_from(holder)
                return
            except _TooLateError:
                return
            except (OSError, ValueError, http.client.HTTPException, msgspec.MsgspecError, PenstockError) as exc:
                self.text = f"compiled code of {holder.host} was not used: {exc}"

    def _holders(self) -> list[Holder]:
        assert self._board is not None
        self._board.start()
        _post(self._board, None)
        self._board.wait_posted(_LOOK_S)
        holders = []
        for row in self._board.posts().values():
            with contextlib.suppress(msgspec.ValidationError):
                holders.append(msgspec.convert(row.post.content.get("holder"), Holder))
        return holders

    def _bring_from(self, holder: Holder) -> str:
        """Add what this folder lacks, all or nothing; what came, for people.  Raises what a network and a disk do."""
        began, incoming = time.monotonic(), self._folder / _INCOMING
        with self._locked(), contextlib.closing(peers.connect(holder.addresses)) as connection:
            listed = self._listing(connection, holder).files
            missing = {name: file for name, file in listed.items() if not os.path.lexists(self._folder / name)}
            n_bytes = sum(file.size for file in missing.values())
            if not missing:
                return ""
            if n_bytes > paths.free_bytes(self._folder) // 2:
                raise PenstockError(f"{show_bytes(n_bytes)}, and the disk has too little space")
            shutil.rmtree(incoming, ignore_errors=True)  # of a node that was killed
            try:
                for name, file in missing.items():
                    self._receive(connection, name, file, incoming)
                with self._gate:
                    self._check_time()
                    _merge(incoming, self._folder)
            finally:
                shutil.rmtree(incoming, ignore_errors=True)
        seconds = show_seconds(time.monotonic() - began)
        files = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
        return f"compiled code from {holder.host}: {files}, {show_bytes(n_bytes)} in {seconds}"

    def _listing(self, connection: http.client.HTTPConnection, holder: Holder) -> Listing:
        with self._ask(connection, "/listing") as answer:
            body = answer.read(_MOST_FILES * 1000)
        if _digest(body) != holder.digest:
            raise PenstockError("its list of files is not the one that it posted")
        listing = msgspec.json.decode(body, type=Listing)
        if listing.commit != self._key or len(listing.files) > _MOST_FILES or listing.n_bytes > _MOST_BYTES:
            raise PenstockError("its list of files is of another start, or too long")
        sources.check_names(holder.host, listing.files)
        return listing

    def _receive(self, connection: http.client.HTTPConnection, name: str, file: RemoteFile, folder: Path) -> None:
        """Write one file below a folder, for this user alone, and compare its hash."""
        path, digest, n_bytes = folder / name, hashlib.sha256(), 0
        for place in (*reversed(path.relative_to(folder).parents), None):
            (folder / place if place is not None else folder).mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            if file.size:
                with self._ask(connection, f"/files/{peers.quoted(name)}") as answer:
                    while n_bytes < file.size and (piece := answer.read(min(_PIECE_BYTES, file.size - n_bytes))):
                        self._check_time()
                        digest.update(piece)
                        n_bytes += stream.write(piece)
        if n_bytes != file.size:
            raise PenstockError("it broke off")
        if digest.hexdigest() != file.sha256:
            raise PenstockError(f'"{name}" has not the hash that was posted')

    @contextlib.contextmanager
    def _ask(self, connection: http.client.HTTPConnection, path: str) -> Iterator[http.client.HTTPResponse]:
        self._check_time()
        connection.request("GET", path, headers={"Authorization": f"Bearer {self._admin.engine_key}"})
        with connection.getresponse() as answer:
            if answer.status not in (200, 206):
                raise PenstockError(f"it answers {answer.status}")
            yield answer

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder against other nodes of this machine that bring something into it."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            while True:
                self._check_time()
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _check_time(self) -> None:
        if self._is_over or self._is_stopped():
            raise _TooLateError


def key(plan: Plan, rank: int, folder: str) -> str:
    """Names all that compiled code depends on. `folder`: its last two parts tell the engine, the GPU and the driver."""
    versions = []
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    machine = (platform.machine(), _cpu_flags(), platform.libc_ver(), sys.implementation.cache_tag)
    facts = (plan, rank, Path(folder).parts[-2:], versions, machine)
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]


def list_folder(folder: Path, commit: str) -> Listing:
    """The files of a cache with their hashes, no links.  Raises PenstockError for more than a node takes."""
    listed, n_bytes = dict[str, RemoteFile](), 0
    for place, _, names in os.walk(folder):
        if _INCOMING in Path(place).relative_to(folder).parts:
            continue
        for name in names:
            path = Path(place, name)
            if name.startswith(_READY) or path.is_symlink() or not path.is_file():
                continue
            size = path.stat().st_size
            n_bytes += size
            if n_bytes > _MOST_BYTES or len(listed) == _MOST_FILES:
                raise PenstockError(f"{folder} has more than {show_bytes(_MOST_BYTES)} or {_MOST_FILES:,} files")
            listed[str(path.relative_to(folder))] = RemoteFile(size, manifest.sha256_of(path))
    return Listing(Source("folder", folder.name), commit, dict(sorted(listed.items())))


def _merge(incoming: Path, folder: Path) -> None:
    """Move what a folder lacks into it, by one rename for each part that is absent as a whole. No link is followed."""
    for entry in sorted(incoming.iterdir()):
        target = folder / entry.name
        if not os.path.lexists(target):
            entry.rename(target)
        elif entry.is_dir() and target.is_dir() and not target.is_symlink():
            _merge(entry, target)


def _post(board: BoardClient, holder: Holder | None) -> None:
    board.post("", phase="whole", holder=holder)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _cpu_flags() -> str:
    """Code for the host's side may use any instruction of the CPU that compiled it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
