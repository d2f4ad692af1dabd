"""Reads a deployment file and finds all its problems."""

from __future__ import annotations

import datetime
import ipaddress
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import Problem, SpecError, UserError, nearest
from penstock.spec.blocks import GPUS_FROM, SHARED
from penstock.spec.deployment import DEMO_MODEL, TARGETS, Deployment, default_name, is_legal_name
from penstock.spec.gateway import is_loopback, setting_problems
from penstock.spec.scaling import replicas_rules
from penstock.spec.secret_values import secret_problems, without_secrets
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
        shown = str(source) if len(str(source)) <= 200 else f"{str(source)[:200]}..."
        why = getattr(exc, "strerror", None) or exc
        raise UserError(f'could not read "{shown}": {why}', hint="Check the path.") from exc
    model = str(path.resolve()) if is_model_path else str(source)
    return from_mapping({"model": model}, f'model "{source}"', settings)


def is_yaml(source: str | Path) -> bool:
    return str(source).endswith((".yaml", ".yml"))


def load(path: Path, settings: Sequence[str] = ()) -> Deployment:
    """The deployment in a YAML file, with `key=value` settings applied over it.  Raises SpecError with all problems."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        problem = Problem("", "it is not UTF-8 text")
        if isinstance(exc, OSError):
            problem = Problem("", f"could not read it: {exc.strerror}", "check the path")
        raise SpecError(f'file "{path}"', [problem]) from exc
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
    seen: set[str] = set()
    for item in node.value if isinstance(getattr(node, "value", None), list) else ():
        key, value = item if isinstance(item, tuple) else (None, item)
        where = _join(path, key.value) if key else path
        if key and where in seen:
            yield where
        seen.add(where)
        yield from _repeated_keys(value, where)


def from_mapping(raw: object, source: str = "the settings", settings: Sequence[str] = ()) -> Deployment:
    """The deployment in plain data (what YAML gives).  Raises SpecError with all problems."""
    if not isinstance(raw, Mapping):
        problem = Problem("", f"expected key: value lines, got {_kind(raw)}", f"try: model: {DEMO_MODEL}")
        raise SpecError(source, [problem])
    merged, problems = _apply_settings(raw, settings)
    # "engine:" with nothing under it is as if absent.
    merged = {key: value for key, value in merged.items() if value is not None or key == "model"}
    replicas = merged.get("replicas")
    if isinstance(replicas, int) and not isinstance(replicas, bool):
        merged["replicas"] = {"min": replicas, "max": max(1, replicas)}
    elif isinstance(replicas, Mapping) and isinstance(replicas.get("min"), int) and "max" not in replicas:
        merged["replicas"] = {**replicas, "max": max(1, replicas["min"])}
    foreign = list(_foreign(merged))
    if unprintable := [problem for problem in foreign if problem.message == _NOT_UTF8]:
        raise SpecError(source, unprintable)  # what else is wrong could not be shown
    if isinstance(merged.get("engine"), Mapping):
        merged["engine"] = _as_text(merged["engine"])
    problems += foreign
    for problem in _problems(merged, Deployment, ""):
        # A list that holds a date is reported once, by the date.
        is_known = any(re.match(re.escape(problem.path) + r"(\Z|[.\[])", each.path) for each in foreign)
        if not (is_known and problem.message.startswith("expected")):
            problems.append(problem)
    bad = {re.split(r"[.\[]", problem.path)[0] for problem in problems}
    bad |= set(TARGETS) if "target" in bad else set()  # their blocks cannot be judged
    sound = {key: value for key, value in merged.items() if key not in bad}
    deployment = msgspec.convert({"model": DEMO_MODEL} | sound, Deployment)
    if not deployment.name:
        deployment = msgspec.structs.replace(deployment, name=default_name(deployment.model))
    if deployment.target in SHARED and (sound.get("gateway") or {}).get("auth") is None:
        gateway = msgspec.structs.replace(deployment.gateway, auth="keys")
        deployment = msgspec.structs.replace(deployment, gateway=gateway)
    secret = {problem.path: problem for problem in secret_problems(deployment)}  # others of that path may show it
    problems += [*secret.values(), *(problem for problem in _rules(deployment) if problem.path not in secret)]
    if problems:
        raise SpecError(source, problems)
    return deployment


_NOT_UTF8 = "is not UTF-8 text"
_SURROGATE = re.compile("[\ud800-\udfff]")


def _foreign(merged: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that YAML can make and a deployment cannot hold: it is kept as JSON, and sent as UTF-8."""
    for path, value in _leaves(merged, ""):
        if _SURROGATE.search(path) or (isinstance(value, str) and _SURROGATE.search(value)):
            yield Problem(ascii(path) if _SURROGATE.search(path) else path, _NOT_UTF8)
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(path, f"{value} is not a finite number")
        elif isinstance(value, int) and abs(value) >= 2**63:  # more than JSON readers and msgspec hold
            yield Problem(path, "has more than 64 bits", "in quotes it is text")
        elif isinstance(value, datetime.date):
            yield Problem(path, f"{value} is a date in YAML", f'in quotes it is text: "{value}"')
        elif value is not None and not isinstance(value, str | int | float | list):
            kind = {"bytes": "binary data", "set": "a set"}.get(type(value).__name__, type(value).__name__)
            yield Problem(path, f"cannot be {kind}", "give text or a list")


