"""Reads a deployment file and finds all its problems."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from penstock.errors import Problem, SpecError, UserError, nearest
from penstock.spec.blocks import SHARED
from penstock.spec.deployment import DEMO_MODEL, TARGETS, Deployment, Observe, default_name, is_legal_name
from penstock.spec.gateway import is_loopback, setting_problems
from penstock.spec.scaling import replicas_rules
from penstock.spec.secret_names import without_secrets
from penstock.text import bare_flag


def read(source: str | Path, settings: Sequence[str] = ()) -> Deployment:
    """The deployment of a YAML file, or of a model: a folder, a file or a hub id.  Raises SpecError or UserError."""
    path = Path(source)
    try:
        if is_yaml(source) or (path.is_file() and path.suffix != ".gguf"):
            return load(path, settings)
        # A path is the same model from everywhere: `up` compares files by their values.
        # Path("") is the current folder, which an unset variable of a script does not mean.
        is_model_path = str(source) not in ("", DEMO_MODEL) and (path.is_dir() or path.is_file())
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        shown = str(source) if len(str(source)) <= 200 else f"{str(source)[:200]}..."
        raise UserError(f'could not read "{shown}": {why}', hint="Check the path.") from exc
    model = str(path.resolve()) if is_model_path else str(source)
    return from_mapping({"model": model}, f'model "{source}"', settings)


def is_yaml(source: str | Path) -> bool:
    return str(source).endswith((".yaml", ".yml"))


def load(path: Path, settings: Sequence[str] = ()) -> Deployment:
    """The deployment in a YAML file, with `key=value` settings applied over it.  Raises SpecError with all problems."""
    try:
        text = path.read_text("utf-8")
    except OSError as exc:
        problem = Problem("", f"could not read it: {exc.strerror}", "check the path")
        raise SpecError(f'file "{path}"', [problem]) from exc
    except UnicodeDecodeError as exc:
        raise SpecError(f'file "{path}"', [Problem("", "it is not UTF-8 text")]) from exc
    return parse(text, source=f'file "{path}"', settings=settings)


def parse(text: str, source: str = "the file", settings: Sequence[str] = ()) -> Deployment:
    import yaml

    try:
        twice = sorted(_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), ""))
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # an impossible date is a ValueError
        raise SpecError(source, [Problem("", "it is not YAML: " + " ".join(str(exc).split())[:300])]) from exc
    if twice:
        raise SpecError(source, [Problem(path, "is given twice", "keep one") for path in twice])
    return from_mapping({} if raw is None else raw, source, settings)


def _repeated_keys(node: Any, path: str) -> Iterator[str]:
    """Paths of keys that stand twice in one mapping; YAML itself takes the last."""
    if not isinstance(getattr(node, "value", None), list):
        return
    seen: set[str] = set()
    for item in node.value:
        if not isinstance(item, tuple):
            yield from _repeated_keys(item, path)
            continue
        key, value = item
        where = _join(path, key.value)
        if str(key.value) in seen:
            yield where
        seen.add(str(key.value))
        yield from _repeated_keys(value, where)


def from_mapping(raw: object, source: str = "the settings", settings: Sequence[str] = ()) -> Deployment:
    """The deployment in plain data (what YAML gives).  Raises SpecError with all problems."""
    if not isinstance(raw, Mapping):
        expected = f"expected key: value lines, got {_kind(raw)}"
        raise SpecError(source, [Problem("", expected, "try: model: penstock-demo")])
    merged, problems = _apply_settings(raw, settings)
    # "engine:" with nothing under it is as if absent.
    merged = {key: value for key, value in merged.items() if value is not None or key == "model"}
    replicas = merged.get("replicas")
    if isinstance(replicas, int) and not isinstance(replicas, bool):
        merged["replicas"] = {"min": replicas, "max": max(1, replicas)}
    elif isinstance(replicas, Mapping) and isinstance(replicas.get("min"), int) and "max" not in replicas:
        merged["replicas"] = {**replicas, "max": max(1, replicas["min"])}
    foreign = list(_foreign(merged, ""))
    if unprintable := [problem for problem in foreign if problem.message == _NOT_UTF8]:
        raise SpecError(source, unprintable)  # what else is wrong could not be shown
    if isinstance(merged.get("engine"), Mapping):
        merged["engine"] = _as_text(merged["engine"])
    told = [problem.path for problem in foreign]
    typed = _problems(merged, Deployment, "")
    # A list that holds a date is told once, by the date.
    problems += [
        *foreign,
        *(
            each
            for each in typed
            if not (each.message.startswith("expected") and any(_is_in(path, each.path) for path in told))
        ),
    ]
    bad = {re.split(r"[.\[]", problem.path)[0] for problem in problems}
    if "target" in bad:
        bad |= set(TARGETS)  # their blocks cannot be judged
    sound = {key: value for key, value in merged.items() if key not in bad}
    deployment = msgspec.convert({"model": DEMO_MODEL} | sound, Deployment)
    if not deployment.name:
        deployment = msgspec.structs.replace(deployment, name=default_name(deployment.model))
    if deployment.target in SHARED and (sound.get("gateway") or {}).get("auth") is None:
        gateway = msgspec.structs.replace(deployment.gateway, auth="keys")
        deployment = msgspec.structs.replace(deployment, gateway=gateway)
    problems += _rules(deployment)
    if problems:
        raise SpecError(source, problems)
    return deployment


_NOT_UTF8 = "is not UTF-8 text"
_LARGEST = 2**63 - 1  # what JSON readers and msgspec can hold


def _foreign(value: Any, path: str) -> Iterator[Problem]:
    """Values that YAML can make and a deployment cannot hold: it is kept as JSON, and sent as UTF-8."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            where = _join(path, key)
            yield from _foreign(item, where) if _is_utf8(key) else [Problem(ascii(where), _NOT_UTF8)]
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _foreign(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"{value} is not a finite number")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        yield Problem(path, "has more than 64 bits", "in quotes it is text")
    elif isinstance(value, str) and not _is_utf8(value):
        yield Problem(path, _NOT_UTF8)
    elif isinstance(value, datetime.date):
        yield Problem(path, f"{value} is a date in YAML", f'in quotes it is text: "{value}"')
    elif value is not None and not isinstance(value, str | int | float):
        yield Problem(path, f"cannot be {_FOREIGN.get(type(value), type(value).__name__)}", "give text or a list")


