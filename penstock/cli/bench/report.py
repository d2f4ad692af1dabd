"""`penstock bench compare` and `penstock bench report`: runs that were measured before."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.arguments import add_json, complete
from penstock.cli.bench.arguments import add_calibrate, add_seed
from penstock.cli.output import print_json
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.bench.results.folder import Result


def register_compare(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("a", type=Path, metavar="A", help="the folder of a run")
    sub.add_argument("b", type=Path, metavar="B", help="the folder of another")
    add_seed(sub, "of the bootstrap")
    add_json(sub)
    complete(sub, _compare, ["penstock bench compare before/ after/"])


def register(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders that `penstock bench serve` wrote")
    sub.add_argument("--plan", type=Path, metavar="FILE", help="output of `penstock plan --json`, to compare with")
    sub.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the first folder")
    add_calibrate(sub)
    add_json(sub)
    complete(sub, _report, ["penstock bench report run/", "penstock bench report run-a/ run-b/ --out both.html"])


def _loaded(path: Path) -> Result:
    """The run in a folder; one that was killed gets its result first, from the reads that it left."""
    from penstock.bench import serve
    from penstock.bench.results import folder

    if folder.is_unfinished(path):
        report = serve.recover(path)
        folder.write(path, report.result, report.rows)
    return folder.load(path)


def _compare(options: argparse.Namespace) -> int:
    import msgspec

    from penstock.bench.results import compare

    comparison = compare.compare(_loaded(options.a), _loaded(options.b), options.seed)
    if options.json:
        print_json(msgspec.to_builtins(comparison))
    else:
        print(compare.text(comparison))
    return 0


def _report(options: argparse.Namespace) -> int:
    from penstock.bench.report import html
    from penstock.cli.bench.deployment import calibrated
    from penstock.cli.bench.requests import write

    runs = [_loaded(path) for path in options.runs]
    calibration = {options.calibrate: calibrated(options, runs)} if options.calibrate else {}
    plan = _json_object(options.plan) if options.plan else None
    first = options.runs[0].parent if options.runs[0].suffix == ".json" else options.runs[0]
    written = {options.out or first / "report.html": html.page(runs, plan), **calibration}
    for path, content in written.items():
        write(path, content)
    if options.json:
        print_json({"written": [str(path) for path in written]})
    else:
        print("\n".join(map(str, written)))
    return 0


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_text("utf-8"))}
    except (OSError, ValueError, TypeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no JSON object"
        raise UserError(f'cannot read plan "{path}": {why}', hint="Give the output of `penstock plan --json`.") from exc
