"""The verb `autoscale replay`: samples in, decisions out, line by line; and the policy that `autoscale` verbs share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import arguments
from penstock.cli.output import print_json
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.deployment.autoscale import Policy, Sample
    from penstock.spec.deployment import Deployment

# Without --policy.
_MIN, _MAX = 1, 16
# The fields of a sample that need not be whole.
_FRACTIONS = frozenset(("t", "age_s", "kv_use"))


def register(parser: argparse.ArgumentParser) -> None:
    text = "samples, one JSON object a line, as a run folder's samples.jsonl has them; -: standard input"
    parser.add_argument("file", metavar="FILE|-", help=text)
    add_policy(parser)
    examples = (
        "penstock autoscale replay ~/.penstock/runs/qwen/samples.jsonl --policy qwen.yaml --start-s 90",
        """echo '{"t": 1, "arrivals": 3, "prompt_tokens": 3000, "held": 3}' | penstock autoscale replay -""",
    )
    arguments.complete(parser, _replay, examples)


def add_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the policy, and what one replica can do")
    add, positive = group.add_argument, arguments.positive
    text = f"a deployment file, or its block `replicas` alone (default: min {_MIN}, max {_MAX}, metric slo)"
    add("--policy", type=Path, metavar="FILE.yaml", help=text)
    text = "seconds from the order of a replica to its first token (default: 100)"
    add("--start-s", type=arguments.number(0, 86_400), metavar="S", help=text)
    add("--prefill-tokens-s", type=positive, metavar="P", help="prompt tokens/s that it reads (default: 12,000)")
    add("--decode-tokens-s", type=positive, metavar="D", help="tokens/s that it writes (default: 1,500)")
    add("--max-running", type=arguments.count, metavar="N", help="requests that run in it at once (default: 64)")
    text = "seconds in which the first token is promised (default: workload.ttft_ms of FILE.yaml, else 2)"
    add("--ttft-s", type=arguments.seconds, metavar="S", help=text)


def policy_of(options: argparse.Namespace) -> Policy:
    """The policy that these arguments describe.  Raises UserError or SpecError with all problems of the file."""
    import msgspec

    from penstock.deployment.autoscale import Policy
    from penstock.spec.deployment import Replicas

    names = ("start_s", "prefill_tokens_s", "decode_tokens_s", "max_running", "ttft_s")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.policy is None:
        return Policy(Replicas(min=_MIN, max=_MAX), **given)
    deployment = _deployment(options.policy)
    policy = Policy(deployment.replicas)
    if deployment.workload.ttft_ms is not None:
        policy = msgspec.structs.replace(policy, ttft_s=deployment.workload.ttft_ms / 1e3)
    return msgspec.structs.replace(policy, **given)


def _deployment(path: Path) -> Deployment:
    import yaml

    from penstock.spec import reading
    from penstock.spec.deployment import DEMO_MODEL

    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as exc:
        raise UserError(f'could not read "{path}": {exc.strerror}', hint="Check the path.") from exc
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
        raw = {"model": DEMO_MODEL}  # `load` says what is wrong
    if raw is None:
        raise UserError(f'file "{path}" is empty', hint="Write a deployment file, or the block `replicas` alone.")
    if isinstance(raw, dict) and "model" in raw:
        return reading.load(path)
    whole = raw if isinstance(raw, dict) and "replicas" in raw else {"replicas": raw}
    return reading.from_mapping({"model": DEMO_MODEL, **whole}, f'file "{path}"')


def _replay(options: argparse.Namespace) -> int:
    from penstock.deployment.autoscale import Recent, State, scale

    policy, state = policy_of(options), State()
    for sample in _samples(options.file):
        decision = scale(Recent((sample,)), state, policy, sample.t)
        state = decision.state
        print_json({"t": sample.t, "replicas": decision.replicas, "reason": decision.reason})
    return 0


def _samples(source: str) -> Iterator[Sample]:
    """Each sample as soon as its line is there: nothing is read ahead.  Raises UserError with the line's number."""
    try:
        stream = sys.stdin if source == "-" else Path(source).open(encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as exc:
        raise UserError(f'could not read "{source}": {exc.strerror}', hint="Check the path.") from exc
    name = "standard input" if source == "-" else f'"{source}"'
    number = 0
    try:
        while line := stream.readline():
            number += 1
            if line.strip():
                yield _sample(line, f"{name}, line {number}")
    except UnicodeDecodeError as exc:
        raise UserError(f"{name}, line {number + 1}: it is not UTF-8 text") from exc
    except OSError as exc:
        raise UserError(f"could not read {name}: {exc.strerror}") from exc
    finally:
        if stream is not sys.stdin:
            stream.close()


def _sample(line: str, where: str) -> Sample:
    import msgspec

    from penstock.deployment.autoscale import Sample

    hint = "docs/how-to/autoscaling.md has the fields of a sample."
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError) as exc:
        raise UserError(f"{where}: it is not JSON", detail=str(exc), hint=hint) from exc
    try:
        sample = msgspec.convert(_whole(raw), Sample)
        negative = [
            name for name, value in _numbers(json.loads(msgspec.json.encode(sample))) if value < 0 and name != "t"
        ]
    except (msgspec.ValidationError, OverflowError) as exc:
        raise UserError(f"{where}: it is not a sample", detail=str(exc), hint=hint) from exc
    if negative:
        raise UserError(f"{where}: {negative[0]} is below 0", hint=hint)
    return sample


def _whole(value: Any, name: str = "") -> Any:
    """Counts that somebody wrote as 3.0, or measured as a mean, as whole numbers."""
    if isinstance(value, dict):
        return {key: _whole(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return round(value) if isinstance(value, float) and name not in _FRACTIONS else value


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int | float):
        yield name, value