_FOREIGN: dict[type, str] = {bytes: "binary data", set: "a set"}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_in(path: str, whole: str) -> bool:
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))


def _as_text(engine: Mapping[str, Any]) -> dict[str, Any]:
    """`engine` with numbers of `env` as text (true is 1), and mappings of `args` as JSON."""
    env, args = engine.get("env"), engine.get("args")
    if isinstance(env, Mapping):
        scalars = {key: int(value) if isinstance(value, bool) else value for key, value in env.items()}
        env = {key: str(value) if isinstance(value, int | float) else value for key, value in scalars.items()}
    if isinstance(args, Mapping):
        # Dates and the like are told of elsewhere, as fields of the file.
        args = {
            key: json.dumps(value, default=str) if isinstance(value, Mapping) else value for key, value in args.items()
        }
    return {**engine, **{name: value for name, value in (("env", env), ("args", args)) if value is not None}}


def to_yaml(deployment: Deployment) -> str:
    """The resolved file: what `render` shows and a run folder keeps. Absent values are left out."""
    import yaml

    plain = _without_absent(msgspec.to_builtins(deployment), deployment)
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def differences(before: Deployment, after: Deployment) -> list[str]:
    """The changes from one deployment to another, one "path: old -> new" line each."""
    sides = [msgspec.to_builtins(side) for side in (before, after)]
    old, new = (dict(_leaves(side, "")) for side in sides)
    was, now = (dict(_leaves(without_secrets(side), "")) for side in sides)
    return [
        f"{path}: {_shown(was.get(path))} -> {_shown(now.get(path))}"
        for path in [*old, *(path for path in new if path not in old)]
        if old.get(path) != new.get(path)
    ]


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _shown(value: object) -> str:
    return "(not set)" if value is None else str(value)


def _without_absent(plain: Any, block: object) -> Any:
    """`plain`: what msgspec makes of `block`."""
    if not isinstance(plain, dict) or not isinstance(block, msgspec.Struct):
        return plain
    fields = {field.encode_name: field for field in msgspec.structs.fields(block)}
    kept = {}
    for key, item in plain.items():
        # What is inside a block of the user's own words is kept as it is: there a bare `key:` has a meaning.
        item = item if key in _FREE else _without_absent(item, getattr(block, fields[key].name))
        has_meaning = item is None and fields[key].default not in (None, msgspec.NODEFAULT)
        if has_meaning or item not in (None, {}, ()):
            kept[key] = item
    return kept


