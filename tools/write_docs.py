"""Writes cli.md, spec.md and metrics.md in docs/reference: from the command tree, the types of the file, the table of
metrics. `make docs` runs it.

A test fails when the pages differ from what this writes.
"""

from __future__ import annotations

import argparse
import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.cli import main as cli
from penstock.observe import names
from penstock.spec import deployment, reading

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = "<!-- Written by tools/write_docs.py; `make docs` writes it again. -->"

_KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_SPEC_HEAD = """
One YAML file says what to run, where, and what it must do. Only `model` is required; `penstock render FILE` shows the
rest filled in. An unknown key is refused with the nearest legal one, and all problems are reported together.

```yaml
model: Qwen/Qwen3-0.6B
name: qwen
replicas: 2
gateway: {port: 9000}
```

`--set KEY=VALUE` on the command line changes one field: `--set gateway.port=9000`, `--set engine.args.seed=7`. The
value is read as YAML.

The file may hold more than this version does: `penstock doctor FILE` says what it refuses.
"""

_METRICS_HEAD = """
Three addresses of the gateway, [for whom](gateway.md#monitoring): `/metrics` has the gateway's own families,
`/metrics/engines` those of all engines, `/dashboard/live` the same facts each second as JSON. Families without a value
are absent: those of GPUs without a GPU, those of the ledger without a store.
"""
_METRICS_LABELS = """
With several workers, the gateway's values are sums over them, or what each of them knows. A counter starts at 0 with
the gateway. Labels come from bounded sets: `model` are declared ones, `replica` announced ones (1024 pairs, then
`other`; `none` is the gateway itself), `code` status codes, `key` names of keys (1024 series, then `other`).

| label | values |
|---|---|
| `outcome` | complete, client_gone, broken, no_replica, queue_full, late, refused |
| `kind` | prompt, cached (a part of prompt), output |
| `limit` | requests, tokens, concurrency, budget |
| `state` of `ledger_requests_total` | complete, client-cancelled, engine-failed, refused |
| `state` of `replica_state` | the states that `penstock status` shows: queued, loading, ready, busy, failed, ... |

`workload.ttft_ms` and `tpot_ms` are bounds of the buckets of `time_to_first_token_seconds` and
`time_per_output_token_seconds`, so the share of requests that kept a promise is exact.
"""


def metrics_page() -> str:
    """docs/reference/metrics.md: every family that the gateway and the engines show."""
    parts = ["# Metrics", WRITTEN, _METRICS_HEAD.strip()]
    titles = {"penstock": "The gateway", "vllm": "vLLM", "llamacpp": "llama.cpp"}
    for source, title in titles.items():
        rows = [row for row in names.rows() if row.source == source]
        has_versions = any(row.since for row in rows)
        own = () if source == names.GATEWAY else names.OWN_LABELS
        cells = [
            (f"`{row.name}`", row.kind, ", ".join(row.labels[len(own) :]), row.about)
            + ((row.since or "",) if has_versions else ())
            for row in rows
        ]
        head = ("name", "kind", "labels", "meaning", *(("since",) if has_versions else ()))
        parts += [f"## {title}", _METRICS_LABELS.strip() if not own else _also(own), _table(head, cells)]
    renames = [(f"`{rename.old}`", f"`{rename.name}`") for rename in names.renames()]
    text = "`/metrics/engines` shows these names of older versions as the present ones, so that a dashboard suits all."
    return "\n\n".join((*parts, "## Old names", text, _table(("old", "present"), renames))) + "\n"


def _also(labels: Sequence[str]) -> str:
    quoted = [f"`{label}`" for label in labels]
    return f"In `/metrics/engines` each has the labels {', '.join(quoted[:-1])} and {quoted[-1]} in addition."


def cli_page() -> str:
    """docs/reference/cli.md: every verb with its arguments, as `--help` has them."""
    root = cli.parser()
    parts = ["# Command line", WRITTEN, str(root.description), "```\npenstock VERB ...\n```"]
    parts.append("\n".join(f"- [`{verb}`](#{verb}): {text}" for verb, text, _ in _verbs(root)))
    parts.append(str(root.epilog))
    for verb, _, sub in _verbs(root):
        parts += [f"## {verb}", str(sub.description)]
        if any(isinstance(action, argparse._SubParsersAction) for action in sub._actions):
            inner = [(f"{verb} {name}", each) for name, _, each in _verbs(sub)]
            for name, each in inner:
                parts += [f"### {name}", str(each.description), *_reference(name, each)]
        else:
            parts += _reference(verb, sub)
    return "\n\n".join(part for part in parts if part) + "\n"


