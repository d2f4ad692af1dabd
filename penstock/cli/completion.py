"""The verbs `completion` and `help`: shell scripts and a manual page, written from the command tree."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from penstock import __version__
from penstock.cli import arguments, main

# The path is the verb with its sub-verb; what stands before the cursor may be an option with fixed values.
_BASH = """\
_penstock() {{
  local words= word verb= last=${{COMP_WORDS[COMP_CWORD-1]}} runs=${{PENSTOCK_HOME:-$HOME/.penstock}}/runs
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$verb $word" in {paths}) verb="$verb $word" ;; esac
  done
  case "$verb $last" in
{choices}
    *) case "$verb" in
{cases}
    esac ;;
  esac
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
    for name, verb in _sub_verbs(main.parser()).items():
        yield name, main.VERBS[name].text, verb


def _sub_verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(choices, {}))


def _options(verb: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in verb._actions if action.option_strings and action.dest != "help"]


def _long(action: argparse.Action) -> list[str]:
    return [flag for flag in action.option_strings if flag.startswith("--")]


def _words(verb: argparse.ArgumentParser) -> list[str]:
    """What may follow: sub-verbs, the choices of positional arguments, names of deployments, verbs, flags."""
    words = [*_sub_verbs(verb)]
    for action in verb._actions:
        if action.option_strings or isinstance(action, argparse._SubParsersAction):
            continue
        words += map(str, action.choices or ())
        words += ["$(ls $runs 2>/dev/null)"] if "NAME" in str(action.metavar) else []
        words += main.VERBS if action.metavar == "VERB" else []
    return [*words, *(flag for action in _options(verb) for flag in _long(action))]


def _completion(options: argparse.Namespace) -> int:
    trees = {name: verb for name, _, verb in _verbs()}
    trees |= {alias: trees[words[0]] for alias, words in main.ALIASES.items() if words[0] in trees}
    paths = {f" {name}": verb for name, verb in trees.items()}
    for name, verb in trees.items():
        paths |= {f" {name} {word}": each for word, each in _sub_verbs(verb).items()}
    if options.shell == "fish":
        print("\n".join(line for path, verb in paths.items() for line in _fish(path.split(), verb)))
        return 0
    choices = [
        f'    "{path} {flag}") words="{" ".join(map(str, action.choices))}" ;;'
        for path, verb in paths.items()
        for action in _options(verb)
        for flag in action.option_strings
        if action.choices
    ]
    cases = [f'      "{path}") words="{" ".join(_words(verb))}" ;;' for path, verb in paths.items()]
    cases.append(f'      "") words="{" ".join([*main.VERBS, *main.ALIASES])}" ;;')
    known = "|".join(f'"{path}"' for path in paths)
    script = _BASH.format(paths=known, choices="\n".join(choices), cases="\n".join(cases))
    print(f"autoload -U +X bashcompinit && bashcompinit\n{script}" if options.shell == "zsh" else script)
    return 0


def _fish(path: list[str], verb: argparse.ArgumentParser) -> Iterator[str]:
    here = shlex.quote("; and ".join(f"__fish_seen_subcommand_from {word}" for word in path))
    if len(path) == 1:
        name = main.ALIASES.get(path[0], path)[0]
        yield f"complete -c penstock -n __fish_use_subcommand -a {path[0]} -d {shlex.quote(main.VERBS[name].text)}"
    fixed = [word for word in _words(verb) if not word.startswith(("-", "$"))]
    if fixed:
        yield f"complete -c penstock -n {here} -a {shlex.quote(' '.join(fixed))}"
    for action in _options(verb):
        values = f" -x -a {shlex.quote(' '.join(map(str, action.choices)))}" if action.choices else ""
        yield from (f"complete -c penstock -n {here} -l {flag[2:]}{values}" for flag in _long(action))


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