def _apply_settings(raw: Mapping[Any, Any], settings: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    import yaml

    merged: dict[str, Any] = _copied(raw)
    problems = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            problems.append(Problem("--set", f"{setting!r} is not key=value", "example: --set gateway.port=9000"))
            continue
        try:
            value = _copied(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError, RecursionError):
            value = text
        where = merged
        *parents, last = path.split(".")
        for parent in parents:
            child = where.get(parent)
            if not isinstance(child, dict):
                child = {}
            where[parent] = child
            where = child
        where[last] = value
    return merged, problems


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        # YAML 1.1 reads the bare key `on` as true: gateway.on is still written without quotes.
        return {"on" if key is True else str(key): _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):  # YAML's !!pairs has tuples
        return [_copied(item) for item in value]
    return value


def _problems(value: Mapping[str, Any], struct: type[msgspec.Struct], path: str) -> Iterator[Problem]:
    """All type problems of a mapping against a struct; msgspec itself stops at the first."""
    hints = typing.get_type_hints(struct)
    for key in value:
        if key not in hints:
            close = nearest(str(key), hints)
            hint = f'did you mean "{close}"?' if close else f"legal: {', '.join(hints)}"
            yield Problem(_join(path, key), "unknown key", hint)
    required = [field.name for field in msgspec.structs.fields(struct) if field.required]
    for name in required:
        if value.get(name) is None:
            example = f"example: {name}: {DEMO_MODEL}" if name == "model" else None
            yield Problem(_join(path, name), "is missing", example)
    for key, kind in hints.items():
        if key in value and not (key in required and value[key] is None):
            yield from _field_problems(value[key], kind, _join(path, key))


def _field_problems(value: Any, hint: Any, path: str) -> Iterator[Problem]:
    struct = _struct_in(hint)
    is_list = typing.get_origin(hint) is tuple
    if struct is not None and not is_list and isinstance(value, Mapping):
        yield from _problems(value, struct, path)
        return
    if struct is not None and is_list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _field_problems(item, struct, f"{path}[{index}]")
        return
    items = typing.get_args(hint)[:1] if typing.get_origin(hint) is tuple else ()
    if isinstance(value, list) and items and typing.get_origin(items[0]) is Literal:
        for index, item in enumerate(value):
            yield from _field_problems(item, items[0], f"{path}[{index}]")
        return
    if typing.get_origin(hint) is dict and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _field_problems(item, typing.get_args(hint)[1], _join(path, key))
        return
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        also = "a whole number or " if path == "replicas" else ""
        how = _choice_hint(value, hint) or _number_hint(value, hint)
        yield Problem(path, f"expected {also}{_expected(hint)}, got {_kind(value)}", how)


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    options = typing.get_args(hint) or (hint,)
    return next((each for each in options if isinstance(each, type) and issubclass(each, msgspec.Struct)), None)


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}


def _expected(hint: Any) -> str:
    if hint in _WORDS:
        return _WORDS[hint]
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(str(option) for option in options)
    if origin is typing.Union or isinstance(hint, types.UnionType):
        return " or ".join(dict.fromkeys(_expected(option) for option in options if option is not type(None)))
    if origin in (dict, Mapping) or _struct_in(hint):
        return "key: value lines"
    if origin in (list, tuple):
        return f"a list of {_WORDS[options[0]]}" if options[0] in _WORDS else "a list"
    return str(hint)


def _choice_hint(value: Any, hint: Any) -> str | None:
    close = nearest(value, [str(choice) for choice in _choices(hint)]) if isinstance(value, str) else None
    return f'did you mean "{close}"?' if close else None


# What YAML 1.1 reads as text, since its floats have a point and the exponent a sign.
_EXPONENT = re.compile(r"([-+]?[0-9]+)(\.[0-9]*)?[eE]([-+]?)([0-9]+)\Z")


def _number_hint(value: Any, hint: Any) -> str | None:
    match = _EXPONENT.match(value) if isinstance(value, str) and float in (hint, *typing.get_args(hint)) else None
    if match is None:
        return None
    whole, fraction, sign, exponent = match.groups()
    return f"in YAML a number has a point and a sign: {whole}{fraction or '.0'}e{sign or '+'}{exponent}"


def _choices(hint: Any) -> Iterable[object]:
    if typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    for option in typing.get_args(hint):
        yield from _choices(option)


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "key: value lines"
    if isinstance(value, (list, tuple)):
        return "a list that holds key: value lines" if any(isinstance(item, Mapping) for item in value) else "a list"
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


