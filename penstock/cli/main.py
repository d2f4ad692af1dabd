"""The command tree: runs one verb, prints its errors, exits.

Only the modules of the verb that was typed are imported: `penstock --help` imports argparse and the error family.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from penstock import __version__
from penstock.cli.output import print_error
from penstock.errors import EXIT_OURS, PenstockError, UserError, nearest

DESCRIPTION = "One file and one command take any open LLM from a laptop to a cluster, on vLLM and Ray."
_EPILOG = (
    "Aliases: ps (ls), stop and rm (down), version. Documentation: docs/ in the repository. "
    "Exit code 2: an error that you can fix; 1: any other error."
)


class Verb(NamedTuple):
    """One line for the list of verbs, and `module:function` below penstock.cli, which adds the arguments."""

    text: str
    register: str


VERBS = {
    "up": Verb("start a deployment and wait until it answers; without FILE, the bundled demo", "lifecycle:register_up"),
    "plan": Verb("predict what fits, how to split the model and how fast it will be", "plan:register"),
    "render": Verb("print exactly what `up` would send, and send nothing", "lifecycle:register_render"),
    "fetch": Verb("fetch a model's files, verified and resumed, so that `up` finds them", "fetch:register"),
    "pull": Verb("the same as fetch", "fetch:register"),
    "models": Verb("list the models on this machine: size, last use, state; remove one", "models:register"),
    "ls": Verb("list deployments", "lifecycle:register_ls"),
    "status": Verb("show a deployment: its parts, replicas, restarts and their reasons", "lifecycle:register_status"),
    "logs": Verb("print the log of a deployment's replicas, gateway or controller", "lifecycle:register_logs"),
    "run": Verb("start a model, and send it one prompt or chat with it", "lifecycle:register_run"),
    "chat": Verb("talk to a deployment in the terminal", "chat:register"),
    "tunnel": Verb(
        "open a local address that leads to a deployment on a login node or in a cluster", "remote:register"
    ),
    "keys": Verb("create, list, rotate and revoke the API keys of a gateway", "keys:register_keys"),
    "usage": Verb("show the usage of each key and model, and its cost", "keys:register_usage"),
    "top": Verb("watch deployments in the terminal: replicas, load, speed, GPUs, events", "top:register"),
    "dashboard": Verb("open the live page of a deployment in the browser", "dashboard:register"),
    "ui": Verb("open the chat page of a deployment, or one for any address, in the browser", "ui:register"),
    "events": Verb(
        "list what happened to a deployment: starts, restarts, drains, and who changed it", "events:register"
    ),
    "requests": Verb("list the slowest requests and where their time went, or the newest", "requests:register"),
    "metrics": Verb("ask a deployment's Prometheus, list alerts, or print its pages of metrics", "metrics:register"),
    "scale": Verb("change the number of replicas; removed replicas finish their requests", "lifecycle:register_scale"),
    "autoscale": Verb(
        "show why there are so many replicas; try the policy on samples and traces", "autoscale:register"
    ),
    "sleep": Verb(
        "free the GPU memory of a deployment and keep its engines; a request wakes it", "lifecycle:register_sleep"
    ),
    "wake": Verb("wake a deployment that sleeps", "lifecycle:register_wake"),
    "down": Verb("end a deployment; requests in flight finish first", "lifecycle:register_down"),
    "clean": Verb("find what ended deployments left; removes nothing without --yes", "lifecycle:register_clean"),
    "gateway": Verb("serve engines that already run, on one address", "gateway:register"),
    "bench": Verb("measure an endpoint or an engine, and compare measurements", "bench.arguments:register"),
    "doctor": Verb(
        "report everything that would stop a deployment, on this machine or on the nodes of FILE", "doctor:register"
    ),
    "service": Verb("write a systemd unit that starts a deployment with the machine", "service:register"),
    "completion": Verb("print a script by which a shell completes verbs and options", "completion:register"),
    "help": Verb("show the help of a verb; --man: a manual page of all", "completion:register_help"),
}
# What people type out of habit, as other words of the same command line.
ALIASES = {"ps": ("ls",), "stop": ("down",), "rm": ("down",), "version": ("--version",)}


class _UsageError(UserError):
    def __init__(self, message: str, usage: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.usage = usage


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return textwrap.indent(text, indent)
        return super()._fill_text(text, width, indent)


class _Once(argparse.Action):
    """Stores a value, and refuses a second one, which would silently win, also under another name of the option."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if self.dest in parser.given:
            first, second = (_shown(each) for each in (getattr(namespace, self.dest), values))
            raise argparse.ArgumentError(self, f"given twice, {first} and {second}: only one can be used")
        if option is not None or values is not self.default:  # an absent word is "given" as its default
            parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit: with --json, a program reads why. Options are given once, but for
    those with action="append". `takes_rest` among its defaults: the argument for words that stand after options.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        ours: dict[str, Any] = {"formatter_class": _Formatter, "allow_abbrev": False}
        super().__init__(*args, **(ours | options))
        self.given = set[str]()
        for action in (None, "store"):
            self.register("action", action, _Once)

    def error(self, message: str, hint: str | None = None) -> NoReturn:
        raise _UsageError(message, self.format_usage(), hint)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, but the verb itself refuses what it does not know, and reads flags of `vllm serve`."""
        words, settings = list(args or ()), list[str]()
        foreign = [word for word in words if word.partition("=")[0] not in self._option_string_actions]
        if self.get_default("takes_engine_flags") and any(word.startswith("-") for word in foreign):
            from penstock.cli import engine_flags

            words, settings = engine_flags.split(words, self)
        self.given.clear()
        options, unknown = super().parse_known_args(words, namespace)
        rest = self.get_default("takes_rest")
        if rest and not any(word.startswith("-") for word in unknown):
            setattr(options, rest, [*getattr(options, rest), *unknown])  # argparse knows words in one place only
        elif unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}", self._hint(unknown))
        if settings:
            options.set = [*settings, *options.set]
        return options, []

    def _hint(self, unknown: Sequence[str]) -> str | None:
        word = next((word for word in unknown if word.startswith("-")), "")
        if not word and "--message" in self._option_string_actions:
            return f'To send it: --message "{" ".join(unknown)}".'
        close = nearest(word.partition("=")[0], self._option_string_actions)
        return f"Did you mean {close}?" if close else None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            close = nearest(str(value), choices)
            name = "verb" if isinstance(action, argparse._SubParsersAction) else action.metavar or action.dest
            self.error(
                f'unknown {name} "{value}"', f'Did you mean "{close}"?' if close else f"One of {', '.join(choices)}."
            )


def parser(verbs: Sequence[str] = tuple(VERBS)) -> argparse.ArgumentParser:
    """The command tree with the arguments of these verbs; docs/reference/cli.md is generated from the whole."""
    root = _Parser(
        prog="penstock",
        description=DESCRIPTION,
        epilog=_EPILOG,
    )
    root.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = root.add_subparsers(title="verbs", metavar="VERB")
    for name, verb in VERBS.items():
        command = commands.add_parser(name, help=verb.text, description=f"{verb.text[0].upper()}{verb.text[1:]}.")
        command.set_defaults(verb_name=name)
        if name in verbs:
            module, function = verb.register.split(":")
            getattr(importlib.import_module(f"penstock.cli.{module}"), function)(command)
    return root


def main(argv: Sequence[str] | None = None) -> None:
    """The console script: run one verb and exit."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what must be ended is ended
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent: penstock status >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as we live
    as_json = "--json" in argv
    try:
        argv = [*ALIASES.get(argv[0], argv[:1]), *argv[1:]] if argv else argv
        root = parser([word for word in argv if not word.startswith("-")][:1])
        options = root.parse_args(argv)
        if not hasattr(options, "verb"):
            root.print_help()
            return 0
        from penstock.cli import remote

        code = remote.forward(options, argv)
        code = options.verb(options) if code is None else code
        sys.stdout.flush()
        return int(code or 0)
    except _UsageError as error:
        if not as_json:
            print(error.usage, end="", file=sys.stderr)
        return print_error(error, as_json)
    except PenstockError as error:
        return print_error(error, as_json)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `penstock logs | head`
        return 0
    except Exception as error:  # noqa: BLE001 - the last line of defence: a user never sees a traceback
        return _show_bug(error, as_json)
    finally:
        _drop_unwritten_output()


def _drop_unwritten_output() -> None:
    """Drop what cannot be written (a closed pipe, a full disk): Python would try again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_bug(error: Exception, as_json: bool) -> int:
    if os.environ.get("PENSTOCK_TRACEBACK"):
        raise error
    bug = PenstockError(
        f"penstock failed: {type(error).__name__}: {error}",
        detail="This is a fault of penstock, not yours.",
        hint="Set PENSTOCK_TRACEBACK=1, run it again, and report what it prints.",
    )
    print_error(bug, as_json)
    return EXIT_OURS


if __name__ == "__main__":
    main()
