"""The verb `doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import EXIT_OURS

if TYPE_CHECKING:
    from penstock.spec.deployment import Deployment


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", nargs="?", metavar="FILE|MODEL", help="check this deployment on the nodes it would use")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field of the file")
    sub.add_argument("--quick", action="store_true", help="leave out the all-reduce between the nodes (5 s)")
    sub.add_argument("--json", action="store_true", help="print facts as JSON")


def run(options: argparse.Namespace, deployment_of: Callable[[argparse.Namespace], Deployment]) -> int:
    """Print every finding; 1 when something is bad."""
    import msgspec

    from penstock.cli import status_text
    from penstock.deployment.doctor import examine

    def say(step: str) -> None:
        if not options.json:
            print(f"{step} ...", file=sys.stderr, flush=True)

    if options.source or options.set:
        findings = examine.examine(deployment_of(options), options.quick, say)
    else:
        findings = examine.examine_here()
    is_bad = any(finding.state == "bad" for finding in findings)
    if options.json:
        print(json.dumps({"ok": not is_bad, "findings": msgspec.to_builtins(findings)}), flush=True)
    else:
        print(status_text.doctor_text(findings))
    return EXIT_OURS if is_bad else 0
