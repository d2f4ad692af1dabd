"""Every folder and file name that penstock uses, the temporary ones too."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from pathlib import Path

from penstock.errors import UserError

_SET_HOME = "Set PENSTOCK_HOME to a folder you may write."


def home() -> Path:
    """Where penstock keeps its files: $PENSTOCK_HOME, or ~/.penstock.  Raises UserError."""
    place = os.environ.get("PENSTOCK_HOME") or "~/.penstock"
    try:
        return Path(place).expanduser().resolve()
    except (RuntimeError, OSError) as exc:
        raise UserError(f'cannot use "{place}" as the home of penstock: {exc}', hint=_SET_HOME) from exc


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file by rename: a reader sees the old or the new one, whole."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(descriptor, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_token(path: Path, what: str = "admin token") -> str:
    """The secret in a file. Raises UserError for a file that is empty or that others can read."""
    try:
        is_shared = bool(path.stat().st_mode & 0o077)
        token = path.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read {what} file {str(path)!r}: {error.strerror}") from error
    if is_shared:
        raise UserError(f"{what} file {str(path)!r} can be read by others", hint=f"chmod 600 {path}")
    if not token:
        raise UserError(f"{what} file {str(path)!r} is empty")
    return token


def is_full(error: OSError) -> bool:
    """Whether a write failed for want of space, or of quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def free_bytes(path: Path) -> int:
    """Free space where this folder is, or would be made; a file system that tells no size has enough."""
    usage = shutil.disk_usage(nearest_existing(path))
    return usage.free if usage.total else sys.maxsize


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def folder() -> Path:
    """The folder of run folders, made when absent.  Raises UserError when it cannot be written."""
    path = home() / "runs"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe."):
            pass
    except OSError as exc:
        raise UserError(f'cannot write run folder "{path}": {exc.strerror}', hint=_SET_HOME) from exc
    return path


# Temporary folders are known by name, so that they are removed after a crash too: penstock-RUN-PART, where PART is a
# replica with its node and its part ("0", "0n1", "0n1r"), or "ssh".
_TEMPORARY = re.compile(r"penstock-([0-9a-f]+)-(?:ssh|[0-9]+(?:n[0-9]+)?[a-z]?)\Z")
OF_ENGINE = re.compile(r"penstock-[0-9a-f]+-[0-9]+(?:n[0-9]+)?[a-ik-z]?\Z")  # engines lock it; "j": Ray's guard
_OWNER = ".run"  # in a temporary folder: the run folder that it belongs to
# The path of a Unix socket has at most 107 bytes, of which ssh's %C takes 40 and its temporary ending 17.
_SHORT_FOLDER = 24


def private_folder(run_id: str, replica: str, part: str = "") -> Path:
    """The temporary folder of an engine. Short, since Unix sockets go in it.

    `part` tells the processes of one replica on one machine apart: "n1" is node 1, then a letter for Ray or a guard.
    """
    return Path(tempfile.gettempdir()) / f"penstock-{run_id}-{replica}{part}"


def make_private(path: Path, run: Path | str | None = None) -> Path:
    """Make a folder with a name that can be guessed, or use the one that is there; `run`: the run folder that owns it.
    Raises UserError where others can reach it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_private(path):
        message = f'cannot use "{path}": it is a link, or other users can reach it'
        raise UserError(message, hint="Remove it, or use another folder: mkdir -p -m 700 ~/tmp && export TMPDIR=~/tmp")
    if run is not None:
        (path / _OWNER).write_text(str(run), "utf-8")
    return path


def is_private(path: Path) -> bool:
    """Whether this is a folder, no link, which belongs to this user and which nobody else can reach."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return False


def owner_of(folder: Path) -> Path | None:
    """The run folder that a temporary folder belongs to; None where it does not name one."""
    with contextlib.suppress(OSError, ValueError):
        return Path((folder / _OWNER).read_text("utf-8"))
    return None


def control_folder(owner: str) -> Path:
    return _short_temporary() / f"penstock-{owner}-ssh"


def socket_folder() -> Path:
    """A new folder for a Unix socket, which only this user can reach."""
    return Path(tempfile.mkdtemp(prefix="penstock-", dir=_short_temporary()))


def _short_temporary() -> Path:
    place = tempfile.gettempdir()
    return Path(place if len(place) <= _SHORT_FOLDER else "/tmp")


def gpu_locks_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"penstock-gpus-{os.getuid()}"


def remove_temporary(run_id: str, part: str = "") -> None:
    """Remove a run's temporary folders on this machine; with `part` those of a replica ("1") or of its node ("1n0")."""
    front = f"penstock-{run_id}-{part}"
    for path in Path(tempfile.gettempdir()).glob(f"{front}*"):
        # Replica 1 is not replica 10.
        if not part or not path.name.removeprefix(front)[:1].isdigit():
            shutil.rmtree(path, ignore_errors=True)


def every_temporary() -> dict[Path, str]:
    """The temporary folders of all runs on this machine, with the id of the run."""
    paths = sorted(path for path in Path(tempfile.gettempdir()).glob("penstock-*-*") if path.is_dir())
    return {path: match[1] for path in paths if (match := _TEMPORARY.match(path.name))}


def is_held(folder: Path) -> bool:
    """Whether an engine holds the folder's lock or a program answers in it, also one that its container hides."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return any(_answers(path) for path in folder.iterdir() if path.is_socket())


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(path)) == 0
