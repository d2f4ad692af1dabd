"""`penstock fetch` (and `pull`): a model's files to this machine, or the check of those that are here."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from penstock.cli import arguments
from penstock.cli.output import print_json, print_step
from penstock.errors import PenstockError, UserError
from penstock.text import printable, show_bytes, show_seconds

if TYPE_CHECKING:
    from penstock.models.fetch import FetchPlan, Progress
    from penstock.models.sources import Source
    from penstock.spec.deployment import Deployment

_LINE_EVERY_S = 5.0
_SHOW_S = 0.5


def register(parser: argparse.ArgumentParser) -> None:
    text = "a YAML file, a hub id, ms://org/name, s3:// gs:// az://, hf://org/name@revision/file.gguf, or a folder"
    arguments.add_source(parser, text)
    arguments.add_engine(parser)
    parser.add_argument("--to", type=Path, metavar="DIR", help="write plain files there (default: the hub's cache)")
    parser.add_argument("--revision", metavar="R", help="a branch, tag or commit (default: main)")
    parser.add_argument("--verify", action="store_true", help="fetch nothing: read what is here, and compare hashes")
    parser.add_argument("--dry-run", action="store_true", help="print files, bytes and expected time; fetch nothing")
    arguments.add_json(parser, "print one JSON event per line")
    examples = (
        "penstock fetch Qwen/Qwen3-0.6B",
        "penstock fetch Qwen/Qwen3-32B --revision main --dry-run",
        "penstock fetch Qwen/Qwen3-0.6B --to /data/qwen",
        "penstock fetch Qwen/Qwen3-0.6B --verify",
    )
    arguments.complete(parser, _fetch, examples)


class FetchDisplay:
    """Shows a fetch: one live bar on a terminal, a line every 5 s elsewhere, events of that name with `as_json`."""

    def __init__(self, stream: IO[str], as_json: bool = False, event: str = "progress") -> None:
        self._stream, self._as_json, self._event = stream, as_json, event
        self._bar: Any = None
        self._task: Any = None
        self._last, self._shown_at = "", 0.0
        self._live = stream.isatty() and not as_json and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> FetchDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        if self._live:
            self._show_bar(progress)
            return
        now, line = time.monotonic(), progress.line
        if line == self._last or (now - self._shown_at < _LINE_EVERY_S and progress.n_bytes < progress.total_bytes):
            return
        self._last, self._shown_at = line, now
        if self._as_json:
            fields = ("n_bytes", "total_bytes", "n_files", "total_files", "rate_bytes_per_s", "left_s", "note")
            print_json({"event": self._event, **{field: getattr(progress, field) for field in fields}})
        else:
            print(printable(line), file=self._stream, flush=True)

    def _show_bar(self, progress: Progress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            columns = (BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%  {task.fields[words]}"))
            self._bar = Bars(*columns, console=Console(file=self._stream, markup=False), transient=True)
            self._task = self._bar.add_task("", total=1.0, words="")
            self._bar.start()
        share = progress.n_bytes / progress.total_bytes if progress.total_bytes else 1.0
        self._bar.update(self._task, completed=share, words=printable(progress.line)[:90])


def _fetch(options: argparse.Namespace) -> int:
    from penstock.models import fetch as model_fetch
    from penstock.models import files, kept, sources
    from penstock.spec.deployment import DEMO_MODEL

    source, deployment = _source(options)
    if deployment is not None and deployment.model == DEMO_MODEL:
        if options.verify:
            message = f'cannot verify "{DEMO_MODEL}": it is a part of penstock, and was not fetched'
            raise UserError(message, hint="pip install --force-reinstall penstock brings its files again.")
        print(files.BUNDLED)
        return 0
    assert source is not None
    cache = Path(deployment.cache.folder).expanduser() if deployment and deployment.cache.folder else None
    if source.kind == "folder":  # it is looked at where it is
        cache = None
    if options.verify:
        return _verify(options, source, cache)
    wanted = sources.PLAIN
    if deployment is not None:
        wanted = sources.Wanted(deployment.cache.allow_pickle, sources.runs_code(deployment.engine.flags))
    to = options.to.expanduser().absolute() if options.to else None
    if options.dry_run:
        plan = model_fetch.prepare(sources.resolve(source, wanted.pickles, wanted.code), to, cache)
        _print_plan(plan, options.json)
        return 0
    if to is not None:
        kept.note(to)
    with FetchDisplay(sys.stderr, options.json) as display:
        folder = model_fetch.fetch(source, to, cache, wanted, show=display.show, say=print_step)
    if options.json:
        print_json({"event": "complete", "source": str(source), "folder": str(folder)})
    else:
        print(folder)
    return 0


def _source(options: argparse.Namespace) -> tuple[Source | None, Deployment | None]:
    """The source, and the deployment whose settings count; the latter is None for words that only a fetch knows."""
    from penstock.models import files, sources
    from penstock.models.sources import Source
    from penstock.spec.deployment import DEMO_MODEL

    text = options.source
    if text is not None and not Path(text).is_file() and ("://" in text or ":" in text or text.endswith(".gguf")):
        return sources.parse(text, options.revision), None
    deployment = arguments.deployment_of(options)
    if deployment.model == DEMO_MODEL:
        return None, deployment
    # What is no source is a folder or a file here, or is refused as `up` refuses it.
    source = sources.of_deployment(deployment) or Source("folder", str(files.locate(deployment)))
    return msgspec.structs.replace(source, revision=options.revision or source.revision), deployment


def _print_plan(plan: FetchPlan, as_json: bool) -> None:
    listing, missing = plan.listing, plan.missing_bytes
    if as_json:
        files = {name: {"size": file.size, "sha256": file.sha256} for name, file in listing.files.items()}
        facts = {"source": str(listing.source), "revision": listing.commit, "folder": str(plan.folder), "files": files}
        sizes = {"n_bytes": listing.n_bytes, "missing_bytes": missing, "free_bytes": plan.free_bytes}
        print_json({"event": "plan", **facts, **sizes, "expected_s": plan.expected_s})
        return
    for name, file in listing.files.items():
        print(f"{show_bytes(file.size):>10}  {printable(name)}")
    expected = f", about {show_seconds(plan.expected_s)}" if plan.expected_s is not None and missing else ""
    print(f"{listing.source} {listing.commit[:12]}: {len(listing.files)} files, {show_bytes(listing.n_bytes)}")
    print(f"to fetch: {show_bytes(missing)} into {plan.folder}{expected} ({show_bytes(plan.free_bytes)} free)")


def _counted(display: FetchDisplay, total_bytes: int) -> Callable[[int], None]:
    """Adds up what several threads read, and shows it twice a second."""
    from penstock.models.fetch import Progress

    lock, began = threading.Lock(), time.monotonic()
    n_bytes, shown_at = 0, began

    def add(n_read: int) -> None:
        nonlocal n_bytes, shown_at
        with lock:
            n_bytes += n_read
            now = time.monotonic()
            if now - shown_at > _SHOW_S:
                shown_at = now
                rate = n_bytes / (now - began)
                display.show(Progress(n_bytes, total_bytes, rate_bytes_per_s=rate))

    return add


def _n_files(problems: Sequence[object]) -> str:
    return "one of its files is" if len(problems) == 1 else f"{len(problems)} of its files are"


def _again(options: argparse.Namespace) -> str:
    words = ["penstock fetch", options.source]
    words += ["--to", str(options.to)] if options.to else []
    return " ".join([*words, *(["--revision", options.revision] if options.revision else [])])


def _verify(options: argparse.Namespace, source: Source, cache: Path | None) -> int:
    from penstock.models import fetch as model_fetch
    from penstock.models import manifest

    folder = options.to or model_fetch.found(source, cache)
    facts = manifest.read(folder) if folder is not None else None
    if folder is None or facts is None:
        message = f'cannot verify "{source}": there is no {manifest.NAME} {f"in {folder}" if folder else "here"}'
        raise UserError(message, hint=f"{_again(options)} compares the files with their source, and writes it.")
    began = time.monotonic()
    with FetchDisplay(sys.stderr, options.json) as display:
        problems = manifest.verify(folder, _counted(display, facts.n_bytes))
    manifest.distrust(folder, [problem.path for problem in problems])
    if options.json:
        found = [{"file": problem.path, "message": problem.message} for problem in problems]
        print_json({"event": "verified", "source": str(source), "folder": str(folder), "problems": found})
        return 1 if problems else 0
    if problems:
        is_plain = options.to is not None or source.kind == "folder"
        message = f'"{source}" is damaged: {_n_files(problems)} not what was fetched'
        hint = model_fetch.repair(folder, facts) if is_plain else f"{_again(options)} fetches these files again."
        raise PenstockError(message, detail="\n".join([f"in {folder}", *map(str, problems)]), hint=hint)
    words = f"{len(facts.files)} files, {show_bytes(facts.n_bytes)}, {show_seconds(time.monotonic() - began)}"
    print(f"{folder}: every byte is right ({words})")
    return 0