def _reference(verb: str, sub: argparse.ArgumentParser) -> list[str]:
    """Usage, examples and arguments."""
    lines = [line.strip() for line in (sub.epilog or "").splitlines()[1:]]
    examples = "\n".join(["```bash", *lines, "```"]) if lines else ""
    return [f"```\n{_usage(verb, sub)}\n```", examples, _arguments(sub)]


def _verbs(root: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """(name, one line, parser) of every verb. argparse has no public way to ask for them."""
    (action,) = (action for action in root._actions if isinstance(action, argparse._SubParsersAction))
    texts = {choice.dest: str(choice.help) for choice in action._choices_actions}
    for name, sub in action.choices.items():
        yield name, texts[name], sub


def _usage(verb: str, sub: argparse.ArgumentParser) -> str:
    """One line, the same whatever the terminal's width and the version of argparse."""
    words = [f"penstock {verb}"]
    words += [f"[{_shown(action)[0]}]" for action in _options(sub)]
    words += [_positional(action) for action in sub._actions if not action.option_strings]
    return " ".join(words)


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return f"[{name}]" if action.nargs == "?" else name


def _options(sub: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action
        for action in sub._actions
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS
    ]


def _shown(action: argparse.Action) -> list[str]:
    """Every way to write an option: "-n N", "--lines N"."""
    value = ""
    if action.nargs != 0:
        name = action.metavar or (
            f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        )
        value = f" {name}"
    return [f"{name}{value}" for name in action.option_strings]


def _arguments(sub: argparse.ArgumentParser) -> str:
    rows = [
        (str(action.metavar or action.dest), str(action.help or ""))
        for action in sub._actions
        if not action.option_strings
    ]
    rows += [(", ".join(_shown(action)), _option_text(action)) for action in _options(sub)]
    return _table(("argument", "what it does"), [(f"`{name}`", text) for name, text in rows])


def _option_text(action: argparse.Action) -> str:
    is_said = action.default in (None, False, []) or action.default is argparse.SUPPRESS
    default = "" if is_said else f" (default: {action.default})"
    return f"{action.help or ''}{default}".strip()


def spec_page() -> str:
    """docs/reference/spec.md: every field with its type and default."""
    parts = ["# The deployment file", WRITTEN, _SPEC_HEAD.strip(), *_block(deployment.Deployment, "")]
    return "\n\n".join(parts) + "\n"


def _block(struct: type[msgspec.Struct], path: str) -> Iterator[str]:
    """The section of a struct, and then those of the structs in it."""
    yield f"## `{path}`" if path else "## Fields"
    # msgspec writes a docstring of its own where a struct has none.
    if struct.__doc__ and not struct.__doc__.startswith(f"{struct.__name__}("):
        yield inspect.cleandoc(struct.__doc__)
    rows, inside = [], []
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        full = f"{path}.{field.name}" if path else field.name
        below = _struct_in(hints[field.name])
        if below:
            inside.append((below, full))
        rows.append((f"`{full}`", _kind(hints[field.name], full), _default(field, full), _least(full)))
    yield _table(("field", "value", "default", "least"), rows)
    for below, full in inside:
        yield from _block(below, full)


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)), None)


def _kind(hint: Any, path: str) -> str:
    """A type in words. `fake` is for tests and stays unsaid."""
    if hint in _KINDS:
        return _KINDS[hint]
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in options if option != "fake")
    if origin is dict:
        return "key: value lines"
    if origin in (list, tuple):
        return f"list of {_kind(options[0], path)}{'s' if options[0] is int else ''}"
    if options:
        words = [_kind(option, path) for option in options if option is not type(None)]
        return " or ".join(words)
    also = "a number, or " if path == "replicas" else ""
    return f"{also}[block](#{path.replace('.', '')})"


def _default(field: msgspec.structs.FieldInfo, path: str) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if path == "name":
        return "from the model"
    if value is None or value in ({}, ()) or isinstance(value, msgspec.Struct):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


def _least(path: str) -> str:
    return next((str(least) for (least, _), names in reading.BOUNDS.items() if re.fullmatch(names, path)), "")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; a bar inside a cell would end it."""
    if not rows:
        return ""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    for name, text in (("cli.md", cli_page()), ("spec.md", spec_page()), ("metrics.md", metrics_page())):
        (ROOT / "docs" / "reference" / name).write_text(text, "utf-8")
        print(f"docs/reference/{name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