def _scalar_as_text(value: Any) -> Any:
    """A variable with numbers as text (true is 1)."""
    if isinstance(value, Mapping):
        return {key: item if key == "secret" else _scalar_as_text(item) for key, item in value.items()}
    return str(int(value) if isinstance(value, bool) else value) if isinstance(value, int | float) else value


def _as_text(engine: Mapping[str, Any]) -> dict[str, Any]:
    """`engine` with numbers of `env` as text (true is 1), and mappings of `args` as JSON."""
    texts = dict(engine)
    if isinstance(env := engine.get("env"), Mapping):
        texts["env"] = {key: _scalar_as_text(value) for key, value in env.items()}
    if isinstance(args := engine.get("args"), Mapping):
        # Dates and the like are told of elsewhere, as fields of the file.
        plain = {key: json.dumps(value, default=str) for key, value in args.items() if isinstance(value, Mapping)}
        texts["args"] = {**args, **plain}
    return texts


def to_yaml(deployment: Deployment) -> str:
    """The resolved file: what `render` shows and a run folder keeps. Absent values are left out."""
    import yaml

    plain = _without_absent(msgspec.to_builtins(deployment), deployment)
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def differences(before: Deployment, after: Deployment) -> list[str]:
    """The changes from one deployment to another, one "path: old -> new" line each."""
    sides = [msgspec.to_builtins(side) for side in (before, after)]
    old, new = (dict(_leaves(side, "")) for side in sides)
    was, now = ({path: item for path, item in _leaves(without_secrets(side), "") if item is not None} for side in sides)
    changed = [path for path in old | new if old.get(path) != new.get(path)]
    return [f"{path}: {was.get(path, '(not set)')} -> {now.get(path, '(not set)')}" for path in changed]


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, _join(path, key))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _without_absent(plain: Any, block: object) -> Any:
    """`plain`: what msgspec makes of `block`. In mappings of the user's own words a bare `key:` has a meaning."""
    if not isinstance(plain, dict) or not isinstance(block, msgspec.Struct):
        return plain
    fields = {field.encode_name: field for field in msgspec.structs.fields(block)}
    kept = {}
    for key, item in plain.items():
        item = _without_absent(item, getattr(block, fields[key].name))
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
            where[parent] = where = child if isinstance(child, dict) else {}
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
    required = {field.name for field in msgspec.structs.fields(struct) if field.required}
    for key, kind in hints.items():
        if key in required and value.get(key) is None:
            example = f"example: {key}: {DEMO_MODEL}" if key == "model" else None
            yield Problem(_join(path, key), "is missing", example)
        elif key in value:
            yield from _field_problems(value[key], kind, _join(path, key))


def _field_problems(value: Any, hint: Any, path: str) -> Iterator[Problem]:
    kinds = (hint, *typing.get_args(hint))
    struct = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)), None)
    items = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple), None)
    if isinstance(value, list) and items is not None:
        for index, item in enumerate(value):
            yield from _field_problems(item, items, f"{path}[{index}]")
    elif struct is not None and items is None and isinstance(value, Mapping):
        yield from _problems(value, struct, path)
    elif isinstance(value, Mapping) and typing.get_origin(hint) is dict:
        for key, item in value.items():
            yield from _field_problems(item, kinds[2], _join(path, key))
    else:
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            also = "a whole number or " if path == "replicas" else ""
            yield Problem(path, f"expected {also}{_expected(hint)}, got {_kind(value)}", _how(value, hint))


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}


def _expected(hint: Any) -> str:
    if hint in _WORDS:
        return _WORDS[hint]
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(str(option) for option in options)
    if origin is typing.Union or isinstance(hint, types.UnionType):
        return " or ".join(dict.fromkeys(_expected(option) for option in options if option is not type(None)))
    if origin in (list, tuple):
        return {str: "a list of text", int: "a list of whole numbers"}.get(options[0], "a list")
    return "key: value lines"


