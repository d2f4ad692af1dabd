"""The verb `models`: lists the models that are on this machine, and removes one."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import arguments
from penstock.cli.output import print_json, print_step, table
from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.models.kept import Kept, Use

_HEAD = ("MODEL", "REVISION", "SIZE", "LAST USED", "STATE", "WHERE")


def register(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("list", "rm"), default="list", metavar="list|rm", help="default: list"
    )
    text = "with rm: org/name, org/name@COMMIT for one revision, or a path that the list shows"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    parser.add_argument("--yes", action="store_true", help="with rm: do not ask")
    arguments.add_json(parser)
    examples = ("penstock models", "penstock models rm Qwen/Qwen3-0.6B", "penstock models rm org/name@c1899de --yes")
    arguments.complete(parser, _models, examples)


def _models(options: argparse.Namespace) -> int:
    if options.action == "rm":
        return _remove(options)
    if options.name is not None or options.yes:
        raise UserError("`penstock models list` takes no name and no --yes", hint="penstock models rm NAME")
    return _list(options)


def _list(options: argparse.Namespace) -> int:
    import msgspec

    from penstock.models import kept
    from penstock.text import show_bytes, show_seconds

    rows, uses = _here()
    users = [kept.users_of(row, uses) for row in rows]
    if options.json:
        pairs = zip(rows, users, strict=True)
        print_json([msgspec.to_builtins(row) | {"used_by": names} for row, names in pairs])
        return 0
    lines = []
    for row, names in zip(rows, users, strict=True):
        state = "bundled" if row.kind == "bundled" else row.state + (", verified" if row.is_verified else "")
        state += f", used by {', '.join(names)}" if names else ""
        used = "" if row.used_at is None else f"{show_seconds(max(1.0, time.time() - row.used_at))} ago"
        where = "" if row.kind == "bundled" else row.place
        lines.append((row.name, row.revision[:12], show_bytes(row.n_bytes), used, state, where))
    print(table(lines, _HEAD, right=(2,)))
    print(f"{show_bytes(kept.total_bytes(rows))} on disk; what revisions share counts once")
    return 0


def _remove(options: argparse.Namespace) -> int:
    from penstock.models import kept
    from penstock.text import show_bytes

    if options.name is None:
        raise UserError("which model?", hint="penstock models rm NAME; `penstock models` lists all that are here.")
    rows, uses = _here()
    chosen = kept.choose(rows, options.name)
    kept.check_unused(chosen, uses)
    what = f"{chosen[0].name}{_revisions(chosen)}, {show_bytes(sum(row.n_bytes for row in chosen))}"
    if not options.yes and not _confirmed(f"Remove {what}, in {chosen[0].place}?"):
        print_step("nothing was removed")
        return 1
    n_bytes = kept.remove(chosen)
    if options.json:
        print_json({"removed": [row.folder for row in chosen], "n_bytes": n_bytes})
    else:
        print(f"removed {chosen[0].name}{_revisions(chosen)}: {show_bytes(n_bytes)} are free")
    return 0


def _revisions(rows: list[Kept]) -> str:
    return f" ({len(rows)} revisions)" if len(rows) > 1 else ""


def _confirmed(question: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError("cannot ask before removing: this is no terminal", hint="Add --yes to remove it.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _here() -> tuple[list[Kept], list[Use]]:
    """The models here, also in caches that deployments name, and those that running deployments use."""
    from penstock import run_folder
    from penstock.models import kept
    from penstock.models.kept import Use

    caches, uses = list[Path](), list[Use]()
    for run in run_folder.every():
        with contextlib.suppress(PenstockError):  # a damaged run folder
            deployment = run.deployment()
            if deployment.cache.folder is not None:
                caches.append(Path(deployment.cache.folder))
            if not run.is_ended():
                uses.append(Use(deployment.name, run.plan().model.path))
    return kept.every(caches), uses
