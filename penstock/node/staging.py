"""Where this node keeps its copy of the weights, by `cache.stage`, and for how long.

none     hub models in the hub's cache; folders are read where they are
DIR      a copy in DIR, which stays; variables of the node count: $SLURM_TMPDIR/models
auto     a copy on the node's own scratch where the weights lie on a file system of other machines; removed when the
         last node of this user on the machine that uses one ends, also after a kill
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from penstock import paths
from penstock.errors import PenstockError, UserError
from penstock.models import fetch, read_rate, sources
from penstock.models.fetch_files import Progress
from penstock.models.sources import Source, Wanted
from penstock.node.announcer import AdminClient
from penstock.node.peers import Line
from penstock.run_folder import Launch

_USED = ".in-use"

Show = Callable[[Progress], None]


class Stage:
    """Brings a model's files to this node, together with the other nodes of the deployment where there are some."""

    def __init__(self, launch: Launch, admin: AdminClient | None, is_stopped: Callable[[], bool]) -> None:
        self._launch, self._admin, self._is_stopped = launch, admin, is_stopped
        self._scratch: Scratch | None = None

    @property
    def is_passing(self) -> bool:
        """Whether copies go when nobody uses them; a start does without one that cannot be made."""
        return self._launch.cache.stage == "auto"

    def is_for(self, path: str) -> bool:
        """Whether this node is to read a copy of a folder that it sees."""
        setting = self._launch.cache.stage
        return setting != "none" and (setting != "auto" or _is_remote(path))

    def bring(self, source: Source, beside: str, show: Show, commit: str | None = None) -> Path:
        """The folder with the files, whole; `beside`: where they would be without a copy; `commit`: no other version.
        Blocks.  Raises PenstockError."""
        has_peers = self._launch.is_spread and self._admin is not None
        line = Line(self._admin, str(source), self._is_stopped) if has_peers and self._admin else None

        def on_progress(progress: Progress) -> None:
            if self._is_stopped():
                raise PenstockError("the node is stopped")
            if line is not None:
                line.count()
            show(progress)

        wanted = Wanted(self._launch.cache.allow_pickle, sources.runs_code(self._launch.plan.args), commit)
        return fetch.fetch(
            source, cache=self._folder(beside), wanted=wanted, show=on_progress, peers=line,
            say=lambda text: print(f"penstock: {text}", flush=True),
        )  # fmt: skip

    def close(self) -> None:
        """Remove the copies on scratch, unless another node uses one."""
        if self._scratch is not None:
            self._scratch.leave()

    def _folder(self, beside: str) -> Path | None:
        if not self.is_for(beside):  # the file's own cache, where this node has it
            cache = Path(self._launch.cache.folder or "").expanduser()
            return cache if self._launch.cache.folder and os.access(cache, os.W_OK) else None
        if self._launch.cache.stage == "auto":
            self._scratch = self._scratch or Scratch.find()
            return self._scratch.folder if self._scratch is not None else None
        folder = Path(os.path.expandvars(self._launch.cache.stage)).expanduser()
        if "$" in str(folder) or not folder.is_absolute():
            raise UserError(
                f'cannot stage in "{self._launch.cache.stage}" on {socket.gethostname()}: it is {folder}',
                hint="cache.stage names a folder of the nodes; its variables must be set there.",
            )
        return folder


class Scratch:
    """The folder of this user's passing copies on this machine, locked as long as some process uses it."""

    def __init__(self, folder: Path) -> None:
        paths.make_private(folder)
        self.folder = folder
        self._lock: IO[str] | None = _lock(folder, fcntl.LOCK_SH)

    @classmethod
    def find(cls) -> Scratch | None:
        """On the first disk of this machine that takes it; None, with a printed note, when there is none."""
        for place in scratch_folders():
            with contextlib.suppress(OSError, UserError):
                return cls(place)
        print("penstock: no scratch disk to stage on; the weights are read where they are", flush=True)
        return None

    def leave(self) -> None:
        """Unlock the folder, and remove it when nobody else uses it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            remove_unused(self.folder)


def remove_unused(folder: Path) -> None:
    """Remove the passing copies in a folder that no process uses. Safe to call at any time."""
    if paths.is_private(folder):
        with contextlib.suppress(OSError), _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder)


def scratch_folders() -> Iterator[Path]:
    """Where passing copies may lie, the best first: on a disk of this machine, not in its memory."""
    mounts = read_rate.mounts()
    for place in dict.fromkeys([os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), tempfile.gettempdir()]):
        kind = read_rate.file_system_of(os.path.realpath(place), mounts) if place else ""
        if place and Path(place).is_dir() and not read_rate.is_of_network(kind) and not read_rate.is_in_memory(kind):
            yield Path(place) / f"penstock-weights-{os.getuid()}"


def _lock(folder: Path, how: int) -> IO[str]:
    stream = (folder / _USED).open("a")
    try:
        fcntl.flock(stream, how)
    except OSError:
        stream.close()
        raise
    return stream


def _is_remote(path: str) -> bool:
    """Whether a path, or the place where it would be made, is on a file system of other machines."""
    place = str(paths.nearest_existing(Path(path)))
    return read_rate.is_of_network(read_rate.file_system_of(os.path.realpath(place), read_rate.mounts()))
