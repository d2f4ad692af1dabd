"""The requests of a run: the slowest of the last hour, and the newest lines of its access log."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.deployment import live
from penstock.errors import UserError
from penstock.gateway.accounting.access_log import MAX_KEPT, Line
from penstock.run_folder import Run
from penstock.spec.gateway import STDERR
from penstock.wire.live import SlowRequest

_TAIL_BYTES = 4 * 2**20  # of one file: some 10,000 lines


def slowest(run: Run, n_requests: int) -> list[SlowRequest]:
    """The slowest first. Raises a PenstockError when no gateway answers."""
    return list(live.snapshot(run).slow[:n_requests])


def newest(run: Run, n_requests: int) -> list[Line]:
    """The newest last. Raises UserError where there is no access log that can be read here."""
    place = run.deployment().gateway.access_log
    if place is None:
        raise UserError(
            f'deployment "{run.name}" has no access log',
            hint="Set gateway.access_log to a file, then `penstock up --replace`; --slow needs none.",
        )
    if place == STDERR:
        hint = f"penstock logs {run.name} --part gateway"
        raise UserError(f'the access log of "{run.name}" is in its gateway\'s log', hint=hint)
    path = Path(place).expanduser().resolve()
    lines: list[Line] = []
    for file in (path, *(Path(f"{path}.{number}") for number in range(1, MAX_KEPT + 1))):
        if len(lines) >= n_requests or not file.exists():
            break
        lines = [*_read(file), *lines]
    if not lines and not path.exists():
        raise UserError(
            f'cannot read access log "{path}": it is not on this machine', hint="It is where the gateway is."
        )
    return lines[-n_requests:] if n_requests else []


def _read(file: Path) -> list[Line]:
    """The whole lines at the end of a file; those that a full disk tore are left out."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _TAIL_BYTES))
        whole = stream.read().split(b"\n")[size > _TAIL_BYTES :]
    lines = []
    for text in whole:
        try:
            lines.append(msgspec.json.decode(text, type=Line))
        except msgspec.DecodeError:
            continue
    return lines