_DEVICE_VARIABLES = frozenset(f"{maker}_VISIBLE_DEVICES" for maker in ("CUDA", "NVIDIA", "ROCR", "HIP"))
_DEVICE_VARIABLES |= {"GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"}
_CHOOSE_GPUS = (
    "remove it; hardware.gpus_per_node sets how many GPUs a node gives, and on this machine `penstock up` uses only "
    "those in its own CUDA_VISIBLE_DEVICES"
)
_ENGINE_URL = re.compile(r"(http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?/?|unix:/.+)\Z")
_FREE = (
    *("args", "env", "runtime_env", "node_selector", "tolerations", "labels", "annotations", "patch"),
    *("secrets", "mounts", "imports", "exports"),
)


# Lower bounds (inclusive) by path; checked after the types.
# https://prometheus.io/docs/prometheus/latest/storage/#operational-aspects
_RETENTION = re.compile(r"([0-9]{1,9}(ms|[smhdwy]))+\Z")
_RETENTION_SIZE = re.compile(r"[0-9]{1,9}([KMGTPE]?B)\Z")
_PATH = re.compile(r"/?([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?/?\Z")
_HTTP_URL = re.compile(r"https?://[^\s@/]+(/\S*)?\Z")
_AT_LEAST: dict[str, float] = {
    "hardware.nodes": 1,
    "hardware.gpus_per_node": 0,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.data": 1,
    "engine.max_model_len": 1,
    "engine.start_timeout_s": 1,
    "engine.join_timeout_s": 1,
    "engine.stall_s": 1,
    "engine.drain_s": 0,
    "engine.sleep.after_s": 1,
    "workload.input_tokens": 1,
    "workload.output_tokens": 1,
    "workload.concurrency": 1,
    "replicas.min": 0,
    "replicas.max": 1,
    "replicas.idle_s": 0,
    "gateway.port": 0,
    "gateway.ledger_days": 1,
    "gateway.price.input": 0,
    "gateway.price.output": 0,
    "gateway.price.cached": 0,
    "gateway.hold_s": 0,
    "gateway.drain_s": 0,
    "hardware.price_per_gpu_hour": 0,
    "workload.ttft_ms": 0,
    "workload.tpot_ms": 0,
    "observe.port": 0,
    "ui.port": 0,
}


def _is_network(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_network(text, strict=False))
    return False


