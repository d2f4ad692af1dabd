"""Argument types (all refuse with one sentence, `"x" is not a whole number from 1 to 64`) and common arguments.

`complete(parser, action, examples)` gives a verb its action and examples; `deployment_of(options)` is what FILE|MODEL
and the flags of `add_deployment` describe.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.spec.deployment import Deployment

Action = Callable[[argparse.Namespace], "int | None"]
_Value = TypeVar("_Value")

MOST = 999_999_999
_PERIOD = re.compile(r"([0-9]{1,9})([smhdw])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# What `engine/arg_utils.py` of vLLM reads in --max-model-len: small letters are decimal, large ones binary.
_FACTORS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def refusal(text: str, what: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f'"{text[:60]}" is not {what}')


def whole(least: int, most: int = MOST, *, what: str = "a whole number") -> Callable[[str], int]:
    def read(text: str) -> int:
        digits = text.removeprefix("-") if least < 0 else text
        # The length first: int() of thousands of digits is slow.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and least <= int(text) <= most):
            raise refusal(text, f"{what} from {least:,} to {most:,}")
        return int(text)

    return read


def number(
    least: float, most: float = MOST, *, is_above: bool = False, what: str = "a number"
) -> Callable[[str], float]:
    """A number within these bounds; `is_above`: not `least` itself."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (is_above and value == least):
            bounds = f"above {least:g} and at most" if is_above else f"from {least:g} to"
            raise refusal(text, f"{what} {bounds} {most:,}")
        return value

    return read


count, count_or_zero = whole(1), whole(0)
positive, not_negative = number(0, is_above=True), number(0)
share = number(0, 1)
seconds = number(0, is_above=True, what="a number of seconds")


def token_count(text: str) -> int:
    """A whole number from 1 to 2**31: "131072", "128K" (131,072), "128k" (128,000)."""
    factor = _FACTORS.get(text[-1:], 1)
    digits = text[:-1] if factor != 1 else text
    if not (digits.isascii() and digits.isdigit() and len(digits) < 12 and 1 <= int(digits) * factor <= 2**31):
        raise refusal(text, f"a whole number from 1 to {2**31:,}, such as 8192 or 128K")
    return int(digits) * factor


def _listed(read: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    return lambda text: tuple(read(word) for word in text.split(","))


counts, numbers = _listed(count), _listed(positive)


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def period_s(text: str) -> float:
    """Seconds in "90s", "45m", "12h", "30d" or "2w"."""
    match = _PERIOD.fullmatch(text)
    if match is None:
        raise refusal(text, "a time such as 90s, 45m, 12h, 30d or 2w")
    return float(match[1]) * _UNITS_S[match[2]]


def day(text: str) -> float:
    """The beginning (UTC) of a day such as 2026-11-20, in Unix seconds."""
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        raise refusal(text, "a day such as 2026-11-20") from None


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def json_object(text: str) -> dict[str, Any]:
    """A JSON object as a server may read it: NaN, and 1e999, are no JSON."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise refusal(text, "a JSON object")
    return value


# ---- common arguments ------------------------------------------------------------------------------------------------


def complete(parser: argparse.ArgumentParser, action: Action, examples: Sequence[str] = ()) -> None:
    parser.set_defaults(verb=action)
    if examples:
        add_examples(parser, *examples)


def add_examples(parser: argparse.ArgumentParser, *examples: str) -> None:
    parser.epilog = "\n".join(["examples:", *(f"  {example}" for example in examples)])


def add_json(parser: argparse.ArgumentParser, text: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=text)


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--watch", action="store_true", help="show it again every two seconds, until Ctrl-C")


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the deployment; optional when only one runs")


def add_source(parser: argparse.ArgumentParser, text: str = "a YAML file, a model folder or a hub id") -> None:
    parser.set_defaults(source=None)
    parser.add_argument("source", nargs="?", metavar="FILE|MODEL", default=argparse.SUPPRESS, help=text)
    parser.add_argument("-f", "--file", dest="source", metavar="FILE", default=argparse.SUPPRESS, help="the same")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field of the file")


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("auto", "vllm", "llamacpp"), help="same as --set engine.kind=...")


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="NAME", help="same as --set target=NAME")


def add_deployment(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_target(parser)
    parser.add_argument("--name", type=not_empty, help="the deployment's name (default: from the model)")
    add_engine(parser)
    parser.add_argument("--replicas", type=whole(-MOST), metavar="N", help="same as --set replicas=N")
    parser.set_defaults(takes_engine_flags=True)
    text = "same as --set gateway.port=...; 0 takes any free port"
    parser.add_argument("--port", type=whole(-MOST), metavar="PORT", help=text)


def deployment_of(options: argparse.Namespace) -> Deployment:
    """The deployment that FILE|MODEL and the flags describe; the bundled demo without either.  Raises UserError."""
    from penstock.spec import reading

    settings = settings_of(options)
    return _demo(settings) if options.source is None else reading.read(options.source, settings)


def settings_of(options: argparse.Namespace) -> list[str]:
    """What the flags change in the file, as values of --set."""
    fields = {"name": "name", "target": "target", "engine": "engine.kind", "replicas": "replicas"}
    fields |= {"port": "gateway.port"}
    values = {field: getattr(options, flag, None) for flag, field in fields.items()}
    # As JSON, which YAML reads the same way: a name such as 123 stays text.
    return [*(f"{field}={json.dumps(value)}" for field, value in values.items() if value is not None), *options.set]


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _demo(settings: list[str]) -> Deployment:
    """The bundled demo. The user did not choose its port: when it is taken, any free one will do."""
    from penstock import paths, run_folder
    from penstock.hardware import network
    from penstock.spec import reading
    from penstock.spec.deployment import DEMO_MODEL

    deployment = reading.from_mapping({"model": DEMO_MODEL}, "the demo", settings)
    if any(setting.startswith("gateway.port=") for setting in settings):
        return deployment
    existing = run_folder.Run(paths.home() / "runs" / deployment.name)
    if existing.exists() and not existing.is_ended():
        port = existing.deployment().gateway.port
    else:
        try:
            network.check_port(deployment.gateway.host, deployment.gateway.port)
            return deployment
        except UserError:
            port = 0
    return reading.from_mapping({"model": DEMO_MODEL}, "the demo", [*settings, f"gateway.port={port}"])
