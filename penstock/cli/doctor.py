"""The verb `doctor`."""

from __future__ import annotations

import argparse

from penstock.cli import arguments
from penstock.cli.output import print_json, print_step
from penstock.errors import EXIT_OURS


def register(parser: argparse.ArgumentParser) -> None:
    arguments.add_source(parser, "check this deployment on the nodes it would use")
    arguments.add_target(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="skip the all-reduce between the nodes (5 s), and workloads in a workbench (a minute)",
    )
    arguments.add_json(parser)
    examples = ("penstock doctor", "penstock doctor qwen.yaml", "penstock doctor cluster.yaml --quick --json")
    arguments.complete(parser, _run, examples)


def _run(options: argparse.Namespace) -> int:
    """Print every finding; 1 when something is bad."""
    import msgspec

    from penstock.cli import status_text
    from penstock.deployment.doctor import examine

    def show_step(step: str) -> None:
        if not options.json:
            print_step(f"{step} ...")

    if options.source or options.set or options.target:
        findings = examine.examine(arguments.deployment_of(options), options.quick, show_step)
    else:
        findings = examine.examine_here()
    is_bad = any(finding.state == "bad" for finding in findings)
    if options.json:
        print_json({"ok": not is_bad, "findings": msgspec.to_builtins(findings)})
    else:
        print(status_text.doctor_text(findings))
    return EXIT_OURS if is_bad else 0