def _rules(deployment: Deployment) -> Iterator[Problem]:
    if not is_legal_name(deployment.name):
        yield Problem(
            "name",
            f'"{deployment.name}" is not a legal name',
            "lower-case letters, digits and dashes, at most 40, letter or digit at both ends",
        )
    if not deployment.model.strip():
        yield Problem("model", "is empty", f"example: model: {DEMO_MODEL}")
    values = dict(_leaves(msgspec.to_builtins(deployment), ""))
    for path, bound in _AT_LEAST.items():
        value = values.get(path)
        if isinstance(value, int | float) and value < bound:
            yield Problem(path, f"{value} is below {bound:g}")
        elif path.endswith(".port") and isinstance(value, int) and value > 65535:
            yield Problem(path, f"{value} is above 65535")
    if not 0 < deployment.engine.gpu_memory_utilization <= 1:
        yield Problem("engine.gpu_memory_utilization", f"{deployment.engine.gpu_memory_utilization} is not in (0, 1]")
    if deployment.hardware.price_file is not None and deployment.hardware.price_per_gpu_hour is not None:
        yield Problem("hardware.price_file", "is given next to hardware.price_per_gpu_hour", "keep one of them")
    if deployment.hardware.subnet is not None and not _is_network(deployment.hardware.subnet):
        yield Problem("hardware.network", f'"{deployment.hardware.subnet}" is not a network', "example: 10.9.0.0/16")
    yield from replicas_rules(deployment.replicas)
    if not re.fullmatch(r"[a-z0-9_]+", deployment.engine.load):
        yield Problem("engine.load", f'"{deployment.engine.load}" is not a load format', "example: runai_streamer")
    if deployment.engine.load != "auto" and any(bare_flag(key) == "load-format" for key in deployment.engine.args):
        yield Problem("engine.load", "is given next to engine.args.load-format", "keep one of them")
    opened = [route for route in deployment.gateway.engine_routes if not route.startswith("/v1/")]
    if deployment.engine.sleep is not None and opened:
        hint = "remove it: with engine.sleep the engine has routes there that call any of its methods"
        yield Problem("gateway.engine_routes", f'opens "{opened[0]}" next to engine.sleep', hint)
    for name in deployment.engine.env:
        if not name or "=" in name or "\0" in name:
            yield Problem("engine.env", f'"{name}" is not a name of an environment variable')
        elif name in _DEVICE_VARIABLES:
            yield Problem(f"engine.env.{name}", "overrides the GPUs that each replica is given", _CHOOSE_GPUS)
    if deployment.gateway.auth == "none" and not is_loopback(deployment.gateway.host):
        yield Problem(
            "gateway.auth",
            f'"none" on host {deployment.gateway.host}',
            "set gateway.auth: keys, or host: 127.0.0.1",
        )
    if _has_password(deployment.gateway.store):
        yield Problem("gateway.store", "has a password in it", "put it into ~/.pgpass or PGPASSWORD")
    if deployment.gateway.on == "job" and deployment.gateway.auth == "none":
        yield Problem(
            "gateway.auth", '"none" with on: job, where others reach it', "set gateway.auth: keys, or on: login"
        )
    yield from _observe_rules(deployment.observe)
    yield from _page_rules(deployment)
    needs_key = deployment.gateway.auth == "keys"
    for problem in setting_problems(deployment.gateway, needs_key):
        yield Problem(f"gateway.{problem.path}", problem.message, problem.hint)
    for index, upstream in enumerate(deployment.gateway.upstreams):
        path = f"gateway.upstreams[{index}]"
        if not _ENGINE_URL.match(upstream.url):
            yield Problem(f"{path}.url", f'"{upstream.url}" is not an engine\'s URL', "example: http://gpu7:8000")
        if upstream.model is not None:
            yield Problem(f"{path}.model", "a deployment serves one model, and upstreams serve it too", "remove it")
        if upstream.key_env is not None and deployment.gateway.on == "job":
            yield Problem(f"{path}.key_env", "a job has no such variable", "use key_file")
    for kind in TARGETS:
        if kind != deployment.target and getattr(deployment, kind, None) is not None:
            yield Problem(kind, f"block given, but target is {deployment.target}", f"set target: {kind}, or remove it")


def _observe_rules(observe: Observe) -> Iterator[Problem]:
    if not _RETENTION.match(observe.retention):
        yield Problem("observe.retention", f'"{observe.retention}" is no time of Prometheus', "example: 15d")
    if not _RETENTION_SIZE.match(observe.retention_size):
        yield Problem("observe.retention_size", f'"{observe.retention_size}" is no size of Prometheus', "example: 1GB")
    if observe.remote_write is not None and not _HTTP_URL.match(observe.remote_write.url):
        yield Problem(
            "observe.remote_write.url",
            f'"{observe.remote_write.url}" is no URL without a password',
            "example: https://metrics.example.org/api/v1/write; put the token into token_file",
        )
    for field in ("grafana", "prometheus_binary", "remote_write"):
        if getattr(observe, field) not in (None, False) and not observe.prometheus:
            yield Problem(f"observe.{field}", "given, but Prometheus is off", "set observe.prometheus: true")


def _page_rules(deployment: Deployment) -> Iterator[Problem]:
    page, gateway = deployment.chat_page, deployment.gateway
    if page is None:
        return
    is_same_machine = gateway.on == "login" and deployment.kubernetes is None
    if is_same_machine and page.port == gateway.port != 0:
        yield Problem("ui.port", f"{page.port} is the gateway's port", "choose another, such as 7860")
    if not page.host.strip():
        yield Problem("ui.host", "is empty", "example: 127.0.0.1")
    elif page.login == "none" and not is_loopback(page.host):
        hint = "set gateway.auth: keys and ui.login: keys, or ui.host: 127.0.0.1"
        yield Problem("ui.login", f'"none" on host {page.host}', hint)
    if page.login == "keys" and gateway.auth == "none":
        yield Problem("ui.login", '"keys", but the gateway has none', "set gateway.auth: keys")
    if page.root_path is not None and not _PATH.match(page.root_path):
        yield Problem("ui.root_path", f'"{page.root_path}" is no path', "example: /chat")


def _has_password(store: str | None) -> bool:
    if store is None or "://" not in store:
        return False
    try:
        return urlsplit(store).password is not None or "password=" in store
    except ValueError:
        return False
