"""The verbs `completion` and `help`: shell scripts and a manual page, written from the command tree."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Any

from penstock import __version__
from penstock.cli import arguments, main

_BASH = """\
_penstock() {{
  local words verb=${{COMP_WORDS[1]}} runs=${{PENSTOCK_HOME:-$HOME/.penstock}}/runs
  if [ "$COMP_CWORD" = 1 ]; then words="{verbs}"; else
    case $verb in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _penstock penstock
"""


def register(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")
    examples = ('eval "$(penstock completion bash)"', "penstock completion fish | source")
    arguments.complete(parser, _completion, examples)


def register_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("of", nargs="*", metavar="VERB", help="the verb")
    parser.add_argument("--man", action="store_true", help="print the manual page (roff)")
    arguments.complete(parser, _help, ("penstock help up", "penstock help --man > penstock.1"))


def _help(options: argparse.Namespace) -> int:
    if options.man:
        print("\n".join(_manual_page()))
        return 0
    try:
        return main.run([*options.of, "--help"])
    except SystemExit:
        return 0


def _verbs() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    root: Any = main.parser()
    (action,) = (action for action in root._actions if isinstance(action, argparse._SubParsersAction))
    for name, verb in action.choices.items():
        yield name, main.VERBS[name].text, verb


def _options(verb: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in verb._actions if action.option_strings and action.dest != "help"]


def _completion(options: argparse.Namespace) -> int:
    lines, cases = list[str](), list[str]()
    for name, text, verb in _verbs():
        flags = [flag for action in _options(verb) for flag in action.option_strings if flag.startswith("--")]
        has_name = any(action.metavar == "NAME" for action in verb._actions if not action.option_strings)
        cases.append(f'      {name}) words="{" ".join(flags)}{" $(ls $runs 2>/dev/null)" if has_name else ""}" ;;')
        lines.append(f"complete -c penstock -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}")
        lines += [f"complete -c penstock -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}" for flag in flags]
    script = _BASH.format(verbs=" ".join(main.VERBS), cases="\n".join(cases))
    zsh = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    print({"bash": script, "zsh": zsh, "fish": "\n".join(lines)}[options.shell])
    return 0


def _manual_page() -> Iterator[str]:
    """The manual page of all verbs, for man(7)."""
    yield f'.TH PENSTOCK 1 "" "penstock {__version__}"'
    yield f".SH NAME\npenstock \\- {_roff(main.DESCRIPTION)}"
    yield ".SH SYNOPSIS\n.B penstock\n.I VERB\n[options]"
    for name, text, verb in _verbs():
        yield f".SH {name.upper()}\n{_roff(text)}"
        for action in [*(each for each in verb._actions if not each.option_strings), *_options(verb)]:
            if not isinstance(action, argparse._SubParsersAction):
                yield f".TP\n.B {_roff(', '.join(action.option_strings) or str(action.metavar or action.dest))}"
                yield _roff(action.help or "")
        examples = (verb.epilog or "").splitlines()[1:]
        if examples:
            yield "\n".join([".PP\n.nf", *(_roff(line) for line in examples), ".fi"])


def _roff(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")
