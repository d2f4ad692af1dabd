"""The logs of a run: of its replicas through the target, of its gateway and controller from the run folder."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator

from penstock import targets
from penstock.errors import UserError
from penstock.runs import Run, file_lines


def lines(run: Run, part: str, replica: str | None, last: int | None, follow: bool) -> Iterator[str]:
    """Lines of one part: "replicas" (all, or one), "gateway", "controller" or "events". With `follow` it does not
    end while the deployment is up.

    Raises UserError for a replica that the run does not have.
    """
    follow = follow and run.desired().state == "up"  # nothing more comes from what has ended
    if part == "replicas":
        yield from _replica_lines(run, replica, last, follow)
    elif part == "events":
        yield from map(_event_text, file_lines(run.path / "events.jsonl", follow, last))
    else:
        yield from file_lines(run.log(part), follow, last)


def _replica_lines(run: Run, replica: str | None, last: int | None, follow: bool) -> Iterator[str]:
    handle = run.handle()
    names = sorted({*_logged(run), *handle.replicas})
    if replica is not None and replica not in names:
        raise UserError(f'cannot find replica "{replica}" of "{run.name}"', hint=f"It has: {', '.join(names)}.")
    target = targets.load(handle.target)

    def of_one(name: str) -> Iterator[str]:
        return target.logs(run, handle, name, follow, last)

    chosen = [replica] if replica is not None else names
    if len(chosen) == 1:
        yield from of_one(chosen[0])
    elif follow:
        yield from _merged({name: (lambda name=name: of_one(name)) for name in chosen})  # type: ignore[misc]
    else:
        for name in chosen:
            yield from (f"[{name}] {line}" for line in of_one(name))


def _logged(run: Run) -> list[str]:
    """Replicas that wrote a log here, ended ones too."""
    return sorted(path.stem.removeprefix("replica-") for path in (run.path / "logs").glob("replica-*.log"))


def _merged(sources: dict[str, Callable[[], Iterator[str]]]) -> Iterator[str]:
    """Lines of several endless sources as they come, each with its name in front."""
    arrived: queue.Queue[str] = queue.Queue(maxsize=10_000)

    def pump(name: str, source: Callable[[], Iterator[str]]) -> None:
        for line in source():
            arrived.put(f"[{name}] {line}")

    for name, source in sources.items():
        threading.Thread(target=pump, args=(name, source), daemon=True).start()
    while True:
        yield arrived.get()


def _event_text(line: str) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return line
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("at", 0)))
    where = f" [replica {event['replica']}]" if "replica" in event else ""
    return f"{at} {event.get('event')}{where}: {event.get('text')}"
