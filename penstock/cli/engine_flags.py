"""Flags of `vllm serve` on the command line of `up`, as settings of the deployment file."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from penstock.cli import arguments
from penstock.engines.vllm import names
from penstock.text import bare_flag

_FIELD = re.compile(r"(?:parallel|engine|hardware)\.\w+|gateway\.host")


def split(words: Sequence[str], parser: Any) -> tuple[list[str], list[str]]:
    """The words that are the verb's own, and the settings that the others mean: `-tp 2` is parallel.tensor=2.

    A flag that looks like a mistyped one of the verb stays with the verb.
    """
    rest, settings = list[str](), list[str]()
    left = [*words]
    while left:
        word = left.pop(0)
        if not word.startswith("-") or re.match(r"-\d|-?-\Z", word) or _is_own(word, parser):
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = names.SHORT_FLAGS.get(name, bare_flag(name))
        if not equals:
            has_value = left and not names.SWITCHES.match(flag) and not left[0].startswith("--")
            value = left.pop(0) if has_value else "true"
        settings.append(_setting(flag, value, parser))
        fields = [setting.partition("=")[0] for setting in settings]
        if fields[-1] in fields[:-1]:
            parser.error(f"argument {name}: given twice", f"Several values: --set {fields[-1]}=[A,B].")
    return rest, settings


def _is_own(word: str, parser: argparse.ArgumentParser) -> bool:
    name = word.partition("=")[0]
    own = [option for option in parser._option_string_actions if option.startswith("--")]
    if name in names.SHORT_FLAGS or bare_flag(name) in names.KNOWN:
        return name in parser._option_string_actions
    is_short = not word.startswith("--") and word[:2] in parser._option_string_actions
    is_beginning = any(option.startswith(name) for option in own) and word.startswith("--")
    return is_short or is_beginning or bool(difflib.get_close_matches(name, own, 1, 0.8))


def _setting(flag: str, value: str, parser: Any) -> str:
    if flag == "served-model-name":
        return f"gateway.aliases={json.dumps([value])}"
    if flag == "max-model-len":
        try:
            value = str(arguments.token_count(value))
        except argparse.ArgumentTypeError as exc:
            parser.error(f"argument --max-model-len: {exc}")
    field = _FIELD.match(names.OURS.get(flag, ""))
    return f"{field[0] if field else f'engine.args.{flag}'}={value}"