# What YAML 1.1 reads as text, since its floats have a point and the exponent a sign.
_EXPONENT = re.compile(r"([-+]?[0-9]+)(\.[0-9]*)?[eE]([-+]?)([0-9]+)\Z")


def _how(value: Any, hint: Any) -> str | None:
    if not isinstance(value, str):
        return None
    if hint is int and value.startswith(("GPU-", "MIG-")):
        return "the number of the whole GPU in nvidia-smi -L"
    kinds = (hint, *typing.get_args(hint))
    choices = [kind for kind in kinds if typing.get_origin(kind) is Literal]
    if close := nearest(value, [str(choice) for kind in choices for choice in typing.get_args(kind)]):
        return f'did you mean "{close}"?'
    match = _EXPONENT.match(value) if float in kinds else None
    how = "in YAML a number has a point and a sign: "
    return match and f"{how}{match[1]}{match[2] or '.0'}e{match[3] or '+'}{match[4]}"


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


_DEVICES = re.compile(r"(\w+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|CUDA_DEVICE_ORDER(?!=PCI_BUS_ID\Z))=")
_ENGINE_URL = r"http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?/?|unix:/.+"
# Texts by path without indices, what is said of others, and an example.
_PATTERNS = {
    "model": (r"(?s).*\S.*", "is no model", DEMO_MODEL),
    "engine.load": (r"[a-z0-9_]+", "is not a load format", "runai_streamer"),
    "engine.version": (r"\d+\.\d+\.\d+[\w.+]*", "is no version of an engine", '"0.33.0"'),
    # https://prometheus.io/docs/prometheus/latest/storage/#operational-aspects
    "observe.retention": (r"([0-9]{1,9}(ms|[smhdwy]))+", "is no time of Prometheus", "15d"),
    "observe.retention_size": (r"[0-9]{1,9}([KMGTPE]?B)", "is no size of Prometheus", "1GB"),
    "observe.remote_write.url": (r"https?://[^\s@/]+(/\S*)?", "is no URL without a login", "https://a.example/api"),
    "gateway.upstreams.url": (_ENGINE_URL, "is not an engine's URL", "http://gpu7:8000"),
    "ui.root_path": (r"/?([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?/?", "is no path", "/chat"),
}
_UNBOUNDED = (-math.inf, math.inf)
# Least and most (inclusive) by path without indices; checked after the types.
BOUNDS = {
    (0, math.inf): r"hardware\.(gpus_per_node|gpu_ids|price_per_gpu_hour)|engine\.drain_s|replicas\.(min|idle_s)"
    r"|workload\.(ttft|tpot)_ms|gateway\.(hold_s|drain_s|price\.(input|output|cached))|slurm\.successor_s",
    (1, math.inf): r"hardware\.nodes|parallel\.(tensor|pipeline|data)|replicas\.(max|(up|down)\.policies\.value)"
    r"|workload\.(input_tokens|output_tokens|concurrency)|gateway\.(ledger_days|keys_stale_s)|slurm\.cpus_per_node"
    r"|engine\.(max_model_len|start_timeout_s|join_timeout_s|stall_s|sleep\.after_s)",
    (0, 65535): r"(gateway|observe|ui)\.port",
    (0, 3600): r"replicas\.(up|down)\.stabilization_window_seconds",  # HPA's, as the next
    (1, 1800): r"replicas\.(up|down)\.policies\.period_seconds",
}


