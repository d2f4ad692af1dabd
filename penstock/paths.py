"""Every folder and file name that penstock uses, the temporary ones too."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from penstock.errors import UserError


def home() -> Path:
    """Where penstock keeps its things: $PENSTOCK_HOME, or ~/.penstock.  Raises UserError when there is none such."""
    place = os.environ.get("PENSTOCK_HOME") or "~/.penstock"
    try:
        return Path(place).expanduser().resolve()
    except (RuntimeError, OSError) as exc:
        raise UserError(
            f'cannot use "{place}" as the home of penstock: {exc}', hint="Set PENSTOCK_HOME to a folder you may write."
        ) from exc


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


def folder() -> Path:
    """The folder of run folders, made when absent.  Raises UserError when it cannot be written."""
    path = home() / "runs"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe."):
            pass
    except OSError as exc:
        raise UserError(
            f'cannot write run folder "{path}": {exc.strerror}',
            hint="Set PENSTOCK_HOME to a folder you may write.",
        ) from exc
    return path


def private_folder(run_id: str, replica: str, part: str = "") -> Path:
    """The engine's own temporary folder: short, since Unix sockets go in it, and known beforehand, so that it is
    removed also after a crash. `part` tells the processes of one replica on one machine apart."""
    return Path(tempfile.gettempdir()) / f"penstock-{run_id}-{replica}{part}"


# See engine_process.private_folder and ssh.program.control_folder.
_PRIVATE_FOLDER = re.compile(r"penstock-([0-9a-f]+)-(?:ssh|[0-9]+(?:n[0-9]+)?[a-z]?)\Z")