def _rules(deployment: Deployment) -> Iterator[Problem]:
    hardware, engine, gateway = deployment.hardware, deployment.engine, deployment.gateway
    if not is_legal_name(deployment.name):
        hint = "lower-case letters, digits and dashes, at most 40, letter or digit at both ends"
        yield Problem("name", f'"{deployment.name}" is not a legal name', hint)
    for path, value in _leaves(msgspec.to_builtins(deployment), ""):
        name = re.sub(r"\[\d+\]", "", path)
        least, most = next((bounds for bounds, names in BOUNDS.items() if re.fullmatch(names, name)), _UNBOUNDED)
        if isinstance(value, int | float) and not least <= value <= most:
            yield Problem(path, f"{value} is below {least}" if value < least else f"{value} is above {most}")
        elif isinstance(value, str) and name in _PATTERNS and not re.fullmatch(_PATTERNS[name][0], value):
            yield Problem(path, f'"{value}" {_PATTERNS[name][1]}', f"example: {_PATTERNS[name][2]}")
    if not 0 < engine.gpu_memory_utilization <= 1:
        yield Problem("engine.gpu_memory_utilization", f"{engine.gpu_memory_utilization} is not in (0, 1]")
    if hardware.price_file is not None and hardware.price_per_gpu_hour is not None:
        yield Problem("hardware.price_file", "is given next to hardware.price_per_gpu_hour", "keep one of them")
    networks = [("hardware.network", hardware.subnet or "::")]
    if deployment.chat_page is not None:
        networks += [("ui.trusted_proxies", each) for each in deployment.chat_page.trusted_proxies]
    for path, text in networks:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            yield Problem(path, f'"{text}" is not a network', "example: 10.9.0.0/16")
    yield from replicas_rules(deployment.replicas)
    if engine.load != "auto" and any(bare_flag(key) == "load-format" for key in engine.args):
        yield Problem("engine.load", "is given next to engine.args.load-format", "keep one of them")
    opened = [route for route in gateway.engine_routes if not route.startswith("/v1/")]
    if engine.sleep is not None and opened:
        hint = "remove it: with engine.sleep the engine has routes there that call any of its methods"
        yield Problem("gateway.engine_routes", f'opens "{opened[0]}" next to engine.sleep', hint)
    ids, n_gpus, chooser = hardware.gpu_ids, hardware.gpus_per_node or 0, GPUS_FROM.get(deployment.target)
    for name, value in engine.variables.items():
        if not name or "=" in name or "\0" in name:
            yield Problem("engine.env", f'"{name}" is not a name of an environment variable')
        elif _DEVICES.match(f"{name}={value}"):
            like = value if re.fullmatch(r"\d+(, ?\d+)*", value) else "2, 3"
            hint = f"remove it: {chooser} chooses them" if chooser else f"remove it, and set hardware.gpu_ids: [{like}]"
            yield Problem(f"engine.env.{name}", "overrides the GPUs that each replica is given", hint)
    if ids is not None and chooser is not None:
        yield Problem("hardware.gpu_ids", f"given, but {chooser} chooses the GPUs of each replica", "remove it")
    elif ids is not None and len({*ids}) < max(1, len(ids)):
        yield Problem("hardware.gpu_ids", "names a GPU twice" if ids else "names no GPU", "example: [2, 3]")
    elif ids is not None and n_gpus > len(ids):
        yield Problem("hardware.gpus_per_node", f"{n_gpus}, but hardware.gpu_ids names {len(ids)}", "remove it")
    if gateway.auth == "none" and not is_loopback(gateway.host):
        yield Problem("gateway.auth", f'"none" on host {gateway.host}', "set gateway.auth: keys, or host: 127.0.0.1")
    if gateway.on == "job" and gateway.auth == "none":
        hint = "set gateway.auth: keys, or on: login"
        yield Problem("gateway.auth", '"none" with on: job, where others reach it', hint)
    for field in ("grafana", "prometheus_binary", "remote_write"):
        if getattr(deployment.observe, field) not in (None, False) and not deployment.observe.prometheus:
            yield Problem(f"observe.{field}", "given, but Prometheus is off", "set observe.prometheus: true")
    yield from _page_rules(deployment)
    for problem in setting_problems(gateway, needs_key=gateway.auth == "keys"):
        yield Problem(f"gateway.{problem.path}", problem.message, problem.hint)
    for index, upstream in enumerate(gateway.upstreams):
        path = f"gateway.upstreams[{index}]"
        if upstream.model is not None:
            yield Problem(f"{path}.model", "a deployment serves one model, and upstreams serve it too", "remove it")
        if upstream.key_env is not None and gateway.on == "job":
            yield Problem(f"{path}.key_env", "a job has no such variable", "use key_file")
    for kind in TARGETS:
        if kind != deployment.target and getattr(deployment, kind, None) is not None:
            yield Problem(kind, f"block given, but target is {deployment.target}", f"set target: {kind}, or remove it")


def _page_rules(deployment: Deployment) -> Iterator[Problem]:
    page, gateway = deployment.chat_page, deployment.gateway
    if page is None:
        return
    if gateway.on == "login" and deployment.kubernetes is None and page.port == gateway.port != 0:
        yield Problem("ui.port", f"{page.port} is the gateway's port", "choose another, such as 7860")
    if not page.host.strip():
        yield Problem("ui.host", "is empty", "example: 127.0.0.1")
    elif page.login == "none" and not is_loopback(page.host):
        hint = "set gateway.auth: keys and ui.login: keys, or ui.host: 127.0.0.1"
        yield Problem("ui.login", f'"none" on host {page.host}', hint)
    if page.login == "keys" and gateway.auth == "none":
        yield Problem("ui.login", '"keys", but the gateway has none', "set gateway.auth: keys")
